"""One training run by each recipe, to a folder that is whole or absent, and what the run's record keeps of it."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from arms import Model
from scales import NOISE, Scale

from st_aggretriever import TrainConfig, build_aggretriever, load_aggretriever, train
from st_aggretriever.dev import DevEvaluator
from st_aggretriever.trainer import TRAINER_STATE, publish
from st_aggretriever.training import DivergedError

QUERY_LENGTH = 32
DEV_METRIC = "RR@10"
# Of the sparse encoder's regularisers, documents and queries: the weights in the documentation of SpladeLoss.
FLOPS_WEIGHTS = (3e-5, 5e-5)
WARM_UP = 0.1
CONSTANTS = {"query_length": QUERY_LENGTH, "flops_weights": FLOPS_WEIGHTS, "warm_up": WARM_UP}
RAMP = 1 / 3  # of the steps, in which the sparse encoder's trainer brings these weights up
LOGGING_STEPS = 200
RECORD = "fit.json"
STOCK_RECORD = "stock.json"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A training run: ``factor`` is the scale on the scores in the loss, ``steps`` the most it takes (0: by epochs)."""

    model: Model
    path: str  # of the backbone, or of the plain model that goes on
    pairs: Path
    dev: Path | None
    rate: float
    factor: float
    seed: int
    steps: int


def fit(scale: Scale, run: Fit, output: Path) -> dict[str, Any]:
    """Train to ``output``, or take what lies there; returns steps, seconds and the dev figure's curve."""
    if (output / RECORD).is_file():
        return json.loads((output / RECORD).read_text(encoding="utf-8"))
    if run.model.recipe == "aggretriever":
        record = _fit_aggretriever(scale, run, output)
    else:
        record = _fit_stock(scale, run, output)
    curve = [[int(entry["step"]), round(entry[DEV_METRIC], 4)] for entry in record.pop("dev")]
    flat = curve[-1][1] - curve[-2][1] < NOISE if len(curve) > 1 else None
    record |= {"rate": run.rate, "factor": run.factor, "seed": run.seed, "dev_curve": curve, "flat": flat}
    with (output / f"{RECORD}.tmp").open("w", encoding="utf-8") as file:
        json.dump(record, file)
    (output / f"{RECORD}.tmp").rename(output / RECORD)
    return record


def load(model: Model, folder: str | Path) -> Any:
    """A trained model of any recipe, as evaluation takes it."""
    if model.recipe == "splade":
        from sentence_transformers import SparseEncoder

        return Dense(SparseEncoder(str(folder), device="cpu" if _no_gpu() else None))
    if model.recipe == "cosine":
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(folder))
    return load_aggretriever(folder)


def untrained(model: Model, path: str, scale: Scale, seed: int) -> Any:
    """The model before its first step, in float32."""
    if model.recipe == "aggretriever":
        lengths = {"query_length": QUERY_LENGTH, "document_length": scale.train_length}
        return build_aggretriever(path, seed=seed, **lengths, **model.options).float()
    built = _stock_model(scale, model, path)
    return Dense(built) if model.recipe == "splade" else built


def set_length(built: Any, length: int) -> None:
    """Let a model read so many tokens of a document; those of a query stay."""
    inner = built.sparse if isinstance(built, Dense) else built
    query_length = inner[0].query_length
    inner.max_seq_length = length
    inner[0].document_length, inner[0].query_length = length, query_length


class Dense:
    """A SparseEncoder whose vectors come as dense arrays of V columns: for its exact search and its dev figure."""

    similarity_fn_name = "dot"

    def __init__(self, model: Any) -> None:
        self.sparse = model
        self.tokenizer = model.tokenizer

    def encode_query(self, texts: list[str], **options: Any) -> np.ndarray:
        return self._dense(self.sparse.encode_query, texts, options)

    def encode_document(self, texts: list[str], **options: Any) -> np.ndarray:
        return self._dense(self.sparse.encode_document, texts, options)

    def _dense(self, encode: Any, texts: list[str], options: dict[str, Any]) -> np.ndarray:
        batch_size = options.get("batch_size", 32)
        vectors = encode(texts, batch_size=batch_size, show_progress_bar=False, convert_to_sparse_tensor=False)
        return vectors.float().cpu().numpy()


