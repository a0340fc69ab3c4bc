"""Whether a finding holds: draws of seeds and queries, collections weighted equally, Holm over all findings.

The statistic of a finding is ``sum over its rows of weight x figure``, the mean over queries, seeds and collections. A
draw takes queries with replacement within each collection, the same for all rows. Three seeds can't be bootstrapped so:
no resample leaves their range, and of true nulls far more than p are rejected at a small p. The mean over a trained
model's n seeds is drawn from Student's t with n - 1 degrees of freedom instead, with the seeds' own covariance over
queries and collections.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scales import Scale

from st_aggretriever.evaluation.compare import compare_values, holm

FINDINGS = Path(__file__).with_name("findings.json")
LEVEL = 0.05
VERDICTS = ("holds", "contradicted", "not resolved")
CHUNK = 500  # resamples at a time


def findings_of(scale: Scale, table: str | None = None) -> list[dict[str, Any]]:
    """The findings that were written down for a scale, of one table or all, with the rows' names there."""
    rules = json.loads(FINDINGS.read_text(encoding="utf-8"))
    # Smoke scale judges the mini scale's findings, to run the code.
    wanted = "mini" if scale.name == "smoke" else scale.name
    found = []
    for finding in rules["findings"]:
        if wanted in finding["scales"] and table in (None, finding["table"]):
            rows = {_named(row, scale.labels): weight for row, weight in finding["rows"].items()}
            found.append({**finding, "rows": rows})
    return found


def _named(row: str, labels: Mapping[str, str]) -> str:
    """``"{main}: AGG"`` with the backbone's label."""
    for name, label in labels.items():
        row = row.replace(f"{{{name}}}", label)
    return row


def contrast(
    finding: Mapping[str, Any],
    figures: Mapping[str, Mapping[str, np.ndarray]],
    groups: Mapping[str, str],
    *,
    resamples: int,
    seed: int = 0,
) -> dict[str, Any]:
    """The finding's statistic with its interval and two-sided p-value.

    Args:
        finding: ``rows`` (name -> weight), ``margin`` (added to the statistic: how much loss the claim still allows).
        figures: Row -> collection -> (seeds, queries).
        groups: Row -> the trained model behind it; rows of one model share its seeds.
        resamples: How many.

    Returns:
        ``difference`` (without the margin), ``interval`` (95 %), ``p``, and each collection's difference.
    """
    weights: dict[str, float] = finding["rows"]
    margin = float(finding.get("margin", 0.0))
    collections = list(next(iter(figures.values())))
    by_collection = {
        name: sum(weight * figures[row][name].mean() for row, weight in weights.items()) for name in collections
    }
    difference = float(np.mean(list(by_collection.values())))
    rng = np.random.default_rng(seed)
    drawn: list[np.ndarray] = []
    for start in range(0, resamples, CHUNK):
        drawn.append(_resampled(weights, figures, groups, min(CHUNK, resamples - start), rng))
    values = np.concatenate(drawn)
    below, above = (values + margin <= 0).sum(), (values + margin >= 0).sum()
    result = {
        "difference": difference,
        "interval": [float(bound) for bound in np.quantile(values, [0.025, 0.975])],
        "margin": margin,
        "p": min(1.0, 2 * (1 + min(int(below), int(above))) / (resamples + 1)),
        "by_collection": {name: float(value) for name, value in by_collection.items()},
    }
    if sorted(weights.values()) == [-1, 1]:
        one, two = (next(row for row, w in weights.items() if w == sign) for sign in (-1, 1))
        result["queries"] = {
            name: compare_values(figures[one][name].mean(0), figures[two][name].mean(0), resamples=resamples)
            for name in collections
        }
    return result


def _resampled(
    weights: Mapping[str, float],
    figures: Mapping[str, Mapping[str, np.ndarray]],
    groups: Mapping[str, str],
    count: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """(count,) statistics, each of a fresh draw of seeds and queries."""
    seeds: dict[str, np.ndarray] = {}
    for row in weights:
        n = len(next(iter(figures[row].values())))
        if groups[row] not in seeds:
            seeds[groups[row]] = _seed_weights(n, count, rng)
    total = np.zeros(count)
    collections = list(next(iter(figures.values())))
    for name in collections:
        n = figures[next(iter(weights))][name].shape[1]
        queries = rng.multinomial(n, np.full(n, 1 / n), size=count) / n  # (count, Q)
        for row, weight in weights.items():
            by_query = seeds[groups[row]] @ figures[row][name]  # (count, Q)
            total += weight * (by_query * queries).sum(1) / len(collections)
    return total


def _seed_weights(n: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, n) weights w, each row summing to 1: ``w @ x`` is a draw of the mean of x plus t_{n-1} s / sqrt(n)."""
    if n == 1:
        return np.ones((count, 1))
    normal = rng.standard_normal((count, n))
    normal -= normal.mean(1, keepdims=True)  # of x - mean(x) it gives the same
    wide = np.sqrt((n - 1) / rng.chisquare(n - 1, (count, 1)))
    return 1 / n + normal * wide / math.sqrt(n * (n - 1))


def judge(results: Mapping[str, Mapping[str, Any]], family: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The verdict of each finding that has a result: finding -> ``p_holm`` and ``verdict``.

    Holm's correction is over the whole family: a finding without a result counts in it with p = 1, so a verdict that is
    given early is not undone by the size of the family later.
    """
    known = [results[key]["p"] if key in results else 1.0 for key in family]
    corrected = dict(zip(family, holm(known), strict=True))
    verdicts = {}
    for key, result in results.items():
        p = corrected[key]
        towards = result["difference"] + result["margin"] > 0
        verdict = VERDICTS[2] if p >= LEVEL else VERDICTS[0] if towards else VERDICTS[1]
        verdicts[key] = {"p_holm": p, "verdict": verdict}
    return verdicts
