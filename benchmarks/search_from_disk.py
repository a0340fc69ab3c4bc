"""Exact search of vectors on disk beside the bare product of the same blocks in memory, and small batches beside Faiss.

    python benchmarks/search_from_disk.py [--documents 1000000] [--queries 1000] [--top-k 1000] [--folder DIR]

Random vectors of 768 dimensions. Prints a table, then one JSON line. Times are wall times; ratios belong to one run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from st_aggretriever.search.exact import TORCH_TILE, search
from st_aggretriever.search.retrieve import recall, search_exactly
from st_aggretriever.vectors.folder import VectorFolder, VectorWriter

DIMENSION = 768
BLOCK = 50_000


def write(folder: Path, documents: int) -> VectorFolder:
    """Random vectors on disk, float32, made block by block."""
    manifest = {"side": "document", "model": "random", "model_hash": None, "dimension": DIMENSION, "block_size": BLOCK,
                "parts": [["embedding", DIMENSION]], "similarity": "dot", "length": None, "prompt": ""}  # fmt: skip
    if not folder.exists():
        writer = VectorWriter(folder, manifest)
        rng = np.random.default_rng(0)
        for number, start in enumerate(range(0, documents, BLOCK)):
            ids = [str(row) for row in range(start, min(documents, start + BLOCK))]
            writer.write(number, ids, rng.standard_normal((len(ids), DIMENSION), np.float32))
        writer.finish(number + 1)
    return VectorFolder(folder)


def product_seconds(queries: np.ndarray, index: VectorFolder) -> np.ndarray:
    """The bare products of all documents, measured on the first blocks, in memory, and scaled: wall and CPU seconds."""
    blocks = [torch.from_numpy(index.read(number)[1]) for number in range(min(4, index.manifest["blocks"]))]
    vectors = torch.from_numpy(queries)
    measured = sum(map(len, blocks))
    seconds = []
    for _ in range(3):
        started = now()
        for block in blocks:
            for start in range(0, len(block), TORCH_TILE):
                vectors @ block[start : start + TORCH_TILE].T
        seconds.append(now() - started)
    return np.median(seconds, axis=0) * index.rows / measured


def now() -> np.ndarray:
    """Wall and CPU clock: on a busy machine the second says more."""
    return np.array([time.perf_counter(), time.process_time()])


def read_all(index: VectorFolder) -> None:
    for number in range(index.manifest["blocks"]):
        index.read(number)


def timed(call: Any) -> tuple[Any, np.ndarray]:
    started = now()
    value = call()
    return value, now() - started


def small_batch(rounds: int = 5) -> dict[str, np.ndarray]:
    """100 queries over 100,000 documents, k = 100: our search and Faiss as it comes; medians, wall and CPU seconds."""
    import faiss

    rng = np.random.default_rng(1)
    documents, queries = (rng.standard_normal((rows, DIMENSION), np.float32) for rows in (100_000, 100))
    ids = [str(row) for row in range(len(documents))]
    ours, default = [], []
    for _ in range(rounds):
        default.append(timed(lambda: faiss.knn(queries, documents, 100, metric=faiss.METRIC_INNER_PRODUCT))[1])
        ours.append(timed(lambda: search(queries, [(ids, documents)], 100, backend="faiss"))[1])
    return {"faiss_default": np.median(default, axis=0), "ours": np.median(ours, axis=0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--top-k", type=int, default=1000)
    parser.add_argument("--folder", help="keep the vectors here (default: a temporary folder)")
    args = parser.parse_args()
    queries = np.random.default_rng(2).standard_normal((args.queries, DIMENSION), np.float32)
    with tempfile.TemporaryDirectory() as temporary:
        index = write(Path(args.folder or Path(temporary) / "vectors"), args.documents)
        before = product_seconds(queries, index)
        exact, disk = timed(lambda: search_exactly(index, queries, args.top_k))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        half, as_half = timed(lambda: search_exactly(index, queries, args.top_k, dtype="float16"))
        product = (before + product_seconds(queries, index)) / 2
        reading = timed(lambda: read_all(index))[1]
        share = recall(half, exact)
        small = small_batch()
    for name, (wall, cpu), note in (
        ("bare product in memory", product, ""),
        ("search from disk", disk, "{:.2f} and {:.2f} times".format(*disk / product)),
        ("search rounded to float16", as_half, f"recall {share:.5f}"),
        ("reading alone", reading, f"peak memory {memory:.2f} GiB"),
        ("100 queries, 100,000 documents, k 100", small["ours"], ""),
        ("the same by Faiss as it comes", small["faiss_default"],
         "{:.1f} and {:.1f} times".format(*small["faiss_default"] / small["ours"])),
    ):  # fmt: skip
        print(f"{name:40} {wall:7.2f} s wall {cpu:7.2f} s CPU  {note}")
    result = {
        "documents": args.documents, "queries": args.queries, "top_k": args.top_k,
        "threads": torch.get_num_threads(), "load": os.getloadavg()[0], "peak_rss_gib": memory,
        "float16_recall": share, "seconds_wall_and_cpu": {
            "product": product.tolist(), "from_disk": disk.tolist(), "float16": as_half.tolist(),
            "reading": reading.tolist(), **{f"small_batch_{key}": value.tolist() for key, value in small.items()},
        },
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "numpy", "faiss-cpu")},
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
