"""What half precision costs a trained model: vectors against float32, and nDCG@10 on a BEIR folder.

python benchmarks/half_precision.py --model FOLDER --data FOLDER
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
from st_aggretriever.search import search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--length", type=int, help="documents, tokens (default: the model's)")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float16"), default=["bfloat16", "float16"])
    parser.add_argument("--limit", type=int, help="first N documents only: vectors, without nDCG@10")
    args = parser.parse_args()

    texts = read_queries(args.data)
    qrels = read_qrels(args.data, args.split, texts)
    queries = {key: texts[key] for key in qrels}
    corpus = dict(islice(read_corpus(args.data), args.limit))
    rows: list[dict[str, Any]] = []
    exact = None
    for name in ("float32", *args.dtypes):
        model = load_aggretriever(args.model).to(getattr(torch, name))
        if args.length:
            model.max_seq_length = args.length
        cls_dim = next((module.cls_dim for module in model if hasattr(module, "cls_dim")), 0)
        documents = model.encode_document(list(corpus.values()), show_progress_bar=None)
        exact = documents if exact is None else exact
        cosine = (exact * documents).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(documents, axis=1)
        flipped = (np.signbit(exact) != np.signbit(documents))[:, cls_dim:]
        row = {"dtype": name, "finite": bool(np.isfinite(documents).all())}
        row |= {"mean cosine": float(cosine.mean()), "least cosine": float(cosine.min())}
        row["flipped signs"] = float(flipped.mean())
        if args.limit is None:
            hits = search(model.encode_query(list(queries.values())), [(list(corpus), documents)], 101)
            run = {
                query: rank(dict(zip(ids, scores, strict=True)), 100, without=query)
                for query, ids, scores in zip(queries, hits.ids.tolist(), hits.scores.tolist(), strict=True)
            }
            row["nDCG@10"] = mean_figures(evaluate_run(qrels, run, top_k=100))["nDCG@10"]
        if not rows:
            print("  ".join(f"{key:>13}" for key in row))
        print(
            "  ".join(f"{value:13.6f}" if isinstance(value, float) else f"{value!s:>13}" for value in row.values()),
            flush=True,
        )
        rows.append(row)
    print(json.dumps({"rows": rows, "documents": len(corpus), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
