"""Exact top-k over streamed blocks: order, ties, block sizes, backends, refusals."""

import itertools
import sys
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from st_aggretriever.search.exact import FAISS_SETTINGS, pick_backend, search

Block = tuple[list[str], np.ndarray]

try:
    import faiss
except (ImportError, RuntimeError):
    faiss = None
needs_faiss = pytest.mark.skipif(faiss is None, reason="faiss is not installed")
BACKENDS = [pytest.param("faiss", marks=needs_faiss), "torch"]


def floats(rows: Any) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def split(ids: list[str], vectors: np.ndarray, size: int) -> Iterator[Block]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size], vectors[start : start + size]


@pytest.mark.parametrize("backend", BACKENDS)
def test_best_first_with_scores_and_ids(backend: str) -> None:
    corpus = [(["a", "b"], floats([[1, 0], [0, 1]])), (["c"], floats([[2, 2]]))]
    scores, ids = search(floats([[2, 1], [-1, 3]]), corpus, 2, backend=backend)
    assert ids.tolist() == [["c", "a"], ["c", "b"]]
    assert scores.tolist() == [[6, 2], [4, 3]]
    assert scores.dtype == np.float32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("top_k", [1, 4, 30, 500])
@pytest.mark.parametrize("size", [1, 3, 50, 211])
def test_result_is_the_sorted_corpus_whatever_the_blocks(backend: str, top_k: int, size: int) -> None:
    # Whole numbers: products are exact, and nearly every cut at k goes through a tie.
    rng = np.random.default_rng(0)
    vectors, queries = floats(rng.integers(-1, 2, (211, 3))), floats(rng.integers(-2, 3, (7, 3)))
    ids = [str(number) for number in rng.permutation(211)]
    found = search(queries, split(ids, vectors, size), top_k, backend=backend)
    for row, query in enumerate(queries):
        pairs = [(float(sum(a * b for a, b in zip(query, vector, strict=True))), key)
                 for vector, key in zip(vectors.tolist(), ids, strict=True)]  # fmt: skip
        expected = sorted(pairs, reverse=True)[:top_k]
        assert list(zip(found.scores[row].tolist(), found.ids[row], strict=True)) == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("devices", ["cpu,cpu", "cpu,cpu,cpu"])
def test_several_devices_give_what_one_gives(backend: str, devices: str) -> None:
    """CPUs stand in for GPUs: the parts of a block and their merging are the same code."""
    rng = np.random.default_rng(3)
    vectors, queries = floats(rng.integers(-1, 2, (100, 3))), floats(rng.integers(-2, 3, (7, 3)))
    ids = [str(number) for number in rng.permutation(100)]
    for top_k, size in ((1, 100), (5, 33), (40, 2), (200, 50)):
        one, several = (search(queries, split(ids, vectors, size), top_k, backend=backend, device=device)
                        for device in ("cpu", devices))  # fmt: skip
        assert several.ids.tolist() == one.ids.tolist()
        assert several.scores.tolist() == one.scores.tolist()


