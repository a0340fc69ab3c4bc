"""Scores of a teacher for training rows, computed once and kept on disk.

They lie in ``HF_HOME/st_aggretriever/teachers/HASH``, where HASH is that of the teacher's weights and settings; each
score stands under a hash of its two texts. So they are never stale, serve every run and data set with the same
teacher, and an interrupted computation goes on. The folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from st_aggretriever.atomic import replacing
from st_aggretriever.encoding import model_hash
from st_aggretriever.readers.store import hash_of, key_of
from st_aggretriever.readers.training import TrainingData
from st_aggretriever.search.bm25 import BM25, RULE

PAIRS_AT_ONCE = 1024  # sent to the teacher together, and what an interruption can lose
PAIRS_A_FILE = 65_536
SECONDS_A_FILE = 60.0  # of scoring, which a kill can lose
KEPT_BYTES = 2**29  # of vectors, kept in memory because their texts come again
_LONGEST = 512  # tokens that SPLADE reads of a text
_SPLADE: dict[str, Any] = {
    "activation": "log1p_relu", "term_weight": "none", "aggregation": "none", "excluded_tokens": "none", "cls_dim": 0
}  # fmt: skip
_RECORD = np.dtype([("key", "<u8"), ("score", "<f4")])


class Teacher(Protocol):
    """Scores texts against a query; the scale is its own."""

    name: str
    kind: str

    def hash(self, data: TrainingData) -> str:
        """Of everything that makes the scores, apart from the two texts."""

    def score(self, pairs: Sequence[tuple[str, str]], data: TrainingData) -> np.ndarray:
        """(n,) float32 of (query, passage) pairs."""


class TeacherScores:
    """A teacher's scores by query and passage.

    Args:
        teacher: For its name and kind.
        folder: Where they lie.
    """

    def __init__(self, teacher: Teacher, folder: Path) -> None:
        self.name, self.kind, self.folder = teacher.name, teacher.kind, folder
        parts = [np.empty(0, _RECORD), *map(_load, sorted(folder.glob("*.npy")))]
        self._records = np.sort(np.concatenate(parts), order="key")

    def __call__(self, query: str, passages: Sequence[str]) -> list[float]:
        """The scores of passages for a query.

        Raises:
            ValueError: One hasn't been computed.
        """
        keys = np.array([_pair(query, passage) for passage in passages], np.uint64)
        places, found = self._find(keys)
        if not found.all():
            raise ValueError(f"the teacher {self.name} has no score for a passage of the query {query[:80]!r}.")
        return [float(score) for score in self._records["score"][places]]

    def __contains__(self, pair: int) -> bool:
        return bool(self._find(np.array([pair], np.uint64))[1][0])

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not len(self._records):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
        places = np.minimum(np.searchsorted(self._records["key"], keys), len(self._records) - 1)
        return places, self._records["key"][places] == keys

    def describe(self) -> dict[str, Any]:
        """What the teacher is, in plain JSON values."""
        return {"name": self.name, "kind": self.kind, "hash": self.folder.name}


def score_rows(data: TrainingData, teacher: Teacher, *, epochs: Iterable[int]) -> TeacherScores:
    """Scores of every passage that the rows give in some epochs; computes those that aren't on disk yet.

    Args:
        data: The rows; which negatives they draw in an epoch is known beforehand.
        teacher: See :func:`load_teacher`.
        epochs: Numbers of the epochs that the run will see.

    Raises:
        ValueError: A score isn't finite.
    """
    folder = cache_folder() / teacher.hash(data)
    scores = TeacherScores(teacher, folder)
    folder.mkdir(parents=True, exist_ok=True)
    new: list[np.ndarray] = []
    began = time.monotonic()
    try:
        for block in _blocks(_missing(data, scores, sorted(set(epochs)), teacher.name)):
            values = np.asarray(teacher.score([pair for _, pair in block], data), np.float32)
            bad = np.flatnonzero(~np.isfinite(values))
            if len(bad):
                query, text = block[bad[0]][1]
                raise ValueError(
                    f"the teacher {teacher.name} gives {values[bad[0]]} for {query[:80]!r}, {text[:80]!r}."
                )
            records = np.empty(len(block), _RECORD)
            records["key"], records["score"] = [key for key, _ in block], values
            new.append(records)
            if sum(map(len, new)) >= PAIRS_A_FILE or time.monotonic() - began > SECONDS_A_FILE:
                _write(folder, new)
                began = time.monotonic()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; the teacher's scores so far stay in {folder}, the same command goes on from there"
        ) from None
    finally:
        _write(folder, new)
    return TeacherScores(teacher, folder)


def load_teacher(name: str, *, device: str | None = None, batch_size: int = 32) -> Teacher:
    """A teacher by its name.

    ``"bm25"``; or a folder or Hub id of a cross-encoder, of any model with ``encode_query`` and ``encode_document``
    (sentence-transformers, an Aggretriever, a SparseEncoder), or of a SPLADE checkpoint (a masked language model). Told
    by the files' content.

    Raises:
        OSError: Not found.
        ValueError: A classifier of several classes, or a damaged file.
    """
    if name == "bm25":
        return _BM25()
    kind = _kind(name)
    from st_aggretriever.model import naming

    with naming(name, owner="teacher"):
        return _load_model(name, kind, device, batch_size)


def _load_model(name: str, kind: str, device: str | None, batch_size: int) -> Teacher:
    if kind == "cross-encoder":
        from sentence_transformers import CrossEncoder

        return _Pairs(name, CrossEncoder(name, device=device), batch_size)
    if kind == "splade":
        from st_aggretriever.model import build_aggretriever

        # What SparseEncoder computes, without its (texts, tokens, vocabulary) logits: 2 GB for 32 texts of 512 tokens.
        model = build_aggretriever(name, **_SPLADE, query_length=_LONGEST, document_length=_LONGEST)
        return _Vectors(name, model.to(device) if device else model, batch_size, kind)
    if kind == "sparse encoder":
        from sentence_transformers import SparseEncoder

        return _Vectors(name, SparseEncoder(name, device=device), batch_size, kind)
    from sentence_transformers import SentenceTransformer

    from st_aggretriever.model import is_aggretriever, load_aggretriever

    load: Any = load_aggretriever if is_aggretriever(name) else SentenceTransformer
    return _Vectors(name, load(name, device=device), batch_size, kind)


def cache_folder() -> Path:
    """Where teachers' scores lie, a folder each."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "st_aggretriever" / "teachers"


