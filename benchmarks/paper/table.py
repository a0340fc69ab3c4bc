"""From rows to a table: figures of every seed, means, findings, and the command line that all scripts share."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import estimate
import numpy as np
import report
from arms import Model, Table, distinct
from fit import DEV_METRIC
from judge import FINDINGS, contrast, findings_of, judge
from published import TITLE
from runner import WAIT, Runner
from scales import IN_DOMAIN, NOISE, SCALES, Scale
from transformers.utils import logging as transformers_logging

from st_aggretriever.readers.text import checksum
from st_aggretriever.versions import versions

HERE = Path(__file__).parent
MEAN = "mean"
Make = Callable[[Scale], Table]
More = Callable[[Runner, Table], list[dict[str, Any]]]  # further grids of a table


def main(make: Make, more: More | None = None, argv: list[str] | None = None) -> dict[str, Any] | None:
    """Run the script of one table."""
    args = parse(argv)
    scale = SCALES[args.scale]
    table = make(scale)
    if args.dry_run:
        print("\n".join(estimate.dry_run(scale, [table], args.results)))
        return None
    try:
        runner = Runner(scale, args.data, args.models, args.work, args.results)
        if args.measure:
            estimate.measure(runner, table, args.results)
            return None
        print("\n".join(estimate.dry_run(scale, [table], args.results, details=False)), flush=True)
        print("This is all of it; what is kept or shared with another table is not done again.", flush=True)
        result = fill(runner, table, more)
        with closing(runner.alone("refresh", wait=True)):
            refresh(scale, args.results, result)
    except (ValueError, OSError, ImportError) as error:
        print(f"{table.name}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on from {args.results} and {args.work}", file=sys.stderr)
        raise SystemExit(130) from None
    print((args.results / f"{table.name}-{scale.name}.md").read_text(encoding="utf-8"))
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One of the paper's tables; see benchmarks/paper/README.md.")
    parser.add_argument("--scale", choices=list(SCALES), default="smoke", help="(default: %(default)s)")
    parser.add_argument(
        "--dry-run", action="store_true", help="list trainings and evaluations with their estimated cost"
    )
    parser.add_argument("--measure", action="store_true", help="time a step and an encoding of each model, for that")
    parser.add_argument("--data", type=Path, help="folder of test collections in BEIR's layout and of pairs/")
    parser.add_argument("--models", type=Path, help="folder of backbones")
    parser.add_argument("--work", type=Path, help="models and vectors (default: runs/paper/SCALE)")
    parser.add_argument("--results", type=Path, help="figures (default: results beside the script; smoke: in --work)")
    args = parser.parse_args(argv)
    args.work = args.work or Path("runs/paper") / args.scale
    if args.results is None:
        args.results = args.work / "results" if args.scale == "smoke" else HERE / "results"
    args.results.mkdir(parents=True, exist_ok=True)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # a bar for each model that is loaded or saved
    return args


def fill(runner: Runner, table: Table, more: More | None = None) -> dict[str, Any]:
    """Make all figures of a table."""
    names = [name for name in table.collections if name in runner.collections]
    found = _figures(runner, table, names)
    grids = [] if not table.rows else [_grid(runner, table, found, names)]
    grids += [] if more is None else more(runner, table)
    grids += _published(table)
    notes = [*table.notes, *(f"{row.name}: {row.note}" for row in table.rows if row.note)]
    notes += [*_fusion_notes(runner, table), *_sparsity_notes(runner, table), *_training_notes(runner, table)]
    notes += [] if table.published else ["The paper's figures of this table are not known here."]
    status = {"smoke": "random weights, means nothing", "mini": "measured in miniature", "full": "full size"}
    return {
        "table": table.name,
        "scale": runner.scale.name,
        "title": table.title,
        "status": status[runner.scale.name],
        "seeds": list(table.seeds),
        "grids": grids,
        "findings": _findings(runner, table, found),
        "training": _curves(runner, table),
        "notes": notes,
        "versions": versions(),
    }


def _figures(runner: Runner, table: Table, names: list[str]) -> dict[str, list[Any]]:
    """Row -> the figures of each seed.

    Seed by seed, so that an interruption leaves whole comparisons; a model's rows share its encoding. What another
    process is making is left to it, and taken when that is done.
    """
    rows = sorted(table.rows, key=lambda row: row.fused)
    found: dict[tuple[str, int], Any] = {}
    left = [(row, seed) for seed in table.seeds for row in rows if row.model.recipe != "bm25" or seed == table.seeds[0]]
    total = len(left)
    while left:
        busy = []
        for row, seed in left:
            before = dict(runner.done)
            try:
                found[row.name, seed] = runner.figures(row, seed, names)
            except BlockingIOError:
                busy.append((row, seed))
                continue
            if runner.done != before:
                runner.say(f"{table.name}: {len(found)} of {total} rows and seeds, last {row.name}, seed {seed}")
        if len(busy) == len(left):
            time.sleep(WAIT)
        left = busy
    return {row.name: [found[row.name, seed] for seed in table.seeds if (row.name, seed) in found] for row in rows}


def _grid(runner: Runner, table: Table, found: dict[str, list[Any]], names: list[str]) -> dict[str, Any]:
    columns = [
        (name, metric, f"{name} {metric}")
        for name in names
        for metric in runner.collections[name].metrics
        if found[table.rows[0].name][0].get(name)
    ]
    zero_shot = [name for name in runner.scale.names("zero-shot") if name in names]
    rows = []
    for row in table.rows:
        seeds = found[row.name]
        cells = {
            label: summary([statistics.fmean(figures[name][metric]) for figures in seeds])
            for name, metric, label in columns
        }
        if len(zero_shot) > 1:
            means = [statistics.fmean(statistics.fmean(f[name]["nDCG@10"]) for name in zero_shot) for f in seeds]
            cells[MEAN] = summary(means)
        entry: dict[str, Any] = {"name": row.name, "cells": cells}
        series, _, width = row.name.rpartition(", ")
        if width.isdigit():
            entry |= {"series": series, "width": int(width)}
        rows.append(entry)
    labels = [label for _, _, label in columns] + ([MEAN] if len(zero_shot) > 1 else [])
    title = f"{MEAN}: nDCG@10 over {', '.join(zero_shot)}." if len(zero_shot) > 1 else ""
    plots = {MEAN: f"{table.title}; nDCG@10, mean of {', '.join(zero_shot)}"} if MEAN in labels else {}
    trained_on = next((label for name, _, label in columns if name == IN_DOMAIN), None)
    plots |= {trained_on: f"{table.title}; {trained_on}"} if trained_on else {}
    return {"title": title, "columns": labels, "rows": rows, "plots": plots or {labels[-1]: table.title}}


def _published(table: Table) -> list[dict[str, Any]]:
    columns = list(dict.fromkeys(column for row in table.published.values() for column in row))
    rows = [
        {"name": name, "cells": {column: {"mean": value, "sd": None, "n": 1} for column, value in row.items()}}
        for name, row in table.published.items()
    ]
    return [{"title": TITLE, "columns": columns, "rows": rows}] if rows else []


def summary(values: list[float]) -> dict[str, Any]:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": deviation, "n": len(values), "values": values}


def _findings(runner: Runner, table: Table, found: dict[str, list[Any]]) -> list[dict[str, Any]]:
    scale = runner.scale
    # Further training goes on from the plain model of the same seed: their seeds are drawn together.
    groups = {row.name: json.dumps(runner.identity(row.model.start), sort_keys=True) for row in table.rows}
    results = []
    for finding in findings_of(scale, table.name):
        if not finding["rows"].keys() <= groups.keys():
            if scale.name == "smoke":
                continue  # It has other sources and fractions.
            raise ValueError(f"findings.json: {finding['id']} names rows that the table {table.name} lacks.")
        names = [name for name in scale.names(finding["collections"]) if name in runner.collections]
        figures = {
            row: {name: np.array([seed[name][finding["metric"]] for seed in found[row]], dtype=float) for name in names}
            for row in finding["rows"]
        }
        results.append({**finding, **contrast(finding, figures, groups, resamples=scale.resamples)})
    return results


def refresh(scale: Scale, results: Path, new: dict[str, Any] | None = None) -> None:
    """Write a new table, and give every finding its verdict, by Holm's correction over the family, in all tables."""
    tables = {
        path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(f"*-{scale.name}.json"))
    }
    found = {table["table"]: table for table in tables.values() if "findings" in table}
    if new is not None:
        found[new["table"]] = new
    judged = {finding["id"]: finding for table in found.values() for finding in table["findings"]}
    verdicts = judge(judged, [finding["id"] for finding in findings_of(scale)])
    for table in found.values():
        for finding in table["findings"]:
            finding |= verdicts[finding["id"]]
        report.write(table, results)
    report.write_summary(scale.name, findings_of(scale), judged, results)


