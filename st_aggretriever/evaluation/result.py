"""What an evaluation says: figures with where they come from, written beside the run, and printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from st_aggretriever.atomic import replacing
from st_aggretriever.evaluation.runs import run_lines
from st_aggretriever.versions import versions


def make_result(
    how: Mapping[str, Any],
    *,
    benchmark: str,
    data: str | Path,
    split: str,
    checksums: Mapping[str, str],
    figures: Mapping[str, float],
    counts: Mapping[str, int],
    rules: Sequence[str],
    top_k: int,
    without_overlap: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Figures with all that they depend on, for JSON.

    Args:
        how: How the hits came about: ``model``, ``rules``, ``encoding``, ``search`` and ``seconds``, and of a model
            ``model_hash`` and ``truncated`` (side -> count).
        checksums: Of the data's files, by their names.
        rules: Those of the figures, which stand after those of the hits.
        without_overlap: Figures without the queries that training data touch, where they were asked for.
    """
    truncated = how.get("truncated", {})
    return {
        "benchmark": benchmark,
        "data": str(data),
        "split": split,
        "checksums": dict(checksums),
        "model": how["model"],
        "model_hash": how.get("model_hash"),
        "figures": dict(figures),
        **({} if without_overlap is None else {"without_overlap": without_overlap}),
        "counts": {
            **counts,
            "truncated_queries": truncated.get("query"),
            "truncated_documents": truncated.get("document"),
        },
        "rules": [*how["rules"], *rules],
        "encoding": how["encoding"],
        "search": how["search"] | {"top_k": top_k},
        "seconds": how["seconds"],
        "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write_result(
    result: Mapping[str, Any],
    rankings: Mapping[str, Mapping[str, float]],
    run: str | Path | None,
    output: str | Path | None,
    run_format: str = "trec",
) -> None:
    """Write run and result where asked; both are whole before either has its name.

    Raises:
        OSError: One can't be written.
        ValueError: An id that a run can't hold.
    """
    with ExitStack() as both:  # the figures are named first: a run alone is taken for another evaluation's
        if run is not None:
            file = both.enter_context(replacing(run))
            file.writelines(run_lines(rankings, run_format))
            file.flush()
        if output is not None:
            both.enter_context(replacing(output)).write(json.dumps(result, indent=2) + "\n")


def format_result(result: Mapping[str, Any]) -> str:
    """The figures as a small table, with the counts and the rules below."""
    figures, counts = result["figures"], result["counts"]
    lines = [
        f"{result['model']} on {result['data']}, {result['split']}",
        "",
        "  ".join(f"{metric:>7}" for metric in figures),
        "  ".join(f"{value:7.4f}" for value in figures.values()),
        *_overlap_lines(result),
        "",
        ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in counts.items() if count is not None),
        *(f"- {rule}" for rule in result["rules"]),
    ]
    return "\n".join(lines)


def _overlap_lines(result: Mapping[str, Any]) -> list[str]:
    found = result.get("without_overlap")
    if found is None:
        return []
    what = f"without the {found['excluded']} queries that {found['file']} calls affected: {found['queries']} left"
    return ["  ".join(f"{value:7.4f}" for value in found["figures"].values()) + f"  {what}"]
