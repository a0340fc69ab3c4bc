"""One block of vectors on disk: the file of its numbers, and the record beside it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from st_aggretriever.atomic import FULL, replacing
from st_aggretriever.vectors.manifest import DTYPES, ids_hash, read_record
from st_aggretriever.vectors.parquet import read_parquet, rows_of_parquet, write_parquet


class Layout(NamedTuple):
    """How the vectors of a folder lie on disk."""

    dtype: str
    dimension: int
    files: str

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Layout:
        return cls(manifest["dtype"], manifest["dimension"], manifest.get("files", "npy"))


def write_block(
    folder: Path,
    number: int,
    ids: Sequence[str],
    vectors: np.ndarray,
    *,
    dtype: str,
    files: str = "npy",
    truncated: int | None = None,
    unfoldable: int | None = None,
    tokens: int | None = None,
    skipped: int | None = 0,
) -> None:
    """Write one block into an unfinished folder; called twice, the second replaces the first.

    Args:
        folder: ``NAME.partial``.
        number: From 0, without gaps once all are written.
        ids: n strings.
        vectors: (n, dim) float32.
        dtype: ``"float32"`` or ``"float16"``, of the numbers on disk.
        files: ``"npy"`` or ``"parquet"``.
        truncated: How many of the n texts were cut, None where that is unknown.
        unfoldable: Of how many the vector can't be folded, None where that is unknown.
        tokens: How many of the texts' tokens the model read, None where that is unknown.
        skipped: How many texts of the block were left out, so that n is smaller than it would be.

    Raises:
        ValueError: A number beyond float16, named by its id.
        OSError: It can't be written, for instance on a full disk.
    """
    stored = to_dtype(ids, vectors, dtype)
    record = {
        "ids": list(ids),
        "ids_sha256": ids_hash(ids),
        "sha256": hashlib.sha256(stored.data).hexdigest(),
        "truncated": truncated,
        "unfoldable": unfoldable,
        "tokens": tokens,
        "skipped": skipped,
    }
    with said_if_full(folder):
        with replacing(block_path(folder, number, files), "wb") as file:
            if files == "parquet":
                write_parquet(file, ids, stored)
            else:
                _write_npy(file, stored)
        with replacing(record_path(folder, number)) as file:
            json.dump(record, file, ensure_ascii=False)


def _write_npy(file: IO[bytes], stored: np.ndarray) -> None:
    # Not np.save, whose error doesn't say what is wrong.
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(stored))
    file.write(stored.data)


def check_dtype(dtype: str) -> None:
    """Raises ValueError for a dtype that isn't in ``DTYPES``."""
    if dtype not in DTYPES:
        raise ValueError(f"vectors: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")


def to_dtype(ids: Sequence[str], vectors: np.ndarray, dtype: str) -> np.ndarray:
    """``vectors`` as float32 or rounded to float16, in one piece of memory.

    Raises:
        ValueError: An unknown dtype, or a number that float16 can't hold (beyond 65,504), named by its id.
    """
    check_dtype(dtype)
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(vectors, dtype=dtype)
    if dtype == "float16" and vectors.dtype != np.float16:
        bad = np.flatnonzero(np.isinf(converted).any(axis=1))
        if len(bad):
            raise ValueError(f"the vector of {ids[bad[0]]!r} holds numbers beyond float16 (65,504). Use float32.")
    return converted


def block_path(folder: Path, number: int, files: str = "npy") -> Path:
    """The file of a block's vectors."""
    return folder / f"block-{number:05d}.{files}"


def record_path(folder: Path, number: int) -> Path:
    """The file of its ids, checksums and counts; it is written last, and a block without it isn't there."""
    return folder / f"block-{number:05d}.json"


def read_block(folder: Path, number: int, layout: Layout) -> tuple[dict[str, Any], np.ndarray]:
    """The record of a block and its vectors (n, dim), memory-mapped where the file allows that.

    Raises:
        FileNotFoundError: One of its files is missing.
        ValueError: It is broken, or not of this dtype and dimension; the sentence names the file.
    """
    record = read_record(folder, number)
    path = block_path(folder, number, layout.files)
    expected = (np.dtype(layout.dtype), (len(record["ids"]), layout.dimension))
    with _named(path):
        if layout.files == "parquet":
            ids, vectors = read_parquet(path)
            if ids != record["ids"]:
                raise ValueError("its ids aren't those of the .json file beside it")
        else:
            vectors = np.load(path, mmap_mode="r" if record["ids"] else None, allow_pickle=False)
    if (vectors.dtype, vectors.shape) != expected:
        raise ValueError(
            f"{path} holds {vectors.dtype} {vectors.shape}, expected {expected[0]} {expected[1]}. Encode again."
        )
    return record, vectors


def rows_of(path: Path) -> int:
    """How many vectors a block's file says it holds.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It is broken.
    """
    with _named(path):
        if path.suffix == ".parquet":
            return rows_of_parquet(path)
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("another version of the format than 1.0")
            return int(np.lib.format.read_array_header_1_0(file)[0][0])


def extra_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Names of block files that don't belong to the manifest's blocks."""
    name = re.compile(rf"block-(\d{{5,}})\.(?:{Layout.of(manifest).files}|json)")
    found = ((path.name, name.fullmatch(path.name)) for path in folder.glob("block-*"))
    return sorted(name for name, match in found if match is None or int(match[1]) >= manifest["blocks"])


def blocks_there(folder: Path) -> int:
    """One more than the highest number of a block of which a file is there."""
    numbers = (path.stem.removeprefix("block-") for path in folder.glob("block-*.*"))
    return max((int(number) + 1 for number in numbers if number.isascii() and number.isdecimal()), default=0)


@contextmanager
def said_if_full(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(
            f"no space is left for {folder} ({error.strerror}). Its finished blocks are kept: make room and run the"
            " same command again."
        ) from None


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong with a block's file as a sentence."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing. Encode again.") from None
    except Exception as error:  # whatever numpy and pyarrow say of a damaged header, down to the tokenizer's errors
        if isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"{path} is broken ({reason}). Encode again.") from None
