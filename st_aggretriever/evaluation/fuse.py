"""Runs fused into one: reciprocal ranks, or a convex combination of scores whose weight comes from a dev set."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from st_aggretriever.evaluation.metrics import Qrels, Run, evaluate_run, mean_figures, rank
from st_aggretriever.vectors.manifest import counted

logger = logging.getLogger(__name__)

RRF_CONSTANT = 60  # of Cormack, Clarke and Büttcher (SIGIR 2009)
WEIGHTS = tuple(step / 20 for step in range(21))


def fuse_rrf(runs: Sequence[Run], *, top_k: int = 1000) -> dict[str, dict[str, float]]:
    """Reciprocal rank fusion: the score of a document is the sum of ``1 / (60 + its place)`` over the runs.

    Places count from 1 in trec_eval's order. A query counts that any run has.

    Returns:
        Query id -> document id -> score, best first, cut at ``top_k``.

    Raises:
        ValueError: Fewer than two runs, or top_k below 1.
    """
    _check(runs, top_k)
    fused = {}
    for query in _queries(runs):
        scores: dict[str, float] = {}
        for run in runs:
            hits = run.get(query, {})
            for place, key in enumerate(rank(hits, len(hits)), start=1):
                scores[key] = scores.get(key, 0.0) + 1 / (RRF_CONSTANT + place)
        fused[query] = rank(scores, top_k)
    return fused


def fuse_convex(runs: Sequence[Run], weight: float, *, top_k: int = 1000) -> dict[str, dict[str, float]]:
    """``weight * first + (1 - weight) * second``, scores of each query and run brought to [0, 1] before.

    The least score of a run's hits becomes 0 and the highest 1 (all of them 1 if they are equal); a document that a run
    lacks has 0 there.

    Returns:
        Query id -> document id -> score, best first, cut at ``top_k``.

    Raises:
        ValueError: Not two runs, a weight outside [0, 1], or top_k below 1.
    """
    _check(runs, top_k)
    if len(runs) != 2:
        raise ValueError(f"fuse_convex: expected two runs, got {len(runs)}. Use rrf for more.")
    if not 0 <= weight <= 1:
        raise ValueError(f"fuse_convex: weight must be between 0 and 1, got {weight}.")
    fused = {}
    for query in _queries(runs):
        first, second = (_scaled(run.get(query, {})) for run in runs)
        scores = {
            key: weight * first.get(key, 0.0) + (1 - weight) * second.get(key, 0.0) for key in {**first, **second}
        }
        fused[query] = rank(scores, top_k)
    return fused


def tune_weight(
    runs: Sequence[Run],
    qrels: Qrels,
    *,
    metric: str = "nDCG@10",
    test_queries: Sequence[str] = (),
    drop_identical_ids: bool = True,
) -> tuple[float, dict[str, Any]]:
    """The weight of :func:`fuse_convex` with the best mean figure on a dev set, in steps of 0.05.

    Of equal ones the nearest to 0.5 is taken.

    Args:
        runs: Two runs of the dev queries.
        qrels: Their judgements.
        test_queries: Ids of the queries that the weight will be used for.
        drop_identical_ids: Drop a document whose id is the query's; not where queries and documents are numbered apart.

    Returns:
        The weight, and the figure of every weight.

    Raises:
        ValueError: A dev query is among the test queries.
    """
    shared = sorted(set(qrels) & set(test_queries))
    if shared:
        raise ValueError(
            f"tune_weight: {len(shared)} dev queries, {shared[0]!r} among them, are queries of the runs to be fused."
            " Tune on others."
        )
    relevant = sum(grades.get(query, 0) > 0 for query, grades in qrels.items())
    if drop_identical_ids and relevant:
        logger.warning(
            "%s left out for having the query's id though judged relevant to it. If queries and documents are numbered"
            " apart, keep them: drop_identical_ids=False, --keep-identical-ids.",
            counted(relevant, "dev document"),
        )
    figures = {}
    for weight in WEIGHTS:
        scored = evaluate_run(qrels, fuse_convex(runs, weight), drop_identical_ids=drop_identical_ids)
        figures[weight] = mean_figures(scored)[metric]
    best = max(figures.values())
    return min((weight for weight in WEIGHTS if figures[weight] == best), key=lambda weight: abs(weight - 0.5)), {
        f"{weight:.2f}": figure for weight, figure in figures.items()
    }


def _check(runs: Sequence[Run], top_k: int) -> None:
    if len(runs) < 2:
        raise ValueError(f"fuse: expected two or more runs, got {len(runs)}.")
    if top_k < 1:
        raise ValueError(f"fuse: top_k must be at least 1, got {top_k}.")


def _queries(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(query for run in runs for query in run))


def _scaled(hits: Mapping[str, float]) -> dict[str, float]:
    if not hits:
        return {}
    low, high = min(hits.values()), max(hits.values())
    if not math.isfinite(high - low):
        raise ValueError("fuse_convex: scores must be finite numbers to be brought to [0, 1]. Use rrf for this run.")
    return {key: (score - low) / (high - low) if high > low else 1.0 for key, score in hits.items()}
