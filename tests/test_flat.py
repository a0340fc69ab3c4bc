"""FlatIP: the same hits as the streamed search, on one device or several, stored in half precision or not."""

from typing import Any

import numpy as np
import pytest

from st_aggretriever.search import flat
from st_aggretriever.search.exact import search
from st_aggretriever.search.flat import FlatIP


@pytest.fixture
def corpus() -> tuple[list[str], np.ndarray, np.ndarray]:
    """Whole numbers, exact in half precision too: nearly every cut goes through a tie."""
    rng = np.random.default_rng(0)
    vectors, queries = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((150, 4), (9, 4)))
    return [str(number) for number in rng.permutation(150)], vectors, queries


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"], ["cpu"] * 7])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("rows", [4, 2**14])
def test_equals_the_streamed_search(
    corpus: Any, devices: list[str], dtype: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "CPU_ROWS", rows)
    ids, vectors, queries = corpus
    index = FlatIP(4, devices=devices, dtype=dtype)
    index.extend((ids[start : start + 40], vectors[start : start + 40]) for start in range(0, 150, 40))
    for top_k in (1, 6, 60, 400):
        expected = search(queries, [(ids, vectors)], top_k, backend="torch", device="cpu")
        found = index.search(queries, top_k)
        assert found.ids.tolist() == expected.ids.tolist()
        assert found.scores.tolist() == expected.scores.tolist()


def test_half_precision_rounds_the_numbers_not_the_scores() -> None:
    """Half precision has 2,048 and 2,050 but nothing between: as scores, these would tie."""
    index = FlatIP(2, dtype="float16")
    index.add(["a", "b"], np.array([[2048, 0], [2048, 1]], np.float32))
    assert index.search(np.ones((1, 2), np.float32), 2).scores.tolist() == [[2049, 2048]]


def test_what_does_not_fit_is_refused() -> None:
    index = FlatIP(2, dtype="float16")
    assert index.search(np.ones((3, 2), np.float32), 5).ids.shape == (3, 0)
    one = np.array([[1, 0]], np.float32)
    index.add(["a"], one)
    with pytest.raises(ValueError, match="'a' is in the index already"):
        index.add(["b", "a"], np.ones((2, 2), np.float32))
    assert index.search(one, 5).ids.tolist() == [["a"]]
    one[0, 0] = 7  # the index holds its own copy
    assert index.search(np.ones((1, 2), np.float32), 1).scores.tolist() == [[1]]
    with pytest.raises(ValueError, match="beyond float16"):
        index.add(["c"], np.array([[1e6, 0]], np.float32))
    with pytest.raises(ValueError, match="3 dimensions"):
        index.search(np.ones((1, 3), np.float32), 1)
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        index.search(one, 0)
    with pytest.raises(ValueError, match="dtype must be one of"):
        FlatIP(2, dtype="int8")
    with pytest.raises(ValueError, match="at least one device"):
        FlatIP(2, devices=[])