def _kind(name: str) -> str:
    from sentence_transformers.util import load_file_path

    for file in ("tokenizer.json", "tokenizer_config.json"):  # which transformers reports without their names
        if found := load_file_path(name, file):
            _read_object(found)
    found = load_file_path(name, "config_sentence_transformers.json")
    model_type = _read_object(found).get("model_type") if found else None
    named = {"CrossEncoder": "cross-encoder", "SparseEncoder": "sparse encoder"}
    if model_type in named:
        return named[model_type]
    if load_file_path(name, "modules.json"):
        return "bi-encoder"
    config = load_file_path(name, "config.json")
    if config is None:
        raise OSError(f"teacher {name!r} is no model folder here, and none of the Hub that can be reached.")
    architecture = " ".join(_read_object(config).get("architectures") or [])
    if "ForSequenceClassification" in architecture:
        return "cross-encoder"
    if "ForMaskedLM" in architecture:
        return "splade"
    raise ValueError(
        f"teacher {name!r} is a {architecture or 'model without architecture'}: expected a cross-encoder, an embedder "
        "of sentence-transformers, a SPLADE checkpoint or bm25."
    )


def _read_object(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"teacher: {path} is broken ({error}). Fetch the file again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"teacher: {path} must hold an object of settings. Fetch the file again.")
    return content


# ---------------------------------------------------------------------------------------------------------------------
# Teachers


class _Pairs:
    """A cross-encoder; its scores are its logits."""

    kind = "cross-encoder"

    def __init__(self, name: str, model: Any, batch_size: int) -> None:
        if model.num_labels != 1:
            raise ValueError(
                f"teacher {name!r} has {model.num_labels} classes: expected a cross-encoder with one score."
            )
        self.name, self._model, self._batch_size = name, model, batch_size

    def hash(self, data: TrainingData) -> str:
        return _digest(self.kind, model_hash(self._model), self._model.max_length)

    def score(self, pairs: Sequence[tuple[str, str]], data: TrainingData) -> np.ndarray:
        from torch.nn import Identity

        options = {"batch_size": self._batch_size, "show_progress_bar": False, "activation_fn": Identity()}
        return self._model.predict([list(pair) for pair in pairs], **options)


class _Vectors:
    """Two encoders and the inner product, or cosine where that is the model's similarity."""

    def __init__(self, name: str, model: Any, batch_size: int, kind: str) -> None:
        self.name, self.kind = name, kind
        self._model, self._batch_size = model, batch_size
        self._vectors: dict[tuple[str, str], Any] = {}
        self._bytes = 0

    def hash(self, data: TrainingData) -> str:
        settings = (getattr(self._model, name, None) for name in ("max_seq_length", "similarity_fn_name"))
        return _digest(self.kind, model_hash(self._model), *settings)

    def score(self, pairs: Sequence[tuple[str, str]], data: TrainingData) -> np.ndarray:
        if self._bytes > KEPT_BYTES:
            self._vectors.clear()
            self._bytes = 0
        self._encode("query", dict.fromkeys(query for query, _ in pairs))
        self._encode("document", dict.fromkeys(passage for _, passage in pairs))
        scores = [_product(self._vectors["query", query], self._vectors["document", text]) for query, text in pairs]
        return np.array(scores, np.float32)

    def _encode(self, side: str, texts: Iterable[str]) -> None:
        import torch

        new = [text for text in texts if (side, text) not in self._vectors]
        encode = self._model.encode_query if side == "query" else self._model.encode_document
        cosine = str(getattr(self._model, "similarity_fn_name", None) or "dot").endswith("cosine")
        options: dict[str, Any] = {"batch_size": self._batch_size, "show_progress_bar": False}
        if self.kind != "sparse encoder":
            options["normalize_embeddings"] = cosine
        with torch.inference_mode():
            for start in range(0, len(new), PAIRS_AT_ONCE):
                part = new[start : start + PAIRS_AT_ONCE]
                for text, vector in zip(part, encode(part, convert_to_tensor=True, **options), strict=True):
                    self._vectors[side, text] = kept = _kept(vector)
                    self._bytes += sum(part.nbytes for part in kept) if isinstance(kept, tuple) else kept.nbytes


class _BM25:
    """BM25 over all passages of the data, and positives that don't stand among them."""

    name = kind = "bm25"

    def __init__(self) -> None:
        self._index: BM25 | None = None

    def hash(self, data: TrainingData) -> str:
        return _digest(self.kind, RULE, data.sha256)

    def score(self, pairs: Sequence[tuple[str, str]], data: TrainingData) -> np.ndarray:
        if self._index is None:
            self._index = BM25(_all_passages(data))
            self._places = {key: place for place, key in enumerate(self._index.ids.tolist())}
        scores = np.zeros(len(pairs), np.float32)
        wanted: dict[str, list[int]] = {}
        for place, (query, _) in enumerate(pairs):
            wanted.setdefault(query, []).append(place)
        for places, every in zip(wanted.values(), self._index.scores(list(wanted)), strict=True):
            for place in places:
                scores[place] = every[self._places[str(key_of(pairs[place][1]))]]
        return scores


def _all_passages(data: TrainingData) -> Iterator[tuple[str, str]]:
    """(key, text) of every passage that a row can give, whichever of the rows ``data`` is a subset of."""
    seen = set()
    for _, text, key, _ in data.corpus():
        seen.add(key)
        yield str(key), text
    for source in data.sources:
        for row in range(len(source)):
            start, end = source.positive_starts[row : row + 2]
            if not seen.issuperset(source.positive_keys[start:end].tolist()):  # mined from another collection
                for passage in source.example(row).positives:
                    text = source.text(passage)
                    if (key := key_of(text)) not in seen:
                        seen.add(key)
                        yield str(key), text


def _kept(vector: Any) -> Any:
    """A vector as numpy: dense, or the (ids, values) of a sparse one."""
    if vector.is_sparse or vector.is_sparse_csr or 4 * int((vector != 0).sum()) < len(vector):
        vector = vector.to_sparse_coo().coalesce()
        return vector.indices()[0].cpu().numpy(), vector.values().float().cpu().numpy()
    return vector.float().cpu().numpy()


def _product(query: Any, document: Any) -> float:
    if not isinstance(query, tuple) or not isinstance(document, tuple):
        if isinstance(query, tuple) or isinstance(document, tuple):
            (places, values), dense = (query, document) if isinstance(query, tuple) else (document, query)
            return float(values @ dense[places])
        return float(query @ document)
    _, ours, theirs = np.intersect1d(query[0], document[0], assume_unique=True, return_indices=True)
    return float(query[1][ours] @ document[1][theirs])


# ---------------------------------------------------------------------------------------------------------------------
# Disk


def _missing(
    data: TrainingData, scores: TeacherScores, epochs: Sequence[int], name: str
) -> Iterator[tuple[int, tuple[str, str]]]:
    """(key, (query, passage)) of each pair that isn't on disk, once."""
    now, seen = data.epoch, set()
    texts = [column for column in data.columns if column not in ("query", "scores")]
    try:
        with tqdm(total=len(data) * len(epochs), desc=f"teacher {name}", unit="row", disable=None) as bar:
            for epoch in epochs:
                data.set_epoch(epoch)
                for number in range(len(data)):
                    row = data.row(number)
                    for column in texts:
                        pair = (row["query"], row[column])
                        key = _pair(*pair)
                        if key not in seen and key not in scores:
                            seen.add(key)
                            yield key, pair
                    bar.update()
    finally:
        data.set_epoch(now)


def _blocks(items: Iterator[Any]) -> Iterator[list[Any]]:
    block: list[Any] = []
    for item in items:
        block.append(item)
        if len(block) == PAIRS_AT_ONCE:
            yield block
            block = []
    if block:
        yield block


def _pair(query: str, passage: str) -> int:
    return hash_of(f"{query}\0{passage}")


def _write(folder: Path, records: list[np.ndarray]) -> None:
    """Write records into a file of their own, whose name no other process takes, and forget them."""
    if records:
        with replacing(folder / f"{time.time_ns():020d}-{os.getpid()}.npy", "wb") as file:
            np.save(file, np.concatenate(records), allow_pickle=False)
        records.clear()


def _load(path: Path) -> np.ndarray:
    try:
        records = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is broken ({error}). Delete it.") from None
    if records.dtype != _RECORD:
        raise ValueError(f"{path} holds {records.dtype}, no teacher's scores. Delete it.")
    return records


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:32]