def _names(table: Table) -> dict[Model, str]:
    """What a model is called: by the first row that shows its whole vectors, else by its first."""
    whole = [row for row in table.rows if row.view == "all"]
    return {row.model: row.name for row in reversed([*whole, *table.rows])}


def _curves(runner: Runner, table: Table) -> list[dict[str, Any]]:
    """Of each trained model and seed what its training was: rate, factor, steps, dev curve."""
    kept = []
    names_of = _names(table)
    for model in distinct([row.model for row in table.rows if row.model.trained]):
        for seed in table.seeds:
            record = runner.record(model, seed).get("training", {})
            names = ("rate", "factor", "steps", "best_step", "seconds", "flat", "dev_curve")
            kept.append({"model": model.kind, "source": model.source, "fraction": model.fraction, "seed": seed})
            kept[-1] |= {"row": names_of.get(model, model.kind), "further": model.further, "longer": model.longer}
            kept[-1] |= {name: record.get(name) for name in names}
    return kept


def _fusion_notes(runner: Runner, table: Table) -> list[str]:
    """The weights of fused rows, seed by seed."""
    said = []
    for row in (row for row in table.rows if row.fused):
        weights = [runner.record(row.model, seed).get("weights", {}).get(row.view) for seed in table.seeds]
        said.append(f"{row.name} {', '.join(f'{weight:g}' for weight in weights if weight is not None)}")
    title = "Weight of the dense ranking beside BM25's, tuned seed by seed on the dev split, which is in domain"
    return [f"{title}: {'; '.join(said)}."] if said else []


