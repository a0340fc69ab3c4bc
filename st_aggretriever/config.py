"""The settings of a training run, with their descriptions and ranges: also the flags of the train command."""

from __future__ import annotations

import math
import os
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

# Settings that a resumed run may change: they don't touch the weights. Without drop_short there is no short row, or
# the run is refused.
FREE = {"output", "pairs", "resume", "drop_short", "save_steps", "logging_steps", "report_to", "report"}
TEACHERS = ("kl_weight", "margin_mse_weight", "contrastive_weight", "temperature", "teacher_batch_size")
# The first setting of each group of ``train --help``.
GROUPS = {
    "model": "what to train, on what",
    "pooling": "the model to build; an Aggretriever keeps its own",
    "lexical_weight": "loss",
    "teacher": "distillation, with negatives in the data",
    "epochs": "schedule",
    "dev_data": "development set",
    "precision": "machine",
    "save_steps": "checkpoints and logs",
}


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

    # What to train, on what
    model: str = field(
        metadata={"help": "masked language model to start from, or an Aggretriever to train further: folder or Hub id"}
    )
    pairs: list[str] = field(
        metadata={
            "help": "files of pairs, Tevatron or mined rows (jsonl, plain or packed; parquet), DPR's json, BEIR or MS "
            "MARCO folders, or Hub ids"
        }
    )
    output: str = field(metadata={"help": "folder for the trained model; must be absent or empty"})
    resume: bool = _option("go on from the last checkpoint, or start where there is none", False)
    negatives: int | None = _option(
        "hard negatives of each row, drawn anew each epoch", shown="all, which must be as many in every row", least=0
    )
    drop_short: bool = _option("leave out rows with fewer negatives than that, instead of refusing the run", False)
    max_bad_rows: int = _option("broken rows to leave out, with a warning, before the run is refused", 0, least=0)

    # The model to build
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

    # Loss
    lexical_weight: float = _option("weight of the lexical part's loss", 0.5, least=0)
    cls_weight: float = _option("weight of the [CLS] part's loss", 0.5, least=0)
    scale: float = _option("factor on the scores in the loss, an inverse temperature", 1.0, above=0)
    fold_dims: list[int] = field(
        default_factory=list,
        metadata={"help": "divisors of D: lexical widths at which the loss is taken too, by folding", "shown": "none"},
    )
    fold_weights: list[float] = field(
        default_factory=list, metadata={"help": "weight of the loss at each of these widths", "shown": "1 each"}
    )
    mini_batch_size: int | None = _option(
        "texts that go through the model at a time (GradCache): memory of these, negatives of the whole batch",
        shown="the whole batch",
        least=1,
    )
    mini_batch_tokens: int | None = _option("the same by tokens: as many texts as have no more together", least=1)
    gather_across_devices: bool = _option("take the passages of all processes as negatives", False)

    # Distillation
    teacher: str | None = _option(
        "whose scores to learn: cross-encoder, embedding or SPLADE model by folder or Hub id; bm25; or data, for the "
        "scores in the data",
    )
    kl_weight: float = _option("weight of the divergence from the teacher's distribution", 1.0, least=0)
    margin_mse_weight: float = _option("weight of the squared error of the score margins", 0.0, least=0)
    contrastive_weight: float = _option("weight of the loss on the labels beside it", 1.0, least=0)
    temperature: float = _option("divides the scores in the divergence", 1.0, above=0)
    teacher_batch_size: int = _option("query and passage pairs that the teacher scores at a time", 32, least=1)

    # Schedule
    epochs: float = _option("passes over the pairs", 3.0, above=0)
    max_steps: int = _option("stop after so many steps instead of epochs; 0 goes by epochs", 0, least=0)
    batch_size: int = _option(
        "pairs in a step of each process, at least 2; all their passages serve as negatives", 32, least=2
    )
    learning_rate: float | None = _option(
        "peak learning rate", shown="5e-6, or 1e-4 for backbones under 20 M parameters and adapters", above=0
    )
    head_learning_rate: float | None = _option(
        "peak learning rate of all modules but the encoder",
        shown="learning_rate; new heads on backbones under 20 M parameters or with adapters ten times that",
        above=0,
    )
    term_weight_learning_rate: float | None = _option("that of the term weight", shown="head_learning_rate", above=0)
    mlm_head_learning_rate: float | None = _option(
        "that of the MLM head; a decoder tied to the word embeddings goes with the encoder",
        shown="learning_rate",
        above=0,
    )
    warmup_ratio: float = _option(
        "share of the steps with a rising learning rate; it then falls to 0", 0.1, least=0, below=1
    )
    seed: int = _option("of new weights, order of the pairs, negatives drawn, dropout", 0, least=0, below=2**32)

    # Development set
    dev_data: str | None = _option(
        "BEIR folder to evaluate on during the run, or nanobeir for the mean nDCG@10 of its 13 sets; it ends with the "
        "best weights"
    )
    dev_split: str = _option("which of its qrels", "dev")
    dev_share: float = _option(
        "hold out this share of the queries, searched among their passages, instead of dev_data", 0.0, least=0, below=1
    )
    dev_metric: str = _option("figure that decides which weights are best", "RR@10", choices=("RR@10", "nDCG@10"))
    eval_steps: int = _option("steps between two evaluations, each with a checkpoint", 500, least=1)
    patience: int = _option("stop after so many evaluations without a new best; 0 never", 0, least=0)

    # Machine
    precision: str = _option(
        "arithmetic of the encoder; auto takes, on a GPU, bf16 where it has that, else fp16; on a CPU fp32",
        "auto",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    device: str = _option("auto takes a GPU if there is one", "auto", choices=("auto", "cpu", "cuda"))
    gradient_checkpointing: bool = _option("less memory for a second forward pass", False)
    lora_rank: int = _option(
        "train adapters of this rank on the encoder's linear layers, merged at the end, instead of the encoder; 0 none",
        0,
        least=0,
    )

    # Checkpoints and logs
    save_steps: int = _option(
        "steps between two checkpoints in OUTPUT.partial, of which the last two stay; 0 writes none; with a "
        "development set each evaluation writes one instead",
        500,
        least=0,
    )
    logging_steps: int = _option("steps between two lines with the losses", 10, least=1)
    report_to: list[str] = field(
        default_factory=list,
        metadata={"help": "tensorboard, wandb or another of transformers' integrations", "shown": "none"},
    )
    report: bool = _option("write report.md and its curves beside the model", True)

    def __post_init__(self) -> None:
        pairs = [self.pairs] if isinstance(self.pairs, (str, os.PathLike)) else self.pairs
        self.pairs = [os.fspath(path) for path in pairs]
        self.model, self.output = os.fspath(self.model), os.fspath(self.output)
        self.mlm_head_from = self.mlm_head_from and os.fspath(self.mlm_head_from)
        self.dev_data = self.dev_data and os.fspath(self.dev_data)
        if not self.pairs:
            raise ValueError("TrainConfig: pairs must name at least one file or folder, got none.")
        for name in ("pairs", "model", "output"):
            if not all(path.strip() for path in (self.pairs if name == "pairs" else [getattr(self, name)])):
                raise ValueError(f"TrainConfig: {name} must name a file or folder, got an empty name.")
        for option in fields(self):
            _check_range(option.name, getattr(self, option.name), option.metadata)
        self._check_together()

    def _check_together(self) -> None:
        if self.dev_data is not None and self.dev_share:
            raise ValueError("TrainConfig: dev_data and dev_share are two development sets. Give one.")
        if self.mini_batch_size is not None and self.mini_batch_tokens is not None:
            raise ValueError("TrainConfig: mini_batch_size and mini_batch_tokens both set the same thing. Give one.")
        self._check_used(("drop_short",), bool(self.negatives), "negatives, a number above 0")
        self._check_used(TEACHERS, self.teacher is not None, "a teacher")
        # NanoBEIR has splits and figures of its own.
        self._check_used(("dev_split",), self.dev_data not in (None, "nanobeir"), "dev_data, a BEIR folder")
        self._check_used(
            ("dev_metric",), self.has_dev_set and self.dev_data != "nanobeir", "dev_data, a BEIR folder, or dev_share"
        )
        if self.teacher is not None and not (self.kl_weight or self.margin_mse_weight):
            raise ValueError("TrainConfig: with a teacher kl_weight or margin_mse_weight must be above 0.")
        if self.fold_weights and len(self.fold_weights) != len(self.fold_dims):
            raise ValueError(
                f"TrainConfig: fold_weights must have one weight for each of the {len(self.fold_dims)} fold_dims, got "
                f"{len(self.fold_weights)}."
            )
        if not all(0 <= weight < math.inf for weight in self.fold_weights):
            raise ValueError(f"TrainConfig: fold_weights must be at least 0 and finite, got {self.fold_weights}.")
        own = self.lexical_dim  # None where it is a trained model's
        fits = all(dim >= 1 and (own is None or (own >= dim and own % dim == 0)) for dim in self.fold_dims)
        if not fits or len(set(self.fold_dims)) < len(self.fold_dims):
            divisors = "" if own is None else f", divisors of lexical_dim {own}"
            raise ValueError(
                f"TrainConfig: fold_dims must be widths of at least 1, each once{divisors}, got {self.fold_dims}."
            )
        if self.lora_rank and self.mlm_head_learning_rate is not None:
            raise ValueError("TrainConfig: lora_rank leaves the MLM head as it is, without mlm_head_learning_rate.")

    def _check_used(self, names: tuple[str, ...], used: bool, needed: str) -> None:
        """Refuse settings that were given, and would do nothing; not of a run begun before they were refused."""
        for name in names:
            if not (used or self.resume) and getattr(self, name) != default_of(name):
                raise ValueError(
                    f"TrainConfig: {name} has nothing to act on without {needed}. Give one, or leave it out."
                )

    @property
    def has_dev_set(self) -> bool:
        return self.dev_data is not None or self.dev_share > 0


def default_of(name: str) -> Any:
    """What a setting is where it isn't given; None for one that must be."""
    option = TrainConfig.__dataclass_fields__[name]
    if option.default is not MISSING:
        return option.default
    return option.default_factory() if option.default_factory is not MISSING else None


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
