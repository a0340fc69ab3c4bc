"""What a saved model is, and whether it holds together: the report behind ``st-aggretriever inspect``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import load_file_path

from st_aggretriever import modules as _modules
from st_aggretriever.convert import convert_into_cache, licence_of, local_folder, published_layout
from st_aggretriever.model import is_aggretriever, load_aggretriever

SAMPLE = "what is dense retrieval?"
LONGER = "Dense retrieval compares vectors of texts, so a query finds a document that shares no word with it. " * 3
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-5}  # of a vector alone and in a padded batch; else 2e-2
LEAST_COSINE = 0.99  # between the lexical parts by a quantised head and by the head as it is


def inspect_model(path_or_hub_id: str | Path, **where: Any) -> dict[str, Any]:
    """Load a model and report what it is; a published checkpoint is converted first, as for use.

    Args:
        path_or_hub_id: A folder or Hub id.
        **where: ``token``, ``cache_folder``, ``revision``, ``local_files_only``, as for :func:`load_aggretriever`.

    Returns:
        Plain values, ready for JSON. ``checks`` is a list of ``{"name", "passed", "found"}``; ``code`` says what copy
        of this package's modules the model carries and how it stands to the installed one.

    Raises:
        OSError: There is no such folder or model.
        ValueError: It is no Aggretriever, or a weight is missing.
    """
    layout = published_layout(path_or_hub_id, **where)
    source: str | Path = path_or_hub_id
    if layout is not None:
        source = convert_into_cache(path_or_hub_id, **where) or path_or_hub_id
        where = {}
    model = load_aggretriever(source, device="cpu", **where)
    if not is_aggretriever(source, **where):
        raise ValueError(f"inspect: {str(source)!r} is a SentenceTransformer, but no Aggretriever.")
    modules_file = load_file_path(str(source), "modules.json", **where)
    folder = Path(str(modules_file)).parent
    encoder: Any = model[0]
    config = encoder.model.config
    modules = {type(module).__name__: module for module in model}
    return {
        "path": str(path_or_hub_id),
        "layout": f"{layout}, converted into {folder}" if layout else "st_aggretriever",
        "backbone": _backbone(encoder),
        "head": _head(encoder),
        "vector": {
            "dimension": model.get_embedding_dimension(),
            "parts": dict(zip(model[-1].keys, model[-1].dims, strict=True)),  # type: ignore[arg-type]
            "similarity": str(model.similarity_fn_name),
            "truncate_dim": model.truncate_dim,
        },
        "pooling": _pooling(modules),
        "slices": _slices(modules),
        "lengths": {"query": encoder.query_length, "document": encoder.document_length, "text": encoder.max_seq_length},
        "prompts": {name: prompt for name, prompt in model.prompts.items() if prompt},
        "default_prompt_name": model.default_prompt_name,
        "converted_from": getattr(config, "converted_from", None),
        "mlm_head_from": getattr(config, "mlm_head_from", None),
        "licence": str(licence_of(local_folder(path_or_hub_id, **where) if layout else folder)),
        "bytes_on_disk": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "code": _code(folder),
        "checks": [{"name": name, "passed": passed, "found": found} for name, passed, found in _checks(model, folder)],
    }


def format_report(report: Mapping[str, Any]) -> str:
    """The report for people."""
    backbone, head, vector = report["backbone"], report["head"], report["vector"]
    pooling, slices = report["pooling"], report["slices"]
    parts = " + ".join(f"{name.removesuffix('_embedding')} {dim:,}" for name, dim in vector["parts"].items())
    cut = f", cut to {vector['truncate_dim']}" if vector["truncate_dim"] else ""
    rows = [
        ("layout", report["layout"]),
        (
            "backbone",
            f"{backbone['model_type']} ({backbone['architecture']}), {backbone['layers']} layers, H {backbone['H']:,}, "
            f"{backbone['parameters'] / 1e6:,.1f} M parameters, {backbone['dtype']}",
        ),
        (
            "MLM head",
            f"decoder {head['V']:,} x {head['E']:,}, {'tied' if head['tied'] else 'untied'}" if head else "none",
        ),
        ("vector", f"{vector['dimension']:,} = {parts}{cut}; {vector['similarity']}"),
        ("pooling", _list(pooling)),
        ("slices", _list(slices) if slices else None),
        ("lengths", _list(report["lengths"])),
        ("prompts", ", ".join(f"{name} {text!r}" for name, text in report["prompts"].items()) or "none"),
        ("converted from", report["converted_from"]),
        ("MLM head from", report["mlm_head_from"]),
        ("licence", report["licence"]),
        ("size on disk", f"{report['bytes_on_disk'] / 1e6:,.1f} MB"),
        ("own code", _code_sentence(report["code"])),
    ]
    rows += [
        ("check", f"{check['name']}: {'passed' if check['passed'] else 'FAILED'}, {check['found']}")
        for check in report["checks"]
    ]
    return "\n".join([report["path"], *(f"  {name:15} {text}" for name, text in rows if text)])


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def failed_checks(report: Mapping[str, Any]) -> list[str]:
    return [f"{check['name']} ({check['found']})" for check in report["checks"] if not check["passed"]]


def _backbone(encoder: Any) -> dict[str, Any]:
    model = encoder.model
    embeddings = model.get_input_embeddings()
    return {
        "model_type": model.config.model_type,
        "architecture": type(model).__name__,
        "layers": getattr(model.config, "num_hidden_layers", None),
        "H": encoder.get_embedding_dimension(),
        "vocabulary": embeddings.weight.shape[0],
        "tokenizer_entries": len(encoder.tokenizer),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(embeddings.weight.dtype).removeprefix("torch."),
    }


def _head(encoder: Any) -> dict[str, Any] | None:
    if not encoder.head:
        return None
    decoder = encoder.model.get_output_embeddings()
    return {
        "V": decoder.weight.shape[0],
        "E": decoder.weight.shape[1],
        "tied": decoder.weight is encoder.model.get_input_embeddings().weight,
    }


def _pooling(modules: Mapping[str, Any]) -> dict[str, Any]:
    """How token states become one vector: the kind by its name in ``build_aggretriever``, and its options."""
    kinds = {"MLMLexicalPooling": "mlm", "TokenLexicalPooling": "tokens", "MeanProjection": "mean"}
    name = next((name for name in kinds if name in modules), "CLSProjection")
    kind = kinds.get(name, "cls") + ("+cls" if name == "MeanProjection" and "CLSProjection" in modules else "")
    options = ("activation", "term_weight", "excluded_tokens", "include_prompt", "quantize")
    return {"kind": kind} | {key: getattr(modules[name], key) for key in options if hasattr(modules[name], key)}


def _slices(modules: Mapping[str, Any]) -> dict[str, Any] | None:
    """How the lexical weights are folded."""
    if "SliceMaxAgg" not in modules:
        return None
    options = ("vocab_size", "lexical_dim", "aggregation", "slicing", "remainder", "seed")
    return {key: getattr(modules["SliceMaxAgg"], key) for key in options}


def _code(folder: Path) -> dict[str, Any]:
    """The copy of modules.py that the model carries, beside the installed one."""
    installed = Path(str(_modules.__file__)).read_bytes()
    report: dict[str, Any] = {
        "carried": False,
        "version": None,
        "sha256": None,
        "installed_version": _modules.__version__,
        "installed_sha256": hashlib.sha256(installed).hexdigest(),
        "state": "none",
    }
    path = folder / "st_aggretriever.py"
    if not path.is_file():
        return report
    content = path.read_bytes()
    found = re.search(rb'^__version__ = "([^"]+)"', content, re.MULTILINE)
    report |= {
        "carried": True,
        "version": found.group(1).decode() if found else None,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    report["state"] = _compare(report)
    return report


def _compare(code: Mapping[str, Any]) -> str:
    """``"same"``, ``"older"``, ``"newer"`` or ``"other"`` (same version, or none that can be read, other content)."""
    if code["sha256"] == code["installed_sha256"]:
        return "same"
    try:
        carried, installed = Version(code["version"]), Version(code["installed_version"])
    except (InvalidVersion, TypeError):
        return "other"
    return "other" if carried == installed else "older" if carried < installed else "newer"


def _code_sentence(code: Mapping[str, Any]) -> str:
    if not code["carried"]:
        return "none: it loads only where st_aggretriever is installed"
    it = f"{code['version'] or 'of unknown version'}, sha256 {code['sha256'][:12]}"
    shadow = (
        f"the installed {code['installed_version']}; SentenceTransformer(..., trust_remote_code=True) runs the copy, "
        "load_aggretriever the installed one"
    )
    return {
        "same": f"{it}, same as the installed package",
        "older": f"{it}, OLDER than {shadow}; load it with load_aggretriever and save it again",
        "newer": f"{it}, newer than {shadow}; update the package",
        "other": f"{it}, not the content of {shadow}",
    }[code["state"]]


def _checks(model: SentenceTransformer, folder: Path) -> Iterator[tuple[str, bool, str]]:
    """(name, passed, what was found) of each check."""
    encoder: Any = model[0]
    if encoder.head:
        yield _check_tie(encoder, folder)
    bad = [name for name, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]
    yield "finite weights", not bad, ", ".join(bad[:3]) or f"{len(model.state_dict())} tensors"
    yield _check_sample(model)
    if _quantize(model) != "none":
        yield _check_quantised(model)


def _check_tie(encoder: Any, folder: Path) -> tuple[str, bool, str]:
    """The decoder is tied where the config says so, and then stored once."""
    decoder = encoder.model.get_output_embeddings().weight
    tied = decoder is encoder.model.get_input_embeddings().weight
    shapes: list[tuple[int, ...]] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shapes += [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    copies = shapes.count(tuple(decoder.shape))
    wanted = bool(getattr(encoder.model.config, "tie_word_embeddings", tied)) and encoder.model._tied_weights_keys
    passed = tied == bool(wanted) and (copies <= 1 if tied else True)
    return "tie", passed, f"decoder {'tied' if tied else 'untied'}, {copies} V x E matrices on disk"


def _check_sample(model: SentenceTransformer) -> tuple[str, bool, str]:
    """A text's vector: the same alone and in a padded batch, finite, float32, not all zeros."""

    def vector(texts: list[str]) -> torch.Tensor:
        values: Any = model.encode(texts, output_value=None, show_progress_bar=False)
        return values[0]["sentence_embedding"].cpu()

    alone, padded = vector([SAMPLE]), vector([SAMPLE, LONGER])
    difference = (alone - padded).abs()
    last: Any = model[-1]
    start = 0
    for key, dim in zip(last.keys, last.dims, strict=True):
        if key == "lexical_embedding":  # A sign may turn where the two halves of a slice are equal but for rounding.
            part = slice(start, start + dim)
            difference[part] = (alone[part].abs() - padded[part].abs()).abs()
        start += dim
    worst = difference.max().item()
    dtype = next(model.parameters()).dtype
    tolerance = TOLERANCES.get(dtype, 2e-2) if _quantize(model) == "none" else 2e-2
    passed = bool(alone.isfinite().all()) and alone.dtype == torch.float32 and bool(alone.any()) and worst <= tolerance
    return "sample vector", passed, f"{len(alone)} dimensions, {worst:.1e} between alone and in a padded batch"


def _quantize(model: SentenceTransformer) -> str:
    return next((str(module.quantize) for module in model if hasattr(module, "quantize")), "none")


def _check_quantised(model: SentenceTransformer) -> tuple[str, bool, str]:
    """What the quantised head makes of two texts, beside the head as it is."""
    head: Any = next(module for module in model if hasattr(module, "quantize"))
    quantize = head.quantize

    def lexical() -> torch.Tensor:
        values: Any = model.encode([SAMPLE, LONGER], output_value=None, show_progress_bar=False)
        return torch.stack([value["lexical_embedding"] for value in values]).cpu()

    vectors = lexical()
    try:
        head.quantize = "none"
        exact = lexical()
    finally:
        head.quantize = quantize
    cosine = torch.cosine_similarity(vectors, exact).min().item()
    turned = (vectors.signbit() != exact.signbit()).float().mean().item()
    found = (
        f"{quantize}: cosine of the lexical part {cosine:.5f} to the head as it is, {turned:.2%} of the signs differ"
    )
    return "quantised head", cosine >= LEAST_COSINE, found
