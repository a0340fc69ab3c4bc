"""Whether vectors on disk are what their manifest says: counts, ids, checksums, finite numbers, the model's hash."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from st_aggretriever.atomic import partial_of
from st_aggretriever.vectors.blocks import Layout, block_path, blocks_there, extra_files, read_block
from st_aggretriever.vectors.folder import VectorFolder
from st_aggretriever.vectors.manifest import SUMMED, blocks_hash, counted, ids_hash, read_record, sums_of
from st_aggretriever.vectors.parquet import read_parquet


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


def check_block(folder: Path, number: int, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a block, whose files are whole, of the manifest's dtype and dimension, unchanged and finite.

    Raises:
        ValueError: It isn't so; the sentence names the file.
        OSError: It is missing or can't be read.
    """
    layout = Layout.of(manifest)
    record, vectors = read_block(folder, number, layout)
    path = block_path(folder, number, layout.files)
    ids: list[str] = record["ids"]
    if hashlib.sha256(np.ascontiguousarray(vectors).data).hexdigest() != record["sha256"]:
        raise ValueError(f"{path} was changed: its numbers don't give the checksum written beside them.")
    if "ids_sha256" not in record:
        raise ValueError(f"{path.with_suffix('.json')} has no checksum of its ids.")
    if record["ids_sha256"] != ids_hash(ids):
        raise ValueError(f"{path.with_suffix('.json')} was changed: its ids don't give the checksum beside them.")
    if absent := [name for name in SUMMED if name not in record]:
        raise ValueError(f"{path.with_suffix('.json')} was changed: it has no {absent[0]!r}.")
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise ValueError(f"{path}: the vector of {ids[bad[0]]!r} is not finite (NaN or infinity).")
    return record


def check_order(folder: Path, manifest: Mapping[str, Any], sums: Iterable[tuple[str, str]]) -> None:
    """Whether blocks of these checksums, in this order, are those that the folder was finished with.

    Raises:
        ValueError: They aren't, or the manifest doesn't say.
    """
    if manifest.get("blocks_sha256") != blocks_hash(sums):
        raise ValueError(
            f"{folder}: its blocks aren't those that it was finished with, or not in that order: the checksum in its"
            " manifest is another one."
        )


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
    faults += [
        Fault(None, f"{folder.folder / name} is no file of the {counted(manifest['blocks'], 'block')} of its manifest.")
        for name in extra_files(folder.folder, manifest)
    ]
    if "sha256" not in manifest:
        faults.append(Fault(None, f"{folder.folder / 'manifest.json'} has no checksum of itself."))
    ids, checksums = Ids(), []
    rows, sums = 0, dict.fromkeys(SUMMED, 0)
    whole = True
    there = min(manifest["blocks"], blocks_there(folder.folder))
    if there < manifest["blocks"]:  # said once: of a wrong manifest there may be any number
        missing = counted(manifest["blocks"] - there, "block")
        faults.append(Fault(there, f"{block_path(folder.folder, there, 'json')} is missing, and with it {missing}."))
        whole = False
    for number in tqdm(range(there), desc="blocks", disable=None):
        try:
            record = check_block(folder.folder, number, manifest)
        except (ValueError, OSError) as error:
            unreadable = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)  # perhaps whole
            block = None if unreadable or _is_of_another_manifest(folder.folder, number, manifest) else number
            faults.append(Fault(block, " ".join(str(error).split())))
            whole = False
            continue
        ids.add(number, record["ids"])
        checksums.append(sums_of(record))
        rows += len(record["ids"])
        for name in SUMMED:
            sums[name] += record.get(name) or 0
    if whole:
        faults += _counts(folder, rows, sums)
    try:
        if whole:
            check_order(folder.folder, manifest, checksums)
        ids.refuse_repeated(folder.ids)
    except ValueError as error:
        where = "" if str(error).startswith(str(folder.folder)) else f"{folder.folder}: "
        faults.append(Fault(None, f"{where}{error}"))
    return faults


def _is_of_another_manifest(folder: Path, number: int, manifest: Mapping[str, Any]) -> bool:
    """Whether a block is unchanged, by its own checksum, but of other numbers than the manifest says: not its fault."""
    layout = Layout.of(manifest)
    path = block_path(folder, number, layout.files)
    try:
        vectors = read_parquet(path)[1] if layout.files == "parquet" else np.load(path, allow_pickle=False)
        unchanged = (
            hashlib.sha256(np.ascontiguousarray(vectors).data).hexdigest() == read_record(folder, number)["sha256"]
        )
    except Exception:  # it is damaged, in whatever way
        return False
    return unchanged and (vectors.dtype.name, vectors.shape[1:]) != (layout.dtype, (layout.dimension,))


def _counts(folder: VectorFolder, rows: int, sums: Mapping[str, int]) -> list[Fault]:
    """Whether blocks and manifest agree; whether the manifest and the collection do was asked when it was read."""
    said = {"rows": folder.rows, **{name: folder.manifest.get(name) for name in SUMMED}}
    found = {"rows": rows, **sums}
    return [
        Fault(None, f"{folder.folder}: {name} of its blocks: {found[name]:,}, of its manifest: {said[name]:,}.")
        for name in said
        if said[name] is not None and said[name] != found[name]
    ]


def reopen(folder: VectorFolder, faults: Sequence[Fault]) -> Path:
    """Take the damaged blocks away and call the folder unfinished, so that the same encode command makes them again.

    Returns:
        The folder's new name.

    Raises:
        ValueError: A fault that isn't a block's.
        FileExistsError: Something of the new name is there.
    """
    if any(fault.block is None for fault in faults):
        raise ValueError(
            f"{folder.folder} can't be mended, not all that is wrong is damage of a block: make readable what can't be"
            " read and remove what doesn't belong there, or remove the whole folder and encode again."
        )
    partial = partial_of(folder.folder)
    if partial.exists():
        raise FileExistsError(f"{partial} exists. Remove it.")
    for number in sorted({fault.block for fault in faults if fault.block is not None}):
        for ending in ("json", folder.layout.files):  # without its record a block doesn't count
            block_path(folder.folder, number, ending).unlink(missing_ok=True)
    # Its name says so from now on; until then it is a folder with blocks missing, which every reader refuses.
    folder.folder.rename(partial)
    return partial
