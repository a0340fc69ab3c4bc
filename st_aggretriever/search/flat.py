"""Exact search over vectors that stay in memory, float32 or float16, on one device or sharded over several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from st_aggretriever.search.exact import TORCH_SCORES, Hits, check_vectors, full_precision, id_array, merge, tied_top_k
from st_aggretriever.vectors.blocks import to_dtype

GPU_ROWS = 2**18  # documents that are widened to float32 at a time: 768 MiB at 768 dimensions
CPU_ROWS = 2**14


class FlatIP:
    """An index for many searches: vectors are sent to their devices once, by torch.

    Numbers may be stored in half precision, but are multiplied and summed in float32: rounded scores would tie by the
    hundreds. Ties go by document id, descending, as in :func:`st_aggretriever.search.exact.search`, whose code merges
    the shards.

    Args:
        dimension: Of the vectors.
        devices: For instance ``["cuda:0", "cuda:1"]``; each vector lies on one of them.
        dtype: ``"float32"`` or ``"float16"``, as stored.

    Raises:
        ValueError: No device, or an unknown dtype.

    Example:
        >>> index = FlatIP(2)
        >>> index.add(["a", "b"], np.array([[1, 0], [0, 1]], np.float32))
        >>> index.search(np.array([[3, 1]], np.float32), top_k=1).ids.tolist()
        [['a']]
    """

    def __init__(self, dimension: int, *, devices: Sequence[str] = ("cpu",), dtype: str = "float32") -> None:
        if not devices:
            raise ValueError("FlatIP: expected at least one device, got none.")
        to_dtype([], np.empty((0, dimension), np.float32), dtype)  # refuses an unknown one
        self.dimension = dimension
        self.devices = list(devices)
        self.dtype = dtype
        self.shards: list[list[tuple[np.ndarray, Any]]] = [[] for _ in devices]  # (n,) ids and (n, dim) tensor each
        self.ids: set[str] = set()

    def add(self, ids: Sequence[str], vectors: np.ndarray) -> None:
        """Add (n, dim) float32 vectors, spread evenly over the devices.

        Raises:
            ValueError: As :func:`st_aggretriever.search.exact.search` for a block; a number beyond float16.
        """
        import torch

        vectors = check_vectors(ids, vectors, "document", dim=self.dimension)
        names = id_array(ids)
        if not self.ids.isdisjoint(ids):
            raise ValueError(f"FlatIP: document id {min(self.ids.intersection(ids))!r} is in the index already.")
        stored = to_dtype(ids, vectors, self.dtype)
        self.ids.update(ids)
        bounds = np.linspace(0, len(ids), len(self.devices) + 1).astype(int).tolist()
        for device, shard, start, stop in zip(self.devices, self.shards, bounds, bounds[1:], strict=False):
            if stop > start:
                # A copy, also on the CPU: the caller's array may change.
                shard.append((names[start:stop], torch.from_numpy(stored[start:stop].copy()).to(device)))

    def extend(self, blocks: Iterable[tuple[Sequence[str], np.ndarray]]) -> None:
        """Add all blocks of a stream, for instance of ``VectorFolder.blocks``."""
        for ids, vectors in blocks:
            self.add(ids, vectors)

    def search(self, query_vectors: np.ndarray, top_k: int) -> Hits:
        """The ``top_k`` documents of the largest inner product for each of the (Q, dim) float32 queries, best first.

        Raises:
            ValueError: top_k below 1, query vectors that don't fit or aren't finite.
        """
        if top_k < 1:
            raise ValueError(f"FlatIP: top_k must be at least 1, got {top_k}.")
        queries = check_vectors(range(len(query_vectors)), query_vectors, "query", dim=self.dimension)
        nothing = Hits(np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), object))
        if not len(queries):
            return nothing

        def of_shard(shard: list[tuple[np.ndarray, Any]]) -> Hits:
            found = nothing
            for names, tensor in shard:
                found = merge(found, tied_top_k(_stored_knn, queries, tensor, names, top_k), top_k)
            return found

        with full_precision(), ThreadPoolExecutor(len(self.shards)) as pool:
            best = nothing
            for found in pool.map(of_shard, self.shards):
                best = merge(best, found, top_k)
        return best


def _stored_knn(queries: np.ndarray, block: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and positions, (Q, k) each, of a block where it lies, widened to float32 piece by piece."""
    import torch

    rows = CPU_ROWS if block.device.type == "cpu" else GPU_ROWS
    parts = []
    with torch.inference_mode():
        for chunk in torch.from_numpy(queries).split(max(1, TORCH_SCORES // rows)):
            on_device = chunk.to(block.device)
            scores = torch.empty(len(chunk), 0, device=block.device)
            positions = torch.empty(len(chunk), 0, dtype=torch.int64, device=block.device)
            for start in range(0, len(block), rows):
                product = on_device @ block[start : start + rows].float().T  # (q, r)
                top = product.topk(min(k, product.shape[1]))
                joined = torch.cat([scores, top.values], dim=1)
                kept = joined.topk(min(k, joined.shape[1]))  # best first
                scores = kept.values
                positions = torch.cat([positions, top.indices + start], dim=1).gather(1, kept.indices)
            parts.append((scores.cpu().numpy(), positions.cpu().numpy()))
    scores_all, positions_all = (np.concatenate(column) for column in zip(*parts, strict=True))
    return scores_all, positions_all
