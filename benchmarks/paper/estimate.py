"""What a table costs, before it is run: each training and evaluation with hours and disk.

CPU hours come from measured steps and encodings (``--measure``, in results/costs-SCALE.json). GPU hours are counted in
floating-point operations, every text at its full length, on a GPU of which an assumed ``GPU_FLOPS`` is sustained.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arms import Model, Table, distinct
from scales import Scale, steps_of

from st_aggretriever.atomic import replacing

if TYPE_CHECKING:
    from runner import Runner

GPU_FLOPS = 60e12  # an assumption: about a fifth of an A100's peak in half precision
QUERY_LENGTH = 32
HIDDEN, VOCABULARY = 768, 30_522  # of the full scale's backbones
LAYERS = {"main": 6, "bert": 12, "condenser": 12, "cocondenser": 12}
REPEATS = 3


def dry_run(scale: Scale, tables: list[Table], results: Path, *, details: bool = True) -> Iterator[str]:
    """Lines on all that the tables need, each model and encoding once, and their sum."""
    costs = _costs(scale, results)
    seeds: dict[Model, set[int]] = {}
    places: dict[Model, set[str]] = {}
    for table in tables:
        for model in distinct(row.model for row in table.rows):
            if model.recipe != "bm25":
                seeds.setdefault(model, set()).update(table.seeds)
        for row in table.rows:
            if row.model.recipe != "bm25":
                places.setdefault(row.model, set()).update(table.collections)
    unit = "GPU h" if scale.name == "full" else "CPU h"
    totals = {"hours": 0.0, "disk": 0.0}
    trainings = evaluations = 0
    unknown = []
    for model, used in seeds.items():
        cost = costs.get(replace(model, longer=1).kind)
        if cost is None:
            unknown.append(model.kind)
            continue
        for what, count, hours, disk, note in _work(scale, model, sorted(used), places.get(model, set()), cost):
            trainings += count if what != "encode" else 0
            evaluations += count if what == "encode" else 0
            totals["hours"] += hours
            totals["disk"] += disk
            if details:
                name = f"{model.kind}, {model.source} x {model.fraction:g}"
                yield f"{what:7}{count:3} x {name:74} {note:44} {hours:8.2f} {unit} {disk:7.2f} GB"
    names = ", ".join(table.name for table in tables)
    hours = f"{totals['hours']:.1f} {unit}"
    yield (
        f"{names}, {scale.name}: {len(seeds)} models, {trainings} trainings, {evaluations} encodings of collections: "
        f"{hours}, {totals['disk']:.1f} GB on disk"
    )
    if scale.name == "full":
        yield (
            f"Assumed: {scale.training_rows:,} training queries (the paper's number is not known here), every text at "
            f"full length, {GPU_FLOPS / 1e12:g} TFLOP/s sustained. Settings: the paper's. The QA sets' counts are in "
            "their files and not included."
        )
    if unknown:
        yield f"not measured yet ({len(unknown)} models): run the table's script with --measure first"


def _work(
    scale: Scale, model: Model, seeds: list[int], names: set[str], cost: dict[str, float]
) -> Iterator[tuple[str, int, float, float, str]]:
    """(what, how often, hours, GB, note) of a model."""
    width, size = cost["dimension"], cost["parameters"] * 4 / 1e9
    if model.trained:
        factors = 1 if model.further else len(scale.factors)
        rates = len(scale.further_rates if model.further else scale.rates)
        steps = _steps(scale, model)
        judged = min(scale.evaluations, 1 if model.further else scale.evaluations) * cost["dev"]
        if model.longer > 1:
            factors = rates = 1
        if factors > 1:
            short = int(scale.sweep_share * steps)
            hours = factors * (short * cost["step"] + min(1, scale.evaluations) * cost["dev"]) / 3600
            yield "sweep", factors, hours, 0.0, f"{short:,} steps each"
        if rates > 1:  # of one of them comes the model of the first seed
            hours = (rates - 1) * (steps * cost["step"] + judged) / 3600
            yield "sweep", rates - 1, hours, 0.0, f"{steps:,} steps each"
        hours = len(seeds) * (steps * cost["step"] + judged) / 3600
        yield "train", len(seeds), hours, len(seeds) * size, f"{steps:,} steps, seeds {seeds[0]} to {seeds[-1]}"
        if model.further == "hard":
            hours = len(seeds) * scale.training_rows * (1 / cost["queries"] + 1 / cost["documents"]) / 3600
            yield "mine", len(seeds), hours, 0.0, f"depth 200 for {scale.training_rows:,} queries"
    collections = [collection for collection in scale.collections if collection.name in names]
    documents = sum({c.folder: c.documents for c in collections}.values())
    queries = sum(c.queries for c in collections)
    if collections:
        hours = len(seeds) * (documents / cost["documents"] + queries / cost["queries"]) / 3600
        disk = 0.0 if model.is_wide else len(seeds) * (documents + queries) * width * 4 / 1e9
        places = len(seeds) * len({c.folder for c in collections})
        yield "encode", places, hours, disk, f"{documents:,} documents, {queries:,} queries"


def _steps(scale: Scale, model: Model) -> int:
    epochs = scale.further_epochs if model.further else scale.epochs
    batch = scale.further_batch_size if model.further else scale.batch_size
    return steps_of(scale, model) or int(epochs * scale.training_rows * model.fraction / batch)


def _costs(scale: Scale, results: Path) -> Any:
    if scale.name == "full":
        return _Counted(scale)
    path = results / f"costs-{scale.name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["models"] if path.exists() else {}


class _Counted:
    """Costs on the assumed GPU by counting; seconds a step, texts a second."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    def get(self, kind: str) -> dict[str, float]:
        recipe, backbone, *settings = kind.split(" ")
        options = dict(setting.split("=", 1) for setting in settings)
        encoder = LAYERS[backbone] * 12 * HIDDEN**2
        with_head = recipe == "splade" or (recipe == "aggretriever" and options.get("pooling", "mlm") == "mlm")
        head = (HIDDEN + VOCABULARY) * HIDDEN if with_head else 0
        a_token = 2.0 * (encoder + head)
        scale = self.scale
        passages = scale.batch_size * (1 + (scale.negatives or 0))
        tokens = scale.batch_size * QUERY_LENGTH + passages * scale.train_length
        wide = recipe == "splade" or options.get("aggregation") == "none"
        lexical = int(options.get("lexical_dim", 640)) if options.get("pooling") != "cls" else 0
        return {
            "step": 3 * a_token * tokens / GPU_FLOPS,  # a backward pass is two forward ones
            "dev": 0.0,
            "documents": GPU_FLOPS / (a_token * scale.search_length),
            "queries": GPU_FLOPS / (a_token * QUERY_LENGTH),
            "parameters": encoder + head + VOCABULARY * HIDDEN * (not with_head),
            "dimension": VOCABULARY if wide else lexical + int(options.get("cls_dim", 128)),
        }


