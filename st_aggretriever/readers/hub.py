"""Rows of a Hub dataset or a parquet file: Arrow tables that ``datasets`` keeps in its own cache, memory-mapped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from st_aggretriever.readers.store import BadRows

_BLOCK = 1000  # rows read at a time


class Table:
    """The rows of a dataset by number, as :class:`st_aggretriever.readers.store.Records` gives those of a file.

    Args:
        name: ``ORG/NAME`` or ``NAME`` on the Hub, also ``ORG/NAME:CONFIG``; or a parquet file.
        split: Which split of a Hub dataset.

    Raises:
        FileNotFoundError: Neither a file nor a dataset that can be fetched.
        ValueError: A broken parquet file.
        ImportError: ``datasets`` is missing.
    """

    def __init__(self, name: str, split: str) -> None:
        self.path, self.sha256 = name, ""
        self._rows = _load(name, split)
        self._kept: list[int] = []
        self._index = np.empty(0, np.int64)

    def scan(self, bad: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
        digest = hashlib.sha256()
        for start in range(0, len(self._rows), _BLOCK):
            block = self._rows[start : start + _BLOCK]
            names = list(block)
            for place, values in enumerate(zip(*block.values(), strict=True)):
                record = dict(zip(names, values, strict=True))
                digest.update(json.dumps(record, default=str).encode())
                self._kept.append(start + place)
                yield f"{self.path} row {start + place + 1}", record
        self.sha256 = digest.hexdigest()
        if not len(self._rows):
            raise ValueError(f"{self.path} is empty: expected at least one row.")
        self._index = np.array(self._kept, np.int64)
        self._kept = []

    def drop_last(self) -> None:
        self._kept.pop()

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record: dict[str, Any] = self._rows[int(self._index[index])]
        return record

    def where(self, index: int) -> str:
        return f"{self.path} row {int(self._index[index]) + 1}"


def first_record(table: Table) -> dict[str, Any]:
    """The first row, by which the format is told; empty where there is none."""
    return table._rows[0] if len(table._rows) else {}


def _load(name: str, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f'{name} needs datasets: pip install "st-aggretriever[train]" ({error}).') from None
    try:
        if Path(name).is_file():
            return datasets.load_dataset("parquet", data_files=name, split="train")
        repository, _, config = name.partition(":")
        return datasets.load_dataset(repository, config or None, split=split)
    except Exception as error:  # datasets' own, huggingface_hub's and the network's
        reason = " ".join(str(error).split())[:300]
        if Path(name).is_file():
            raise ValueError(f"{name} is no parquet file that can be read: {reason}") from None
        raise FileNotFoundError(
            f"{name} is no file or folder here, and as a dataset of the Hub it can't be loaded: {reason}"
        ) from None
