"""Train an Aggretriever: from settings to a model on disk, by one process or several, and on after an interruption."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import sys
import time
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from st_aggretriever.config import TrainConfig, default_of
from st_aggretriever.run_folder import RECORD, check_output, load_finished, read_record, working_folder, write_model
from st_aggretriever.versions import versions

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
    from sentence_transformers.base.evaluation import BaseEvaluator

    from st_aggretriever.readers.training import TrainingData
    from st_aggretriever.trainer import AggretrieverTrainer

TEACHER_SECONDS = 7 * 86_400  # that the other processes wait for the first one's scores, not the usual half an hour
SMALL_BACKBONE = 20_000_000  # parameters: below it the published learning rate of 5e-6 is far too low


class DivergedError(ValueError):
    """A training whose loss or weights are no longer finite."""


def train(config: TrainConfig, *, evaluator: BaseEvaluator | None = None) -> SentenceTransformer:
    """Train by ``config`` and write the model to its output, with ``train.json`` (settings, data, losses) and a report.

    While the run lasts, its checkpoints lie in ``OUTPUT.partial``; ``output`` appears as a whole at the end. On one
    machine the same settings and pairs give the same weights, bit for bit on a CPU, also when the run is interrupted
    and resumed. Under ``torchrun`` or ``accelerate launch`` each process takes its own batches, and the first writes.

    Args:
        config: The settings.
        evaluator: Judges the model every ``config.eval_steps`` steps in place of ``dev_data`` and ``dev_share``, by its
            ``primary_metric``; for instance sentence-transformers' ``NanoBEIREvaluator``.

    Returns:
        The trained model; after evaluations, with the weights of the best one.

    Raises:
        ValueError: A setting, a pair or the starting model doesn't fit; the output or ``OUTPUT.partial`` is in the
            way; the resumed run had other settings or pairs; the training diverged.
        OSError: A file can't be read or written, or the starting model isn't found.
        ImportError: The ``train`` extra, or what a setting needs, is not installed.
        KeyboardInterrupt: It was interrupted; the message says where the checkpoints lie.

    Example:
        >>> config = TrainConfig(model="distilbert-base-uncased", pairs=["pairs.jsonl"], output="agg")
        >>> model = train(config)  # doctest: +SKIP
    """
    _check_environment(config, evaluator)
    output = Path(config.output).resolve()
    working = output.with_name(output.name + ".partial")
    finished = config.resume and (output / RECORD).is_file()
    if not finished and is_first():
        check_output(output, working, resume=config.resume)
    data = _open_data(config)
    start = {
        "config": asdict(config),
        "evaluator": None if evaluator is None else type(evaluator).__name__,
        "processes": processes(),
        "pairs": data.counts,
        "pairs_sha256": data.sha256,
    }
    if finished:
        if read_record(output)["config"].get("model") != config.model:  # perhaps it has moved
            start |= _origin(*starting_model(config))
        return load_finished(start, output, first=is_first())
    data, evaluator = _development_set(config, data, evaluator)
    if len(data) < config.batch_size * processes():
        together = "" if processes() == 1 else f" for {processes()} processes"
        raise ValueError(
            f"train: batch_size must be at most the number of pairs, {len(data)}{together}, got {config.batch_size}."
        )
    model, is_new = starting_model(config)
    start |= _origin(model, is_new)
    if config.lora_rank:
        _adapt(model, config.lora_rank, config.seed)
    resolved = _resolve(config, model, is_new, len(data))
    args = _arguments(config, resolved, model, data, working, evaluator)
    loss = _loss(config, model)
    _check_batches(config, resolved, data)
    _fetch_development_set(config, args)
    with working_folder(working, start, first=is_first()) as checkpoint:
        data, taught_by = _teach(config, resolved, data, args)  # may take hours: all that is refused has been by now
        trainer = _trainer(config, model, data, args, loss, evaluator)
        if config.resume and checkpoint is None:
            say(f"nothing to resume in {working}, a new run starts")
        _say_start(config, resolved, is_new, len(data), checkpoint)
        began = time.monotonic()
        try:
            trainer.fit(checkpoint)
            _check_result(trainer, resolved["steps"])
        except FloatingPointError as error:
            raise DivergedError(_about_divergence(error, config, working)) from None
        if config.lora_rank:
            _merge(model)
        record = {
            **start,
            "data": data.describe(),
            "teacher": taught_by,
            "resolved": resolved,
            "steps": trainer.state.global_step,
            "best_step": trainer.state.best_global_step,
            "steps_before_resuming": int(checkpoint.rpartition("-")[2]) if checkpoint else 0,
            "seconds": round(time.monotonic() - began, 1),
            "memory": _peak_memory(resolved),
            "versions": versions(),
            "losses": [entry for entry in trainer.state.log_history if "loss" in entry],
            "dev": _dev_figures(trainer),
        }
        if is_first():
            write_model(model, record, working, output)
        trainer.accelerator.wait_for_everyone()  # It returns when the output is there, in every process.
    if is_first():
        shutil.rmtree(working, ignore_errors=True)
    return model


def processes() -> int:
    """How many processes train together, as torchrun and accelerate say it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that writes and speaks."""
    return processes() == 1 or os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """One line on stderr, once for all processes."""
    if is_first():
        print(f"train: {line}", file=sys.stderr, flush=True)


def _check_environment(config: TrainConfig, evaluator: BaseEvaluator | None) -> None:
    missing = [name for name in ("datasets", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f'train: {" and ".join(missing)} not installed: pip install "st-aggretriever[train]".')
    if config.lora_rank and importlib.util.find_spec("peft") is None:
        raise ImportError("train: lora_rank needs peft: pip install peft.")
    if config.has_dev_set:
        if evaluator is not None:
            raise ValueError("train: dev_data or dev_share and an evaluator are two development sets. Give one.")
        from st_aggretriever.evaluation.metrics import import_pytrec_eval

        import_pytrec_eval()
    elif evaluator is None:
        for name in ("patience", *(() if config.resume else ("eval_steps",))):  # which a run may have been begun with
            if getattr(config, name) != default_of(name):
                raise ValueError(f"train: {name} needs a development set: give dev_data or dev_share.")
    if config.report_to:
        _check_integrations(config.report_to)


def _check_integrations(names: list[str]) -> None:
    from transformers.integrations import get_available_reporting_integrations

    available = get_available_reporting_integrations()
    for name in names:
        if name not in available:
            raise ImportError(
                f"train: report_to {name!r} is not installed (pip install {name}), or none of transformers' "
                f"integrations; here are {', '.join(available) or 'none'}."
            )


# ---------------------------------------------------------------------------------------------------------------------
# Data and model


def _open_data(config: TrainConfig) -> TrainingData:
    from st_aggretriever.readers.training import open_training_data

    return open_training_data(
        config.pairs,
        negatives=config.negatives,
        drop_short=config.drop_short,
        seed=config.seed,
        max_bad_rows=config.max_bad_rows,
        scores=config.teacher == "data",
    )


def _development_set(
    config: TrainConfig, data: TrainingData, evaluator: BaseEvaluator | None
) -> tuple[TrainingData, BaseEvaluator | None]:
    """The rows to train on, and what judges the model on others."""
    from st_aggretriever.dev import NANOBEIR, DevEvaluator, Named, held_out, nanobeir

    if not config.has_dev_set:
        return data, evaluator and Named(evaluator)

    if config.dev_data == NANOBEIR:
        return data, Named(nanobeir())
    if config.dev_data is not None:
        return data, DevEvaluator.on_folder(config.dev_data, config.dev_split, config.dev_metric)
    data, collection = held_out(data, config.dev_share, config.seed)
    return data, DevEvaluator(collection, config.dev_metric)


def _fetch_development_set(config: TrainConfig, args: SentenceTransformerTrainingArguments) -> None:
    """Bring what dev_data names to this machine, by the first process."""
    from st_aggretriever.dev import NANOBEIR, fetch_nanobeir

    if config.dev_data == NANOBEIR:
        with args.main_process_first(local=False, desc="NanoBEIR"):
            fetch_nanobeir(say)


def _teach(
    config: TrainConfig, resolved: dict[str, Any], data: TrainingData, args: SentenceTransformerTrainingArguments
) -> tuple[TrainingData, dict[str, Any] | None]:
    """The data with the teacher's scores, computed once by the first process, and what the teacher is."""
    if config.teacher is None:
        return data, None
    if data.negatives == 0:
        raise ValueError("train: a teacher ranks passages, but the pairs have no negatives. Mine some first.")
    if config.teacher == "data":
        return data, {"name": "scores in the data"}
    from st_aggretriever.teacher import load_teacher, score_rows

    epochs = range(math.ceil(resolved["steps"] / resolved["steps_in_epoch"]))
    device = None if config.device == "auto" else config.device
    teacher = load_teacher(config.teacher, device=device, batch_size=config.teacher_batch_size)
    with args.main_process_first(local=False, desc="teacher scores"):
        scores = score_rows(data, teacher, epochs=epochs)
    return data.with_teacher(scores), scores.describe()


