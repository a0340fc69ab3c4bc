"""What stands beside vectors on disk, checked where it is read: a folder's manifest and the record of each block."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from st_aggretriever.folding import LexicalPart

FORMAT = "st_aggretriever vectors, 1"
DTYPES = ("float32", "float16")
FILES = ("npy", "parquet")  # forms of a block's vectors
SUMMED = ("truncated", "unfoldable", "tokens", "skipped")  # numbers of each block, whose sums the manifest holds
# What the manifest says only when the folder is complete: also the checksums of all blocks in their order, and of the
# manifest itself.
FINISHED = ("rows", "blocks", *SUMMED, "blocks_sha256", "sha256")


class _Field(NamedTuple):
    """What a value must be."""

    fits: Callable[[Any], bool]
    expected: str

    def or_null(self) -> _Field:
        return _Field(lambda value: value is None or self.fits(value), f"{self.expected} or null")


def _number(least: int) -> _Field:
    # Not isinstance: true is an int in Python. Larger numbers would be no lengths.
    return _Field(lambda value: type(value) is int and least <= value < 2**53, f"a whole number from {least}")


def _one_of(*values: str) -> _Field:
    return _Field(lambda value: isinstance(value, str) and value in values, " or ".join(values))


def _are_parts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(part, list) and len(part) == 2 and isinstance(part[0], str) and type(part[1]) is int and part[1] >= 0
        for part in value
    )


def _is_lexical(value: Any) -> bool:
    like = LexicalPart(0, 1)._asdict()
    return (
        isinstance(value, dict)
        and value.keys() == like.keys()
        and all(type(value[name]) is type(like[name]) for name in like)
        and value["start"] >= 0
        and value["width"] >= 1
    )


def _is_shard(value: Any) -> bool:
    return isinstance(value, list) and [type(number) for number in value] == [int, int] and 0 <= value[0] < value[1]


def _are_windows(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() >= {"window", "overlap", "cls"}


_TEXT = _Field(lambda value: isinstance(value, str), "a string")
_HASH = _Field(
    lambda value: isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef"),
    "a SHA-256 in 64 hexadecimal digits",
)
_ALWAYS = {
    "dtype": _one_of(*DTYPES),
    "side": _one_of("query", "document"),
    "model": _TEXT,
    "model_hash": _TEXT.or_null(),
    "dimension": _number(1),
    "parts": _Field(_are_parts, "a list of names with their widths"),
    "similarity": _one_of("dot", "cosine"),
    "length": _number(1).or_null(),
    "prompt": _TEXT,
    "block_size": _number(1),
}
_PERHAPS = {
    "files": _one_of(*FILES),
    "quantize": _TEXT,
    "lexical": _Field(_is_lexical, f"an object of {', '.join(LexicalPart._fields)}").or_null(),
    "windows": _Field(_are_windows, "an object of window, overlap, cls").or_null(),
    "source": _TEXT,
    "source_sha256": _TEXT,
    "texts": _number(1),
    "shard": _Field(_is_shard, "two whole numbers, which from 0 of how many"),
    **{name: _number(0).or_null() for name in SUMMED},
    "blocks_sha256": _HASH,
    "sha256": _HASH,
}
_WHEN_FINISHED = {"rows": _number(0), "blocks": _number(0)}
_RECORD = {
    "ids": _Field(
        lambda value: isinstance(value, list) and all(isinstance(key, str) for key in value), "a list of strings"
    ),
    "sha256": _HASH,
}
_PERHAPS_IN_RECORD = {"ids_sha256": _HASH, **{name: _number(0).or_null() for name in SUMMED}}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, finished or not, whose values are of their types, in their ranges and consistent.

    Raises:
        ValueError: Broken JSON, another format, a value that can't be, counts that contradict each other, or a change
            since the folder was finished; the sentence names the file.
        FileNotFoundError: There is none.
    """
    path = folder / "manifest.json"
    manifest = _read(path)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not of the format {FORMAT!r}, but {_short(manifest.get('format'))}.")
    finished = not manifest.keys().isdisjoint(FINISHED)
    _check(path, manifest, {**_ALWAYS, **(_WHEN_FINISHED if finished else {})}, _PERHAPS)
    if (wrong := contradiction(manifest, finished)) is not None:
        raise ValueError(f"{path} is broken: {wrong}. Encode again.")
    if manifest.get("sha256", found := manifest_hash(manifest)) != found:
        raise ValueError(f"{path} was changed: its values don't give the checksum in it. Undo that, or encode again.")
    return manifest


