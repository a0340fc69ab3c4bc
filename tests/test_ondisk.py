"""Inverted files on disk: the same hits as in memory, kills, refusals, the two commands."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from st_aggretriever.cli import main
from st_aggretriever.search import ondisk
from st_aggretriever.search.ondisk import OnDiskIndex, build_on_disk, search_on_disk
from st_aggretriever.search.retrieve import search_exactly
from st_aggretriever.vectors.folder import VectorFolder, VectorWriter

faiss = pytest.importorskip("faiss")

ROWS, DIM = 600, 8
RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((ROWS, DIM), np.float32)
QUERIES = RNG.standard_normal((10, DIM), np.float32)


def write_vectors(path: Path, vectors: np.ndarray, first: int = 0, side: str = "document") -> VectorFolder:
    manifest = {"side": side, "model": "m", "model_hash": "0" * 64, "dimension": DIM, "parts": [["all", DIM]],
                "similarity": "dot", "length": 8, "prompt": "", "block_size": 70, "source": str(first)}  # fmt: skip
    with VectorWriter(path, manifest) as writer:
        starts = range(0, len(vectors), 70)
        for number, start in enumerate(starts):
            block = vectors[start : start + 70]
            writer.write(number, [f"dök{first + start + row}" for row in range(len(block))], block)
        writer.finish(len(starts))
    return VectorFolder(path)


@pytest.fixture
def folders(tmp_path: Path) -> list[VectorFolder]:
    return [write_vectors(tmp_path / "a", VECTORS[:390]), write_vectors(tmp_path / "b", VECTORS[390:], 390)]


@pytest.mark.parametrize("factory", ["IVF8,Flat", "IVF4,PQ4x4", "OPQ4,IVF4,PQ4x4"])
def test_it_finds_what_the_same_index_in_memory_finds(
    folders: list[VectorFolder], tmp_path: Path, factory: str
) -> None:
    path = build_on_disk(folders, factory, tmp_path / "index", part_rows=150)
    found, report = search_on_disk(path, folders, QUERIES, 9, parameters="nprobe=2")
    memory = faiss.index_factory(DIM, factory, faiss.METRIC_INNER_PRODUCT)
    memory.train(VECTORS)
    memory.add(VECTORS)
    faiss.ParameterSpace().set_index_parameters(memory, "nprobe=2")
    scores, positions = memory.search(QUERIES, 9)
    assert found.ids.tolist() == [[f"dök{place}" for place in row] for row in positions]
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5)
    assert sorted(file.name for file in path.iterdir()) == [
        "ids.bin", "ids.npy", "index.faiss", "lists.ivfdata", "manifest.json"]  # fmt: skip
    assert report["bytes"] == sum(file.stat().st_size for file in path.iterdir())


def test_all_cells_of_uncompressed_vectors_are_exact_and_it_can_be_moved(
    folders: list[VectorFolder], tmp_path: Path
) -> None:
    path = build_on_disk(folders, "IVF8,Flat", tmp_path / "index")
    path = path.rename(tmp_path / "moved")
    whole = write_vectors(tmp_path / "whole", VECTORS)
    expected = search_exactly(whole, QUERIES, 20)
    found, _ = search_on_disk(path, folders, QUERIES, 20, parameters="nprobe=8")
    assert found.ids.tolist() == expected.ids.tolist()
    few, _ = search_on_disk(path, folders, QUERIES, ROWS, parameters="nprobe=1")
    assert few.ids[0][-1] is None  # a cell holds fewer
    assert few.scores[0][-1] == -np.inf


def test_killed_at_every_step_it_goes_on_and_ends_the_same(folders: list[VectorFolder], tmp_path: Path) -> None:
    from folders import run_and_kill

    build_on_disk(folders, "IVF4,PQ4x4", tmp_path / "whole", part_rows=200)
    for step in range(1, 60):
        lived = run_and_kill(lambda: build_on_disk(folders, "IVF4,PQ4x4", tmp_path / "v", part_rows=200), step)
        if lived or (tmp_path / "v").exists():
            break
    assert step > 5
    one, two = (search_on_disk(tmp_path / name, folders, QUERIES, 9)[0] for name in ("whole", "v"))
    assert one.ids.tolist() == two.ids.tolist()
    assert not (tmp_path / "v.partial").exists()


def test_a_disk_too_full_for_the_codes_is_a_sentence_and_the_parts_stay(
    folders: list[VectorFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ondisk.shutil, "disk_usage", lambda _: SimpleNamespace(free=ROWS * (2 + 8) - 1))
        with pytest.raises(OSError, match=r"no space is left for .*v\.partial"):
            build_on_disk(folders, "IVF4,PQ4x4", tmp_path / "v", part_rows=200)
    assert list((tmp_path / "v.partial").glob("part-*.faiss"))
    build_on_disk(folders, "IVF4,PQ4x4", tmp_path / "v", part_rows=200)


def test_what_does_not_fit_is_refused(folders: list[VectorFolder], tmp_path: Path) -> None:
    for factory, sentence in (
        ("Flat", "is no inverted file"),
        ("NONSENSE", "could not parse"),
        ("IVF900,Flat", "Number of training points"),
    ):
        with pytest.raises(ValueError, match=sentence):
            build_on_disk(folders, factory, tmp_path / f"no-{factory}")
    path = build_on_disk(folders, "IVF4,Flat", tmp_path / "index")
    with pytest.raises(FileExistsError, match="index exists"):
        build_on_disk(folders, "IVF4,Flat", path)
    with pytest.raises(ValueError, match="was built from other vectors"):
        OnDiskIndex(path, folders[:1])
    with pytest.raises(FileNotFoundError, match="is no index on disk"):
        OnDiskIndex(tmp_path, folders)
    (tmp_path / "v.partial").mkdir()
    begun = {"format": ondisk.FORMAT, "factory": "IVF4,PQ4x4"}
    (tmp_path / "v.partial" / "manifest.json").write_text(json.dumps(begun))
    (tmp_path / "v.partial" / "trained.faiss").touch()
    with pytest.raises(ValueError, match=r"begun with .*factory IVF4,PQ4x4.*; now it is .*factory IVF4,Flat"):
        build_on_disk(folders, "IVF4,Flat", tmp_path / "v")


def test_no_hit_is_asked_for(folders: list[VectorFolder], tmp_path: Path) -> None:
    path = build_on_disk(folders, "IVF4,Flat", tmp_path / "index")
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        OnDiskIndex(path, folders).search(QUERIES, 0)


def test_what_cannot_be_trained_leaves_the_name_free(folders: list[VectorFolder], tmp_path: Path) -> None:
    for factory in ("IVF0,Flat", "IVF100000,Flat"):
        with pytest.raises(ValueError, match=factory):
            build_on_disk(folders, factory, tmp_path / "index")
    with pytest.raises(ValueError, match="holds query vectors"):
        build_on_disk([write_vectors(tmp_path / "q", QUERIES, side="query")], "IVF4,Flat", tmp_path / "index")
    assert build_on_disk(folders, "IVF4,Flat", tmp_path / "index").is_dir()


@pytest.mark.parametrize("name", ["trained.faiss", "part-00000.faiss"])
def test_what_an_interruption_left_and_is_damaged_is_named(
    folders: list[VectorFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ondisk, "_put_together", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_on_disk(folders, "IVF4,Flat", tmp_path / "index", part_rows=200)
    monkeypatch.undo()
    left = tmp_path / "index.partial" / name
    left.write_bytes(left.read_bytes()[:20])
    with pytest.raises(ValueError, match=rf"{name} is damaged: .*\. Remove it and run the same command again\.$"):
        build_on_disk(folders, "IVF4,Flat", tmp_path / "index", part_rows=200)
    for path in left.parent.glob("*.faiss"):
        path.unlink()
    assert build_on_disk(folders, "IVF4,Flat", tmp_path / "index", part_rows=200).is_dir()


def test_what_faiss_says_while_the_index_is_filled_is_a_sentence(
    folders: list[VectorFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Error in void faiss::Index::add() at a.cpp:43: add_with_ids not implemented")

    monkeypatch.setattr(ondisk, "_fill", fail)
    with pytest.raises(ValueError, match=r"can't make the index 'IVF4,Flat' .*: add_with_ids not implemented\.$"):
        build_on_disk(folders, "IVF4,Flat", tmp_path / "index")


@pytest.mark.parametrize("name", ["index.faiss", "lists.ivfdata", "ids.bin", "ids.npy", "manifest.json"])
def test_damage_is_named_before_anything_is_mapped(folders: list[VectorFolder], tmp_path: Path, name: str) -> None:
    path = build_on_disk(folders, "IVF4,Flat", tmp_path / "index") / name
    content = path.read_bytes()
    # Of the long lists only ids that can't be are seen: most of their bytes are numbers.
    other = (b"\0" * 7 + b"\x7f" if name == "lists.ivfdata" else b"\xff") * len(content)
    for damaged in (content[:-9], content[: len(content) // 2], b"", content + b"x", other[: len(content)]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{path} is (damaged: .*|not of the format.*)Build the index again"):
            # What has the right size is found where it is read.
            OnDiskIndex(path.parent, folders).search(QUERIES, ROWS, "nprobe=4")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing|is no index on disk"):
        OnDiskIndex(path.parent, folders)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": "x"}, "'rows' must be of the type int, got 'x'"),
        ({"rows": 7}, "ids.npy is damaged"),
        ({"bytes": {}}, "not None"),
        ({"factory": None}, "'factory' must be"),
        ({"format": "st_aggretriever index on disk, 1"}, "not of the format"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(
    folders: list[VectorFolder], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = build_on_disk(folders, "IVF4,Flat", tmp_path / "index") / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=words):
        OnDiskIndex(path.parent, folders)


def test_commands(folders: list[VectorFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_vectors(tmp_path / "q", QUERIES, side="query")
    places = [str(folder.folder) for folder in folders]
    index = str(tmp_path / "index")
    assert main(["index", "--vectors", *places, "--factory", "IVF8,Flat", "--output", index]) == 0
    assert "600 vectors in IVF8,Flat" in capsys.readouterr().out
    search: list[Any] = ["search", "--index", *places, "--queries", str(tmp_path / "q"), "--on-disk", index]
    search += ["--run", str(tmp_path / "run"), "--top-k", "9", "--overwrite", "--recall-queries", "6"]
    for cells, recall in ((1, "0."), (8, "1.0000 on 6 queries")):
        assert main([*search, "--index-parameters", f"nprobe={cells}"]) == 0
        assert f"recall of the exact 9 {recall}" in capsys.readouterr().out
    assert len((tmp_path / "run").read_text().splitlines()) == 90
    assert main([*search, "--index-factory", "Flat"]) == 2
    assert "--on-disk is an index" in capsys.readouterr().err
