"""Exact inner-product top-k over a stream of corpus blocks, by Faiss (CPU or GPUs) or torch.

Memory holds one block and the running top-k. Ties are ordered by document id, descending (ids compared as strings, as
trec_eval does), and the same rule says which of equal documents survive at k, so the result doesn't depend on the
size or the order of the blocks, save where scores differ by floating-point rounding only.

Symbols: Q queries, N documents in all, n documents of a block, k = top_k, k' = min(k, N).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

# (queries (Q, dim), block (n, dim), k <= n) -> scores (Q, k) descending, positions in the block (Q, k)
Knn = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]

# Faiss 1.15 computes small batches of queries (up to 166 at 768 dimensions) product by product, not by BLAS, and waits
# for all its threads after each 1,024 documents: together up to five times slower. Its buffer becomes 64 MiB at most.
FAISS_SETTINGS = {
    "distance_compute_blas_threshold": 1,
    "distance_compute_blas_query_bs": 1024,
    "distance_compute_blas_database_bs": 16384,
}
_SETTINGS_LOCK = threading.Lock()  # they are the whole process's
FAISS_GPU_MAX_K = 2048  # the longest list that Faiss's GPU selection kernels return
TORCH_SCORES = 2**25  # scores that the torch backend holds at a time: 128 MiB
TORCH_TILE = 16384  # documents a product on the CPU: smaller ones are slower
HELD = 3  # times the result: hits that the torch backend keeps before it cuts them to the result's size


class Hits(NamedTuple):
    """The k' best documents of each query, best first."""

    scores: np.ndarray  # (Q, k') float32
    ids: np.ndarray  # (Q, k') object: str


def search(
    query_vectors: np.ndarray,
    blocks: Iterable[tuple[Sequence[str], np.ndarray]],
    top_k: int,
    *,
    backend: str = "auto",
    device: str | None = None,
) -> Hits:
    """Find the ``top_k`` documents of the largest inner product for each query.

    Args:
        query_vectors: (Q, dim) float32.
        blocks: any number of ``(n document ids, (n, dim) float32)``; ids are unique over all blocks.
        top_k: how many documents to return, at least 1; fewer come back where the corpus has fewer.
        backend: ``"faiss"``, ``"torch"`` or ``"auto"``, see :func:`pick_backend`.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; several by commas, ``"cuda:0,cuda:1"``, share each block; None
            leaves it to the backend.

    Returns:
        Scores and ids, both (Q, k'). Without queries nothing is read and both are (0, 0).

    Raises:
        ValueError: top_k below 1; vectors of another dtype, rank or dimension, or not finite (named by id); an id that
            occurs twice in a block or in a result; products beyond float32; a device that isn't there.
        ImportError: ``backend="faiss"`` without a working Faiss.

    Example:
        >>> corpus = [(["a", "b"], np.eye(2, dtype=np.float32)), (["c"], np.ones((1, 2), np.float32))]
        >>> search(np.array([[2, 1]], np.float32), corpus, top_k=2).ids.tolist()
        [['c', 'a']]
    """
    if top_k < 1:
        raise ValueError(f"search: top_k must be at least 1, got {top_k}.")
    queries = check_vectors(range(len(query_vectors)), query_vectors, "query")
    best = Hits(np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), object))
    if not len(queries):
        return best
    library, device = pick_backend(backend, device)
    check_device(library, device)
    knn = _knn(library, device)
    for ids, vectors in blocks:
        if not len(ids) and not len(vectors):
            continue
        vectors = check_vectors(ids, vectors, "document", dim=queries.shape[1])
        if (library, device) == ("torch", "cpu"):
            new = _torch_above(queries, vectors, id_array(ids), best, top_k)
        else:
            new = tied_top_k(knn, queries, vectors, id_array(ids), top_k)
        best = merge(best, new, top_k)
        del ids, vectors  # the next block is made while only its predecessor's hits are in memory
    for row in best.ids:
        if len(set(row)) < len(row):
            raise ValueError(f"search: document id {_repeated(row)!r} occurs in two blocks; ids must be unique.")
    return best


