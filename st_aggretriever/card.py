"""The model card that a push writes: what the model is, how to load it, what it was trained on, how it does."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files as package_files
from pathlib import Path
from string import Template
from typing import Any

from st_aggretriever.convert import Licence
from st_aggretriever.encoding import model_hash
from st_aggretriever.readers.text import short_names

QUERY = "who sails a ship?"
DOCUMENTS = ["The crew sails it across the sea.", "Bread needs yeast."]


@dataclass(kw_only=True)
class Statement:
    """What the folder doesn't say of the model, for its card.

    Args:
        license: Identifier of the Hub's, for instance ``apache-2.0``; None takes what the folder states.
        license_name, license_link: With the identifier ``other``.
        results: JSON files written by ``evaluate``, or folders of them.
        data_licences: Name of a file or folder of training data, as the card has it -> its licence.
        base_model: Hub id of the model that training started from.
        language: Codes, for instance ``en``.

    Raises:
        ValueError: A licence that isn't an identifier.
    """

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    results: Sequence[str | Path] = ()
    data_licences: Mapping[str, str] = field(default_factory=dict)
    base_model: str | None = None
    language: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            raise ValueError(
                f"push: license must be an identifier of the Hub's, such as apache-2.0, mit, cc-by-4.0 or other, "
                f"got {self.license!r}."
            )
        if self.license == "other" and not self.license_name:
            raise ValueError("push: license 'other' needs its name: license_name, --license-name.")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"push: {path} is broken ({error}).") from None


def read_results(paths: Sequence[str | Path], model: Any) -> list[dict[str, Any]]:
    """The results of ``evaluate`` in files and folders, all of this model, also at other lengths or in fewer bits.

    Returns:
        What the files hold, each with ``as_saved``: whether the model was measured with its own settings.

    Raises:
        ValueError: A file of another kind (in a folder these are left out), a folder without any result, figures of
            another model.
    """
    results = []
    own = model_hash(model) if paths else None
    for path in map(Path, paths):
        found = [(file, _read_result(file)) for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
        kept = [(file, result) for file, result in found if _is_result(result)]
        if not kept:
            what = "holds no result of evaluate" if path.is_dir() else "is no result of evaluate"
            raise ValueError(
                f"push: {path} {what}: expected 'data', 'model_hash' and numbers as 'figures' in its JSON."
            )
        for file, result in kept:
            as_saved = result["model_hash"] == own
            if not as_saved and result["model_hash"] != _hash_as_measured(model, result.get("encoding") or {}):
                raise ValueError(
                    f"push: {file} holds the figures of another model ({result.get('model')}, "
                    f"{str(result['model_hash'])[:12]}), not of this one ({str(own)[:12]}). Evaluate this folder."
                )
            results.append(result | {"as_saved": as_saved})
    return results


def _read_result(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(
            f"push: {file} is no JSON: expected what evaluate --output has written, not its run."
        ) from None


def _is_result(value: Any) -> bool:
    """Whether it has what a card uses: not so a summary, what MTEB's figures stand in, or another program's file."""
    if not isinstance(value, dict) or "model_hash" not in value or not isinstance(value.get("data"), str):
        return False
    figures, encoding, rules = value.get("figures"), value.get("encoding") or {}, value.get("rules") or []
    return (
        isinstance(figures, dict)
        and all(isinstance(figure, int | float) and not isinstance(figure, bool) for figure in figures.values())
        and isinstance(encoding, dict)
        and isinstance(encoding.get("windows") or {}, dict)
        and isinstance(rules, list)
        and all(isinstance(rule, str) for rule in rules)
    )


def _hash_as_measured(model: Any, encoding: Mapping[str, Any]) -> str | None:
    """The hash that the model has with the lengths and bits which an evaluation was asked for."""
    changed = [(model[0], name, encoding.get(name)) for name in ("query_length", "document_length")]
    changed += [(module, "quantize", encoding.get("quantize") or "none") for module in model]
    before = [(module, name, getattr(module, name)) for module, name, _ in changed if hasattr(module, name)]
    try:
        for module, name, value in changed:
            if hasattr(module, name):
                setattr(module, name, value)
        return model_hash(model)
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def model_card(
    folder: Path,
    repo_id: str,
    tag: str,
    *,
    statement: Statement,
    licence: Licence,
    report: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    model: Any,
) -> str:
    """The model card: metadata in YAML, then the filled template."""
    from huggingface_hub import ModelCardData

    record = read_json(folder / "train.json") if (folder / "train.json").is_file() else None
    name = repo_id.rpartition("/")[2]
    base = statement.base_model or _hub_id(report["converted_from"])
    fields: dict[str, Any] = dict(licence.fields)
    metadata = ModelCardData(
        **fields,
        language=list(statement.language) or None,
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "aggretriever", "dense-retrieval"],
        base_model=base,
        model_name=name if results else None,
        eval_results=_eval_results(results) or None,
    )
    explanation = _explanation(model)
    template = Template((package_files("st_aggretriever") / "assets" / "model_card.md").read_text(encoding="utf-8"))
    body = template.substitute(
        title=name,
        repo_id=repo_id,
        revision=tag,
        dimension=report["vector"]["dimension"],
        parts=_parts(report),
        code_sha256=report["code"]["sha256"],
        vector=f"\n{_vector(report)}\n",
        training=_training(record, statement, base, report["converted_from"]),
        evaluation=_evaluation(results),
        explanation=f"\n## Why a document is found\n\n{explanation}\n" if explanation else "",
        licence=f"{licence}{' (see ' + ', '.join(path.name for path in licence.files) + ')' if licence.files else ''}",
    )
    return f"---\n{metadata.to_yaml()}\n---\n{body}"


def _hub_id(name: Any) -> str | None:
    return (
        name if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() else None
    )


def _parts(report: Mapping[str, Any]) -> str:
    parts = [f"{width} of the {name.removesuffix('_embedding').replace('cls', '[CLS]')} part"
             for name, width in report["vector"]["parts"].items()]  # fmt: skip
    return f"They are {' and '.join(parts)}."


def _vector(report: Mapping[str, Any]) -> str:
    lengths, prompts = report["lengths"], report["prompts"]
    said = ", ".join(f"{name} {text!r}" for name, text in prompts.items()) or "none"
    lines = [f"Queries are cut at {lengths['query']} tokens, documents at {lengths['document']}. Prompts: {said}."]
    slices = report["slices"]
    if slices and slices["slicing"] == "strided" and slices["aggregation"] in ("signed", "positive"):
        half = slices["lexical_dim"] // 2
        if slices["lexical_dim"] % 2 == 0 and half:
            lines.append(
                "Smaller vectors without encoding again: "
                f"`st_aggretriever.fold_embeddings(vectors, {half}, model=model)`."
            )
    return " ".join(lines)


def _training(record: Any, statement: Statement, base: str | None, source: Any) -> str:
    if not isinstance(record, dict) or "config" not in record:
        if source:
            return f"Converted from {source}, with equal vectors; its training is described there."
        return "The folder has no record of its training."
    config, resolved = record["config"], record.get("resolved", {})
    pairs = record.get("pairs") or {}
    lines = [
        f"Trained from {base or Path(str(config.get('model'))).name} on:",
        "",
        "| data | rows | licence |",
        "|---|---|---|",
    ]
    names = short_names(pairs)
    unknown = sorted(set(statement.data_licences) - set(names.values()))
    if unknown:
        known = ", ".join(names.values()) or "not recorded"
        raise ValueError(f"push: {', '.join(unknown)} is none of the training data; these are {known}.")
    for path, rows in pairs.items():
        licence = statement.data_licences.get(names[path], "not stated")
        lines.append(f"| {names[path]} | {rows:,} | {licence} |")
    settings = {key: value for key, value in {**config, **resolved}.items()
                if isinstance(value, str | int | float) and not isinstance(value, bool)
                and key not in ("model", "output", "device") and not os.path.isabs(str(value))}  # fmt: skip
    lines += ["", "Settings: " + ", ".join(f"{key} {value}" for key, value in settings.items()) + "."]
    versions = record.get("versions") or {}
    if versions:
        lines += ["", "Versions: " + ", ".join(f"{key} {value}" for key, value in versions.items()) + "."]
    lines += ["", "All settings and the losses are in `train.json`."]
    return "\n".join(lines)


def _evaluation(results: Sequence[Mapping[str, Any]]) -> str:
    if not results:
        return "Not evaluated here."
    metrics = list(dict.fromkeys(metric for result in results for metric in result["figures"]))
    lines = [f"| | {' | '.join(metrics)} |", "|---" * (len(metrics) + 1) + "|"]
    for result in results:
        values = [result["figures"].get(metric) for metric in metrics]
        shown = " | ".join("" if value is None else f"{value:.4f}" for value in values)
        lines.append(f"| {_result_name(result)} | {shown} |")
    rules = dict.fromkeys(rule for result in results for rule in result.get("rules") or [])
    lines += ["", *(f"- {rule}" for rule in rules)]
    return "\n".join(lines)


def _result_name(result: Mapping[str, Any]) -> str:
    encoding = result.get("encoding") or {}
    windows = encoding.get("windows")  # documents are then read whole
    cut = None if windows else encoding.get("document_length")
    sides = (("queries", encoding.get("query_length")), ("documents", cut))
    lengths = " and ".join(f"{side} of {length}" for side, length in sides if length)
    parts = [
        Path(result["data"]).name,
        result.get("split"),
        lengths and f"{lengths} tokens",
        encoding.get("folded_to") and f"folded to {encoding['folded_to']}",
        windows and f"documents in windows of {windows.get('window')}",
        encoding.get("quantize") and f"vocabulary product in {encoding['quantize']}",
    ]
    return ", ".join(str(part) for part in parts if part)


def _eval_results(results: Sequence[Mapping[str, Any]]) -> list[Any]:
    """For the Hub's own table; of a collection that was measured in several ways only the plain one."""
    from huggingface_hub import EvalResult

    plain = [result for result in results if result["as_saved"]
             and not any((result.get("encoding") or {}).get(name) for name in ("folded_to", "windows"))]  # fmt: skip
    return [
        EvalResult(
            task_type="information-retrieval",
            task_name="Information Retrieval",
            dataset_type=f"{result.get('benchmark', 'beir')}/{Path(result['data']).name}",
            dataset_name=Path(result["data"]).name,
            dataset_split=result.get("split"),
            metric_type=re.sub(r"\W+", "_", metric).lower(),
            metric_name=metric,
            metric_value=round(float(value), 5),
        )
        for result in plain
        for metric, value in result["figures"].items()
    ]


def _explanation(model: Any) -> str | None:
    """A score taken apart into terms, None for a model that has none."""
    from st_aggretriever.explain import explain_scores
    from st_aggretriever.explain.table import format_scores

    try:
        explained = explain_scores(model, QUERY, DOCUMENTS[:1])
    except ValueError:
        return None  # no lexical part, or one that isn't made of slices
    lines = format_scores(explained, ["document"], terms=5)
    return "\n".join(
        ["```", *lines, "```", "", "By `st_aggretriever.explain`; `st-aggretriever explain` does it for yours."]
    )