@needs_faiss
def test_settings_come_back_after_devices_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FAISS_SETTINGS:
        monkeypatch.setattr(faiss.cvar, name, 2000)
    vectors = np.ones((400, 4), np.float32)
    for _ in range(10):
        search(vectors[:3], [([str(row) for row in range(400)], vectors)], 5, backend="faiss", device="cpu,cpu,cpu")
    assert [getattr(faiss.cvar, name) for name in FAISS_SETTINGS] == [2000] * len(FAISS_SETTINGS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_documents_survive_by_id_descending_as_strings(backend: str) -> None:
    ids = [str(number) for number in range(1, 151)]
    found = search(floats([[1]]), [(ids, np.ones((150, 1), np.float32))], 4, backend=backend)
    assert found.ids.tolist() == [["99", "98", "97", "96"]]  # "150" sorts below "2"
    late = [(["5", "1"], floats([[1], [1]])), (["9", "10"], floats([[1], [1]]))]
    assert search(floats([[1]]), late, 2, backend=backend).ids.tolist() == [["9", "5"]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_some_queries_tied_at_the_cut(backend: str) -> None:
    corpus = [(["a", "b", "c", "d", "e"], floats([[5, 1], [4, 1], [3, 1], [2, 1], [1, 1]]))]
    found = search(floats([[1, 0], [0, 1], [-1, 0]]), corpus, 2, backend=backend)
    assert found.ids.tolist() == [["a", "b"], ["e", "d"], ["e", "d"]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_query_two_documents_give_two_hits_at_any_k(backend: str) -> None:
    found = search(floats([[1, 0]]), [(["x", "y"], floats([[1, 1], [2, 1]]))], 1000, backend=backend)
    assert found.ids.tolist() == [["y", "x"]]
    assert found.scores.tolist() == [[2, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_corpus_empty_blocks_and_no_queries(backend: str) -> None:
    empty: Block = ([], np.empty((0, 2), np.float32))
    one: Block = (["a"], floats([[1, 1]]))
    assert search(floats([[1, 0]]), [], 5, backend=backend).ids.shape == (1, 0)
    assert search(floats([[1, 0]]), [empty, one, empty], 5, backend=backend).ids.tolist() == [["a"]]

    def untouched() -> Iterator[Block]:
        raise AssertionError("the corpus was read for no query")
        yield one

    assert search(np.empty((0, 2), np.float32), untouched(), 5, backend=backend).scores.shape == (0, 0)


def test_blocks_are_released_as_the_stream_moves_on() -> None:
    alive: list[weakref.ref[np.ndarray]] = []

    def blocks() -> Iterator[Block]:
        for number in range(5):
            assert all(ref() is None for ref in alive[:-1]), "a block before the last one is still held"
            vectors = np.full((2, 3), number, np.float32)
            alive.append(weakref.ref(vectors))
            yield [f"{number}a", f"{number}b"], vectors
            del vectors

    assert search(np.ones((1, 3), np.float32), blocks(), 3, backend="torch").ids.tolist() == [["4b", "4a", "3b"]]


ONE = floats([[1, 0]])
BAD_BLOCKS = {
    "dimension": ((["a"], floats([[1, 0, 0]])), "document vectors have 3 dimensions, the queries 2"),
    "dtype": ((["a"], np.ones((1, 2))), r"float32 array of shape \(n, dim\), got float64 \(1, 2\)"),
    "rank": ((["a"], np.ones(2, np.float32)), r"got float32 \(2,\)"),
    "type": ((["a"], [[1.0, 0.0]]), "got list"),
    "NaN": ((["a", "b"], floats([[1, 0], [np.nan, 0]])), "document 'b' is not finite"),
    "infinity": ((["a", "b"], floats([[1, 0], [0, -np.inf]])), "document 'b' is not finite"),
    "ids too few": ((["a"], floats([[1, 0], [0, 1]])), "one id and one vector, got 1 and 2"),
    "id type": (([7], ONE), "ids must be strings"),
    "id twice": ((["a", "b", "a"], floats([[1, 0]] * 3)), "'a' occurs twice in a block"),
}


@pytest.mark.parametrize("case", BAD_BLOCKS)
def test_bad_block_is_refused_by_name(case: str) -> None:
    block, sentence = BAD_BLOCKS[case]
    with pytest.raises(ValueError, match=sentence):
        search(ONE, [block], 1, backend="torch")


def test_bad_query_top_k_and_backend_are_refused() -> None:
    with pytest.raises(ValueError, match="query 1 is not finite"):
        search(floats([[1, 0], [np.nan, 0]]), [], 1)
    with pytest.raises(ValueError, match="query vectors must be a float32 array"):
        search(np.ones(2, np.float32), [], 1)
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        search(ONE, [], 0)
    with pytest.raises(ValueError, match="'auto', 'faiss' or 'torch', got 'scann'"):
        search(ONE, [], 1, backend="scann")


def test_id_in_two_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' occurs in two blocks"):
        search(ONE, [(["a"], ONE), (["b", "a"], floats([[3, 0], [2, 0]]))], 5, backend="torch")


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_finite_vectors_are_data_and_overflow_is_an_error(backend: str) -> None:
    large = floats([[3e30, 0]])  # its square is beyond float32, the number itself is not
    assert search(ONE, [(["a"], large)], 1, backend=backend).ids.tolist() == [["a"]]
    with pytest.raises(ValueError, match="beyond float32"):
        search(large, [(["a", "b"], floats([[3e30, 0], [1, 0]]))], 1, backend=backend)
    with pytest.raises(ValueError, match="beyond float32"):  # also once only the running k-th score is looked at
        search(large, [(["a"], ONE), (["b"], large)], 1, backend=backend)


def test_torch_selects_the_same_whatever_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors, queries = floats(rng.integers(-2, 3, (90, 3))), floats(rng.integers(-2, 3, (6, 3)))
    ids = [str(number) for number in range(90)]
    expected = search(queries, split(ids, vectors, 90), 5, backend="torch")
    for tile, held in itertools.product((1, 4, 7, 50), (0, 1, 3)):
        monkeypatch.setattr("st_aggretriever.search.exact.TORCH_TILE", tile)
        monkeypatch.setattr("st_aggretriever.search.exact.HELD", held)
        found = search(queries, split(ids, vectors, 30), 5, backend="torch")
        assert found.ids.tolist() == expected.ids.tolist()
        assert found.scores.tolist() == expected.scores.tolist()


@pytest.mark.parametrize("case", ["a query that ties with every document", "more queries than scores at a time"])
def test_torch_holds_a_few_times_the_result(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, queries = floats(np.random.default_rng(0).random((20_000, 4))), np.ones((200, 4), np.float32)
    queries += np.arange(200)[:, None]
    if "ties" in case:
        queries[7] = 0
    else:
        monkeypatch.setattr("st_aggretriever.search.exact.TORCH_SCORES", 1000)
    ids = [str(number) for number in range(20_000)]
    for stream in (split(ids, documents, 20_000), split(ids, documents, 10_000)):
        blocks = list(stream)
        tracemalloc.start()
        found = search(queries, blocks, 10, backend="torch")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        scores = queries.astype(np.float64) @ documents.T
        assert found.scores == pytest.approx(-np.sort(-scores)[:, :10], rel=1e-5)
        # All scores of the queries have 16 MB, with their places 48; a tile's have 6 and aren't numpy's.
        assert peak < 8e6
    if "ties" in case:
        assert found.ids[7].tolist() == sorted(ids, reverse=True)[:10]


def test_strided_vectors_are_read_as_they_stand() -> None:
    wide = floats([[1, 9, 2, 9], [3, 9, 4, 9]])
    found = search(wide[:1, ::2], [(["a", "b"], wide[:, ::2])], 2)
    assert found.scores.tolist() == [[11, 5]]


@pytest.mark.parametrize("failure", ["RuntimeError('no driver')", "ImportError('no faiss')", "AttributeError('ABI')"])
def test_search_runs_without_a_working_faiss(failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faiss.py").write_text(f"raise {failure}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faiss", raising=False)
    assert pick_backend(device="cpu") == ("torch", "cpu")
    assert search(ONE, [(["a"], ONE)], 1).ids.tolist() == [["a"]]
    with pytest.raises(ImportError, match=r"pip install st-aggretriever\[cpu\]"):
        search(ONE, [(["a"], ONE)], 1, backend="faiss")


@needs_faiss
def test_faiss_settings_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FAISS_SETTINGS:
        monkeypatch.setattr(faiss.cvar, name, 2000)
    seen = []

    def fail(*_: Any, **__: Any) -> None:
        seen.append(faiss.cvar.distance_compute_blas_threshold)
        raise RuntimeError("out of memory")

    search(ONE, [(["a"], ONE)], 1, backend="faiss")
    monkeypatch.setattr(faiss, "knn", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        search(ONE, [(["a"], ONE)], 1, backend="faiss")
    assert seen == [1]
    assert [getattr(faiss.cvar, name) for name in FAISS_SETTINGS] == [2000] * len(FAISS_SETTINGS)


@needs_faiss
def test_backend_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_backend("torch", "cuda:1") == ("torch", "cuda:1")
    assert pick_backend("torch", "cuda:0, cuda:1") == ("torch", "cuda:0,cuda:1")
    with pytest.raises(ValueError, match="devices must be of one kind, got 'cpu,cuda:1'"):
        pick_backend("torch", "cpu,cuda:1")
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    assert pick_backend(device="cpu") == ("faiss", "cpu")
    assert pick_backend(device="cuda:1") == ("torch", "cuda:1")  # this Faiss can't, torch can
    with pytest.raises(ValueError, match="no GPU for device 'cuda:1'"):
        pick_backend("faiss", "cuda:1")
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "knn_gpu", None, raising=False)
    assert pick_backend() == ("faiss", "cuda")
    assert pick_backend(device="cuda:1") == ("faiss", "cuda:1")
    assert pick_backend(device="cpu") == ("faiss", "cpu")


@pytest.mark.parametrize("device", ["nosuch", "cuda:x", "cuda:99", "cpu:x", "", "cpu,cuda:99"])
@pytest.mark.parametrize("backend", ["auto", "torch", "faiss"])
def test_a_device_that_is_not_there_is_refused_in_a_sentence(backend: str, device: str) -> None:
    if backend == "faiss":
        pytest.importorskip("faiss")
    with pytest.raises(ValueError, match=r"search: .*device") as caught:
        search(ONE, [(["a"], ONE)], 1, backend=backend, device=device)
    assert "\n" not in str(caught.value)


def test_torch_products_stay_float32_and_the_setting_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    topk = torch.Tensor.topk

    def record(tensor: torch.Tensor, k: int, **options: Any) -> Any:
        seen.append((torch.get_float32_matmul_precision(), tensor.dtype))
        return topk(tensor, k, **options)

    monkeypatch.setattr(torch.Tensor, "topk", record)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        search(ONE, [(["a"], ONE)], 1, backend="torch")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [("highest", torch.float32)]
