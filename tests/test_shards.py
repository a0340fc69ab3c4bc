"""Collections by blocks: readers, shards, kills, verify, merge, search over shards, and what each refuses."""

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from st_aggretriever import bulk
from st_aggretriever.bulk import Source, encode_to_disk
from st_aggretriever.cli import main
from st_aggretriever.ray_engine import _Encoder
from st_aggretriever.readers import corpus as corpus_module
from st_aggretriever.readers.corpus import Corpus
from st_aggretriever.search.ondisk import build_on_disk
from st_aggretriever.search.retrieve import search_exactly
from st_aggretriever.search.shards import ShardSearch
from st_aggretriever.vectors import blocks
from st_aggretriever.vectors.folder import VectorFolder, VectorWriter
from st_aggretriever.vectors.manifest import manifest_hash
from st_aggretriever.vectors.shards import merge_shards, open_shards, shard_from
from st_aggretriever.vectors.verify import reopen, verify

ROWS = [(f"d{number}", "abc"[number % 3] * (number % 7 + 1)) for number in range(23)]


class Letters:
    """An encoder whose vector counts a, b and c, of texts that don't begin with the letter it can't take."""

    similarity_fn_name = "dot"

    def __init__(self, poison: str = "", nan: str = "") -> None:
        self.poison, self.nan = poison, nan
        self.batches: list[list[str]] = []

    def encode_document(self, texts: list[str], **_: Any) -> np.ndarray:
        self.batches.append(texts)
        if self.poison and any(self.poison in text for text in texts):
            raise RuntimeError("index out of range")
        found = np.array([[text.count(letter) for letter in "abc"] for text in texts], np.float32)
        found[[bool(self.nan) and self.nan in text for text in texts]] = np.nan
        return found

    encode_query = encode_document


def write_jsonl(path: Path, rows: list[tuple[str, str]] = ROWS) -> Path:
    path.write_text("".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in rows))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def encode_shards(folder: Path, count: int = 2, **options: Any) -> Path:
    for number in range(count):
        source = Source("texts", lambda: iter(ROWS))
        encode_to_disk(Letters(), source, folder, block_size=4, shard=(number, count), **options)
    return folder


