"""Training data of any format as rows that are read when asked for: numbers in memory, texts on disk."""

from __future__ import annotations

import codecs
import hashlib
import logging
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from st_aggretriever.readers import beir, dpr, hub, mined, msmarco, pairs, tevatron
from st_aggretriever.readers.judged import JudgedSource
from st_aggretriever.readers.rows import Example, Passage, RecordSource, Source
from st_aggretriever.readers.store import BadRows, Plain, Records, hash_of, key_of
from st_aggretriever.readers.text import decode_line, find_text, json_object

logger = logging.getLogger(__name__)

_PEEK = 100  # lines, of which the first that can be read tells the format
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?")
_FILE_NAME = re.compile(r".*\.(jsonl?|tsv|txt|csv|parquet|gz|zst)")


class Scores(Protocol):
    """Teacher scores that were computed before: :class:`st_aggretriever.teacher.TeacherScores`."""

    def __call__(self, query: str, passages: Sequence[str]) -> list[float]: ...


def open_training_data(
    paths: Sequence[str],
    *,
    negatives: int | None = None,
    drop_short: bool = False,
    seed: int = 0,
    split: str = "train",
    max_bad_rows: int = 0,
    scores: bool = False,
) -> TrainingData:
    """Read through training data once, check every row, and give them as rows that a trainer can index.

    Each path is told by its content: jsonl with ``query`` and ``passage`` (or ``positive``) and optional negatives;
    Tevatron's jsonl; DPR's json; mined negatives; tab-separated ``query passage [negative]`` texts; parquet; each of
    these but the last also as .gz or .zst; a BEIR folder; a folder of MS MARCO's files; or the name of a Hub dataset.

    Args:
        paths: Files, folders, names; at least one.
        negatives: How many negatives a row has, drawn uniformly without replacement from the row's own for each epoch
            anew. None takes all, which must be as many in every row.
        drop_short: Leave out rows that have fewer than ``negatives``, with one warning, instead of raising.
        seed: Of the draws, which depend on nothing but seed, epoch and row.
        split: Which qrels of a folder, which split of a Hub dataset.
        max_bad_rows: How many broken rows may be left out, each with a warning.
        scores: Whether rows end with the teacher scores that the data bring; each row must have them then.

    Raises:
        FileNotFoundError: A path that is neither file nor folder nor a Hub dataset that can be fetched.
        ValueError: A broken row (file and line) past ``max_bad_rows``, no row, too few negatives, no scores.
        ImportError: A format needs a package that is missing.

    Example:
        >>> data = open_training_data(["pairs.jsonl"], negatives=7)  # doctest: +SKIP
        >>> data.row(0)["query"]  # doctest: +SKIP
    """
    if not paths:
        raise ValueError("open_training_data: expected at least one path, got none.")
    if not all(str(path).strip() for path in paths):
        raise ValueError("open_training_data: expected paths or names, got an empty one.")
    if negatives is not None and negatives < 0:
        raise ValueError(f"open_training_data: negatives must be at least 0, got {negatives}.")
    if drop_short and not negatives:
        raise ValueError("open_training_data: drop_short leaves out rows with too few negatives: say how many.")
    bad = BadRows(max_bad_rows, logger.warning)
    opened = {path: _open(path, split, bad) for path in dict.fromkeys(map(str, paths))}
    data = TrainingData([opened[str(path)] for path in paths], seed)  # a path named twice counts twice
    data.bad_rows = dict(bad.counts)
    options = {"negatives": negatives, "seed": seed, "split": split, "max_bad_rows": max_bad_rows, "scores": scores}
    data.opened_with = ([str(path) for path in paths], options | {"drop_short": drop_short})
    data.check_negatives(negatives, drop_short=drop_short)
    if scores:
        data.check_scores()
    return data


