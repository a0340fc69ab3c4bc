"""A vector store against our exact search: recall, seconds, and what a second export adds.

    python benchmarks/stores.py [--documents 100000] [--queries 100] [--top-k 100] [--folder DIR]

Random vectors of 768 dimensions and of different lengths, in the embedded Milvus (extra [milvus]) with its FLAT index
by inner product; and what a store would find by cosine, which is Milvus's default, or by distance.
Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

from st_aggretriever.export.milvus import Milvus
from st_aggretriever.export.stores import export_vectors
from st_aggretriever.search.exact import search
from st_aggretriever.search.retrieve import search_exactly
from st_aggretriever.vectors.folder import VectorFolder, VectorWriter

DIMENSION, BLOCK = 768, 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--top-k", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="where the vectors and the store are kept (default: nowhere)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run(args, args.folder or Path(scratch))


def run(args: argparse.Namespace, home: Path) -> None:
    index = write(home / "vectors", args.documents)
    queries = np.random.default_rng(1).standard_normal((args.queries, DIMENSION)).astype(np.float32)
    started = time.perf_counter()
    exact = search_exactly(index, queries, args.top_k).ids.tolist()
    seconds = {"our search": time.perf_counter() - started}
    store = Milvus(str(home / "store.db"), "inner_product")
    counts = []
    for name in ("first export", "second export"):
        started = time.perf_counter()
        done = export_vectors(store, index)
        seconds[name] = time.perf_counter() - started
        counts.append({"added": done.added, "held": done.held})
    started = time.perf_counter()
    found = store.search(queries, args.top_k)
    seconds["its search"] = time.perf_counter() - started
    others = by_other_metrics(index, queries, args.top_k)
    recalls = {"inner product": recall(found, exact)} | {name: recall(ids, exact) for name, ids in others.items()}
    print(f"{args.documents:,} vectors of {DIMENSION}, {args.queries} queries, k = {args.top_k}, Milvus FLAT")
    for name, value in recalls.items():
        print(f"recall of our exact {args.top_k} by {name:16} {value:.5f}")
    for name, count in zip(("first export", "second export"), counts, strict=True):
        print(f"{name:16} added {count['added']:,}, holds {count['held']:,}, {seconds[name]:.1f} s")
    print(f"seconds of all queries: ours {seconds['our search']:.2f}, Milvus's {seconds['its search']:.2f}")
    packages = ("st-aggretriever", "pymilvus", "milvus-lite", "numpy", "faiss-cpu")
    print(json.dumps({"benchmark": "stores", "documents": args.documents, "recall": recalls, "exports": counts,
                      "seconds": seconds, "versions": {name: version(name) for name in packages}}))  # fmt: skip
    store.close()


def write(folder: Path, documents: int) -> VectorFolder:
    """Random vectors whose lengths differ by a few tenths, as a model's do."""
    manifest = {"side": "document", "model": "random", "model_hash": None, "dimension": DIMENSION, "block_size": BLOCK,
                "parts": [["embedding", DIMENSION]], "similarity": "dot", "length": None, "prompt": ""}  # fmt: skip
    if not folder.exists():
        writer = VectorWriter(folder, manifest)
        rng = np.random.default_rng(0)
        for number, start in enumerate(range(0, documents, BLOCK)):
            ids = [str(row) for row in range(start, min(documents, start + BLOCK))]
            lengths = rng.uniform(0.7, 1.3, (len(ids), 1)).astype(np.float32)
            writer.write(number, ids, rng.standard_normal((len(ids), DIMENSION), np.float32) * lengths)
        writer.finish(number + 1)
    return VectorFolder(folder)


def by_other_metrics(index: VectorFolder, queries: np.ndarray, top_k: int) -> dict[str, list[list[str]]]:
    """What a store finds that compares by cosine (of lengths 1) or by distance (``2 q.d - d.d`` ranks alike)."""

    def normalised() -> Iterator[tuple[list[str], np.ndarray]]:
        for ids, vectors in index.blocks():
            yield ids, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def with_squares() -> Iterator[tuple[list[str], np.ndarray]]:
        for ids, vectors in index.blocks():
            yield ids, np.hstack([vectors, (vectors**2).sum(1, keepdims=True)])

    longer = np.hstack([2 * queries, np.full((len(queries), 1), -1, np.float32)])
    return {
        "cosine": search(queries, normalised(), top_k).ids.tolist(),
        "L2": search(longer, with_squares(), top_k).ids.tolist(),
    }


def recall(found: list[list[str]], exact: list[list[str]]) -> float:
    """Mean share of the exact ids that were found."""
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found, exact, strict=True)]))


if __name__ == "__main__":
    main()
