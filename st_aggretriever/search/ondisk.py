"""An inverted file of compressed codes that stays on disk, for more vectors than fit in memory.

A folder holds ``index.faiss`` (cells and codebooks), ``lists.ivfdata`` (the codes, memory-mapped), ``ids.bin`` and
``ids.npy`` (the documents' ids, and where each begins) and ``manifest.json``, which says last how long each of these
is. While it is built it is called ``NAME.partial`` and also holds the trained index and the parts filled so far, so
that building goes on where it was stopped; on disk are all codes twice then.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from st_aggretriever.atomic import check_output, claim_partial, lock_folder, partial_of, replacing
from st_aggretriever.readers.text import checksum
from st_aggretriever.search.approximate import (
    CHUNK,
    faiss_reason,
    faiss_says,
    load_faiss,
    set_parameters,
    training_sample,
)
from st_aggretriever.search.exact import Hits, check_vectors
from st_aggretriever.vectors.blocks import said_if_full
from st_aggretriever.vectors.folder import VectorFolder
from st_aggretriever.vectors.manifest import counted

FORMAT = "st_aggretriever index on disk, 2"
FILES = ("index.faiss", "lists.ivfdata", "ids.bin", "ids.npy")
PART_ROWS = 1_000_000  # vectors whose codes are in memory at a time
TRAINING_VECTORS = 1_000_000


def build_on_disk(
    folders: Sequence[VectorFolder],
    factory: str,
    output: str | Path,
    *,
    training_vectors: int = TRAINING_VECTORS,
    part_rows: int = PART_ROWS,
) -> Path:
    """Train an index on a sample of all vectors, encode these part by part and put the parts together on disk.

    The inner product is its measure. Memory holds the sample while it trains, then one part's codes.

    Args:
        folders: See :func:`st_aggretriever.vectors.shards.open_shards`.
        factory: Of an inverted file, as Faiss's ``index_factory`` takes it, for instance ``"OPQ96,IVF65536,PQ96"``.
        output: Folder to write.
        training_vectors: Spread evenly over all; Faiss wants at least 39 a cell.
        part_rows: Vectors a part.

    Raises:
        ValueError: Faiss doesn't know the index, it is no inverted file, there are too few vectors to train it, or what
            lies in ``OUTPUT.partial`` was begun otherwise.
        FileExistsError: The folder exists.
        BlockingIOError: Another process is writing it.
        ImportError: No working Faiss.
    """
    faiss = load_faiss()
    check_output(output)
    for folder in folders:
        if folder.manifest["side"] != "document":
            raise ValueError(f"{folder.folder} holds query vectors; expected document vectors to build an index from.")
    dimension = folders[0].dimension
    index = faiss_says(factory, lambda: faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT))
    cells = faiss.try_extract_index_ivf(index)
    if cells is None or cells.nlist < 1 or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"{factory!r} is no inverted file by inner product, for instance IVF65536,PQ96.")
    manifest = {
        "format": FORMAT,
        "factory": factory,
        "training_vectors": training_vectors,
        "part_rows": part_rows,
        "dimension": dimension,
        "rows": sum(folder.rows for folder in folders),
        "vectors_sha256": manifests_hash(folders),
    }
    for folder in folders:
        folder.check_files()
    partial = partial_of(output)
    claim_partial(partial, FORMAT)
    with lock_folder(partial), said_if_full(partial), _kept(partial):
        _begin(partial, manifest)
        if not (partial / "index.faiss").exists():
            if not (partial / "trained.faiss").exists():
                sample = training_sample(folders, training_vectors)
                faiss_says(factory, lambda: index.train(sample))
                _write(partial / "trained.faiss", index)
            faiss_says(factory, lambda: _fill(partial, folders, part_rows))
            faiss_says(factory, lambda: _put_together(partial))
        _write_ids(partial, folders)
        for path in (partial / "trained.faiss", *partial.glob("part-*.faiss")):
            path.unlink(missing_ok=True)
        with replacing(partial / "manifest.json") as file:
            file.write(json.dumps({**manifest, **_contents(partial)}, indent=2) + "\n")
        partial.rename(output)
        (Path(output) / ".lock").unlink(missing_ok=True)
    return Path(output)


class OnDiskIndex:
    """What :func:`build_on_disk` wrote; memory holds the cells' centroids and what a search touches.

    Args:
        path: The folder.
        folders: The vectors it was built from.

    Raises:
        FileNotFoundError: No such folder.
        ValueError: It was built from other vectors, or is damaged.
        ImportError: No working Faiss.
    """

    def __init__(self, path: str | Path, folders: Sequence[VectorFolder]) -> None:
        faiss = load_faiss()
        path = Path(path)
        if not (path / "manifest.json").is_file():
            raise FileNotFoundError(f"{path} is no index on disk: it has no manifest.json. Build it by index.")
        self.path = path
        self.manifest = _read_manifest(path / "manifest.json")
        if self.manifest["vectors_sha256"] != manifests_hash(folders):
            raise ValueError(
                f"{path} was built from other vectors than those of --index, or from other folders of the same (index"
                " after merge). Build it again by index."
            )
        # Before anything is mapped: reading beyond the end of a mapped file kills the process.
        contents = _contents(path)
        for name, found in contents["bytes"].items():
            if found != self.manifest["bytes"].get(name):
                raise _damaged(
                    path / name, f"it holds {counted(found, 'byte')}, not {self.manifest['bytes'].get(name)}"
                )
        if contents["index_sha256"] != self.manifest["index_sha256"]:
            raise _damaged(path / "index.faiss", "its bytes don't give the checksum in the manifest")
        try:
            self.index = faiss.read_index(str(path / "index.faiss"), faiss.IO_FLAG_ONDISK_SAME_DIR)
        except (RuntimeError, MemoryError) as error:
            raise _damaged(path / "index.faiss", faiss_reason(error)) from None
        try:
            self.starts = np.load(path / "ids.npy", mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, SyntaxError, TypeError):  # with advice on pickles
            raise _damaged(path / "ids.npy", "it begins otherwise than a file of numpy") from None
        self.ids = np.memmap(path / "ids.bin", np.uint8, mode="r")
        if (self.starts.dtype, self.starts.shape) != (np.dtype(np.int64), (self.manifest["rows"] + 1,)):
            raise _damaged(path / "ids.npy", f"it holds {self.starts.dtype} {self.starts.shape}")
        if self.index.ntotal != self.manifest["rows"]:
            raise _damaged(path / "index.faiss", f"it counts {counted(self.index.ntotal, 'vector')}")

    def search(self, query_vectors: np.ndarray, top_k: int, parameters: str = "") -> Hits:
        """The ``top_k`` best that the index finds; where it finds fewer, id None and score -inf fill up.

        Args:
            parameters: Of the search, for instance ``"nprobe=64"``; they stay until others are given.

        Raises:
            ValueError: top_k below 1, vectors that don't fit, parameters that Faiss doesn't know, a damaged file.
        """
        if top_k < 1:
            raise ValueError(f"search: top_k must be at least 1, got {top_k}.")
        queries = check_vectors(range(len(query_vectors)), query_vectors, "query", dim=self.manifest["dimension"])
        set_parameters(self.manifest["factory"], self.index, parameters)
        scores, positions = self.index.search(queries, min(top_k, self.index.ntotal))
        ids = np.empty(positions.shape, object)
        for place in np.ndindex(positions.shape):
            ids[place] = self._id(int(positions[place]))
        return Hits(np.where(positions < 0, -np.inf, scores).astype(np.float32), ids)

    def _id(self, position: int) -> str | None:
        if position < 0:
            return None
        if position >= len(self.starts) - 1:
            raise _damaged(self.path / "lists.ivfdata", f"it names vector {position:,}")
        start, end = (int(place) for place in self.starts[position : position + 2])
        if not 0 <= start < end <= len(self.ids):
            raise _damaged(self.path / "ids.npy", f"id {position:,} lies from byte {start:,} to {end:,}")
        try:
            return bytes(self.ids[start:end]).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _damaged(self.path / "ids.bin", str(error)) from None


@contextmanager
def _kept(partial: Path) -> Iterator[None]:
    """Say at an interruption what it leaves."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {partial} is kept, the same command goes on from there") from None


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is damaged: {reason.rstrip('.')}. Build the index again by index.")


