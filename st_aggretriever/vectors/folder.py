"""Vectors and ids on disk: blocks that are whole or absent, and a manifest that says what made them.

A folder holds ``manifest.json`` and, for each block, ``block-00000.npy`` ((n, dim) float32 or float16), or
``block-00000.parquet`` (ids and vectors), beside ``block-00000.json`` (its ids, its checksums, and counts: texts that
were cut, whose vector can't be folded, that were left out, and tokens). A block counts once its JSON file, which is
written last, is there. Until all are there the folder is called ``NAME.partial``, and the process that writes it holds
a lock on the file ``.lock`` in it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from st_aggretriever.atomic import check_output, claim_partial, lock_folder, partial_of, replacing
from st_aggretriever.folding import LexicalPart, fold_part
from st_aggretriever.vectors.blocks import (
    Layout,
    block_path,
    check_dtype,
    extra_files,
    read_block,
    record_path,
    rows_of,
    said_if_full,
    to_dtype,
    write_block,
)
from st_aggretriever.vectors.manifest import (
    FILES,
    FINISHED,
    FORMAT,
    SUMMED,
    blocks_hash,
    contradiction,
    counted,
    manifest_hash,
    read_manifest,
    read_record,
    sums_of,
)

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
        claim_partial(self.partial, FORMAT)
        try:
            self._lock: IO[Any] | None = lock_folder(self.partial)
        except FileNotFoundError:  # its writer has finished just now
            check_output(self.folder)
            raise
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is KeyboardInterrupt:
            kept = f"finished blocks are kept in {self.partial}, the same command goes on from there"
            raise KeyboardInterrupt(f"interrupted; {kept}") from None

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
        """Whether block ``number`` is complete; one whose files are damaged or gone is said, and is there no more.

        Raises:
            OSError: It is there and can't be read.
        """
        if not record_path(self.partial, number).exists():
            return False
        try:
            read_block(self.partial, number, Layout.of(self.manifest))
        except (ValueError, FileNotFoundError) as error:
            logger.warning("%s. It is made again.", str(error).removesuffix(" Encode again.").rstrip("."))
            record_path(self.partial, number).unlink(missing_ok=True)  # which says to other processes that it is there
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
        if (wrong := contradiction(complete, finished=True)) is not None:
            raise ValueError(f"{self.partial} can't be completed: {wrong}. Were the texts changed meanwhile?")
        self._write_manifest(complete)
        self.partial.rename(self.folder)
        (self.folder / ".lock").unlink(missing_ok=True)
        self.close()
        return complete


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

        No vector is read: whether these are unchanged is what :func:`st_aggretriever.vectors.verify.verify` tells.

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