def read_all(corpus: Corpus, block_size: int) -> list[tuple[str, str]]:
    count, _ = corpus.scan(block_size)
    return [row for number in range(-(-count // block_size)) for row in corpus.read(number).rows]


# ---------------------------------------------------------------------------------------------------------------------
# Readers


def make_corpora(folder: Path) -> dict[str, Path]:
    """The same rows in every form."""
    import pyarrow
    import pyarrow.parquet

    plain = write_jsonl(folder / "plain.jsonl")
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (folder / "msmarco.tsv").write_text("".join(f"{key}\t{text}\n" for key, text in ROWS))
    (folder / "dpr.tsv").write_text("id\ttext\ttitle\n" + "".join(f'{key}\t"{text}"\t\n' for key, text in ROWS))
    table = pyarrow.table({"other": [1] * len(ROWS), "id": [key for key, _ in ROWS], "contents": [t for _, t in ROWS]})
    pyarrow.parquet.write_table(table, folder / "table.parquet", row_group_size=5)
    parts = folder / "parts"
    parts.mkdir()
    write_jsonl(parts / "a.jsonl", ROWS[:9])
    (parts / "b.jsonl").write_text("")
    (parts / "c.tsv.gz").write_bytes(gzip.compress("".join(f"{k}\t{t}\n" for k, t in ROWS[9:]).encode()))
    (parts / "README").write_text("no texts")
    beir = folder / "beir"
    beir.mkdir()
    lines = [json.dumps({"_id": key, "title": text[0], "text": text[1:] or None}) + "\n" for key, text in ROWS]
    (beir / "corpus.jsonl").write_text("".join(lines))
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("block_size", [1, 4, 23, 100])
def test_every_form_gives_the_same_rows_in_blocks(
    tmp_path: Path, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_PARQUET_ROWS", 2)  # less than a row group
    for name, place in make_corpora(tmp_path).items():
        expected = (
            [(key, " ".join(filter(None, (text[0], text[1:])))) for key, text in ROWS] if name == "beir" else ROWS
        )
        corpus = Corpus(place)
        assert read_all(corpus, block_size) == expected, name
        numbers = range(-(-len(ROWS) // block_size))
        for number in [*reversed(numbers), 0]:  # in any order
            assert corpus.read(number).rows == expected[number * block_size : (number + 1) * block_size], name


def test_a_field_may_be_longer_than_csv_allows(tmp_path: Path) -> None:
    path = tmp_path / "passages.tsv"
    path.write_text(f"id\ttext\ttitle\n1\t{'a' * 150_000}\tb\n")
    assert read_all(Corpus(path), 4) == [("1", "b " + "a" * 150_000)]


def test_patterns_and_several_places_are_read_by_name(tmp_path: Path) -> None:
    for name, part in (("2", ROWS[5:9]), ("1", ROWS[:5]), ("3", ROWS[9:])):
        write_jsonl(tmp_path / f"part-{name}.jsonl", part)
    assert read_all(Corpus(str(tmp_path / "part-*.jsonl")), 4) == ROWS
    assert read_all(Corpus(tmp_path / "part-2.jsonl", tmp_path / "part-1.jsonl"), 4) == ROWS[5:9] + ROWS[:5]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"_id": "1", "text": "a"}\n{"_id": "2"}\n', "line 2: expected a field 'text'"),
        ('{"_id": "1", "text": "a"}\n{"text": \n', "line 2: expected a JSON object, got malformed JSON"),
        ('{"_id": "1", "text": "a"}\n{"_id": "1", "text": "b"}\n', "id '1' occurs a second time"),
        ("1\ta\n2 b\n", "line 2: expected id<tab>text, got '2 b'"),
        ("id\ttext\ttitle\n1\ta\n", "line 2: expected id<tab>text<tab>title"),
        ("id\ttext\ttitle\n1\ta\rb\tc\n", "line 2: expected tab-separated columns"),
        ("no form\n", "expected jsonl, tab-separated lines or Parquet"),
        ("", "holds no text"),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_encoded(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "corpus"
    path.write_text(content)
    model = Letters()
    with pytest.raises(ValueError, match=sentence):
        encode_to_disk(model, Corpus(path), tmp_path / "out")
    assert model.batches == []
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", ["text", "title"])
@pytest.mark.parametrize("value", [["x"], {"x": 1}, 1.5, True])
def test_a_text_that_is_no_string_is_a_bad_row(tmp_path: Path, name: str, value: Any, skip: bool) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"_id": "1", "text": "a"}) + "\n" + json.dumps({"_id": "2", "text": "b", name: value}))
    corpus = Corpus(path, skip_bad=skip)
    if not skip:
        with pytest.raises(ValueError, match=rf"c\.jsonl line 2: expected a string in '{name}', got "):
            corpus.scan(5)
        return
    assert corpus.scan(5)[0] == 2
    assert corpus.read(0).rows == [("1", "a")]
    assert f"line 2: expected a string in '{name}'" in corpus.read(0).bad[0]


def test_empty_texts_are_taken_as_evaluate_takes_them_but_not_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from st_aggretriever.readers.beir import read_corpus

    path = tmp_path / "corpus.jsonl"
    rows = [{"text": "a"}, {"text": None}, {"text": None, "title": "t"}, {"text": " "}, {"text": "", "title": None}]
    path.write_text("".join(json.dumps({"_id": str(n), **row}) + "\n" for n, row in enumerate(rows)))
    assert read_all(Corpus(path), 3) == list(read_corpus(tmp_path))
    assert [record.getMessage() for record in caplog.records] == [
        f"empty texts (null or blanks), encoded as such: 3, the first in {path} line 2"
    ]


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(b'{"_id": "1", "text": "a"}\n' * 999)[:-20])
    with pytest.raises(ValueError, match=r"corpus\.jsonl\.gz line \d+: broken gzip data"):
        Corpus(tmp_path / "corpus.jsonl.gz").scan(5)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.jsonl").mkdir()  # a folder where a file should be
    with pytest.raises(IsADirectoryError, match=r"a\.jsonl can't be read \(Is a directory\)"):
        Corpus(tmp_path / "parts")
    (tmp_path / "empty").mkdir()
    for place, sentence in (("none", "none does not exist"), ("no-*", "matches no file"), ("empty", "nor any file of")):
        with pytest.raises(FileNotFoundError, match=sentence):
            Corpus(tmp_path / place)
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + b"\0" * 50)
    with pytest.raises(ValueError, match=r"x\.parquet is no Parquet file"):
        Corpus(tmp_path / "x.parquet").scan(5)


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


def test_a_blocks_batches_go_by_length_and_never_cross_it(tmp_path: Path) -> None:
    model = Letters()
    folder = encode_to_disk(model, Source("texts", lambda: iter(ROWS)), tmp_path / "v", block_size=10)
    blocks = [sorted(t for _, t in ROWS[start : start + 10]) for start in (0, 10, 20)]
    assert [sorted(batch) for batch in model.batches[1:]] == blocks
    for batch in model.batches[1:]:
        assert [len(text) for text in batch] == sorted((len(text) for text in batch), reverse=True)
    ids, found = folder.load()
    assert ids == [key for key, _ in ROWS]  # the collection's order
    assert found.tolist() == [[text.count(letter) for letter in "abc"] for _, text in ROWS]


def test_it_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "REPORT_SECONDS", 0.0)
    lines: list[str] = []
    encode_to_disk(Letters(), Source("texts", lambda: iter(ROWS)), tmp_path / "v", block_size=10, report=lines.append)
    assert lines[0] == "23 documents in 3 blocks, 3 dimensions: 0.0 MB as float32"
    assert lines[1].startswith("10 of 23 documents, 0.0 MB, ")
    assert lines[1].endswith(" s left")
    assert lines[-1].startswith("23 of 23 documents, ")


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_merged_shards_are_the_files_of_one_process(tmp_path: Path, count: int) -> None:
    encode_to_disk(Letters(), Source("texts", lambda: iter(ROWS)), tmp_path / "whole", block_size=4)
    shards = encode_shards(tmp_path / "shards", count)
    for copy in (False, True):
        merged = merge_shards([shards], tmp_path / f"merged-{copy}", copy=copy)
        assert files(merged.folder) == files(tmp_path / "whole")
        assert verify(merged) == []
    with pytest.raises(FileExistsError, match="merged-True exists"):
        merge_shards([shards], tmp_path / "merged-True")


def test_a_finished_shard_is_taken_as_it_is_and_another_one_is_refused(tmp_path: Path) -> None:
    shards = encode_shards(tmp_path / "shards", 2)
    before = files(shards / "shard-00001-of-00002")
    said: list[str] = []

    model = Letters()

    def again(**options: Any) -> VectorFolder:
        options = {"shard": (1, 2), "block_size": 4, "report": said.append, **options}
        return encode_to_disk(model, Source("texts", lambda: iter(ROWS)), shards, **options)

    assert again().rows == VectorFolder(shards / "shard-00001-of-00002").rows
    assert said == [f"{shards / 'shard-00001-of-00002'} is complete already"]
    assert model.batches == [["dimension"]]  # what the manifest has to know, and nothing else
    with pytest.raises(FileExistsError, match="was made with block_size 4; now it is block_size 5"):
        again(block_size=5)
    with pytest.raises(FileExistsError, match="was made with dtype float32; now it is dtype float16"):
        again(dtype="float16")
    assert files(shards / "shard-00001-of-00002") == before


