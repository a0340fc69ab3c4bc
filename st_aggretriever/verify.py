"""Whether vectors on disk are what their manifest says: counts, ids, checksums, finite numbers, the model's hash."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from st_aggretriever.vectors import SUMMED, VectorFolder, ids_hash, partial_of, read_block, read_record


class Fault(NamedTuple):
    """What is wrong."""

    block: int | None  # None: with the folder as a whole
    sentence: str


class Ids:
    """Finds ids that occur twice, in 8 bytes an id."""

    def __init__(self) -> None:
        self._keys = array("Q")
        self._blocks: list[tuple[int, int]] = []  # block, its number of ids

    def add(self, block: int, ids: Sequence[str]) -> None:
        self._keys.extend(
            int.from_bytes(hashlib.blake2b(str(key).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
            for key in ids
        )
        self._blocks.append((block, len(ids)))

    def refuse_repeated(self, read: Callable[[int], Sequence[str]]) -> None:
        """Raises ValueError for an id that occurs twice; ``read`` gives a block's ids again."""
        keys = np.frombuffer(self._keys, np.uint64)
        ordered = np.sort(keys)
        suspects = ordered[1:][ordered[1:] == ordered[:-1]]  # or two ids of one 64-bit hash
        seen: dict[str, int] = {}
        start = 0
        for block, count in self._blocks if len(suspects) else ():
            if np.isin(keys[start : start + count], suspects).any():
                for key, suspect in zip(read(block), np.isin(keys[start : start + count], suspects), strict=True):
                    if suspect and key in seen:
                        raise ValueError(f"id {key!r} is in block {seen[key]} and in block {block}.")
                    if suspect:
                        seen[key] = block
            start += count


def check_block(folder: Path, number: int, manifest: Mapping[str, Any]) -> list[str]:
    """The ids of a block, whose files are whole, of the manifest's dtype and dimension, unchanged and finite.

    Raises:
        ValueError: It isn't so; the sentence names the file.
        OSError: It is missing or can't be read.
    """
    record, vectors = read_block(folder, number, manifest["dtype"], manifest["dimension"])
    path = folder / f"block-{number:05d}.npy"
    ids: list[str] = record["ids"]
    if hashlib.sha256(np.ascontiguousarray(vectors).data).hexdigest() != record["sha256"]:
        raise ValueError(f"{path} was changed: its numbers don't give the checksum written beside them.")
    if record.get("ids_sha256", found := ids_hash(ids)) != found:
        raise ValueError(f"{path.with_suffix('.json')} was changed: its ids don't give the checksum beside them.")
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise ValueError(f"{path}: the vector of {ids[bad[0]]!r} is not finite (NaN or infinity).")
    return ids


def verify(folder: VectorFolder, *, model_hash: str | None = None) -> list[Fault]:
    """All that is wrong with a folder of vectors, in the order of its blocks; memory holds a block and 8 bytes an id.

    Args:
        model_hash: Of the model that should have made them (see :func:`st_aggretriever.encoding.model_hash`, without
            its quantisation); None doesn't ask.
    """
    manifest = folder.manifest
    faults = []
    if model_hash is not None and manifest["model_hash"] != model_hash:
        faults.append(
            Fault(None, f"{folder.folder} was made by another model, {manifest['model']} "
                        f"({str(manifest['model_hash'])[:12]}), than the one named ({model_hash[:12]}).")
        )  # fmt: skip
    ids = Ids()
    rows, sums = 0, dict.fromkeys(SUMMED, 0)
    for number in tqdm(range(manifest["blocks"]), desc="blocks", disable=None):
        try:
            keys = check_block(folder.folder, number, manifest)
            record = read_record(folder.folder, number)
        except (ValueError, OSError) as error:
            block = None if _is_of_another_manifest(folder.folder, number, manifest) else number
            faults.append(Fault(block, " ".join(str(error).split())))
            continue
        ids.add(number, keys)
        rows += len(keys)
        for name in SUMMED:
            sums[name] += record.get(name) or 0
    if not faults:
        faults += _counts(folder, rows, sums)
    try:
        ids.refuse_repeated(folder.ids)
    except ValueError as error:
        faults.append(Fault(None, f"{folder.folder}: {error}"))
    return faults


def _is_of_another_manifest(folder: Path, number: int, manifest: Mapping[str, Any]) -> bool:
    """Whether a block is unchanged, by its own checksum, but of other numbers than the manifest says: not its fault."""
    try:
        vectors = np.load(folder / f"block-{number:05d}.npy", allow_pickle=False)
        unchanged = (
            hashlib.sha256(np.ascontiguousarray(vectors).data).hexdigest() == read_record(folder, number)["sha256"]
        )
    except (ValueError, OSError, KeyError, EOFError):
        return False
    return unchanged and (vectors.dtype.name, vectors.shape[1:]) != (manifest["dtype"], (manifest["dimension"],))


def _counts(folder: VectorFolder, rows: int, sums: Mapping[str, int]) -> list[Fault]:
    """Whether blocks, manifest and the collection's size agree."""
    manifest = folder.manifest
    said = {"rows": manifest["rows"], **{name: manifest.get(name) for name in SUMMED}}
    found = {"rows": rows, **sums}
    faults = [
        Fault(None, f"{folder.folder}: its blocks hold {found[name]:,} {name}, its manifest says {said[name]:,}.")
        for name in said
        if said[name] is not None and said[name] != found[name]
    ]
    if "texts" in manifest:
        number, count = manifest.get("shard", (0, 1))
        texts, size = manifest["texts"], manifest["block_size"]
        expected = texts_of(texts, size, range(number, -(-texts // size), count))
        if rows + sums["skipped"] != expected:
            left_out = sums["skipped"]
            faults.append(
                Fault(None, f"{folder.folder}: expected {expected:,} texts, got {rows:,} and {left_out:,} left out.")
            )
    return faults


def texts_of(texts: int, block_size: int, blocks: range) -> int:
    """How many of a collection's texts stand in some of its blocks."""
    last = -(-texts // block_size) - 1
    short = block_size * (last + 1) - texts if last in blocks else 0
    return len(blocks) * block_size - short


def reopen(folder: VectorFolder, faults: Sequence[Fault]) -> Path:
    """Take the damaged blocks away and call the folder unfinished, so that the same encode command makes them again.

    Returns:
        The folder's new name.

    Raises:
        ValueError: A fault that isn't a block's.
        FileExistsError: Something of the new name is there.
    """
    if any(fault.block is None for fault in faults):
        raise ValueError(f"{folder.folder} can't be mended: what is wrong with it is no block's. Encode it again.")
    partial = partial_of(folder.folder)
    if partial.exists():
        raise FileExistsError(f"{partial} exists. Remove it.")
    for number in sorted({fault.block for fault in faults if fault.block is not None}):
        for ending in ("json", "npy"):  # without its record a block doesn't count
            (folder.folder / f"block-{number:05d}.{ending}").unlink(missing_ok=True)
    # Its name says so from now on; until then it is a folder with blocks missing, which every reader refuses.
    folder.folder.rename(partial)
    return partial
