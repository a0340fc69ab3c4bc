"""Mined negatives: a manifest on the first line, then a line for each row of the data that they were mined for.

The manifest names the miner (model, its hash), depth and settings, and the data by checksum and by paths, relative to
the file's folder; texts stay in the data. A line holds the row's number there, the scores of its positives, and ids and
scores of its candidates, best first::

    {"row": 0, "positive_scores": [71.3], "negatives": ["4983", "31"], "scores": [66.1, 64.8]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from st_aggretriever.readers.rows import Example, Passage
from st_aggretriever.readers.store import BadRows, Passages, Records
from st_aggretriever.readers.text import decode_line, score_of

if TYPE_CHECKING:
    from st_aggretriever.readers.training import TrainingData

FORMAT = "st_aggretriever negatives, 1"
_NEEDED = ("data", "data_sha256", "split", "max_bad_rows", "depth")
_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("data", list, "a list of paths"),
    ("split", str, "a name"),
    ("max_bad_rows", int, "a number"),
    ("depth", int, "a number"),
    ("corpus", (str, type(None)), "a path or null"),
)


def relative(path: str, folder: Path) -> str:
    """How the manifest of a file in ``folder`` names a path: relative to it; a Hub name stays as it is."""
    return os.path.relpath(path, folder) if Path(path).exists() else path


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a file of mined negatives.

    Raises:
        ValueError: The first line isn't one.
    """
    from st_aggretriever.readers.text import read_lines

    first = next(read_lines(path))[1]
    try:
        manifest = json.loads(first)
    except (json.JSONDecodeError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} line 1: expected the manifest of mined negatives ({FORMAT!r}), got {first[:100]!r}.")
    missing = [key for key in _NEEDED if key not in manifest]
    if missing:
        raise ValueError(f"{path} line 1: the manifest lacks {', '.join(missing)}. Mine again.")
    for key, kind, expected in _KINDS:
        value = manifest.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{path} line 1: expected {expected} in {key!r}, got {value!r}. Mine again.")
    if not manifest["data"] or not all(isinstance(name, str) for name in manifest["data"]):
        raise ValueError(f"{path} line 1: expected a list of paths in 'data', got {manifest['data']!r}. Mine again.")
    return manifest


class MinedSource:
    """The rows of other data with mined negatives.

    Args:
        path: The file.
        bad: Where broken lines are counted.
        open_data: Opens the data that the manifest names: paths, split, max_bad_rows.
    """

    form = "mined"

    def __init__(self, path: str, bad: BadRows, open_data: Callable[[list[str], str, int], TrainingData]) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        folder = Path(path).resolve().parent
        paths = [_found(name, folder) for name in self.manifest["data"]]
        try:
            self.data = open_data(paths, self.manifest["split"], self.manifest["max_bad_rows"])
        except RecursionError:
            raise ValueError(f"{path} names itself as the data that it was mined for.") from None
        if self.data.sha256 != self.manifest["data_sha256"]:
            raise ValueError(
                f"{path} was mined for other rows than {', '.join(self.data.counts)} hold now. Mine again."
            )
        self._corpus: Passages | None = None
        if self.manifest.get("corpus"):
            self._corpus = Passages(_found(self.manifest["corpus"], folder), BadRows(0, str))
            if self._corpus.sha256 != self.manifest.get("corpus_sha256"):
                raise ValueError(f"{path} was mined from another {self.manifest['corpus']}. Mine again.")
        self._records = Records(path, skip=1)
        rows, counts = [], []
        for where, record in self._records.scan(bad):
            try:
                rows.append(self._row(record))
                counts.append(len(record["negatives"]))
            except ValueError as error:
                self._records.drop_last()
                bad.add(path, f"{where}: {error}")
        self._rows = np.array(rows, np.int64)
        self.sha256 = self._records.sha256
        self.scored = True
        self.query_keys = self.data.query_keys[self._rows]
        starts = self.data.positive_starts
        lengths = (starts[1:] - starts[:-1])[self._rows]
        self.positive_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # The place of each positive among all of the data's: its row's first one, and so many further.
        inside = np.arange(self.positive_starts[-1]) - np.repeat(self.positive_starts[:-1], lengths)
        places = np.repeat(starts[self._rows], lengths) + inside
        self.positive_keys, self.positive_ids = self.data.positive_keys[places], self.data.positive_ids[places]
        self.negative_counts = np.array(counts, np.int64)

    def _row(self, record: dict[str, Any]) -> int:
        row, negatives, scores = (record.get(key) for key in ("row", "negatives", "scores"))
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < len(self.data):
            raise ValueError(f"expected a row of the data, 0 to {len(self.data) - 1}, in 'row', got {row!r}.")
        if not isinstance(negatives, list) or not all(isinstance(key, str) for key in negatives):
            raise ValueError("expected a list of ids in 'negatives'.")
        for field, values, count in (
            ("scores", scores, len(negatives)),
            ("positive_scores", record.get("positive_scores"), self.data.positives(row)),
        ):
            if not isinstance(values, list) or len(values) != count:
                raise ValueError(f"expected a list of {count} numbers in {field!r}.")
            for value in values:
                if score_of({field: value}, field) is None:
                    raise ValueError(f"expected numbers in {field!r}, got null.")
        return row

    def __len__(self) -> int:
        return len(self._rows)

    def example(self, row: int) -> Example:
        record = self._records[row]
        base = self.data.example(int(self._rows[row]))
        positives = [
            passage._replace(text=self.data.text_in(int(self._rows[row]), passage), score=score)
            for passage, score in zip(base.positives, record["positive_scores"], strict=True)
        ]
        negatives = [
            Passage(id=key, score=score) for key, score in zip(record["negatives"], record["scores"], strict=True)
        ]
        return Example(base.query, positives, negatives)

    def where(self, row: int) -> str:
        return self._records.where(row)

    def text(self, passage: Passage) -> str:
        if passage.text is not None:
            return passage.text
        return self._text(passage.id)

    def _text(self, key: str) -> str:
        if self._corpus is None:
            return self.data.text_of(key)
        position = int(self._corpus.find([key])[0])
        if position < 0:
            raise ValueError(f"{self.path}: passage {key!r} is not in {self._corpus.path}. Mine again.")
        return self._corpus.text(position)

    def key(self, passage: Passage) -> int:
        from st_aggretriever.readers.store import key_of

        return key_of(self.text(passage))

    def corpus(self) -> Iterator[tuple[str, Passage]]:
        # What was mined from; the data's own positives needn't stand in it.
        own = ((key, text) for key, text, _, _ in self.data.corpus())
        for key, text in own if self._corpus is None else self._corpus.stream():
            yield key, Passage(text, id=key)

    def passage(self, local: str) -> Passage:
        return Passage(self._text(local), id=local)

    def describe(self) -> dict[str, Any]:
        return {"format": self.form, "mined by": {k: v for k, v in self.manifest.items() if k != "format"}}


def _found(name: str, folder: Path) -> str:
    """A path of the manifest: as seen from the file's folder, else as it is (a Hub name)."""
    there = folder / name
    return os.path.normpath(there) if there.exists() else name


def peek(lines: Sequence[bytes]) -> bool:
    """Whether the first of these lines is a manifest."""
    try:
        first = json.loads(decode_line(lines[0], first=True))
    except (ValueError, IndexError, RecursionError):  # whatever else it is
        return False
    return isinstance(first, dict) and first.get("format") == FORMAT