def starting_model(config: TrainConfig) -> tuple[SentenceTransformer, bool]:
    """The model to train, in float32, and whether its heads are new."""
    from st_aggretriever.model import build_aggretriever, is_aggretriever, load_aggretriever

    given = {
        option.name: getattr(config, option.name)
        for option in fields(config)
        if "build" in option.metadata and getattr(config, option.name) is not None
    }
    _check_files(config.model)
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
        _set_exact(config.model, model)
    bad = [name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]
    if bad:
        raise ValueError(
            f"train: the starting model {config.model} has weights that are not finite ({', '.join(bad[:3])}). Start "
            "from another one."
        )
    _say_lengths(config, model)
    # A checkpoint in half precision comes in half precision, whose steps would be lost in rounding.
    return model.float(), is_new


def _set_exact(name: str, model: SentenceTransformer) -> None:
    """Leave a head's quantisation out, which has no gradient."""
    for module in model:
        quantize = getattr(module, "quantize", "none")
        if quantize != "none":
            module.quantize = "none"  # type: ignore[assignment]
            say(f"{name} has quantize={quantize!r}, which has no gradient: it is trained, and saved, with 'none'")


def _check_files(model: str) -> None:
    """Raises ValueError for a folder with a broken JSON file, which transformers reports without its name."""
    for name in ("modules.json", "config.json", "tokenizer.json", "tokenizer_config.json"):
        path = Path(model) / name
        if path.is_file():
            try:
                json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"train: {path} is broken ({error}). Save or fetch the model again.") from None


