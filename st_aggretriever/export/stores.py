"""Vectors on disk into a vector store: what is missing is added, what is there must be the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from st_aggretriever.vectors.folder import VectorFolder

BATCH = 1000  # vectors a request: 3 MB at 768 dimensions, far below what a server takes


class Store(Protocol):
    """A collection of (id, vector) in some store, compared by inner product."""

    collection: str

    def create(self, dimension: int) -> None:
        """Make the collection where it isn't there; raises ValueError for one of another dimension or metric."""

    def get(self, ids: Sequence[str]) -> dict[str, np.ndarray]:
        """The vectors of those ids that are there, (dim) float32."""

    def add(self, ids: Sequence[str], vectors: np.ndarray) -> None:
        """Add vectors under ids that aren't there yet."""

    def count(self) -> int:
        """How many vectors the collection holds."""


class Export(NamedTuple):
    """What an export did."""

    collection: str
    rows: int  # of the folder
    added: int
    held: int  # by the collection in the end


def export_vectors(store: Store, folder: str | Path | VectorFolder) -> Export:
    """Put a folder of document vectors into a store; the ids are kept, and a second export adds nothing.

    Each batch is compared with what the store has under its ids, so an export goes on where it was stopped, and tells
    whether the store still holds the folder.

    Args:
        store: Where to.
        folder: Of ``st-aggretriever encode``; float16 is exported as float32 without loss.

    Raises:
        FileNotFoundError: No such folder, or it isn't finished.
        ValueError: It holds queries; the collection is of another dimension or metric, or has another vector under one
            of the ids.
        OSError: The store can't be reached.
    """
    index = folder if isinstance(folder, VectorFolder) else VectorFolder(folder)
    if index.manifest["side"] != "document":
        raise ValueError(f"export: {index.folder} holds vectors of the side {index.manifest['side']!r}, not documents.")
    store.create(index.dimension)
    added = 0
    with tqdm(total=index.rows, desc=store.collection, unit="vector", disable=None) as bar:
        for ids, vectors in index.blocks(read_bytes=1):
            for start in range(0, len(ids), BATCH):
                part = slice(start, start + BATCH)
                added += _add_missing(store, ids[part], vectors[part])
                bar.update(len(ids[part]))
    return Export(store.collection, index.rows, added, store.count())


def _add_missing(store: Store, ids: Sequence[str], vectors: np.ndarray) -> int:
    held = store.get(ids)
    for key, vector in zip(ids, vectors, strict=True):
        if key in held and not np.array_equal(held[key], vector):
            raise ValueError(
                f"export: the collection {store.collection!r} holds another vector under the id {key!r}. Name another "
                "collection, or drop this one first."
            )
    missing = [row for row, key in enumerate(ids) if key not in held]
    if missing:
        store.add([ids[row] for row in missing], vectors[missing])
    return len(missing)


def collection_name(folder: str | Path) -> str:
    """A collection's name after a folder's: letters, digits and underscores, no digit first."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", Path(folder).resolve().name)
    return f"_{name}" if name[:1].isdigit() else name


def refuse_other(collection: str, what: str, found: object, wanted: object) -> None:
    """Raises ValueError where a collection that exists isn't as the vectors need it."""
    if found != wanted:
        raise ValueError(
            f"export: the collection {collection!r} has the {what} {found}, the vectors need {wanted}. Name another "
            "collection, or drop this one first."
        )