class _DenseDev(DevEvaluator):
    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        return super().__call__(Dense(model), *args, **kwargs)


def _fit_aggretriever(scale: Scale, run: Fit, output: Path) -> dict[str, Any]:
    further = bool(run.model.further)
    options: dict[str, Any] = dict(scale.settings) if further else {**scale.settings, **run.model.options}
    if not further:
        options |= {"query_length": QUERY_LENGTH, "document_length": scale.train_length}
    if run.dev is not None:
        options |= {"dev_data": str(run.dev), "dev_split": "dev", "dev_metric": DEV_METRIC}
        options |= {"eval_steps": _every(scale, run)}
    hard = run.model.further == "hard"
    config = TrainConfig(
        model=run.path,
        pairs=[str(run.pairs)],
        output=str(output),
        resume=True,
        negatives=scale.further_negatives if hard else scale.negatives,
        batch_size=scale.further_batch_size if further else scale.batch_size,
        epochs=scale.further_epochs if further else scale.epochs,
        max_steps=run.steps,
        learning_rate=run.rate,
        scale=run.factor,
        seed=run.seed,
        warmup_ratio=WARM_UP,
        logging_steps=_every(scale, run),
        report=False,
        **options,
    )
    train(config)
    record = json.loads((output / "train.json").read_text(encoding="utf-8"))
    kept = {name: record[name] for name in ("steps", "best_step", "seconds", "dev", "versions")}
    return {**kept, "head_rate": record["resolved"]["head_learning_rate"]}


def _fit_stock(scale: Scale, run: Fit, output: Path) -> dict[str, Any]:
    """Mean pooling or a sparse encoder by sentence-transformers' own trainer: same pairs, steps, batches, dev set."""
    import torch
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SparseEncoderTrainer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
    from transformers import set_seed
    from transformers.trainer_callback import PrinterCallback, TrainerState

    from st_aggretriever.readers.pairs import read_pairs
    from st_aggretriever.versions import versions

    if (output / STOCK_RECORD).is_file():
        return json.loads((output / STOCK_RECORD).read_text(encoding="utf-8"))
    started = time.monotonic()
    set_seed(run.seed)
    model = _stock_model(scale, run.model, run.path)
    working = output.with_name(output.name + ".partial")
    sparse = run.model.recipe == "splade"
    pairs = list(read_pairs(run.pairs))
    columns = {name: [pair[name] for pair in pairs] for name in ("query", "passage")}  # type: ignore[literal-required]
    if sparse:
        contrast = SparseMultipleNegativesRankingLoss(model, scale=run.factor)
        documents, queries = FLOPS_WEIGHTS
        loss: Any = SpladeLoss(model, contrast, document_regularizer_weight=documents, query_regularizer_weight=queries)
    else:
        loss = MultipleNegativesRankingLoss(model, scale=run.factor)
    evaluator = None
    if run.dev is not None:
        evaluator = (_DenseDev if sparse else DevEvaluator).on_folder(run.dev, "dev", DEV_METRIC)
    stock: Any = SparseEncoderTrainer if sparse else SentenceTransformerTrainer

    class Trainer(stock):  # type: ignore[misc]
        def add_model_card_callback(self, *args: Any, **kwargs: Any) -> None:
            """Leave it away: it would copy training texts into the model card."""

        def _load_best_model(self) -> None:
            # The stock method turns a failure into a line in the log, and keeps the last weights.
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    trainer = Trainer(
        model,
        args=_stock_arguments(scale, run, working, evaluator is not None, sparse=sparse),
        train_dataset=Dataset.from_dict(columns),
        loss=loss,
        evaluator=evaluator,
    )
    trainer.remove_callback(PrinterCallback)
    last = _last_whole(working)
    state = None if last is None else TrainerState.load_from_json(f"{last}/{TRAINER_STATE}")
    if state is not None and state.global_step >= state.max_steps:
        trainer.state = state  # It had ended when it was killed.
        trainer._load_from_checkpoint(str(state.best_model_checkpoint or last))
    else:
        trainer.train(resume_from_checkpoint=last)
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise DivergedError("the training diverged (weights are not finite). Lower the learning rate.")
    dev = [
        {"step": entry["step"], DEV_METRIC: entry[f"eval_{DEV_METRIC}"]}
        for entry in trainer.state.log_history
        if f"eval_{DEV_METRIC}" in entry
    ]
    record = {
        "steps": trainer.state.global_step,
        "best_step": None if not dev else max(dev, key=lambda entry: entry[DEV_METRIC])["step"],
        "seconds": round(time.monotonic() - started, 1),
        "dev": dev,
        "versions": versions(),
    }
    folder = working / "whole"
    shutil.rmtree(folder, ignore_errors=True)  # what a kill has left
    model.save_pretrained(str(folder), create_model_card=False)
    (folder / STOCK_RECORD).write_text(json.dumps(record), encoding="utf-8")
    publish(folder, output)
    shutil.rmtree(working)
    return record