class TrainingData:
    """Rows of a query, a positive and negatives; see :func:`open_training_data`, which makes it.

    Attributes:
        negatives: How many a row has.
        epoch: Which draw rows give, see :meth:`set_epoch`.
        columns: Names of a row's values, in order.
        has_several_positives: Whether a query has more than one positive, in one row or in several.
        counts: Rows by path.
        bad_rows: Broken rows left out by path; empty without any.
        short_rows: Rows left out by path for having too few negatives; empty without any.
        left_out: Rows that an epoch's batches left out, where they are many; None before.
        sha256: Of all that is read.
        query_keys, positive_keys, positive_ids, positive_starts: See :class:`st_aggretriever.readers.rows.Source`.
    """

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        self.sources, self.seed, self.epoch, self.negatives = list(sources), seed, 0, 0
        self._rows: np.ndarray | None = None  # of a subset: its rows' numbers here
        self._offsets = np.cumsum([0, *map(len, sources)])
        self.counts = self._count(np.arange(self._offsets[-1]))
        if not len(self):
            raise ValueError(f"train: no row in {', '.join(self.counts)}.")
        self.bad_rows: dict[str, int] = {}
        self.short_rows: dict[str, int] = {}
        self.left_out: int | None = None
        self.sha256 = hashlib.sha256(" ".join(source.sha256 for source in sources).encode()).hexdigest()
        self.opened_with: tuple[list[str], dict[str, Any]] = ([], {})
        self._with_scores = False
        self._teacher: Scores | None = None
        self.query_keys = np.concatenate([source.query_keys for source in sources])
        self.positive_keys = np.concatenate([source.positive_keys for source in sources])
        # Numbers that two collections call different passages by are different ids.
        self.positive_ids = np.concatenate([_apart(source.positive_ids, source) for source in sources])
        lengths = np.concatenate([np.diff(source.positive_starts) for source in sources])
        self.positive_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._by_query = np.argsort(self.query_keys, kind="stable")
        self._sorted_queries = self.query_keys[self._by_query]
        self._filtered = self._must_filter()
        self._known_pairs = np.empty(0, np.uint64)  # of each row's query and positives
        repeated = bool((self._sorted_queries[1:] == self._sorted_queries[:-1]).any())
        self.has_several_positives = repeated or len(self.positive_keys) > len(self.query_keys)

    def _must_filter(self) -> np.ndarray:
        """(rows,) whether a row's negatives may hold a positive that another row of its query brings."""
        group = np.unique(self.query_keys, return_inverse=True)[1]
        number = np.repeat(np.arange(len(self.sources)), np.diff(self._offsets))
        own_mined = np.array([isinstance(source, mined.MinedSource) for source in self.sources])[number]
        size = np.bincount(group)[group]
        first, last = np.full(group.max() + 1, len(self.sources)), np.full(group.max() + 1, -1)
        np.minimum.at(first, group, number)
        np.maximum.at(last, group, number)
        # The miner has left out all positives of its data: only another source can bring one that it didn't know.
        return np.where(own_mined, (first != last)[group], size > 1)

    def __len__(self) -> int:
        return int(self._offsets[-1]) if self._rows is None else len(self._rows)

    def __reduce__(self) -> tuple[Any, ...]:
        # By its arguments: for processes that are spawned, and for the fingerprint that `datasets` makes.
        return _reopen, (*self.opened_with, self.epoch, self._rows, self._teacher)

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows that were read."""
        return self._rows is None

    def subset(self, rows: Sequence[int]) -> TrainingData:
        """Some of the rows, by their numbers; each draws what it draws here."""
        return self.only([self._number(row) for row in rows])

    def only(self, numbers: Sequence[int] | np.ndarray) -> TrainingData:
        """The rows of these numbers among those that were read."""
        data = self._twin()
        data._rows = np.array(numbers, np.int64)
        data.counts = self._count(data._rows)
        return data

    def _count(self, rows: np.ndarray) -> dict[str, int]:
        """Rows by path."""
        counts = {source.path: 0 for source in self.sources}
        found = np.bincount(np.searchsorted(self._offsets, rows, side="right") - 1, minlength=len(self.sources))
        for source, count in zip(self.sources, found.tolist(), strict=True):
            counts[source.path] += count
        return counts

    def _twin(self) -> TrainingData:
        data = object.__new__(TrainingData)  # not copy.copy, which would go by __reduce__ and read all anew
        data.__dict__.update(self.__dict__)
        return data

    def _number(self, row: int) -> int:
        """A row's number among those that were read."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return row if self._rows is None else int(self._rows[row])

    @property
    def columns(self) -> list[str]:
        names = ["query", "positive", *(f"negative_{number}" for number in range(1, self.negatives + 1))]
        return [*names, "scores"] if self._with_scores else names

    def set_epoch(self, epoch: int) -> None:
        """Let rows give the draw of an epoch, counted from 0."""
        self.epoch = epoch

    def keys(self, row: int) -> list[int]:
        """Keys of a row's query and of all its positives, by which rows are kept apart."""
        row = self._number(row)
        start, end = self.positive_starts[row : row + 2]
        return [int(self.query_keys[row]), *self.positive_keys[start:end].tolist()]

    def known_positives(self, row: int, *, apart: bool = True) -> tuple[set[int], set[int]]:
        """Keys and hashed ids of every positive that any row has for this row's query.

        Args:
            apart: Whether an id is its own collection's, as :meth:`corpus` gives them; otherwise also that of an equal
                id elsewhere, plain ``hash_of(id)``.
        """
        keys, ids = self._known(self.query_keys[self._number(row)])
        return keys, ids if apart else {hashed ^ mask for mask in (0, *_masks(self)) for hashed in ids}

    def known_keys(self, query: str) -> set[int]:
        """Keys of every positive that any row has for a query."""
        return self._known(np.uint64(key_of(query)))[0]

    def _known(self, query: np.uint64) -> tuple[set[int], set[int]]:
        low, high = (int(np.searchsorted(self._sorted_queries, query, side)) for side in ("left", "right"))
        rows = self._by_query[low:high]
        starts, lengths = self.positive_starts[rows], np.diff(self.positive_starts)[rows]
        places = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        return set(self.positive_keys[places].tolist()), set(self.positive_ids[places].tolist()) - {0}

    def positives(self, row: int) -> int:
        """How many positives a row has."""
        row = self._number(row)
        return int(self.positive_starts[row + 1] - self.positive_starts[row])

    def example(self, row: int) -> Example:
        """A row with all its passages, as its source gives it."""
        source, local = self._locate(self._number(row))
        return source.example(local)

    def where(self, row: int) -> str:
        """File and line of a row, for sentences."""
        source, local = self._locate(self._number(row))
        return source.where(local)

    def row(self, row: int) -> dict[str, Any]:
        """What the trainer gets of a row in the current epoch: its texts by the names in ``columns``."""
        row = self._number(row)
        source, local = self._locate(row)
        example = source.example(local)
        draw = random.Random(f"{self.seed} {self.epoch} {row}")
        positive = example.positives[draw.randrange(len(example.positives))]
        passages = [positive, *self._draw(draw, row, source, example)]
        texts = [source.text(passage) for passage in passages]
        values: list[Any] = [example.query, *texts]
        if self._teacher is not None:
            values.append(self._teacher(example.query, texts))
        elif self._with_scores:
            values.append([passage.score for passage in passages])
        return dict(zip(self.columns, values, strict=True))

    def _draw(self, draw: random.Random, row: int, source: Source, example: Example) -> list[Passage]:
        if not self.negatives:
            return []
        candidates = self._usable(row, source, example)
        if len(candidates) < self.negatives:
            raise ValueError(self._too_few(row, len(candidates), "or more"))
        return [candidates[place] for place in sorted(draw.sample(range(len(candidates)), self.negatives))]

    def _usable(self, row: int, source: Source, example: Example) -> Sequence[Passage]:
        """A row's negatives without those that are known positives of its query."""
        if not self._filtered[row] or not example.negatives:
            return example.negatives
        keys = np.array([source.key(passage) for passage in example.negatives], np.uint64)
        pairs = _pair(self.query_keys[row : row + 1], keys)
        places = np.minimum(np.searchsorted(self._known_pairs, pairs), len(self._known_pairs) - 1)
        return [example.negatives[int(at)] for at in np.flatnonzero(self._known_pairs[places] != pairs)]

    def check_negatives(self, wanted: int | None, *, drop_short: bool = False) -> None:
        """Set how many negatives a row has, None for all that each has.

        Raises:
            ValueError: A row has too few and is not to be left out, or all have.
        """
        counts = np.concatenate([source.negative_counts for source in self.sources])
        exact = wanted is None
        if wanted is None:
            for source in self.sources:
                if isinstance(source, mined.MinedSource):
                    raise ValueError(f"{source.path} holds candidates to draw from: say by --negatives N how many.")
            wanted = int(counts[0])
        if wanted and self._filtered.any():
            # Sorted, so that a query with many rows takes no more time for each of them than another one.
            of_each = np.repeat(self.query_keys, np.diff(self.positive_starts))
            self._known_pairs = np.sort(_pair(of_each, self.positive_keys))
            for row in np.flatnonzero(self._filtered).tolist():
                source, local = self._locate(row)
                counts[row] = len(self._usable(row, source, source.example(local)))
        short = np.flatnonzero(counts != wanted if exact else counts < wanted)
        self.negatives = wanted
        if drop_short and 0 < len(short) < len(counts):
            self.short_rows = {path: count for path, count in self._count(short).items() if count}
            logger.warning(
                "rows left out for having fewer than %d negatives: %d, the first %s",
                wanted, len(short), self.where(int(short[0])),
            )  # fmt: skip
            self._rows = np.setdiff1d(np.arange(len(counts)), short)
            self.counts = self._count(self._rows)
        elif drop_short and len(short):
            raise ValueError(f"train: no row in {', '.join(self.counts)} has {wanted} negatives. Lower --negatives.")
        elif len(short):
            raise ValueError(
                self._too_few(int(short[0]), int(counts[short[0]]), "as in the first row" if exact else "or more")
            )

    def _too_few(self, row: int, found: int, how: str) -> str:
        source, local = self._locate(row)
        advice = "--negatives N draws N of each row's for every epoch; --drop-short leaves rows with fewer out."
        if isinstance(source, JudgedSource):
            advice = (
                "Lower --negatives, leave such rows out by --drop-short, or remove the row's lines; one with the "
                "positive's text is no negative."
            )
        if isinstance(source, mined.MinedSource):
            advice = (
                f"Lower --negatives, leave such rows out by --drop-short, or mine again with --negatives "
                f"{self.negatives}, a larger --depth than {source.manifest['depth']} or wider --ranks."
            )
        return f"{source.where(local)}: expected {self.negatives} negatives, {how}, got {found}. {advice}"

    def check_scores(self) -> None:
        """Let rows end with the scores that the data bring; raises ValueError where one has none."""
        for source in self.sources:
            if not source.scored:
                raise ValueError(
                    f"{source.path}: expected a teacher's scores in every row ('scores', or 'score' in each passage). "
                    "Add them, or let a --teacher compute them."
                )
        self._with_scores = True

    def with_teacher(self, scores: Scores) -> TrainingData:
        """The same rows, each ending with the teacher's scores of its passages."""
        data = self._twin()
        data._teacher, data._with_scores = scores, True
        return data

    def dataset(self) -> Any:
        """A ``datasets.Dataset`` for the Trainer: it holds the rows' numbers, their texts are read when asked for."""
        from datasets import Dataset

        rows = Dataset.from_dict({"row": np.arange(len(self))})
        rows.set_transform(_Rows(self))
        return rows

    def batch_sampler(self, dataset: Any, **options: Any) -> Any:
        """The Trainer's batches over ``dataset()``, see :class:`st_aggretriever.readers.batches.ApartBatchSampler`."""
        from st_aggretriever.readers.batches import ApartBatchSampler

        return ApartBatchSampler(self, dataset, **options)

    def corpus(self) -> Iterator[tuple[str, str, int, int]]:
        """Every passage once: ``(id, text, key, hashed id in the data or 0)``.

        Of passages in rows the first of each text counts; those of a collection go by their ids there.
        """
        seen: set[int] = set()
        for number, source in enumerate(self.sources):
            judged = isinstance(source, JudgedSource)
            for local, passage in source.corpus():
                text = source.text(passage)
                key = key_of(text)
                if not judged:
                    if key in seen:
                        continue
                    seen.add(key)
                hashed = int(_apart(np.array([hash_of(passage.id) if passage.id else 0], np.uint64), source)[0])
                yield (f"{number}:{local}" if len(self.sources) > 1 else local), text, key, hashed

    def text_of(self, key: str) -> str:
        """The text of a passage by the id that :meth:`corpus` gives it.

        Raises:
            ValueError: An unknown id.
        """
        number, local = 0, key
        if len(self.sources) > 1:
            head, _, local = key.partition(":")
            number = int(head) if head.isdecimal() else len(self.sources)
        if number >= len(self.sources):
            raise ValueError(f"no passage has the id {key!r}. Mine again.")
        source = self.sources[number]
        return source.text(source.passage(local))

    def text_in(self, row: int, passage: Passage) -> str:
        """The text of one of a row's passages."""
        return self._locate(self._number(row))[0].text(passage)

    def describe(self) -> dict[str, Any]:
        """What the data are, in plain JSON values."""
        return {
            source.path: {
                "rows": self.counts[source.path],
                "bad_rows": self.bad_rows.get(source.path, 0),
                **({"short_rows": self.short_rows[source.path]} if source.path in self.short_rows else {}),
                **source.describe(),
            }
            for source in self.sources
        }

    def _locate(self, row: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self._offsets, row, side="right")) - 1
        return self.sources[number], row - int(self._offsets[number])


