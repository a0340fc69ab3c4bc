"""Training data inside a test set: what counts as seen, by hand, and figures without it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from st_aggretriever.cli import main
from st_aggretriever.evaluation.overlap import excluded_queries, find_overlap, grams_of, share_of, words_of

pytest.importorskip("pytrec_eval")

TEN = "one two three four five six seven eight nine ten"  # three 8-grams


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "qrels").mkdir(parents=True)
    corpus = {"copy": TEN, "half": f"{TEN} b c d", "less": f"{TEN} b c d e", "short": "Bread, salt!"}
    corpus["other"] = "a b c d e f g h ships"
    queries = {"seen": "Who Sails?", "clean": "who bakes", "touched": "what is seven", "zero": "what ships"}
    for name, texts in (("corpus", corpus), ("queries", queries)):
        rows = [json.dumps({"_id": key, "text": text}) + "\n" for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    qrels = "seen\tother\t1\nclean\tless\t1\ntouched\thalf\t1\nzero\tcopy\t0\nzero\tother\t1\n"
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels)
    return folder


@pytest.fixture
def train(tmp_path: Path) -> Path:
    pairs = [{"query": "who sails", "passage": f"x {TEN.upper()} y"},
             {"query": "q", "passage": "p", "negatives": ["bread salt", {"title": "t", "text": "z"}]}]  # fmt: skip
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def test_words_and_grams() -> None:
    assert words_of("Ｗho’s  THERE?") == ["who", "s", "there"]
    assert len(grams_of(TEN)) == 3
    assert len(grams_of("a b c d e f g h")) == len(grams_of("a")) == 1
    assert grams_of("...") == set()
    assert len(grams_of("a " * 30)) == 1  # different ones
    grams = np.sort(np.fromiter(grams_of(TEN), np.int64))
    assert share_of(TEN, grams) == 1.0
    assert share_of(f"{TEN} b c d", grams) == 0.5  # three of six
    assert share_of("one two", grams) == share_of("", grams) == share_of(TEN, grams[:0]) == 0.0


def test_seen_queries_and_documents_by_hand(data: Path, train: Path, tmp_path: Path) -> None:
    result = find_overlap([train], data, output=tmp_path / "out.json")
    assert result["queries"] == ["seen"]
    assert result["documents"] == {"copy": 1.0, "half": 0.5, "short": 1.0}
    assert result["affected_queries"] == ["seen", "touched"]  # a document judged 0 doesn't count
    assert result["counts"] == {
        "queries": 4, "queries_seen": 1, "documents": 5, "documents_seen": 3,
        "queries_with_seen_relevant_document": 1, "queries_affected": 2,
    }  # fmt: skip
    assert json.loads((tmp_path / "out.json").read_text()) == result


def test_several_files_count_together(data: Path, train: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps({"query": "who bakes", "passage": "eight nine ten b c d e f"}) + "\n")
    assert find_overlap([train, more], data)["queries"] == ["seen", "clean"]
    assert find_overlap([more], data)["documents"] == {}


def test_figures_without_the_affected_queries(
    data: Path, train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlap, output = tmp_path / "overlap.json", tmp_path / "figures.json"
    assert main(["evaluate", "overlap", "--train", str(train), "--data", str(data), "--output", str(overlap)]) == 0
    out = capsys.readouterr().out
    assert "queries seen in training: 1 of 4 (seen)" in out
    assert "documents seen in training: 3 of 5 (copy, half, short)" in out
    beir = ["evaluate", "beir", "--model", "bm25", "--data", str(data), "--exclude-overlap", str(overlap)]
    assert main([*beir, "--output", str(output)]) == 0
    assert "without the 2 queries" in capsys.readouterr().out
    # BM25 reads no single letters: "seven" finds less, half and copy with one score, ids descending. RR is 0, 0, 1/2, 1
    # for seen, clean, touched, zero.
    result: dict[str, Any] = json.loads(output.read_text())
    assert result["figures"]["RR@10"] == pytest.approx((1 / 2 + 1) / 4)
    assert result["without_overlap"]["figures"]["RR@10"] == pytest.approx(1 / 2)
    assert (result["without_overlap"]["queries"], result["without_overlap"]["excluded"]) == (2, 2)


def test_a_file_about_other_data_is_refused(data: Path, train: Path, tmp_path: Path) -> None:
    result = find_overlap([train], data, output=tmp_path / "out.json")
    assert excluded_queries(tmp_path / "out.json", "test", result["checksums"]) == ["seen", "touched"]
    with pytest.raises(ValueError, match="which is not the data evaluated here"):
        excluded_queries(tmp_path / "out.json", "test", result["checksums"] | {"corpus.jsonl": "0"})
    with pytest.raises(ValueError, match="which is not the data evaluated here"):
        excluded_queries(tmp_path / "out.json", "dev", result["checksums"])
    (tmp_path / "else.json").write_text("{}")
    with pytest.raises(ValueError, match="was not written by evaluate overlap"):
        excluded_queries(tmp_path / "else.json", "test", {})
    with pytest.raises(ValueError, match="at least one training file"):
        find_overlap([], data)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"data": None, "split": None, "checksums": None, "affected_queries": None},
         "lacks data, split, checksums, affected_queries. Run evaluate overlap again."),
        ({"affected_queries": None}, "lacks affected_queries. Run evaluate overlap again."),
        ({"affected_queries": "seen"}, "expected a list of ids in 'affected_queries'. Run evaluate overlap again."),
        ({"affected_queries": [1]}, "expected a list of ids in 'affected_queries'. Run evaluate overlap again."),
    ],
)  # fmt: skip
def test_a_damaged_file_of_overlap_is_refused_in_one_sentence(
    data: Path, train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], sentence: str
) -> None:
    found = find_overlap([train], data) | change
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    beir = ["evaluate", "beir", "--model", "bm25", "--data", str(data), "--exclude-overlap", str(path)]
    assert main(beir) == 2
    assert sentence in capsys.readouterr().err
    path.write_text("[" * 100_000)
    assert main(beir) == 2
    assert "damaged.json is broken (JSON nested too deeply)" in capsys.readouterr().err