def _say_lengths(config: TrainConfig, model: SentenceTransformer) -> None:
    encoder: Any = model[0]
    for name in ("query_length", "document_length"):
        asked, got = getattr(config, name), getattr(encoder, name)
        if asked is not None and got is not None and got < asked:
            say(f"{name} {asked} is cut to {got}, all that the backbone's positions allow")
    hidden_size = encoder.get_embedding_dimension()
    if config.cls_dim is not None and config.cls_dim > hidden_size:
        say(f"cls_dim {config.cls_dim} is above the backbone's width {hidden_size}, which the [CLS] part can't exceed "
            "in rank: it costs space and adds nothing")  # fmt: skip


def _origin(model: SentenceTransformer, is_new: bool) -> dict[str, Any]:
    """What a run's record says of the model that it started from."""
    from st_aggretriever.encoding import model_hash

    return {"model_sha256": model_hash(model), "new_heads": is_new}


def _adapt(model: SentenceTransformer, rank: int, seed: int) -> None:
    """Put LoRA adapters on the encoder's linear layers, and freeze the rest of it; the MLM head stays as it is."""
    import peft
    import torch

    encoder: Any = model[0]
    inner = encoder.model
    inside = {id(module) for module in inner.base_model.modules()}
    targets = [
        name for name, module in inner.named_modules() if isinstance(module, torch.nn.Linear) and id(module) in inside
    ]
    if not targets:
        raise ValueError(f"train: lora_rank needs linear layers in the encoder, {type(inner).__name__} has none.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        encoder.model = peft.get_peft_model(inner, config)


def _merge(model: SentenceTransformer) -> None:
    encoder: Any = model[0]
    encoder.model = encoder.model.merge_and_unload()
    encoder.model.requires_grad_(True)


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
    small = parameters < SMALL_BACKBONE or config.lora_rank > 0  # adapters start from nothing, as heads do
    learning_rate = config.learning_rate or (1e-4 if small else 5e-6)
    head_learning_rate = config.head_learning_rate or learning_rate * (10 if small and is_new else 1)
    together = config.batch_size * processes()
    epoch_steps = pairs // together
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "precision": precision,
        "backbone_parameters": parameters,
        "learning_rate": learning_rate,
        "head_learning_rate": head_learning_rate,
        "term_weight_learning_rate": config.term_weight_learning_rate or head_learning_rate,
        "mlm_head_learning_rate": config.mlm_head_learning_rate or learning_rate,
        "processes": processes(),
        "batch_size_together": together,
        "pairs": pairs,
        "steps": config.max_steps or math.ceil(config.epochs * epoch_steps),
        "steps_in_epoch": epoch_steps,
    }


def _say_start(config: TrainConfig, resolved: dict[str, Any], is_new: bool, pairs: int, checkpoint: str | None) -> None:
    batch = f"{config.batch_size} pairs"
    if processes() > 1:
        batch += f" in each of {processes()} processes, {resolved['batch_size_together']} together"
        batch += ", negatives of all" if config.gather_across_devices else ", negatives of each its own"
    origin = "new heads on" if is_new else "on from the Aggretriever"
    where = f", after {Path(checkpoint).name}" if checkpoint else ""
    say(f"{origin} {config.model}; {pairs} pairs, {resolved['steps']} steps of {batch}{where}")