def read_record(folder: Path, number: int) -> dict[str, Any]:
    """What is written beside a block's vectors: ``ids``, ``ids_sha256``, ``sha256`` and counts.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It is broken.
    """
    path = folder / f"block-{number:05d}.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. Encode again.")
    record = _read(path)
    _check(path, record, _RECORD, _PERHAPS_IN_RECORD)
    return record


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is broken ({error}). Encode again.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is broken: expected an object, got {type(value).__name__}. Encode again.")
    return value


def _check(path: Path, values: Mapping[str, Any], needed: Mapping[str, _Field], perhaps: Mapping[str, _Field]) -> None:
    for name, field in {**needed, **perhaps}.items():
        if name not in values and name in needed:
            raise ValueError(f"{path} is broken: it has no {name!r}, {field.expected}. Encode again.")
        if name in values and not field.fits(values[name]):
            raise ValueError(
                f"{path} is broken: {name!r} must be {field.expected}, got {_short(values[name])}. Encode again."
            )


def contradiction(manifest: Mapping[str, Any], finished: bool) -> str | None:
    """What can't be true of values each of which could."""
    widths = sum(width for _, width in manifest["parts"])
    if widths != manifest["dimension"]:
        return f"its parts have {counted(widths, 'dimension')} together, 'dimension' is {manifest['dimension']}"
    lexical = manifest.get("lexical")
    if lexical and lexical["start"] + lexical["width"] > manifest["dimension"]:
        return f"its lexical part ends beyond the {manifest['dimension']} dimensions"
    if not finished or "texts" not in manifest:
        return None
    texts, size = manifest["texts"], manifest["block_size"]
    number, count = manifest.get("shard", (0, 1))
    blocks = range(number, -(-texts // size), count)
    if manifest["blocks"] != len(blocks):
        return f"{texts:,} texts in blocks of {size:,} give {counted(len(blocks), 'block')}, 'blocks' is " + str(
            manifest["blocks"]
        )
    skipped, expected = manifest.get("skipped"), texts_of(texts, size, blocks)
    if skipped is not None and manifest["rows"] + skipped != expected:
        return f"expected {counted(expected, 'text')}, got {manifest['rows']:,} rows and {skipped:,} left out"
    return None


def texts_of(texts: int, block_size: int, blocks: range) -> int:
    """How many of a collection's texts stand in some of its blocks."""
    last = -(-texts // block_size) - 1
    short = block_size * (last + 1) - texts if last in blocks else 0
    return len(blocks) * block_size - short


def ids_hash(ids: Sequence[str]) -> str:
    """SHA-256 of ids in their order."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def sums_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """The checksums of a block: of its ids and of its numbers."""
    return record.get("ids_sha256") or ids_hash(record["ids"]), record["sha256"]


def blocks_hash(sums: Iterable[tuple[str, str]]) -> str:
    """SHA-256 of the checksums of all blocks, in their order."""
    return hashlib.sha256("".join(" ".join(pair) + "\n" for pair in sums).encode()).hexdigest()


def manifest_hash(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "block"), counted(1200, "query")
    ('1 block', '1,200 queries')
    """
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def size_of(count: float) -> str:
    """Bytes for people.

    >>> size_of(2_500_000), size_of(1.5e12)
    ('2.5 MB', '1,500.0 GB')
    """
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
