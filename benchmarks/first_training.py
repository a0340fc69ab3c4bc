"""Train AGG, CLS and mean-pooling twins from one backbone on the same pairs; nDCG@10 on BEIR folders, beside BM25.

    python benchmarks/first_training.py --model MODEL --pairs FILE... --data FOLDER... --output DIR

Arms: AGG (128 + 640) untrained and trained, AGG at C + D = 128, CLS (C = 768), and mean pooling with the usual loss of
sentence-transformers (cosine, scale 20). Same pairs, steps, batches and learning rates (a small backbone's defaults:
1e-4, new heads 1e-3). An interrupted run goes on where it was: each arm's model and figures stay in DIR.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from kept import content_of, keep
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.sentence_transformer.training_args import BatchSamplers

from st_aggretriever import TrainConfig, build_aggretriever, load_aggretriever, train
from st_aggretriever.evaluation.beir import evaluate_beir
from st_aggretriever.evaluation.bm25 import evaluate_bm25
from st_aggretriever.versions import versions

SETTINGS = ("steps", "batch_size", "train_length", "search_length", "seed")
ARMS: dict[str, dict[str, Any]] = {
    "AGG 128+640": {"cls_dim": 128, "lexical_dim": 640},
    "AGG 32+96": {"cls_dim": 32, "lexical_dim": 96},
    "CLS 768": {"pooling": "cls", "cls_dim": 768},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--pairs", nargs="+", required=True)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--train-length", type=int, default=64, help="passages in training, tokens")
    parser.add_argument("--search-length", type=int, default=160, help="documents in search, tokens")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    keep(
        args.output,
        model=content_of(args.model),
        pairs=[content_of(path) for path in args.pairs],
        data=[Path(data).name for data in args.data],
        **{name: getattr(args, name) for name in SETTINGS},
    )

    rows: dict[str, dict[str, float]] = {}
    seconds: dict[str, float] = {}
    rows["BM25"] = {Path(data).name: evaluate_bm25(data)["figures"]["nDCG@10"] for data in args.data}
    rows["AGG 128+640, untrained"] = figures(
        args, "AGG untrained", lambda: build_aggretriever(args.model, seed=args.seed)
    )
    for name, options in ARMS.items():
        rows[name] = figures(args, name, lambda name=name, options=options: trained(args, name, options))
    rows["mean pooling, cosine x 20"] = figures(args, "mean", lambda: trained_mean(args))
    for path in args.output.glob("*/seconds.json"):
        seconds[path.parent.name] = json.loads(path.read_text())

    names = [Path(data).name for data in args.data]
    print(f"{'nDCG@10':28}" + "".join(f"{name:>12}" for name in [*names, "mean"]))
    for arm, row in rows.items():
        values = [row[name] for name in names]
        print(f"{arm:28}" + "".join(f"{value:12.3f}" for value in [*values, sum(values) / len(values)]))
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings |= {"model": Path(args.model).name, "pairs": [Path(path).name for path in args.pairs]}
    print(json.dumps({"nDCG@10": rows, "training_seconds": seconds, "settings": settings, "versions": versions()}))


def figures(args: argparse.Namespace, name: str, model: Any) -> dict[str, float]:
    """nDCG@10 by collection, from the arm's file if it was measured before."""
    path = args.output / f"{name}.json"
    if not path.exists():
        loaded = model()
        loaded.max_seq_length = loaded[0].document_length = args.search_length  # queries keep their own
        found = {Path(data).name: evaluate_beir(loaded, data)["figures"]["nDCG@10"] for data in args.data}
        path.write_text(json.dumps(found))
    return json.loads(path.read_text())


def trained(args: argparse.Namespace, name: str, options: dict[str, Any]) -> SentenceTransformer:
    folder = args.output / name
    if folder.exists():
        return load_aggretriever(folder)
    started = time.perf_counter()
    config = TrainConfig(
        model=args.model,
        pairs=args.pairs,
        output=str(folder),
        document_length=args.train_length,
        max_steps=args.steps,
        batch_size=args.batch_size,
        seed=args.seed,
        resume=True,
        **options,
    )
    model = train(config)
    (folder / "seconds.json").write_text(json.dumps(time.perf_counter() - started))
    return model


def trained_mean(args: argparse.Namespace) -> SentenceTransformer:
    """The usual recipe: mean pooling, in-batch softmax over cosine times 20."""
    from datasets import Dataset

    from st_aggretriever.readers.pairs import read_pairs

    folder = args.output / "mean"
    if folder.exists():
        return SentenceTransformer(str(folder))
    started = time.perf_counter()
    encoder = Transformer(args.model, query_length=32, document_length=args.train_length)
    model = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())]).float()
    model.max_seq_length = args.train_length
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(args.output / "mean.partial"),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=1e-4,
        warmup_steps=0.1,
        seed=args.seed,
        router_mapping={"query": "query", "passage": "document"},
        batch_sampler=BatchSamplers.NO_DUPLICATES,
        save_strategy="no",
        report_to="none",
    )
    pairs = [pair for path in args.pairs for pair in read_pairs(path)]
    columns = {name: [pair[name] for pair in pairs] for name in ("query", "passage")}
    loss = MultipleNegativesRankingLoss(model)
    torch.manual_seed(args.seed)
    SentenceTransformerTrainer(model, arguments, train_dataset=Dataset.from_dict(columns), loss=loss).train()
    model.save_pretrained(str(folder), create_model_card=False)
    (folder / "seconds.json").write_text(json.dumps(time.perf_counter() - started))
    return model


if __name__ == "__main__":
    main()
