"""Approximate indexes: recall against exact search, refusals in a sentence, an index kept in a file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from st_aggretriever.cli import main
from st_aggretriever.search.approximate import (
    build_index,
    load_index,
    save_index,
    search_approximately,
    training_sample,
)
from st_aggretriever.search.retrieve import rankings_of, search_exactly
from st_aggretriever.vectors.folder import VectorFolder, VectorWriter

faiss = pytest.importorskip("faiss")


def write_vectors(folder: Path, vectors: np.ndarray, size: int = 150, **changes: Any) -> VectorFolder:
    manifest = {"side": "document", "model": "m", "model_hash": "0" * 64, "dimension": vectors.shape[1],
                "parts": [["all", vectors.shape[1]]], "similarity": "dot", "length": 8, "prompt": "",
                "block_size": size}  # fmt: skip
    writer = VectorWriter(folder, manifest | changes)
    starts = range(0, len(vectors), size)
    for number, start in enumerate(starts):
        block = vectors[start : start + size]
        writer.write(number, [f"d{start + row}" for row in range(len(block))], block)
    writer.finish(len(starts))
    return VectorFolder(folder)


@pytest.fixture
def folder(tmp_path: Path) -> VectorFolder:
    """400 vectors of different length, as a model's without normalisation."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((400, 8), np.float32) * rng.uniform(0.5, 2, (400, 1)).astype(np.float32)
    return write_vectors(tmp_path / "v", vectors)


QUERIES = np.random.default_rng(1).standard_normal((20, 8), np.float32)


def find(folder: VectorFolder, factory: str, parameters: str = "", top_k: int = 10) -> Any:
    return search_approximately(folder, QUERIES, top_k, build_index(folder, factory), parameters)


def test_an_approximate_index_reports_its_recall(folder: VectorFolder) -> None:
    exact = search_exactly(folder, QUERIES, 10)
    flat, report = find(folder, "Flat")
    assert flat.ids.tolist() == exact.ids.tolist()
    assert report["recall"] == 1.0
    assert report["bytes"] >= 400 * 8 * 4
    some, all_cells = (find(folder, "IVF8,Flat", f"nprobe={cells}") for cells in (1, 8))
    share = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(some[0].ids, exact.ids, strict=True)])
    assert some[1]["recall"] == pytest.approx(share)
    assert some[1]["recall"] < 1.0 == all_cells[1]["recall"]


def test_size_is_that_of_the_file(folder: VectorFolder, tmp_path: Path) -> None:
    built = build_index(folder, "SQ8")
    save_index(tmp_path / "file", built, folder)
    ours = (tmp_path / "file").read_bytes().index(b"\n") + 1 + 32  # the header and the checksum
    _, report = search_approximately(folder, QUERIES, 10, built)
    assert report["bytes"] == (tmp_path / "file").stat().st_size - ours


def test_a_query_with_few_hits_in_its_cells_keeps_no_empty_id(tmp_path: Path) -> None:
    vectors = np.repeat(np.eye(2, dtype=np.float32), [3, 2], axis=0)
    folder = write_vectors(tmp_path / "v", vectors)
    queries = np.eye(2, dtype=np.float32)[1:]
    hits, report = search_approximately(folder, queries, 5, build_index(folder, "IVF2,Flat"))
    assert rankings_of(["q"], hits) == {"q": {"d3": 1.0, "d4": 1.0}}
    assert report["recall"] == 0.4


@pytest.mark.parametrize(
    ("factory", "parameters", "reason"),
    [
        ("NONSENSE", "", "could not parse index string NONSENSE"),
        ("PQ3", "", "should be a multiple of the number of subquantizers"),
        ("IVF8,Flat", "", r"Number of training points \(4\) should be at least"),
        ("Flat", "nprobe=3", "could not set parameter nprobe"),
        ("IDMap,Flat", "", "add_with_ids"),
    ],
)
def test_what_faiss_refuses_is_said_in_one_sentence(tmp_path: Path, factory: str, parameters: str, reason: str) -> None:
    folder = write_vectors(tmp_path / "v", np.eye(4, dtype=np.float32))
    with pytest.raises(ValueError, match=f"Faiss can't make the index '{factory}'.*{reason}") as caught:
        build_index(folder, factory, parameters)
    assert "\n" not in str(caught.value)
    assert ".cpp" not in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "parameters"),
    [("IVF2,Flat", "nprobe=0"), ("HNSW8", "efSearch=-5"), ("IVF2,Flat", "nprobe=nan"), ("IVF2,Flat", "nprobe=x")],
)
def test_counts_of_a_search_are_at_least_one(folder: VectorFolder, factory: str, parameters: str) -> None:
    with pytest.raises(ValueError, match=r"of the index .* must be a number from 1"):
        find(folder, factory, parameters)
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        find(folder, factory, top_k=0)


def test_the_training_sample_is_spread_over_the_folder(tmp_path: Path) -> None:
    folder = write_vectors(tmp_path / "v", np.arange(20, dtype=np.float32).reshape(10, 2), 4)
    assert training_sample([folder], 4)[:, 0].tolist() == [0, 6, 12, 18]
    assert training_sample([folder], 10)[:, 0].tolist() == list(range(0, 20, 2))


