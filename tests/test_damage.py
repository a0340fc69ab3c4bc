"""Vectors on disk after kills, damage, a second writer or a full disk: named, mended, and nothing lost."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import ROWS, Letters, damage, encode_shards, files, run_and_kill, write_jsonl

from st_aggretriever import bulk
from st_aggretriever.bulk import Source, encode_to_disk
from st_aggretriever.cli import main
from st_aggretriever.ray_engine import _Encoder
from st_aggretriever.readers.corpus import Corpus
from st_aggretriever.search.ondisk import build_on_disk
from st_aggretriever.search.retrieve import search_exactly
from st_aggretriever.vectors import blocks
from st_aggretriever.vectors.folder import VectorFolder, VectorWriter
from st_aggretriever.vectors.manifest import manifest_hash
from st_aggretriever.vectors.shards import merge_shards, open_shards
from st_aggretriever.vectors.verify import reopen, verify


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
        if run_and_kill(work, step):
            break
        if (tmp_path / "v").exists():
            break  # killed after the folder had got its name
        assert (tmp_path / "v.partial").exists()
    else:
        pytest.fail("it never ended")
    assert files(tmp_path / "v") == files(tmp_path / "whole")
    assert step > 4
    assert not (tmp_path / "v.partial").exists()


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


def test_merge_follows_blocks_that_are_links(tmp_path: Path) -> None:
    shards = encode_shards(tmp_path / "shards")
    (tmp_path / "elsewhere").mkdir()
    for block in (shards / "shard-00001-of-00002").glob("block-*"):
        block.rename(tmp_path / "elsewhere" / block.name)
        block.symlink_to(Path("..", "..", "elsewhere", block.name))
    merged = merge_shards([shards], tmp_path / "v")
    assert merged.load()[0] == [key for key, _ in ROWS]
    assert verify(merged) == []


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
