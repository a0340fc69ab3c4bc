"""Search a folder of vectors exactly, and what such a search needs and gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from st_aggretriever.search.exact import Hits, search
from st_aggretriever.vectors.blocks import check_dtype
from st_aggretriever.vectors.folder import READ_BYTES, VectorFolder, check_comparable
from st_aggretriever.vectors.manifest import counted, size_of


def describe_search(
    index: VectorFolder | Sequence[VectorFolder], queries: int, dtype: str | None = None, *, exact: bool = True
) -> str:
    """One line on the size of a search, to be printed before it: vectors, bytes on disk and, if exact, in memory."""
    folders = [index] if isinstance(index, VectorFolder) else list(index)
    manifest, dimension = folders[0].manifest, folders[0].dimension
    rows = sum(folder.rows for folder in folders)
    itemsize = np.dtype(dtype or manifest["dtype"]).itemsize
    piece = min(rows * dimension * 4, max(READ_BYTES, manifest["block_size"] * dimension * 4))
    shards = f" in {counted(len(folders), 'folder')}" if len(folders) > 1 else ""
    searched = (
        f", searched as {dtype or manifest['dtype']} ({size_of(rows * dimension * itemsize)}), in pieces of up to "
        f"{size_of(piece)}, two in memory"
    )
    return (
        f"{counted(rows, 'vector')} of {counted(dimension, 'dimension')} by {manifest['model']}{shards}, "
        f"{size_of(sum(folder.size for folder in folders))} on disk as {manifest['dtype']}{searched if exact else ''}; "
        f"{counted(queries, 'query')}"
    )


def search_exactly(
    index: VectorFolder,
    query_vectors: np.ndarray,
    top_k: int,
    *,
    dtype: str | None = None,
    backend: str = "auto",
    device: str | None = None,
) -> Hits:
    """The ``top_k`` documents of the largest inner product; memory holds two pieces and the running top-k.

    Args:
        dtype: ``"float16"`` searches numbers rounded to half precision; None those on disk.
        top_k, backend, device: See :func:`st_aggretriever.search.exact.search`.
    """
    if dtype is not None:
        check_dtype(dtype)
    return search(query_vectors, index.blocks(dtype), top_k, backend=backend, device=device)


def recall(hits: Hits, exact: Hits) -> float:
    """Mean over queries of the share of the exact documents that were found.

    >>> one, two = np.array([["a", "b"]], object), np.array([["b", "c"]], object)
    >>> recall(Hits(np.zeros((1, 2), np.float32), one), Hits(np.zeros((1, 2), np.float32), two))
    0.5
    """
    rows = zip(hits.ids.tolist(), exact.ids.tolist(), strict=True)
    return float(np.mean([len(set(found) & set(best)) / len(best) for found, best in rows]))


def rankings_of(query_ids: list[str], hits: Hits) -> dict[str, dict[str, float]]:
    """Query id -> document id -> score, best first."""
    return {
        query: {key: score for key, score in zip(ids, scores, strict=True) if key is not None}
        for query, ids, scores in zip(query_ids, hits.ids.tolist(), hits.scores.tolist(), strict=True)
    }


def load_queries(folder: str | Path | VectorFolder, index: VectorFolder) -> tuple[list[str], np.ndarray]:
    """Ids and vectors of a folder of query vectors that fits ``index``; both folded, or neither.

    Raises:
        ValueError: Its vectors were made by another model or setting.
    """
    queries = folder if isinstance(folder, VectorFolder) else VectorFolder(folder)
    if (queries.manifest["side"], index.manifest["side"]) == ("document", "query"):
        raise ValueError(
            f"{queries.folder} holds document vectors and {index.folder} query vectors: the two are swapped. Name"
            " documents by --index, queries by --queries."
        )
    check_comparable(queries.manifest, index.manifest)
    return queries.load()
