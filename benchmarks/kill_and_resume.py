"""Kill training at random moments and resume it: are the final weights those of an uninterrupted run?

    python benchmarks/kill_and_resume.py --kills 10

Each attempt is a process of its own that gets SIGKILL some steps on, in the middle of a step or of writing a
checkpoint (one is written after every step, or every second one). After each kill every folder under a checkpoint's
name is loaded whole; at the end the weights are compared bit for bit with those of a run that nobody disturbed. Four
kinds of runs: the plain loss, the cached loss, hard negatives drawn anew each epoch, and evaluations of which the best
one is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # Processes are forked here.

import torch
from tqdm import tqdm

from st_aggretriever import TrainConfig, load_aggretriever, train
from st_aggretriever.quickstart import asset
from st_aggretriever.readers.beir import read_corpus
from st_aggretriever.readers.pairs import read_pairs
from st_aggretriever.trainer import AggretrieverTrainer
from st_aggretriever.versions import versions

STEPS_BETWEEN = 3  # at most, between two kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(asset("mini")), help="masked language model (default: the bundled one)")
    parser.add_argument("--kills", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="(default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print(f"{'':12}{'kills':>7}{'in writing':>12}{'steps':>7}{'checkpoints':>13}{'corrupt':>9}  final weights")
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            found = results[kind] = kill_and_resume(Path(folder), args.model, kind, args.kills, args.seed)
        print(
            f"{kind:12}{found['kills']:7}{found['while_writing']:12}{found['steps']:7}{found['checkpoints_checked']:13}"
            f"{found['corrupt']:9}  {'equal bit for bit' if found['equal'] else 'DIFFERENT'}",
            flush=True,
        )
    print(json.dumps({"results": results, "seed": args.seed, "versions": versions()}))
    if any(found["corrupt"] or not found["equal"] for found in results.values()):
        raise SystemExit(1)


def kill_and_resume(folder: Path, model: str, kind: str, kills: int, seed: int) -> dict[str, Any]:
    """Run undisturbed, then with so many kills, and compare."""
    moments = random.Random(seed)
    settings = {
        "model": model,
        "pairs": [str(write_pairs(folder))],
        "lexical_dim": 32,
        "cls_dim": 8,
        "document_length": 32,
        "max_steps": kills * STEPS_BETWEEN + 2,
        "batch_size": 4,
        "save_steps": 1,
        "learning_rate": 1e-3,
        "device": "cpu",
        "precision": "fp32",
        "report": False,
        **KINDS[kind],
    }
    if kind == "evaluator":
        settings["dev_data"] = str(write_dev(folder))
    undisturbed = TrainConfig(output=str(folder / "undisturbed"), **settings)
    started = time.perf_counter()
    if attempt(undisturbed, None, 0.0) != "done":
        raise SystemExit("the undisturbed run failed")
    step_seconds = (time.perf_counter() - started) / undisturbed.max_steps
    config = TrainConfig(output=str(folder / "killed"), resume=True, **settings)
    working = folder / "killed.partial"
    found = {"kills": 0, "while_writing": 0, "steps": undisturbed.max_steps, "checkpoints_checked": 0, "corrupt": 0}
    for _ in tqdm(range(kills), desc=f"{kind}: kills", disable=None):
        if attempt(config, moments.randint(1, STEPS_BETWEEN), moments.uniform(0, step_seconds)) == "done":
            break
        found["kills"] += 1
        found["while_writing"] += (working / "writing").is_dir()
        for checkpoint in sorted(working.glob("checkpoint-*")):
            found["checkpoints_checked"] += 1
            found["corrupt"] += not is_whole(checkpoint)
    if attempt(config, None, 0.0) != "done":
        raise SystemExit(f"{kind}: the run could not be resumed")
    return found | {"equal": digest(folder / "killed") == digest(folder / "undisturbed")}


def attempt(config: TrainConfig, steps: int | None, seconds: float) -> str:
    """Train in a process of its own and kill it so many seconds into its step ``steps``; None lets it finish."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        with Path(os.devnull).open("w") as quiet, contextlib.suppress(BaseException):
            os.dup2(quiet.fileno(), 2)
            announce_steps(writing)
            train(config)
            code = 0
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as announced:
        seen = 0
        while (steps is None or seen < steps) and (count := len(announced.read(1))):
            seen += count
        if steps is not None and seen == steps:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "killed"
    if os.WEXITSTATUS(status):
        raise SystemExit("a run failed by itself: call train with these settings to see why")
    return "done"


def announce_steps(pipe: int) -> None:
    """Let the trainer write a byte at the beginning of each step."""
    original: Any = AggretrieverTrainer.training_step

    def training_step(self: AggretrieverTrainer, *args: Any, **kwargs: Any) -> Any:
        os.write(pipe, b".")
        return original(self, *args, **kwargs)

    AggretrieverTrainer.training_step = training_step  # type: ignore[method-assign]


def is_whole(checkpoint: Path) -> bool:
    """Whether model, optimizer, schedule, random state and trainer's state can be read."""
    try:
        load_aggretriever(checkpoint, device="cpu")
        for name in ("optimizer.pt", "scheduler.pt"):
            torch.load(checkpoint / name, weights_only=True)
        torch.load(checkpoint / "rng_state.pth", weights_only=False)  # ours, written a moment ago; holds numpy's state
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        return state["global_step"] == int(checkpoint.name.rpartition("-")[2])
    except Exception:
        return False


def digest(folder: Path) -> str:
    """SHA-256 over all tensors of a model's folder."""
    files = sorted(folder.rglob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else f"no model: {folder}"


def write_dev(folder: Path) -> Path:
    """A BEIR folder of twenty of the pairs."""
    home = folder / "dev"
    (home / "qrels").mkdir(parents=True)
    pairs = list(read_pairs(asset("sample")))[:20]
    records = {"corpus": [pair["passage"] for pair in pairs], "queries": [pair["query"] for pair in pairs]}
    for name, texts in records.items():
        lines = [json.dumps({"_id": str(number), "text": text}) for number, text in enumerate(texts)]
        (home / f"{name}.jsonl").write_text("\n".join(lines))
    judged = "".join(f"{number}\t{number}\t1\n" for number in range(20))
    (home / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return home


def write_pairs(folder: Path) -> Path:
    """The sample collection's pairs, each with four passages drawn at random as its negatives."""
    draw = random.Random(0)
    passages = [text for _, text in read_corpus(asset("sample"))]
    path = folder / "pairs.jsonl"
    with path.open("w") as file:
        for pair in read_pairs(asset("sample")):
            others = [text for text in draw.sample(passages, 5) if text != pair["passage"]][:4]
            file.write(json.dumps({"query": pair["query"], "passage": pair["passage"], "negatives": others}) + "\n")
    return path


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"negatives": 0},
    "cached": {"negatives": 1, "mini_batch_size": 3},
    "negatives": {"negatives": 2},
    "evaluator": {"negatives": 0, "eval_steps": 2},
}

if __name__ == "__main__":
    main()
