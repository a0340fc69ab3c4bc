"""Collections too large for memory: files by name, folder or pattern, cut into blocks that any process can read.

Forms, told by content and each plain, gzip or zstd: jsonl (``_id``, ``id``, ``docid`` or ``pid``; ``title`` and
``text``, or ``contents`` or ``passage``), tab-separated ``id text``, with or without that header, or under its header
``id text title``; and Parquet with jsonl's columns.
"""

from __future__ import annotations

import glob
import hashlib
import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from st_aggretriever.readers.documents import HEADERS, ID_FIELDS, TEXT_FIELDS, document_in_columns, document_of
from st_aggretriever.readers.store import hash_of
from st_aggretriever.readers.text import (
    BROKEN,
    checksum,
    compression_of,
    decode_line,
    find_text,
    json_object,
    open_plain,
)

logger = logging.getLogger(__name__)

ENDINGS = (".jsonl", ".tsv", ".parquet")  # of the files in a folder that are read, also with .gz and .zst
_PARQUET_ROWS = 1000  # read at a time
_PIECE = 2**16  # hashed ids compared at a time


class Block(NamedTuple):
    """The texts of one block, in the corpus' order, and one sentence on each row that was left out."""

    rows: list[tuple[str, str]]  # (id, text)
    bad: list[str]


class _Start(NamedTuple):
    """Where a block begins."""

    file: int
    row: int  # in the file, from 0
    offset: int  # in bytes, of a plain file


