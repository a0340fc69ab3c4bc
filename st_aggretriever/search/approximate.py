"""Search by one of Faiss's approximate indexes, with its recall against exact search; such an index in a file."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from st_aggretriever.atomic import replacing
from st_aggretriever.search.exact import Hits, check_vectors, pick_backend
from st_aggretriever.search.retrieve import recall, search_exactly
from st_aggretriever.vectors.folder import VectorFolder
from st_aggretriever.vectors.manifest import counted

T = TypeVar("T")

TRAINING_VECTORS = 100_000  # that an approximate index learns its cells and codes from, at most
FORMAT = "st_aggretriever index, 1"
CHUNK = 2**24  # bytes read at a time
NAMED = r"(\w+)=([^, ]*)"  # one of the parameters of a search
COUNTS = ("nprobe", "efSearch", "k_factor", "k_factor_rf")  # parameters of a search that are at least 1


@dataclass
class Built:
    """An index that holds all vectors of a folder, in the folder's order."""

    factory: str  # as Faiss's index_factory takes it, for instance "IVF1024,PQ96", "HNSW32", "IVF4096,Flat"
    index: Any  # faiss.Index
    ids: list[str]
    seconds: float  # of building, or of reading
    parameters: str = ""  # of its search, as given last: "nprobe=32"; otherwise Faiss's own


def build_index(folder: VectorFolder, factory: str, parameters: str = "") -> Built:
    """Train an index on vectors spread evenly over the folder and fill it block by block; it stays in memory.

    The inner product is its measure.

    Args:
        factory: For Faiss's ``index_factory``.
        parameters: Of its search, for instance ``"nprobe=32"``, refused before the work if they aren't the index's.

    Raises:
        ValueError: Faiss doesn't know the index or the parameters, or there are too few vectors to train it.
        ImportError: No working Faiss.
    """
    faiss = load_faiss()
    started = time.perf_counter()
    index = faiss_says(factory, lambda: faiss.index_factory(folder.dimension, factory, faiss.METRIC_INNER_PRODUCT))
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"{factory!r} doesn't compare by inner product.")
    set_parameters(factory, index, parameters)
    if not index.is_trained:
        sample = training_sample([folder], TRAINING_VECTORS)
        faiss_says(factory, lambda: index.train(sample))
    ids: list[str] = []
    for block_ids, vectors in folder.blocks():
        check_vectors(block_ids, vectors, "document")
        faiss_says(factory, functools.partial(index.add, vectors))
        ids += block_ids
    return Built(factory, index, ids, time.perf_counter() - started, parameters)


def save_index(path: str | Path, built: Built, folder: VectorFolder) -> None:
    """Write an index to a file, whole or not at all: one line of JSON on what it was built from, Faiss's bytes, and
    the SHA-256 of both, 32 bytes.

    Raises:
        OSError: It can't be written.
    """
    faiss = load_faiss()
    header = {
        "format": FORMAT,
        "factory": built.factory,
        "parameters": built.parameters,
        "vectors_sha256": vectors_hash(folder),
        "rows": len(built.ids),
        "ends_with": "sha256",
    }
    digest = hashlib.sha256()
    with replacing(path, "wb") as file:

        def write(piece: bytes) -> int:
            digest.update(piece)
            return file.write(piece)

        write(json.dumps(header).encode() + b"\n")
        try:
            faiss.write_index(built.index, faiss.PyCallbackIOWriter(write, CHUNK))
        except RuntimeError as error:
            raise OSError(f"{path} can't be written: {faiss_reason(error)}.") from None
        file.write(digest.digest())


def load_index(path: str | Path, folder: VectorFolder) -> Built:
    """Read an index that :func:`save_index` wrote for just these vectors.

    Raises:
        ValueError: No such file's content, a damaged one, or one built from other vectors.
        OSError: It can't be read.
        ImportError: No working Faiss.
    """
    faiss = load_faiss()
    started = time.perf_counter()
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {what}: expected a file that search --save-index wrote.")
    with Path(path).open("rb") as file:
        try:
            header = json.loads(file.readline(2**16))
            known = header["format"] == FORMAT and isinstance(header["factory"], str) and "vectors_sha256" in header
        except (ValueError, KeyError, TypeError, RecursionError):
            known = False
        if not known:
            raise ValueError(f"{path} is no index that search --save-index wrote.")
        if header["vectors_sha256"] != vectors_hash(folder):
            raise ValueError(
                f"{path} was built from other vectors than {folder.folder} holds: another model, setting or texts."
                " Build it again by --index-factory."
            )
        summed = header.get("ends_with") == "sha256"  # the first files had no sum
        if summed and not _is_whole(file):
            raise ValueError(f"{path} is damaged (its checksum differs). Build it again by --index-factory.")
        try:
            index = faiss.read_index(faiss.PyCallbackIOReader(file.read, CHUNK))
        except (RuntimeError, MemoryError) as error:
            raise ValueError(f"{path} is damaged ({faiss_reason(error)}). Build it again by --index-factory.") from None
        if not summed and file.read(1):
            raise ValueError(f"{path} is damaged (it goes on after the index). Build it again by --index-factory.")
    ids = [key for record in _records(folder) for key in json.loads(record)["ids"]]
    if index.ntotal != len(ids) or index.d != folder.dimension:
        raise ValueError(
            f"{path} holds {counted(index.ntotal, 'vector')}, {folder.folder} {len(ids):,}. Build it again."
        )
    built = Built(header["factory"], index, ids, time.perf_counter() - started)
    parameterise(built, str(header.get("parameters", "")))
    return built