def _contents(folder: Path) -> dict[str, Any]:
    """What is known of an index's files without reading the large ones.

    Raises:
        FileNotFoundError: One is missing.
    """
    for name in FILES:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing. Build the index again by index.")
    sizes = {name: (folder / name).stat().st_size for name in FILES}
    return {"bytes": sizes, "index_sha256": checksum(folder / "index.faiss")}


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not of the format {FORMAT!r}. Build the index again by index.")
    kinds = {"factory": str, "dimension": int, "rows": int, "vectors_sha256": str, "bytes": dict, "index_sha256": str}
    for name, kind in kinds.items():
        if type(manifest.get(name)) is not kind:
            raise _damaged(path, f"{name!r} must be of the type {kind.__name__}, got {manifest.get(name)!r}")
    return manifest


def manifests_hash(folders: Sequence[VectorFolder]) -> str:
    """SHA-256 of the folders' manifests, which name model, collection and numbers."""
    return hashlib.sha256(json.dumps([folder.manifest for folder in folders], sort_keys=True).encode()).hexdigest()


def _begin(partial: Path, manifest: dict[str, Any]) -> None:
    for left in partial.glob(".*.tmp"):
        left.unlink()
    path = partial / "manifest.json"
    if path.exists():
        try:
            begun = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise _damaged(path, str(error)) from None
        begun = begun if isinstance(begun, dict) else {}
        if {key: begun.get(key) for key in manifest} == manifest:
            return
        if any(partial.glob("*.faiss")):  # else nothing was trained yet, and nothing is lost
            before, now = (
                ", ".join(f"{key} {values.get(key)}" for key in manifest if begun.get(key) != manifest[key])
                for values in (begun, manifest)
            )
            raise ValueError(f"{partial} was begun with {before}; now it is {now}. Name another output, or remove it.")
    with replacing(path) as file:
        file.write(json.dumps(manifest, indent=2) + "\n")


