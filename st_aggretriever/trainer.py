"""The trainer of sentence-transformers with checkpoints that are whole or absent, and a line for each logging step."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformerTrainer
from tqdm.auto import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

TRAINER_STATE = "trainer_state.json"  # transformers' name
_WRITING = "writing"  # Not "checkpoint-N", so that nobody takes what lies in there for a checkpoint.
_STOCK_LOGS = {"loss", "grad_norm", "learning_rate", "epoch", "total_flos"}  # The rest are the parts of the loss.


class AggretrieverTrainer(SentenceTransformerTrainer):
    """Train with checkpoints that survive a kill at any moment.

    The stock trainer writes straight into ``checkpoint-N``; here the files are written into a folder beside it, synced
    to disk and renamed, so a folder of that name is complete. Each logging step prints the loss and its parts to
    stderr, above the progress bar where there is one (``args.disable_tqdm``).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._writing = False
        self.remove_callback(PrinterCallback)
        if not self.args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(_Bar)
        self.add_callback(_Lines)

    def fit(self, checkpoint: str | None = None) -> None:
        """Train from the start, or go on from a checkpoint.

        Raises:
            OSError: A checkpoint cannot be written.
        """
        if checkpoint is not None:
            state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE))
            if state.global_step >= state.max_steps:
                # The stock trainer would take one step too many before it noticed.
                self._load_from_checkpoint(checkpoint)
                self.state = state
                return
        self.train(resume_from_checkpoint=checkpoint)

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Leave it away: it would copy training texts into the model card."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # Without the stock model card, whose snippet lacks trust_remote_code.
        self.model.save_pretrained(str(output_dir or self.args.output_dir), create_model_card=False)

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, _WRITING) if self._writing else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial))
        beside = folder / _WRITING
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        shutil.rmtree(beside, ignore_errors=True)  # What a kill has left.
        self._writing = True
        try:
            super()._save_checkpoint(model, trial)
            best = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best == name or (folder / best).is_dir():
                # The stock code has looked for it, or recorded it, beside its place.
                self.state.best_model_checkpoint = str(folder / best)
                self.state.save_to_json(str(beside / name / TRAINER_STATE))
            publish(beside / name, folder / name)
        except Exception as error:  # Also torch's and safetensors' own ones for a full disk.
            raise OSError(f"cannot write the checkpoint {folder / name}: {error}") from error
        finally:
            self._writing = False
            shutil.rmtree(beside, ignore_errors=True)
        rotate_checkpoints(
            output_dir=str(folder),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
        )


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


class _Lines(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            parts = ", ".join(f"{name} {value:.4f}" for name, value in logs.items() if name not in _STOCK_LOGS)
            tqdm.write(
                f"step {state.global_step}/{state.max_steps}: loss {logs['loss']:.4f} ({parts}), "
                f"learning rate {logs['learning_rate']:.2e}",
                file=sys.stderr,
            )


class _Bar(ProgressCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Leave the losses to the lines above the bar."""
