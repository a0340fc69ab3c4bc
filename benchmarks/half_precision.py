"""What half precision costs a trained model: vectors against float32, and nDCG@10 on a BEIR folder.

python benchmarks/half_precision.py --model FOLDER --data FOLDER
"""

from __future__ import annotations

import argparse
import json

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
    args = parser.parse_args()

    texts = read_queries(args.data)
    qrels = read_qrels(args.data, args.split, texts)
    queries = {key: texts[key] for key in qrels}
    corpus = dict(read_corpus(args.data))
    rows = []
    exact = None
    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        model = load_aggretriever(args.model)
        if args.length:
            model.max_seq_length = args.length
        if dtype is not None:
            model.to(dtype)
        cls_dim = next((module.cls_dim for module in model if hasattr(module, "cls_dim")), 0)
        encoded_queries = model.encode_query(list(queries.values()), show_progress_bar=False)
        documents = model.encode_document(list(corpus.values()), show_progress_bar=True)
        hits = search(encoded_queries, [(list(corpus), documents)], 101)
        run = {
            query: rank(dict(zip(ids, scores, strict=True)), 100, without=query)
            for query, ids, scores in zip(queries, hits.ids.tolist(), hits.scores.tolist(), strict=True)
        }
        row = {"dtype": name, "nDCG@10": mean_figures(evaluate_run(qrels, run, top_k=100))["nDCG@10"]}
        if exact is None:
            exact = documents
        cosine = (exact * documents).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(documents, axis=1)
        row |= {
            "finite": bool(np.isfinite(documents).all()),
            "mean cosine": cosine.mean(),
            "least cosine": cosine.min(),
        }
        row["flipped signs"] = (np.signbit(exact) != np.signbit(documents))[:, cls_dim:].mean()
        rows.append({key: float(value) if isinstance(value, np.floating) else value for key, value in row.items()})
    print("  ".join(f"{key:>13}" for key in rows[0]))
    for row in rows:
        print("  ".join(f"{value:13.6f}" if isinstance(value, float) else f"{value!s:>13}" for value in row.values()))
    print(json.dumps({"rows": rows, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
