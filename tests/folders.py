"""A collection of a few letters in vectors on disk, and ways to kill and damage what is written."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from st_aggretriever.bulk import Source, encode_to_disk
from st_aggretriever.vectors.folder import VectorWriter

ROWS = [(f"d{number}", "abc"[number % 3] * (number % 7 + 1)) for number in range(23)]


class Letters:
    """An encoder whose vector counts a, b and c, of texts that don't begin with the letter it can't take."""

    similarity_fn_name = "dot"

    def __init__(self, poison: str = "", nan: str = "") -> None:
        self.poison, self.nan = poison, nan
        self.batches: list[list[str]] = []

    def encode_document(self, texts: list[str], **_: Any) -> np.ndarray:
        self.batches.append(texts)
        if self.poison and any(self.poison in text for text in texts):
            raise RuntimeError("index out of range")
        found = np.array([[text.count(letter) for letter in "abc"] for text in texts], np.float32)
        found[[bool(self.nan) and self.nan in text for text in texts]] = np.nan
        return found

    encode_query = encode_document


def write_jsonl(path: Path, rows: list[tuple[str, str]] = ROWS) -> Path:
    path.write_text("".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in rows))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def encode_shards(folder: Path, count: int = 2, **options: Any) -> Path:
    for number in range(count):
        source = Source("texts", lambda: iter(ROWS))
        encode_to_disk(Letters(), source, folder, block_size=4, shard=(number, count), **options)
    return folder


def run_and_kill(work: Any, step: int) -> bool:
    """Run in a child that gets SIGKILL before its ``step``-th sync or rename; whether it lived to the end."""
    child = os.fork()
    if child == 0:
        left = step

        def dying(call: Any) -> Any:
            def counted(*args: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), 9)
                return call(*args, **options)

            return counted

        os.replace, os.rename, os.fsync = map(dying, (os.replace, os.rename, os.fsync))
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)


def damage(folder: Path, kind: str) -> str:
    """Break a folder; returns what verify must say."""
    block, record = folder / "block-00001.npy", folder / "block-00001.json"
    content = block.read_bytes()
    if kind == "truncated":
        block.write_bytes(content[:-4])
        return r"block-00001\.npy is broken"
    if kind == "flipped":
        block.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        return r"block-00001\.npy was changed"
    if kind == "id":
        record.write_text(record.read_text().replace('"d', '"e', 1))
        return r"block-00001\.json was changed"
    if kind == "header":
        block.write_bytes(content.replace(b"'shape': (4", b"'shape':((4"))
        return r"block-00001\.npy is broken"
    if kind == "count":
        record.write_text(record.read_text().replace("truncated", "tsuncated"))
        return r"block-00001\.json was changed: it has no 'truncated'"
    if kind == "record":
        record.write_text(record.read_text()[:-9])
        return r"block-00001\.json is broken"
    if kind == "missing":
        block.unlink()
        return r"block-00001\.npy is missing"
    if kind == "nan":
        with VectorWriter(folder.with_name("w"), {"side": "document"}) as writer:
            shape = np.load(block).shape
            ids = json.loads(record.read_text())["ids"]
            writer.write(1, ids, np.full(shape, np.nan, np.float32), truncated=None)
        for ending in ("npy", "json"):
            (folder.with_name("w.partial") / f"block-00001.{ending}").replace(folder / f"block-00001.{ending}")
        return r"block-00001\.npy: the vector of 'd\d+' is not finite"
    raise AssertionError(kind)
