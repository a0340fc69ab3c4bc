"""Whether a finding holds: draws of seeds and queries, collections weighted equally, Holm over all findings.

The statistic of a finding is ``sum over its rows of weight x figure``, the mean over queries, seeds and collections. A
draw takes queries with replacement within each collection, the same for all rows. Three seeds can't be bootstrapped so:
no resample leaves their range, and of true nulls far more than p are rejected at a small p. The mean over a trained
model's n seeds is drawn from Student's t with n - 1 degrees of freedom instead, with the seeds' own covariance over
queries and collections.

This test is cautious: where seeds differ from query to query, that variance counts among the seeds, among the queries,
and in the product of the two draws, whose tails are Student's; far fewer true nulls are rejected then than p says.
``VARIANTS`` show beside the verdict what hangs on that; they came after the first results and decide nothing.
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
MORE = 10  # times as many draws in the variants
VARIANTS = {  # of the test; name -> what it says
    "more draws": f"the same test with {MORE} times as many draws, from another seed",
    "apart": "seeds drawn by Student's t for the mean over queries, queries for the mean over seeds, and the two added",
}


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
        ``difference`` (without the margin), ``interval`` (95 %), ``p``, the variants' p, and each collection's
        difference.
    """
    weights: dict[str, float] = finding["rows"]
    margin = float(finding.get("margin", 0.0))
    collections = list(next(iter(figures.values())))
    by_collection = {
        name: sum(weight * figures[row][name].mean() for row, weight in weights.items()) for name in collections
    }
    difference = float(np.mean(list(by_collection.values())))
    values, _ = _resampled(weights, figures, groups, resamples, np.random.default_rng(seed))
    variants = _resampled(weights, figures, groups, MORE * resamples, np.random.default_rng(seed + 1))
    result = {
        "difference": difference,
        "interval": [float(bound) for bound in np.quantile(values, [0.025, 0.975])],
        "margin": margin,
        "p": _two_sided(values + margin),
        "p_variants": {name: _two_sided(drawn + margin) for name, drawn in zip(VARIANTS, variants, strict=True)},
        "by_collection": {name: float(value) for name, value in by_collection.items()},
    }
    if sorted(weights.values()) == [-1, 1]:
        one, two = (next(row for row, w in weights.items() if w == sign) for sign in (-1, 1))
        result["queries"] = {
            name: compare_values(figures[one][name].mean(0), figures[two][name].mean(0), resamples=resamples)
            for name in collections
        }
    return result


def _two_sided(values: np.ndarray) -> float:
    """The p-value of draws around a statistic, against 0."""
    beyond = min(int((values <= 0).sum()), int((values >= 0).sum()))
    return min(1.0, 2 * (1 + beyond) / (len(values) + 1))


def _resampled(
    weights: Mapping[str, float],
    figures: Mapping[str, Mapping[str, np.ndarray]],
    groups: Mapping[str, str],
    count: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """(count,) statistics, each of a fresh draw of seeds and queries: of both at once, and of the two apart."""
    parts = [_chunk(weights, figures, groups, min(CHUNK, count - start), rng) for start in range(0, count, CHUNK)]
    crossed, apart = zip(*parts, strict=True)
    return np.concatenate(crossed), np.concatenate(apart)


def _chunk(
    weights: Mapping[str, float],
    figures: Mapping[str, Mapping[str, np.ndarray]],
    groups: Mapping[str, str],
    count: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    seeds: dict[str, np.ndarray] = {}
    for row in weights:
        n = len(next(iter(figures[row].values())))
        if groups[row] not in seeds:
            seeds[groups[row]] = _seed_weights(n, count, rng)
    crossed, apart = np.zeros(count), np.zeros(count)
    collections = list(next(iter(figures.values())))
    for name in collections:
        n = figures[next(iter(weights))][name].shape[1]
        queries = rng.multinomial(n, np.full(n, 1 / n), size=count) / n  # (count, Q)
        for row, weight in weights.items():
            drawn, values = seeds[groups[row]], figures[row][name]
            by_seed = queries @ values.T  # (count, seeds)
            share = weight / len(collections)
            crossed += share * (drawn * by_seed).sum(1)
            apart += share * (by_seed.mean(1) + (drawn - 1 / drawn.shape[1]) @ values.mean(1))
    return crossed, apart


def _seed_weights(n: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, n) weights w, each row summing to 1: ``w @ x`` is a draw of the mean of x plus t_{n-1} s / sqrt(n)."""
    if n == 1:
        return np.ones((count, 1))
    normal = rng.standard_normal((count, n))
    normal -= normal.mean(1, keepdims=True)  # of x - mean(x) it gives the same
    wide = np.sqrt((n - 1) / rng.chisquare(n - 1, (count, 1)))
    return 1 / n + normal * wide / math.sqrt(n * (n - 1))


def judge(results: Mapping[str, Mapping[str, Any]], family: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The verdict of each finding that has a result: finding -> ``p_holm``, ``verdict``, and both by each variant.

    Holm's correction is over the whole family: a finding without a result counts in it with p = 1, so a verdict that is
    given early is not undone by the size of the family later.
    """
    verdicts = _verdicts(results, {key: result["p"] for key, result in results.items()}, family)
    by_variant = {
        name: _verdicts(results, {key: result["p_variants"][name] for key, result in results.items()}, family)
        for name in VARIANTS
    }
    return {
        key: {**verdict, "variants": {name: by_variant[name][key] for name in VARIANTS}}
        for key, verdict in verdicts.items()
    }


def _verdicts(
    results: Mapping[str, Mapping[str, Any]], p_values: Mapping[str, float], family: Sequence[str]
) -> dict[str, dict[str, Any]]:
    corrected = dict(zip(family, holm([p_values.get(key, 1.0) for key in family]), strict=True))
    verdicts = {}
    for key, result in results.items():
        p = corrected[key]
        towards = result["difference"] + result["margin"] > 0
        verdict = VERDICTS[2] if p >= LEVEL else VERDICTS[0] if towards else VERDICTS[1]
        verdicts[key] = {"p_holm": p, "verdict": verdict}
    return verdicts
