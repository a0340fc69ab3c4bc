"""The trainer of sentence-transformers with checkpoints that are whole or absent, early stopping, and a line a log."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformerTrainer
from tqdm.auto import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

if TYPE_CHECKING:
    from st_aggretriever.readers.training import TrainingData

TRAINER_STATE = "trainer_state.json"  # transformers' name
ADAPTED = "adapted.safetensors"  # what a checkpoint holds of a model with LoRA: its trained tensors
SUMS = "losses-{}.json"  # of a process by its number: the sums of its losses since the last line with their means
FILES = "files.json"  # of each of a checkpoint's files, by name: size and CRC-32
_WRITING = "writing"  # Not "checkpoint-N", so that nobody takes what lies in there for a checkpoint.
STOCK_LOGS = {"loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos"}  # The rest are the loss's parts.
STOCK_FIGURES = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch", "step"}
MOST_FIGURES = 6  # that an evaluation's line shows


class AggretrieverTrainer(SentenceTransformerTrainer):
    """Train with checkpoints that survive a kill at any moment.

    The stock trainer writes straight into ``checkpoint-N``; here the files are written into a folder beside it, synced
    to disk and renamed, so a folder of that name is complete. Each logging step prints the loss and its parts to
    stderr, above the progress bar where there is one (``args.disable_tqdm``), and each evaluation its figures.

    Of several processes the first writes. An encoder inside peft's wrapper has in its checkpoints the trained tensors
    alone, beside the optimizer's; the rest of the model is the one that the run was started with.

    Args:
        data: The training data, read row by row from disk, in place of ``train_dataset``.
        patience: Stop after so many evaluations without a new best figure; 0 never does. Needs an evaluator and
            ``args.metric_for_best_model``.
        *args, **kwargs: As :class:`SentenceTransformerTrainer`.
    """

    def __init__(self, *args: Any, data: TrainingData | None = None, patience: int = 0, **kwargs: Any) -> None:
        if data is not None:
            kwargs["train_dataset"] = data.dataset()
        super().__init__(*args, **kwargs)
        self.data = data
        self.patience = patience
        self._writing = False
        self._loss_sum: torch.Tensor | None = None  # the stock trainer's own
        self._earlier: dict[str, Any] = {}  # what a checkpoint has in SUMS
        self.remove_callback(PrinterCallback)
        if not self.args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(_Bar)
        self.add_callback(_Lines)
        if self.evaluator is not None:
            self.add_callback(_Evaluations(self))
        if data is not None:
            from st_aggretriever.readers.known import KnownPositivesCollator

            collator: Any = KnownPositivesCollator(self.data_collator, data)
            self.data_collator = collator
            self.add_callback(_Epochs(data))

    def fit(self, checkpoint: str | None = None) -> None:
        """Train from the start, or go on from a checkpoint; with ``args.load_best_model_at_end`` ends at the best one.

        Raises:
            OSError: A checkpoint cannot be written or read.
            ValueError: The checkpoint is damaged.
            FloatingPointError: The loss or a weight is no longer finite; every checkpoint has finite weights.
        """
        if checkpoint is not None:
            check_checkpoint(Path(checkpoint))
            state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE))
            if state.global_step >= state.max_steps or self.stopped_early(state):
                # The stock trainer would take one step too many before it noticed.
                best = state.best_global_step if self.args.load_best_model_at_end else None
                step = state.global_step if best is None else best
                folder = Path(checkpoint).with_name(f"{PREFIX_CHECKPOINT_DIR}-{step}")
                check_checkpoint(folder)
                self._load_from_checkpoint(str(folder))
                self.state = state
                return
            sums = Path(checkpoint) / SUMS.format(self.args.process_index)
            self._earlier = json.loads(sums.read_text(encoding="utf-8")) if sums.is_file() else {}
        self.train(resume_from_checkpoint=checkpoint)

    def stopped_early(self, state: TrainerState) -> bool:
        """Whether ``patience`` evaluations have passed since the best one, by the log, which a resumed run has too."""
        key = f"eval_{str(self.args.metric_for_best_model or '').removeprefix('eval_')}"
        figures = [entry[key] for entry in state.log_history if key in entry]
        if not self.patience or not figures:
            return False
        best = max(figures) if self.args.greater_is_better else min(figures)
        return len(figures) - 1 - figures.index(best) >= self.patience

    def get_batch_sampler(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if self.data is None:
            return super().get_batch_sampler(dataset, *args, **kwargs)
        return self.data.batch_sampler(dataset, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        # In fp16 a batch may overflow; the gradient's scaler then leaves its step out, and the weights stay finite.
        if not math.isfinite(logs.get("loss", 0.0)) and not (self.args.fp16 and self._is_finite()):
            raise FloatingPointError(f"the loss is {logs['loss']} at step {self.state.global_step}")

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._check_finite()
        # It draws from the random state that dropout goes by; a run with evaluations takes the steps of one without.
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **kwargs)

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Leave it away: it would copy training texts into the model card."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = str(output_dir or self.args.output_dir)
        if self._is_adapted():
            os.makedirs(folder, exist_ok=True)
            trained = {name: tensor.detach().cpu().contiguous() for name, tensor in self._trained().items()}
            save_file(trained, os.path.join(folder, ADAPTED))
            return
        # Without the stock model card, whose snippet lacks trust_remote_code.
        self.model.save_pretrained(folder, create_model_card=False)

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:  # type: ignore[override]
        if not self._is_adapted():
            super()._load_from_checkpoint(checkpoint_path)
            return
        saved, trained = load_file(os.path.join(checkpoint_path, ADAPTED)), self._trained()
        if saved.keys() != trained.keys():
            raise OSError(f"the checkpoint {checkpoint_path} is of other tensors than those that are trained.")
        with torch.no_grad():
            for name, tensor in trained.items():
                tensor.copy_(saved[name])

    def _load_best_model(self) -> None:
        # The stock method turns a failure into a line in the log, and keeps the last weights.
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _is_adapted(self) -> bool:
        encoder: Any = self.model[0]
        return hasattr(getattr(encoder, "model", None), "peft_config")

    def _trained(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad}

    def _is_finite(self) -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in self._trained().values())

    def _check_finite(self) -> None:
        if not self._is_finite():
            raise FloatingPointError(f"weights are not finite at step {self.state.global_step}")

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, _WRITING) if self._writing else folder

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self._earlier:
            # Or the first means of a resumed run would be those of the steps since.
            tr_loss += self._earlier["loss"]
            self._globalstep_last_logged = self._earlier["since"]
            parts = self.accum_loss_components["train"]
            parts |= {name: parts[name] + value for name, value in self._earlier["parts"].items()}
            self._earlier = {}
        self._loss_sum = tr_loss
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _write_sums(self, folder: Path) -> None:
        parts = {name: tensor.item() for name, tensor in self.accum_loss_components["train"].items()}
        loss = 0.0 if self._loss_sum is None else self._loss_sum.item()
        sums = {"loss": loss, "since": self._globalstep_last_logged, "parts": parts}
        (folder / SUMS.format(self.args.process_index)).write_text(json.dumps(sums), encoding="utf-8")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._check_finite()  # or the last good checkpoints would make room for useless ones
        folder = Path(self._get_output_dir(trial))
        beside = folder / _WRITING
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(beside, ignore_errors=True)  # What a kill has left.
        self.accelerator.wait_for_everyone()
        self._writing = True
        try:
            super()._save_checkpoint(model, trial)
            self._write_sums(beside / name)
            self.accelerator.wait_for_everyone()  # Each process has its random state and its losses in there.
            best = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best == name or (folder / best).is_dir():
                # The stock code has looked for it, or recorded it, beside its place.
                self.state.best_model_checkpoint = str(folder / best)
            if self.args.should_save:
                self.state.save_to_json(str(beside / name / TRAINER_STATE))
                (beside / name / FILES).write_text(json.dumps(_measured(beside / name)), encoding="utf-8")
                publish(beside / name, folder / name)
        except Exception as error:  # Also torch's and safetensors' own ones for a full disk.
            raise OSError(f"cannot write the checkpoint {folder / name}: {error}") from error
        finally:
            self._writing = False
            if self.args.should_save:
                shutil.rmtree(beside, ignore_errors=True)
        if self.args.should_save:
            self._rotate(folder, best)

    def _rotate(self, folder: Path, best: str) -> None:
        """Remove all but the last checkpoints and the best; a name goes first, or a kill would leave a half of it."""
        limit = self.args.save_total_limit
        ours = [path for path in folder.iterdir() if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", path.name)]
        found = sorted(ours, key=lambda path: int(path.name.rpartition("-")[2]))
        others = [path for path in found if path.name != best]
        room = len(found) if limit is None else max(1, limit - (len(found) - len(others)))
        for path in others[:-room]:
            path.rename(folder / _WRITING)
            shutil.rmtree(folder / _WRITING, ignore_errors=True)


def check_checkpoint(folder: Path) -> None:
    """Compare a checkpoint's files with what was noted when it was written.

    Raises:
        ValueError: One is missing or has changed; the sentence names it.
    """
    advice = f"Delete {folder} to go on from the checkpoint before it, or from the start where there is none."
    try:
        noted = json.loads((folder / FILES).read_text(encoding="utf-8"))
        wanted = {str(name): list(figures) for name, figures in noted.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        raise ValueError(f"the checkpoint {folder} is damaged: {FILES} is missing or broken. {advice}") from None
    found = _measured(folder)
    for name, figures in wanted.items():
        if name not in found:
            raise ValueError(f"the checkpoint {folder} is damaged: {name} is missing. {advice}")
        if found[name] != figures:
            how = f"has {found[name][0]} bytes, not {figures[0]}" if found[name][0] != figures[0] else "has changed"
            raise ValueError(f"the checkpoint {folder} is damaged: {name} {how}. {advice}")


def _measured(folder: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of each file, by its path in the folder."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILES):
        crc = 0
        with path.open("rb") as file:
            while block := file.read(2**20):
                crc = zlib.crc32(block, crc)
        found[path.relative_to(folder).as_posix()] = [path.stat().st_size, crc]
    return found


def publish(folder: Path, final: Path) -> None:
    """Sync a folder with all it holds to disk, then rename it: ``final`` is whole or absent, whatever happens.

    Args:
        folder: The finished folder, on the file system of ``final``.
        final: Its name to be; an empty folder may be there.

    Raises:
        OSError: ``final`` is not empty, or the file system refuses.
    """
    for path in [*folder.rglob("*"), folder]:
        _sync(path)
    if final.is_dir():
        final.rmdir()
    folder.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows neither needs nor allows it.
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Epochs(TrainerCallback):
    """Says to the data which epoch it is, also where a resumed run of several processes hides the sampler."""

    def __init__(self, data: TrainingData) -> None:
        self.data = data

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.data.set_epoch(int(state.epoch or 0))


class _Evaluations(TrainerCallback):
    def __init__(self, trainer: AggretrieverTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps and args.eval_strategy != "no":
            control.should_evaluate = True  # The last weights may be the best.
        if control.should_evaluate:
            control.should_log = True  # It may be the last one, however rarely losses are asked for.

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.stopped_early(state):
            control.should_training_stop = True


class _Lines(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True  # However short the run, its last losses are known.

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        where = f"step {state.global_step}/{state.max_steps}"
        figures = {name: value for name, value in logs.items() if name.startswith("eval_")}
        if "loss" in logs:
            parts = ", ".join(f"{name} {value:.4f}" for name, value in logs.items() if name not in STOCK_LOGS)
            tqdm.write(
                f"{where}: loss {logs['loss']:.4f} ({parts}), learning rate {logs['learning_rate']:.2e}",
                file=sys.stderr,
            )
        elif figures:
            best = f"eval_{str(args.metric_for_best_model or '').removeprefix('eval_')}"
            shown = {name: value for name, value in figures.items() if name not in STOCK_FIGURES}
            if best in shown and len(shown) > MOST_FIGURES:  # NanoBEIR alone has hundreds.
                shown = {best: shown[best]}
            line = ", ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in shown.items())
            tqdm.write(f"{where}: dev {line}", file=sys.stderr)


class _Bar(ProgressCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Leave the losses to the lines above the bar."""
