"""Train an Aggretriever on pairs: the settings, the run, and its result on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from st_aggretriever.trainer import AggretrieverTrainer

RECORD = "train.json"
SMALL_BACKBONE = 20_000_000  # parameters: below it the published learning rate of 5e-6 is far too low
# Settings that a resumed run may change: they don't touch the weights.
_FREE = {"output", "pairs", "resume", "save_steps", "logging_steps"}


def _option(
    help: str,
    default: Any = None,
    *,
    shown: Any = None,
    least: float | None = None,
    above: float | None = None,
    below: float = math.inf,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A setting of TrainConfig with its description, its range, and the default to show where ``default`` is None."""
    shown = default if shown is None else shown
    limits = {"help": help, "shown": shown, "least": least, "above": above, "below": below, "choices": choices}
    return field(default=default, metadata=limits)


def _build_option(help: str, shown: Any) -> Any:
    """An argument of ``build_aggretriever``; None leaves it at the default there, and so at a trained model's own."""
    return field(default=None, metadata={"help": help, "shown": shown, "build": True})


@dataclass(kw_only=True)
class TrainConfig:
    """The settings of :func:`train`, each also a flag of ``st-aggretriever train``.

    ``TrainConfig.__dataclass_fields__[name].metadata["help"]`` describes a field. The fields from ``pooling`` to
    ``document_prompt`` are those of :func:`build_aggretriever`; they are None where not given.

    Raises:
        ValueError: A value is out of its range.
    """

    model: str = field(
        metadata={"help": "masked language model to start from, or an Aggretriever to train further: folder or Hub id"}
    )
    pairs: list[str] = field(
        metadata={"help": "jsonl or jsonl.gz files with query, passage, optional title and negatives; or BEIR folders"}
    )
    output: str = field(metadata={"help": "folder for the trained model; must be absent or empty"})

    pooling: str | None = _build_option("mlm, tokens, cls, mean or mean+cls", "mlm")
    lexical_dim: int | None = _build_option("D, width of the lexical part; 0 leaves it away", 640)
    cls_dim: int | None = _build_option("C, width of the [CLS] part; 0 leaves it away", 128)
    query_length: int | None = _build_option("longest query in tokens", 32)
    document_length: int | None = _build_option("longest document in tokens", 128)
    aggregation: str | None = _build_option("signed, positive, mean, linear or none", "signed")
    term_weight: str | None = _build_option("abs, identity or none", "abs")
    activation: str | None = _build_option("softmax or log1p_relu", "softmax")
    slicing: str | None = _build_option("strided or random", "strided")
    remainder: str | None = _build_option("pad or drop", "pad")
    excluded_tokens: str | None = _build_option("tokens kept out of the max: cls, special or none", "cls")
    include_prompt: bool | None = _build_option("let the tokens of a prompt into the max", False)
    mlm_head_from: str | None = _build_option("folder or Hub id whose MLM head an encoder without one takes over", None)
    query_prompt: str | None = _build_option("text put before each query", "")
    document_prompt: str | None = _build_option("text put before each document", "")

    lexical_weight: float = _option("weight of the lexical part's loss", 0.5, least=0)
    cls_weight: float = _option("weight of the [CLS] part's loss", 0.5, least=0)
    scale: float = _option("factor on the scores in the loss, an inverse temperature", 1.0, above=0)
    epochs: float = _option("passes over the pairs", 3.0, above=0)
    max_steps: int = _option("stop after so many steps instead of epochs; 0 goes by epochs", 0, least=0)
    batch_size: int = _option("pairs in a step, at least 2; all their passages serve as negatives", 32, least=2)
    learning_rate: float | None = _option(
        "peak learning rate", shown="5e-6, or 1e-4 for backbones under 20 M parameters", above=0
    )
    head_learning_rate: float | None = _option(
        "peak learning rate of all modules but the encoder",
        shown="learning_rate; for backbones under 20 M parameters with new heads ten times that",
        above=0,
    )
    warmup_ratio: float = _option(
        "share of the steps with a rising learning rate; it then falls to 0", 0.1, least=0, below=1
    )
    negatives: int | None = _option(
        "use the first N hard negatives of each row", shown="all, which must be as many in every row", least=0
    )
    precision: str = _option(
        "arithmetic of the encoder; auto takes, on a GPU, bf16 where it has that, else fp16; on a CPU fp32",
        "auto",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    device: str = _option("auto takes a GPU if there is one", "auto", choices=("auto", "cpu", "cuda"))
    seed: int = _option("of new weights, order of the pairs and dropout", 0, least=0, below=2**32)
    save_steps: int = _option(
        "steps between two checkpoints in OUTPUT.partial, of which the last two stay; 0 writes none", 500, least=0
    )
    logging_steps: int = _option("steps between two lines with the losses", 10, least=1)
    resume: bool = _option("go on from the last checkpoint, or start where there is none", False)

    def __post_init__(self) -> None:
        pairs = [self.pairs] if isinstance(self.pairs, (str, os.PathLike)) else self.pairs
        self.pairs = [os.fspath(path) for path in pairs]
        self.model, self.output = os.fspath(self.model), os.fspath(self.output)
        self.mlm_head_from = self.mlm_head_from and os.fspath(self.mlm_head_from)
        if not self.pairs:
            raise ValueError("TrainConfig: pairs must name at least one file or folder, got none.")
        for option in fields(self):
            _check_range(option.name, getattr(self, option.name), option.metadata)


def _check_range(name: str, value: Any, limits: Any) -> None:
    least, above, below, choices = (limits.get(key) for key in ("least", "above", "below", "choices"))
    if choices is not None and value not in choices:
        raise ValueError(f"TrainConfig: {name} must be one of {', '.join(choices)}, got {value!r}.")
    if value is None or (least is None and above is None):
        return
    if not (value >= least if least is not None else value > above) or not value < below:
        lower = f"at least {least}" if least is not None else f"above {above}"
        upper = "finite" if below == math.inf else f"below {below}"
        raise ValueError(f"TrainConfig: {name} must be {lower} and {upper}, got {value}.")


def train(config: TrainConfig) -> SentenceTransformer:
    """Train by ``config`` and write the model, with ``train.json`` (settings, data, losses) beside it, to its output.

    While the run lasts, its checkpoints lie in ``OUTPUT.partial``; ``output`` appears as a whole at the end. On one
    machine the same settings and pairs give the same weights, bit for bit on a CPU, also when the run is interrupted
    and resumed.

    Returns:
        The trained model.

    Raises:
        ValueError: A setting, a pair or the starting model doesn't fit; the output or ``OUTPUT.partial`` is in the
            way; the resumed run had other settings or pairs; the training diverged.
        OSError: A file can't be read or written, or the starting model isn't found.
        ImportError: The ``train`` extra is not installed.
        KeyboardInterrupt: It was interrupted; the message says where the checkpoints lie.

    Example:
        >>> config = TrainConfig(model="distilbert-base-uncased", pairs=["pairs.jsonl"], output="agg")
        >>> model = train(config)  # doctest: +SKIP
    """
    _check_environment()
    output = Path(config.output).resolve()
    working = output.with_name(output.name + ".partial")
    finished = config.resume and (output / RECORD).is_file()
    if not finished:
        _check_output(output, working, config.resume)
    data = read_columns(config.pairs, config.negatives)
    start = {"config": asdict(config), "pairs": data.counts, "pairs_sha256": data.sha256}
    if finished:
        return _finished(start, output)
    if len(data.columns["query"]) < config.batch_size:
        raise ValueError(
            f"train: batch_size must be at most the number of pairs, {len(data.columns['query'])}, got "
            f"{config.batch_size}."
        )
    model, is_new = _starting_model(config)
    resolved = _resolve(config, model, is_new, len(data.columns["query"]))
    with _working_folder(working, start) as checkpoint:
        trainer = _trainer(config, resolved, model, data.columns, working)
        began = time.monotonic()
        trainer.fit(checkpoint)
        _check_result(trainer, resolved["steps"])
        record = {
            **start,
            "resolved": resolved,
            "steps_before_resuming": int(checkpoint.rpartition("-")[2]) if checkpoint else 0,
            "seconds": round(time.monotonic() - began, 1),
            "versions": _versions(),
            "losses": [entry for entry in trainer.state.log_history if "loss" in entry],
        }
        _write_model(model, record, working / "model", output)
    shutil.rmtree(working, ignore_errors=True)
    return model


def _check_environment() -> None:
    missing = [name for name in ("datasets", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f'train: {" and ".join(missing)} not installed: pip install "st-aggretriever[train]".')
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("train: one process only, got WORLD_SIZE > 1. Start it without torchrun.")


def _check_output(output: Path, working: Path, resume: bool) -> None:
    if output.exists() and not output.is_dir():
        raise ValueError(f"train: output {output} is a file; nothing was overwritten. Name a folder.")
    if output.is_dir() and any(output.iterdir()):
        raise ValueError(f"train: output {output} is not empty; nothing was overwritten. Name another folder.")
    if output.is_mount():
        raise ValueError(
            f"train: output {output} is a mount point and can't be put in place whole. Name a folder in it."
        )
    if working.exists() and not resume:
        raise ValueError(f"train: {working} holds an interrupted run. Go on with --resume, or delete it.")


# ---------------------------------------------------------------------------------------------------------------------
# Data and model


class Data(NamedTuple):
    """Training pairs as columns of equal length."""

    columns: dict[str, list[str]]  # query, passage, negative_1, ..., negative_n
    counts: dict[str, int]  # pairs by file
    sha256: str  # of all texts in order


def read_columns(paths: list[str], negatives: int | None) -> Data:
    """Read all pairs, with the first ``negatives`` hard negatives of each; None takes all, the same number in each row.

    Raises:
        FileNotFoundError: No such file or folder.
        ValueError: A bad or empty file, or a row with too few (or other than the first row's number of) negatives, or
            with its passage among them, by file and line.
    """
    from st_aggretriever.readers.pairs import read_pairs

    rows: list[list[str]] = []
    counts: dict[str, int] = {}
    digest = hashlib.sha256()
    for path in paths:
        before = len(rows)
        for number, pair in enumerate(read_pairs(path), start=1):
            where = f"{path} {'pair' if Path(path).is_dir() else 'line'} {number}"
            wanted = len(rows[0]) - 2 if negatives is None and rows else negatives
            rows.append([pair["query"], pair["passage"], *_negatives(pair, wanted, negatives is None, where)])
            digest.update(json.dumps(rows[-1]).encode())
        counts[path] = counts.get(path, 0) + len(rows) - before
    if not rows:
        raise ValueError(f"train: no pair in {', '.join(paths)}.")
    names = ["query", "passage", *(f"negative_{number}" for number in range(1, len(rows[0]) - 1))]
    columns = {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    return Data(columns, counts, digest.hexdigest())


def _negatives(pair: Any, wanted: int | None, exact: bool, where: str) -> list[str]:
    found: list[str] = pair["negatives"]
    if wanted is not None and (len(found) != wanted if exact else len(found) < wanted):
        raise ValueError(
            f"{where}: expected {wanted} negatives, {'as in the first row' if exact else 'or more'}, got {len(found)}. "
            "--negatives N takes the first N of each row."
        )
    used = found[:wanted]
    if pair["passage"] in used:
        raise ValueError(f"{where}: the passage stands among its own negatives. Remove it there.")
    return used


def _starting_model(config: TrainConfig) -> tuple[SentenceTransformer, bool]:
    """The model to train, in float32, and whether its heads are new."""
    from st_aggretriever.model import build_aggretriever, is_aggretriever, load_aggretriever

    given = {
        option.name: getattr(config, option.name)
        for option in fields(config)
        if "build" in option.metadata and getattr(config, option.name) is not None
    }
    is_new = not is_aggretriever(config.model)
    if is_new:
        texts = {name: given.pop(f"{name}_prompt", None) for name in ("query", "document")}
        prompts = {name: text for name, text in texts.items() if text}
        model = build_aggretriever(config.model, prompts=prompts or None, seed=config.seed, **given)
    elif given:
        raise ValueError(
            f"train: {config.model} is an Aggretriever already and keeps its own {', '.join(given)}. Leave that away, "
            "or start from a masked language model."
        )
    else:
        model = load_aggretriever(config.model)
    # A checkpoint in half precision comes in half precision, whose steps would be lost in rounding.
    return model.float(), is_new


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _resolve(config: TrainConfig, model: SentenceTransformer, is_new: bool, pairs: int) -> dict[str, Any]:
    """What the settings come to for this model, machine and data."""
    import torch

    cuda = torch.cuda.is_available() and config.device != "cpu"
    if config.device == "cuda" and not cuda:
        raise ValueError("train: device must be 'cpu' or 'auto' here, got 'cuda', but torch finds no GPU.")
    precision = config.precision
    if precision == "auto":
        precision = ("bf16" if torch.cuda.is_bf16_supported() else "fp16") if cuda else "fp32"
    if precision == "fp16" and not cuda:
        raise ValueError("train: precision must be fp32 or bf16 without a GPU, got 'fp16'.")
    parameters = sum(parameter.numel() for parameter in model[0].parameters())
    small = parameters < SMALL_BACKBONE
    learning_rate = config.learning_rate or (1e-4 if small else 5e-6)
    epoch_steps = pairs // config.batch_size
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "precision": precision,
        "backbone_parameters": parameters,
        "learning_rate": learning_rate,
        "head_learning_rate": config.head_learning_rate or learning_rate * (10 if small and is_new else 1),
        "steps": config.max_steps or math.ceil(config.epochs * epoch_steps),
        "steps_in_epoch": epoch_steps,
    }


def _trainer(
    config: TrainConfig,
    resolved: dict[str, Any],
    model: SentenceTransformer,
    columns: dict[str, list[str]],
    working: Path,
) -> AggretrieverTrainer:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.training_args import BatchSamplers

    from st_aggretriever.losses import AggretrieverLoss
    from st_aggretriever.trainer import AggretrieverTrainer

    tasks = {name: "query" if name == "query" else "document" for name in columns}
    texts = {name: _prompt(model, task) for name, task in tasks.items()}
    loss = AggretrieverLoss(
        model, scale=config.scale, lexical_weight=config.lexical_weight, cls_weight=config.cls_weight
    )
    heads = r"^model\.(?!0\.)"  # in the loss's names: all modules but the first
    has_heads = any(not name.startswith("model.0.") for name, _ in loss.named_parameters())
    args = SentenceTransformerTrainingArguments(
        output_dir=str(working),
        num_train_epochs=config.epochs,
        max_steps=resolved["steps"],
        per_device_train_batch_size=config.batch_size,
        learning_rate=resolved["learning_rate"],
        learning_rate_mapping={heads: resolved["head_learning_rate"]} if has_heads else {},
        lr_scheduler_type="linear",
        warmup_steps=config.warmup_ratio,  # below 1 it is a share
        bf16=resolved["precision"] == "bf16",
        fp16=resolved["precision"] == "fp16",
        use_cpu=resolved["device"] == "cpu",
        seed=config.seed,
        router_mapping=tasks,  # gives each column its length, also without a Router
        prompts={name: text for name, text in texts.items() if text},
        batch_sampler=BatchSamplers.NO_DUPLICATES,
        dataloader_drop_last=True,  # a last batch of few pairs would have few negatives
        dataloader_pin_memory=resolved["device"] != "cpu",
        logging_steps=config.logging_steps,
        logging_nan_inf_filter=False,
        save_strategy="steps" if config.save_steps else "no",
        save_steps=config.save_steps or 500,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
    )
    args._n_gpu = min(args.n_gpu, 1)  # With several GPUs the trainer would split each batch, and with it the negatives.
    trainer = AggretrieverTrainer(model=model, args=args, train_dataset=Dataset.from_dict(columns), loss=loss)
    needed = min(resolved["steps"], resolved["steps_in_epoch"])
    sampler: Any = trainer.get_train_dataloader().batch_sampler
    filled = len(list(islice(sampler, needed)))
    if filled < needed:
        raise ValueError(
            f"train: the pairs fill only {filled} of {needed} batches of {config.batch_size} in which no text comes "
            "twice. Lower batch_size or max_steps."
        )
    return trainer


def _prompt(model: SentenceTransformer, task: str) -> str | None:
    """The prompt that ``encode_query`` or ``encode_document`` would use."""
    names = ("query",) if task == "query" else ("document", "passage", "corpus")
    for name in names:
        if name in model.prompts:
            return model.prompts[name]
    return model.prompts.get(model.default_prompt_name or "")


def _check_result(trainer: AggretrieverTrainer, steps: int) -> None:
    if trainer.state.global_step < steps:
        raise ValueError(
            f"train: stopped at step {trainer.state.global_step} of {steps}: an epoch had too few batches in which no "
            "text comes twice. Lower batch_size or max_steps."
        )
    if not all(parameter.isfinite().all() for parameter in trainer.model.parameters()):
        raise ValueError("train: the training diverged (weights are not finite). Lower the learning rates.")


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _finished(start: dict[str, Any], output: Path) -> SentenceTransformer:
    """The model of a run that a kill met after its end, or that was done already."""
    from st_aggretriever.model import load_aggretriever

    _check_same(json.loads((output / RECORD).read_text(encoding="utf-8")), start, output)
    shutil.rmtree(output.with_name(output.name + ".partial"), ignore_errors=True)
    return load_aggretriever(output)


def _check_same(before: dict[str, Any], now: dict[str, Any], where: Path) -> None:
    old, new = before.get("config", {}), json.loads(json.dumps(now["config"]))
    changed = [name for name in new if name not in _FREE and old.get(name) != new[name]]
    if changed:
        found = ", ".join(f"{name} ({old.get(name)}, now {new[name]})" for name in changed)
        raise ValueError(f"train: the run in {where} had other settings: {found}. Resume with the same ones.")
    if before.get("pairs_sha256") != now["pairs_sha256"]:
        raise ValueError(f"train: the run in {where} had other pairs. Resume with the same ones, in the same order.")


@contextmanager
def _working_folder(working: Path, start: dict[str, Any]) -> Iterator[str | None]:
    """Make the folder of a run, or take up the one that is there; gives its last checkpoint.

    On an error it stays if it has a checkpoint, else it goes.
    """
    from transformers.trainer_utils import get_last_checkpoint

    from st_aggretriever.trainer import publish

    checkpoint = None
    if working.exists():
        if not (working / RECORD).is_file():
            raise ValueError(f"train: {working} is not the folder of a run (it has no {RECORD}). Delete or move it.")
        _check_same(json.loads((working / RECORD).read_text(encoding="utf-8")), start, working)
        checkpoint = get_last_checkpoint(str(working))
    else:
        beside = working.with_name(working.name + ".new")
        beside.mkdir(parents=True, exist_ok=True)
        _write_json(beside / RECORD, start)
        publish(beside, working)
    try:
        yield checkpoint
    except BaseException as error:
        last = get_last_checkpoint(str(working))
        if last is None:
            shutil.rmtree(working, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            kept = f"{last} stays, --resume goes on from it" if last else "there was no checkpoint yet, nothing stays"
            raise KeyboardInterrupt(f"interrupted; {kept}") from None
        raise


def _write_model(model: SentenceTransformer, record: dict[str, Any], folder: Path, output: Path) -> None:
    from st_aggretriever.trainer import publish

    try:
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(str(folder), create_model_card=False)
        (folder / "README.md").write_text(_card(model, record), encoding="utf-8")
        _write_json(folder / RECORD, record)
        publish(folder, output)
    except Exception as error:  # Also safetensors' own one for a full disk.
        raise OSError(f"cannot write the model {output}: {error}") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    from st_aggretriever.modules import __version__

    names = ("sentence-transformers", "transformers", "torch", "datasets", "accelerate")
    python = ".".join(map(str, sys.version_info[:3]))
    return {"st-aggretriever": __version__, "python": python, **{name: version(name) for name in names}}


def _card(model: SentenceTransformer, record: dict[str, Any]) -> str:
    """A short model card; the stock one's snippet lacks ``trust_remote_code``, and it quotes training texts."""
    config, resolved = record["config"], record["resolved"]
    pairs = sum(record["pairs"].values())
    base = Path(config["model"]).name if Path(config["model"]).exists() else config["model"]
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags:
- sentence-transformers
- dense-retrieval
- aggretriever
---

# Aggretriever from {base}

A dense retrieval model: queries and documents become vectors of {model.get_embedding_dimension()} dimensions, compared
by dot product (Lin, Li, Lin: Aggretriever, TACL 2023).

```python
from st_aggretriever import load_aggretriever  # pip install st-aggretriever

model = load_aggretriever("path/to/this/folder")
scores = model.similarity(model.encode_query(["a question"]), model.encode_document(["a passage"]))
```

Without that package, by the code that lies beside the weights:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder", trust_remote_code=True)
```

Trained from {base} on {pairs:,} pairs in {resolved["steps"]:,} steps of {config["batch_size"]}, learning rate
{resolved["learning_rate"]:g} (heads {resolved["head_learning_rate"]:g}). `{RECORD}` has all settings and the losses.
"""
