"""The best 768-dimensional model that was found for a small SPLADE checkpoint, from its folded weights on.

    python benchmarks/splade_to_dense.py --model SPLADE --pairs FILE... --rows N... --data FOLDER... --output DIR

The checkpoint's term weights, folded into 768 dimensions without a [CLS] part, are the start; what the head says at
[CLS] is left out of the maximum, as in AGG. It mines negatives for
a sample of the pairs, and is trained with them on the contrastive loss and on the unfolded checkpoint's scores (KL and
MarginMSE), so that it learns which terms to leave out of a half slice that it shares. nDCG@10 before and after, beside
BM25. What lies in DIR is not done again; training goes on where it was interrupted.
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

from kept import content_of, keep

from st_aggretriever import TrainConfig, build_aggretriever, load_aggretriever, train
from st_aggretriever.evaluation.beir import evaluate_beir
from st_aggretriever.evaluation.bm25 import evaluate_bm25
from st_aggretriever.mining import MiningSettings, mine
from st_aggretriever.readers.training import open_training_data
from st_aggretriever.versions import versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a SPLADE checkpoint, also the teacher")
    parser.add_argument("--pairs", nargs="+", required=True, help="files of pairs (jsonl.gz)")
    parser.add_argument("--rows", nargs="+", type=int, required=True, help="pairs to draw from each file")
    parser.add_argument("--data", nargs="+", required=True, help="folders in BEIR's layout")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=200, help="of 16 pairs (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="(default: %(default)s)")
    parser.add_argument("--query-length", type=int, default=64, help="tokens in search (default: %(default)s)")
    parser.add_argument("--document-length", type=int, default=256, help="tokens in search (default: %(default)s)")
    args = parser.parse_args()
    if len(args.pairs) != len(args.rows):
        parser.error(f"--rows: expected a number for each of {len(args.pairs)} files, got {len(args.rows)}")
    names = ("rows", "steps", "learning_rate")
    made_with = {name: getattr(args, name) for name in names} | {"pairs": [content_of(path) for path in args.pairs]}
    keep(args.output, model=content_of(args.model), **made_with)
    start, trained = args.output / "start", args.output / "trained"
    if not start.exists():
        settings: dict[str, Any] = {"cls_dim": 0, "lexical_dim": 768, "activation": "log1p_relu"}
        build_aggretriever(args.model, term_weight="none", document_length=128, **settings).save_pretrained(str(start))
    started = time.perf_counter()
    negatives = mined(args, start)
    mining_seconds, started = time.perf_counter() - started, time.perf_counter()
    if not trained.exists():
        train(
            TrainConfig(
                model=str(start),
                pairs=[negatives],
                output=str(trained),
                negatives=3,
                batch_size=16,
                max_steps=args.steps,
                learning_rate=args.learning_rate,
                teacher=args.model,
                kl_weight=1.0,
                margin_mse_weight=0.05,
                temperature=2.0,
                save_steps=200,
                resume=True,
                device="cpu",
            )
        )
    training_seconds = time.perf_counter() - started
    rows = {"BM25": {Path(folder).name: evaluate_bm25(folder)["figures"]["nDCG@10"] for folder in args.data}}
    rows |= {f"{folder.name}, 768 dimensions": evaluated(args, folder) for folder in (start, trained)}
    for name, figures in rows.items():
        figures["mean"] = statistics.fmean(figures.values())
        print(f"{name:28}" + "".join(f"{key} {value:.3f}  " for key, value in figures.items()))
    print(f"mining {mining_seconds:.0f} s, training {training_seconds:.0f} s in this run")
    print(json.dumps({"nDCG@10": rows, "steps": args.steps, "rows": args.rows, "versions": versions()}))


def mined(args: argparse.Namespace, start: Path) -> str:
    """The sample with ten negatives or more a row, as the start ranks them."""
    sample, output = args.output / "pairs.jsonl", args.output / "mined.jsonl"
    if not output.exists():
        draw, lines = random.Random(0), []
        for name, count in zip(args.pairs, args.rows, strict=True):
            with gzip.open(name, "rt", encoding="utf-8") as file:
                lines += draw.sample(list(file), count)
        sample.write_text("".join(lines), encoding="utf-8")
        settings = MiningSettings(depth=60, negatives=10, drop_short=True)
        model = load_aggretriever(start, device="cpu")
        mine(model, open_training_data([str(sample)]), output, settings=settings, model_name="start")
    return str(output)


def evaluated(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    model = load_aggretriever(folder, device="cpu")
    model[0].query_length, model.max_seq_length = args.query_length, args.document_length
    return {Path(data).name: evaluate_beir(model, data)["figures"]["nDCG@10"] for data in args.data}


if __name__ == "__main__":
    main()
