"""Vectors and ids on disk: blocks that are whole or absent, and a manifest that says what made them.

A folder holds ``manifest.json`` and, for each block, ``block-00000.npy`` ((n, dim) float32 or float16), or
``block-00000.parquet`` (ids and vectors), beside ``block-00000.json`` (its ids, its checksums, and counts: texts that
were cut, whose vector can't be folded, that were left out, and tokens). A block counts once its JSON file, which is
written last, is there. Until all are there the folder is called ``NAME.partial``, and the process that writes it holds
a lock on the file ``.lock`` in it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from st_aggretriever.atomic import replacing
from st_aggretriever.folding import LexicalPart, fold_part
from st_aggretriever.manifest import (
    DTYPES,
    FILES,
    FINISHED,
    FORMAT,
    SUMMED,
    blocks_hash,
    counted,
    ids_hash,
    manifest_hash,
    read_manifest,
    read_record,
    sums_of,
)
from st_aggretriever.parquet import read_parquet, rows_of_parquet, write_parquet

logger = logging.getLogger(__name__)

T = TypeVar("T")
READ_BYTES = 320 * 2**20  # a search of a piece costs a selection, so large pieces are faster: 100,000 of 768 dimensions
# What queries and documents must share to be compared, and how a refusal calls it.
SHARED = {
    "model_hash": "model",
    "parts": "order of parts",
    "dimension": "dimension",
    "similarity": "similarity",
}


class VectorWriter:
    """Writes blocks into ``NAME.partial`` and gives the folder its name at the end; goes on where a run was stopped.

    A context manager: leaving it, or :meth:`finish`, ends the lock that keeps a second writer out.

    Args:
        folder: The final name; it must not exist.
        manifest: What made the vectors, plain JSON values. A started folder must have the same.
        dtype: ``"float32"`` or ``"float16"``, of the numbers on disk.
        files: ``"npy"`` or ``"parquet"``, the form of a block.

    Raises:
        ValueError: An unknown dtype or form, or the started folder has another manifest (what differs is named).
        FileExistsError: The folder exists.
        FileNotFoundError: The folder that shall hold it doesn't.
        BlockingIOError: Another process is writing it.
    """

    def __init__(
        self, folder: str | Path, manifest: Mapping[str, Any], *, dtype: str = "float32", files: str = "npy"
    ) -> None:
        check_dtype(dtype)
        if files not in FILES:
            raise ValueError(f"vectors: files must be one of {', '.join(FILES)}, got {files!r}.")
        self.folder = Path(folder)
        check_output(self.folder)
        self.partial = partial_of(self.folder)
        self.manifest = _whole(manifest, dtype, files)
        self.dtype, self.files = dtype, files
        self.partial.mkdir(exist_ok=True)
        self._lock: IO[Any] | None = lock_folder(self.partial)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        if self.folder.exists():  # its writer has finished since we looked
            (self.partial / ".lock").unlink()
            self.partial.rmdir()
            check_output(self.folder)
        for left in self.partial.glob(".*.tmp"):  # of a process that was killed while writing
            left.unlink()
        if (self.partial / "manifest.json").exists():
            self._check_started()
        else:
            self._write_manifest(self.manifest)

    def __enter__(self) -> VectorWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the lock; what is written stays, to go on from."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _check_started(self) -> None:
        if (differing := _differing(self.partial, self.manifest)) is not None:
            before, after = differing
            raise ValueError(
                f"{self.partial} was begun with {before}; now it is {after}. Name another output, or remove it."
            )

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        with said_if_full(self.partial), replacing(self.partial / "manifest.json") as file:
            file.write(json.dumps(manifest, indent=2) + "\n")

    def has(self, number: int) -> bool:
        """Whether block ``number`` is complete; one whose files are damaged or gone is said, and isn't.

        Raises:
            OSError: It is there and can't be read.
        """
        if not _record_path(self.partial, number).exists():
            return False
        try:
            read_block(self.partial, number, Layout.of(self.manifest))
        except (ValueError, FileNotFoundError) as error:
            logger.warning("%s. It is made again.", str(error).removesuffix(" Encode again.").rstrip("."))
            return False
        return True

    def ids(self, number: int) -> list[str]:
        """The ids of a block that is complete."""
        ids: list[str] = read_record(self.partial, number)["ids"]
        return ids

    def write(self, number: int, ids: Sequence[str], vectors: np.ndarray, **counts: int | None) -> None:
        """Write one block, see :func:`write_block`."""
        write_block(self.partial, number, ids, vectors, dtype=self.dtype, files=self.files, **counts)

    def finish(self, blocks: int) -> dict[str, Any]:
        """Complete the manifest and give the folder its name; returns the manifest.

        Raises:
            FileNotFoundError: A file of one of the ``blocks`` is missing.
            ValueError: It is broken.
        """
        rows = 0
        counts: dict[str, list[Any]] = {name: [] for name in SUMMED}
        checksums = []
        for number in range(blocks):
            record = read_record(self.partial, number)
            path = block_path(self.partial, number, self.files)
            if rows_of(path) != len(record["ids"]):
                raise ValueError(f"{path} doesn't hold the {counted(len(record['ids']), 'row')} of its record.")
            rows += len(record["ids"])
            checksums.append(sums_of(record))
            for name, values in counts.items():
                values.append(record.get(name))
        sums = {name: None if None in values else sum(values) for name, values in counts.items()}
        complete = {**self.manifest, "rows": rows, "blocks": blocks, **sums, "blocks_sha256": blocks_hash(checksums)}
        complete["sha256"] = manifest_hash(complete)
        self._write_manifest(complete)
        self.partial.rename(self.folder)
        (self.folder / ".lock").unlink(missing_ok=True)
        self.close()
        return complete


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
        with replacing(_record_path(folder, number)) as file:
            json.dump(record, file, ensure_ascii=False)


def _write_npy(file: IO[bytes], stored: np.ndarray) -> None:
    # Not np.save, whose error doesn't say what is wrong.
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(stored))
    file.write(stored.data)


class Layout(NamedTuple):
    """How the vectors of a folder lie on disk."""

    dtype: str
    dimension: int
    files: str

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Layout:
        return cls(manifest["dtype"], manifest["dimension"], manifest.get("files", "npy"))


class VectorFolder:
    """A finished folder of vectors, read block by block.

    Args:
        folder: Where it lies.
        lexical_dim: Fold the lexical part to this many dimensions while reading: ``dimension`` and ``manifest`` are
            then the folded vectors'. Exact for float32 on disk (see :func:`st_aggretriever.fold_embeddings`).

    Attributes:
        ambiguous: Block -> places where equal stored magnitudes of opposite sign met, for rounded numbers.

    Raises:
        FileNotFoundError: No such folder, or it isn't finished.
        ValueError: It holds no vectors of this format, or they can't be folded so.
    """

    def __init__(self, folder: str | Path, lexical_dim: int | None = None) -> None:
        self.folder = Path(folder)
        if not (self.folder / "manifest.json").is_file():
            if (partial_of(self.folder) / "manifest.json").is_file():
                raise FileNotFoundError(
                    f"{partial_of(self.folder)} is an unfinished encoding: run the same encode command again."
                )
            raise FileNotFoundError(f"{self.folder} is no folder of vectors: it has no manifest.json.")
        self.manifest = read_manifest(self.folder)
        if "blocks" not in self.manifest:
            raise FileNotFoundError(f"{self.folder} is an unfinished encoding: run the same encode command again.")
        self.rows: int = self.manifest["rows"]
        self.layout = Layout.of(self.manifest)
        self._checked = False
        self.ambiguous: dict[int, int] = {}
        self._fold: tuple[LexicalPart, int] | None = None
        if lexical_dim is not None:
            self._fold_to(lexical_dim)
        self.dimension: int = self.manifest["dimension"]

    def _fold_to(self, lexical_dim: int) -> None:
        settings = self.manifest.get("lexical")
        if not settings:
            raise ValueError(
                f"{self.folder} can't be folded: its manifest names no lexical part (vectors of another kind of model, "
                "cut by truncate_dim, or written before folding was known)."
            )
        part = LexicalPart(**settings)
        if lexical_dim == part.width:
            return
        part.check(lexical_dim)
        unfoldable = self.manifest.get("unfoldable")
        if part.depends_on_texts and unfoldable != 0:
            found = (
                "how many of its texts" if unfoldable is None else f"{unfoldable:,} of its {counted(self.rows, 'text')}"
            )
            raise ValueError(
                f"{self.folder} can't be folded: {found} have no token of positive weight"
                f"{' is not known' if unfoldable is None else ''}, and under term_weight='identity' the sign of such a "
                "vector doesn't tell which half of a slice it came from. Encode with that lexical_dim."
            )
        parts = [
            [name, lexical_dim if name == "lexical_embedding" else width] for name, width in self.manifest["parts"]
        ]
        self._fold = part, lexical_dim
        self.manifest |= {
            "parts": parts,
            "dimension": sum(width for _, width in parts),
            "lexical": part._replace(width=lexical_dim)._asdict(),
        }

    @property
    def size(self) -> int:
        """Bytes of the vectors on disk."""
        return self.rows * self.layout.dimension * np.dtype(self.layout.dtype).itemsize

    def folding(self) -> str | None:
        """One sentence on what folding did to the vectors read so far; None where nothing is folded."""
        if self._fold is None:
            return None
        _, lexical_dim = self._fold
        if self.manifest["dtype"] == "float32":
            return f"{self.folder}: folded to {lexical_dim} lexical dimensions, exactly"
        return (
            f"{self.folder}: folded to {lexical_dim} lexical dimensions from {self.manifest['dtype']}, approximately: "
            f"of {self.rows * lexical_dim:,} places {sum(self.ambiguous.values()):,} hold equal stored magnitudes of "
            "opposite sign"
        )

    def check_files(self) -> None:
        """Refuse files that aren't those the manifest counts, by their names and the numbers of rows they give.

        No vector is read: whether these are unchanged is what :func:`st_aggretriever.verify.verify` tells.

        Raises:
            FileNotFoundError: A block's file is missing.
            ValueError: A file too many, one that is broken, or other rows than the manifest says.
        """
        if self._checked:
            return
        if extra := extra_files(self.folder, self.manifest):
            raise ValueError(
                f"{self.folder} also holds {extra[0]}, but its manifest counts"
                f" {counted(self.manifest['blocks'], 'block')}, from 0. Remove it, or encode again."
            )
        rows = sum(rows_of(block_path(self.folder, number, self.layout.files))
                   for number in range(self.manifest["blocks"]))  # fmt: skip
        if rows != self.rows:
            raise ValueError(
                f"{self.folder}: its blocks hold {counted(rows, 'row')}, its manifest says {self.rows:,}. Encode again."
            )
        self._checked = True

    def ids(self, number: int) -> list[str]:
        """The ids of a block."""
        ids: list[str] = read_record(self.folder, number)["ids"]
        return ids

    def read(self, number: int) -> tuple[list[str], np.ndarray]:
        """Ids and vectors (n, dim) of a block, folded where asked, in the dtype on disk.

        Raises:
            ValueError: The block isn't what the manifest says, for instance cut off; the sentence names the file.
            FileNotFoundError: It is missing.
        """
        record, vectors = read_block(self.folder, number, self.layout)
        ids: list[str] = record["ids"]
        if self._fold is not None:
            vectors, ambiguous = fold_part(vectors, *self._fold)
            self.ambiguous[number] = ambiguous or 0
        return ids, vectors

    def blocks(
        self, dtype: str | None = None, *, read_bytes: int = READ_BYTES
    ) -> Iterator[tuple[list[str], np.ndarray]]:
        """Stream ``(n ids, (n, dim) float32)``; the next piece is read meanwhile, so two are in memory.

        Args:
            dtype: ``"float16"`` rounds the numbers to half precision on the way, as an index of that dtype would
                hold them; None takes them as stored.
            read_bytes: How much to join to one piece; a block on disk at least.

        Raises:
            ValueError, FileNotFoundError: As :meth:`check_files`, before the first, and :meth:`read`.
        """
        self.check_files()
        at_once = max(1, read_bytes // max(1, self.manifest["block_size"] * self.dimension * 4))
        count = self.manifest["blocks"]
        groups = (range(start, min(start + at_once, count)) for start in range(0, count, at_once))
        yield from _ahead(self._join(group, dtype) for group in groups)

    def _join(self, numbers: range, dtype: str | None) -> tuple[list[str], np.ndarray]:
        rows = [len(read_record(self.folder, number)["ids"]) for number in numbers]
        joined = np.empty((sum(rows), self.dimension), np.float32)
        ids: list[str] = []
        for number in numbers:
            block_ids, vectors = self.read(number)
            rounded = vectors if dtype is None else to_dtype(block_ids, vectors, dtype)
            joined[len(ids) : len(ids) + len(vectors)] = rounded
            ids += block_ids
        return ids, joined

    def load(self) -> tuple[list[str], np.ndarray]:
        """All ids and vectors, (rows, dim) float32, in memory."""
        self.check_files()
        ids: list[str] = []
        vectors = np.empty((self.rows, self.dimension), np.float32)
        for block_ids, block in self.blocks():
            vectors[len(ids) : len(ids) + len(block)] = block
            ids += block_ids
        return ids, vectors


def check_comparable(queries: Mapping[str, Any], documents: Mapping[str, Any]) -> None:
    """Refuse query vectors that can't be compared with the document vectors, by their manifests.

    Raises:
        ValueError: Another model, order of parts, dimension or similarity; or sides that aren't query and document.
    """
    for manifest, side in ((queries, "query"), (documents, "document")):
        if manifest["side"] != side:
            raise ValueError(f"expected vectors of the side {side!r}, got {manifest['side']!r} by {manifest['model']}.")
    # An object without weights to hash is known by its name alone.
    hashed = queries["model_hash"] is not None and documents["model_hash"] is not None
    for key, name in (SHARED if hashed else {"model": "model", **SHARED}).items():
        if queries[key] != documents[key]:
            ours, theirs = (
                f"{manifest['model']} ({_shown(manifest[key])})" if key == "model_hash" else _shown(manifest[key])
                for manifest in (queries, documents)
            )
            raise ValueError(
                f"the queries' {name} is {ours}, the documents' is {theirs}. Encode both by one model and setting."
            )


def check_dtype(dtype: str) -> None:
    """Raises ValueError for a dtype that isn't in ``DTYPES``."""
    if dtype not in DTYPES:
        raise ValueError(f"vectors: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")


