"""A collection in Qdrant: a server by its address, or a folder in the client's own local mode."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
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
        OSError: Nothing answers at the address.
    """

    def __init__(self, uri: str, collection: str, *, api_key: str | None = None) -> None:
        try:
            from qdrant_client import QdrantClient
        except ImportError as error:
            raise ImportError(f'export qdrant: {error}. Install it by: pip install "st-aggretriever[qdrant]"') from None
        self.collection = collection
        if "://" in uri:
            where = {"url": uri, "api_key": api_key}
        else:
            where = {"location": uri} if uri == ":memory:" else {"path": uri}
            if not Path(uri).absolute().parent.is_dir():
                raise FileNotFoundError(f"export qdrant: there is no folder {Path(uri).absolute().parent}.")
        try:
            self.client: Any = QdrantClient(**where)
            self.client.get_collections()
        except Exception as error:  # the HTTP library's and the client's own, and RuntimeError for a folder in use
            raise OSError(f"export qdrant: {uri} can't be opened: {error}") from None

    def create(self, dimension: int) -> None:
        from qdrant_client import models

        if self.client.collection_exists(self.collection):
            found = self.client.get_collection(self.collection).config.params.vectors
            refuse_other(self.collection, "dimension", getattr(found, "size", None), dimension)
            refuse_other(self.collection, "metric", str(found.distance.value), models.Distance.DOT.value)
            return
        settings = models.VectorParams(size=dimension, distance=models.Distance.DOT)
        self.client.create_collection(self.collection, vectors_config=settings)

    def get(self, ids: Sequence[str]) -> dict[str, np.ndarray]:
        points = [point_of(key) for key in ids]
        rows = self.client.retrieve(self.collection, ids=points, with_payload=True, with_vectors=True)
        return {row.payload["id"]: np.array(row.vector, np.float32) for row in rows}

    def add(self, ids: Sequence[str], vectors: np.ndarray) -> None:
        from qdrant_client import models

        points = [point_of(key) for key in ids]
        batch = models.Batch(ids=points, vectors=vectors.tolist(), payloads=[{"id": key} for key in ids])
        self.client.upsert(self.collection, batch, wait=True)

    def count(self) -> int:
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