def _pair(queries: np.ndarray, passages: np.ndarray) -> np.ndarray:
    """Queries and passages as one number each: other pairs have other ones as surely as other texts have other keys."""
    return queries * np.uint64(0x9E3779B97F4A7C15) + passages


def _apart(ids: np.ndarray, source: Source) -> np.ndarray:
    """Hashed ids, of a collection's passages with its path in them; 0, no id, stays."""
    if not isinstance(source, JudgedSource):
        return ids
    return np.where(ids == 0, ids, ids ^ np.uint64(hash_of(source.path)))


def _masks(data: TrainingData) -> list[int]:
    """What :func:`_apart` has put on the ids of each collection, also below mined negatives."""
    found = []
    for source in data.sources:
        if isinstance(source, mined.MinedSource):
            found += _masks(source.data)
        elif isinstance(source, JudgedSource):
            found.append(hash_of(source.path))
    return found


class _Rows:
    """What a ``datasets.Dataset`` calls for the rows with some numbers."""

    def __init__(self, data: TrainingData) -> None:
        self.data = data

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        rows = [self.data.row(row) for row in batch["row"]]
        return {name: [row[name] for row in rows] for name in self.data.columns}


def _reopen(
    paths: list[str], options: dict[str, Any], epoch: int, rows: np.ndarray | None, teacher: Scores | None
) -> TrainingData:
    data = open_training_data(paths, **options)
    data.set_epoch(epoch)
    data = data if rows is None else data.only(rows)
    return data if teacher is None else data.with_teacher(teacher)


