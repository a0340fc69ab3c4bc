"""Effectiveness of a run under trec_eval's rules: nDCG@10, RR@10, R@100, R@1000, MAP.

A run maps a query id to document ids and scores; qrels map a query id to document ids and grades. The figures come
from pytrec_eval, save RR@10, for which trec_eval has no cutoff.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Qrels = Mapping[str, Mapping[str, int]]
Run = Mapping[str, Mapping[str, float]]

# Our name -> (trec_eval's name, the depth that it needs); RR@10 is computed here.
_METRICS = {
    "nDCG@10": ("ndcg_cut_10", 10),
    "RR@10": (None, 10),
    "R@100": ("recall_100", 100),
    "R@1000": ("recall_1000", 1000),
    "MAP": ("map", 1),
}
_MEASURES = {"ndcg_cut.10", "recall.100,1000", "map"}


def evaluate_run(
    qrels: Qrels, run: Run, *, top_k: int = 1000, drop_identical_ids: bool = True, relevance: int = 1
) -> dict[str, dict[str, float]]:
    """Figures of every judged query: query id -> metric -> value, in the order of ``qrels``.

    A query without hits has zeros, and so has one without a relevant document; queries that nobody judged are ignored.
    Metrics that look deeper than ``top_k`` are left out; MAP is trec_eval's ``map`` of the run cut at ``top_k``.

    Args:
        qrels: grades; ``relevance`` and more is relevant, the grade is nDCG's gain, a negative grade counts as 0.
        run: scores, any float; ordered as :func:`rank` says.
        top_k: depth at which each ranking is cut.
        drop_identical_ids: drop a document whose id is the query's, before the cut.
        relevance: the least grade of a relevant document (``trec_eval -l``), for all measures but nDCG.

    Raises:
        ValueError: a NaN score, a relevance below 1, an id that trec_eval can't hold.
        ImportError: pytrec_eval is missing.
    """
    if relevance < 1:
        raise ValueError(f"evaluate_run: relevance must be at least 1, got {relevance}.")
    pytrec_eval = import_pytrec_eval()
    metrics = {metric: name for metric, (name, depth) in _METRICS.items() if depth <= top_k}
    figures = {}
    for query, grades in qrels.items():
        # A negative grade is no gain; without a positive one every measure is 0, and trec_eval may crash.
        relevant = {key: max(grade, 0) for key, grade in grades.items()}
        ranking = rank(run.get(query, {}), top_k, without=query if drop_identical_ids else None)
        scored: dict[str, float] = {}
        if ranking and any(relevant.values()):
            _check_ids([query, *relevant, *ranking])
            evaluator = pytrec_eval.RelevanceEvaluator({query: relevant}, _MEASURES, relevance_level=relevance)
            scored = evaluator.evaluate({query: ranking})[query]
        figures[query] = {
            metric: float(scored.get(name, 0.0)) if name else _reciprocal_rank(list(ranking)[:10], relevant, relevance)
            for metric, name in metrics.items()
        }
    return figures


def mean_figures(per_query: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean over all queries given, metric by metric; every judged query counts, as with ``trec_eval -c``.

    Raises:
        ValueError: no query.
    """
    if not per_query:
        raise ValueError("mean_figures: expected at least one query, got none.")
    metrics = next(iter(per_query.values()))
    return {metric: math.fsum(row[metric] for row in per_query.values()) / len(per_query) for metric in metrics}


def rank(hits: Mapping[str, float], depth: int, *, without: str | None = None) -> dict[str, float]:
    """The first ``depth`` hits as trec_eval orders them, best first: ids and scores.

    Score descending, compared as float32 (what trec_eval stores), ties by id descending; ids compare as strings, where
    Python's order of code points is C's order of UTF-8 bytes.

    Args:
        without: this id is dropped before the cut.

    Raises:
        ValueError: a NaN score.

    >>> list(rank({"9": 1.0, "10": 1.0, "1": 2.0}, depth=2))
    ['1', '9']
    """
    ids = sorted((key for key in hits if key != without), reverse=True)
    scores = np.array([hits[key] for key in ids], np.float32)
    if np.isnan(scores).any():
        raise ValueError(f"rank: the score of document {ids[int(np.isnan(scores).argmax())]!r} is NaN.")
    order = np.argsort(-scores, kind="stable")[:depth]
    return {ids[position]: float(scores[position]) for position in order}


def metric_rules(top_k: int = 1000, *, drop_identical_ids: bool = True, relevance: int = 1) -> list[str]:
    """What the figures of :func:`evaluate_run` mean, one sentence a rule, to be printed with them."""
    identical = "dropped before" if drop_identical_ids else "kept in"
    return [
        "trec_eval's measures; the mean is over all judged queries (trec_eval -c): a query without hits or without a"
        " relevant document counts 0",
        "equal scores (as float32) are ordered by document id, descending, ids compared as strings",
        f"a document whose id is the query's is {identical} the cut at {top_k}",
        f"relevant means a grade of {relevance} or more; nDCG's gain is the grade; judged documents that are not in the"
        " corpus count in the ideal ranking and among the relevant",
        f"MAP is trec_eval's map of the run of depth {top_k}",
    ]


def check_metric(metric: str, who: str) -> None:
    """Refuse a metric that :func:`evaluate_run` doesn't know.

    Raises:
        ValueError: as said; the sentence names those that it knows.
    """
    if metric not in _METRICS:
        raise ValueError(f"{who}: metric must be one of {', '.join(_METRICS)}, got {metric!r}.")


def import_pytrec_eval() -> Any:
    """The pytrec_eval module.

    Raises:
        ImportError: it is missing; the sentence names the extra.
    """
    try:
        import pytrec_eval
    except ImportError as error:
        raise ImportError(f"evaluation needs pytrec_eval ({error}). pip install st-aggretriever[eval]") from error
    return pytrec_eval


def _reciprocal_rank(ranking: list[str], grades: Mapping[str, int], relevance: int) -> float:
    return next((1 / place for place, key in enumerate(ranking, start=1) if grades.get(key, 0) >= relevance), 0.0)


def _check_ids(ids: list[str]) -> None:
    """trec_eval holds ids as C strings in UTF-8 and crashes on those that have no such form."""
    for key in ids:
        if "\0" in key or any("\ud800" <= char <= "\udfff" for char in key if not char.isascii()):
            raise ValueError(
                f"evaluate_run: the id {key!r} holds a NUL or a lone surrogate, which trec_eval can't hold."
            )
