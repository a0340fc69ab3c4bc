"""Lines of plain, gzip and zstd files, JSON objects with their place in the file, and the text fields in them."""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import importlib.util
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

T = TypeVar("T")

BROKEN = (EOFError, zlib.error, gzip.BadGzipFile)  # what reading damaged gzip or zstd data raises

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_LONGEST_FIELD = 2**31 - 1  # characters; csv's own limit is 131,072, and whole pages are longer
# trec_eval holds ids as C strings in UTF-8: a NUL cuts them short, a lone surrogate has no UTF-8 form.
_NOT_IN_IDS = re.compile("[\0\ud800-\udfff]")


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Stream ``(line number from 1, line without its end)`` of a UTF-8 file, plain, gzip or zstd (told by content).

    Raises:
        FileNotFoundError: no file of that name.
        ValueError: an empty file, a blank line, bytes that are not UTF-8, broken compressed data.
        ImportError: zstd data without a package that reads it.
    """
    number = 0
    packed = compression_of(path)
    with open_plain(path) as file:
        try:
            for number, raw in enumerate(file, start=1):
                try:
                    yield number, decode_line(raw, first=number == 1)
                except ValueError as error:
                    raise ValueError(f"{path} line {number}: {error}") from None
        except BROKEN as error:
            raise ValueError(
                f"{path} line {number + 1}: broken {packed} data ({error}). Fetch the file again."
            ) from None
    if number == 0:
        raise ValueError(f"{path} is empty: expected at least one line.")


def decode_line(raw: bytes, *, first: bool = False) -> str:
    """A line without its end; the first of a file may begin with a byte order mark.

    Raises:
        ValueError: a blank line, or bytes that are not UTF-8.
    """
    if first:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    if not raw.strip():
        raise ValueError("the line is empty. Remove it.")
    try:
        # surrogatepass: a lone surrogate in a text is data; `text_of` replaces it.
        return raw.decode("utf-8", "surrogatepass").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text, got {error}.") from None


def read_jsonl(path: str | Path, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Stream ``parse(object)`` for the JSON object on each line; a ValueError gets the file and the line number.

    Raises:
        ValueError: what :func:`read_lines` raises, malformed JSON, a line that isn't an object, what ``parse`` raises.
    """
    for number, line in read_lines(path):
        try:
            value = parse(json_object(line))
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
        yield value


def json_object(line: str) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        ValueError: malformed JSON, or another value.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, got {why_not_json(error)}.") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}.")
    return record


def why_not_json(error: Exception) -> str:
    """What ``json`` fell over, by what it raised: malformed JSON, or well-formed JSON beyond Python's limits."""
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return f"malformed JSON ({error.msg}, {line}column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"text that is no UTF-8 ({error.reason})"
    return "JSON nested too deeply" if isinstance(error, RecursionError) else "a number with too many digits"


def id_of(record: Mapping[str, Any], key: str) -> str:
    """The id under ``key``; an int becomes its decimal string.

    Raises:
        ValueError: missing, neither string nor int, empty, or holding a NUL or a lone surrogate.
    """
    if key not in record:
        raise ValueError(f"expected a field {key!r}, got only {', '.join(map(repr, record)) or 'an empty object'}.")
    value = record[key]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"expected a string in {key!r}, got {type(value).__name__}.")
    if not value or _NOT_IN_IDS.search(value):
        raise ValueError(f"expected a non-empty id without NUL and lone surrogates in {key!r}, got {value!r}.")
    return value


def text_of(record: Mapping[str, Any], key: str) -> str:
    """The text under ``key``; missing and null are empty, an int becomes its decimal string.

    Lone surrogates become U+FFFD, because no tokenizer takes them.

    Raises:
        ValueError: neither string, int nor null.
    """
    value = record.get(key)
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"expected a string in {key!r}, got {type(value).__name__}.")
    return _LONE_SURROGATE.sub("\ufffd", value)


def score_of(record: Mapping[str, Any], key: str) -> float | None:
    """The finite number under ``key``; None where it is missing or null.

    Raises:
        ValueError: no finite number.
    """
    value = record.get(key)
    if value is None:
        return None
    # Compared, not by math.isfinite, which an int above all floats breaks.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"expected a finite number in {key!r}, got {repr(value)[:100]}.")
    return float(value)


