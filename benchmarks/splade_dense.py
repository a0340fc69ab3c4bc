"""A SPLADE model as dense vectors, without training: nDCG@10 and bytes a document, by dimension and unpruned.

    python benchmarks/splade_dense.py --model SPLADE --data FOLDER...

Each text is encoded once; every D folds the same lexical weights, signed (agg*, ``*``) and, with ``--aggregation``,
positive (agg+, ``+``). ``--check`` also evaluates agg* at D = 640 the ordinary way, by ``build_aggretriever`` and
``evaluate_beir``, and prints the difference. A document that has a query's id stays: these collections number the two
apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from st_aggretriever import SliceMaxAgg, build_aggretriever
from st_aggretriever.evaluation.beir import evaluate_beir
from st_aggretriever.evaluation.metrics import evaluate_run, mean_figures
from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries

UNPRUNED = "unpruned"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a SPLADE checkpoint, or a SparseEncoder's folder")
    parser.add_argument("--data", nargs="+", required=True, help="BEIR folders")
    parser.add_argument("--dims", nargs="+", type=int, default=[640, 1280, 2560, 5120])
    parser.add_argument("--aggregation", nargs="+", choices=("signed", "positive"), default=["signed"])
    parser.add_argument("--query-length", type=int, default=64)
    parser.add_argument("--document-length", type=int, default=256)
    parser.add_argument("--excluded-tokens", choices=("none", "cls", "special"), default="none")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--check", nargs="*", default=[], metavar="FOLDER", help="evaluate these by evaluate_beir too")
    args = parser.parse_args()

    model = splade(args, aggregation="none").eval()
    vocabulary = model.get_embedding_dimension()
    folds = {
        f"{dim}{'*' if aggregation == 'signed' else '+'}": SliceMaxAgg(vocabulary, dim, aggregation=aggregation)
        for aggregation in args.aggregation
        for dim in args.dims
    }
    figures: dict[str, dict[str, float]] = {}
    terms: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for data in args.data:
        name = Path(data).name
        started = time.perf_counter()
        figures[name], terms[name] = evaluate(model, data, folds, args.batch_size)
        seconds[name] = round(time.perf_counter() - started, 1)
    checks = {Path(data).name: check(args, data) for data in args.check}
    stored = {UNPRUNED: 8 * sum(terms.values()) / len(terms)}
    stored |= {column: 4.0 * fold.lexical_dim for column, fold in folds.items()}
    print(f"{'nDCG@10':12}" + "".join(f"{column:>10}" for column in stored))
    for name, row in figures.items():
        print(f"{name:12}" + "".join(f"{row[column]:10.4f}" for column in stored))
    mean = {column: sum(row[column] for row in figures.values()) / len(figures) for column in stored}
    print(f"{'mean':12}" + "".join(f"{value:10.4f}" for value in mean.values()))
    print(f"{'bytes':12}" + "".join(f"{size:10.0f}" for size in stored.values()))
    print("bytes a document: float32, half of it in float16; unpruned, an id and a weight for each term above 0")
    print("terms above 0 a document: " + ", ".join(f"{name} {count:.0f}" for name, count in terms.items()))
    for name, value in checks.items():
        difference = value - figures[name].get("640*", float("nan"))
        print(f"{name} at D = 640 by evaluate_beir: {value:.4f}, difference {difference:+.1e}")
    result = {
        "benchmark": "splade_dense",
        "model": Path(args.model).name,
        "nDCG@10": figures,
        "bytes": stored,
        "terms": terms,
        "evaluate_beir_640": checks,
        "query_length": args.query_length,
        "document_length": args.document_length,
        "excluded_tokens": args.excluded_tokens,
        "seconds": seconds,
        "versions": {
            name: version(name) for name in ("st-aggretriever", "torch", "transformers", "sentence-transformers")
        },
        "python": platform.python_version(),
    }
    print(json.dumps(result))


def splade(args: argparse.Namespace, **options: Any) -> SentenceTransformer:
    return build_aggretriever(
        args.model,
        activation="log1p_relu",
        term_weight="none",
        cls_dim=0,
        excluded_tokens=args.excluded_tokens,
        query_length=args.query_length,
        document_length=args.document_length,
        **options,
    )


def evaluate(
    model: SentenceTransformer, data: str, folds: dict[str, SliceMaxAgg], batch_size: int
) -> tuple[dict[str, float], float]:
    """nDCG@10 by column, and the mean number of terms above 0 in a document."""
    texts = read_queries(data)
    qrels = read_qrels(data, "test", texts)
    ids, documents = zip(*read_corpus(data), strict=True)
    rules = {UNPRUNED: lambda weights: weights} | {column: fold.aggregate for column, fold in folds.items()}
    scores = {column: np.empty((len(qrels), len(ids)), dtype=np.float32) for column in rules}
    queries = torch.cat([weights for _, weights in encode(model, [texts[key] for key in qrels], "query", batch_size)])
    folded = {column: rule(queries) for column, rule in rules.items()}
    terms = 0
    longest_first = sorted(range(len(ids)), key=lambda index: -len(documents[index]))
    bar = tqdm(total=len(ids), desc=Path(data).name, disable=None)
    for start, weights in encode(model, [documents[index] for index in longest_first], "document", batch_size):
        places = longest_first[start : start + len(weights)]
        for column, rule in rules.items():
            scores[column][:, places] = (folded[column] @ rule(weights).T).numpy()
        terms += int((weights > 0).sum())
        bar.update(len(weights))
    bar.close()
    figures = {}
    for column, matrix in scores.items():
        run = {query: dict(zip(ids, row.tolist(), strict=True)) for query, row in zip(qrels, matrix, strict=True)}
        figures[column] = mean_figures(evaluate_run(qrels, run, drop_identical_ids=False))["nDCG@10"]
    return figures, terms / len(ids)


def encode(
    model: SentenceTransformer, texts: list[str], task: str, batch_size: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """(place of the first text, lexical weights (n, V)) of each batch."""
    for start in range(0, len(texts), batch_size):
        with torch.inference_mode():
            yield start, model(model.preprocess(texts[start : start + batch_size], task=task))["lexical_weights"]


def check(args: argparse.Namespace, data: str) -> float:
    model = splade(args, lexical_dim=640)
    return evaluate_beir(model, data, drop_identical_ids=False)["figures"]["nDCG@10"]


if __name__ == "__main__":
    main()
