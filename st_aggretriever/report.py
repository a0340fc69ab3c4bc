"""The page that a training run leaves behind: data, settings, losses, dev figures, time and memory, with curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from st_aggretriever.config import TrainConfig, default_of
from st_aggretriever.trainer import STOCK_LOGS

CURVES = "curves.png"
ROWS = 12  # of a table over the steps


def write_report(record: dict[str, Any], folder: Path) -> None:
    """Write ``report.md`` and, where matplotlib is installed, ``curves.png`` into a folder.

    Args:
        record: What ``train.json`` holds.
        folder: An existing folder.

    Raises:
        OSError: A file can't be written.
    """
    if not (record["losses"] or record["dev"]):
        curves = ["No curves: no step was logged."]
    else:
        try:
            draw_curves(record, folder / CURVES)
            curves = [f"![losses, learning rate and dev figures by step]({CURVES})"]
        except ImportError as error:  # Missing or broken: no reason to lose a model over.
            curves = [f'No curves, they need matplotlib (pip install "st-aggretriever[plot]"): {error}.']
    lines = [
        *_head(record),
        *_data(record),
        *_settings(record),
        "## Losses",
        "",
        *curves,
        "",
        *_table(record["losses"], _parts(record["losses"])),
        *_dev(record),
        *_costs(record),
    ]
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def peak_rss() -> float | None:
    """Most memory of this process so far in GB, None where the system doesn't say."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would also count what lay here before this program took over the process
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) * 1024 / 1e9, 3)
    return None


def draw_curves(record: dict[str, Any], path: Path) -> None:
    """The loss with its parts, and below it the dev figures and the learning rate, by step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    losses, dev = record["losses"], record["dev"]
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for name in ["loss", *_parts(losses)] if losses else []:
        points = [(entry["step"], entry[name]) for entry in losses if name in entry]
        above.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < ROWS else None)
    above.set_ylabel("loss")
    if losses:
        above.legend(fontsize="small")
    if dev:
        for name in _figures(dev):
            points = [(entry["step"], entry[name]) for entry in dev if name in entry]
            below.plot(*zip(*points, strict=True), label=name, marker=".")
        if record.get("best_step"):
            below.axvline(record["best_step"], color="grey", linestyle=":", label="best")
        below.set_ylabel("dev")
        below.legend(fontsize="small")
    else:
        below.plot([entry["step"] for entry in losses], [entry["learning_rate"] for entry in losses], color="grey")
        below.set_ylabel("learning rate")
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=110)


def _head(record: dict[str, Any]) -> list[str]:
    config, resolved = record["config"], record["resolved"]
    batch = f"{config['batch_size']} pairs"
    if resolved["processes"] > 1:
        batch = f"{resolved['batch_size_together']} pairs ({config['batch_size']} in each of {resolved['processes']})"
    return [
        f"# Training from {_name(config['model'])}",
        "",
        f"{record['steps']:,} of {resolved['steps']:,} steps of {batch}, {record['seconds']:,.0f} s on "
        f"{resolved['device']} ({resolved['precision']}). All settings, losses and versions are in train.json.",
        "",
    ]


def _data(record: dict[str, Any]) -> list[str]:
    rows = [
        f"| {_name(path)} | {source.get('format', '')} | {record['pairs'][path]:,} | {source['bad_rows']:,} "
        f"| {source.get('short_rows', 0):,} |"
        for path, source in record["data"].items()
    ]
    used = f"{record['resolved']['pairs']:,} pairs were trained on"
    held_out = sum(record["pairs"].values()) - record["resolved"]["pairs"]
    used += f", {held_out:,} held out as the development set." if record["config"].get("dev_share") else "."
    teacher = [f"Teacher: {_name(record['teacher']['name'])}."] if record["teacher"] else []
    return [
        "## Data",
        "",
        "| source | format | rows | left out as broken | for too few negatives |",
        "|---|---|---|---|---|",
        *rows,
        "",
        used,
        *teacher,
        "",
    ]


def _settings(record: dict[str, Any]) -> list[str]:
    """What was asked for otherwise than by default, and what the rates came to."""
    known = TrainConfig.__dataclass_fields__
    shown = {
        name: value
        for name, value in record["config"].items()
        if name not in ("model", "pairs", "output", "resume") and name in known and value != default_of(name)
    }
    shown |= {name: record["resolved"][name] for name in record["resolved"] if name.endswith("learning_rate")}
    lines = [f"| {name} | {_name(value) if isinstance(value, str) else value} |" for name, value in shown.items()]
    return ["## Settings", "", "Others are at their defaults.", "", "| setting | value |", "|---|---|", *lines, ""]


def _dev(record: dict[str, Any]) -> list[str]:
    dev = record["dev"]
    if not dev:
        return []
    names = _figures(dev)
    best = record.get("best_step")
    kept = f"The weights of step {best} were kept." if best else "The last weights were kept."
    if record["steps"] < record["resolved"]["steps"]:
        kept += f" Stopped early: {record['config']['patience']} evaluations without a better one."
    return ["## Development set", "", kept, "", *_table(dev, names)]


def _costs(record: dict[str, Any]) -> list[str]:
    memory = record["memory"]
    done = record["steps"] - record["steps_before_resuming"]
    each = f", {record['seconds'] / done:.3g} s a step with what lies between" if done > 0 else ""
    since = f" since step {record['steps_before_resuming']}" if record["steps_before_resuming"] else ""
    lines = ["## Time and memory", "", f"- {record['seconds']:,.1f} s{since}{each}"]
    if memory["rss_gb"] is not None:
        lines.append(f"- {memory['rss_gb']:.2f} GB of memory at the peak, of the first process")
    if memory["gpu_gb"] is not None:
        lines.append(f"- {memory['gpu_gb']:.2f} GB of its GPU at the peak")
    return lines


def _table(entries: list[dict[str, Any]], names: list[str]) -> list[str]:
    """The figures at some of the steps, evenly spread, the last among them."""
    if not entries:
        return ["None was logged.", ""]
    columns = ["loss", *names] if "loss" in entries[0] else names
    step = max(1, -(-len(entries) // ROWS))
    shown = entries[::-1][::step][::-1]
    rows = [
        f"| {entry['step']} | " + " | ".join(f"{entry[name]:.4f}" if name in entry else "" for name in columns) + " |"
        for entry in shown
    ]
    return [f"| step | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", *rows, ""]


def _parts(losses: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for entry in losses for name in entry if name not in STOCK_LOGS))


def _figures(dev: list[dict[str, Any]]) -> list[str]:
    """The figures to show: all, unless an evaluator has many and says which one counts."""
    names = list(dict.fromkeys(name for entry in dev for name in entry if name != "step"))
    return ["score"] if "score" in names and len(names) > ROWS else names


def _name(path: str) -> str:
    """The last part of a path on this machine, a Hub id as it is."""
    return Path(path).name if Path(path).is_absolute() or Path(path).exists() else path