class Corpus:
    """The texts of files, in the order of the files' names in each place; memory holds one block and 8 bytes a text.

    A block is ``block_size`` rows from one place on, over the ends of files: it depends on the corpus alone.

    Args:
        places: One or more of: a file; a BEIR folder; another folder, of which the files with ``ENDINGS`` are read; a
            pattern such as ``"part-*.jsonl.gz"``.
        side: ``"document"`` or ``"query"``: which file of a BEIR folder.
        skip_bad: Leave rows without id or readable text out, instead of raising.

    Raises:
        FileNotFoundError: Nothing there.
        ValueError: A file of another form.
    """

    def __init__(self, *places: str | Path, side: str = "document", skip_bad: bool = False) -> None:
        self.name = " ".join(map(str, places))
        paths = [path for place in places for path in _find(str(place), side)]
        self.files = [_File(path.absolute(), titles=side == "document") for path in paths]
        self.skip_bad = skip_bad
        self.block_size = 0
        self._starts: list[_Start] = []
        self._stream: tuple[int, int, Iterator[Any]] | None = None  # file, next row, rows from there on

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None}  # another process opens the files itself

    def scan(self, block_size: int, wanted: Callable[[int], bool] = lambda number: True) -> tuple[int, str]:
        """Count all rows, find where blocks begin, and parse those of ``wanted`` blocks, before the work on them.

        Returns:
            Rows, and the SHA-256 of all files' content.

        Raises:
            ValueError: No row; broken data; a bad row or an id that occurs twice in the wanted blocks. The sentence
                names file and line.
        """
        self.block_size, self._starts, self._stream = block_size, [], None
        digest = hashlib.sha256()
        keys = array("Q")
        count = empty = blanks = 0
        first = first_blank = ""
        with tqdm(desc="reading", unit="text", disable=None) as bar:
            for number, file in enumerate(self.files):
                file.note_stamp()
                offset = file.header
                for row, raw in enumerate(file.rows(0, offset)):
                    if count % block_size == 0:
                        self._starts.append(_Start(number, row, offset))
                        bar.update(count - bar.n)
                    if wanted(count // block_size):
                        try:
                            key, text = file.parse(raw, row)
                            keys.append(hash_of(key))
                            if len(key.split()) != 1:
                                blanks, first_blank = blanks + 1, first_blank or file.where(row)
                            if not text.strip():
                                empty, first = empty + 1, first or file.where(row)
                        except ValueError:
                            if not self.skip_bad:
                                raise
                    offset += len(raw)
                    count += 1
                digest.update(f"{file.form} {file.sha256}".encode())
        if not count:
            raise ValueError(f"{self.name} holds no text.")
        if empty:  # as evaluate takes them: a collection may hold empty texts
            logger.warning("empty texts (null or blanks), encoded as such: %d, the first in %s", empty, first)
        if blanks:
            logger.warning("ids with blanks, which search can't write to a run: %d, first in %s", blanks, first_blank)
        self._refuse_repeated(np.frombuffer(keys, np.uint64), wanted)
        return count, digest.hexdigest()

    def read(self, number: int) -> Block:
        """The texts of a block after :meth:`scan`; reading one after the other is fastest.

        Raises:
            ValueError: A bad row, unless these are skipped, or a file was changed since the scan.
        """
        start = self._starts[number]
        rows: list[tuple[str, str]] = []
        bad: list[str] = []
        left = self.block_size
        for file in range(start.file, len(self.files)):
            self.files[file].refuse_changed()
            first, offset = (start.row, start.offset) if file == start.file else (0, self.files[file].header)
            stream = self._seek(file, first, offset)
            row = first
            for row, raw in enumerate(islice(stream, left), first):
                try:
                    rows.append(self.files[file].parse(raw, row))
                except ValueError as error:
                    if not self.skip_bad:
                        raise
                    bad.append(str(error))
                left -= 1
            if not left:
                self._stream = (file, row + 1, stream)
                break
        return Block(rows, bad)

    def _seek(self, file: int, row: int, offset: int) -> Iterator[Any]:
        """The rows of a file from one on; what can't be sought is read on from where the last block ended."""
        if self._stream is not None:
            at_file, at_row, stream = self._stream
            self._stream = None
            if at_file == file and (at_row == row or (at_row < row and self.files[file].packed)):
                next(islice(stream, row - at_row, row - at_row), None)
                return stream
        return self.files[file].rows(row, offset)

    def _refuse_repeated(self, keys: np.ndarray, wanted: Callable[[int], bool]) -> None:
        """Raises ValueError where an id stands twice; sorts ``keys``."""
        keys.sort()  # in place, and compared in pieces: for a billion texts a copy is 8 GB
        suspects: set[int] = set()  # or two ids of one 64-bit hash
        for start in range(0, len(keys), _PIECE):
            piece = keys[start : start + _PIECE + 1]
            suspects.update(piece[1:][piece[1:] == piece[:-1]].tolist())
        seen: set[str] = set()
        for number in range(len(self._starts)) if suspects else ():
            for key, _ in self.read(number).rows if wanted(number) else ():
                if hash_of(key) in suspects:
                    if key in seen:
                        raise ValueError(f"{self.name}: id {key!r} occurs a second time, in block {number}.")
                    seen.add(key)


class _File:
    """One file: its form, and its rows as they lie there."""

    def __init__(self, path: Path, *, titles: bool) -> None:
        self.path = path
        self.titles = titles  # belong to the text; not so a query's
        self.packed: str | None = None
        self.sha256 = ""  # of the uncompressed content, once it was read from the start to the end
        self.header = 0  # bytes before the first row
        self.stamp: tuple[int, int | None] | None = None  # size and time of change at the scan
        try:
            with path.open("rb") as file:
                parquet = file.read(4) == b"PAR1"
            if parquet:
                self.form = "parquet"
            else:
                self.packed = compression_of(path)
                with open_plain(path) as file:
                    self._tell_form(file.readline(2**20))
        except BROKEN as error:
            raise ValueError(f"{path}: broken {self.packed} data ({error}). Fetch the file again.") from None
        except (IsADirectoryError, PermissionError) as error:
            raise type(error)(f"{path} can't be read ({error.strerror}).") from None

    def __getstate__(self) -> dict[str, Any]:
        # On another machine it may be a copy, as long but of another time.
        return {**self.__dict__, "stamp": self.stamp and (self.stamp[0], None)}

    def note_stamp(self) -> None:
        """Remember what tells that the file was changed."""
        self.stamp = self._stamp()

    def refuse_changed(self) -> None:
        """Raises ValueError if the file is another than the one that was scanned."""
        if self.stamp is None:
            return
        (size, changed), now = self.stamp, self._stamp()
        if size != now[0] or changed not in (None, now[1]):
            raise ValueError(
                f"{self.path} was changed while it was being read. Run the same command again with the file as it was,"
                " or name another output."
            )

    def _stamp(self) -> tuple[int, int | None]:
        found = self.path.stat()
        return found.st_size, found.st_mtime_ns

    def _tell_form(self, line: bytes) -> None:
        text = line.removeprefix(b"\xef\xbb\xbf")
        if text.lstrip().startswith(b"{"):
            self.form = "jsonl"
        elif (header := text.rstrip(b"\r\n")) in HEADERS:
            self.form, self.header = HEADERS[header], len(line)
        elif b"\t" in text:
            self.form = "tsv"
        elif not line:
            self.form = "empty"
        else:
            raise ValueError(f"{self.path}: expected jsonl, tab-separated lines or Parquet, got {line[:80]!r}.")

    def rows(self, row: int, offset: int) -> Iterator[Any]:
        """Lines or records from a row on; a plain file is sought by its offset in bytes."""
        return self._records(row) if self.form == "parquet" else self._lines(row, offset)

    def _lines(self, row: int, offset: int) -> Iterator[bytes]:
        digest = hashlib.sha256() if row == 0 else None
        start = row if self.packed is None else 0
        at = start
        try:
            with open_plain(self.path) as file:
                if self.packed is None:
                    file.seek(offset)
                elif self.header:
                    file.readline()
                for at, line in enumerate(file, start):
                    if digest is not None:
                        digest.update(line)
                    if at >= row:
                        yield line
        except BROKEN as error:
            raise ValueError(
                f"{self.where(at + 1)}: broken {self.packed} data ({error}). Fetch the file again."
            ) from None
        if digest is not None:
            self.sha256 = digest.hexdigest()

    def _records(self, row: int) -> Iterator[dict[str, Any]]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError(f'{self.path} needs pyarrow: pip install "st-aggretriever[parquet]" ({error}).') from None
        if not self.sha256:
            self.sha256 = checksum(self.path)
        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                ends = np.cumsum([file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]).tolist()
                group = bisect_right(ends, row)
                skip = row - ([0, *ends][group])
                columns = [name for name in file.schema_arrow.names if name in (*ID_FIELDS, "title", *TEXT_FIELDS)]
                batches = file.iter_batches(_PARQUET_ROWS, row_groups=range(group, len(ends)), columns=columns)
                for batch in batches:
                    yield from batch.slice(min(skip, len(batch))).to_pylist()
                    skip = max(0, skip - len(batch))
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the system's; pyarrow's own have no number
                raise
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{self.path} is no Parquet file that can be read: {reason}") from None

    def parse(self, raw: Any, row: int) -> tuple[str, str]:
        """``(id, text)`` of a row.

        Raises:
            ValueError: A bad one; the sentence names file and line.
        """
        try:
            if self.form == "parquet":
                return document_of(raw, titles=self.titles)
            line = decode_line(raw, first=row == 0)
            if self.form == "jsonl":
                return document_of(json_object(line), titles=self.titles)
            return document_in_columns(line, form=self.form)
        except ValueError as error:
            raise ValueError(f"{self.where(row)}: {error}") from None

    def where(self, row: int) -> str:
        """File and line, for sentences."""
        return f"{self.path} {'row' if self.form == 'parquet' else 'line'} {row + 1 + (self.header > 0)}"


def _find(place: str, side: str) -> list[Path]:
    path = Path(place)
    if path.is_dir():
        try:
            return [find_text(path, "corpus.jsonl" if side == "document" else "queries.jsonl")]
        except FileNotFoundError:
            pass
        endings = tuple(ending + packed for ending in ENDINGS for packed in ("", ".gz", ".zst"))
        found = [entry for entry in path.iterdir() if entry.name.endswith(endings) and not entry.name.startswith(".")]
        if not found:
            raise FileNotFoundError(
                f"{place} holds neither {'corpus' if side == 'document' else 'queries'}.jsonl (BEIR) nor any file of"
                f" {', '.join(ENDINGS)} (or .gz, .zst)."
            )
        return sorted(found)
    if path.exists():
        return [path]
    found = [Path(name) for name in glob.glob(place, recursive=True) if Path(name).is_file()]
    if not found:
        raise FileNotFoundError(
            f"{place} does not exist." if not glob.has_magic(place) else f"{place} matches no file."
        )
    return sorted(found)