def _sparsity_notes(runner: Runner, table: Table) -> list[str]:
    """How many numbers of a document's vector are not zero, of models as wide as the vocabulary that leave some out."""
    notes = []
    for row in table.rows:
        if row.model.recipe == "aggretriever" and row.model.has_head:
            continue  # a softmax gives every term some weight
        counts = [
            count
            for seed in table.seeds
            for name, count in runner.record(row.model, seed).get("non_zeros", {}).items()
            if name in table.collections
        ]
        if row.model.is_wide and counts:
            notes.append(f"{row.name}: {statistics.fmean(counts):,.0f} non-zero weights a document, the mean of all.")
    return notes


def _grouped(title: str, runs: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """A note: which runs have which value in common; none where there are no runs."""
    groups: dict[str, dict[str, None]] = {}
    for value, run in runs:
        groups.setdefault(value, {})[run["row"]] = None
    said = ". ".join(f"{value}: {'; '.join(rows)}" for value, rows in groups.items())
    return [f"{title}. {said}."] if groups else []


def _plain(table: Table) -> list[Model]:
    """The trained models that have a sweep of their own."""
    return [model for model in distinct([row.model for row in table.rows if row.model.trained]) if model == model.start]


def _sweep_notes(runner: Runner, table: Table) -> list[str]:
    """The dev figures of the sweep's whole runs, between which the learning rate was chosen."""
    names_of = _names(table)
    said = []
    for model in _plain(table):
        tried = runner.choose(model)["tried"][-len(runner.scale.rates) :]
        best = (f"{max(figure for _, figure in run['dev_curve']):.3f}".lstrip("0") for run in tried)
        said.append(f"{names_of.get(model, model.kind)} {', '.join(best)}")
    rates = ", ".join(f"{rate:g}" for rate in runner.scale.rates)
    if not said:
        return []
    return [
        f"{DEV_METRIC} on the dev split of whole runs at the learning rates {rates}, seed 0 (the first one stays where "
        f"no other is better by {NOISE:g}): {'; '.join(said)}."
    ]


def _hours(runner: Runner, table: Table) -> list[str]:
    """How long sweeps and trainings of a table took, whatever table they were made for."""
    swept = len(runner.scale.rates) * len(runner.scale.factors) > 1
    seconds = 0.0
    for model in distinct([row.model for row in table.rows if row.model.trained]):
        own = swept and model.longer == 1
        if own:
            seconds += sum(run.get("seconds") or 0 for run in runner.choose(model).get("tried", []))
        records = (runner.record(model, seed) for seed in table.seeds if not (own and seed == table.seeds[0]))
        seconds += sum(record.get("training", {}).get("seconds") or 0 for record in records)
    where = "of one core, beside another run" if runner.scale.name == "mini" else "of one process"
    return [
        f"Sweeps and trainings of these rows took {seconds / 3600:.1f} hours {where}; of a run that was interrupted "
        "what came after counts."
    ] * (seconds > 0)


def _training_notes(runner: Runner, table: Table) -> list[str]:
    curves = [run for run in _curves(runner, table) if run["steps"]]
    notes = [] if not curves or not runner.scale.caveat else [runner.scale.caveat]
    notes += _grouped("Steps of a training", ((f"{run['steps']:,}", run) for run in curves))
    if len(runner.scale.rates) * len(runner.scale.factors) > 1:
        tried = " and ".join(
            f"{name} {', '.join(f'{value:g}' for value in values)}"
            for name, values in (("learning rates", runner.scale.rates), ("loss scales", runner.scale.factors))
        )
        own = [run for run in curves if not run["further"] and run["longer"] == 1]  # the others take these settings
        chosen = ((f"{run['rate']:g} and {run['factor']:g}", run) for run in own)
        notes += _grouped(f"Chosen of the {tried} (what lies beyond the first and last wasn't tried)", chosen)
        notes += _sweep_notes(runner, table)
    judged = [run for run in curves if run["flat"] is not None]
    rising: dict[str, list[str]] = {}
    for run in judged:
        if not run["flat"]:
            rising.setdefault(run["row"], []).append(str(run["seed"]))
    if rising:
        names = "; ".join(f"{row}, seed {', '.join(seeds)}" for row, seeds in rising.items())
        notes.append(
            f"Runs whose dev figure gained {NOISE:g} or more in their last third: "
            f"{sum(map(len, rising.values()))} of the {len(judged)} that were judged more than once, {names}."
        )
    notes += _hours(runner, table)
    changed = {checksum(FINDINGS)} | {
        record.get("findings_sha256")
        for row in table.rows
        for seed in table.seeds
        if (record := runner.record(row.model, seed))
    }
    if len(changed) > 1:
        notes.append("findings.json was changed since some runs of this table were begun.")
    return notes