def is_finished(folder: str | Path, manifest: Mapping[str, Any], *, dtype: str, files: str) -> bool:
    """Whether the folder is there, complete, and made of what would be made now.

    Raises:
        FileExistsError: It was made of something else.
    """
    if not (Path(folder) / "manifest.json").is_file():
        return False
    if (differing := _differing(Path(folder), _whole(manifest, dtype, files))) is not None:
        before, after = differing
        raise FileExistsError(f"{folder} was made with {before}; now it is {after}. Name another output.")
    return True


def _whole(manifest: Mapping[str, Any], dtype: str, files: str) -> dict[str, Any]:
    """What is written of a manifest, to which the end adds counts and checksums."""
    form = {} if files == "npy" else {"files": files}
    return {"format": FORMAT, "dtype": dtype, **form, **json.loads(json.dumps(manifest))}


def _differing(folder: Path, manifest: Mapping[str, Any]) -> tuple[str, str] | None:
    """What differs between the folder's manifest and this one, in words: there, and here."""
    started = {"files": "npy", **read_manifest(folder)}
    now = {"files": "npy", **manifest}
    started = {key: value for key, value in started.items() if key not in FINISHED}
    keys = [key for key in {**started, **now} if started.get(key) != now.get(key)]
    if not keys:
        return None
    before, after = (", ".join(f"{key} {_shown(values.get(key))}" for key in keys) for values in (started, now))
    return before, after


