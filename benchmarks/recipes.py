"""What hard negatives, distillation and the fold-aware loss add to a plainly trained model: nDCG@10 over seeds.

    python benchmarks/recipes.py --model BACKBONE... --pairs FILE... --data FOLDER... --teacher SPLADE --output DIR

Of each backbone and seed a plain model is trained on a sample of the pairs, and from it two more epochs are taken in
four ways: on the pairs again (the control), on hard negatives mined by the plain model at a depth of 200, on the same
with the teacher's scores, and on the pairs with the loss at folded widths too. Every model's vectors are made once and
folded for the figures at smaller D. What lies in DIR is not done again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kept import content_of, keep

from st_aggretriever import TrainConfig, load_aggretriever, train
from st_aggretriever.encoding import Encoder
from st_aggretriever.evaluation.beir import read_collection
from st_aggretriever.evaluation.metrics import evaluate_run, mean_figures
from st_aggretriever.fold import fold_lexical
from st_aggretriever.mining import MiningSettings, mine
from st_aggretriever.readers.training import open_training_data
from st_aggretriever.search.exact import search
from st_aggretriever.versions import versions

CLS_DIM = 128
WIDTHS = (640, 320, 160, 128, 64)  # D at which vectors are compared
FOLDS = [320, 128, 64]  # D at which the fold-aware loss is taken
NEGATIVES = 3
SETTINGS = ("sample", "steps", "further_epochs", "train_length", "search_length")
ARMS = ("plain", "plain, further", "hard negatives", "distilled", "fold-aware")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", required=True, help="masked language models")
    parser.add_argument("--pairs", nargs="+", required=True, help="files of pairs (jsonl.gz)")
    parser.add_argument("--data", nargs="+", required=True, help="folders in BEIR's layout")
    parser.add_argument("--teacher", required=True, help="as for train --teacher")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--sample", type=int, default=8000, help="pairs that are used (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of the plain model, 32 pairs each (default: 200)")
    parser.add_argument("--further-epochs", type=float, default=2, help="from there (default: 2)")
    parser.add_argument("--train-length", type=int, default=64, help="tokens of a passage (default: 64)")
    parser.add_argument("--search-length", type=int, default=128, help="tokens of a document (default: 128)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    args = parser.parse_args()
    keep(
        args.output,
        model={Path(model).name: content_of(model) for model in args.model},
        pairs=[content_of(path) for path in args.pairs],
        data=[Path(data).name for data in args.data],
        teacher=content_of(args.teacher),
        **{name: getattr(args, name) for name in SETTINGS},
    )
    pairs = sampled_pairs(args)
    found: dict[str, dict[str, dict[int, Any]]] = {}
    for seed in args.seeds:
        for model in args.model:
            for arm in ARMS:
                figures = measured(args, Path(model), arm, seed, pairs)
                found.setdefault(Path(model).name, {}).setdefault(arm, {})[seed] = figures
    for backbone, arms in found.items():
        print(f"\n{backbone}: nDCG@10 at D = 640, mean and deviation over {len(args.seeds)} seeds")
        print_table(arms, [Path(folder).name for folder in args.data], lambda name: (name, "640"))
        print(f"\n{backbone}: mean of the collections, by D")
        print_table(arms, [str(width) for width in WIDTHS], lambda width: ("mean", width))
    settings = {name: getattr(args, name) for name in (*SETTINGS, "seeds")}
    settings |= {"teacher": Path(args.teacher).name, "negatives": NEGATIVES}
    print(json.dumps({"nDCG@10": found, "settings": settings, "versions": versions()}))


def sampled_pairs(args: argparse.Namespace) -> str:
    """A file with a seeded sample of all pairs, the same for every run."""
    path = args.output / "pairs.jsonl"
    if not path.exists():
        lines: list[str] = []
        for name in args.pairs:
            with gzip.open(name, "rt", encoding="utf-8") as file:
                lines += file
        path.write_text("".join(random.Random(0).sample(lines, min(args.sample, len(lines)))), encoding="utf-8")
    return str(path)


def measured(args: argparse.Namespace, backbone: Path, arm: str, seed: int, pairs: str) -> dict[str, dict[str, float]]:
    """nDCG@10 by collection and D, from the arm's file if it was measured before."""
    home = args.output / f"{backbone.name}-{seed}"
    path = home / f"{arm}.json"
    if not path.exists():
        home.mkdir(exist_ok=True)
        started = time.perf_counter()
        model = trained(args, backbone, arm, seed, pairs, home)
        seconds = time.perf_counter() - started
        model.max_seq_length = args.search_length
        figures = {Path(folder).name: evaluated(model, folder) for folder in args.data}
        figures["mean"] = {
            str(width): statistics.fmean(row[str(width)] for row in figures.values()) for width in WIDTHS
        }
        path.write_text(json.dumps({"figures": figures, "training_seconds": seconds}))
        print(f"{backbone.name} {seed} {arm}: {figures['mean']}, {seconds:.0f} s of training", flush=True)
    return json.loads(path.read_text())["figures"]