def _is_whole(file: IO[bytes]) -> bool:
    """Whether a file's last 32 bytes are the SHA-256 of the others; its position stays."""
    here = file.tell()
    left = file.seek(0, os.SEEK_END) - hashlib.sha256().digest_size
    file.seek(0)
    digest = hashlib.sha256()
    while left > 0 and (piece := file.read(min(CHUNK, left))):
        digest.update(piece)
        left -= len(piece)
    whole = file.read() == digest.digest()
    file.seek(here)
    return whole


def vectors_hash(folder: VectorFolder) -> str:
    """SHA-256 of a folder's manifest, ids and the checksums of its vectors."""
    digest = hashlib.sha256(json.dumps(folder.manifest, sort_keys=True).encode())
    for record in _records(folder):
        digest.update(record)
    return digest.hexdigest()


def _records(folder: VectorFolder) -> Iterator[bytes]:
    """What is written beside the vectors of each block: ids and checksum."""
    for number in range(folder.manifest["blocks"]):
        yield (folder.folder / f"block-{number:05d}.json").read_bytes()


def search_approximately(
    folder: VectorFolder,
    query_vectors: np.ndarray,
    top_k: int,
    built: Built,
    parameters: str = "",
    *,
    backend: str = "auto",
    device: str | None = None,
) -> tuple[Hits, dict[str, Any]]:
    """The ``top_k`` documents that an approximate index finds, on the CPU, and what it costs.

    Its recall is the share of the exact ``top_k`` (by :func:`st_aggretriever.search.retrieve.search_exactly`, all
    queries) among what it found.

    Args:
        built: See :func:`build_index` and :func:`load_index`.
        parameters: Of the search, for instance ``"nprobe=32"``; they stay with ``built`` until others are given.
        backend, device: Of the exact search, see :func:`st_aggretriever.search.exact.search`.

    Returns:
        Hits, where a query that has fewer than ``top_k`` is filled up with id None and score -inf; and a report:
        ``recall``, ``bytes`` of the index, ``seconds`` of building or reading it, of its search and of the exact one.

    Raises:
        ValueError: Faiss doesn't know the parameters, or the query vectors don't fit.
    """
    if top_k < 1:
        raise ValueError(f"search: top_k must be at least 1, got {top_k}.")
    queries = check_vectors(range(len(query_vectors)), query_vectors, "query", dim=folder.dimension)
    index: Any = built.index
    parameterise(built, parameters)
    started = time.perf_counter()
    scores, positions = faiss_says(built.factory, lambda: index.search(queries, min(top_k, len(built.ids))), parameters)
    found = time.perf_counter()
    exact = search_exactly(folder, queries, top_k, backend=backend, device=device)
    done = time.perf_counter()
    names = np.array([*built.ids, None], dtype=object)  # Faiss's position -1, nothing more found, is the last
    hits = Hits(np.where(positions < 0, -np.inf, scores).astype(np.float32), names[positions])
    report = {
        "factory": built.factory,
        "parameters": built.parameters,
        "recall": recall(hits, exact),
        "bytes": _size(index),
        "seconds": {"build": round(built.seconds, 3), "search": round(found - started, 3),
                    "exact_search": round(done - found, 3)},
    }  # fmt: skip
    return hits, report


def training_sample(folders: Sequence[VectorFolder], limit: int) -> np.ndarray:
    """(n, dim) float32, every ``rows / limit``-th vector of the folders, all if there are no more than ``limit``.

    Of each block only the pages that hold them are read.
    """
    step = max(1, -(-sum(folder.rows for folder in folders) // limit))
    parts, skip = [], 0
    for folder in folders:
        for number in range(folder.manifest["blocks"]):
            _, vectors = folder.read(number)
            parts.append(np.asarray(vectors[skip::step], np.float32))
            skip = (skip - len(vectors)) % step
    return np.concatenate(parts)


def set_parameters(factory: str, index: Any, parameters: str) -> None:
    for name, value in re.findall(NAMED, parameters):
        # Faiss takes these as they come, and fails in the search or gives anything.
        if name.removeprefix("quantizer_") in COUNTS and not (value.isascii() and 1 <= _number(value) < 2**31):
            raise ValueError(
                f"search: {name} of the index {factory!r} must be a number from 1 to 2**31 - 1, got {value!r}."
            )
    if parameters:
        space: Any = load_faiss().ParameterSpace()
        faiss_says(factory, lambda: space.set_index_parameters(index, parameters), parameters)


def parameterise(built: Built, parameters: str) -> None:
    """Give an index parameters of its search; those that aren't named stay."""
    set_parameters(built.factory, built.index, parameters)
    named = dict(re.findall(NAMED, f"{built.parameters} {parameters}"))
    built.parameters = ",".join(f"{name}={value}" for name, value in named.items())


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def load_faiss() -> Any:
    pick_backend("faiss", "cpu")  # whose sentence names the extra
    import faiss

    return faiss


def _size(index: Any) -> int:
    """Bytes of the index as a file, counted without keeping them."""
    faiss = load_faiss()
    count = 0

    def write(piece: bytes) -> int:
        nonlocal count
        count += len(piece)
        return len(piece)

    faiss.write_index(index, faiss.PyCallbackIOWriter(write, CHUNK))
    return count


def faiss_says(factory: str, call: Callable[[], T], parameters: str = "") -> T:
    """The call's value; what Faiss complains of in lines of C++ becomes one sentence."""
    try:
        return call()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"Faiss can't make the index {factory!r} ({parameters or 'no parameters'}) of these vectors:"
            f" {faiss_reason(error)}."
        ) from None


def faiss_reason(error: Exception) -> str:
    """What is wrong, without the function, file and line of Faiss's source."""
    last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return re.sub(r"^(?:Error in .*? at \S+:\d+: )?(?:Error: )?(?:'.*' failed: )?", "", last).rstrip(". ")
