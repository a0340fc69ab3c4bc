"""Shards: the blocks of one collection, shared out over processes or machines, and put together again."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from st_aggretriever.atomic import partial_of
from st_aggretriever.vectors.blocks import block_path, said_if_full
from st_aggretriever.vectors.folder import VectorFolder, VectorWriter
from st_aggretriever.vectors.manifest import FINISHED, counted, read_record, sums_of
from st_aggretriever.vectors.verify import Ids, check_block, check_order

Shard = tuple[int, int]  # (i, n): which, from 0, of how many

# Variables with a process's number and the number of processes, as torchrun, srun and Slurm's job arrays set them.
ENVIRONMENT = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
)
_NAME = re.compile(r"shard-(\d+)-of-(\d+)")


def check_shard(shard: Shard) -> Shard:
    """Raises ValueError for a number that isn't one of ``0 .. n - 1``."""
    if shard[1] < 1:
        raise ValueError(f"the number of shards must be at least 1, got {shard[1]}.")
    if not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shards of {shard[1]} are numbered from 0 to {shard[1] - 1}, got {shard[0]}.")
    return shard


def shard_from(environment: Mapping[str, str] = os.environ) -> Shard:
    """``(i, n)`` of this process by the environment of torchrun, srun or a Slurm job array, whichever says more than 1.

    Raises:
        ValueError: None of them does.

    >>> shard_from({"RANK": "2", "WORLD_SIZE": "8"})
    (2, 8)
    """
    alone = None
    for which, count in ENVIRONMENT:
        if environment.get(which, "").isdecimal() and environment.get(count, "").isdecimal():
            first = int(environment.get("SLURM_ARRAY_TASK_MIN", 0)) if "ARRAY" in which else 0
            shard = check_shard((int(environment[which]) - first, int(environment[count])))
            if shard[1] > 1:
                return shard
            alone = shard
    if alone is not None:
        return alone
    names = "; ".join(" and ".join(pair) for pair in ENVIRONMENT)
    raise ValueError(f"--shard auto: expected a process's number and their count in the environment ({names}).")


def shard_folder(output: str | Path, shard: Shard) -> Path:
    """``OUTPUT/shard-00002-of-00008``."""
    number, count = check_shard(shard)
    return Path(output) / f"shard-{number:05d}-of-{count:05d}"


def open_shards(folders: Sequence[str | Path], lexical_dim: int | None = None) -> list[VectorFolder]:
    """Folders of vectors in the order of their shards; one that holds ``shard-*-of-*`` stands for all of these.

    Raises:
        FileNotFoundError: A folder is none of vectors or isn't finished, or a shard is missing.
        ValueError: Shards of different models, settings or texts, or the same one twice.
    """
    return in_order([open_folder(path, lexical_dim) for path in find_folders(folders)])


def open_folder(path: Path, lexical_dim: int | None = None) -> VectorFolder:
    """A folder of vectors; of a shard that isn't there it is said how to make it.

    Raises:
        FileNotFoundError, ValueError: As :class:`st_aggretriever.vectors.folder.VectorFolder`.
    """
    try:
        return VectorFolder(path, lexical_dim)
    except FileNotFoundError as error:
        if (match := _NAME.fullmatch(path.name)) is None or path.exists() or partial_of(path).exists():
            raise
        how = f"Encode it (--shard {int(match[1])} --num-shards {int(match[2])})."
        raise FileNotFoundError(f"{error} {how}") from None


def find_folders(folders: Sequence[str | Path]) -> list[Path]:
    """The folders to open: one that holds ``shard-*-of-*`` stands for all of these, also for those that are missing.

    Raises:
        ValueError: It holds shards of different counts.
    """
    paths: list[Path] = []
    for folder in map(Path, folders):
        paths += _inside(folder) or [folder]
    return paths


def in_order(opened: Sequence[VectorFolder]) -> list[VectorFolder]:
    """The same folders, shards in the order of their numbers.

    Raises:
        FileNotFoundError, ValueError: As :func:`open_shards` about folders that don't belong together.
    """
    shards = [folder for folder in opened if "shard" in folder.manifest]
    if not shards:
        return list(opened)
    if len(shards) < len(opened):
        whole = next(folder for folder in opened if "shard" not in folder.manifest)
        raise ValueError(f"{whole.folder} is no shard, but {shards[0].folder} is one of several. Name one kind.")
    _check_together(shards)
    return sorted(shards, key=lambda folder: folder.manifest["shard"][0])