def split_columns(line: str) -> list[str]:
    """The tab-separated columns of a line, as csv quotes them; of any length.

    A quote that the line doesn't end takes the rest of it into its column: see to the number of columns.

    Raises:
        ValueError: A line break within the line.

    >>> split_columns('1\\t"a ""quoted"" text"')
    ['1', 'a "quoted" text']
    """
    csv.field_size_limit(_LONGEST_FIELD)
    try:
        return next(csv.reader([line], delimiter="\t"), [])
    except csv.Error as error:
        raise ValueError(
            f"expected tab-separated columns on one line, got {line[:200]!r} ({str(error).split(' - ')[0]})."
        ) from None


def join_title(title: str, text: str) -> str:
    """Title, one blank, text, without blanks at the ends: the document text that BEIR's own models encode.

    >>> join_title("t", ""), join_title("", "x"), join_title("t", "x")
    ('t', 'x', 't x')
    """
    return f"{title} {text}".strip()


def find_text(folder: str | Path, name: str) -> Path:
    """``folder/name``, else ``folder/name.gz``, else ``folder/name.zst``.

    Raises:
        FileNotFoundError: the folder or all of these files are missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: expected one that holds {name}.")
    for path in (folder / name, folder / f"{name}.gz", folder / f"{name}.zst"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder} holds neither {name} nor {name}.gz (or .zst).")


def short_names(paths: Iterable[str | Path]) -> dict[str, str]:
    """Path -> its shortest end that no other path has.

    >>> list(short_names(["data/nq/train.jsonl", "data/tq/train.jsonl", "data/dev.jsonl"]).values())
    ['nq/train.jsonl', 'tq/train.jsonl', 'dev.jsonl']
    """
    parts = {str(path): Path(path).as_posix().split("/") for path in paths}
    names = {}
    for path, own in parts.items():
        others = [other for other in parts.values() if other != own]
        lengths = range(1, len(own))
        length = next((n for n in lengths if all(other[-n:] != own[-n:] for other in others)), len(own))
        names[path] = "/".join(own[-length:])
    return names


def checksum(path: str | Path) -> str:
    """SHA-256 of a file's bytes as they lie there, what ``sha256sum`` prints."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def compression_of(path: str | Path) -> str | None:
    """``"gzip"``, ``"zstd"`` or None, by the first bytes of a file.

    Raises:
        FileNotFoundError: no file of that name.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file." if path.exists() else f"{path} does not exist.")
    with path.open("rb") as file:
        start = file.read(4)
    return "gzip" if start[:2] == b"\x1f\x8b" else "zstd" if start == b"\x28\xb5\x2f\xfd" else None


def open_plain(path: str | Path) -> BinaryIO:
    """Open a file to read its uncompressed bytes; broken data raise one of ``BROKEN`` on the way.

    Raises:
        FileNotFoundError: no file of that name.
        ImportError: zstd data without a package that reads it.
    """
    path = Path(path)
    packed = compression_of(path)
    if packed == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if packed == "zstd":
        return cast(BinaryIO, io.BufferedReader(_Zstd(path), 2**20))
    return path.open("rb")


class _Zstd(io.RawIOBase):
    """The uncompressed bytes of a zstd file, frame after frame; a file that was cut off raises EOFError."""

    def __init__(self, path: Path) -> None:
        try:
            if importlib.util.find_spec("compression") is not None:  # Python 3.14 brings its own
                make: Callable[[], Any] = importlib.import_module("compression.zstd").ZstdDecompressor
            else:
                make = importlib.import_module("zstandard").ZstdDecompressor().decompressobj
        except ImportError as error:
            raise ImportError(
                f'{path} is compressed by zstd, which needs zstandard: pip install "st-aggretriever[zst]" ({error}).'
            ) from None
        self._make, self._frame, self._within = make, make(), False
        self._file = path.open("rb")
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = (self._frame.unused_data if self._frame.eof else b"") or self._file.read(2**18)
            if self._frame.eof:
                self._frame, self._within = self._make(), False
            if not chunk:
                if self._within:
                    raise EOFError("the file ends before its end-of-stream marker was reached")
                return 0
            self._within = True
            try:
                self._ready = self._frame.decompress(chunk)
            except Exception as error:  # each package has its own class
                raise EOFError(str(error)) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
