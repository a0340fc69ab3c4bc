"""Exact search over several folders of vectors, one flat index a folder, by one process, several, or Ray actors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

from st_aggretriever.search.exact import Hits, check_vectors, merge
from st_aggretriever.search.retrieve import search_exactly
from st_aggretriever.vectors.folder import VectorFolder


class ShardSearch:
    """The best documents of all folders together: each is searched by itself, memory-mapped, and the hits are merged.

    The result is that of one search over all, up to the last bits of the scores; ties go by document id, descending.
    A context manager, which ends the processes.

    Args:
        folders: See :func:`st_aggretriever.vectors.shards.open_shards`.
        workers: Processes; each searches one folder at a time and holds two pieces of it. 1 searches here.
        dtype, backend, device: See :func:`st_aggretriever.search.retrieve.search_exactly`.

    Raises:
        ValueError: workers below 1.
    """

    def __init__(self, folders: Sequence[VectorFolder], *, workers: int = 1, **options: Any) -> None:
        if workers < 1:
            raise ValueError(f"ShardSearch: workers must be at least 1, got {workers}.")
        self.folders, self.options = list(folders), options
        self._pool: Executor | None = None
        if workers > 1 and len(self.folders) > 1:
            # Not forked: threads of torch and Faiss don't survive that.
            self._pool = ProcessPoolExecutor(min(workers, len(self.folders)), mp_context=get_context("spawn"))

    def __enter__(self) -> ShardSearch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def search(self, query_vectors: np.ndarray, top_k: int) -> Hits:
        """The ``top_k`` documents of the largest inner product for each of the (Q, dim) float32 queries, best first.

        Raises:
            ValueError: As :func:`st_aggretriever.search.exact.search`; an id that is in two folders, where both are
                hits.
        """
        queries = check_vectors(range(len(query_vectors)), query_vectors, "query")
        if self._pool is None:
            found = (search_folder(folder, queries, top_k, self.options)[0] for folder in self.folders)
        else:
            jobs = [self._pool.submit(search_folder, folder, queries, top_k, self.options) for folder in self.folders]
            found = (self._taken(folder, job.result()) for folder, job in zip(self.folders, jobs, strict=True))
        return merge_all(found, len(queries), top_k)

    def _taken(self, folder: VectorFolder, result: tuple[Hits, dict[int, int]]) -> Hits:
        folder.ambiguous |= result[1]
        return result[0]


def search_folder(
    folder: VectorFolder, queries: np.ndarray, top_k: int, options: dict[str, Any]
) -> tuple[Hits, dict[int, int]]:
    """The hits of one folder, and its ``ambiguous``, which another process would keep to itself."""
    return search_exactly(folder, queries, top_k, **options), folder.ambiguous


def merge_all(found: Iterable[Hits], queries: int, top_k: int) -> Hits:
    """The ``top_k`` best of several searches.

    Raises:
        ValueError: An id in two of them.
    """
    best = Hits(np.empty((queries, 0), np.float32), np.empty((queries, 0), object))
    for new in found:
        if new.scores.shape[1]:
            best = merge(best, new, top_k)
    for row in best.ids:
        if len(set(row)) < len(row):
            seen: set[str] = set()
            twice = next(key for key in row if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"search: document id {twice!r} is in two folders; ids must be unique.")
    return best