def trained(args: argparse.Namespace, backbone: Path, arm: str, seed: int, pairs: str, home: Path) -> Any:
    """The model of one arm, from its folder if it is there."""
    folder = home / arm.replace(", ", "-").replace(" ", "-")
    if folder.exists():
        return load_aggretriever(folder)
    settings: dict[str, Any] = {"output": str(folder), "seed": seed, "resume": True, "device": "cpu", "pairs": [pairs]}
    if arm == "plain":
        return train(
            TrainConfig(
                model=str(backbone), document_length=args.train_length, max_steps=args.steps, batch_size=32, **settings
            )
        )
    settings |= {"model": str(home / "plain"), "epochs": args.further_epochs, "batch_size": 32}
    if arm in ("hard negatives", "distilled"):
        settings |= {"pairs": [mined(pairs, home)], "negatives": NEGATIVES, "batch_size": 16}
    if arm == "distilled":
        settings["teacher"] = args.teacher
    if arm == "fold-aware":
        settings["fold_dims"] = FOLDS
    return train(TrainConfig(**settings))


def mined(pairs: str, home: Path) -> str:
    path = home / "mined.jsonl"
    if not path.exists():
        model = load_aggretriever(home / "plain")
        settings = MiningSettings(depth=200, negatives=NEGATIVES)
        mine(model, open_training_data([pairs]), path, settings=settings, model_name="plain", batch_size=64)
    return str(path)


def evaluated(model: Any, folder: str) -> dict[str, float]:
    """nDCG@10 at each width, of vectors that are made once."""
    collection = read_collection(folder, "test", ids_in_run=False)
    encoder = Encoder(model, 32)
    queries = encoder.queries(collection.queries)
    blocks = list(encoder.blocks(collection.corpus(), collection.counts["documents"], 50_000))
    found = {}
    for width in WIDTHS:
        hits = search(folded(queries, width), [(ids, folded(vectors, width)) for ids, vectors in blocks], 11)
        run = {
            query: dict(zip(ids, scores, strict=True))
            for query, ids, scores in zip(collection.queries, hits.ids.tolist(), hits.scores.tolist(), strict=True)
        }
        found[str(width)] = mean_figures(evaluate_run(collection.qrels, run, top_k=10))["nDCG@10"]
    return found


def folded(vectors: np.ndarray, width: int) -> np.ndarray:
    """(n, C + width) of (n, C + D)."""
    parts = torch.from_numpy(vectors)
    return torch.cat([parts[:, :CLS_DIM], fold_lexical(parts[:, CLS_DIM:], width)], 1).numpy()


def print_table(arms: dict[str, dict[int, Any]], columns: list[str], place: Any) -> None:
    names = columns if columns[0].isdigit() else [*columns, "mean"]
    print(f"{'':18}" + "".join(f"{name:>16}" for name in names))
    for arm, seeds in arms.items():
        cells = []
        for name in names:
            outer, inner = place(name)
            values = [figures[outer][inner] for figures in seeds.values()]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.fmean(values):.3f} +- {spread:.3f}")
        print(f"{arm:18}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
