"""Aggretriever as one would train it today: a new backbone, prompts, mined negatives, a cross-encoder as teacher.

    python examples/train_modern.py --pairs FILE --output models                      # ModernBERT
    python examples/train_modern.py --pairs FILE --output models --model xlm-roberta-base
    python examples/train_modern.py --pairs FILE --output models --arm mean           # or cls: same dimension

For one GPU of 24 GB. In three stages, each of which goes on where it was stopped:

1. 256 pairs a step, of which 16 texts go through the model at a time (GradCache), documents of 512 tokens, the loss
   also at folded widths, so that vectors can be shortened afterwards (not for the arms without lexical part);
2. negatives from ranks 10 to 200 of that model's own ranking, but none that scores above 95 % of the positive;
3. from the first stage on, 64 queries a step with 7 of these, and the cross-encoder's scores to learn from.

The arms mean and cls are today's single-vector poolings with the same data, dimension (768) and teacher.
--dry-run takes a few steps on the sample collection, in seconds, with a small model and BM25 as the teacher.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from st_aggretriever import TrainConfig, load_aggretriever, train
from st_aggretriever.mining import MiningSettings, mine
from st_aggretriever.quickstart import ARMS, asset
from st_aggretriever.readers.training import open_training_data

BACKBONE = "answerdotai/ModernBERT-base"
TEACHER = "cross-encoder/ms-marco-MiniLM-L6-v2"  # for other languages BAAI/bge-reranker-v2-m3
CLS_DIM, LEXICAL_DIM = 128, 640
HEADS: dict[str, Any] = {
    "query_length": 64,
    "document_length": 512,
    "query_prompt": "query: ",
    "document_prompt": "document: ",
}
FOLDS: dict[str, Any] = {"fold_dims": [320, 128, 64]}
PLAIN: dict[str, Any] = {"batch_size": 256, "negatives": 0, "epochs": 1, "learning_rate": 2e-5}
MINING: dict[str, Any] = {"depth": 200, "ranks": (10, 200), "relative_margin": 0.05, "negatives": 7, "drop_short": True}
DISTILLED: dict[str, Any] = {
    "batch_size": 64,
    "negatives": 7,
    "epochs": 2,
    "learning_rate": 1e-5,
    "kl_weight": 1.0,
    "margin_mse_weight": 0.0,
    "contrastive_weight": 0.2,
}
MEMORY: dict[str, Any] = {"mini_batch_size": 16, "precision": "bf16", "gradient_checkpointing": True}
DRY: dict[str, Any] = {
    "batch_size": 4,
    "mini_batch_size": 3,
    "max_steps": 2,
    "precision": "fp32",
    "device": "cpu",
    "save_steps": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"masked language model (default: {BACKBONE})")
    parser.add_argument("--pairs", nargs="+", help="training data, as for st-aggretriever train")
    parser.add_argument("--teacher", help=f"(default: {TEACHER})")
    parser.add_argument("--output", required=True, type=Path, help="folder for models and negatives")
    parser.add_argument("--arm", choices=("agg", "cls", "mean"), default="agg")
    parser.add_argument("--dev-data", help="BEIR folder with a dev split, to keep the best weights by")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="a few steps on the sample collection")
    args = parser.parse_args()
    if args.dry_run:
        args.model, args.pairs = args.model or str(asset("mini")), args.pairs or [str(asset("sample"))]
        args.teacher = args.teacher or "bm25"
    if args.pairs is None:
        parser.error("--pairs is needed, or --dry-run")
    run(args, args.output / args.arm)


def run(args: argparse.Namespace, home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    dry = DRY if args.dry_run else {}
    common: dict[str, Any] = {"seed": args.seed, "resume": True, "dev_data": args.dev_data}
    common |= FOLDS if args.arm == "agg" else {}
    arm = ARMS[args.arm].options(CLS_DIM, LEXICAL_DIM)
    plain = str(home / "plain")
    train(
        TrainConfig(
            model=args.model or BACKBONE,
            pairs=args.pairs,
            output=plain,
            **HEADS,
            **arm,
            **common,
            **PLAIN | MEMORY | dry,
        )
    )
    print(f"stage 1: {plain}")

    negatives = home / "negatives.jsonl"
    if not negatives.exists():
        settings = MiningSettings(**MINING | ({"relative_margin": None} if args.dry_run else {}))
        data = open_training_data(args.pairs, negatives=0, seed=args.seed)
        mine(load_aggretriever(plain), data, negatives, settings=settings, model_name=plain, batch_size=64)
    print(f"stage 2: {negatives}")

    distilled = str(home / "distilled")
    settings = common | DISTILLED | MEMORY | dry | {"teacher": args.teacher or TEACHER}
    train(TrainConfig(model=plain, pairs=[str(negatives)], output=distilled, **settings))
    print(f"stage 3: {distilled}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        print(f"train_modern.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("train_modern.py: interrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)
