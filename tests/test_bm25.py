"""BM25 by its formula, and as a run under the same rules as a model's."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from st_aggretriever.cli import main
from st_aggretriever.evaluation.bm25 import evaluate_bm25
from st_aggretriever.search.bm25 import K1, B, search_bm25

DOCUMENTS = [("a", "ships sail seas"), ("b", "the ship sails and sails"), ("c", "yeast"), ("d", ""), ("e", "yeast")]


def lucene(term_frequency: int, containing: int, length: int) -> float:
    """Robertson's weight as Lucene 8 computes it, over stemmed words without stop words."""
    lengths = [3, 3, 1, 0, 1]
    idf = math.log(1 + (len(lengths) - containing + 0.5) / (containing + 0.5))
    norm = K1 * (1 - B + B * length / (sum(lengths) / len(lengths)))
    return idf * term_frequency / (term_frequency + norm)


def test_scores_equal_the_formula() -> None:
    hits = search_bm25({"q": "sailing", "p": "the yeast"}, DOCUMENTS, 5)
    assert hits.ids[0, :2].tolist() == ["b", "a"]
    assert hits.scores[0, :2].tolist() == pytest.approx([lucene(2, 2, 3), lucene(1, 2, 3)], rel=1e-5)
    assert hits.scores[1, 0] == pytest.approx(lucene(1, 2, 1), rel=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 9])
def test_hits_share_a_word_and_ties_go_by_id_descending_also_at_the_cut(top_k: int) -> None:
    hits = search_bm25({"q": "yeast", "none": "of the and"}, DOCUMENTS, top_k)
    assert hits.ids.tolist() == [["e", "c", None, None, None][:top_k], [None] * min(top_k, 5)]
    assert [np.isneginf(row).tolist() for row in hits.scores] == [[key is None for key in row] for row in hits.ids]


def test_a_corpus_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="the 2 documents hold no word"):
        search_bm25({"q": "a"}, [("a", ""), ("b", "the")], 3)


def beir_folder(folder: Path) -> Path:
    (folder / "qrels").mkdir()
    rows = [{"_id": key, "title": "", "text": text} for key, text in DOCUMENTS]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "sailing"}) + "\n")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
    return folder


def test_evaluation_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = beir_folder(tmp_path)
    result = evaluate_bm25(data)
    assert result["figures"]["RR@10"] == 0.5
    assert result["figures"]["nDCG@10"] == pytest.approx(1 / math.log2(3))
    assert f"k1 {K1}, b {B}" in result["rules"][0]
    assert main(["evaluate", "beir", "--model", "bm25", "--data", str(data), "--run", str(tmp_path / "run")]) == 0
    assert "0.6309" in capsys.readouterr().out
    assert [line.split()[:4] for line in (tmp_path / "run").read_text().splitlines()] == [
        ["q", "Q0", "b", "1"],
        ["q", "Q0", "a", "2"],
    ]


def test_top_k_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        evaluate_bm25(beir_folder(tmp_path), top_k=0)