def test_the_shard_can_come_from_the_environment() -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
    array = {"SLURM_ARRAY_TASK_ID": "11", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "10"}
    assert shard_from({"RANK": "1", "WORLD_SIZE": "2", **slurm}) == (1, 2)
    assert shard_from(slurm) == (3, 8)
    assert shard_from({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", **array}) == (1, 4)
    assert shard_from({"RANK": "0", "WORLD_SIZE": "1"}) == (0, 1)
    with pytest.raises(ValueError, match="expected a process's number and their count in the environment"):
        shard_from({"RANK": "1"})
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        shard_from({"RANK": "0", "WORLD_SIZE": "0"})
    with pytest.raises(ValueError, match="numbered from 0 to 1, got 2"):
        shard_from({"RANK": "2", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Letters(poison="bb"), r"the model can't encode it \(index out of range\)"),
        (Letters(nan="bb"), "not finite|its vector holds numbers that float32 can't"),
    ],
)
def test_a_poisoned_row_is_named_and_fatal_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: Letters, reason: str, skip: bool
) -> None:
    rows = [("x", "a"), ("y", "abba"), ("z", "cc")]
    source = Source("texts", lambda: iter(rows))
    if not skip:
        with pytest.raises(ValueError, match=f"'y'.*({reason})"):
            encode_to_disk(model, source, tmp_path / "v", block_size=10)
        return
    folder = encode_to_disk(model, source, tmp_path / "v", block_size=10, skip_bad=True)
    assert folder.load()[0] == ["x", "z"]
    assert folder.load()[1].tolist() == [[1, 0, 0], [0, 0, 2]]
    assert folder.manifest["skipped"] == 1
    assert "left out: 'y': " in caplog.text
    assert verify(folder) == []


def test_a_collection_of_which_every_text_is_left_out_is_refused(tmp_path: Path) -> None:
    source = Source("texts", lambda: iter([("x", "b"), ("y", "b")]))
    with pytest.raises(ValueError, match="every one of the 2 texts was left out"):
        encode_to_disk(Letters(poison="b"), source, tmp_path / "v", skip_bad=True)
    assert not (tmp_path / "v").exists()
    # One shard of several may hold nothing.
    rows = [("x", "b"), ("y", "a")]
    for number in (0, 1):
        source = Source("texts", lambda: iter(rows))
        options: dict[str, Any] = {"block_size": 1, "shard": (number, 2), "skip_bad": True}
        encode_to_disk(Letters(poison="b"), source, tmp_path / "s", **options)
    assert [folder.rows for folder in open_shards([tmp_path / "s"])] == [0, 1]


def test_texts_can_be_left_out_that_come_to_the_model_without_another(tmp_path: Path) -> None:
    """By length, so the short ones are the last 64 of a block, or fewer."""
    rows = [(f"d{number}", "aa") for number in range(64)] + [("x", "b"), ("y", "b")]
    options: dict[str, Any] = {"batch_size": 2, "skip_bad": True}
    folder = encode_to_disk(Letters(poison="b"), Source("texts", lambda: iter(rows)), tmp_path / "v", **options)
    assert folder.load()[0] == [f"d{number}" for number in range(64)]
    assert folder.manifest["skipped"] == 2


def test_bad_lines_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_jsonl(tmp_path / "c.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "nonsense", *lines[3:]]) + "\n")
    folder = encode_to_disk(Letters(), Corpus(path, skip_bad=True), tmp_path / "v", block_size=4, skip_bad=True)
    assert folder.load()[0] == [key for key, _ in ROWS]
    assert folder.manifest["skipped"] == 1
    assert "c.jsonl line 4" in caplog.text


def test_what_no_single_text_did_is_raised_as_it_is(tmp_path: Path) -> None:
    class Full(Letters):
        def encode_document(self, texts: list[str], **_: Any) -> np.ndarray:
            if len(texts) > 2:
                raise RuntimeError("out of memory")
            return super().encode_document(texts)

    for skip in (False, True):
        with pytest.raises(RuntimeError, match="out of memory"):
            encode_to_disk(Full(), Source("texts", lambda: iter(ROWS)), tmp_path / "v", skip_bad=skip)


# ---------------------------------------------------------------------------------------------------------------------
# Kills, damage, two writers, full disks


@pytest.mark.parametrize("what", ["encode", "merge"])
def test_killed_at_every_step_it_goes_on_and_ends_the_same(tmp_path: Path, what: str) -> None:
    """SIGKILL before each sync, rename and link, one after the other, with fork for speed."""
    source = Source("texts", lambda: iter(ROWS))
    encode_to_disk(Letters(), source, tmp_path / "whole", block_size=4)
    shards = encode_shards(tmp_path / "shards")

    def work() -> None:
        if what == "encode":
            encode_to_disk(Letters(), source, tmp_path / "v", block_size=4)
        else:
            merge_shards([shards], tmp_path / "v", copy=True)

    for step in range(1, 100):
        if _run_and_kill(work, step):
            break
        if (tmp_path / "v").exists():
            break  # killed after the folder had got its name
        assert (tmp_path / "v.partial").exists()
    else:
        pytest.fail("it never ended")
    assert files(tmp_path / "v") == files(tmp_path / "whole")
    assert step > 4
    assert not (tmp_path / "v.partial").exists()


def _run_and_kill(work: Any, step: int) -> bool:
    """Run in a child that gets SIGKILL before its ``step``-th sync or rename; whether it lived to the end."""
    child = os.fork()
    if child == 0:
        left = step

        def dying(call: Any) -> Any:
            def counted(*args: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), 9)
                return call(*args, **options)

            return counted

        os.replace, os.rename, os.fsync = map(dying, (os.replace, os.rename, os.fsync))
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)


def damage(folder: Path, kind: str) -> str:
    """Break a folder; returns what verify must say."""
    block, record = folder / "block-00001.npy", folder / "block-00001.json"
    content = block.read_bytes()
    if kind == "truncated":
        block.write_bytes(content[:-4])
        return r"block-00001\.npy is broken"
    if kind == "flipped":
        block.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        return r"block-00001\.npy was changed"
    if kind == "id":
        record.write_text(record.read_text().replace('"d', '"e', 1))
        return r"block-00001\.json was changed"
    if kind == "header":
        block.write_bytes(content.replace(b"'shape': (4", b"'shape':((4"))
        return r"block-00001\.npy is broken"
    if kind == "count":
        record.write_text(record.read_text().replace("truncated", "tsuncated"))
        return r"block-00001\.json was changed: it has no 'truncated'"
    if kind == "record":
        record.write_text(record.read_text()[:-9])
        return r"block-00001\.json is broken"
    if kind == "missing":
        block.unlink()
        return r"block-00001\.npy is missing"
    if kind == "nan":
        with VectorWriter(folder.with_name("w"), {"side": "document"}) as writer:
            shape = np.load(block).shape
            ids = json.loads(record.read_text())["ids"]
            writer.write(1, ids, np.full(shape, np.nan, np.float32), truncated=None)
        for ending in ("npy", "json"):
            (folder.with_name("w.partial") / f"block-00001.{ending}").replace(folder / f"block-00001.{ending}")
        return r"block-00001\.npy: the vector of 'd\d+' is not finite"
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["truncated", "flipped", "header", "id", "count", "record", "missing", "nan"])
def test_damage_is_found_refused_and_mended(tmp_path: Path, kind: str) -> None:
    source = Source("texts", lambda: iter(ROWS))
    encode_to_disk(Letters(), source, tmp_path / "whole", block_size=4)
    folder = encode_to_disk(Letters(), source, tmp_path / "v", block_size=4)
    assert verify(folder) == []
    sentence = damage(folder.folder, kind)
    faults = verify(folder)
    assert [fault.block for fault in faults] == [1]
    assert re.search(sentence, faults[0].sentence)
    assert reopen(folder, faults) == tmp_path / "v.partial"
    model = Letters()
    encode_to_disk(model, source, tmp_path / "v", block_size=4)
    assert sum(map(len, model.batches[1:])) == 4  # the one block alone
    assert files(tmp_path / "v") == files(tmp_path / "whole")