# ---------------------------------------------------------------------------------------------------------------------
# Measured


def measure(runner: Runner, table: Table, results: Path) -> None:
    """CPU seconds of a training step, of the dev figure, and texts encoded a CPU second, of each model of a table."""
    from st_aggretriever.versions import versions

    path = results / f"costs-{runner.scale.name}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": {}}
    for model in distinct(row.model for row in table.rows):
        if model.recipe == "bm25" or model.longer > 1 or model.kind in known["models"]:
            continue
        known["models"][model.kind] = cost = _measured(runner, model)
        known["versions"] = versions()
        with replacing(path) as file:
            file.write(json.dumps(known, indent=1) + "\n")
        print(f"{model.kind}: " + ", ".join(f"{name} {value:.4g}" for name, value in cost.items()), flush=True)


def _measured(runner: Runner, model: Model) -> dict[str, float]:
    from fit import Dense, set_length, untrained

    scale = runner.scale
    built = untrained(model, runner.backbone(model.backbone), scale, 0)
    inner = built.sparse if isinstance(built, Dense) else built
    step = _seconds(_step(runner, model, inner))
    set_length(built, scale.search_length)
    collection = next(iter(runner.collections.values()))
    documents = [text for _, text in islice(runner._corpus(collection)(), 64)]
    queries = list(runner._judged(collection)[0].values())[:64]
    options: dict[str, Any] = {"batch_size": 64, "show_progress_bar": False}
    a_second = {
        "documents": len(documents) / _seconds(lambda: built.encode_document(documents, **options)),
        "queries": len(queries) / _seconds(lambda: built.encode_query(queries, **options)),
    }
    dimension = built.encode_query(queries[:1], **options).shape[-1]
    return {
        "step": step if model.trained else 0.0,
        "dev": _dev_texts(runner) * (scale.train_length / scale.search_length) / a_second["documents"],
        **a_second,
        "parameters": sum(parameter.numel() for parameter in inner.parameters()),
        "dimension": dimension,
    }


def _dev_texts(runner: Runner) -> int:
    dev = runner.scale.dev
    return sum(1 for _ in runner._corpus(dev)()) + len(runner._judged(dev)[0]) // 2


def _step(runner: Runner, model: Model, inner: Any) -> Any:
    """A training step on real pairs, with the loss of the recipe."""
    import torch
    from fit import FLOPS_WEIGHTS
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    from st_aggretriever.losses import AggretrieverLoss
    from st_aggretriever.readers.pairs import read_pairs

    scale = runner.scale
    size = scale.further_batch_size if model.further else scale.batch_size
    columns = 1 + (scale.further_negatives if model.further == "hard" else scale.negatives or 0)
    pairs = list(islice(read_pairs(runner.pairs(model.source, model.fraction)), size * columns))
    if model.recipe == "splade":
        weights = {"document_regularizer_weight": FLOPS_WEIGHTS[0], "query_regularizer_weight": FLOPS_WEIGHTS[1]}
        loss: Any = SpladeLoss(inner, SparseMultipleNegativesRankingLoss(inner), **weights)
    elif model.recipe == "cosine":
        loss = MultipleNegativesRankingLoss(inner)
    else:
        loss = AggretrieverLoss(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-6)
    device = next(inner.parameters()).device

    def features() -> list[dict[str, Any]]:
        texts = [[pair["query"] for pair in pairs[:size]]]
        texts += [[pair["passage"] for pair in pairs[start::columns]][:size] for start in range(columns)]
        found = [inner.preprocess(column, task="document" if n else "query") for n, column in enumerate(texts)]
        return [{k: v.to(device) if hasattr(v, "to") else v for k, v in column.items()} for column in found]

    def step() -> None:
        inner.train()
        value = loss(features(), None)
        value = sum(value.values()) if isinstance(value, dict) else value
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        inner.eval()

    return step


def _seconds(do: Any) -> float:
    do()
    taken = []
    for _ in range(REPEATS):
        started = time.process_time()
        do()
        taken.append(time.process_time() - started)
    return statistics.median(taken)