def check_output(folder: str | Path) -> None:
    """Refuse a folder that exists, or whose own folder doesn't.

    Raises:
        FileExistsError, FileNotFoundError.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists. Name another output.")
    if not folder.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder of {folder} does not exist. Make it first.")


def partial_of(folder: str | Path) -> Path:
    """Where the blocks lie until the folder is complete."""
    folder = Path(folder)
    return folder.with_name(f"{folder.name}.partial")


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


@contextmanager
def said_if_full(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"no space is left for {folder} ({error.strerror}). Its finished blocks are kept: make room and run the"
            " same command again."
        ) from None


def lock_folder(folder: Path) -> IO[Any]:
    """The open file whose lock this process now holds; it ends when that is closed, or with the process.

    Raises:
        BlockingIOError: Another one holds it.
    """
    file = (folder / ".lock").open("w")
    try:
        import fcntl
    except ImportError:  # Windows: no lock
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BlockingIOError(
            f"another process is writing {folder}. Wait until it has ended, or name another output."
        ) from None
    except OSError as error:  # a file system that knows no locks
        logger.warning("%s: no lock here (%s). Don't let two processes write it.", folder, error.strerror)
    return file


def block_path(folder: Path, number: int, files: str = "npy") -> Path:
    """The file of a block's vectors."""
    return folder / f"block-{number:05d}.{files}"