def test_a_block_that_was_found_damaged_is_there_for_no_other_process_either(tmp_path: Path) -> None:
    """Actors take what has a record as done by one that has died since."""
    path = write_jsonl(tmp_path / "c.jsonl")
    corpus = Corpus(path)
    encode_to_disk(Letters(), corpus, tmp_path / "whole", block_size=4)
    started = encode_to_disk(Letters(), corpus, tmp_path / "v", block_size=4).folder.rename(tmp_path / "v.partial")
    os.truncate(started / "block-00001.npy", 150)
    todo = bulk.plan(bulk.BlockEncoder(Letters(), "document"), corpus, block_size=4)
    with VectorWriter(tmp_path / "v", todo.manifest) as writer:
        assert [writer.has(number) for number in range(3)] == [True, False, True]
        actor = _Encoder(lambda device: Letters(), corpus, writer.partial, "npy", {"side": "document"}, False)
        assert actor({"local": [1], "number": [1]})["error"] == [""]
        writer.finish(6)
    assert files(tmp_path / "v") == files(tmp_path / "whole")


@pytest.mark.parametrize("ending", ["npy", "json"])
@pytest.mark.parametrize("left", [None, 0, 60])
def test_a_finished_block_that_is_damaged_is_made_again_on_the_way(
    tmp_path: Path, ending: str, left: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source("texts", lambda: iter(ROWS))
    encode_to_disk(Letters(), source, tmp_path / "whole", block_size=4)
    started = encode_to_disk(Letters(), source, tmp_path / "v", block_size=4).folder.rename(tmp_path / "v.partial")
    (started / "block-00003.json").unlink()  # so that it isn't whole
    damaged = started / f"block-00001.{ending}"
    damaged.unlink() if left is None else os.truncate(damaged, left)
    model = Letters()
    encode_to_disk(model, source, tmp_path / "v", block_size=4)
    assert files(tmp_path / "v") == files(tmp_path / "whole")
    assert sum(map(len, model.batches[1:])) <= 8  # the two blocks alone
    if (ending, left) != ("json", None):
        assert "block-00001" in caplog.text
        assert "It is made again." in caplog.text


@pytest.mark.parametrize("held", ["thesis.txt", "manifest.json", "checkpoint-500/weights", ""])
@pytest.mark.parametrize("what", ["vectors", "index"])
def test_a_folder_of_somebody_else_is_not_taken_over(tmp_path: Path, what: str, held: str) -> None:
    partial = tmp_path / "out.partial"
    if held:
        (partial / held).parent.mkdir(parents=True)
        (partial / held).write_text('{"format": "another"}')
        (partial / ".draft.tmp").write_text("mine")
    else:
        partial.write_text("a file")
    source = Source("texts", lambda: iter(ROWS))
    folder = encode_to_disk(Letters(), source, tmp_path / "v", block_size=4)
    before = {path: path.is_file() and path.read_bytes() for path in [partial, *partial.rglob("*")]}
    arguments: tuple[Any, ...] = (Letters(), source) if what == "vectors" else ([folder], "IVF1,Flat")
    with pytest.raises(FileExistsError, match=r"out\.partial is in the way"):
        (encode_to_disk if what == "vectors" else build_on_disk)(*arguments, tmp_path / "out")
    assert {path: path.is_file() and path.read_bytes() for path in [partial, *partial.rglob("*")]} == before


def test_mending_leaves_alone_what_cannot_be_read(tmp_path: Path) -> None:
    folder = encode_to_disk(Letters(), Source("texts", lambda: iter(ROWS)), tmp_path / "v", block_size=4)
    block = folder.folder / "block-00001.npy"
    aside = block.rename(tmp_path / "aside")
    block.mkdir()  # also root can't read it
    faults = verify(folder)
    assert [fault.block for fault in faults] == [None]
    with pytest.raises(ValueError, match="make readable what can't be read"):
        reopen(folder, faults)
    block.rmdir()
    aside.rename(block)
    assert verify(folder) == []


def change(path: Path, changes: dict[str, Any], *, drop: tuple[str, ...] = ()) -> None:
    """Hand-edit a manifest or a record so that its own checksum, if it had one, fits again."""
    values = {key: value for key, value in (json.loads(path.read_text()) | changes).items() if key not in drop}
    if "sha256" in values and path.name == "manifest.json" and "sha256" not in changes:
        values["sha256"] = manifest_hash(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("changes", [{"dimension": 4, "parts": [["embedding", 4]]}, {"dtype": "float16"}])
def test_a_wrong_manifest_costs_no_block(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = encode_to_disk(Letters(), Source("texts", lambda: iter(ROWS)), tmp_path / "v", block_size=4).folder
    change(folder / "manifest.json", changes)
    before = files(folder)
    faults = verify(VectorFolder(folder))
    assert faults
    assert {fault.block for fault in faults} == {None}
    with pytest.raises(ValueError, match="can't be mended"):
        reopen(VectorFolder(folder), faults)
    assert files(folder) == before


def test_a_block_of_which_nothing_is_left_has_the_others_width(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"_id": "a", "text": "one"}\n{broken\n{"_id": "b", "text": "two"}\n')
    folder = encode_to_disk(Letters(), Corpus(path, skip_bad=True), tmp_path / "v", block_size=1, skip_bad=True)
    assert verify(folder) == []
    assert [len(folder.read(number)[1]) for number in range(3)] == [1, 0, 1]


BROKEN_MANIFESTS: list[tuple[dict[str, Any], str, str]] = [  # changes, what is dropped, what is said
    ({"dtype": "foo"}, "", "'dtype' must be float32 or float16, got 'foo'"),
    ({"dtype": ["float32"]}, "", "'dtype' must be"),
    ({"blocks": "ten"}, "", "'blocks' must be a whole number from 0, got 'ten'"),
    ({"blocks": 5}, "", "23 texts in blocks of 4 give 6 blocks, 'blocks' is 5"),
    ({"blocks": True}, "", "'blocks' must be"),
    ({"rows": None}, "", "'rows' must be"),
    ({"rows": 22}, "", "expected 23 texts, got 22 rows and 0 left out"),
    ({"block_size": 0}, "", "'block_size' must be a whole number from 1, got 0"),
    ({"texts": "x"}, "", "'texts' must be"),
    ({"texts": 10**30}, "", "'texts' must be"),
    ({"texts": 10**9}, "", "'blocks' is 6"),
    ({"skipped": "x"}, "", "'skipped' must be a whole number from 0 or null"),
    ({"skipped": -1}, "", "'skipped' must be"),
    ({"shard": "x"}, "", "'shard' must be two whole numbers"),
    ({"shard": [2, 2]}, "", "'shard' must be"),
    ({"parts": [["a", 1], ["b"]]}, "", "'parts' must be"),
    ({"parts": [["a", 1]]}, "", "its parts have 1 dimension together, 'dimension' is 3"),
    ({"dimension": 3.0}, "", "'dimension' must be"),
    ({"lexical": {"start": 0}}, "", "'lexical' must be an object of start, width"),
    ({"windows": 7}, "", "'windows' must be"),
    ({"length": 0}, "", "'length' must be"),
    ({"files": "zip"}, "", "'files' must be npy or parquet"),
    ({"sha256": "0" * 64}, "", "manifest.json was changed"),
    ({}, "model_hash", "it has no 'model_hash'"),
    ({}, "parts", "it has no 'parts'"),
    ({}, "side", "it has no 'side'"),
    ({}, "rows", "it has no 'rows'"),
    ({}, "blocks", "it has no 'blocks'"),
    ({}, "format", "is not of the format"),
]
BROKEN_RECORDS: list[tuple[dict[str, Any], str, str]] = [
    ({"skipped": "x"}, "", "'skipped' must be"),
    ({"ids": "x"}, "", "'ids' must be a list of strings"),
    ({"ids": [1, 2, 3, 4]}, "", "'ids' must be a list of strings"),
    ({"sha256": 7}, "", "'sha256' must be a SHA-256"),
    ({"ids_sha256": None}, "", "'ids_sha256' must be"),
    ({"truncated": 1.5}, "", "'truncated' must be"),
    ({"tokens": "x"}, "", "'tokens' must be"),
    ({}, "ids", "it has no 'ids'"),
    ({}, "sha256", "it has no 'sha256'"),
]


@pytest.mark.parametrize("name", ["manifest.json", "block-00001.json"])
def test_what_cannot_be_is_one_sentence_of_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = Source("texts", lambda: iter(ROWS))
    folder = encode_to_disk(Letters(), source, tmp_path / "v", block_size=4).folder
    encode_to_disk(Letters(), source, tmp_path / "q", side="query")
    whole, shards = str(folder), str(encode_shards(tmp_path / "shards", 1))
    search = ["search", "--index", whole, "--queries", str(tmp_path / "q"), "--run", str(tmp_path / "run")]
    commands = (["verify", whole], ["verify", shards], ["merge", shards, "--output", str(tmp_path / "m")], search)
    broken = [folder / name, tmp_path / "shards" / "shard-00000-of-00001" / name]
    kept = [path.read_text() for path in broken]
    for content, words in (("", "is broken"), ("[" * 100_000, "is broken"), ("[1]", "expected an object, got list")):
        for path in broken:
            path.write_text(content)
        for command in commands:
            assert_refused(command, words, name, capsys)
    for changes, dropped, words in BROKEN_MANIFESTS if name == "manifest.json" else BROKEN_RECORDS:
        for path, text in zip(broken, kept, strict=True):
            path.write_text(text)
            change(path, changes, drop=(dropped,))
        for command in commands:
            if not (name == "manifest.json" and "shard" in changes and command[1] == whole):
                assert_refused(command, words, name, capsys)
    for path, text in zip(broken, kept, strict=True):
        path.write_text(text)
    for command in commands:
        assert main(command) == 0


def assert_refused(command: list[str], words: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(command) == 2, (command, words)
    captured = capsys.readouterr()
    said = captured.out if command[0] == "verify" else captured.err
    assert words in said
    assert name in said
    assert captured.err.count("\n") == 1 + (command[0] == "search" and "warning" in captured.err)


def swap(folder: Path, one: int, other: int) -> None:
    for ending in ("npy", "json"):
        paths = [folder / f"block-{number:05d}.{ending}" for number in (one, other)]
        paths[0].rename(folder / "aside")
        paths[1].rename(paths[0])
        (folder / "aside").rename(paths[1])


def test_verify_notices_what_each_block_alone_does_not_show(tmp_path: Path) -> None:
    def faults(name: str) -> list[str]:
        found = verify(VectorFolder(tmp_path / name))
        assert [fault.block for fault in found] == [1 if name == "ids" else None] * len(found)
        return [fault.sentence for fault in found]

    folders = {}
    for name in ("swapped", "ids", "extra", "setting", "unsigned"):
        source = Source("texts", lambda: iter(ROWS))
        folders[name] = encode_to_disk(Letters(), source, tmp_path / name, block_size=4).folder
        assert faults(name) == []
    swap(folders["swapped"], 0, 2)
    assert len(faults("swapped")) == 1
    assert "blocks aren't those that it was finished with, or not in that order" in faults("swapped")[0]
    change(folders["ids"] / "block-00001.json", {}, drop=("ids_sha256",))
    assert "block-00001.json has no checksum of its ids" in faults("ids")[0]
    for name in ("block-00006.npy", "block-00006.json", "block-99.npy"):
        (folders["extra"] / name).write_bytes((folders["extra"] / "block-00000.json").read_bytes())
    extra = [sentence.partition(" is no file of the 6 blocks of its manifest.") for sentence in faults("extra")]
    assert [Path(name).name for name, _, _ in extra] == ["block-00006.json", "block-00006.npy", "block-99.npy"]
    manifest = folders["setting"] / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"length": null', '"length": 64'))
    with pytest.raises(ValueError, match=r"manifest\.json was changed: its values don't give the checksum in it"):
        VectorFolder(folders["setting"])
    change(folders["unsigned"] / "manifest.json", {"length": 64}, drop=("sha256", "blocks_sha256"))
    assert [sentence.partition(": ")[2] or sentence[-27:] for sentence in faults("unsigned")] == [
        " has no checksum of itself.",
        "its blocks aren't those that it was finished with, or not in that order: the checksum in its manifest is"
        " another one.",
    ]  # fmt: skip


def test_missing_blocks_at_the_end_are_said_once_and_mended(tmp_path: Path) -> None:
    source = Source("texts", lambda: iter(ROWS))
    folder = encode_to_disk(Letters(), source, tmp_path / "v", block_size=4)
    before = files(folder.folder)
    for name in ("block-00004", "block-00005"):
        for ending in ("npy", "json"):
            (folder.folder / f"{name}.{ending}").unlink()
    faults = verify(folder)
    assert [fault.block for fault in faults] == [4]
    assert faults[0].sentence.endswith("block-00004.json is missing, and with it 2 blocks.")
    reopen(folder, faults)
    assert files(encode_to_disk(Letters(), source, tmp_path / "v", block_size=4).folder) == before
    change(tmp_path / "v" / "manifest.json", {"blocks": 10**15}, drop=("texts",))
    assert len(verify(VectorFolder(tmp_path / "v"))) == 1


def test_merge_refuses_blocks_in_another_order(tmp_path: Path) -> None:
    shards = encode_shards(tmp_path / "shards")
    swap(shards / "shard-00000-of-00002", 0, 1)
    with pytest.raises(ValueError, match="shard-00000-of-00002: its blocks aren't those that it was finished with"):
        merge_shards([shards], tmp_path / "v")
    assert not (tmp_path / "v.partial").exists()


def test_search_compares_the_manifests_counts_with_the_files(tmp_path: Path) -> None:
    """Of vectors that come without the number of their collection's texts, which would contradict the manifest."""

    def made(name: str, **changes: Any) -> VectorFolder:
        folder = encode_to_disk(Letters(), Source("texts", lambda: iter(ROWS)), tmp_path / name, block_size=4).folder
        change(folder / "manifest.json", changes, drop=("texts",))
        return VectorFolder(folder)

    queries = np.ones((1, 3), np.float32)
    for name, changes, sentence in (
        ("rows", {"rows": 24}, r"rows: its blocks hold 23 rows, its manifest says 24"),
        ("few", {"blocks": 5}, r"few also holds block-00005\.json, but its manifest counts 5 blocks"),
        ("many", {"blocks": 7}, r"block-00006\.npy is missing"),
        ("huge", {"blocks": 10**15}, r"block-00006\.npy is missing"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            search_exactly(made(name, **changes), queries, 3)
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            VectorFolder(tmp_path / name).load()
    right = made("right")
    record = right.folder / "block-00001.json"
    change(record, {"ids": json.loads(record.read_text())["ids"][:-1]})
    with pytest.raises(ValueError, match=r"block-00001\.npy holds float32 \(4, 3\), expected float32 \(3, 3\)"):
        search_exactly(right, queries, 3)


def test_verify_goes_on_past_a_missing_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = encode_shards(tmp_path / "shards", 4)
    names = [shards / f"shard-0000{number}-of-00004" for number in (0, 2, 3, 1)]
    names[0].rename(tmp_path / "away")
    (names[1] / "manifest.json").write_text("{}")
    sentence = damage(names[3], "flipped")
    assert main(["verify", str(shards)]) == 2
    captured = capsys.readouterr()
    assert "shard-00000-of-00004 is no folder of vectors" in captured.out
    assert "manifest.json is not of the format" in captured.out
    assert "shard-00003-of-00004: 4 document vectors of 3 dimensions in 1 block: right" in captured.out
    assert re.search(sentence, captured.out)
    assert captured.err == "st-aggretriever: verify: 3 faults in 4 folders. See above.\n"
    (names[2] / "block-00009.npy").touch()
    assert main(["verify", str(shards), "--mend"]) == 2  # what can't be mended doesn't keep it from the others
    assert "shard-00003-of-00004 can't be mended" in capsys.readouterr().out
    assert (names[3].with_name(f"{names[3].name}.partial")).is_dir()
    names[3].with_name(f"{names[3].name}.partial").rename(names[3])
    (names[2] / "block-00009.npy").unlink()
    assert main(["verify", *map(str, names[2:])]) == 2
    assert "of 4 shards 2 are missing: 0, 2." in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["truncated", "flipped", "missing"])
def test_merge_refuses_a_damaged_shard_and_goes_on_once_it_is_mended(tmp_path: Path, kind: str) -> None:
    shards = encode_shards(tmp_path / "shards")
    one = VectorFolder(shards / "shard-00001-of-00002")
    sentence = damage(one.folder, kind)
    with pytest.raises((ValueError, OSError), match=sentence):
        merge_shards([shards], tmp_path / "v")
    begun = (tmp_path / "v.partial" / "block-00000.json").exists()
    assert begun == (kind != "missing")  # which is seen before the first block
    reopen(one, verify(one))
    with pytest.raises(FileNotFoundError, match=r"shard-00001-of-00002\.partial is an unfinished encoding"):
        merge_shards([shards], tmp_path / "v")
    encode_to_disk(Letters(), Source("texts", lambda: iter(ROWS)), shards, block_size=4, shard=(1, 2))
    encode_to_disk(Letters(), Source("texts", lambda: iter(ROWS)), tmp_path / "whole", block_size=4)
    assert files(merge_shards([shards], tmp_path / "v").folder) == files(tmp_path / "whole")


def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    shards = encode_shards(tmp_path / "shards", 3)
    names = [f"shard-0000{number}-of-00003" for number in range(3)]
    with pytest.raises(
        FileNotFoundError, match=r"of 3 shards 1 is missing: 1\. Encode what is missing \(--shard 1 --num-s"
    ):
        open_shards([shards / names[0], shards / names[2]])
    with pytest.raises(ValueError, match="are the same shard, 1 of 3"):
        open_shards([shards / names[0], shards / names[1], shards / names[1]])
    manifest = shards / names[2] / "manifest.json"
    for key, value in (("model_hash", "other"), ("source_sha256", "other"), ("dtype", "float16")):
        kept = manifest.read_text()
        change(manifest, {key: value})
        with pytest.raises(ValueError, match=f"are no shards of one encoding: their {key} differ"):
            open_shards([shards])
        manifest.write_text(kept)
    (shards / names[2]).rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=r"shard-00002-of-00003 is no folder .*--shard 2 --num-shards 3\)\.$"):
        open_shards([shards])
    whole = encode_to_disk(Letters(), Source("texts", lambda: iter(ROWS)), tmp_path / "whole", block_size=4)
    with pytest.raises(ValueError, match="whole is no shard, but"):
        open_shards([whole.folder, shards / names[0]])
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_shards([whole.folder], tmp_path / "v")
    with pytest.raises(FileExistsError, match="whole holds vectors already"):
        encode_to_disk(Letters(), Source("texts", lambda: iter(ROWS)), whole.folder, shard=(0, 2))


def test_an_id_in_two_blocks_is_found(tmp_path: Path) -> None:
    rows = [*ROWS, ("d1", "again")]
    folder = encode_to_disk(Letters(), Source("texts", lambda: iter(rows)), tmp_path / "v", block_size=5)
    assert [fault.sentence.endswith("id 'd1' is in block 0 and in block 4.") for fault in verify(folder)] == [True]


def test_counts_and_the_model_are_checked(tmp_path: Path) -> None:
    folder = encode_to_disk(Letters(), Source("texts", lambda: iter(ROWS)), tmp_path / "v", block_size=5)
    assert "was made by another model" in verify(folder, model_hash="0" * 64)[0].sentence
    folder.rows += 1
    assert "rows of its blocks: 23, of its manifest: 24" in verify(folder)[0].sentence


def test_a_second_writer_is_refused_and_the_first_loses_nothing(tmp_path: Path) -> None:
    class Second(Letters):
        """While it encodes, another process tries the same output."""

        def encode_document(self, texts: list[str], **_: Any) -> np.ndarray:
            if texts != ["dimension"]:
                with pytest.raises(BlockingIOError, match=r"another process is writing .*v\.partial"):
                    encode_to_disk(Letters(), source, tmp_path / "v", block_size=4)
            return super().encode_document(texts)

    source = Source("texts", lambda: iter(ROWS))
    encode_to_disk(Letters(), source, tmp_path / "whole", block_size=4)
    folder = encode_to_disk(Second(), Source("texts", lambda: iter(ROWS)), tmp_path / "v", block_size=4)
    assert files(folder.folder) == files(tmp_path / "whole")


def test_a_full_disk_is_said_and_the_finished_blocks_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("texts", lambda: iter(ROWS))
    real, written = blocks.replacing, []

    def full(path: Path, mode: str = "w") -> Any:
        written.append(path.name)
        if path.name == "block-00002.npy":
            raise OSError(28, "No space left on device")
        return real(path, mode)

    monkeypatch.setattr(blocks, "replacing", full)
    with pytest.raises(OSError, match=r"no space is left for .*v\.partial .*run the same command again"):
        encode_to_disk(Letters(), source, tmp_path / "v", block_size=4)
    monkeypatch.undo()
    assert (tmp_path / "v.partial" / "block-00001.json").exists()
    encode_to_disk(Letters(), source, tmp_path / "whole", block_size=4)
    model = Letters()
    folder = encode_to_disk(model, source, tmp_path / "v", block_size=4)
    assert sum(map(len, model.batches[1:])) == len(ROWS) - 8
    assert files(folder.folder) == files(tmp_path / "whole")


# ---------------------------------------------------------------------------------------------------------------------
# Parquet out


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_blocks_of_parquet_hold_the_same_and_do_all_that_others_do(tmp_path: Path, dtype: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    source = Source("texts", lambda: iter(ROWS))
    plain = encode_to_disk(Letters(), source, tmp_path / "plain", block_size=4, dtype=dtype)
    whole = encode_to_disk(Letters(), source, tmp_path / "whole", block_size=4, dtype=dtype, files="parquet")
    table = parquet.read_table(whole.folder / "block-00005.parquet")
    kind = {"float32": "float", "float16": "halffloat"}[dtype]
    assert str(table.schema.field("vector").type) == f"fixed_size_list<element: {kind}>[3]"
    assert table["id"].to_pylist() == ["d20", "d21", "d22"]
    assert [list(map(float, row)) for row in table["vector"].to_pylist()] == plain.load()[1][20:].tolist()
    assert [part.tolist() for part in map(np.asarray, whole.load())] == [
        part.tolist() for part in map(np.asarray, plain.load())
    ]
    for number in range(6):  # checksums are of the numbers
        name = f"block-{number:05d}.json"
        assert (whole.folder / name).read_bytes() == (plain.folder / name).read_bytes()
    assert verify(whole) == []
    shards = encode_shards(tmp_path / "shards", dtype=dtype, files="parquet")
    merged = merge_shards([shards], tmp_path / "merged")
    assert files(merged.folder) == files(whole.folder)
    queries = np.ones((1, 3), np.float32)
    assert search_exactly(merged, queries, 5).ids.tolist() == search_exactly(plain, queries, 5).ids.tolist()
    with pytest.raises(ValueError, match="files must be one of npy, parquet, got 'zip'"):
        encode_to_disk(Letters(), source, tmp_path / "no", files="zip")


@pytest.mark.parametrize("kind", ["truncated", "empty", "flipped", "other ids", "missing", "npy"])
def test_damaged_parquet_is_found_and_mended(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("pyarrow")
    from st_aggretriever.vectors.parquet import write_parquet

    source = Source("texts", lambda: iter(ROWS))
    folder = encode_to_disk(Letters(), source, tmp_path / "v", block_size=4, files="parquet")
    before = files(folder.folder)
    path = folder.folder / "block-00001.parquet"
    vectors = folder.read(1)[1].copy()
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "npy":
        path.write_bytes(b"\x93NUMPY" + content)
    elif kind in ("truncated", "empty"):
        path.write_bytes(content[: len(content) // 2] if kind == "truncated" else b"")
    else:
        with path.open("wb") as file:
            ids = [f"{'e' if kind == 'other ids' else 'd'}{number}" for number in range(4, 8)]
            write_parquet(file, ids, vectors if kind == "other ids" else vectors + 1)
    faults = verify(folder)
    assert [fault.block for fault in faults] == [1]
    assert "block-00001.parquet" in faults[0].sentence
    reopen(folder, faults)
    assert files(encode_to_disk(Letters(), source, folder.folder, block_size=4, files="parquet").folder) == before


def test_a_block_of_no_rows_fits_into_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"_id": "a", "text": "one"}\n{broken\n')
    options: dict[str, Any] = {"block_size": 1, "skip_bad": True, "files": "parquet"}
    folder = encode_to_disk(Letters(), Corpus(path, skip_bad=True), tmp_path / "v", **options)
    assert verify(folder) == []
    assert folder.load()[0] == ["a"]


# ---------------------------------------------------------------------------------------------------------------------
# Search


def test_ids_that_a_run_cannot_hold_are_refused_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ShardSearch, "search", lambda *_: pytest.fail("searched"))
    for side, rows in (("document", [*ROWS, ("a b", "c")]), ("query", [("q", "ab")]), ("odd", [("\t", "ab")])):
        source = Source("texts", lambda rows=rows: iter(rows))  # type: ignore[misc]
        kind = "document" if side == "document" else "query"
        encode_to_disk(Letters(), source, tmp_path / side, side=kind, block_size=4)
    for queries, what in (("query", "document id 'a b'"), ("odd", r"query id '\t'")):
        command = [
            "search",
            "--index",
            tmp_path / "document",
            "--queries",
            tmp_path / queries,
            "--run",
            tmp_path / "run",
        ]
        assert main(list(map(str, command))) == 2
        assert f"{what} holds blanks, which a TREC run can't. Encode it under another id." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_search_over_shards_equals_search_of_the_whole(tmp_path: Path, workers: int) -> None:
    whole = encode_to_disk(Letters(), Source("texts", lambda: iter(ROWS)), tmp_path / "whole", block_size=4)
    shards = open_shards([encode_shards(tmp_path / "shards", 3)])
    queries = np.random.default_rng(0).integers(-2, 3, (5, 3)).astype(np.float32)  # exact, full of ties
    expected = search_exactly(whole, queries, 9)
    with ShardSearch(shards, workers=workers) as search:
        for _ in range(workers):
            found = search.search(queries, 9)
            assert found.ids.tolist() == expected.ids.tolist()
            assert found.scores.tolist() == expected.scores.tolist()
    with ShardSearch([*shards, shards[0]]) as search, pytest.raises(ValueError, match="is in two folders"):
        search.search(queries, 30)


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def test_commands_over_shards_and_a_pool(
    tiny_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from st_aggretriever import build_aggretriever

    models = [str(tmp_path / name) for name in ("m", "other")]
    for seed, model in enumerate(models):
        build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4, seed=seed).save_pretrained(model)
    corpus = write_jsonl(
        tmp_path / "c.jsonl", [(key, f"{text} the cat sleeps" * (len(text) % 3)) for key, text in ROWS]
    )
    shared = ["--model", models[0], "--corpus", str(corpus), "--block-size", "5", "--device", "cpu"]
    whole, pooled, shards, merged = (str(tmp_path / name) for name in ("whole", "pooled", "shards", "merged"))
    assert main(["encode", *shared, "--output", whole]) == 0
    printed = capsys.readouterr().out
    assert "23 documents in 5 blocks, 12 dimensions" in printed
    assert " tokens, 0.0 MB, " in printed
    assert main(["encode", *shared, "--output", pooled, "--workers", "1"]) == 0
    assert files(Path(pooled)) == files(Path(whole))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert main(["encode", *shared, "--output", shards, "--shard", "auto"]) == 0
    assert main(["merge", shards, "--output", merged]) == 0
    assert files(Path(merged)) == files(Path(whole))
    assert main(["verify", shards, merged, "--model", models[0]]) == 2
    captured = capsys.readouterr()
    assert captured.out.count(": right\n") == 3
    assert "is no shard, but" in captured.out
    assert main(["verify", shards, "--model", models[0]]) == 0
    assert capsys.readouterr().out.count(": right\n") == 2
    assert main(["verify", merged, "--model", models[1]]) == 2
    captured = capsys.readouterr()
    assert "was made by another model" in captured.out
    assert "verify: 1 fault in 1 folder" in captured.err
    queries = str(tmp_path / "queries")
    assert main(["encode", *shared, "--side", "query", "--output", queries]) == 0
    runs = []
    for index in ([whole], [shards]):
        runs.append(tmp_path / f"{len(runs)}.trec")
        assert main(["search", "--index", *index, "--queries", queries, "--run", str(runs[-1]), "--top-k", "7"]) == 0
    ranked = [[line.split()[:3] for line in run.read_text().splitlines()] for run in runs]
    assert ranked[0] == ranked[1]
    for more, sentence in (
        (["--shard", "0"], "belong together"),
        (["--shard", "x", "--num-shards", "2"], "must be a number from 0 or auto"),
        (["--shard", "2", "--num-shards", "2"], "numbered from 0 to 1"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--workers", "2", "--windows", "64"], "Leave --workers out"),
    ):
        assert main(["encode", *shared, "--output", str(tmp_path / "no"), *more]) == 2
        assert sentence in capsys.readouterr().err
