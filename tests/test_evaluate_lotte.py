"""LoTTE: success at five by hand, both kinds of questions, bad files."""

import json
from pathlib import Path

import pytest

from st_aggretriever import build_aggretriever
from st_aggretriever.cli import main
from st_aggretriever.evaluation.lotte import evaluate_lotte, success
from st_aggretriever.evaluation.runs import read_run

pytest.importorskip("pytrec_eval")
pytest.importorskip("bm25s")

# Six passages hold "sea", the shorter the better for BM25: passages 1 to 6 in this order.
PASSAGES = {str(place): "sea " + "ship " * place for place in range(1, 7)} | {"7": "yeast", "8": "moon"}


def write(folder: Path, kind: str, rows: list[tuple[int, str, list[int]]]) -> None:
    (folder / f"questions.{kind}.tsv").write_text("".join(f"{qid}\t{text}\n" for qid, text, _ in rows))
    records = [{"qid": qid, "query": text, "answer_pids": pids} for qid, text, pids in rows]
    (folder / f"qas.{kind}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "lotte"
    folder.mkdir()
    (folder / "collection.tsv").write_text("".join(f"{key}\t{text}\n" for key, text in PASSAGES.items()))
    # Fifth of the sea's, sixth of them, and one of two: two of three succeed.
    write(folder, "search", [(0, "sea", [5]), (1, "sea", [6]), (2, "yeast", [3, 7])])
    # The same number is another question here.
    write(folder, "forum", [(0, "moon", [8]), (1, "yeast", [999])])
    return folder


@pytest.mark.parametrize(
    ("ranking", "right", "expected"),
    [
        (["a", "b", "c", "d", "e", "f"], ["e"], 1.0),  # fifth
        (["a", "b", "c", "d", "e", "f"], ["f"], 0.0),  # sixth
        (["a", "b"], ["x", "b"], 1.0),  # one of several is enough
        (["a", "b"], ["x"], 0.0),
        ([], ["a"], 0.0),
    ],
)
def test_rule_by_hand(ranking: list[str], right: list[str], expected: float) -> None:
    scores = {key: float(-place) for place, key in enumerate(ranking)}
    assert success({"q": scores}, {"q": right}) == expected


def test_question_without_hits_counts_in_the_mean() -> None:
    assert success({"a": {"1": 1.0}}, {"a": ["1"], "b": ["1"], "c": ["1"], "d": ["1"]}) == 0.25


def test_figures_that_cannot_be_written_leave_no_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError("no space left")

    monkeypatch.setattr("json.dumps", full)
    with pytest.raises(OSError, match="no space left"):
        evaluate_lotte(None, data, run=tmp_path / "run", output=tmp_path / "out.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lotte"]


def test_both_kinds_by_hand(data: Path, tmp_path: Path) -> None:
    result = evaluate_lotte(None, data, run=tmp_path / "run", output=tmp_path / "out.json")
    assert result["figures"] == {"Success@5 search": pytest.approx(2 / 3), "Success@5 forum": 0.5}
    assert (result["counts"]["queries"], result["counts"]["documents"], result["counts"]["unknown_answers"]) == (
        5,
        8,
        1,
    )
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert sorted(result["checksums"]) == [
        "collection.tsv", "qas.forum.jsonl", "qas.search.jsonl", "questions.forum.tsv", "questions.search.tsv",
    ]  # fmt: skip
    run = read_run(tmp_path / "run")
    assert list(run) == ["search-0", "search-1", "search-2", "forum-0", "forum-1"]
    assert list(run["search-0"])[:6] == ["1", "2", "3", "4", "5", "6"]
    assert list(evaluate_lotte(None, data, kinds=["forum"])["figures"]) == ["Success@5 forum"]


def test_command_with_a_model(data: Path, tmp_path: Path, tiny_bert: str, capsys: pytest.CaptureFixture[str]) -> None:
    build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4).save_pretrained(str(tmp_path / "model"))
    base = ["evaluate", "lotte", "--model", str(tmp_path / "model"), "--data", str(data), "--device", "cpu"]
    assert main([*base, "--questions", "search", "--query-length", "3"]) == 0
    printed = capsys.readouterr().out
    assert "Success@5 search" in printed
    assert "queries are cut at 3 tokens" in printed


def test_bad_files_are_named_before_any_work(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["evaluate", "lotte", "--model", "bm25", "--data", str(data), "--questions", "search"]
    qas = data / "qas.search.jsonl"
    for content, sentence in (
        ('{"qid": 9, "answer_pids": [1]}\n', "qas.search.jsonl: question '9' is not in questions.search.tsv"),
        ('{"qid": 0, "answer_pids": [1]}\n' * 2, "question '0' occurs a second time"),
        ('{"qid": 0, "answer_pids": []}\n', "line 1: expected a list with at least one id"),
        ('{"qid": 0, "answer_pids": [true]}\n', "expected a string in 'pid', got bool"),
    ):
        qas.write_text(content)
        assert main(base) == 2
        assert sentence in capsys.readouterr().err
    (data / "collection.tsv").unlink()
    qas.write_text('{"qid": 0, "answer_pids": [1]}\n')
    assert main(base) == 2
    assert "collection.tsv" in capsys.readouterr().err
    with pytest.raises(ValueError, match="kinds must be of search, forum, got web"):
        evaluate_lotte(None, data, kinds=["web"])
    with pytest.raises(ValueError, match="top_k must be at least 5, got 4"):
        evaluate_lotte(None, data, top_k=4)
