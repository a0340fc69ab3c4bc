"""What fewer bits cost a trained model: vectors against float32, signs that turn, and nDCG@10 on a BEIR folder.

python benchmarks/head_precision.py --model FOLDER --data FOLDER

Arms: the head alone in int8 and in bfloat16 (``quantize``: winners' weights computed again in float32), and the whole
model in bfloat16 and float16. Documents by an arm, queries by the same; with ``--queries-only`` the documents stay in
float32, as where an index exists and single queries must be fast.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from typing import Any

import numpy as np
import torch

from st_aggretriever import load_aggretriever
from st_aggretriever.evaluation.metrics import evaluate_run, mean_figures, rank
from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries
from st_aggretriever.search.exact import search
from st_aggretriever.versions import versions

ARMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8 head": {"quantize": "int8"},
    "bf16 head": {"quantize": "bf16"},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--length", type=int, help="documents, tokens (default: the model's)")
    parser.add_argument("--arms", nargs="+", choices=[arm for arm in ARMS if arm != "float32"], default=[*ARMS][1:])
    parser.add_argument("--limit", type=int, help="first N documents only: vectors, without nDCG@10")
    parser.add_argument("--queries-only", action="store_true", help="documents stay in float32")
    args = parser.parse_args()

    texts = read_queries(args.data)
    qrels = read_qrels(args.data, args.split, texts)
    queries = {key: texts[key] for key in qrels}
    corpus = dict(islice(read_corpus(args.data), args.limit))
    rows: list[dict[str, Any]] = []
    exact: dict[str, np.ndarray] = {}
    for name in ("float32", *args.arms):
        model = load(args.model, args.length, **ARMS[name])
        vectors = {"queries": model.encode_query(list(queries.values()), convert_to_numpy=True)}
        vectors["documents"] = (
            exact["documents"]
            if args.queries_only and rows
            else model.encode_document(list(corpus.values()), show_progress_bar=None, convert_to_numpy=True)
        )
        exact = exact or vectors
        cls_dim = next((module.cls_dim for module in model if hasattr(module, "cls_dim")), 0)
        side = "queries" if args.queries_only else "documents"
        row: dict[str, Any] = {"arm": name, **compare(exact[side], vectors[side], cls_dim)}
        if args.limit is None:
            row["nDCG@10"] = effectiveness(vectors, list(queries), list(corpus), qrels)
        if not rows:
            print("  ".join(f"{key:>13}" for key in row))
        print(
            "  ".join(f"{value:13.7f}" if isinstance(value, float) else f"{value!s:>13}" for value in row.values()),
            flush=True,
        )
        rows.append(row)
    print(json.dumps({"rows": rows, "documents": len(corpus), "of": side, "versions": versions()}))


def load(path: str, length: int | None, *, dtype: torch.dtype = torch.float32, quantize: str = "none") -> Any:
    model = load_aggretriever(path, device="cpu", quantize=quantize).to(dtype)
    if length:
        model.max_seq_length = length
    return model


def compare(exact: np.ndarray, vectors: np.ndarray, cls_dim: int) -> dict[str, Any]:
    cosine = (exact * vectors).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(vectors, axis=1)
    turned = (np.signbit(exact) != np.signbit(vectors))[:, cls_dim:]
    return {
        "finite": bool(np.isfinite(vectors).all()),
        "mean cosine": float(cosine.mean()),
        "least cosine": float(cosine.min()),
        "flipped signs": float(turned.mean()),
    }


def effectiveness(
    vectors: dict[str, np.ndarray], queries: list[str], documents: list[str], qrels: dict[str, dict[str, int]]
) -> float:
    hits = search(vectors["queries"], [(documents, vectors["documents"])], 101)
    run = {
        query: rank(dict(zip(ids, scores, strict=True)), 100, without=query)
        for query, ids, scores in zip(queries, hits.ids.tolist(), hits.scores.tolist(), strict=True)
    }
    return mean_figures(evaluate_run(qrels, run, top_k=100))["nDCG@10"]


if __name__ == "__main__":
    main()