def _record_path(folder: Path, number: int) -> Path:
    return folder / f"block-{number:05d}.json"


def extra_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Names of block files that don't belong to the manifest's blocks."""
    name = re.compile(rf"block-(\d{{5,}})\.(?:{Layout.of(manifest).files}|json)")
    found = ((path.name, name.fullmatch(path.name)) for path in folder.glob("block-*"))
    return sorted(name for name, match in found if match is None or int(match[1]) >= manifest["blocks"])


def blocks_there(folder: Path) -> int:
    """One more than the highest number of a block of which a file is there."""
    numbers = (path.stem.removeprefix("block-") for path in folder.glob("block-*.*"))
    return max((int(number) + 1 for number in numbers if number.isascii() and number.isdecimal()), default=0)


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


def _shown(value: Any) -> str:
    """A manifest's value in a sentence: hashes short, parts in a line."""
    if isinstance(value, str) and len(value) == 64:
        return value[:12]
    if isinstance(value, list):
        return " ; ".join(f"{name} {width}" for name, width in value)
    return str(value)


def _ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items; the next one is made in a thread while the caller works on the one before."""
    iterator = iter(items)
    with ThreadPoolExecutor(max_workers=1) as pool:
        end = object()
        waiting = pool.submit(next, iterator, end)
        while (item := waiting.result()) is not end:
            waiting = pool.submit(next, iterator, end)
            yield item  # type: ignore[misc]
            del item  # or a third block would be in memory