def pick_backend(backend: str = "auto", device: str | None = None) -> tuple[str, str]:
    """Name the library and the device that a search runs on, ``("faiss" | "torch", device)``.

    ``auto`` is Faiss if it can be imported, on its GPU if it has one; torch without Faiss, and where ``device`` names
    a GPU that only torch can use.

    Raises:
        ValueError: an unknown backend, Faiss for a GPU that it can't use, several devices of different kinds.
        ImportError: ``"faiss"`` without a working Faiss.
    """
    if device is not None and "," in device:
        picked = [pick_backend(backend, one.strip()) for one in device.split(",")]
        if len({(library, one.partition(":")[0]) for library, one in picked}) > 1:
            raise ValueError(f"search: devices must be of one kind, got {device!r}.")
        return picked[0][0], ",".join(one for _, one in picked)
    if backend not in ("auto", "faiss", "torch"):
        raise ValueError(f"search: backend must be 'auto', 'faiss' or 'torch', got {backend!r}.")
    cuda = device is not None and device.startswith("cuda")
    if backend != "torch":
        faiss, error = _faiss()
        gpus = faiss.get_num_gpus() if faiss and hasattr(faiss, "knn_gpu") else 0
        if faiss and (device in (None, "cpu") or (cuda and gpus)):
            if device is None:
                return "faiss", "cuda" if gpus else "cpu"
            return "faiss", device if cuda else "cpu"
        if backend == "faiss" and faiss:
            raise ValueError(
                f"search: this Faiss has no GPU for device {device!r}. Use backend='torch' or device='cpu'."
            )
        if backend == "faiss":
            raise ImportError(
                f"search: backend 'faiss' needs a working Faiss ({error}). pip install st-aggretriever[cpu], or"
                " st-aggretriever[gpu], never both; or use backend='torch'."
            )
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return "torch", device


def check_device(library: str, device: str) -> None:
    """Refuse a device that isn't there, or several of them one of which isn't.

    Raises:
        ValueError: as said; the sentence gives the library's reason.
    """
    for one in device.split(","):
        if library == "torch":
            import torch

            try:
                torch.empty(0, device=one).cpu()  # "meta" has no numbers
            except (RuntimeError, AssertionError) as error:
                raise ValueError(f"search: device {one!r} can't be used here: {str(error).splitlines()[0]}") from None
        elif one != "cpu" and not 0 <= _gpu_number(one) < _faiss()[0].get_num_gpus():
            raise ValueError(f"search: device {one!r} can't be used here: Faiss has no such GPU.")


def _gpu_number(device: str) -> int:
    """1 of ``cuda:1``, 0 of ``cuda``, -1 of what names no GPU."""
    number = device.removeprefix("cuda").removeprefix(":")
    return int(number or 0) if device in ("cuda", f"cuda:{number}") and (number or "0").isdecimal() else -1


def check_vectors(ids: Sequence[Any], vectors: np.ndarray, what: str, dim: int | None = None) -> np.ndarray:
    """Return ``vectors`` in one piece of memory if they are (len(ids), dim) float32 and finite.

    Raises:
        ValueError: they aren't; a vector that isn't finite is named as ``what`` and its id.
    """
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or vectors.dtype != np.float32:
        got = f"{vectors.dtype} {vectors.shape}" if isinstance(vectors, np.ndarray) else type(vectors).__name__
        raise ValueError(f"search: {what} vectors must be a float32 array of shape (n, dim), got {got}.")
    if len(ids) != len(vectors):
        raise ValueError(f"search: each {what} needs one id and one vector, got {len(ids)} and {len(vectors)}.")
    if dim is not None and vectors.shape[1] != dim:
        raise ValueError(
            f"search: {what} vectors have {vectors.shape[1]} dimensions, the queries {dim}. Encode both by one model."
        )
    vectors = np.ascontiguousarray(vectors)
    # One pass without a temporary array: a finite sum of squares means finite numbers; otherwise look at each.
    if not np.isfinite(np.vdot(vectors, vectors)):
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise ValueError(
                f"the vector of {what} {ids[bad[0]]!r} is not finite (NaN or infinity). Look at the model's weights."
            )
    return vectors


def id_array(ids: Sequence[str]) -> np.ndarray:
    """(n,) object array of ids that are strings and differ."""
    if not all(isinstance(key, str) for key in ids):
        raise ValueError(f"search: document ids must be strings, got {sorted({type(key).__name__ for key in ids})}.")
    if len(set(ids)) < len(ids):
        raise ValueError(f"search: document id {_repeated(ids)!r} occurs twice in a block; ids must be unique.")
    array = np.empty(len(ids), dtype=object)
    array[:] = ids
    return array