def _learning_rates(config: TrainConfig, resolved: dict[str, Any], model: SentenceTransformer) -> dict[str, float]:
    """Patterns over the loss's parameter names, and rates; where two match, the later one holds."""
    encoder: Any = model[0]
    trained = [f"model.{name}" for name, parameter in model.named_parameters() if parameter.requires_grad]
    weighting = next((name for name, module in model.named_children() if hasattr(module, "term_weight")), None)
    rates = {r"^model\.(?!0\.)": "head_learning_rate"}  # all modules but the first
    if weighting is not None and config.term_weight_learning_rate is not None:
        rates[rf"^model\.{weighting}\."] = "term_weight_learning_rate"
    if encoder.head and config.mlm_head_learning_rate is not None:
        # Beside the encoder inside the masked language model; a tied decoder has the name of the word embeddings.
        rates[rf"^model\.0\.model\.(?!{encoder.model.base_model_prefix}\.)"] = "mlm_head_learning_rate"
    found = {pattern: name for pattern, name in rates.items() if any(re.search(pattern, key) for key in trained)}
    for name in ("term_weight_learning_rate", "mlm_head_learning_rate"):
        if getattr(config, name) is not None and name not in found.values():
            raise ValueError(f"train: {name} has nothing to act on, the model has no such weights. Leave it out.")
    return {pattern: resolved[name] for pattern, name in found.items()}


def _arguments(
    config: TrainConfig,
    resolved: dict[str, Any],
    model: SentenceTransformer,
    data: TrainingData,
    working: Path,
    evaluator: BaseEvaluator | None,
) -> SentenceTransformerTrainingArguments:
    """The settings in the trainer's words; with several processes, they meet here."""
    from sentence_transformers import SentenceTransformerTrainingArguments

    texts_of_rows = [name for name in data.columns if name != "scores"]
    tasks = {name: "query" if name == "query" else "document" for name in texts_of_rows}
    texts = {name: _prompt(model, task) for name, task in tasks.items()}
    on_cpu = resolved["device"] == "cpu"
    save_steps = config.eval_steps if evaluator is not None else config.save_steps
    asked: dict[str, Any] = {}
    if config.gradient_checkpointing:
        asked["gradient_checkpointing"] = True  # The newest transformers warn of this name, older ones have no other.
    if config.teacher not in (None, "data"):
        asked["ddp_timeout"] = TEACHER_SECONDS
    if evaluator is not None:
        asked |= {
            "eval_strategy": "steps",
            "eval_steps": config.eval_steps,
            "load_best_model_at_end": True,
            "metric_for_best_model": evaluator.primary_metric,
            "greater_is_better": evaluator.greater_is_better,
        }
    args = SentenceTransformerTrainingArguments(
        output_dir=str(working),
        num_train_epochs=config.epochs,
        max_steps=resolved["steps"],
        per_device_train_batch_size=config.batch_size,
        learning_rate=resolved["learning_rate"],
        learning_rate_mapping=_learning_rates(config, resolved, model),
        lr_scheduler_type="linear",
        # Below 1 it is a share, rounded up: all of a single step, which would then be taken at a rate of 0.
        warmup_steps=config.warmup_ratio if resolved["steps"] > 1 else 0,
        bf16=resolved["precision"] == "bf16",
        fp16=resolved["precision"] == "fp16",
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and processes() > 1 else None,
        ddp_find_unused_parameters=False,  # Every parameter that is trained has a gradient.
        seed=config.seed,
        router_mapping=tasks,  # gives each column its length, also without a Router
        prompts={name: text for name, text in texts.items() if text},
        dataloader_drop_last=True,  # a last batch of few pairs would have few negatives
        dataloader_pin_memory=not on_cpu,
        logging_steps=config.logging_steps,
        logging_nan_inf_filter=False,
        save_strategy="steps" if save_steps else "no",
        save_steps=save_steps or 500,
        save_total_limit=2,
        report_to=config.report_to or "none",
        disable_tqdm=not sys.stderr.isatty(),
        **asked,
    )
    args._n_gpu = min(args.n_gpu, 1)  # With several GPUs the trainer would split each batch, and with it the negatives.
    return args


