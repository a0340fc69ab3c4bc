"""Records of a file by number, and passages of a collection by id: places in memory, texts on disk.

A plain file is read in place. Of a compressed one the uncompressed bytes are kept, up to ``IN_MEMORY`` of them in
memory, more in ``HF_HOME/st_aggretriever/data`` (``HF_HOME`` is ``~/.cache/huggingface`` unless set) under a name made
of the file's path, size and time of change: when one of them changes, the copy is stale and another one is made. That
folder may be deleted whenever nothing trains. Places are found anew at each start, so they can't be stale.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from st_aggretriever.readers.documents import HEADERS, document_in_columns, document_of
from st_aggretriever.readers.text import (
    BROKEN,
    compression_of,
    decode_line,
    find_text,
    json_object,
    open_plain,
    why_not_json,
)

IN_MEMORY = 64 * 2**20  # bytes
_CHUNK = 2**20
_BLANKS = " \t\r\n"
_TOKEN = 16  # characters of JSON that belong together outside a string have fewer: -Infinity
_BAR_FROM = 2**28  # bytes from which a scan shows a progress bar


def key_of(text: str) -> int:
    """64 bits of a text whose runs of blanks count as one: equal texts have equal keys.

    >>> key_of("a  b ") == key_of("a b")
    True
    """
    return hash_of(" ".join(text.split()))


def hash_of(text: str) -> int:
    """64 bits of a string as it is."""
    return int.from_bytes(_digest(text), "little")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


EMPTY = key_of("")  # a text that trains nothing


class BadRows:
    """Counts broken rows and stops at one more than ``limit``; each is reported with its place.

    Args:
        limit: How many may be left out.
        report: What is called with each sentence.
    """

    def __init__(self, limit: int, report: Callable[[str], Any]) -> None:
        if limit < 0:
            raise ValueError(f"open_training_data: max_bad_rows must be at least 0, got {limit}.")
        self.limit, self.report = limit, report
        self.counts: dict[str, int] = {}

    def add(self, path: str, sentence: str) -> None:
        """Raises ValueError past the limit, with the sentence."""
        total = sum(self.counts.values()) + 1
        if total > self.limit:
            more = f" This is bad row {total}; --max-bad-rows allows {self.limit}." if self.limit else ""
            raise ValueError(sentence + more)
        self.counts[path] = self.counts.get(path, 0) + 1
        self.report(f"left out: {sentence}")


class Plain:
    """The uncompressed bytes of a file, to be read at any place, also by several threads and forked processes.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Broken compressed data.
        ImportError: zstd data without a package that reads it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._bytes: bytes | None = None
        self._file = self.path
        if (packed := compression_of(self.path)) is not None:
            self._unpack(packed)
        self._handle = None if self._bytes is not None else self._file.open("rb")
        self.size = len(self._bytes) if self._bytes is not None else os.fstat(self._fd).st_size

    @property
    def _fd(self) -> int:
        assert self._handle is not None
        return self._handle.fileno()

    def _unpack(self, packed: str) -> None:
        from huggingface_hub import constants

        stat = self.path.stat()
        key = hashlib.sha256(f"{self.path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:32]
        copy = Path(constants.HF_HOME) / "st_aggretriever" / "data" / key
        if copy.is_file():
            self._file = copy
            return
        head = bytearray()
        with open_plain(self.path) as file:
            try:
                while len(head) <= IN_MEMORY and (chunk := file.read(_CHUNK)):
                    head += chunk
                if len(head) <= IN_MEMORY:
                    self._bytes = bytes(head)
                    return
                copy.parent.mkdir(parents=True, exist_ok=True)
                beside = copy.with_name(f".{key}.{os.getpid()}.tmp")
                try:
                    with (
                        beside.open("wb") as out,
                        tqdm(desc=f"unpacking {self.path.name}", unit="B", unit_scale=True, disable=None) as bar,
                    ):
                        chunk = bytes(head)
                        head.clear()
                        while chunk:
                            out.write(chunk)
                            bar.update(len(chunk))
                            chunk = file.read(_CHUNK)
                        out.flush()
                        os.fsync(out.fileno())
                    beside.replace(copy)
                finally:
                    beside.unlink(missing_ok=True)
            except BROKEN as error:
                raise ValueError(f"{self.path}: broken {packed} data ({error}). Fetch the file again.") from None
        self._file = copy

    def read(self, start: int, end: int) -> bytes:
        """The bytes from ``start`` to before ``end``."""
        if self._bytes is not None:
            return self._bytes[start:end]
        # Not by mmap: a process's memory would grow by each page that it touches, up to the whole file.
        if hasattr(os, "pread"):
            return os.pread(self._fd, end - start, start)
        with self._file.open("rb") as file:  # Windows
            file.seek(start)
            return file.read(end - start)

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Stream ``(number from 1, place of its first byte, line with its end)``, under a bar where the file is big."""
        place = 0
        disable = True if self.size < _BAR_FROM else None
        with tqdm(
            desc=f"reading {self.path.name}", total=self.size, unit="B", unit_scale=True, disable=disable, miniters=1
        ) as bar:
            for number, line in enumerate(self._raw_lines(), start=1):
                yield number, place, line
                place += len(line)
                bar.update(len(line))

    def _raw_lines(self) -> Iterator[bytes]:
        if self._bytes is not None:
            import io

            yield from io.BytesIO(self._bytes)
            return
        with self._file.open("rb", _CHUNK) as file:
            yield from file

    def first_byte(self) -> bytes:
        """The first byte that isn't blank (nor part of a byte order mark); empty for an empty file."""
        return self.read(0, 4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1]


class Records:
    """The JSON objects of a jsonl file, or of a file that is one JSON list, by number.

    Args:
        path: The file; plain, gzip or zstd.
        skip: Lines at its head that are no records.
        decode: Makes a record of a line; raises ValueError.

    After :meth:`scan`, ``sha256`` is that of the uncompressed bytes, and ``records[i]`` the i-th record that was kept.
    """

    def __init__(
        self, path: str | Path, *, skip: int = 0, decode: Callable[[str], dict[str, Any]] = json_object
    ) -> None:
        self.path = str(path)
        self._decode = decode
        self.plain = Plain(path)
        self.sha256 = ""
        self._skip = skip
        self._list = decode is json_object and self.plain.first_byte() == b"["
        self._starts, self._ends, self._numbers = array("q"), array("q"), array("q")

    def scan(self, bad: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
        """Stream ``(where, record)`` of each record, kept unless :meth:`drop_last` comes before the next."""
        digest = hashlib.sha256()
        for number, start, raw in self._list_items(digest) if self._list else self._lines(digest):
            where = self._where(number)
            try:
                record = self._decode(decode_line(raw, first=number == 1))
            except ValueError as error:
                bad.add(self.path, f"{where}: {error}")
                continue
            self._starts.append(start)
            self._ends.append(start + len(raw))
            self._numbers.append(number)
            yield where, record
        self.sha256 = digest.hexdigest()
        if not self._numbers and not bad.counts.get(self.path):
            raise ValueError(f"{self.path} is empty: expected at least one row.")

    def drop_last(self) -> None:
        """Forget the record that :meth:`scan` gave last."""
        for places in (self._starts, self._ends, self._numbers):
            places.pop()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        raw = self.plain.read(self._starts[index], self._ends[index])
        try:
            return self._decode(decode_line(raw, first=self._numbers[index] == 1))
        except ValueError as error:
            raise ValueError(f"{self.where(index)} has changed since the start: {error}") from None

    def where(self, index: int) -> str:
        """File and line of a record, for sentences."""
        return self._where(self._numbers[index])

    def _where(self, number: int) -> str:
        return f"{self.path} {'entry' if self._list else 'line'} {number}"

    def _lines(self, digest: Any) -> Iterator[tuple[int, int, bytes]]:
        for number, start, raw in self.plain.lines():
            digest.update(raw)
            if number > self._skip:
                yield number, start, raw

    def _list_items(self, digest: Any) -> Iterator[tuple[int, int, bytes]]:
        """The items of a JSON list one by one: the file may be larger than memory.

        Bytes are looked at as Latin-1, one character each: what ends an item is ASCII, in UTF-8 too.
        """
        decoder = json.JSONDecoder(strict=False)
        place, offset, text, number = 0, 0, "", 0  # text begins at `offset` of the file, `place` is the next to read
        position = len(self.plain.read(0, 4096)) - len(self.plain.read(0, 4096).partition(b"[")[2])
        wanted = _CHUNK
        after = "["  # what came last: the list's start, an item, or a comma
        while True:
            while position < len(text) and text[position] in _BLANKS:
                position += 1
            if position < len(text) and text[position] == "]" and after != ",":
                self._end_list(digest, text[position + 1 :], place)
                return
            if position < len(text) and after == "item":
                if text[position] != ",":
                    got = text[position : position + 40]
                    raise ValueError(
                        f"{self.path} after entry {number}: expected a comma or the list's end, got {got!r}."
                    )
                position, after = position + 1, ","
                continue
            end = -1
            if position < len(text):
                try:
                    end = decoder.raw_decode(text, position)[1]
                except json.JSONDecodeError as error:
                    # An item that goes on in the next piece fails at this one's end, or within a string.
                    if error.pos < len(text) - _TOKEN and not error.msg.startswith("Unterminated string"):
                        raise ValueError(
                            f"{self.path} entry {number + 1}: expected a JSON object, got malformed JSON ({error.msg}, "
                            f"at {text[error.pos : error.pos + 40]!r})."
                        ) from None
                    end = -1
                except (ValueError, RecursionError) as error:
                    why = why_not_json(error)
                    raise ValueError(f"{self.path} entry {number + 1}: expected a JSON object, got {why}.") from None
            if end != -1 and end < len(text):
                number += 1
                yield number, offset + position, text[position:end].encode("latin-1")
                position, after = end, "item"
                continue
            chunk = self.plain.read(place, place + wanted)
            if not chunk:
                raise ValueError(
                    f"{self.path} entry {number + 1}: expected a JSON list of objects, it breaks off here or is "
                    "malformed."
                )
            digest.update(chunk)
            place += len(chunk)
            if text:
                text, offset, position = text[position:] + chunk.decode("latin-1"), offset + position, 0
                wanted = max(_CHUNK, len(text))
            else:
                text = chunk.decode("latin-1")

    def _end_list(self, digest: Any, rest: str, place: int) -> None:
        """Raises ValueError where something follows the list: ``rest``, and the file from ``place`` on, are left."""
        while not rest.strip(_BLANKS):
            chunk = self.plain.read(place, place + _CHUNK)
            if not chunk:
                return
            digest.update(chunk)
            place += len(chunk)
            rest = chunk.decode("latin-1")
        got = rest.strip(_BLANKS)[:40]
        raise ValueError(f"{self.path}: expected nothing after the JSON list's closing bracket, got {got!r}.")


class Passages:
    """The passages of a collection, by position or id; memory holds 32 bytes for each.

    ``id<tab>text`` lines, or JSON lines with ``_id`` (or ``docid``, ``id``), ``text`` and optional ``title``; told by
    content.

    Args:
        path: The file; plain, gzip or zstd.
        bad: Where broken lines are counted.

    Raises:
        FileNotFoundError: No such file.
        ValueError: An id that occurs twice, or too many broken lines.
    """

    def __init__(self, path: str | Path, bad: BadRows) -> None:
        self.path = str(path)
        self.plain = Plain(path)
        self._json = self.plain.first_byte() == b"{"
        self._form = "tsv"
        digest = hashlib.sha256()
        ids, starts, keys = array("Q"), array("q"), array("Q")
        for number, start, raw in self.plain.lines():
            digest.update(raw)
            if number == 1 and (header := raw.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")) in HEADERS:
                self._form = HEADERS[header]
                continue
            try:
                key, text = self._parse(raw, number == 1)
            except ValueError as error:
                bad.add(self.path, f"{self.path} line {number}: {error}")
                continue
            ids.append(hash_of(key))
            starts.append(start)
            keys.append(key_of(text))
        self.sha256 = digest.hexdigest()
        if not ids:
            raise ValueError(f"{self.path} holds no passage.")
        self._ids = np.frombuffer(ids, np.uint64)
        self._order = np.argsort(self._ids, kind="stable").astype(np.uint32)
        self._ids = self._ids[self._order]  # ascending; _order says which position each belongs to
        self._starts = np.frombuffer(starts, np.int64)
        self.keys = np.frombuffer(keys, np.uint64)  # of each passage's text, see key_of
        twice = np.flatnonzero(self._ids[1:] == self._ids[:-1])
        if len(twice):
            key = self.id(int(self._order[twice[0]]))
            raise ValueError(f"{self.path}: id {key!r} occurs a second time. Ids must be unique.")

    def __len__(self) -> int:
        return len(self._starts)

    def find(self, ids: Sequence[str]) -> np.ndarray:
        """Positions of the passages with these ids, (n,) int64; -1 where there is none."""
        wanted = np.frombuffer(b"".join(map(_digest, ids)), "<u8")
        places = np.minimum(np.searchsorted(self._ids, wanted), len(self._ids) - 1)
        return np.where(self._ids[places] == wanted, self._order[places].astype(np.int64), -1)

    def text(self, position: int) -> str:
        """Title and text of a passage."""
        return self._at(position)[1]

    def id(self, position: int) -> str:
        return self._at(position)[0]

    def stream(self) -> Iterator[tuple[str, str]]:
        """``(id, text)`` of each passage, in the file's order."""
        for _, start, raw in self.plain.lines():
            position = np.searchsorted(self._starts, start)
            if position < len(self._starts) and self._starts[position] == start:  # not a broken line
                yield self._parse(raw, start == 0)

    def _at(self, position: int) -> tuple[str, str]:
        start = int(self._starts[position])
        end = int(self._starts[position + 1]) if position + 1 < len(self._starts) else self.plain.size
        # A broken line may stand between this one and the next that was kept.
        raw = self.plain.read(start, end).split(b"\n", 1)[0]
        try:
            return self._parse(raw, start == 0)
        except ValueError as error:
            raise ValueError(f"{self.path} has changed since the start: {error}") from None

    def _parse(self, raw: bytes, first: bool) -> tuple[str, str]:
        line = decode_line(raw, first=first)
        if self._json:
            return document_of(json_object(line))
        return document_in_columns(line, form=self._form)


def find_first(folder: str | Path, *names: str) -> Path:
    """The first of these files that a folder has, plain or compressed.

    Raises:
        FileNotFoundError: It has none; the sentence names all.
    """
    for name in names:
        try:
            return find_text(folder, name)
        except FileNotFoundError:
            if not Path(folder).is_dir():
                raise
    raise FileNotFoundError(f"{folder} holds none of {', '.join(names)} (also as .gz or .zst).")
