"""A collection in Qdrant: a server by its address, or a folder in the client's own local mode."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from st_aggretriever.export.stores import refuse_other


class Qdrant:
    """A Qdrant collection by inner product; Qdrant's points bear UUIDs, so a document's id is the payload ``id``.

    Args:
        uri: ``http://HOST:PORT``, or for the client's local mode, which is exact, slow and meant for trying out, a
            folder or ``":memory:"``.
        collection: Its name.
        api_key: Of the server.

    Raises:
        ImportError: qdrant-client is missing.
        ValueError: A name that no collection can have.
        OSError: Nothing answers at the address.
    """

    def __init__(self, uri: str, collection: str, *, api_key: str | None = None) -> None:
        try:
            from qdrant_client import QdrantClient
        except ImportError as error:
            raise ImportError(f'export qdrant: {error}. Install it by: pip install "st-aggretriever[qdrant]"') from None
        if not re.fullmatch(r"[^<>:\"/\\|?*\0]{1,255}", collection):
            raise ValueError(
                "export qdrant: a collection's name must have up to 255 characters and none of <>:\"/\\|?*, got"
                f" {collection!r}."
            )
        self.collection = collection
        if "://" in uri:
            where = {"url": uri, "api_key": api_key}
        else:
            where = {"location": uri} if uri == ":memory:" else {"path": uri}
            if not Path(uri).absolute().parent.is_dir():
                raise FileNotFoundError(f"export qdrant: there is no folder {Path(uri).absolute().parent}.")
        with self._told(f"{uri} can't be opened: "):
            self.client: Any = QdrantClient(**where)
            self.client.get_collections()

    @contextmanager
    def _told(self, what: str = "") -> Iterator[None]:
        """What the client says as an OSError: its errors, the HTTP library's, RuntimeError for a folder in use."""
        try:
            yield
        except Exception as error:
            raise OSError(f"export qdrant: {what}{error}") from None

    def create(self, dimension: int) -> None:
        from qdrant_client import models

        with self._told():
            if not self.client.collection_exists(self.collection):
                settings = models.VectorParams(size=dimension, distance=models.Distance.DOT)
                self.client.create_collection(self.collection, vectors_config=settings)
                return
            found = self.client.get_collection(self.collection).config.params.vectors
        refuse_other(self.collection, "vectors", type(found).__name__, "VectorParams")  # others have names
        refuse_other(self.collection, "dimension", found.size, dimension)
        refuse_other(self.collection, "metric", str(found.distance.value), models.Distance.DOT.value)

    def get(self, ids: Sequence[str]) -> dict[str, np.ndarray]:
        points = [point_of(key) for key in ids]
        with self._told():
            rows = self.client.retrieve(self.collection, ids=points, with_payload=True, with_vectors=True)
        return {row.payload["id"]: np.array(row.vector, np.float32) for row in rows}

    def add(self, ids: Sequence[str], vectors: np.ndarray) -> None:
        from qdrant_client import models

        points = [point_of(key) for key in ids]
        batch = models.Batch(ids=points, vectors=vectors.tolist(), payloads=[{"id": key} for key in ids])
        with self._told():
            self.client.upsert(self.collection, batch, wait=True)

    def count(self) -> int:
        with self._told():
            return int(self.client.count(self.collection, exact=True).count)

    def search(self, queries: np.ndarray, top_k: int) -> list[list[str]]:
        """Ids of the largest inner products of each query, exactly, as an application would ask for them."""
        from qdrant_client import models

        options = {"limit": top_k, "search_params": models.SearchParams(exact=True), "with_payload": True}
        rows = [self.client.query_points(self.collection, query=query.tolist(), **options).points for query in queries]
        return [[point.payload["id"] for point in row] for row in rows]

    def close(self) -> None:
        self.client.close()


def point_of(key: str) -> str:
    """The UUID of a document's point: the same id always gets the same one."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, key))
