"""Hard negatives: what a model, or BM25, ranks highest for a query and is none of its positives.

By inner product and this package's exact search. Left out are all documents that are a known positive of the query
anywhere in the data, or have the text or the id of one, documents that have the query's own text, and those
without text.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from st_aggretriever.atomic import check_output, partial_of, replacing
from st_aggretriever.bulk import Source, encode_to_disk
from st_aggretriever.encoding import Encoder, model_hash
from st_aggretriever.readers.mined import FORMAT, MinedSource, relative
from st_aggretriever.readers.store import EMPTY, BadRows, Passages, find_first, hash_of, key_of
from st_aggretriever.readers.training import TrainingData
from st_aggretriever.search.bm25 import BM25, best_of
from st_aggretriever.search.exact import search
from st_aggretriever.vectors.folder import VectorFolder
from st_aggretriever.versions import versions

QUERIES = 20_000  # searched at a time, and what an interruption can lose; with 200 hits each they need 100 MB
BLOCK = 20_000  # documents encoded at a time


@dataclass(frozen=True, kw_only=True)
class MiningSettings:
    """Which of the hits of a query are kept.

    Args:
        depth: How many hits that are no positives to look at.
        ranks: First and last rank among those that is kept, counted from 1; None keeps all.
        margin: Keep only scores of at most the positive's minus this.
        relative_margin: Keep only scores of at most the positive's minus this share of its absolute value.
        negatives: How many training will draw from a row, which is how many it must have.
        drop_short: Leave out rows that have fewer, instead of stopping.

    Of a row's several positives the best-scored one counts for a margin.

    Raises:
        ValueError: A value is out of its range, or the ranks can't give ``negatives``.
    """

    depth: int = 200
    ranks: tuple[int, int] | None = None
    margin: float | None = None
    relative_margin: float | None = None
    negatives: int = 1
    drop_short: bool = False

    def __post_init__(self) -> None:
        for name in ("depth", "negatives"):
            if getattr(self, name) < 1:
                raise ValueError(f"mine: {name} must be at least 1, got {getattr(self, name)}.")
        first, last = self.kept_ranks
        if not 1 <= first <= last <= self.depth:
            raise ValueError(f"mine: ranks must be within 1 and the depth of {self.depth}, got {first} to {last}.")
        if last - first + 1 < self.negatives:
            raise ValueError(
                f"mine: {self.negatives} negatives can't come from a range of {last - first + 1} ranks. Lower "
                "--negatives, or raise --depth or widen --ranks."
            )
        if self.margin is not None and not math.isfinite(self.margin):
            raise ValueError(f"mine: margin must be finite, got {self.margin}.")
        if self.margin is not None and self.relative_margin is not None:
            raise ValueError("mine: give a margin or a relative margin, not both.")
        if self.relative_margin is not None and not 0 <= self.relative_margin < 1:
            raise ValueError(f"mine: relative_margin must be at least 0 and below 1, got {self.relative_margin}.")

    @property
    def kept_ranks(self) -> tuple[int, int]:
        return self.ranks or (1, self.depth)

    def highest(self, positive: float) -> float:
        """The highest score that a negative may have."""
        if self.margin is not None:
            return positive - self.margin
        if self.relative_margin is not None:
            return positive - self.relative_margin * abs(positive)
        return np.inf


class Documents(NamedTuple):
    """What is mined from, by position; texts that are empty are left out."""

    stream: Callable[[], Iterator[tuple[str, str]]]  # -> (position as string, text)
    ids: np.ndarray  # (N,) bytes
    keys: np.ndarray  # (N,) uint64, of the texts
    hashes: np.ndarray  # (N,) uint64, of the ids that positives may have too; 0 without
    file_sha256: str  # of what they were read from
    sha256: str  # of ids and texts
    apart: bool  # whether the ids are those of the data's own collections, see TrainingData.known_positives


def mine(
    model: Any,
    data: TrainingData,
    output: str | Path,
    *,
    settings: MiningSettings | None = None,
    model_name: str = "unnamed",
    corpus: str | None = None,
    batch_size: int = 32,
    backend: str = "auto",
) -> dict[str, Any]:
    """Mine negatives for every row and write them to a file that training reads.

    The documents' vectors lie in ``OUTPUT.partial`` until the file is complete: called again after an interruption, or
    with other settings, it goes on from there.

    Args:
        model: A SentenceTransformer, or None for BM25.
        data: The rows; without a ``corpus`` also what is mined from: its collection, or all passages of its rows.
        output: The file; must not exist.
        settings: Which hits are kept.
        model_name: How the file names the model.
        corpus: A collection (``id<tab>text``, or JSON lines) or BEIR folder to mine from instead.
        batch_size: Texts a batch.
        backend: Of the search, see :func:`st_aggretriever.search.exact.search`.

    Returns:
        The manifest, which is the file's first line.

    Raises:
        FileExistsError: The output exists.
        ValueError: A row has fewer candidates than ``settings.negatives``, and ``settings.drop_short`` is off.
    """
    settings = settings or MiningSettings()
    if batch_size < 1:
        raise ValueError(f"mine: batch_size must be at least 1, got {batch_size}.")
    if not data.is_whole:
        raise ValueError("mine: expected all rows of the data, got a part of them. Open them without drop_short.")
    output = Path(output)
    check_output(output)
    documents = _documents(data, corpus)
    working = partial_of(output)
    if working.exists() and not (working / "mining").is_file():
        raise FileExistsError(f"{working} is in the way: it is not the folder of a mining run. Move it.")
    working.mkdir(exist_ok=True)
    (working / "mining").touch()
    encoder = None if model is None else Encoder(model, batch_size)
    manifest = {
        "format": FORMAT,
        "model": model_name if model is not None else "bm25",
        "model_hash": None if model is None else model_hash(model),
        **asdict(settings),
        "ranks": list(settings.kept_ranks),
        "data": [relative(path, output.resolve().parent) for path in data.opened_with[0]],
        "data_sha256": data.sha256,
        "split": data.opened_with[1].get("split", "train"),
        "max_bad_rows": data.opened_with[1].get("max_bad_rows", 0),
        "corpus": None if corpus is None else relative(_corpus_file(corpus), output.resolve().parent),
        "corpus_sha256": documents.file_sha256,
        "documents": len(documents.ids),
    }
    if encoder is None:
        miner: _Miner = _BM25Miner(documents)
    else:
        folder = _encode(encoder, documents, working / "documents", model_name, batch_size)
        miner = _DenseMiner(encoder, folder, backend)
    parts = working / f"rows-{hashlib.sha256(json.dumps(manifest).encode()).hexdigest()[:16]}"
    parts.mkdir(exist_ok=True)
    counts = _mine_parts(miner, data, documents, settings, parts)
    if not counts["rows"]:
        raise ValueError(f"mine: no row has {settings.negatives} candidates. {_advice(settings)}")
    manifest |= {**counts, "versions": versions()}
    with replacing(output) as file:
        file.write(json.dumps(manifest, ensure_ascii=False) + "\n")
        for part in sorted(parts.glob("*.jsonl")):
            with part.open(encoding="utf-8") as lines:
                next(lines)  # the part's counts
                shutil.copyfileobj(lines, file)
    shutil.rmtree(working)
    return manifest


# ---------------------------------------------------------------------------------------------------------------------
# What is mined from


def _corpus_file(corpus: str) -> str:
    return str(find_first(corpus, "corpus.jsonl", "collection.tsv")) if Path(corpus).is_dir() else corpus


def _documents(data: TrainingData, corpus: str | None) -> Documents:
    ids: list[bytes] = []
    keys, hashes = [], []
    digest = hashlib.sha256()
    every: Callable[[], Iterator[tuple[str, str, int, int]]] = data.corpus
    if corpus is not None:
        passages = Passages(_corpus_file(corpus), BadRows(0, str))

        def every() -> Iterator[tuple[str, str, int, int]]:
            yield from ((key, text, key_of(text), hash_of(key)) for key, text in passages.stream())

    for key, _, text_key, hashed in every():
        if text_key != EMPTY:
            ids.append(key.encode())
            keys.append(text_key)
            hashes.append(hashed)
            digest.update(f"{key}\t{text_key}\n".encode())
    if not ids:
        raise ValueError(f"mine: {corpus or 'the data'} holds no text to mine from.")

    def stream() -> Iterator[tuple[str, str]]:
        filled = (text for _, text, text_key, _ in every() if text_key != EMPTY)
        yield from ((str(number), text) for number, text in enumerate(filled))

    apart = corpus is None and not any(isinstance(source, MinedSource) for source in data.sources)
    return Documents(
        stream,
        np.array(ids),
        np.array(keys, np.uint64),
        np.array(hashes, np.uint64),
        digest.hexdigest() if corpus is None else passages.sha256,
        digest.hexdigest(),
        apart,
    )


def _encode(encoder: Encoder, documents: Documents, folder: Path, name: str, batch_size: int) -> VectorFolder:
    """The documents' vectors on disk, from an earlier run where it had the same model and documents."""
    source = f"documents {documents.sha256}"
    made_by = model_hash(encoder.model)
    if folder.exists():
        found = VectorFolder(folder)
        made = (found.manifest["source"], found.manifest["model_hash"], found.manifest["model"])
        # By its content the same model; an object without weights is known by its name alone.
        if made[:2] == (source, made_by) and (made_by is not None or made[2] == name):
            return found
        raise ValueError(f"{folder} holds vectors of another model or corpus. Name another output, or remove it.")
    return encode_to_disk(
        encoder.model,
        Source(source, documents.stream),
        folder,
        batch_size=batch_size,
        block_size=BLOCK,
        model_name=name,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Miners


class _Miner:
    def find(self, queries: Sequence[str], top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and positions of each query's best documents, (Q, k) each, best first; position -1 is none."""
        raise NotImplementedError

    def score(self, pairs: Sequence[tuple[int, int]], texts: Callable[[int], str]) -> list[float]:
        """Scores of (query's place in what was searched last, position); a position of -1 - n is text n."""
        raise NotImplementedError


class _DenseMiner(_Miner):
    def __init__(self, encoder: Encoder, folder: VectorFolder, backend: str) -> None:
        self.encoder, self.folder, self.backend = encoder, folder, backend
        self.queries = np.empty((0, 0), np.float32)

    def find(self, queries: Sequence[str], top_k: int) -> tuple[np.ndarray, np.ndarray]:
        with tqdm(total=len(queries), desc="queries", unit="query", disable=None) as bar:
            self.queries = self.encoder.block(queries, "query", bar)
        hits = search(self.queries, self.folder.blocks(), top_k, backend=self.backend)
        return hits.scores, hits.ids.astype(np.int64)

    def score(self, pairs: Sequence[tuple[int, int]], texts: Callable[[int], str]) -> list[float]:
        scores = np.zeros(len(pairs), np.float32)
        size = self.folder.manifest["block_size"]
        by_block: dict[int, list[int]] = {}
        for place, (_, position) in enumerate(pairs):
            by_block.setdefault(position // size if position >= 0 else -1, []).append(place)
        for number, places in by_block.items():
            rows = [pairs[place][0] for place in places]
            positions = [pairs[place][1] for place in places]
            if number < 0:  # not in the corpus that is mined from
                parts = [texts(-1 - position) for position in positions]
                with tqdm(total=len(parts), desc="positives", unit="text", disable=None) as bar:
                    vectors = self.encoder.block(parts, "document", bar)
            else:
                vectors = self.folder.read(number)[1][np.array(positions) % size].astype(np.float32)
            scores[places] = np.einsum("nd,nd->n", self.queries[rows], vectors)
        return [float(score) for score in scores]


class _BM25Miner(_Miner):
    def __init__(self, documents: Documents) -> None:
        self.index = BM25(documents.stream())
        self.positions = np.arange(len(self.index.ids)).astype(object)
        self.queries: list[str] = []

    def find(self, queries: Sequence[str], top_k: int) -> tuple[np.ndarray, np.ndarray]:
        self.queries = list(queries)
        k = min(top_k, len(self.positions))
        scores, positions = np.zeros((len(queries), k), np.float32), np.full((len(queries), k), -1, np.int64)
        for row, every in enumerate(tqdm(self.index.scores(self.queries), total=len(queries), disable=None)):
            best = best_of(every, self.positions, k)
            width = best.ids.size
            scores[row, :width], positions[row, :width] = best.scores[0], best.ids[0].astype(np.int64)
        return scores, positions

    def score(self, pairs: Sequence[tuple[int, int]], texts: Callable[[int], str]) -> list[float]:
        wanted: dict[int, list[int]] = {}
        for place, (query, _) in enumerate(pairs):
            wanted.setdefault(query, []).append(place)
        scores = [0.0] * len(pairs)
        for query, every in zip(wanted, self.index.scores([self.queries[query] for query in wanted]), strict=True):
            for place in wanted[query]:
                position = pairs[place][1]
                # BM25 has no score for a text that isn't in its index.
                scores[place] = float(every[position]) if position >= 0 else 0.0
        return scores


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def _mine_parts(
    miner: _Miner, data: TrainingData, documents: Documents, settings: MiningSettings, parts: Path
) -> dict[str, int]:
    """Write the rows of each ``QUERIES`` queries into a file of their own, if it isn't there yet; returns counts."""
    first, group = np.unique(data.query_keys, return_index=True, return_inverse=True)[1:]
    order = np.argsort(first, kind="stable")  # queries in the order in which they come first
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    number = rank[group]  # of each row's query
    by_number = np.argsort(number, kind="stable")
    total = {"rows": 0, "dropped_rows": 0, "queries": 0}
    for start in tqdm(range(0, len(order), QUERIES), desc="mining", unit="part", disable=None):
        stop = min(start + QUERIES, len(order))
        low, high = np.searchsorted(number[by_number], [start, stop])
        part = parts / f"{start:012d}.jsonl"
        if not part.exists():
            lines, counts = _mine_rows(miner, data, documents, settings, by_number[low:high].tolist())
            with replacing(part) as file:
                file.write(json.dumps(counts) + "\n")
                file.writelines(lines)
        with part.open(encoding="utf-8") as written:
            for name, count in json.loads(next(written)).items():
                total[name] += count
    return total


def _mine_rows(
    miner: _Miner, data: TrainingData, documents: Documents, settings: MiningSettings, rows: list[int]
) -> tuple[list[str], dict[str, int]]:
    """Lines for these rows, of which those with one query follow one another."""
    queries: list[str] = []
    place_of: dict[int, int] = {}  # query key -> its place among the queries
    known: list[tuple[set[int], set[int]]] = []
    examples = {row: data.example(row) for row in rows}
    for row in rows:
        key = int(data.query_keys[row])
        if key not in place_of:
            place_of[key] = len(queries)
            queries.append(examples[row].query)
            keys, ids = data.known_positives(row, apart=documents.apart)
            known.append((keys | {key}, ids))
    keys_in_order, hashes_in_order = np.sort(documents.keys), np.sort(documents.hashes)
    most = max(_count(keys_in_order, keys) + _count(hashes_in_order, ids) for keys, ids in known)
    scores, positions = miner.find(queries, settings.depth + most)
    positive_scores = _positive_scores(
        miner, data, documents, examples, [place_of[int(data.query_keys[r])] for r in rows]
    )
    lines, dropped = [], 0
    served = set()  # queries that keep a row
    for row in rows:
        place = place_of[int(data.query_keys[row])]
        keys, ids = known[place]
        usable = [
            (score, position)
            for score, position in zip(scores[place].tolist(), positions[place].tolist(), strict=True)
            if position >= 0
            and int(documents.keys[position]) not in keys
            and int(documents.hashes[position]) not in ids
        ][: settings.depth]
        low, high = settings.kept_ranks
        limit = settings.highest(max(positive_scores[row]))
        kept = [(score, position) for score, position in usable[low - 1 : high] if score <= limit]
        if len(kept) < settings.negatives:
            if not settings.drop_short:
                raise ValueError(
                    f"{data.where(row)}: expected {settings.negatives} negatives or more, found {len(kept)}. "
                    f"{_advice(settings)}"
                )
            dropped += 1
            continue
        record = {
            "row": row,
            "positive_scores": [_short(score) for score in positive_scores[row]],
            "negatives": [documents.ids[position].decode() for _, position in kept],
            "scores": [_short(score) for score, _ in kept],
        }
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        served.add(place)
    return lines, {"rows": len(lines), "dropped_rows": dropped, "queries": len(served)}


def _positive_scores(
    miner: _Miner, data: TrainingData, documents: Documents, examples: dict[int, Any], places: list[int]
) -> dict[int, list[float]]:
    order = np.argsort(documents.keys, kind="stable")
    in_order = documents.keys[order]
    pairs: list[tuple[int, int]] = []
    outside: list[str] = []
    owners: list[int] = []
    for (row, example), place in zip(examples.items(), places, strict=True):
        low, high = data.positive_starts[row : row + 2]
        for passage, key in zip(example.positives, data.positive_keys[low:high], strict=True):
            found = int(np.searchsorted(in_order, key))
            if found < len(in_order) and in_order[found] == key:
                pairs.append((place, int(order[found])))
            else:
                pairs.append((place, -1 - len(outside)))
                outside.append(data.text_in(row, passage))
            owners.append(row)
    scores: dict[int, list[float]] = {row: [] for row in examples}
    for row, score in zip(owners, miner.score(pairs, outside.__getitem__), strict=True):
        scores[row].append(score)
    return scores


def _count(in_order: np.ndarray, wanted: set[int]) -> int:
    values = np.array(sorted(wanted), np.uint64)
    return int((np.searchsorted(in_order, values, "right") - np.searchsorted(in_order, values, "left")).sum())


def _short(score: float) -> float:
    return float(f"{score:.7g}")  # what float32 holds


def _advice(settings: MiningSettings) -> str:
    used = f"--depth {settings.depth}, --ranks {settings.kept_ranks[0]} {settings.kept_ranks[1]}"
    for name in ("margin", "relative_margin"):
        if getattr(settings, name) is not None:
            used += f", --{name.replace('_', '-')} {getattr(settings, name)}"
    advice = f"Lower --negatives, raise --depth, widen --ranks or lower the margin (now {used})"
    return f"{advice}." if settings.drop_short else f"{advice}, or leave such rows out by --drop-short."
