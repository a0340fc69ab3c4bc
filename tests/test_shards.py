"""Encoding by blocks and shards: batches, bad rows, merge, Parquet, search over shards, and the commands."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from folders import ROWS, Letters, encode_shards, files, write_jsonl

from st_aggretriever import bulk
from st_aggretriever.bulk import BlockEncoder, Source, encode_to_disk
from st_aggretriever.cli import main
from st_aggretriever.readers.corpus import Corpus
from st_aggretriever.search.retrieve import search_exactly
from st_aggretriever.search.shards import ShardSearch
from st_aggretriever.vectors.folder import VectorFolder
from st_aggretriever.vectors.shards import merge_shards, open_shards, shard_from
from st_aggretriever.vectors.verify import reopen, verify

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


def test_a_dead_process_of_the_pool_is_a_sentence() -> None:
    encoder = BlockEncoder(Letters(poison="bb"), "document", skip_bad=True)
    encoder._processes = [SimpleNamespace(is_alive=lambda: False)]
    block = SimpleNamespace(rows=[("y", "abba")], bad=[])
    with pytest.raises(OSError, match=r"has died, perhaps .* \(index out of range\)\. Finished blocks are kept"):
        encoder.encode(block)


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