@pytest.mark.parametrize("factory", ["IVF8,Flat", "HNSW8", "PQ4x4", "SQfp16", "IVF4,PQ4x4"])
def test_a_saved_index_finds_the_same(folder: VectorFolder, tmp_path: Path, factory: str) -> None:
    built = build_index(folder, factory)
    save_index(tmp_path / "file", built, folder)
    loaded = load_index(tmp_path / "file", folder)
    assert (loaded.factory, loaded.ids) == (factory, built.ids)
    for one, two in zip(search_approximately(folder, QUERIES, 10, built)[0],
                        search_approximately(folder, QUERIES, 10, loaded)[0], strict=True):  # fmt: skip
        assert one.tolist() == two.tolist()


def test_parameters_stay_with_an_index_and_its_file(folder: VectorFolder, tmp_path: Path) -> None:
    built = build_index(folder, "IVF8,Flat", "nprobe=3")
    assert search_approximately(folder, QUERIES, 10, built, "nprobe=8")[1]["parameters"] == "nprobe=8"
    save_index(tmp_path / "file", built, folder)
    for index in (built, load_index(tmp_path / "file", folder)):
        report = search_approximately(folder, QUERIES, 10, index)[1]
        assert (report["parameters"], report["recall"]) == ("nprobe=8", 1.0)
    assert search_approximately(folder, QUERIES, 10, built, "max_codes=9")[1]["parameters"] == "nprobe=8,max_codes=9"


def test_an_index_of_other_vectors_or_a_damaged_one_is_refused(folder: VectorFolder, tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_index(path, build_index(folder, "Flat"), folder)
    vectors = folder.load()[1]
    changed = vectors.copy()
    changed[0, 0] += 1
    for name, other in (("w", write_vectors(tmp_path / "w", changed)),
                        ("x", write_vectors(tmp_path / "x", vectors, model_hash="1" * 64))):  # fmt: skip
        with pytest.raises(ValueError, match=rf"was built from other vectors than .*{name} holds"):
            load_index(path, other)
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in (middle, len(content) - 1)]
    older = content[:-32].replace(b', "ends_with": "sha256"', b"")  # without a sum
    path.write_bytes(older)
    assert load_index(path, folder).ids == folder.load()[0]
    for damaged, sentence in ((content[:-7], "is damaged"), (flipped[0], "is damaged"), (flipped[1], "is damaged"),
                              (older[:-7], "is damaged"),
                              (content.replace(b"ends_with", b"ends_wiht"), "is damaged"),
                              (b"{}\n" + content, "is no index"),
                              (b"", "is no index"), (b"\xff" * 99, "is no index")):  # fmt: skip
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=sentence):
            load_index(path, folder)


def test_a_failed_write_leaves_the_old_file(
    folder: VectorFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(index: Any, writer: Any) -> None:
        raise RuntimeError("write error: No space left on device")

    path = tmp_path / "file"
    path.write_text("old")
    built = build_index(folder, "Flat")
    monkeypatch.setattr(faiss, "write_index", half)
    with pytest.raises(OSError, match="file can't be written: write error: No space left"):
        save_index(path, built, folder)
    assert path.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "v"]


def test_command_saves_loads_and_refuses(
    folder: VectorFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_vectors(tmp_path / "q", QUERIES, side="query")
    base = ["search", "--index", str(folder.folder), "--queries", str(tmp_path / "q"), "--top-k", "10"]
    kept = str(tmp_path / "kept")
    for number, more in enumerate((
        ["--index-factory", "IVF8,Flat", "--save-index", kept, "--index-parameters", "nprobe=2"],
        ["--load-index", kept],
        ["--load-index", kept, "--index-parameters", "nprobe=2"],
    )):  # fmt: skip
        assert main([*base, "--run", str(tmp_path / f"run{number}"), *more]) == 0
        assert "IVF8,Flat nprobe=2: recall of the exact 10 0." in capsys.readouterr().out
    assert (tmp_path / "run0").read_text() == (tmp_path / "run1").read_text() == (tmp_path / "run2").read_text()
    for more, sentence in (
        (["--load-index", kept, "--index-factory", "Flat"], "Give one of them"),
        (["--save-index", kept], "belong to --index-factory"),
        (["--index-factory", "Flat", "--save-index", kept], "kept exists already"),
        (["--load-index", kept, "--index-dtype", "float16"], "leave --index-dtype out"),
        (["--load-index", kept, "--save-index", str(tmp_path / "again")], "leave --save-index out"),
        (["--load-index", str(tmp_path / "none")], "none does not exist: expected a file"),
        (["--load-index", str(tmp_path)], "is a folder: expected a file"),
    ):
        assert main([*base, "--run", str(tmp_path / "no"), *more]) == 2
        assert sentence in capsys.readouterr().err
    swapped = ["search", "--index", str(tmp_path / "q"), "--queries", str(folder.folder), "--run", str(tmp_path / "no")]
    assert main(swapped) == 2
    assert "the two are swapped" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