def _inside(folder: Path) -> list[Path]:
    """The shards in a folder, by number, also those of which nothing is there."""
    if (folder / "manifest.json").exists() or not folder.is_dir():
        return []
    found = {}
    for path in folder.iterdir():
        if (match := _NAME.fullmatch(path.name.removesuffix(".partial"))) is not None:
            found[int(match[1]), int(match[2])] = path.with_name(match[0])
    counts = sorted({count for _, count in found})
    if len(counts) > 1:
        raise ValueError(f"{folder} holds shards of {counts[0]} and of {counts[1]}. Leave one kind in it.")
    return [found.get((number, counts[0]), shard_folder(folder, (number, counts[0])))
            for number in range(counts[0])] if counts else []  # fmt: skip


def _check_together(shards: Sequence[VectorFolder]) -> None:
    first = shards[0]
    count = first.manifest["shard"][1]
    seen: dict[int, Path] = {}
    for folder in shards:
        ours, theirs = _shared(first.manifest), _shared(folder.manifest)
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        if folder.manifest["shard"][1] != count:
            keys.append("number of shards")
        if keys:
            raise ValueError(
                f"{folder.folder} and {first.folder} are no shards of one encoding: their {', '.join(keys)} differ."
                " Encode all by one model, setting and collection."
            )
        number = folder.manifest["shard"][0]
        if number in seen:
            raise ValueError(f"{folder.folder} and {seen[number]} are the same shard, {number} of {count}. Name one.")
        seen[number] = folder.folder
    missing = [number for number in range(count) if number not in seen]
    if missing:
        raise FileNotFoundError(
            f"of {counted(count, 'shard')} {len(missing)} {'is' if len(missing) == 1 else 'are'} missing:"
            f" {', '.join(map(str, missing[:10]))}. Encode what is missing (--shard {missing[0]} --num-shards {count})"
            " or name its folder too."
        )


def _shared(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in manifest.items() if key not in (*FINISHED, "shard")}


def merge_shards(folders: Sequence[str | Path], output: str | Path, *, copy: bool = False) -> VectorFolder:
    """Put all shards of a collection into one folder, the same files that one process would have written.

    Each block is checked first (see :func:`st_aggretriever.vectors.verify.check_block`). Called again after an
    interruption, it goes on with the next block. The shards stay as they are.

    Args:
        folders: All shards, or the folder that holds them.
        output: Folder to write; until it is complete it is called ``OUTPUT.partial``.
        copy: Copy the files even where the file system could link them, which takes no space.

    Raises:
        ValueError: A damaged block, an id in two of them, or what :func:`open_shards` raises.
        OSError: A file can't be read or written.
    """
    shards = open_shards(folders)
    if "shard" not in shards[0].manifest:
        raise ValueError(f"{shards[0].folder} is no shard: its manifest names no number. There is nothing to merge.")
    count = len(shards)
    blocks = sum(shard.manifest["blocks"] for shard in shards)
    manifest = _shared(shards[0].manifest)
    dtype, files = manifest.pop("dtype"), manifest.pop("files", "npy")
    manifest.pop("format")
    for shard in shards:
        shard.check_files()
        records = (read_record(shard.folder, number) for number in range(shard.manifest["blocks"]))
        check_order(shard.folder, shard.manifest, map(sums_of, records))
    ids = Ids()
    put = _copy if copy else _link
    bar = tqdm(total=blocks, desc="blocks", disable=None)
    with VectorWriter(output, manifest, dtype=dtype, files=files) as writer, bar:
        for number in range(blocks):
            shard, local = shards[number % count], number // count
            if writer.has(number):
                ids.add(number, writer.ids(number))
            else:
                ids.add(number, check_block(shard.folder, local, shard.manifest)["ids"])
                with said_if_full(writer.partial):
                    # The record is last: with it the block counts.
                    for ending in (files, "json"):
                        put(block_path(shard.folder, local, ending), block_path(writer.partial, number, ending))
            bar.update()
        ids.refuse_repeated(writer.ids)
        writer.finish(blocks)
    return VectorFolder(output)


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source.resolve())  # of a symbolic link Linux would link the link
    except OSError:  # another file system, or one without links
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        shutil.copyfile(source, beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
