"""BEIR by the names of its sets: fetched, evaluated one by one into a folder of figures that can be gone on with, and
their means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from st_aggretriever.atomic import replacing
from st_aggretriever.encoding import length_limit, model_hash
from st_aggretriever.evaluation.beir import check_numbers, data_checksums, evaluate_beir
from st_aggretriever.evaluation.beir_sets import (
    LICENSED,
    NANO,
    NUMBERED_APART,
    PUBLIC,
    SMALL,
    check_names,
    folders_of,
    split_of,
)
from st_aggretriever.evaluation.bm25 import evaluate_bm25
from st_aggretriever.evaluation.download import fetch
from st_aggretriever.evaluation.metrics import mean_figures
from st_aggretriever.versions import versions

SUMMARY = "summary.json"


def evaluate_sets(
    model: Any,
    names: Sequence[str],
    output: str | Path,
    *,
    data: str | Path = "beir-data",
    top_k: int = 1000,
    batch_size: int = 32,
    block_size: int = 50_000,
    backend: str = "auto",
    runs: str | Path | None = None,
    model_name: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Evaluate a model on sets of BEIR, or of NanoBEIR, by their names.

    Each set's figures are written to ``output`` as soon as they are there; called again, the same evaluation goes on
    with the next set. CQADupStack is evaluated as its twelve forums, each by itself, and counts as their mean.

    Args:
        model: As for :func:`st_aggretriever.evaluation.beir.evaluate_beir`; None is BM25.
        names: See :data:`st_aggretriever.evaluation.beir_sets.SUBSETS`.
        output: Folder for ``NAME.json`` of each set and ``summary.json``.
        data: Folder that holds the sets or gets them, see :func:`st_aggretriever.evaluation.download.fetch`. Of the
            sets that need a licence those are evaluated that lie there.
        top_k, batch_size, block_size, backend, model_name: As for ``evaluate_beir``.
        runs: Folder for each set's run, ``NAME.trec``.
        say: Takes what is to be printed meanwhile.

    Returns:
        ``sets`` (name -> metric -> value), ``means`` (what -> metric -> value), ``left_out``, ``rules``; what
        ``summary.json`` holds.

    Raises:
        ValueError: Unknown names, BEIR beside NanoBEIR, or ``output`` holds figures of another model or setting.
        FileExistsError: ``runs`` holds the run of a set whose figures are not in ``output``.
        OSError: A set can't be downloaded; the figures of those before it stay.
    """
    names = check_names(names)
    check_numbers(top_k=top_k, batch_size=batch_size, block_size=block_size)
    output, data = Path(output), Path(data)
    for folder in (output, runs, data):
        if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(f"evaluate beir: {folder} is a file, expected a folder or a new name.")
    for folder in (output, runs):
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
    left_out = [name for name in names if name in LICENSED and not (data / name).is_dir()]
    for name in left_out:
        say(f"left out: {name}, which needs a licence: {LICENSED[name]}; then put it into {data / name}")
    wanted = [name for name in names if name not in left_out]
    if not wanted:
        raise ValueError(f"evaluate beir: none of {', '.join(names)} is there, and none can be downloaded.")
    model_name = "bm25" if model is None else model_name or "unnamed"
    hashed = model_hash(model) if model is not None else None
    setting: dict[str, Any] = {"top_k": top_k, "kind of model": "bm25" if model is None else "encoder"}
    if hashed is not None:  # a hash holds the lengths, but this sentence says more
        setting["pair of lengths"] = [length_limit(model, side) for side in ("query", "document")]
        setting["folding and windows"] = [getattr(model, name, None) for name in ("folded_to", "windows")]
    setting["model"] = hashed or model_name
    for name in wanted:  # before hours of work: nothing of another model lies there
        for part in folders_of(name):
            _check_same(output / f"{_flat(part)}.json", setting)
            run = _run_file(runs, part)
            if run is not None and run.exists() and not (output / f"{_flat(part)}.json").exists():
                raise FileExistsError(
                    f"{run} is there, but no figures for it in {output}. Name another --run, or remove it."
                )
    figures: dict[str, dict[str, float]] = {}
    rules: list[str] = []
    for name in wanted:
        rows = {}
        for path, part in zip(fetch(name, data, say=say), folders_of(name), strict=True):
            target = output / f"{_flat(part)}.json"
            run = _run_file(runs, part)
            if target.exists():
                _check_same(target, {"data": data_checksums(path, split_of(name))})
                lacking = run is not None and not run.exists()
                without = f", without its run: remove it to have {run} written" if lacking else ""
                say(f"{part}: {target} is there already{without}")
            else:
                options: dict[str, Any] = {"split": split_of(name), "top_k": top_k, "output": target, "overwrite": True}
                options["run"] = run
                options["drop_identical_ids"] = name not in NUMBERED_APART
                if model is None:
                    evaluate_bm25(path, **options)
                else:
                    options |= {"batch_size": batch_size, "block_size": block_size, "backend": backend}
                    evaluate_beir(model, path, model_name=model_name, **options)
            result = json.loads(target.read_text(encoding="utf-8"))
            rows[part] = result["figures"]
            rules = rules if rules or name in NUMBERED_APART else result["rules"]
            _say_counts(path, result["counts"], folders_of(name)[part], say)
        figures[name] = mean_figures(rows)
        metric = "nDCG@10" if "nDCG@10" in figures[name] else next(iter(figures[name]))
        say(f"{name}: {metric} {figures[name][metric]:.4f}")
    summary = {
        "benchmark": "NanoBEIR" if wanted[0] in NANO else "BEIR",
        "model": model_name,
        "model_hash": hashed,
        "folded_to": getattr(model, "folded_to", None),
        "windows": getattr(model, "windows", None),
        "sets": figures,
        "means": means(figures),
        "left_out": left_out,
        "rules": [*rules, *_rules(figures)],
        "versions": versions(),
    }
    with replacing(output / SUMMARY) as file:
        file.write(json.dumps(summary, indent=2) + "\n")
    return summary