def _fill(partial: Path, folders: Sequence[VectorFolder], part_rows: int) -> None:
    """Write the parts that aren't there: the trained index with some of the vectors, by their positions in all."""
    total = sum(folder.rows for folder in folders)
    with tqdm(total=total, desc="vectors", unit="vector", disable=None) as bar:
        for number, (start, blocks) in enumerate(_parts(folders, part_rows)):
            path = partial / f"part-{number:05d}.faiss"
            if path.exists():
                bar.update(sum(len(folder.ids(block)) for folder, block in blocks))
                continue
            index = _read(partial / "trained.faiss")
            for folder, block in blocks:
                ids, vectors = folder.read(block)
                if not ids:
                    continue
                numbers = check_vectors(ids, np.asarray(vectors, np.float32), "document")
                index.add_with_ids(numbers, np.arange(start, start + len(ids), dtype=np.int64))
                start += len(ids)
                bar.update(len(ids))
            _write(path, index)


def _parts(folders: Sequence[VectorFolder], part_rows: int) -> Iterator[tuple[int, list[tuple[VectorFolder, int]]]]:
    """Position of its first vector and blocks of each part, of about so many rows."""
    start = rows = 0
    blocks: list[tuple[VectorFolder, int]] = []
    for folder in folders:
        for number in range(folder.manifest["blocks"]):
            blocks.append((folder, number))
            rows += len(folder.ids(number))
            if rows >= part_rows:
                yield start, blocks
                start, rows, blocks = start + rows, 0, []
    if blocks:
        yield start, blocks


def _put_together(partial: Path) -> None:
    """One index whose inverted lists are a file, of all parts; these are memory-mapped meanwhile."""
    faiss = load_faiss()
    parts = [_read(path, faiss.IO_FLAG_MMAP) for path in sorted(partial.glob("part-*.faiss"))]
    lists = faiss.InvertedListsPtrVector()
    for part in parts:
        lists.push_back(faiss.extract_index_ivf(part).invlists)
    index = _read(partial / "trained.faiss")
    inverted = faiss.extract_index_ivf(index)
    data = partial / "lists.ivfdata"
    data.unlink(missing_ok=True)
    # Faiss maps the file before it is filled: a disk that is full then kills the process.
    if shutil.disk_usage(partial).free < sum(part.ntotal for part in parts) * (inverted.code_size + 8):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    on_disk = faiss.OnDiskInvertedLists(inverted.nlist, inverted.code_size, str(data))
    total = on_disk.merge_from_multiple(lists.data(), lists.size(), False)
    index.ntotal = inverted.ntotal = total
    inverted.replace_invlists(on_disk, True)
    on_disk.this.disown()  # the index owns it now
    _write(partial / "index.faiss", index)


def _read(path: Path, flags: int = 0) -> Any:
    """What an interrupted building has left."""
    try:
        return load_faiss().read_index(str(path), flags)
    except (RuntimeError, MemoryError) as error:
        raise ValueError(
            f"{path} is damaged: {faiss_reason(error)}. Remove it and run the same command again."
        ) from None


def _write(path: Path, index: Any) -> None:
    faiss = load_faiss()
    with replacing(path, "wb") as file:
        try:
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, CHUNK))
        except RuntimeError as error:
            raise OSError(f"{path} can't be written: {faiss_reason(error)}.") from None


def _write_ids(partial: Path, folders: Sequence[VectorFolder]) -> None:
    lengths = [0]
    with replacing(partial / "ids.bin", "wb") as file:
        for folder in folders:
            for number in range(folder.manifest["blocks"]):
                for key in folder.ids(number):
                    lengths.append(file.write(key.encode("utf-8")))
    with replacing(partial / "ids.npy", "wb") as file:
        np.save(file, np.cumsum(np.array(lengths, np.int64)))


def search_on_disk(
    path: str | Path,
    folders: Sequence[VectorFolder],
    query_vectors: np.ndarray,
    top_k: int,
    *,
    parameters: str = "",
) -> tuple[Hits, dict[str, Any]]:
    """The hits of an index on disk, with its size and the seconds that opening and searching took."""
    started = time.perf_counter()
    index = OnDiskIndex(path, folders)
    opened = time.perf_counter()
    hits = index.search(query_vectors, top_k, parameters)
    done = time.perf_counter()
    size = sum(file.stat().st_size for file in Path(path).iterdir())
    return hits, {
        "factory": index.manifest["factory"],
        "bytes": size,
        "seconds": {"open": round(opened - started, 3), "search": round(done - opened, 3)},
    }
