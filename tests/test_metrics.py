"""Figures by hand, trec_eval's tie rule, and the queries and documents that are easily miscounted."""

import math
import random
import sys

import pytest

from st_aggretriever.evaluation.metrics import evaluate_run, mean_figures, metric_rules, rank

pytrec_eval = pytest.importorskip("pytrec_eval")


def test_graded_ranking_by_hand() -> None:
    figures = evaluate_run({"q": {"a": 3, "b": 1, "c": 2, "n": 0}}, {"q": {"b": 0.9, "n": 0.8, "a": 0.7}})["q"]
    ideal = 3 + 2 / math.log2(3) + 1 / math.log2(4)
    assert figures == pytest.approx(
        {"nDCG@10": (1 + 3 / math.log2(4)) / ideal, "RR@10": 1, "R@100": 2 / 3, "R@1000": 2 / 3,
         "MAP": (1 / 1 + 2 / 3) / 3}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("relevant", "other", "higher"),
    [
        ("9", "10", True),  # as strings: "9" comes before "10"
        ("10", "9", False),
        ("a", "b", False),
        ("b", "a", True),
        ("\U0001f600", "\uffee", True),  # order of code points = order of UTF-8 bytes, not of UTF-16 units
        ("\uffee", "\U0001f600", False),
    ],
)
@pytest.mark.parametrize("gap", [0.0, 1e-9])  # trec_eval compares float32: 1e-9 apart at 1 is a tie
def test_ties_go_by_document_id_descending(relevant: str, other: str, higher: bool, gap: float) -> None:
    run = {"q": {relevant: 1.0 - gap if higher else 1.0 + gap, other: 1.0}}
    figures = evaluate_run({"q": {relevant: 1}}, run)["q"]
    expected = 1.0 if higher else 0.5
    assert (figures["RR@10"], figures["MAP"]) == (expected, expected)
    trec = pytrec_eval.RelevanceEvaluator({"q": {relevant: 1}}, {"recip_rank"}).evaluate(run)["q"]
    assert trec["recip_rank"] == expected


def test_agrees_with_trec_eval_on_a_run_full_of_ties() -> None:
    draw = random.Random(0)
    documents = [str(number) for number in range(300)]
    qrels = {f"q{n}": {key: draw.choice([0, 1, 1, 2]) for key in draw.sample(documents, 20)} for n in range(20)}
    run = {query: {key: float(draw.randrange(6)) for key in draw.sample(documents, 200)} for query in qrels}
    figures = evaluate_run(qrels, run)
    trec = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "recall.100,1000", "map", "recip_rank"}).evaluate(run)
    for query, row in trec.items():
        first = row["recip_rank"] if row["recip_rank"] >= 0.1 else 0.0
        assert list(figures[query].values()) == pytest.approx(
            [row["ndcg_cut_10"], first, row["recall_100"], row["recall_1000"], row["map"]], abs=1e-12
        )


@pytest.mark.parametrize(("place", "expected"), [(1, 1.0), (10, 0.1), (11, 0.0)])
def test_reciprocal_rank_looks_at_ten(place: int, expected: float) -> None:
    run = {f"d{number}": 100.0 - number for number in range(1, 21)}
    assert evaluate_run({"q": {f"d{place}": 1}}, {"q": run})["q"]["RR@10"] == pytest.approx(expected)


def test_every_judged_query_counts_once() -> None:
    qrels = {"hit": {"a": 1}, "missing": {"a": 1}, "empty": {"a": 1}, "not relevant": {"a": 0, "b": -1}, "no grade": {}}
    run = {"hit": {"a": 1.0}, "empty": {}, "not relevant": {"a": 1.0}, "no grade": {"a": 1.0}, "no query": {"a": 1.0}}
    figures = evaluate_run(qrels, run)
    assert list(figures) == list(qrels)
    assert mean_figures(figures) == dict.fromkeys(["nDCG@10", "RR@10", "R@100", "R@1000", "MAP"], 0.2)


def test_negative_grades_are_not_relevant() -> None:
    figures = evaluate_run({"q": {"a": -2, "b": 1}, "r": {"a": -2}}, {"q": {"a": 2.0, "b": 1.0}, "r": {"a": 1.0}})
    assert figures["q"]["nDCG@10"] == pytest.approx(1 / math.log2(3))
    assert set(figures["r"].values()) == {0.0}


def test_unknown_documents_count_in_the_ideal() -> None:
    figures = evaluate_run({"q": {"a": 1, "ghost": 1}}, {"q": {"a": 1.0}})["q"]
    assert figures["nDCG@10"] == pytest.approx(1 / (1 + 1 / math.log2(3)))
    assert (figures["R@100"], figures["MAP"]) == (0.5, 0.5)


def test_identical_id_is_dropped_before_the_cut() -> None:
    qrels, run = {"q": {"d": 1}}, {"q": {"q": 2.0, "d": 1.0}}
    assert evaluate_run(qrels, run)["q"]["RR@10"] == 1.0
    assert evaluate_run(qrels, run, drop_identical_ids=False)["q"]["RR@10"] == 0.5
    assert rank({"q": 3.0, "d": 2.0, "e": 1.0}, 1, without="q") == {"d": 2.0}
    assert "dropped before the cut at 7" in " ".join(metric_rules(7))
    assert "kept in the cut at 7" in " ".join(metric_rules(7, drop_identical_ids=False))


def test_metrics_deeper_than_the_run_are_left_out_and_map_is_cut() -> None:
    run = {"q": {f"d{number:03d}": 500.0 - number for number in range(200)}}
    figures = evaluate_run({"q": {"d000": 1, "d150": 1}}, run, top_k=100)["q"]
    assert list(figures) == ["nDCG@10", "RR@10", "R@100", "MAP"]
    assert figures["MAP"] == 0.5


@pytest.mark.parametrize("key", ["a\ud800", "a\0b"])
def test_ids_that_trec_eval_cannot_hold_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="NUL or a lone surrogate"):
        evaluate_run({"q": {"d": 1}}, {"q": {key: 1.0}})


def test_nan_scores_no_queries_and_a_missing_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="score of document 'b' is NaN"):
        evaluate_run({"q": {"a": 1}}, {"q": {"a": 1.0, "b": float("nan")}})
    with pytest.raises(ValueError, match="at least one query"):
        mean_figures({})
    monkeypatch.setitem(sys.modules, "pytrec_eval", None)
    with pytest.raises(ImportError, match=r"pip install st-aggretriever\[eval\]"):
        evaluate_run({"q": {"a": 1}}, {})
