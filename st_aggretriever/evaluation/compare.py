"""Runs beside each other: means, paired tests with Holm's correction, the queries that changed most, a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from st_aggretriever.atomic import replacing
from st_aggretriever.evaluation.beir import read_collection
from st_aggretriever.evaluation.metrics import evaluate_run, mean_figures, metric_rules, rank
from st_aggretriever.evaluation.runs import known_queries, read_run
from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries
from st_aggretriever.readers.text import checksum
from st_aggretriever.vectors.manifest import counted
from st_aggretriever.versions import versions

SHOWN = 3  # passages of each run for a query that changed
EXACT_LIMIT = 14  # queries up to which all sign patterns are tried: 2^14 of them


def compare_runs(
    files: Sequence[str | Path],
    data: str | Path,
    *,
    split: str = "test",
    metric: str = "nDCG@10",
    top_k: int = 1000,
    drop_identical_ids: bool = True,
    changed: int = 5,
    resamples: int = 10_000,
    seed: int = 0,
    output: str | Path | None = None,
    plot: str | Path | None = None,
) -> dict[str, Any]:
    """Compare two or more runs on one split of a BEIR folder, query by query.

    Args:
        files: Runs in TREC's or MS MARCO's format; each is named by its file's name.
        data: BEIR folder with queries, documents and judgements.
        split: Which qrels; every judged query counts, also one that a run lacks (its figures are 0).
        metric: What is compared, one of ``nDCG@10``, ``RR@10``, ``R@100``, ``R@1000``, ``MAP``.
        top_k: Depth at which the runs are cut.
        drop_identical_ids: Drop a document whose id is the query's, before the cut.
        changed: How many queries to show for each pair, those that changed most.
        resamples: Of the randomisation test; with few queries all sign patterns are tried.
        seed: Of the randomisation test.
        output: File for the result, as JSON.
        plot: PNG of the differences, one row a pair, queries sorted by theirs.

    Returns:
        ``figures`` (run -> metric -> mean), ``pairs`` with tests, ``per_query`` (run -> query -> metric), rules.

    Raises:
        ValueError: Fewer than two runs, two of one name, an unknown metric, a number out of range, bad lines.
        OSError: A file is missing.
        ImportError: pytrec_eval, scipy or, for a plot, matplotlib is missing.
    """
    for name, value, least in (("changed", changed, 0), ("resamples", resamples, 1), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"compare_runs: {name} must be at least {least}, got {value}.")
    runs = _read_runs(files)
    if plot is not None:
        import_matplotlib()
    collection = read_collection(data, split, ids_in_run=False)
    options = {"top_k": top_k, "drop_identical_ids": drop_identical_ids}
    figures = {name: evaluate_run(collection.qrels, run, **options) for name, run in runs.items()}  # type: ignore[arg-type]
    known = list(next(iter(next(iter(figures.values())).values())))
    if metric not in known:
        raise ValueError(f"compare_runs: metric must be one of {', '.join(known)} at depth {top_k}, got {metric!r}.")
    values = {name: np.array([row[metric] for row in rows.values()]) for name, rows in figures.items()}
    queries = list(collection.qrels)
    pairs = [
        {"runs": [one, two], **compare_values(values[one], values[two], resamples=resamples, seed=seed)}
        for one, two in combinations(runs, 2)
    ]
    for test in ("t_test", "randomisation"):
        for pair, corrected in zip(pairs, holm([pair[f"p_{test}"] for pair in pairs]), strict=True):
            pair[f"p_{test}_holm"] = corrected
    for pair in pairs:
        one, two = pair["runs"]
        most = np.argsort(-np.abs(values[two] - values[one]), kind="stable")[:changed]
        pair["changed"] = [
            {"query": queries[row], one: float(values[one][row]), two: float(values[two][row])}
            for row in most
            if values[one][row] != values[two][row]
        ]
    result = {
        "metric": metric,
        "data": str(data),
        "split": split,
        "runs": {
            name: {"file": str(path), "sha256": checksum(path), **known_queries(runs[name], collection.qrels)}
            for name, path in zip(runs, files, strict=True)
        },
        "drop_identical_ids": drop_identical_ids,
        "figures": {name: mean_figures(rows) for name, rows in figures.items()},
        "pairs": pairs,
        "counts": collection.counts,
        "checksums": collection.checksums,
        "rules": [
            *metric_rules(top_k, drop_identical_ids=drop_identical_ids),
            "paired two-sided t-test; paired randomisation test on the mean difference"
            f" (all sign patterns up to {EXACT_LIMIT} queries, else {resamples:,} resamples, seed {seed})",
            f"Holm's correction over {counted(len(pairs), 'pair')}, each test for itself",
        ],
        "per_query": figures,
        "versions": versions(),
    }
    if plot is not None:
        _plot(plot, metric, {tuple(pair["runs"]): values[pair["runs"][1]] - values[pair["runs"][0]] for pair in pairs})
    if output is not None:
        with replacing(output) as file:
            file.write(json.dumps(result, indent=2) + "\n")
    return result


def _read_runs(files: Sequence[str | Path]) -> dict[str, dict[str, dict[str, float]]]:
    names = [Path(file).name for file in files]
    if len(set(names)) < len(names):  # in different folders
        names = [str(file) for file in files]
    if len(files) < 2 or len(set(names)) < len(names):
        raise ValueError(f"compare_runs: expected two or more different runs, got {', '.join(names)}.")
    return {name: read_run(file) for name, file in zip(names, files, strict=True)}


def compare_values(one: np.ndarray, two: np.ndarray, *, resamples: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """How ``two`` differs from ``one``, both (Q,) figures of the same queries.

    Returns:
        Mean ``difference``, counts of queries ``better``, ``worse`` and ``equal`` in ``two``, and two-sided p-values.
    """
    difference = two - one
    return {
        "difference": float(difference.mean()),
        "better": int((difference > 0).sum()),
        "worse": int((difference < 0).sum()),
        "equal": int((difference == 0).sum()),
        "p_t_test": t_test(difference),
        "p_randomisation": randomisation_test(difference, resamples=resamples, seed=seed),
    }


def t_test(difference: np.ndarray) -> float:
    """Two-sided p-value of Student's paired t-test, differences (Q,) given.

    >>> round(t_test(np.array([1.0, 2.0, 3.0])), 4)  # t = 2 / (1 / sqrt(3)), two degrees of freedom
    0.0742
    """
    try:
        from scipy.stats import t
    except ImportError as error:
        raise ImportError(f"comparing runs needs scipy ({error}). pip install st-aggretriever[eval]") from error
    n = len(difference)
    if not difference.any() or n < 2:
        return 1.0
    deviation = float(difference.std(ddof=1))
    if deviation == 0:
        return 0.0
    return float(2 * t.sf(abs(float(difference.mean())) / (deviation / math.sqrt(n)), n - 1))


def randomisation_test(difference: np.ndarray, *, resamples: int = 10_000, seed: int = 0) -> float:
    """Share of sign patterns whose mean is at least as far from 0 as the mean of ``difference`` (Q,).

    All 2^Q patterns for few queries; otherwise ``resamples`` random ones and the observed one.

    >>> randomisation_test(np.array([1.0, 2.0, 3.0]))  # only +++ and --- reach 6
    0.25
    """
    changing = difference[difference != 0]  # a zero stays what it is under either sign
    if not len(changing):
        return 1.0
    observed = abs(changing.sum()) - 1e-12 * np.abs(changing).sum()  # sums in another order may round below it
    n = len(changing)
    if n <= EXACT_LIMIT:
        signs = (np.arange(2**n)[:, None] >> np.arange(n) & 1) * 2 - 1
        return float((np.abs(signs @ changing) >= observed).mean())
    rng = np.random.default_rng(seed)
    reached = 0
    for start in range(0, resamples, 1000):
        signs = rng.integers(0, 2, (min(1000, resamples - start), n)) * 2 - 1
        reached += int((np.abs(signs @ changing) >= observed).sum())
    return (reached + 1) / (resamples + 1)


def holm(values: Sequence[float]) -> list[float]:
    """Holm's step-down correction of p-values, in their order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(values)
    highest = 0.0
    for place, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        highest = max(highest, min(1.0, (len(values) - place) * values[index]))
        corrected[index] = highest
    return corrected