def means(figures: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Means over the sets that belong together and are all there; MS MARCO, trained on by most, is in none.

    >>> means({"scifact": {"nDCG@10": 0.5}, "fiqa": {"nDCG@10": 0.1}, "msmarco": {"nDCG@10": 0.9}})
    {'2 sets': {'nDCG@10': 0.3}}
    """
    if all(name in NANO for name in figures):
        complete = set(NANO) <= set(figures)
        return {f"NanoBEIR, {'all ' if complete else ''}{len(figures)} sets": mean_figures(figures)} if figures else {}
    counted = [name for name in figures if name != "msmarco"]
    groups = {
        "BEIR small (the paper's five)": SMALL,
        "13 public sets, without CQADupStack": tuple(name for name in PUBLIC if name != "cqadupstack"),
        "all 14 public sets": PUBLIC,
        "all 18 sets": (*PUBLIC, *LICENSED),
    }
    found = {what: group for what, group in groups.items() if set(group) <= set(counted)}
    if len(counted) > 1 and set(counted) not in [set(group) for group in found.values()]:
        found[f"{len(counted)} sets"] = tuple(counted)
    return {what: mean_figures({name: figures[name] for name in group}) for what, group in found.items()}


def format_sets(summary: Mapping[str, Any], metrics: Sequence[str] = ("nDCG@10", "R@100")) -> Iterator[str]:
    """The figures of each set and their means as lines of a table, with the rules below."""
    yield f"{summary['model']} on {summary['benchmark']}"
    yield ""
    shown = [metric for metric in metrics if metric in next(iter(summary["sets"].values()))]
    width = max(map(len, [*summary["sets"], *summary["means"]])) + 2
    yield " " * width + "".join(f"{metric:>9}" for metric in shown)
    for name, row in (*summary["sets"].items(), *summary["means"].items()):
        yield f"{name:{width}}" + "".join(f"{row[metric]:9.4f}" for metric in shown)
    if summary["left_out"]:
        yield f"left out, a licence is needed: {', '.join(summary['left_out'])}"
    yield from ("", *(f"- {rule}" for rule in summary["rules"]))


def _rules(figures: Mapping[str, Any]) -> list[str]:
    rules = []
    if any(name in NANO for name in figures):
        rules.append("NanoBEIR: about 50 queries and some thousand documents a set; never beside BEIR's own figures")
    if "cqadupstack" in figures:
        rules.append("cqadupstack is the mean of its twelve forums, each searched by itself")
    if "msmarco" in figures:
        rules.append("msmarco (dev) is in no mean, as most retrievers are trained on it")
    rules += [
        f"{name}: its queries and documents are numbered apart, so none is dropped for its id"
        for name in figures
        if name in NUMBERED_APART
    ]
    return rules


def _say_counts(path: Path, counts: Mapping[str, int], expected: Any, say: Callable[[str], None]) -> None:
    counted = (counts["documents"], counts["queries"])
    if expected is not None and counted != expected:
        say(
            f"{path} has {counted[0]:,} documents and {counted[1]:,} judged queries, BEIR's own has {expected[0]:,} and"
            f" {expected[1]:,}: its figures can't be compared with others'"
        )


def _flat(part: str) -> str:
    return part.replace("/", "-")


def _run_file(runs: str | Path | None, part: str) -> Path | None:
    return None if runs is None else Path(runs, f"{_flat(part)}.trec")


def _check_same(path: Path, now: Mapping[str, Any]) -> None:
    """Refuse figures of another model or setting where this one's would be taken for there already."""
    if not path.exists():
        return
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        encoding = result["encoding"]
        limit = encoding.get("max_seq_length")
        there = {
            "top_k": result["search"]["top_k"],
            "kind of model": "bm25" if result["model_hash"] is None and result["model"] == "bm25" else "encoder",
            "data": result["checksums"],
            "pair of lengths": [encoding.get(f"{side}_length") or limit for side in ("query", "document")],
            "folding and windows": [encoding.get(name) for name in ("folded_to", "windows")],
            "model": result["model_hash"] or result["model"],
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no result of evaluate beir. Name another --output.") from None
    for what, value in now.items():
        if there[what] != value:
            shown = [one[:12] if isinstance(one, str) else str(one) for one in (there[what], value)]
            if what == "data":
                changed = sorted(name for name in {**there[what], **value} if there[what].get(name) != value.get(name))
                raise ValueError(
                    f"{path} holds figures of other data ({', '.join(changed)} changed since). Name another --output."
                )
            raise ValueError(
                f"{path} holds figures of another {what} ({shown[0]}, now {shown[1]}). Name another --output."
            )
