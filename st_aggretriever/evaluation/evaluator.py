"""The trainer's evaluator: BEIR folders, or NanoBEIR by name, by the rules of every other figure here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sentence_transformers.base.evaluation import BaseEvaluator

from st_aggretriever.evaluation.beir import evaluate_beir
from st_aggretriever.evaluation.beir_sets import NANO, NUMBERED_APART
from st_aggretriever.evaluation.download import fetch

METRICS = ("nDCG@10", "R@100")


class BeirEvaluator(BaseEvaluator):
    """Evaluate a model in training on BEIR folders; use as ``evaluator=`` of a SentenceTransformerTrainer.

    A call returns ``NAME_nDCG@10`` and ``NAME_R@100`` of each folder, and their means, ``LABEL_nDCG@10`` and
    ``LABEL_R@100``. The former is the ``primary_metric`` (for the trainer ``eval_LABEL_nDCG@10``).

    Args:
        folders: Name -> folder in BEIR's layout; from all but MS MARCO's, by its name, a document with the query's id
            is dropped.
        split: Which qrels.
        label: Of the mean.
        batch_size: Texts a batch.

    Raises:
        ValueError: No folder.

    Example:
        >>> evaluator = BeirEvaluator({"sample": "st_aggretriever/assets/sample"})
        >>> evaluator.primary_metric
        'mean_nDCG@10'
    """

    def __init__(
        self, folders: Mapping[str, str | Path], *, split: str = "test", label: str = "mean", batch_size: int = 32
    ) -> None:
        super().__init__()
        if not folders:
            raise ValueError("BeirEvaluator: expected at least one folder, got none.")
        self.folders = dict(folders)
        self.split = split
        self.label = label
        self.batch_size = batch_size
        self.primary_metric = f"{label}_{METRICS[0]}"

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1, **_: Any
    ) -> dict[str, float]:
        """Figures by metric; with ``output_path`` each folder's result is written there, ``NAME-STEPS.json``."""
        rows = {}
        for name, folder in self.folders.items():
            output = Path(output_path) / f"{name}-{max(steps, 0)}.json" if output_path else None
            options: dict[str, Any] = {"split": self.split, "batch_size": self.batch_size, "output": output}
            options["drop_identical_ids"] = name not in NUMBERED_APART
            was_training = model.training
            try:
                rows[name] = evaluate_beir(model, folder, top_k=100, overwrite=True, **options)["figures"]
            finally:
                model.train(was_training)
        values = {f"{name}_{metric}": row[metric] for name, row in rows.items() for metric in METRICS}
        for metric in METRICS:
            values[f"{self.label}_{metric}"] = sum(row[metric] for row in rows.values()) / len(rows)
        return values


def nano_evaluator(
    names: Sequence[str] = tuple(NANO), *, data: str | Path = "beir-data", hub: str = "", batch_size: int = 32
) -> BeirEvaluator:
    """A :class:`BeirEvaluator` on sets of NanoBEIR, fetched into ``data`` where they aren't yet.

    Args:
        names: ``nano-scifact`` and so on; all thirteen by default.
        data, hub: See :func:`st_aggretriever.evaluation.download.fetch`.

    Raises:
        ValueError: A name that isn't one of NanoBEIR's.
        OSError: A set can't be fetched.
    """
    others = [name for name in names if name not in NANO]
    if others:
        raise ValueError(f"nano_evaluator: expected names of NanoBEIR ({', '.join(NANO)}), got {', '.join(others)}.")
    folders = {name: fetch(name, data, hub=hub)[0] for name in names}
    return BeirEvaluator(folders, label="NanoBEIR", batch_size=batch_size)