def _stock_arguments(scale: Scale, run: Fit, working: Path, judged: bool, *, sparse: bool) -> Any:
    from sentence_transformers import SentenceTransformerTrainingArguments, SparseEncoderTrainingArguments
    from sentence_transformers.base.sampler import BatchSamplers

    every = _every(scale, run)
    judging: dict[str, Any] = {}
    if judged:
        judging = {
            "eval_strategy": "steps",
            "eval_steps": every,
            "load_best_model_at_end": True,
            "metric_for_best_model": DEV_METRIC,
            "greater_is_better": True,
            # Up to then a model counts as good that is hardly sparse.
            "eval_delay": int(run.steps * RAMP) + 1 if sparse else 0,
        }
    kind = SparseEncoderTrainingArguments if sparse else SentenceTransformerTrainingArguments
    return kind(
        output_dir=str(working),
        num_train_epochs=scale.epochs,
        max_steps=run.steps or -1,
        per_device_train_batch_size=scale.batch_size,
        learning_rate=run.rate,
        lr_scheduler_type="linear",
        warmup_steps=WARM_UP,
        seed=run.seed,
        router_mapping={"query": "query", "passage": "document"},
        batch_sampler=BatchSamplers.NO_DUPLICATES,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        use_cpu=_no_gpu(),
        save_strategy="steps",
        save_steps=every,
        save_total_limit=2,
        logging_steps=every,
        report_to="none",
        disable_tqdm=True,
        **judging,
    )


def _every(scale: Scale, run: Fit) -> int:
    """Steps between two evaluations, or between two lines on the loss."""
    return -(-run.steps // max(1, scale.evaluations)) or LOGGING_STEPS


def _stock_model(scale: Scale, model: Model, path: str) -> Any:
    from sentence_transformers import SentenceTransformer, SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    options: dict[str, Any] = {"query_length": QUERY_LENGTH, "document_length": scale.train_length}
    options["model_kwargs"] = {"dtype": "float32"}
    if model.recipe == "splade":
        encoder = Transformer(path, transformer_task="fill-mask", **options)
        return SparseEncoder(modules=[encoder, SpladePooling("max")])
    encoder = Transformer(path, **options)
    return SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())])


def _last_whole(working: Path) -> str | None:
    """The last checkpoint whose state, which the stock trainer writes last, can be read."""
    for folder in sorted(working.glob("checkpoint-*"), key=lambda path: -int(path.name.rpartition("-")[2])):
        try:
            json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return str(folder)
    return None


def _no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()
