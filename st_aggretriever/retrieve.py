"""Search a folder of vectors: exactly, or by one of Faiss's approximate indexes with its recall against exact."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from st_aggretriever.search import Hits, check_vectors, pick_backend, search
from st_aggretriever.vectors import READ_BYTES, VectorFolder, check_comparable, check_dtype

logger = logging.getLogger(__name__)

TRAINING_VECTORS = 100_000  # that an approximate index learns its cells and codes from, at most


class Approximate(NamedTuple):
    """An index by the name that Faiss's ``index_factory`` gives it."""

    factory: str  # for instance "IVF1024,PQ96", "HNSW32", "IVF4096,Flat"
    parameters: str = ""  # of the search, for instance "nprobe=32" or "efSearch=128"


def describe_search(index: VectorFolder, queries: int, dtype: str | None = None) -> str:
    """One line on the size of a search, to be printed before it: vectors, bytes on disk and in memory."""
    itemsize = np.dtype(dtype or index.manifest["dtype"]).itemsize
    piece = min(index.rows * index.dimension * 4, max(READ_BYTES, index.manifest["block_size"] * index.dimension * 4))
    return (
        f"{index.rows:,} vectors of {index.dimension} dimensions by {index.manifest['model']}, "
        f"{_bytes(index.size)} on disk as {index.manifest['dtype']}, searched as {dtype or index.manifest['dtype']} "
        f"({_bytes(index.rows * index.dimension * itemsize)}), in pieces of up to {_bytes(piece)}, two in memory; "
        f"{queries:,} queries"
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
        top_k, backend, device: See :func:`st_aggretriever.search.search`.
    """
    if dtype is not None:
        check_dtype(dtype)
    return search(query_vectors, index.blocks(dtype), top_k, backend=backend, device=device)


def search_approximately(
    index: VectorFolder, query_vectors: np.ndarray, top_k: int, approximate: Approximate
) -> tuple[Hits, dict[str, Any]]:
    """The ``top_k`` documents that an approximate Faiss index finds, on the CPU, and what it costs.

    The index is trained on vectors spread evenly over the folder, filled block by block and kept in memory; the inner
    product is its measure. Its recall is the share of the exact ``top_k`` (by :func:`search_exactly`, all queries)
    among what it found.

    Returns:
        Hits, where a query that has fewer than ``top_k`` is filled up with id None and score -inf; and a report:
        ``recall``, ``bytes`` of the index, ``seconds`` of training and filling, of its search and of the exact one.

    Raises:
        ValueError: Faiss doesn't know the index or the parameters, or there are too few vectors to train it.
        ImportError: No working Faiss.
    """
    pick_backend("faiss", "cpu")
    import faiss

    parameters: Any = approximate.parameters  # Faiss's stubs know only one of the two forms
    queries = check_vectors(range(len(query_vectors)), query_vectors, "query", dim=index.dimension)
    started = time.perf_counter()
    built = _faiss_says(approximate, lambda: faiss.index_factory(
        index.dimension, approximate.factory, faiss.METRIC_INNER_PRODUCT))  # fmt: skip
    if built.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"{approximate.factory!r} doesn't compare by inner product.")
    if not built.is_trained:
        sample = training_sample(index, TRAINING_VECTORS)
        _faiss_says(approximate, lambda: built.train(sample))
    ids: list[str] = []
    for block_ids, vectors in index.blocks():
        check_vectors(block_ids, vectors, "document")
        built.add(vectors)
        ids += block_ids
    if parameters:
        _faiss_says(approximate, lambda: faiss.ParameterSpace().set_index_parameters(built, parameters))
    filled = time.perf_counter()
    scores, positions = built.search(queries, min(top_k, len(ids)))
    found = time.perf_counter()
    exact = search_exactly(index, queries, top_k)
    done = time.perf_counter()
    names = np.array([*ids, None], dtype=object)  # Faiss's position -1, nothing more found, is the last
    hits = Hits(np.where(positions < 0, -np.inf, scores).astype(np.float32), names[positions])
    report = {
        "factory": approximate.factory,
        "parameters": approximate.parameters,
        "recall": recall(hits, exact),
        "bytes": int(faiss.serialize_index(built).nbytes),
        "seconds": {"build": round(filled - started, 3), "search": round(found - filled, 3),
                    "exact_search": round(done - found, 3)},
    }  # fmt: skip
    return hits, report


def recall(hits: Hits, exact: Hits) -> float:
    """Mean over queries of the share of the exact documents that were found.

    >>> one, two = np.array([["a", "b"]], object), np.array([["b", "c"]], object)
    >>> recall(Hits(np.zeros((1, 2), np.float32), one), Hits(np.zeros((1, 2), np.float32), two))
    0.5
    """
    rows = zip(hits.ids.tolist(), exact.ids.tolist(), strict=True)
    return float(np.mean([len(set(found) & set(best)) / len(best) for found, best in rows]))


def training_sample(index: VectorFolder, limit: int) -> np.ndarray:
    """(n, dim) float32, every ``rows / limit``-th vector of the folder, all if there are no more than ``limit``."""
    step = max(1, -(-index.rows // limit))
    parts, skip = [], 0
    for _, vectors in index.blocks():
        parts.append(vectors[skip::step].copy())
        skip = (skip - len(vectors)) % step
    return np.concatenate(parts)


def rankings_of(query_ids: list[str], hits: Hits) -> dict[str, dict[str, float]]:
    """Query id -> document id -> score, best first."""
    return {
        query: {key: score for key, score in zip(ids, scores, strict=True) if key is not None}
        for query, ids, scores in zip(query_ids, hits.ids.tolist(), hits.scores.tolist(), strict=True)
    }


def load_queries(folder: str | Path, index: VectorFolder) -> tuple[list[str], np.ndarray]:
    """Ids and vectors of a folder of query vectors that fits ``index``.

    Raises:
        ValueError: Its vectors were made by another model or setting.
    """
    queries = VectorFolder(folder)
    check_comparable(queries.manifest, index.manifest)
    return queries.load()


def _faiss_says(approximate: Approximate, call: Any) -> Any:
    """The call's value; what Faiss complains of in lines of C++ becomes one sentence."""
    try:
        return call()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[-1].rpartition("Error: ")[2]
        raise ValueError(
            f"Faiss can't make the index {approximate.factory!r} ({approximate.parameters or 'no parameters'}) of"
            f" these vectors: {reason}"
        ) from None


def _bytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
