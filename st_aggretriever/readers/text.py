"""Lines of plain and gzip text files, JSON objects with their place in the file, and the text fields in them."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

T = TypeVar("T")

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# trec_eval holds ids as C strings in UTF-8: a NUL cuts them short, a lone surrogate has no UTF-8 form.
_NOT_IN_IDS = re.compile("[\0\ud800-\udfff]")


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Stream ``(line number from 1, line without its end)`` of a UTF-8 file, plain or gzip (told by content).

    Raises:
        FileNotFoundError: no file of that name.
        ValueError: an empty file, a blank line, bytes that are not UTF-8, broken gzip data.
    """
    number = 0
    with _open(Path(path)) as file:
        try:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                if not raw.strip():
                    raise ValueError(f"{path} line {number}: the line is empty. Remove it.")
                try:
                    # surrogatepass: a lone surrogate in a text is data; `text_of` replaces it.
                    line = raw.decode("utf-8", "surrogatepass")
                except UnicodeDecodeError as error:
                    raise ValueError(f"{path} line {number}: expected UTF-8 text, got {error}.") from None
                yield number, line.rstrip("\r\n")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} line {number + 1}: broken gzip data ({error}). Fetch the file again.") from None
    if number == 0:
        raise ValueError(f"{path} is empty: expected at least one line.")


def read_jsonl(path: str | Path, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Stream ``parse(object)`` for the JSON object on each line; a ValueError gets the file and the line number.

    Raises:
        ValueError: what :func:`read_lines` raises, malformed JSON, a line that isn't an object, what ``parse`` raises.
    """
    for number, line in read_lines(path):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"expected a JSON object, got {type(record).__name__}.")
            value = parse(record)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path} line {number}: expected a JSON object, got malformed JSON ({error.msg}, column {error.colno})."
            ) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {number}: {error}") from None
        yield value


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
        raise ValueError(f"expected an id without NUL and lone surrogates in {key!r}, got {value!r}.")
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


def join_title(title: str, text: str) -> str:
    """Title, one blank, text, without blanks at the ends: the document text that BEIR's own models encode.

    >>> join_title("t", ""), join_title("", "x"), join_title("t", "x")
    ('t', 'x', 't x')
    """
    return f"{title} {text}".strip()


def find_text(folder: str | Path, name: str) -> Path:
    """``folder/name``, else ``folder/name.gz``.

    Raises:
        FileNotFoundError: the folder or both files are missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: expected one that holds {name}.")
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder} holds neither {name} nor {name}.gz.")


def checksum(path: str | Path) -> str:
    """SHA-256 of a file's bytes as they lie there, what ``sha256sum`` prints."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _open(path: Path) -> BinaryIO:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file." if path.exists() else f"{path} does not exist.")
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path, "rb")) if zipped else path.open("rb")