def format_comparison(result: Mapping[str, Any], files: Sequence[str | Path]) -> Iterator[str]:
    """Means, tests, and for each pair the queries that changed most with the first passages of both runs."""
    metrics = list(next(iter(result["figures"].values())))
    yield f"{'':32}" + "".join(f"{metric:>9}" for metric in metrics)
    for name, row in result["figures"].items():
        yield f"{name[:32]:32}" + "".join(f"{row[metric]:9.4f}" for metric in metrics)
    for name, run in result["runs"].items():
        judged = result["counts"]["queries"]
        yield f"{name}: {run['queries']:,} queries, {run['judged']:,} of the {judged:,} judged here"
    runs = _read_runs(files)
    data, split = result["data"], result["split"]
    queries = read_queries(data)
    qrels = read_qrels(data, split, queries)
    drop = result["drop_identical_ids"]
    shown = {
        (name, change["query"]): rank(
            runs[name].get(change["query"], {}), SHOWN, without=change["query"] if drop else None
        )
        for pair in result["pairs"]
        for change in pair["changed"]
        for name in pair["runs"]
    }
    wanted = {key for ranking in shown.values() for key in ranking}
    texts = {key: text for key, text in read_corpus(data) if key in wanted}  # only these stay in memory
    for pair in result["pairs"]:
        one, two = pair["runs"]
        yield ""
        yield (
            f"{two} - {one}: {result['metric']} {pair['difference']:+.4f}; {pair['better']} queries better,"
            f" {pair['worse']} worse, {pair['equal']} equal"
        )
        yield (
            f"  t-test p {pair['p_t_test']:.4g} (Holm {pair['p_t_test_holm']:.4g}), randomisation p"
            f" {pair['p_randomisation']:.4g} (Holm {pair['p_randomisation_holm']:.4g})"
        )
        for change in pair["changed"]:
            query = change["query"]
            yield f"  ? {query}: {queries[query]}"
            for name in (one, two):
                yield f"    {name} {change[name]:.4f}"
                for key in shown[name, query]:
                    mark = "*" if qrels[query].get(key, 0) > 0 else " "
                    yield f"    {mark} {key}: {texts.get(key, '(not in the corpus)')[:100]}"
    yield from ("", *(f"- {rule}" for rule in result["rules"]))


def import_matplotlib() -> Any:
    """matplotlib's pyplot, for files only.

    Raises:
        ImportError: It is missing; the sentence names the extra.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"plots need matplotlib ({error}). pip install st-aggretriever[plot]") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _plot(path: str | Path, metric: str, differences: Mapping[tuple[str, ...], np.ndarray]) -> None:
    pyplot = import_matplotlib()
    figure, axes = pyplot.subplots(len(differences), figsize=(8, 2.5 * len(differences)), squeeze=False)
    for axis, ((one, two), values) in zip(axes[:, 0], differences.items(), strict=True):
        ordered = np.sort(values)[::-1]
        axis.bar(np.arange(len(ordered)), ordered, width=1.0, color=np.where(ordered < 0, "tab:red", "tab:blue"))
        axis.axhline(values.mean(), color="black", linewidth=0.8, linestyle="--")
        axis.set_title(f"{two} - {one}: {metric}, mean {values.mean():+.4f}", fontsize=9)
        axis.set_xlabel("queries, sorted by difference", fontsize=8)
    figure.tight_layout()
    with replacing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)
