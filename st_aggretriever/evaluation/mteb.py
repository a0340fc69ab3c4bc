"""MTEB: its own tasks and scores, our search as the index, and a name and revision that belong to one model only.

``mteb`` keeps results by the model's name and revision, and both are empty for a model from a local folder: a second
checkpoint silently gets the first one's scores. Here the revision is the hash of the model unless another is given, and
one (name, revision) is never used for two models.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from st_aggretriever.atomic import replacing
from st_aggretriever.encoding import Encoder, count_truncated, length_limit, model_hash, prompt_of
from st_aggretriever.search.exact import search
from st_aggretriever.versions import versions

try:
    import mteb
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.models import SearchEncoderWrapper, SentenceTransformerEncoderWrapper
    from mteb.types import PromptType
except ImportError as error:
    raise ImportError(f"evaluation on MTEB needs mteb ({error}). pip install st-aggretriever[mteb]") from error

logger = logging.getLogger(__name__)

RULES = [
    "mteb's tasks and measures (pytrec_eval); retrieval figures are means over the queries with a relevant document",
    "retrieval hits by exact search over all documents, equal scores by document id, descending",
    "a document whose id is the query's stays in unless the task says otherwise (ignore_identical_ids)",
    "figures are mteb's main_score of each task, split and subset",
]


def evaluate_mteb(
    model: Any,
    tasks: Sequence[Any],
    output: str | Path,
    *,
    name: str,
    revision: str | None = None,
    batch_size: int = 32,
    backend: str = "auto",
) -> dict[str, Any]:
    """Run ``mteb.evaluate`` and gather its figures; what ``output`` holds already is not run again.

    Args:
        model: A SentenceTransformer.
        tasks: mteb's tasks, see :func:`find_tasks`, or your own.
        output: Folder for mteb's results, one file a task, with the ``model_meta.json`` that a leaderboard submission
            takes; and for ``st_aggretriever.json``, what this function returns.
        name: Of the model, ``organisation/name``; a bare name gets the organisation ``local``.
        revision: Commit or version; None takes the model's hash.
        batch_size: Texts a batch.
        backend: See :func:`st_aggretriever.search.exact.search`.

    Returns:
        ``figures`` (task -> split -> subset -> main score) with rules, prompts, truncated texts and versions.

    Raises:
        ValueError: No task; the name and revision belong to another model in ``output``; a similarity that the search
            doesn't have.
        OSError: A task's data can't be had.
    """
    if not tasks:
        raise ValueError("evaluate_mteb: expected at least one task, got none.")
    encoder = Encoder(model, batch_size)  # refuses other similarities
    hashed = model_hash(model)
    name = name if "/" in name else f"local/{name}"
    revision = revision or (hashed or "unknown")[:16]
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"{output} is a file. Name a folder.")
    output.mkdir(parents=True, exist_ok=True)
    _claim(output, f"{name}@{revision}", hashed)
    counting = _counting(model, name, revision)
    device = str(getattr(model, "device", "cpu"))
    device = device if device.startswith("cuda") else "cpu"
    index = ExactIndex(normalise=encoder.similarity == "cosine", backend=backend, device=device)
    results = []
    cache = mteb.ResultCache(cache_path=output)
    for task in tasks:
        # Only retrieval tasks search; the other kinds take the encoder as it is.
        wrapped = (
            SearchEncoderWrapper(counting, index_backend=index) if isinstance(task, AbsTaskRetrieval) else counting
        )
        results += mteb.evaluate(
            wrapped, task, cache=cache, encode_kwargs={"batch_size": batch_size, "show_progress_bar": False},
            co2_tracker=False, show_progress_bar=False,
        ).task_results  # fmt: skip
    result = {
        "benchmark": "mteb",
        "model": name,
        "revision": revision,
        "model_hash": hashed,
        "figures": {found.task_name: _main_scores(found) for found in results},
        "rules": [encoder.rule, *RULES],
        "datasets": {found.task_name: found.dataset_revision for found in results},
        # Of the tasks run now; results that were there already keep their figures only.
        "counts": {task: dict(counts) for task, counts in counting.counts.items()},
        "prompts": {task.metadata.name: prompts_of(counting, task) for task in tasks},
        "lengths": {side: length_limit(model, side) for side in ("query", "document")},
        "search": {"backend": backend, "device": device},
        "seconds": {found.task_name: found.evaluation_time for found in results},
        "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    with replacing(output / "st_aggretriever.json") as file:
        file.write(json.dumps(result, indent=2) + "\n")
    return result


def find_tasks(names: Sequence[str], benchmark: str | None) -> list[Any]:
    """mteb's tasks by their names, or all tasks of a benchmark.

    Raises:
        ValueError: Neither or both are given, or mteb knows no such name.
    """
    if bool(names) == (benchmark is not None):
        raise ValueError("evaluate mteb: give either --tasks or --benchmark.")
    try:
        if benchmark is not None:
            return list(mteb.get_benchmark(benchmark).tasks)
        return [mteb.get_task(name) for name in names]
    except KeyError as error:
        raise ValueError(
            f"evaluate mteb: mteb {mteb.__version__} says: {str(error.args[0]).removeprefix('KeyError: ')}"
        ) from None


class ExactIndex:
    """Our search behind mteb's index protocol: exact, ties at the cut by document id, descending.

    Args:
        normalise: Bring vectors to length 1 first, for models that compare by cosine.
        backend, device: See :func:`st_aggretriever.search.exact.search`.
    """

    def __init__(self, *, normalise: bool, backend: str = "auto", device: str = "cpu") -> None:
        self.normalise = normalise
        self.backend = backend
        self.device = device
        self.clear()

    def clear(self) -> None:
        """Forget all documents."""
        self.blocks: list[tuple[list[str], np.ndarray]] = []

    def add_documents(self, embeddings: Any, idxs: list[str]) -> None:
        """Replace what an earlier task left by the documents of a new one: mteb adds a corpus in one piece."""
        self.blocks = [(list(idxs), self._vectors(embeddings))]

    def search(
        self,
        embeddings: Any,
        top_k: int,
        similarity_fn: Callable[[Any, Any], Any],
        top_ranked: Any = None,
        query_idx_to_id: dict[int, str] | None = None,
    ) -> tuple[list[list[float]], list[list[int]]]:
        """Scores and positions of the best documents of each query, (Q, k) each; see mteb's protocol."""
        queries = self._vectors(embeddings)
        ids, vectors = self.blocks[0]
        place = {key: position for position, key in enumerate(ids)}
        if top_ranked is None:
            hits = search(queries, self.blocks, top_k, backend=self.backend, device=self.device)
            return hits.scores.tolist(), [[place[key] for key in row] for row in hits.ids.tolist()]
        scores, positions = [], []
        for row, query in enumerate(queries):
            candidates = list(top_ranked[(query_idx_to_id or {})[row]])
            products = vectors[[place[key] for key in candidates]] @ query
            best = np.argsort(-products, kind="stable")[:top_k]
            scores.append(products[best].tolist())
            positions.append(best.tolist())  # among the candidates, as mteb expects
        return scores, positions

    def _vectors(self, embeddings: Any) -> np.ndarray:
        if hasattr(embeddings, "detach"):
            embeddings = embeddings.detach().cpu().float().numpy()
        vectors = np.ascontiguousarray(embeddings, dtype=np.float32)
        if self.normalise:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors


class CountingWrapper(SentenceTransformerEncoderWrapper):
    """mteb's wrapper, which also counts texts, and those that the model cuts, by task and side."""

    counts: dict[str, Counter[str]]

    def encode(self, inputs: Any, *, task_metadata: Any, prompt_type: Any = None, **kwargs: Any) -> Any:
        texts = [text for batch in inputs for text in batch["text"]]
        side = "query" if prompt_type == PromptType.query else "document"
        counts = self.counts.setdefault(task_metadata.name, Counter())
        counts[f"{side}_texts"] += len(texts)
        cut = count_truncated(self.model, texts, side, prompt=self.prompt_text(task_metadata, prompt_type))
        if cut is not None:
            counts[f"truncated_{side}_texts"] += cut
        return super().encode(inputs, task_metadata=task_metadata, prompt_type=prompt_type, **kwargs)

    def prompt_text(self, task_metadata: Any, prompt_type: Any) -> str:
        """The prompt that mteb picks for a task, else the model's own for this side."""
        name = self.get_prompt_name(task_metadata, prompt_type)
        chosen = (self.model_prompts or {}).get(name or "")
        return chosen or prompt_of(self.model, "query" if prompt_type == PromptType.query else "document")


def prompts_of(model: CountingWrapper, task: Any) -> dict[str, str]:
    """The prompts of a task: side -> text."""
    sides = (PromptType.query, PromptType.document)
    return {side.value: model.prompt_text(task.metadata, side) for side in sides}


def format_mteb(result: dict[str, Any]) -> str:
    """Figures, prompts, cut texts and rules for people."""
    lines = [f"{result['model']} ({result['revision']}) on MTEB", ""]
    for task, splits in result["figures"].items():
        for split, subsets in splits.items():
            lines += [f"{task:40} {split:10} {subset:10} {score:.4f}" for subset, score in subsets.items()]
    lines.append("")
    for task, prompts in result["prompts"].items():
        lines.append(f"{task}: query prompt {prompts['query']!r}, document prompt {prompts['document']!r}")
    for task, counts in result["counts"].items():
        lines.append(f"{task}: " + ", ".join(f"{key.replace('_', ' ')} {count:,}" for key, count in counts.items()))
    return "\n".join([*lines, *(f"- {rule}" for rule in result["rules"])])


def _counting(model: Any, name: str, revision: str) -> CountingWrapper:
    with _quiet():
        wrapped = CountingWrapper(model)
    wrapped.counts = {}
    wrapped.mteb_model_meta = wrapped.mteb_model_meta.model_copy(update={"name": name, "revision": revision})
    return wrapped


@contextmanager
def _quiet() -> Iterator[None]:
    """Without mteb's warning that a model has no prompts: they are printed with the figures."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _claim(output: Path, key: str, hashed: str | None) -> None:
    """Remember whose name and revision this is."""
    path = output / "models.json"
    try:
        owners: Any = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        owners = None
    if not isinstance(owners, dict):
        raise ValueError(f"{path} is broken. Name another --output.")
    if owners.setdefault(key, hashed) != hashed:
        raise ValueError(
            f"{output} holds results of another model under the name and revision {key}. Give this one another"
            " --revision, or another --output."
        )
    with replacing(path) as file:
        file.write(json.dumps(owners, indent=2) + "\n")


def _main_scores(result: Any) -> dict[str, dict[str, float]]:
    return {
        split: {entry["hf_subset"]: float(entry["main_score"]) for entry in entries}
        for split, entries in result.scores.items()
    }
