"""A collection in Milvus: an embedded file, or a cluster by its address."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from st_aggretriever.export.stores import refuse_other

LONGEST_ID = 65_535  # bytes, Milvus's limit for a string
# Indexes of float vectors whose settings have defaults: of the embedded Milvus, and what a server knows beside these.
EMBEDDED = ("FLAT", "AUTOINDEX", "HNSW", "HNSW_SQ", "IVF_FLAT", "IVF_SQ8")
SERVER = (*EMBEDDED, "IVF_RABITQ", "SCANN", "DISKANN", "GPU_BRUTE_FORCE", "GPU_CAGRA", "GPU_IVF_FLAT")


class Milvus:
    """A Milvus collection with the fields ``id`` (string, primary) and ``vector``, its index by inner product.

    Args:
        uri: ``http://HOST:PORT``, or the path of a file for the embedded Milvus.
        collection: Its name.
        token: ``USER:PASSWORD`` or a key.
        index: ``"FLAT"`` is exact; ``"AUTOINDEX"``, ``"HNSW"`` and others leave their settings to the server. An
            embedded file takes those of ``EMBEDDED``, a server those of ``SERVER``.

    Raises:
        ValueError: Another index, or a name that no collection can have.
        ImportError: pymilvus is missing.
        OSError: Nothing answers at the address, or the file can't be opened.
    """

    def __init__(self, uri: str, collection: str, *, token: str | None = None, index: str = "FLAT") -> None:
        known = SERVER if "://" in uri else EMBEDDED
        if index not in known:
            where = "a server" if "://" in uri else "an embedded file"
            raise ValueError(f"export milvus: the index of {where} must be one of {', '.join(known)}, got {index!r}.")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,254}", collection):
            raise ValueError(
                "export milvus: a collection's name must be up to 255 letters, digits and underscores, no digit first,"
                f" got {collection!r}."
            )
        try:
            from pymilvus import MilvusClient, MilvusException
        except ImportError as error:
            raise ImportError(f'export milvus: {error}. Install it by: pip install "st-aggretriever[milvus]"') from None
        if "://" not in uri and not Path(uri).absolute().parent.is_dir():
            raise FileNotFoundError(f"export milvus: there is no folder {Path(uri).absolute().parent}.")
        if "://" not in uri and not uri.endswith(".db"):
            raise ValueError(f"export milvus: an embedded file's name must end with .db, got {uri!r}.")
        self.collection, self.index = collection, index
        self._failure = MilvusException
        with self._told(f"{uri} can't be opened: "):
            self.client: Any = MilvusClient(uri=uri, token=token or "")

    @contextmanager
    def _told(self, what: str = "") -> Iterator[None]:
        """Milvus's own error as an OSError of one sentence."""
        try:
            yield
        except self._failure as error:
            raise OSError(f"export milvus: {what}{error.message}") from None

    def create(self, dimension: int) -> None:
        from pymilvus import DataType

        with self._told():
            if self.client.has_collection(self.collection):
                self._check(dimension)
                self.client.load_collection(self.collection)
                return
            schema = self.client.create_schema(auto_id=False, enable_dynamic_field=False)
            schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=LONGEST_ID)
            schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dimension)
            index = self.client.prepare_index_params()
            index.add_index("vector", index_type=self.index, metric_type="IP")
            # "Strong": what was added before is seen by the next question, or a second export would add it again.
            options: dict[str, Any] = {"schema": schema, "index_params": index, "consistency_level": "Strong"}
            self.client.create_collection(self.collection, **options)

    def _check(self, dimension: int) -> None:
        fields = {field["name"]: field for field in self.client.describe_collection(self.collection)["fields"]}
        refuse_other(self.collection, "fields", sorted(fields), ["id", "vector"])
        refuse_other(self.collection, "dimension", fields["vector"]["params"].get("dim"), dimension)
        metric = self.client.describe_index(self.collection, "vector")["metric_type"]
        refuse_other(self.collection, "metric", metric, "IP")

    def get(self, ids: Sequence[str]) -> dict[str, np.ndarray]:
        # Not client.get, which puts ids between quotes as they are: one with a quote in it would break the filter. The
        # embedded Milvus takes no filter parameters; JSON's escapes are those of both.
        wanted = f"id in {json.dumps(list(ids), ensure_ascii=False)}"
        with self._told():
            rows = self.client.query(self.collection, filter=wanted, output_fields=["id", "vector"])
        return {row["id"]: np.array(row["vector"], np.float32) for row in rows}

    def add(self, ids: Sequence[str], vectors: np.ndarray) -> None:
        long = next((key for key in ids if len(key.encode()) > LONGEST_ID), None)
        if long is not None:
            raise ValueError(f"export milvus: the id {long[:40]!r}... has more than the {LONGEST_ID:,} bytes that fit.")
        rows = [{"id": key, "vector": vector} for key, vector in zip(ids, vectors, strict=True)]
        with self._told():
            self.client.insert(self.collection, rows)

    def count(self) -> int:
        with self._told():
            return int(self.client.query(self.collection, filter="", output_fields=["count(*)"])[0]["count(*)"])

    def search(self, queries: np.ndarray, top_k: int) -> list[list[str]]:
        """Ids of the largest inner products of each query, as an application would ask for them."""
        with self._told():
            hits = self.client.search(self.collection, list(queries), limit=top_k, search_params={"metric_type": "IP"})
        return [[hit["id"] for hit in row] for row in hits]

    def close(self) -> None:
        self.client.close()
