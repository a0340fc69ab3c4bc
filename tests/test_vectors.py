"""Vectors on disk: blocks, manifest, resuming, refusals, search from disk, approximate indexes, the two commands."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from st_aggretriever import build_aggretriever
from st_aggretriever.atomic import lock_file
from st_aggretriever.bulk import Source, encode_to_disk
from st_aggretriever.cli import main
from st_aggretriever.encoding import count_truncated, model_hash, prompt_of
from st_aggretriever.search.exact import search
from st_aggretriever.search.retrieve import load_queries, search_exactly
from st_aggretriever.vectors.folder import VectorFolder, VectorWriter, check_comparable

MANIFEST: dict[str, Any] = {
    "side": "document", "model": "m", "model_hash": "0" * 64, "dimension": 2, "parts": [["cls", 1], ["lexical", 1]],
    "similarity": "dot", "length": 128, "prompt": "", "block_size": 2,
}  # fmt: skip


def write_vectors(folder: Path, vectors: np.ndarray, size: int = 2, *, dtype: str = "float32", **changes: Any) -> Path:
    manifest = MANIFEST | {"dimension": vectors.shape[1], "parts": [["all", vectors.shape[1]]], "block_size": size}
    writer = VectorWriter(folder, manifest | changes, dtype=dtype)
    starts = range(0, len(vectors), size)
    for number, start in enumerate(starts):
        block = vectors[start : start + size]
        writer.write(number, [f"d{start + row}" for row in range(len(block))], block)
    writer.finish(len(starts))
    return folder


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="says which files are open only on Linux")
def test_a_folder_holds_no_open_file_when_it_is_renamed_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, which has no fcntl, refuses such a rename."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    rename = Path.rename

    def strict(path: Path, target: Path) -> Path:
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # of the listing itself
                assert not os.readlink(f"/proc/self/fd/{number}").startswith(f"{path}/")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", strict)
    vectors = np.eye(4, dtype=np.float32)
    folder = write_vectors(tmp_path / "v", vectors)
    assert VectorFolder(folder).load()[1].tolist() == vectors.tolist()
    assert not (folder / ".lock").exists()


def test_a_lock_is_of_the_file_that_bears_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ".lock"
    flock = fcntl.flock
    removed = []

    def remove_once(file: Any, how: int) -> None:
        flock(file, how)
        if not removed:  # as a holder does that ends just then
            removed.append(path.unlink())

    monkeypatch.setattr(fcntl, "flock", remove_once)
    with lock_file(path, "busy"), pytest.raises(BlockingIOError, match="busy"):
        lock_file(path, "busy")
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "samestat", lambda *_: False)  # a file system that can't say so
        lock_file(path, "busy").close()
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError):
        lock_file(path, "busy")


class Letters:
    """An encoder whose vector counts a, b and c; stops after a number of texts as a killed process would."""

    similarity_fn_name = "dot"

    def __init__(self, die_after: int | None = None) -> None:
        self.seen: list[str] = []
        self.die_after = die_after

    def encode_document(self, texts: list[str], **_: Any) -> np.ndarray:
        self.seen += [text for text in texts if text != "dimension"]
        if self.die_after is not None and len(self.seen) > self.die_after:
            raise KeyboardInterrupt
        return np.array([[text.count(letter) for letter in "abc"] for text in texts], np.float32)

    encode_query = encode_document


TEXTS = [(f"t{number}", "a" * number + "b") for number in range(7)]


def source(texts: list[tuple[str, str]] = TEXTS) -> Source:
    return Source("texts", lambda: iter(texts))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    vectors = np.array([[1, 2], [3, 4], [0.1, -5]], np.float32)
    folder = VectorFolder(write_vectors(tmp_path / "v", vectors, dtype=dtype))
    apart = list(folder.blocks(read_bytes=1))
    assert [ids for ids, _ in apart] == [["d0", "d1"], ["d2"]]
    assert [block.dtype for _, block in apart] == [np.float32, np.float32]
    assert [ids for ids, _ in folder.blocks(read_bytes=32)] == [["d0", "d1", "d2"]]
    ids, loaded = folder.load()
    assert ids == ["d0", "d1", "d2"]
    assert loaded.tolist() == vectors.astype(dtype).astype(np.float32).tolist()
    assert folder.size == 3 * 2 * {"float32": 4, "float16": 2}[dtype]
    stored = np.load(tmp_path / "v" / "block-00001.npy")
    assert stored.dtype == dtype
    record = json.loads((tmp_path / "v" / "block-00001.json").read_text())
    assert record["sha256"] == hashlib.sha256(stored.tobytes()).hexdigest()
    names = ["block-00000.json", "block-00000.npy", "block-00001.json", "block-00001.npy", "manifest.json"]
    assert sorted(path.name for path in (tmp_path / "v").iterdir()) == names


def test_numbers_beyond_float16_are_refused_by_id(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vector of 'd1' holds numbers beyond float16"):
        write_vectors(tmp_path / "v", np.array([[1, 2], [3, 70_000]], np.float32), dtype="float16")
    assert not (tmp_path / "v").exists()


@pytest.mark.parametrize("die_after", range(7))
def test_an_interrupted_encoding_goes_on_and_ends_the_same(tmp_path: Path, die_after: int) -> None:
    whole = encode_to_disk(Letters(), source(), tmp_path / "whole", block_size=2, batch_size=1)
    with pytest.raises(KeyboardInterrupt, match=r"finished blocks are kept in .*v\.partial, the same command goes on"):
        encode_to_disk(Letters(die_after), source(), tmp_path / "v", block_size=2, batch_size=1)
    assert not (tmp_path / "v").exists()
    with pytest.raises(FileNotFoundError, match="unfinished encoding: run the same encode command again"):
        VectorFolder(tmp_path / "v")
    again = Letters()
    resumed = encode_to_disk(again, source(), tmp_path / "v", block_size=2, batch_size=1)
    done = die_after // 2 * 2
    assert sorted(again.seen) == sorted(text for _, text in TEXTS[done:])  # complete blocks are not encoded again
    assert not (tmp_path / "v.partial").exists()
    assert resumed.manifest == whole.manifest
    assert resumed.manifest["rows"] == 7
    for name in ("block-00000", "block-00003"):
        for ending in ("npy", "json"):
            mine, other = (tmp_path / folder / f"{name}.{ending}" for folder in ("v", "whole"))
            assert mine.read_bytes() == other.read_bytes()


def test_a_started_folder_goes_on_only_with_the_same_texts_and_settings(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        encode_to_disk(Letters(2), source(), tmp_path / "v", block_size=2, batch_size=1)
    before = sorted(path.name for path in (tmp_path / "v.partial").iterdir())
    changed = [*TEXTS[:-1], ("t6", "other")]
    with pytest.raises(ValueError, match=r"v\.partial was begun with source_sha256 \w{12}; now it is source_sha256"):
        encode_to_disk(Letters(), source(changed), tmp_path / "v", block_size=2)
    with pytest.raises(ValueError, match="begun with block_size 2; now it is block_size 3"):
        encode_to_disk(Letters(), source(), tmp_path / "v", block_size=3)
    with pytest.raises(ValueError, match="begun with dtype float32, model unnamed; now it is dtype float16, model x"):
        encode_to_disk(Letters(), source(), tmp_path / "v", block_size=2, dtype="float16", model_name="x")
    with pytest.raises(ValueError, match="begun with files npy; now it is files parquet"):
        encode_to_disk(Letters(), source(), tmp_path / "v", block_size=2, files="parquet")
    assert sorted(path.name for path in (tmp_path / "v.partial").iterdir()) == before


def test_texts_that_became_fewer_are_noticed_before_the_folder_has_its_name(tmp_path: Path) -> None:
    streams = iter([TEXTS, TEXTS[:5], TEXTS, TEXTS])
    with pytest.raises(ValueError, match="can't be completed: expected 7 texts, got 5 rows and 0 left out"):
        encode_to_disk(Letters(), Source("letters", lambda: iter(next(streams))), tmp_path / "v", block_size=2)
    assert not (tmp_path / "v").exists()
    assert (tmp_path / "v.partial" / "block-00001.json").exists()


def test_a_folder_without_a_blocks_file_is_not_finished(tmp_path: Path) -> None:
    with VectorWriter(tmp_path / "v", {"side": "document"}) as writer:
        for number in (0, 1):
            writer.write(number, [f"d{number}"], np.ones((1, 3), np.float32))
        (tmp_path / "v.partial" / "block-00000.npy").unlink()
        with pytest.raises(FileNotFoundError, match=r"block-00000\.npy is missing"):
            writer.finish(2)
    assert not (tmp_path / "v").exists()


def test_an_existing_folder_and_bad_options_are_refused_before_work(tmp_path: Path) -> None:
    model = Letters()
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileExistsError, match="taken exists"):
        encode_to_disk(model, source(), tmp_path / "taken")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        encode_to_disk(model, source(), tmp_path / "no" / "folder")
    for options, sentence in (({"side": "both"}, "side must be"), ({"dtype": "int8"}, "dtype must be one of float32"),
                              ({"block_size": 0}, "block_size must be at least 1")):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            encode_to_disk(model, source(), tmp_path / "v", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="texts holds no text"):
        encode_to_disk(model, source([]), tmp_path / "v")
    assert model.seen == []
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_broken_blocks_and_manifests_are_named(tmp_path: Path) -> None:
    vectors = np.eye(4, dtype=np.float32)
    cut = write_vectors(tmp_path / "cut", vectors)
    block = cut / "block-00001.npy"
    block.write_bytes(block.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"block-00001\.npy is broken"):
        VectorFolder(cut).load()
    other = write_vectors(tmp_path / "other", vectors)
    np.save(other / "block-00000.npy", np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"block-00000\.npy holds float32 \(2, 3\), expected float32 \(2, 4\)"):
        VectorFolder(other).load()
    (other / "block-00001.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"block-00001\.json is missing"):
        VectorFolder(other).read(1)
    (other / "manifest.json").write_text('{"format": "else"}')
    with pytest.raises(ValueError, match="not of the format"):
        VectorFolder(other)
    with pytest.raises(FileNotFoundError, match="is no folder of vectors"):
        VectorFolder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_hash": "1" * 64}, r"the queries' model is m \(111111111111\), the documents' is m \(000000000000\)"),
        ({"parts": [["lexical", 1], ["cls", 1]]}, "order of parts is lexical 1 ; cls 1, the documents' is cls 1 ; lex"),
        ({"dimension": 3}, "dimension is 3, the documents' is 2"),
        ({"similarity": "cosine"}, "similarity is cosine"),
        ({"side": "document"}, "expected vectors of the side 'query', got 'document'"),
    ],
)
def test_queries_of_another_model_order_or_dimension_are_refused(changes: dict[str, Any], sentence: str) -> None:
    check_comparable(MANIFEST | {"side": "query"}, MANIFEST)
    with pytest.raises(ValueError, match=sentence):
        check_comparable(MANIFEST | {"side": "query"} | changes, MANIFEST)
    with pytest.raises(ValueError, match="model is n, the documents' is m"):  # no hash: the name decides
        check_comparable(MANIFEST | {"side": "query", "model_hash": None, "model": "n"}, MANIFEST)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_search_from_disk_equals_search_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, backend: str
) -> None:
    rng = np.random.default_rng(0)
    vectors, queries = (rng.integers(-2, 3, (rows, 4)).astype(np.float32) for rows in (50, 5))  # exact, full of ties
    folder = VectorFolder(write_vectors(tmp_path / "v", vectors, size))
    expected = search(queries, [([f"d{row}" for row in range(50)], vectors)], 9, backend=backend)
    monkeypatch.setattr(VectorFolder.blocks, "__kwdefaults__", {"read_bytes": size * 16 * 2})
    found = search_exactly(folder, queries, 9, backend=backend)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.scores.tolist() == expected.scores.tolist()


def test_float16_search_rounds_as_a_float16_folder_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors, queries = rng.standard_normal((40, 8), np.float32), rng.standard_normal((3, 8), np.float32)
    full = VectorFolder(write_vectors(tmp_path / "full", vectors))
    half = VectorFolder(write_vectors(tmp_path / "half", vectors, dtype="float16"))
    found, expected = search_exactly(full, queries, 5, dtype="float16"), search_exactly(half, queries, 5)
    assert found.scores.tolist() == expected.scores.tolist()
    assert found.scores.tolist() != search_exactly(full, queries, 5).scores.tolist()
    with pytest.raises(ValueError, match="dtype must be one of"):
        search_exactly(full, queries, 5, dtype="int8")


@pytest.fixture(scope="module")
def models(tiny_bert: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of two models that differ in their seed alone."""
    paths = {}
    for seed, name in enumerate(("one", "two")):
        paths[name] = str(tmp_path_factory.mktemp("models") / name)
        options = {"query_length": 8, "document_length": 12, "prompts": {"query": "what is "}}
        build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4, seed=seed, **options).save_pretrained(paths[name])
    return paths


