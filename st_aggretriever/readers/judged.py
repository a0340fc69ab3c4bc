"""Rows that are given by ids: judgements or triples over a collection of passages and a file of queries."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from st_aggretriever.readers.qrels import lines_of
from st_aggretriever.readers.rows import Example, Numbers, Passage
from st_aggretriever.readers.store import EMPTY, BadRows, Passages, Plain
from st_aggretriever.readers.text import checksum, decode_line

logger = logging.getLogger(__name__)

_Line: TypeAlias = "tuple[int, int, bytes, tuple[str, str, str] | ValueError, tuple[int, int], tuple[int, int]]"
_LOOKED_UP = 512  # lines of triples at a time; with more of them the processor's caches don't hold them


class JudgedSource:
    """A row for each relevant passage of a query, or for each run of triples with the same query and positive.

    Args:
        path: The folder, for sentences.
        queries: Its queries file and the texts by id, which stay in memory.
        passages: The collection.
        bad: Where broken triples are counted.
        form: The name of the format.
        qrels: The file of the judgements and, by query and document, the grades; those of 1 and more count.
        triples: Instead of qrels a file of ``query<tab>positive<tab>negative`` ids. Lines that follow one another with
            the same query and positive make one row with as many negatives; one with the positive's text is none.
    """

    def __init__(
        self,
        path: str,
        queries: tuple[Path, Mapping[str, str]],
        passages: Passages,
        bad: BadRows,
        *,
        form: str,
        qrels: tuple[Path, Mapping[str, Mapping[str, int]]] | None = None,
        triples: Path | None = None,
    ) -> None:
        self.path, self.form, self.scored = path, form, False
        self._queries, self._passages = queries[1], passages
        self._row_queries: list[str] = []
        self._row_positives = array("q")
        self._starts, self._ends, self._lines = array("q"), array("q"), array("q")  # a row's place in the triples
        self._triples = Plain(triples) if triples is not None else None
        self._qrels = qrels and qrels[0]
        self._numbers = Numbers()
        digest = hashlib.sha256(f"{passages.sha256}{checksum(queries[0])}".encode())
        if qrels is not None:
            self.judgements = qrels[0].name
            self._add_judged(*qrels, bad)
            digest.update(checksum(qrels[0]).encode())
        elif self._triples is not None:
            self.judgements = self._triples.path.name
            digest.update(self._add_triples(self._triples, bad).encode())
        self.sha256 = digest.hexdigest()
        self._numbers.give(self)

    query_keys: np.ndarray
    positive_keys: np.ndarray
    positive_ids: np.ndarray
    positive_starts: np.ndarray
    negative_counts: np.ndarray

    def _add_judged(self, qrels_file: Path, qrels: Mapping[str, Mapping[str, int]], bad: BadRows) -> None:
        judged = [(query, key) for query, grades in qrels.items() for key, grade in grades.items() if grade > 0]
        positions = self._passages.find([key for _, key in judged])
        broken: dict[tuple[str, str], ValueError] = {}
        for (query, key), position in zip(judged, positions.tolist(), strict=True):
            if position >= 0:
                try:
                    self._check(query, key, position)
                    self._add(query, key, position, 0)
                except ValueError as error:
                    broken[query, key] = error
        for pair, where in lines_of(qrels_file, broken).items() if broken else ():
            bad.add(self.path, f"{where}: {broken[pair]}")
        if unknown := int((positions < 0).sum()):
            logger.warning("%s: %d of %d %s pairs left out, their documents are not in the corpus.",
                           self.path, unknown, len(judged), self.judgements.split(".tsv")[0])  # fmt: skip

    def _add_triples(self, triples: Plain, bad: BadRows) -> str:
        digest = hashlib.sha256()
        own: tuple[str, str] | None = None  # query and positive of the row at hand
        for number, start, raw, ids, (position, key), (other, other_key) in self._looked_up(triples, digest):
            try:
                if isinstance(ids, ValueError):
                    raise ids
                query, positive, negative = ids
                if positive == negative:
                    raise ValueError(f"the positive {positive!r} is its own negative. Remove the line.")
                if (query, positive) != own:
                    self._check(query, positive, position)
                if other < 0:
                    raise ValueError(f"the negative {negative!r} is not in the collection.")
                if other_key == EMPTY:
                    raise ValueError(f"the negative {negative!r} is empty.")
            except ValueError as error:
                bad.add(str(triples.path), f"{triples.path} line {number}: {error}")
                continue
            if (query, positive) != own:
                self._add(query, positive, position, 0)
                self._starts.append(start)
                self._lines.append(number)
                self._ends.append(start)
                own = query, positive
            self._ends[-1] = start + len(raw)
            # A collection may hold a passage twice: no broken line, but no negative either.
            self._numbers.negatives[-1] += other_key != key
        return digest.hexdigest()

    def _looked_up(self, triples: Plain, digest: Any) -> Iterator[_Line]:
        """Stream ``(number, start, line, its ids or what is wrong, the positive's position and key, the negative's)``.

        Of many lines the passages are looked up together, which takes a small part of the time of one by one.
        """
        lines = triples.lines()
        while chunk := list(islice(lines, _LOOKED_UP)):
            parsed: list[tuple[str, str, str] | ValueError] = []
            for number, _, raw in chunk:
                digest.update(raw)
                try:
                    parsed.append(_ids(raw, number == 1))
                except ValueError as error:
                    parsed.append(error)
            pairs = [("", "") if isinstance(ids, ValueError) else ids[1:] for ids in parsed]
            positives = list({positive for positive, _ in pairs})  # of which lines that follow one another share one
            place_of = dict(zip(positives, self._places(positives), strict=True))
            negatives = self._places([negative for _, negative in pairs])
            for (number, start, raw), ids, (positive, _), place in zip(chunk, parsed, pairs, negatives, strict=True):
                yield number, start, raw, ids, place_of[positive], place

    def _places(self, ids: list[str]) -> Iterator[tuple[int, int]]:
        """Position and key of each passage; where there is none, -1 and a key that means nothing."""
        positions = self._passages.find(ids)
        return zip(positions.tolist(), self._passages.keys[positions].tolist(), strict=True)

    def _check(self, query: str, positive: str, position: int) -> None:
        if query not in self._queries:
            raise ValueError(f"query {query!r} is not in the queries file.")
        if position < 0:
            raise ValueError(f"passage {positive!r} is not in the collection.")
        if not self._queries[query].strip():
            raise ValueError(f"the query {query!r} is empty.")
        if self._passages.keys[position] == EMPTY:
            raise ValueError(f"the passage {positive!r} is empty.")

    def _add(self, query: str, positive: str, position: int, negatives: int) -> None:
        self._row_queries.append(query)
        self._row_positives.append(position)
        self._numbers.add(self._queries[query], [int(self._passages.keys[position])], [positive], negatives)

    def __len__(self) -> int:
        return len(self._row_queries)

    def example(self, row: int) -> Example:
        negatives: list[Passage] = []
        if self._triples is not None:
            negatives = self._negatives(row, self._triples.read(self._starts[row], self._ends[row]))
        positive = Passage(position=self._row_positives[row])
        return Example(self._queries[self._row_queries[row]], [positive], negatives)

    def _negatives(self, row: int, lines: bytes) -> list[Passage]:
        """Those of a row's lines, without what :meth:`_add_triples` has left out between them."""
        found: list[tuple[str, str, str]] = []
        for place, line in enumerate(lines.removesuffix(b"\n").split(b"\n")):
            try:
                ids = _ids(line, self._starts[row] == 0 and not place)
            except ValueError:
                continue
            if not found or ids[:2] == found[0][:2]:
                found.append(ids)
        positions = self._passages.find([ids[2] for ids in found])
        keys = self._passages.keys[positions]
        good = (positions >= 0) & (keys != EMPTY) & (keys != self._passages.keys[self._row_positives[row]])
        return [Passage(position=int(positions[at]), id=found[at][2]) for at in np.flatnonzero(good)]

    def where(self, row: int) -> str:
        if self._triples is not None:
            return f"{self._triples.path} line {self._lines[row]}"
        assert self._qrels is not None
        pair = self._row_queries[row], self._passages.id(self._row_positives[row])
        return lines_of(self._qrels, {pair}).get(pair, f"{self._qrels} query {pair[0]!r}")

    def text(self, passage: Passage) -> str:
        return passage.text if passage.text is not None else self._passages.text(passage.position)

    def key(self, passage: Passage) -> int:
        return int(self._passages.keys[passage.position])

    def corpus(self) -> Iterator[tuple[str, Passage]]:
        for key, text in self._passages.stream():
            yield key, Passage(text, id=key)

    def passage(self, local: str) -> Passage:
        position = int(self._passages.find([local])[0])
        if position < 0:
            raise ValueError(f"{self.path}: passage {local!r} is not in {self._passages.path}.")
        return Passage(position=position, id=local)

    def describe(self) -> dict[str, Any]:
        return {"format": self.form, "rows of": self.judgements, "passages": len(self._passages)}


def _ids(raw: bytes, first: bool) -> tuple[str, str, str]:
    fields = decode_line(raw, first=first).split()
    if len(fields) != 3:
        raise ValueError(f"expected query<tab>positive<tab>negative, three ids, got {raw[:200]!r}.")
    return fields[0], fields[1], fields[2]
