"""What every source of training data gives: rows of a query, its positives and its negatives."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from st_aggretriever.readers.store import EMPTY, BadRows, hash_of, key_of


class Passage(NamedTuple):
    """A passage of a row: its text, or where in the source's collection it stands."""

    text: str | None = None
    position: int = -1  # in the collection, where text is None
    id: str = ""  # as the data call it, where they do
    score: float | None = None  # of a teacher, for the row's query


class Example(NamedTuple):
    """A row: one of the positives is trained on at a time, and some of the negatives."""

    query: str
    positives: Sequence[Passage]
    negatives: Sequence[Passage]


class Source(Protocol):
    """The rows of one file or folder; memory holds numbers for each, texts are read when asked for."""

    path: str
    sha256: str  # of what is read
    scored: bool  # whether every row brings scores
    query_keys: np.ndarray  # (rows,) uint64, see key_of
    positive_keys: np.ndarray  # uint64, of all rows one after the other
    positive_ids: np.ndarray  # uint64 in the same order: hash_of each positive's id, 0 without one
    positive_starts: np.ndarray  # (rows + 1,) int64: row i has positives [starts[i], starts[i + 1])
    negative_counts: np.ndarray  # (rows,) int64

    def __len__(self) -> int: ...

    def example(self, row: int) -> Example: ...

    def where(self, row: int) -> str:
        """File and line, for sentences."""

    def text(self, passage: Passage) -> str: ...

    def key(self, passage: Passage) -> int: ...

    def corpus(self) -> Iterator[tuple[str, Passage]]:
        """``(local id, passage)`` of every passage, some perhaps twice."""

    def passage(self, local: str) -> Passage:
        """The passage of a local id. Raises ValueError for an unknown one."""

    def describe(self) -> dict[str, Any]:
        """Plain JSON values for the record of a run."""


class Numbers:
    """Collects the numbers of rows that a :class:`Source` holds."""

    def __init__(self) -> None:
        self.queries, self.positives, self.ids = array("Q"), array("Q"), array("Q")
        self.starts, self.negatives = array("q", [0]), array("q")

    def add(self, query: str, keys: Sequence[int], ids: Sequence[str], negatives: int) -> None:
        self.queries.append(key_of(query))
        self.positives.extend(keys)
        self.ids.extend(hash_of(key) if key else 0 for key in ids)
        self.starts.append(len(self.positives))
        self.negatives.append(negatives)

    def give(self, source: Any) -> None:
        """Set the arrays of ``source``."""
        source.query_keys = np.frombuffer(self.queries, np.uint64)
        source.positive_keys = np.frombuffer(self.positives, np.uint64)
        source.positive_ids = np.frombuffer(self.ids, np.uint64)
        source.positive_starts = np.frombuffer(self.starts, np.int64)
        source.negative_counts = np.frombuffer(self.negatives, np.int64)


class RecordSource:
    """Rows that stand in records of their own: jsonl, a JSON list, tab-separated texts, parquet, a Hub dataset.

    Args:
        records: What gives the records by number: ``scan``, ``drop_last``, ``len``, ``[]``, ``where``, ``sha256``.
        parse: A record's row; raises ValueError for a broken one.
        form: The name of the format.
        bad: Where broken rows are counted.
    """

    def __init__(self, records: Any, parse: Callable[[Any], Example], form: str, bad: BadRows) -> None:
        self.path, self.form = records.path, form
        self._records, self._parse = records, parse
        self.scored = True
        numbers = Numbers()
        for where, record in records.scan(bad):
            try:
                example = parse(record)
                keys = [self.key(passage) for passage in example.positives]
                _check(example, keys)
            except ValueError as error:
                records.drop_last()
                bad.add(self.path, f"{where}: {error}")
                continue
            ids = [passage.id for passage in example.positives]
            numbers.add(example.query, keys, ids, len(example.negatives))
            both = (*example.positives, *example.negatives)
            self.scored = self.scored and all(passage.score is not None for passage in both)
        numbers.give(self)
        self.sha256 = records.sha256

    query_keys: np.ndarray
    positive_keys: np.ndarray
    positive_ids: np.ndarray
    positive_starts: np.ndarray
    negative_counts: np.ndarray

    def __len__(self) -> int:
        return len(self._records)

    def example(self, row: int) -> Example:
        return self._parse(self._records[row])

    def where(self, row: int) -> str:
        return self._records.where(row)

    def text(self, passage: Passage) -> str:
        assert passage.text is not None
        return passage.text

    def key(self, passage: Passage) -> int:
        return key_of(self.text(passage))

    def corpus(self) -> Iterator[tuple[str, Passage]]:
        for row in range(len(self)):
            example = self.example(row)
            for place, passage in enumerate((*example.positives, *example.negatives)):
                yield f"{row}.{place}", passage

    def passage(self, local: str) -> Passage:
        row, dot, place = local.partition(".")
        if not (dot and row.isdecimal() and place.isdecimal() and int(row) < len(self)):
            raise ValueError(f"{self.path} has no passage {local!r}.")
        example = self.example(int(row))
        both = (*example.positives, *example.negatives)
        if int(place) >= len(both):
            raise ValueError(f"{self.path} has no passage {local!r}.")
        return both[int(place)]

    def describe(self) -> dict[str, Any]:
        return {"format": self.form}


def _check(example: Example, keys: list[int]) -> None:
    if not example.positives:
        raise ValueError("expected at least one positive passage, got none.")
    if not example.query.strip():
        raise ValueError("the query is empty.")
    own, negatives = set(keys), [key_of(passage.text or "") for passage in example.negatives]
    if EMPTY in own or EMPTY in negatives:
        raise ValueError(f"a {'passage' if EMPTY in own else 'negative'} is empty.")
    if not own.isdisjoint(negatives):
        raise ValueError("the passage stands among its own negatives. Remove it there.")
