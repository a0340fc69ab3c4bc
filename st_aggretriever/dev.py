"""The development set of a training run: a BEIR folder, or pairs held out, judged by the rules of evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentence_transformers.base.evaluation import BaseEvaluator

from st_aggretriever.evaluation.beir import Collection, evaluate_collection, read_collection
from st_aggretriever.evaluation.beir_sets import NANO
from st_aggretriever.evaluation.download import fetch
from st_aggretriever.evaluation.evaluator import BeirEvaluator

if TYPE_CHECKING:
    from st_aggretriever.readers.training import TrainingData

METRICS = ("RR@10", "nDCG@10")
NANOBEIR = "nanobeir"  # as dev_data; ./nanobeir is a folder of that name
NANOBEIR_FOLDER = "beir-data"  # where evaluate beir puts it too
DEPTH = 10  # all that these look at


class DevEvaluator(BaseEvaluator):
    """RR@10 and nDCG@10 of a model on one collection, by exact search.

    Args:
        collection: Judged queries and documents, checked.
        metric: Which of the two says how good a model is.
        batch_size: Texts a batch.

    Raises:
        ValueError: Another metric.
    """

    def __init__(self, collection: Collection, metric: str = "RR@10", *, batch_size: int = 64) -> None:
        super().__init__()
        if metric not in METRICS:
            raise ValueError(f"DevEvaluator: metric must be one of {', '.join(METRICS)}, got {metric!r}.")
        self.collection = collection
        self.primary_metric = metric
        self.greater_is_better = True
        self.batch_size = batch_size

    @classmethod
    def on_folder(cls, data: str | Path, split: str = "dev", metric: str = "RR@10") -> DevEvaluator:
        """On one split of a BEIR folder, which is read and checked here.

        Raises:
            FileNotFoundError: A part of the folder is missing.
            ValueError: A bad line, by file and number.
        """
        return cls(read_collection(data, split, ids_in_run=False), metric)

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        result = evaluate_collection(
            model,
            self.collection,
            top_k=DEPTH,
            batch_size=self.batch_size,
            block_size=50_000,
            run=None,
            output=None,
            drop_identical_ids=True,
            backend="auto",
            model_name="dev",
        )
        return {metric: result["figures"][metric] for metric in METRICS}


class Named(BaseEvaluator):
    """Another evaluator with its primary figure under one name, ``"score"``, from the first evaluation on.

    sentence-transformers' own evaluators know theirs only after they have run.
    """

    def __init__(self, evaluator: BaseEvaluator) -> None:
        super().__init__()
        self.evaluator = evaluator
        self.primary_metric = "score"
        self.greater_is_better = evaluator.greater_is_better

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        found: Any = self.evaluator(model, output_path, epoch, steps)  # type: ignore[arg-type]
        if not isinstance(found, dict):
            return {"score": float(found)}
        return {**found, "score": found[self.evaluator.primary_metric]}


def nanobeir() -> BeirEvaluator:
    """On all sets of NanoBEIR, which :func:`fetch_nanobeir` must have brought; the mean nDCG@10 counts."""
    return BeirEvaluator({name: Path(NANOBEIR_FOLDER) / name for name in NANO}, label="NanoBEIR", batch_size=64)


def fetch_nanobeir(say: Callable[[str], None]) -> None:
    """Download what isn't there yet.

    Raises:
        OSError: It can't be had.
    """
    for name in NANO:
        fetch(name, NANOBEIR_FOLDER, say=say)


def held_out(data: TrainingData, share: float, seed: int) -> tuple[TrainingData, Collection]:
    """Take a share of the queries out of the training data, as a collection of all their positives and of the negatives
    that their rows draw in epoch 0.

    A query goes with all its rows, whether it does is drawn from its text and ``seed``: with ``h`` uniform in [0, 1),
    where ``h < share``. A passage may also serve other queries, which stay in training.

    Returns:
        The rows that are left, and the collection.

    Raises:
        ValueError: The share takes no query, or all.
    """
    kept: list[int] = []
    queries: dict[str, str] = {}
    qrels: dict[str, dict[str, int]] = {}
    documents: dict[str, str] = {}  # text -> id
    data.set_epoch(0)
    for number in range(len(data)):
        row = data.row(number)
        query = row["query"]
        digest = hashlib.blake2b(f"{seed}:{query}".encode(), digest_size=8).digest()
        if int.from_bytes(digest, "big") / 2**64 >= share:
            kept.append(number)
            continue
        judged = qrels.setdefault(queries.setdefault(query, f"q{len(queries)}"), {})
        for positive in data.example(number).positives:
            judged[documents.setdefault(data.text_in(number, positive), f"d{len(documents)}")] = 1
        for name in data.columns[2 : 2 + data.negatives]:
            documents.setdefault(row[name], f"d{len(documents)}")
    if not kept or not qrels:
        raise ValueError(
            f"train: dev_share {share} of the queries holds out {len(data) - len(kept)} of {len(data)} pairs; "
            "there must be some on either side."
        )
    counts = {"queries": len(qrels), "documents": len(documents), "dangling_qrels": 0, "queries_without_relevant": 0}
    corpus = [(key, text) for text, key in documents.items()]
    texts = {key: query for query, key in queries.items()}
    return data.subset(kept), Collection("held out pairs", "dev", texts, qrels, lambda: corpus, counts, {})
