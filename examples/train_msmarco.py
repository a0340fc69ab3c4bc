"""Aggretriever on MS MARCO passages, in the paper's setting (Lin, Li, Lin 2023), from the official files.

    python examples/train_msmarco.py --data FOLDER --output agg
    python examples/train_msmarco.py --data FOLDER --output agg --hard-negatives      # and its two further epochs
    st-aggretriever evaluate msmarco --help                                           # dev and TREC DL, from there

FOLDER holds collection.tsv, queries.train.tsv and triples of ids, qidpidtriples.train.full.2.tsv, plain or compressed:
of each query its passage and what BM25 found instead, on neighbouring lines. One GPU; the texts stay on disk.

The first run is the one of the published checkpoints: 3 epochs of 8 queries with 8 passages each, 1 that answers and 7
of BM25's drawn anew each epoch, all 64 negatives of each other; learning rate 5e-6 that rises over a tenth of the steps
and falls to 0; half precision; 32 tokens of a query, 128 of a passage. --hard-negatives then takes the model's own
first 200 passages of each query, draws 7 of them instead, and trains for 2 epochs more, into OUTPUT-hard.

The paper's term weight has an absolute value, the published checkpoints' has none, and they drop ids that don't fill
the slices: --as-published trains those. --dry-run takes two steps on made-up data, in seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from st_aggretriever import TrainConfig, load_aggretriever, train
from st_aggretriever.mining import MiningSettings, mine
from st_aggretriever.quickstart import asset
from st_aggretriever.readers.training import open_training_data

PAPER: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 8,
    "negatives": 7,
    "drop_short": True,  # a query of which BM25 found fewer is left out
    "learning_rate": 5e-6,
    "head_learning_rate": 5e-6,
    "warmup_ratio": 0.1,
    "lexical_weight": 0.5,
    "cls_weight": 0.5,
    "scale": 1.0,
    "precision": "fp16",
    "save_steps": 5000,
    "logging_steps": 100,
}
ARCHITECTURE: dict[str, Any] = {"lexical_dim": 640, "cls_dim": 128, "query_length": 32, "document_length": 128}
PUBLISHED: dict[str, Any] = {"term_weight": "identity", "remainder": "drop"}
HARD: dict[str, Any] = {"epochs": 2}  # with the miner's negatives
DRY: dict[str, Any] = {"max_steps": 2, "batch_size": 2, "precision": "fp32", "device": "cpu", "save_steps": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="masked language model (default: distilbert-base-uncased)")
    parser.add_argument("--data", help="folder of the official files")
    parser.add_argument("--output", required=True, help="folder for the model")
    parser.add_argument("--hard-negatives", action="store_true", help="mine, and train for two epochs more")
    parser.add_argument("--as-published", action="store_true", help="the heads of the published checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="two steps on made-up data and a small model")
    args = parser.parse_args()
    if args.data is None and not args.dry_run:
        parser.error("--data is needed, or --dry-run")
    with tempfile.TemporaryDirectory() as folder:
        data = write_made_up(Path(folder)) if args.dry_run else args.data
        model = args.model or (str(asset("mini")) if args.dry_run else "distilbert-base-uncased")
        run(args, model, data)


def run(args: argparse.Namespace, model: str, data: str) -> None:
    settings = PAPER | (DRY if args.dry_run else {}) | {"seed": args.seed, "resume": True}
    heads = ARCHITECTURE | (PUBLISHED if args.as_published else {})
    train(TrainConfig(model=model, pairs=[data], output=args.output, **settings, **heads))
    print(f"trained: {args.output}")
    if not args.hard_negatives:
        return
    negatives = Path(f"{args.output}-negatives.jsonl")
    if not negatives.exists():
        depth = 12 if args.dry_run else 200
        mine(
            load_aggretriever(args.output),
            open_training_data([data], negatives=0, seed=args.seed),
            negatives,
            settings=MiningSettings(depth=depth, negatives=PAPER["negatives"]),
            model_name=args.output,
            batch_size=128,
        )
    output = f"{args.output}-hard"
    train(TrainConfig(model=args.output, pairs=[str(negatives)], output=output, **(settings | HARD)))
    print(f"trained further: {output}")


def write_made_up(folder: Path) -> str:
    """The official files' names and formats, with 8 queries of 9 triples over 40 passages."""
    with (folder / "collection.tsv").open("w") as file:
        file.writelines(f"{number}\ta passage that speaks of number {number} alone\n" for number in range(40))
    with (folder / "queries.train.tsv").open("w") as file:
        file.writelines(f"{100 + number}\twhat speaks of number {number}\n" for number in range(8))
    with (folder / "qidpidtriples.train.full.2.tsv").open("w") as file:
        file.writelines(f"{100 + query}\t{query}\t{10 + query + near}\n" for query in range(8) for near in range(9))
    return str(folder)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        print(f"train_msmarco.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("train_msmarco.py: interrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)