def _repeated(ids: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(key for key in ids if key in seen or seen.add(key))  # type: ignore[func-returns-value]


def tied_top_k(knn: Knn, queries: np.ndarray, vectors: np.ndarray, ids: np.ndarray, top_k: int) -> Hits:
    """The ``top_k`` best of one block: the right documents, in the order of their scores, ties in any order."""
    n = len(vectors)
    k = min(top_k, n)
    fetch = min(k + 1, n)  # one more than asked for shows whether the cut goes through a tie
    scores, positions = _finite(knn(queries, vectors, fetch))
    tied = np.flatnonzero(scores[:, k - 1] == scores[:, -1]) if fetch > k else np.empty(0, np.intp)
    best = Hits(scores[:, :k], ids[positions[:, :k]])
    while len(tied):
        fetch = min(2 * fetch, n)
        scores, positions = _finite(knn(queries[tied], vectors, fetch))
        settled = (scores[:, k - 1] != scores[:, -1]) | (fetch == n)
        more = Hits(scores[settled], ids[positions[settled]])
        order_ties(more, k)
        best.scores[tied[settled]], best.ids[tied[settled]] = more.scores[:, :k], more.ids[:, :k]
        tied = tied[~settled]
    return best


def _finite(found: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    if not np.isfinite(found[0]).all() or (found[1] < 0).any():
        raise ValueError("search: an inner product is beyond float32. Scale the vectors down.")
    return found


def merge(best: Hits, new: Hits, top_k: int) -> Hits:
    """The ``top_k`` best of two, best first, ties in order."""
    if best.scores.shape[1] == top_k:
        # Only what reaches the running k-th score can enter: late in a corpus that is a handful of columns. What fills
        # a row up scores -inf and can't.
        width = int((new.scores >= best.scores[:, -1:]).sum(axis=1).max())
        new = Hits(new.scores[:, :width], new.ids[:, :width])
    scores = np.concatenate([best.scores, new.scores], axis=1)
    ids = np.concatenate([best.ids, new.ids], axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")
    merged = Hits(np.take_along_axis(scores, order, axis=1), np.take_along_axis(ids, order, axis=1))
    order_ties(merged, top_k)
    return Hits(merged.scores[:, :top_k], merged.ids[:, :top_k])


def order_ties(hits: Hits, top_k: int) -> None:
    """Order, in place, the ids of each run of equal scores that begins before ``top_k``, descending."""
    equal = np.zeros((len(hits.scores), hits.scores.shape[1] + 1), bool)  # equal[:, j]: score j equals score j - 1
    equal[:, 1:-1] = hits.scores[:, 1:] == hits.scores[:, :-1]
    # Both lists go row by row, left to right, so the i-th first column and the i-th last one are the same run's.
    rows, first = np.nonzero(~equal[:, :-1] & equal[:, 1:])
    last = np.nonzero(equal[:, :-1] & ~equal[:, 1:])[1]
    inside = first < top_k
    for row, start, stop in zip(rows[inside], first[inside], last[inside] + 1, strict=True):
        hits.ids[row, start:stop] = sorted(hits.ids[row, start:stop], reverse=True)


def _knn(library: str, device: str) -> Knn:
    if "," in device:
        return _sharded([_knn(library, one) for one in device.split(",")])
    if library == "torch":
        return lambda queries, block, k: _torch_knn(queries, block, k, device)
    if device == "cpu":
        return _faiss_knn
    faiss = _faiss()[0]
    resources = faiss.StandardGpuResources()
    index = int(device.partition(":")[2] or 0)

    def knn(queries: np.ndarray, block: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        if k > FAISS_GPU_MAX_K:
            return _faiss_knn(queries, block, k)  # few queries come here: those with long ties at the cut
        return faiss.knn_gpu(resources, queries, block, k, metric=faiss.METRIC_INNER_PRODUCT, device=index)

    return knn


def _sharded(knns: Sequence[Knn]) -> Knn:
    """One search over a block whose parts lie on as many devices, all at work at the same time."""

    def knn(queries: np.ndarray, block: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        bounds = np.linspace(0, len(block), len(knns) + 1).astype(int).tolist()

        def part(number: int) -> tuple[np.ndarray, np.ndarray]:
            start, stop = bounds[number], bounds[number + 1]
            if start == stop:  # fewer documents than devices
                return np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
            scores, positions = knns[number](queries, block[start:stop], min(k, stop - start))
            return scores, positions + start

        with full_precision(), ThreadPoolExecutor(len(knns)) as pool:
            parts = list(pool.map(part, range(len(knns))))
        scores, positions = (np.concatenate(column, axis=1) for column in zip(*parts, strict=True))
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, best, axis=1), np.take_along_axis(positions, best, axis=1)

    return knn


def _faiss_knn(queries: np.ndarray, block: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    faiss = _faiss()[0]
    with _SETTINGS_LOCK:
        before = {name: getattr(faiss.cvar, name) for name in FAISS_SETTINGS}
        try:
            for name, value in FAISS_SETTINGS.items():
                setattr(faiss.cvar, name, value)
            return faiss.knn(queries, block, k, metric=faiss.METRIC_INNER_PRODUCT)
        finally:
            for name, value in before.items():
                setattr(faiss.cvar, name, value)


def _torch_knn(queries: np.ndarray, block: np.ndarray, k: int, device: str) -> tuple[np.ndarray, np.ndarray]:
    import torch

    with torch.inference_mode(), full_precision():
        documents = torch.from_numpy(block).to(device).T  # (dim, n)
        step = max(1, TORCH_SCORES // len(block))
        parts = [(chunk.to(device) @ documents).topk(k) for chunk in torch.from_numpy(queries).split(step)]
        scores = torch.cat([part.values for part in parts]).cpu().numpy()
        return scores, torch.cat([part.indices for part in parts]).cpu().numpy()


def _torch_above(queries: np.ndarray, block: np.ndarray, ids: np.ndarray, best: Hits, top_k: int) -> Hits:
    """The documents of a block that could enter the top-k: those that reach the running k-th score, k a query at most.

    One comparison a score selects them, a tenth of the product's time; a top-k of each block takes several times that.

    Returns:
        (Q, w) each, w at most top_k, best first; what fills a row up scores -inf.
    """
    import torch

    tile = max(1, min(TORCH_TILE, TORCH_SCORES // len(queries)))
    running = best.scores.shape[1] == top_k
    floor = torch.from_numpy(best.scores[:, -1:].copy()) if running else torch.full((len(queries), 1), -torch.inf)
    parts: list[_Held] = []
    with torch.inference_mode(), full_precision():
        vectors, documents = torch.from_numpy(queries), torch.from_numpy(block)
        for start in range(0, len(block), tile):
            product = vectors @ documents[start : start + tile].T  # (Q, t)
            if start == 0 and not running and product.shape[1] >= top_k:
                floor = product.topk(top_k, sorted=False).values.amin(dim=1, keepdim=True)
            # "Not below": a NaN, an overflow, shall not vanish.
            found = np.flatnonzero(~(product < floor).numpy())
            rows, columns = np.divmod(found, product.shape[1])
            new = _Held(rows.astype(np.int32), (columns + start).astype(np.int32), product.numpy().ravel()[found])
            _finite((new.scores, new.positions))
            parts.append(new)
            if sum(len(part.rows) for part in parts) > HELD * len(queries) * top_k:  # long ties, or many small tiles
                parts = [_cut(parts, ids, top_k)]
                count = np.bincount(parts[0].rows, minlength=len(queries))
                full = np.flatnonzero(count == top_k)
                floor[full, 0] = torch.from_numpy(parts[0].scores[np.cumsum(count)[full] - 1])
    held = _cut(parts, ids, top_k)
    count = np.bincount(held.rows, minlength=len(queries))
    column = np.arange(len(held.rows)) - np.repeat(np.cumsum(count) - count, count)
    scores = np.full((len(queries), int(count.max())), -np.inf, np.float32)
    positions = np.zeros(scores.shape, np.intp)
    scores[held.rows, column], positions[held.rows, column] = held.scores, held.positions
    return Hits(scores, ids[positions])


class _Held(NamedTuple):
    """Hits one by one."""

    rows: np.ndarray  # (m,) int32, the query of each
    positions: np.ndarray  # (m,) int32, the document's in its block
    scores: np.ndarray  # (m,) float32


def _cut(parts: Sequence[_Held], ids: np.ndarray, top_k: int) -> _Held:
    """The ``top_k`` best of each query, queries in order, the best first; of ties at the cut the highest ids."""
    held = _Held(*(np.concatenate(values) for values in zip(*parts, strict=True)))
    by_row = np.argsort(held.rows, kind="stable")
    kept = [by_row[:0]]
    for hits in np.split(by_row, np.cumsum(np.bincount(held.rows))[:-1]):
        best = hits[np.argsort(-held.scores[hits])]
        if len(best) > top_k:
            negative = -held.scores[best]
            first, last = (int(np.searchsorted(negative, negative[top_k - 1], side)) for side in ("left", "right"))
            tied = sorted(best[first:last].tolist(), key=lambda hit: ids[held.positions[hit]], reverse=True)
            best[first:top_k] = tied[: top_k - first]
        kept.append(best[:top_k])
    order = np.concatenate(kept)
    return _Held(*(values[order] for values in held))


@contextmanager
def full_precision() -> Iterator[None]:
    """Products in float32 even where a training run in this process has switched TF32 or bfloat16 products on."""
    import torch

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _faiss() -> tuple[Any, str]:
    """The module and "", or None and why: a Faiss for GPUs raises RuntimeError, not ImportError, without a driver."""
    try:
        return importlib.import_module("faiss"), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