def test_the_hash_is_of_the_content(models: dict[str, str], tiny_bert: str) -> None:
    from st_aggretriever import load_aggretriever

    one, again, two = (load_aggretriever(models[name], device="cpu") for name in ("one", "one", "two"))
    again.encode(["a " * 5, "the cat"])  # leaves truncation and padding in the tokenizer
    assert model_hash(one) == model_hash(again) != model_hash(two)
    again.prompts["query"] = "other "
    assert model_hash(one) != model_hash(again)
    lengths = [build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4, query_length=length) for length in (8, 9)]
    assert model_hash(lengths[0]) != model_hash(lengths[1])
    assert model_hash(Letters()) is None


def test_cut_texts_are_counted_with_prompt_and_special_tokens(models: dict[str, str]) -> None:
    from st_aggretriever import load_aggretriever

    model = load_aggretriever(models["one"], device="cpu")
    assert prompt_of(model, "query") == "what is "
    # 8 tokens: [CLS] what is + 4 words + [SEP] fit; documents have 12 and no prompt.
    assert count_truncated(model, ["the cat the cat", "the cat the cat the", ""], "query") == 1
    assert count_truncated(model, ["the " * 10, "the " * 11], "document") == 1
    assert count_truncated(Letters(), ["a"], "query") is None
    assert count_truncated(model, ["the \ud800"], "query") == 0  # half a character pair, as the model reads it


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    corpus = {"1": "the cat", "2": "a dog and a bird " * 4, "3": "bread needs yeast", "4": ""}
    for name, texts in (("corpus", corpus), ("queries", {"q": "who is the cat", "r": "yeast"})):
        lines = [json.dumps({"_id": key, "text": text}) + "\n" for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def test_commands_encode_and_search(
    models: dict[str, str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from st_aggretriever import load_aggretriever

    encode = ["encode", "--data", str(data), "--device", "cpu"]
    index, queries, foreign = (str(tmp_path / name) for name in ("index", "queries", "foreign"))
    assert main([*encode, "--model", models["one"], "--output", index, "--block-size", "3", "--dtype", "float16"]) == 0
    assert "4 document vectors of 12 dimensions, float16, 0.0 MB, 2 blocks" in (out := capsys.readouterr().out)
    assert "texts cut at 12 tokens: 1\nprompt: ''" in out
    for model, output in ((models["one"], queries), (models["two"], foreign)):
        assert main([*encode, "--model", model, "--output", output, "--side", "query"]) == 0
    assert VectorFolder(index).manifest["parts"] == [["cls_embedding", 4], ["lexical_embedding", 8]]
    capsys.readouterr()

    run = tmp_path / "run"
    search_it = ["search", "--index", index, "--run", str(run), "--top-k", "3"]
    assert main([*search_it, "--queries", queries]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("4 vectors of 12 dimensions")
    assert "2 queries, up to 3 hits each" in printed
    model = load_aggretriever(models["one"], device="cpu")
    texts = ["the cat", "a dog and a bird " * 4, "bread needs yeast", ""]
    scores = model.encode_query(["who is the cat", "yeast"]) @ model.encode_document(texts).astype(np.float16).T
    best = [str(place + 1) for place in np.argsort(-scores[0].astype(np.float32))[:3]]
    assert [line.split()[2] for line in run.read_text().splitlines()[:3]] == best

    assert main([*search_it, "--queries", foreign, "--overwrite"]) == 2
    assert "the queries' model is" in capsys.readouterr().err
    assert main([*search_it, "--queries", queries]) == 2
    assert "run exists" in capsys.readouterr().err
    assert main([*search_it, "--queries", index, "--overwrite"]) == 2
    assert "expected vectors of the side 'query'" in capsys.readouterr().err
    assert main([*search_it, "--queries", queries, "--overwrite", "--format", "msmarco"]) == 0
    assert run.read_text().splitlines()[0] == f"q\t{best[0]}\t1"
    assert main([*encode, "--model", models["one"], "--output", index]) == 2
    assert "index exists" in capsys.readouterr().err


def test_command_prints_the_recall_of_an_approximate_index(
    models: dict[str, str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("faiss")
    for side in ("document", "query"):
        arguments = ["--model", models["one"], "--data", str(data), "--output", str(tmp_path / side), "--side", side]
        assert main(["encode", *arguments, "--device", "cpu"]) == 0
    search_it = ["search", "--index", str(tmp_path / "document"), "--queries", str(tmp_path / "query")]
    search_it += ["--run", str(tmp_path / "run"), "--index-factory", "HNSW4"]
    capsys.readouterr()
    assert main(search_it) == 0
    assert "HNSW4: recall of the exact 4 1.0000, index 0.0 MB" in capsys.readouterr().out
    assert "searched as" not in capsys.readouterr().out
    for wrong, sentence in (
        (["--index-dtype", "float16"], "leave --index-dtype out"),
        (["--workers", "2"], "leave --workers out"),
        (["--engine", "ray"], "leave --engine out"),
        (["--recall-queries", "5"], "--recall-queries belongs to --on-disk"),
        (["--device", "nonsense"], "nonsense"),
        (["--backend", "torch", "--device", "meta"], "meta"),
    ):
        assert main([*search_it, "--overwrite", *wrong]) == 2
        assert sentence in capsys.readouterr().err
    assert main([*search_it[:-2], "--overwrite", "--engine", "ray", "--workers", "2"]) == 2
    assert "an actor for each folder; leave --workers out" in capsys.readouterr().err
    assert load_queries(tmp_path / "query", VectorFolder(tmp_path / "document"))[0] == ["q", "r"]