def _open(path: str, split: str, bad: BadRows) -> Source:
    place = Path(path)
    if place.is_dir():
        return _open_folder(path, split, bad)
    if not place.is_file():
        if place.exists() or _FILE_NAME.fullmatch(path) or not _HUB_NAME.fullmatch(path):
            raise FileNotFoundError(f"{path} is not a file." if place.exists() else f"{path} does not exist.")
        return _table(path, split, bad)
    with place.open("rb") as file:
        if file.read(4) == b"PAR1":
            return _table(path, split, bad)
    return _open_file(path, bad)


def _open_folder(path: str, split: str, bad: BadRows) -> Source:
    for name, module in (("collection.tsv", msmarco), ("corpus.jsonl", beir)):
        try:
            find_text(path, name)
        except FileNotFoundError:
            continue
        return module.open_training(path, split, bad)
    raise FileNotFoundError(
        f"{path} is no folder to train on: it has neither corpus.jsonl (BEIR) nor collection.tsv (MS MARCO)."
    )


def _open_file(path: str, bad: BadRows) -> Source:
    plain = Plain(path)
    head = [line for _, _, line in islice(plain.lines(), _PEEK)]
    if mined.peek(head):
        return mined.MinedSource(path, bad, _open_mined_for)
    first_line = next((line for line in head if line.strip()), b"").removeprefix(codecs.BOM_UTF8)
    is_json = pairs.begins_json(first_line)
    if is_json and plain.first_byte() == b"[":
        first = next((record for _, record in Records(path).scan(BadRows(_PEEK, str))), {})
        form, parse = _format_of(first)
        return RecordSource(Records(path), parse, form, bad)
    if ".csv" in Path(path).suffixes and not is_json and not all(b"\t" in line for line in head):
        raise ValueError(
            f"{path}: tables with commas are not read. Write jsonl with 'query' and 'passage', tab-separated texts, or "
            "parquet."
        )
    if not is_json and any(b"\t" in line for line in head):
        pairs.refuse_ids(path, head)
        records = Records(path, skip=int(pairs.is_header(path, head[0])), decode=pairs.decode_tsv)
        return RecordSource(records, pairs.parse, "tab-separated texts", bad)
    form, parse = _format_of(_first_object(head))
    return RecordSource(Records(path), parse, form, bad)


def _open_mined_for(paths: list[str], split: str, max_bad_rows: int) -> TrainingData:
    return open_training_data(paths, split=split, max_bad_rows=max_bad_rows, negatives=0)


def _first_object(lines: Sequence[bytes]) -> dict[str, Any]:
    for number, line in enumerate(lines):
        try:
            return json_object(decode_line(line, first=number == 0))
        except ValueError:
            continue
    return {}


def _table(path: str, split: str, bad: BadRows) -> Source:
    table = hub.Table(path, split)
    form, parse = _format_of(hub.first_record(table))
    return RecordSource(table, parse, f"{form} table", bad)


def _format_of(record: dict[str, Any]) -> tuple[str, Callable[[dict[str, Any]], Example]]:
    if "positive_passages" in record:
        return "Tevatron", tevatron.parse
    if "positive_ctxs" in record:
        return "DPR", dpr.parse_training
    return "pairs", pairs.parse
