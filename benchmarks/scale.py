"""Encoding collections: killed at random moments, its memory, and its rates as one process, shards, a pool and Ray.

    python benchmarks/scale.py kill [--documents 200000] [--kills 20]
    python benchmarks/scale.py rates --data scifact

``kill`` encodes synthetic short documents by the bundled backbone as an untrained AGG: once undisturbed in one process,
once as two shards that are merged and verified, where the processes of all four steps get SIGKILL at random moments;
then the two folders are compared byte for byte. It also compares the peak memory of a tenth of the documents with all.
``rates`` encodes a BEIR folder in each way, compares vectors and the first 1,000 documents of each query. Each prints a
table, then one JSON line.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from st_aggretriever import build_aggretriever
from st_aggretriever.quickstart import asset
from st_aggretriever.vectors.folder import VectorFolder
from st_aggretriever.vectors.shards import open_shards
from st_aggretriever.versions import versions

BLOCK = 5000
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class Run:
    """One command line in a process of its own."""

    def __init__(self, *arguments: Any) -> None:
        self.started = time.perf_counter()
        command = [sys.executable, "-m", "st_aggretriever.cli", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )

    def wait_until_it_encodes(self) -> None:
        """The model is loaded and the collection read."""
        assert self.process.stdout is not None
        while " blocks, " not in (line := self.process.stdout.readline()):
            if not line:
                raise SystemExit(f"{self.process.args} failed.")

    def kill_after(self, seconds: float) -> bool:
        """SIGKILL after a while; whether it was still running."""
        try:
            self.process.wait(seconds)
            return False
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return True

    def end(self) -> tuple[float, float, str]:
        """Seconds, peak memory in MiB and output of a run that must succeed."""
        assert self.process.stdout is not None
        text = self.process.stdout.read()
        _, status, usage = os.wait4(self.process.pid, 0)
        if status:
            raise SystemExit(f"{self.process.args} failed:\n{text}")
        return time.perf_counter() - self.started, usage.ru_maxrss / 1024, text


def write_corpus(path: Path, documents: int) -> Path:
    """1 to 3 random words a document, the same first documents for every number."""
    vocabulary = json.loads((asset("mini") / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha())
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            text = " ".join(chance.choices(words, k=chance.randint(1, 3)))
            file.write(json.dumps({"_id": f"d{number}", "text": text}) + "\n")
    return path


def encode(model: Path, corpus: Path, output: Path, *more: Any) -> Run:
    return Run("encode", "--model", model, "--corpus", corpus, "--output", output, "--device", "cpu",
               "--block-size", BLOCK, *more)  # fmt: skip


def kill(args: argparse.Namespace) -> None:
    moments = random.Random(args.seed)
    with tempfile.TemporaryDirectory(dir=args.scratch) as name:
        folder = Path(name)
        model = folder / "model"
        build_aggretriever(str(asset("mini"))).save_pretrained(str(model))
        memory = {}
        for documents in (args.documents // 10, args.documents):
            corpus = write_corpus(folder / f"{documents}.jsonl", documents)
            whole = folder / f"whole-{documents}"
            seconds, memory[documents], _ = encode(model, corpus, whole).end()
            print(f"one process, {documents:,} documents: {seconds:.0f} s, {documents / seconds:.0f} a second, "
                  f"peak memory {memory[documents]:.0f} MiB", flush=True)  # fmt: skip
        shards, merged = folder / "shards", folder / "merged"
        kills = {}
        # A third of the time that is left between two kills on average, so that work is done, not only repeated.
        for shard in (0, 1):
            kills[f"encode, shard {shard}"] = _disturbed(
                lambda shard=shard: encode(model, corpus, shards, "--shard", shard, "--num-shards", 2),
                args.kills * 3 // 10, lambda: moments.uniform(0, seconds / args.kills), encodes=True,
            )  # fmt: skip
        merge_seconds, _, _ = Run("merge", shards, "--output", folder / "undisturbed", "--copy").end()
        verify_seconds, _, _ = Run("verify", folder / "undisturbed").end()
        kills["merge"] = _disturbed(
            lambda: Run("merge", shards, "--output", merged, "--copy"),
            args.kills * 2 // 10, lambda: moments.uniform(0.3, 1) * merge_seconds, output=merged,
        )  # fmt: skip
        kills["verify"] = _disturbed(
            lambda: Run("verify", merged), args.kills * 2 // 10, lambda: moments.uniform(0.3, 1) * verify_seconds
        )
        names = sorted(path.name for path in whole.iterdir())
        same = names == sorted(path.name for path in merged.iterdir()) and all(
            filecmp.cmp(whole / name, merged / name, shallow=False) for name in names
        )
    for step, count in kills.items():
        print(f"{step:18}{count:4} kills")
    ratio = max(memory.values()) / min(memory.values())
    print(f"files {'equal byte for byte' if same else 'DIFFERENT'}; peak memory ratio {ratio:.3f}")
    print(json.dumps({"documents": args.documents, "kills": kills, "equal": same, "peak_mib": memory,
                      "seconds": seconds, "seed": args.seed, "versions": versions()}))  # fmt: skip
    if not same:
        raise SystemExit(1)


def _disturbed(start: Any, kills: int, moment: Any, *, output: Path | None = None, encodes: bool = False) -> int:
    """Kill a command so many times, then let it end; how many of the kills met it running.

    One that was faster than its moment is not counted, and begins anew without ``output``.
    """
    met = 0
    while met < kills:
        run = start()
        if encodes:
            run.wait_until_it_encodes()
        if run.kill_after(moment()):
            met += 1
        elif output is not None:
            shutil.rmtree(output, ignore_errors=True)
    if output is None or not output.exists():
        start().end()
    return met


def rates(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=args.scratch) as name:
        folder = Path(name)
        model = folder / "model"
        build_aggretriever(str(asset("mini")), document_length=args.length).save_pretrained(str(model))
        data = Path(args.data)
        encode(model, data, folder / "queries", "--side", "query").end()
        small = ("--block-size", 500)
        ways: dict[str, list[Run]] = {}
        seconds: dict[str, float] = {}
        outputs: dict[str, Path] = {}
        for way, runs in (
            ("one process", [()]),
            ("two shards", [("--shard", 0, "--num-shards", 2), ("--shard", 1, "--num-shards", 2)]),
            ("pool of two", [("--workers", 2)]),
            *([("Ray, two actors", [("--workers", 2, "--engine", "ray")])] if importlib.util.find_spec("ray") else []),
        ):
            outputs[way] = folder / way.replace(" ", "-").replace(",", "")
            started = time.perf_counter()
            ways[way] = [encode(model, data, outputs[way], *small, *more) for more in runs]
            texts = [run.end()[2] for run in ways[way]]
            seconds[way] = time.perf_counter() - started
            rate = sum(float(line.split(",")[-1].split()[0]) for text in texts for line in text.splitlines()
                       if line.endswith(" a second"))  # fmt: skip
            print(f"{way:18}{seconds[way]:8.1f} s in all{rate:8.1f} documents a second while encoding", flush=True)
        reference = _everything(outputs["one process"])
        runs_of = {}
        for way, output in outputs.items():
            Run("search", "--index", output, "--queries", folder / "queries", "--run", output.with_suffix(".run"),
                "--workers", 2).end()  # fmt: skip
            runs_of[way] = _read_run(output.with_suffix(".run"))
        found: dict[str, Any] = {}
        for way, output in outputs.items():
            mine = _everything(output)
            difference, flips = _difference(reference, mine)
            swapped = _swapped(runs_of["one process"], runs_of[way])
            found[way] = {"seconds": seconds[way], "largest_difference": difference, "flipped_signs": flips,
                          "hits_apart": swapped}  # fmt: skip
            print(f"{way:18} largest difference {difference:.1e}, flipped signs {flips}, hits that differ beyond "
                  f"scores closer than 1e-5: {swapped}")  # fmt: skip
    print(json.dumps({"data": data.name, "ways": found, "versions": versions()}))


def _everything(output: Path) -> dict[str, np.ndarray]:
    vectors: dict[str, np.ndarray] = {}
    for folder in open_shards([output]):
        assert isinstance(folder, VectorFolder)
        vectors |= dict(zip(*folder.load(), strict=True))
    return vectors


def _difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> tuple[float, int]:
    """The largest relative difference of magnitudes, and how many signs differ."""
    assert ours.keys() == theirs.keys()
    one, two = (np.stack([vectors[key] for key in ours]) for vectors in (ours, theirs))
    return float((np.abs(np.abs(one) - np.abs(two)) / np.abs(one).max()).max()), int(
        (np.sign(one) != np.sign(two)).sum()
    )


def _read_run(path: Path) -> dict[str, dict[str, float]]:
    run: dict[str, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        query, _, document, _, score, _ = line.split()
        run.setdefault(query, {})[document] = float(score)
    return run


def _swapped(ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]]) -> int:
    """Hits of one run alone whose score isn't within 1e-5 of its last one's, relatively."""
    apart = 0
    for query, hits in ours.items():
        last = min(hits.values())
        for other in (theirs[query], hits):
            mine = hits if other is not hits else theirs[query]
            apart += sum(abs(score - last) > 1e-5 * abs(last) for key, score in mine.items() if key not in other)
    return apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", help="folder for what is written (default: the system's)")
    parts = parser.add_subparsers(required=True)
    first = parts.add_parser("kill")
    first.add_argument("--documents", type=int, default=200_000)
    first.add_argument("--kills", type=int, default=20)
    first.add_argument("--seed", type=int, default=0, help="of the moments")
    first.set_defaults(function=kill)
    second = parts.add_parser("rates")
    second.add_argument("--data", required=True, metavar="FOLDER")
    second.add_argument("--length", type=int, default=128, help="tokens of a document")
    second.set_defaults(function=rates)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
