"""quickstart: four arms and BM25 in one table, three searches, and nothing done twice."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from training_runs import die_at

from st_aggretriever import load_aggretriever
from st_aggretriever.cli import main

TEXTS = {
    "d1": "bread needs flour , water , salt and an oven",
    "d2": "the ship sails over the sea",
    "d3": "paris is the capital city of france",
    "d4": "a fox and a dog sleep in the sun",
}
QUERIES = {"a": "flour and salt", "b": "ship sea", "c": "capital of france", "d": "fox in the sun"}
SIZES = ["--epochs", "1", "--cls-dim", "4", "--lexical-dim", "16", "--device", "cpu"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": key, "title": "", "text": text} for key, text in TEXTS.items()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"_id": key, "text": text} for key, text in QUERIES.items()]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = "".join(f"{query}\t{document}\t1\n" for query, document in zip(QUERIES, TEXTS, strict=True))
    for split in ("train", "test"):
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return folder


def run(tiny_bert: str, data: Path, output: Path, *more: str) -> int:
    pairs = output.parent / "pairs.jsonl"
    lines = [json.dumps({"query": f"{query} {n}", "passage": f"{text} {n}"}) for n in range(9)
             for query, text in zip(QUERIES.values(), TEXTS.values(), strict=True)]  # fmt: skip
    pairs.write_text("\n".join(lines) + "\n")
    arguments = ["--model", tiny_bert, "--data", str(data), "--pairs", str(pairs), "--output", str(output)]
    return main(["quickstart", *arguments, *SIZES, *more])


def test_table_searches_and_model(
    tiny_bert: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    assert run(tiny_bert, data, output) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    for name in ("BM25", "AGG, untrained", "CLS", "mean pooling", "AGG"):
        assert sum(line.startswith(f"{name:16}") for line in lines) == 1, name
    assert [line[2:] for line in lines if line.startswith("? ")] == list(QUERIES.values())[:3]
    searches = [line for line in lines if re.match(r"  [* ] \d\. ", line)]
    assert len(searches) == 9
    judged = dict(zip(QUERIES.values(), TEXTS.values(), strict=True))
    query = ""
    for line in lines:
        query = line[2:] if line.startswith("? ") else query
        if line in searches:
            assert line.startswith("  * ") is line.endswith(judged[query])
    for arm, dimension in (("agg", 20), ("cls", 20), ("mean", 20)):
        assert load_aggretriever(output / arm).get_embedding_dimension() == dimension
    figures = json.loads((output / "agg.json").read_text())["figures"]
    assert f"{figures['nDCG@10']:9.3f}{figures['R@100']:9.3f}" in printed

    def fail(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("st_aggretriever.trainer.AggretrieverTrainer.fit", fail)
    assert run(tiny_bert, data, output) == 0
    assert f"{figures['nDCG@10']:9.3f}" in capsys.readouterr().out


def test_an_interrupted_training_goes_on_from_its_checkpoint(
    tiny_bert: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("st_aggretriever.quickstart.SAVE_STEPS", 1)
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, 3)
        assert run(tiny_bert, data, tmp_path / "out", "--epochs", "4") == 130
    capsys.readouterr()
    assert run(tiny_bert, data, tmp_path / "out", "--epochs", "4") == 0
    assert "4 steps of 32 pairs, after checkpoint-2" in capsys.readouterr().err


def several_positives(data: Path) -> list[str]:
    """A BEIR folder's train split with four positives for each of four queries."""
    judged = "".join(f"{query}\t{document}\t1\n" for query in QUERIES for document in TEXTS)
    (data / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return []


def tevatron(data: Path) -> list[str]:
    """Five rows with three positives each."""
    rows = [
        {
            "query": f"question {n}",
            "positive_passages": [{"docid": f"{n}-{p}", "title": "", "text": f"answer {n} {p}"} for p in range(3)],
            "negative_passages": [],
        }
        for n in range(5)
    ]
    (data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--pairs", str(data / "rows.jsonl")]


def shared_passages(data: Path) -> list[str]:
    """Nine queries of three passages: batches of nine and of four can't be filled."""
    rows = [{"query": f"question {n}", "passage": f"answer {n % 3}"} for n in range(9)]
    (data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--pairs", str(data / "rows.jsonl")]


@pytest.mark.parametrize(
    ("make", "pairs", "size"), [(several_positives, 16, 4), (tevatron, 5, 5), (shared_passages, 9, 2)]
)
def test_a_batch_is_as_large_as_the_pairs_can_fill(
    tiny_bert: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, pairs: int, size: int
) -> None:
    output = tmp_path / "out"
    more = make(data)
    assert main(["quickstart", "--model", tiny_bert, "--data", str(data), "--output", str(output), *SIZES, *more]) == 0
    assert f"{pairs} training pairs" in capsys.readouterr().out
    record = json.loads((output / "agg" / "train.json").read_text())
    assert (record["config"]["batch_size"], record["steps"]) == (size, pairs // size)


def test_pairs_that_fill_no_batch_are_refused_before_anything_is_written(
    tiny_bert: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rows, sentence in (
        (
            [{"query": f"q {n}", "passage": "the same"} for n in range(8)],
            "8 training pairs of 8 different queries fill no",
        ),
        ([{"query": "q", "passage": f"p {n}"} for n in range(8)], "8 training pairs of 1 different queries fill no"),
        (
            [{"query": "q", "passage": "p", "negatives": ["n"] * n} for n in (1, 2)],
            "an option of st-aggretriever train",
        ),
    ):
        (data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        more = ["--pairs", str(data / "rows.jsonl"), "--output", str(tmp_path / "out")]
        assert main(["quickstart", "--model", tiny_bert, "--data", str(data), *SIZES, *more]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert len(error.strip().splitlines()) == 1
        assert not (tmp_path / "out").exists()


def test_another_device_is_another_setting(
    tiny_bert: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tiny_bert, data, tmp_path / "out") == 0
    monkeypatch.setattr("st_aggretriever.evaluation.bm25.evaluate_bm25", lambda *a, **k: pytest.fail("it has begun"))
    assert run(tiny_bert, data, tmp_path / "out", "--device", "auto") == 2
    assert "other settings: device (cpu, now auto)" in capsys.readouterr().err
    monkeypatch.undo()
    mark = tmp_path / "out" / "quickstart.json"
    before = json.loads(mark.read_text())
    del before["settings"]["device"]  # as the first of these runs had it
    mark.write_text(json.dumps(before))
    assert run(tiny_bert, data, tmp_path / "out") == 0


def test_other_settings_in_the_same_folder_are_refused(
    tiny_bert: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny_bert, data, tmp_path / "out") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert run(tiny_bert, data, tmp_path / "out", "--seed", "1") == 2
    assert "other settings: seed (0, now 1)" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()} == before


def test_a_missing_train_split_is_one_sentence(
    tiny_bert: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "qrels" / "train.tsv").unlink()
    assert main(["quickstart", "--model", tiny_bert, "--data", str(data), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "train" in error
    assert len(error.strip().splitlines()) == 1


def test_a_folder_of_somebody_elses_stays_as_it_is(
    tiny_bert: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "bm25.trec").write_text("precious")
    assert run(tiny_bert, data, output) == 2
    assert "not empty; nothing was overwritten" in capsys.readouterr().err
    assert [path.read_text() for path in output.iterdir()] == ["precious"]


def test_an_output_that_cannot_be_made_is_found_before_any_work(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("precious")
    for output, sentence in (
        (tmp_path / "file" / "below" / "out", f"can't be made: {tmp_path / 'file'} is a file. Name another output."),
        (Path("/proc/out"), "/proc/out can't be written (No such file or directory). Name another output."),
    ):
        assert main(["quickstart", "--model", "absent", "--data", str(data / "absent"), "--output", str(output)]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert len(error.strip().splitlines()) == 1


def test_a_bad_option_is_found_before_anything_is_written(tiny_bert: str, data: Path, tmp_path: Path) -> None:
    for option, value in (("--lexical-dim", "640"), ("--epochs", "0"), ("--epochs", "-1"), ("--seed", "-1")):
        assert run(tiny_bert, data, tmp_path / "out", option, value) == 2
        assert not (tmp_path / "out").exists()


def test_a_few_pairs_are_a_batch(tiny_bert: str, data: Path, tmp_path: Path) -> None:
    """The four of the train split."""
    output = tmp_path / "out"
    assert main(["quickstart", "--model", tiny_bert, "--data", str(data), "--output", str(output), *SIZES]) == 0
    assert json.loads((output / "agg" / "train.json").read_text())["config"]["batch_size"] == 4