def _loss(config: TrainConfig, model: SentenceTransformer) -> Any:
    from st_aggretriever.losses import AggretrieverLoss, CachedAggretrieverLoss, Distillation

    parts = {"lexical_weight": config.lexical_weight, "cls_weight": config.cls_weight}
    options: dict[str, Any] = {
        **parts,
        "scale": config.scale,
        "fold_dims": tuple(config.fold_dims),
        "fold_weights": tuple(config.fold_weights) or None,
        "gather_across_devices": config.gather_across_devices and processes() > 1,
    }
    if config.teacher is not None:
        options["contrastive_weight"] = config.contrastive_weight
        options["distillation"] = Distillation(
            kl_weight=config.kl_weight,
            margin_mse_weight=config.margin_mse_weight,
            temperature=config.temperature,
            **parts,
        )
    if config.mini_batch_tokens is not None:
        return CachedAggretrieverLoss(model, mini_batch_num_tokens=config.mini_batch_tokens, **options)
    if config.mini_batch_size is not None:
        return CachedAggretrieverLoss(model, mini_batch_size=config.mini_batch_size, **options)
    return AggretrieverLoss(model, **options)


def _check_batches(config: TrainConfig, resolved: dict[str, Any], data: TrainingData) -> None:
    needed = min(resolved["steps"], resolved["steps_in_epoch"]) * processes()
    filled = filled_batches(data, config.batch_size, config.seed, needed)
    if filled < needed:
        raise ValueError(
            f"train: the pairs fill only {filled} of {needed} batches of {config.batch_size} in which no text comes "
            "twice. Lower batch_size or max_steps."
        )


def filled_batches(data: TrainingData, batch_size: int, seed: int, needed: int) -> int:
    """How many of an epoch's first ``needed`` batches there are, in which no text comes twice."""
    import torch

    options = {"batch_size": batch_size, "drop_last": True, "valid_label_columns": []}
    sampler = data.batch_sampler(data.dataset(), **options, generator=torch.Generator(), seed=seed)
    return sum(1 for _ in islice(sampler, needed))


def _trainer(
    config: TrainConfig,
    model: SentenceTransformer,
    data: TrainingData,
    args: SentenceTransformerTrainingArguments,
    loss: Any,
    evaluator: BaseEvaluator | None,
) -> AggretrieverTrainer:
    from st_aggretriever.trainer import AggretrieverTrainer

    return AggretrieverTrainer(
        model=model, args=args, data=data, loss=loss, evaluator=evaluator, patience=config.patience
    )


def _prompt(model: SentenceTransformer, task: str) -> str | None:
    """The prompt that ``encode_query`` or ``encode_document`` would use."""
    names = ("query",) if task == "query" else ("document", "passage", "corpus")
    for name in names:
        if name in model.prompts:
            return model.prompts[name]
    return model.prompts.get(model.default_prompt_name or "")


def _check_result(trainer: AggretrieverTrainer, steps: int) -> None:
    if trainer.state.global_step < steps and not trainer.stopped_early(trainer.state):
        raise ValueError(
            f"train: stopped at step {trainer.state.global_step} of {steps}: an epoch had too few batches in which no "
            "text comes twice. Lower batch_size or max_steps."
        )
    if not all(parameter.isfinite().all() for parameter in trainer.model.parameters()):
        raise FloatingPointError("weights are not finite at the end")


def _about_divergence(error: FloatingPointError, config: TrainConfig, working: Path) -> str:
    """What diverged, and what can be done."""
    from transformers.trainer_utils import get_last_checkpoint

    last = get_last_checkpoint(str(working)) if working.is_dir() else None
    advice = "Train anew with lower learning rates."
    if last is not None:
        where = "and another output (--resume keeps the rates)"
        advice = f"Train anew with lower learning rates {where}."
        if not config.lora_rank:  # whose checkpoints hold the adapters alone
            advice = f"{last} stays, its weights finite: train on from it (--model), or anew, at lower rates {where}."
    return f"train: the training diverged ({error}). {advice}"


def _dev_figures(trainer: AggretrieverTrainer) -> list[dict[str, float]]:
    """The figures of each evaluation, with its step."""
    from st_aggretriever.trainer import STOCK_FIGURES

    return [
        {"step": entry["step"]}
        | {key.removeprefix("eval_"): value for key, value in entry.items() if key not in STOCK_FIGURES}
        for entry in trainer.state.log_history
        if any(key.startswith("eval_") for key in entry)
    ]


def _peak_memory(resolved: dict[str, Any]) -> dict[str, float | None]:
    """Most memory in GB that this process held, and of the GPU; None where the system doesn't say."""
    import torch

    from st_aggretriever.report import peak_rss

    on_gpu = resolved["device"] != "cpu"
    return {"rss_gb": peak_rss(), "gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if on_gpu else None}
