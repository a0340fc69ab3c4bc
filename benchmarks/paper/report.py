"""A table's JSON as Markdown and as a picture; every number of the two is the JSON's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from judge import VARIANTS

from st_aggretriever.atomic import replacing
from st_aggretriever.evaluation.compare import import_matplotlib


def write(result: dict[str, Any], results: Path) -> None:
    """``TABLE-SCALE.json``, ``.md`` and, where there is something to draw, ``.png``."""
    stem = f"{result['table']}-{result['scale']}"
    with replacing(results / f"{stem}.json") as file:
        file.write(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    with replacing(results / f"{stem}.md") as file:
        file.write(markdown(result))
    draw(result, results / f"{stem}.png")


def markdown(result: dict[str, Any]) -> str:
    return "\n".join(_lines(result)) + "\n"


def cell(figure: dict[str, Any] | None) -> str:
    """``.123 +- .004``: mean and standard deviation over seeds."""
    if figure is None:
        return ""
    if figure["n"] < 2:
        return _short(figure["mean"])
    return f"{_short(figure['mean'])} +- {_short(figure['sd'])}"


def _short(value: float | None) -> str:
    if value is None:
        return ""
    text = f"{value:.3f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"# {result['title']}"
    yield ""
    seeds = result["seeds"]
    over = f"; mean +- standard deviation over seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else ""
    yield f"Scale {result['scale']}, {result['status']}{over}."
    for grid in result["grids"]:
        columns = grid["columns"]
        yield ""
        if grid["title"]:
            yield f"{grid['title']}"
            yield ""
        yield "| | " + " | ".join(columns) + " |"
        yield "|---" * (1 + len(columns)) + "|"
        for row in grid["rows"]:
            yield f"| {row['name']} | " + " | ".join(cell(row["cells"].get(column)) for column in columns) + " |"
    if result["findings"]:
        yield ""
        yield "| finding | difference | 95 % interval | p | p, Holm | |"
        yield "|---|---|---|---|---|---|"
        for finding in result["findings"]:
            low, high = finding["interval"]
            yield (
                f"| {finding['claim']} ({finding['source']}) | {finding['difference']:+.4f} "
                f"| {low:+.4f} to {high:+.4f} | {finding['p']:.2g} | {finding['p_holm']:.2g} | {finding['verdict']} |"
            )
    yield ""
    for note in result["notes"]:
        yield f"- {note}"


def write_summary(scale: str, family: list[dict[str, Any]], judged: dict[str, dict[str, Any]], results: Path) -> None:
    """``FINDINGS-SCALE.md``: every finding that was written down, with its verdict or that it is open."""
    lines = [
        f"# Findings, scale {scale}",
        "",
        "Differences and intervals are without a claim's margin, intervals and p without Holm's correction; the verdict"
        " is by margin and corrected p. While findings are open, what is *not resolved* can still be resolved, and no"
        " other verdict changes.",
        "",
        "| table | finding | | difference | 95 % interval | margin | p | p, Holm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for finding in family:
        result = judged.get(finding["id"])
        line = f"| {finding['table']} | {finding['claim']} ({finding['source']}) "
        if result is None:
            lines.append(f"{line}| open: not run yet | | | | | |")
            continue
        low, high = result["interval"]
        margin = f"{result['margin']:g}" if result["margin"] else ""
        lines.append(
            f"{line}| {result['verdict']} | {result['difference']:+.4f} | {low:+.4f} to {high:+.4f} | {margin} "
            f"| {result['p']:.2g} | {result['p_holm']:.2g} |"
        )
    lines += ["", "By variants of the test, which decide nothing:", ""]
    lines += [f"- *{name}*: {said}." for name, said in VARIANTS.items()]
    lines += ["", "| table | finding | " + " | ".join(f"{name}: p | p, Holm | " for name in VARIANTS) + " |"]
    lines += ["|---|---" + "|---|---|---" * len(VARIANTS) + "|"]
    for finding in family:
        if finding["id"] in judged:
            result = judged[finding["id"]]
            cells = [
                f"{result['p_variants'][name]:.2g} | {found['p_holm']:.2g} | {found['verdict']}"
                for name, found in result["variants"].items()
            ]
            lines.append(f"| {finding['table']} | {finding['claim']} ({finding['source']}) | {' | '.join(cells)} |")
    with replacing(results / f"FINDINGS-{scale}.md") as file:
        file.write("\n".join(lines) + "\n")


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars with standard deviations over seeds, or lines where the grid has a width for each row; a panel for each of a
    grid's ``plots``, column -> title."""
    pyplot = import_matplotlib()
    plots = [(grid, *plot) for grid in result["grids"] for plot in grid.get("plots", {}).items()]
    if not plots:
        return
    figure, axes = pyplot.subplots(len(plots), figsize=(9, 4 * len(plots)), squeeze=False)
    for axis, (grid, column, title) in zip(axes[:, 0], plots, strict=True):
        rows = [row for row in grid["rows"] if row["cells"].get(column)]
        if any("width" in row for row in rows):
            _curves(axis, rows, column)
        else:
            means = [row["cells"][column]["mean"] for row in rows]
            axis.barh(range(len(rows)), means, xerr=[row["cells"][column]["sd"] or 0 for row in rows], height=0.7)
            axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
            axis.invert_yaxis()
            axis.set_xlabel(column, fontsize=8)
        axis.set_title(f"{title} ({result['scale']})", fontsize=9)
    figure.tight_layout()
    with replacing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)


def _curves(axis: Any, rows: list[dict[str, Any]], column: str) -> None:
    series: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        figure = row["cells"][column]
        if "width" in row:
            series.setdefault(row["series"], []).append((row["width"], figure["mean"], figure["sd"] or 0.0))
    for name, points in series.items():
        widths, means, deviations = zip(*sorted(points), strict=True)
        axis.errorbar(widths, means, yerr=deviations, marker="o", label=name, capsize=3)
    axis.set_xscale("log", base=2)
    ticks = sorted({width for points in series.values() for width, _, _ in points})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlabel("dimensions", fontsize=8)
    axis.set_ylabel(column, fontsize=8)
    axis.legend(fontsize=7)
