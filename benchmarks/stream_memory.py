"""Memory of training data that is streamed: a made-up MS MARCO folder, opened and read in a shuffled order.

    python benchmarks/stream_memory.py [--passages 1000000] [--queries 100000] [--words 60] [--gzip] [--folder DIR]

Two processes, one after the other: the readers alone (numpy, no torch), and what the Trainer uses (``dataset()`` and
the batch sampler, with torch, datasets and sentence-transformers imported). For each the peak of its resident memory
(VmHWM) before and after, and seconds. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import numpy as np

NEGATIVES = 10  # a query has in the triples, of which 7 are drawn
READ = 20_000  # rows read in a shuffled order


def write(folder: Path, passages: int, queries: int, length: int, packed: bool) -> None:
    rng = np.random.default_rng(0)
    words = np.array([f"{''.join(rng.choice(list('aeioulnrst'), 3 + n % 6))}" for n in range(20_000)])

    def create(name: str) -> IO[str]:
        path = folder / (f"{name}.gz" if packed else name)
        return gzip.open(path, "wt", compresslevel=1) if packed else path.open("w")

    with create("collection.tsv") as file:
        for start in range(0, passages, 10_000):
            block = words[rng.integers(len(words), size=(min(10_000, passages - start), length))]
            file.writelines(f"{start + row}\t{' '.join(text)}\n" for row, text in enumerate(block.tolist()))
    with create("queries.train.tsv") as file:
        file.writelines(f"{q}\t{' '.join(words[rng.integers(len(words), size=6)])} {q}\n" for q in range(queries))
    with create("qidpidtriples.train.full.2.tsv") as file:
        for query in range(queries):
            positive = int(rng.integers(passages))
            negatives = ((positive + 1 + rng.integers(passages - 1, size=NEGATIVES)) % passages).tolist()
            file.writelines(f"{query}\t{positive}\t{negative}\n" for negative in negatives)


def peak() -> int:
    """Bytes, the highest resident memory of this process so far."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def read(folder: str, trainer: bool) -> None:
    """In a process of its own: open, read rows in a shuffled order, print what it took as JSON."""
    from st_aggretriever.readers.training import open_training_data

    if trainer:
        import datasets  # noqa: F401
        import sentence_transformers  # noqa: F401
        import torch
    before, started = peak(), time.perf_counter()
    data = open_training_data([folder], negatives=7)
    opened = time.perf_counter()
    characters = 0
    if trainer:
        rows = data.dataset()
        sampler = data.batch_sampler(rows, batch_size=32, drop_last=True, generator=torch.Generator(), seed=0)
        sampler.set_epoch(1)
        for number, batch in enumerate(sampler):
            characters += sum(len(row["negative_7"]) for row in rows.__getitems__(batch))
            if number == READ // 32:
                break
    else:
        for row in np.random.default_rng(0).permutation(len(data))[:READ].tolist():
            characters += sum(map(len, data.row(row).values()))
    done = time.perf_counter()
    result: dict[str, Any] = {"before": before, "after": peak(), "open": opened - started, "read": done - opened}
    print(json.dumps({**result, "rows": len(data), "characters": characters}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=100_000)
    parser.add_argument("--words", type=int, default=60, help="a passage: 60 are 390 bytes, MS MARCO's have 350")
    parser.add_argument("--gzip", action="store_true", help="compressed files; their copies go into HF_HOME")
    parser.add_argument("--folder", help="where the data lie, or are made (default: a temporary folder)")
    parser.add_argument("--read", choices=("readers", "trainer"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read(args.folder, args.read == "trainer")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        if not list(folder.glob("qidpidtriples*")):
            folder.mkdir(exist_ok=True)
            write(folder, args.passages, args.queries, args.words, args.gzip)
        size = sum(path.stat().st_size for path in folder.iterdir())
        results = {}
        for kind in ("readers", "trainer"):
            command = [sys.executable, __file__, "--read", kind, "--folder", str(folder)]
            results[kind] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{args.passages:,} passages, {args.queries:,} queries, {size / 2**20:,.0f} MiB on disk, {READ:,} rows read")
    print(f"{'':10}{'imported MiB':>14}{'peak MiB':>10}{'of it data MiB':>16}{'open s':>8}{'rows a s':>10}")
    for kind, result in results.items():
        mib = [value / 2**20 for value in (result["before"], result["after"], result["after"] - result["before"])]
        print(f"{kind:10}{mib[0]:14.0f}{mib[1]:10.0f}{mib[2]:16.0f}{result['open']:8.1f}{READ / result['read']:10.0f}")
    versions = {name: importlib.metadata.version(name) for name in ("st-aggretriever", "numpy", "datasets", "torch")}
    settings = {
        "passages": args.passages,
        "queries": args.queries,
        "bytes": size,
        "words": args.words,
        "gzip": args.gzip,
    }
    print(json.dumps({**settings, **results, "versions": versions}))


if __name__ == "__main__":
    main()
