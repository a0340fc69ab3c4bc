"""Documents longer than a model reads: cut, in windows merged to one vector, and as one vector a window.

    python benchmarks/windows.py --model AGG --data FOLDER... [--needle FOLDER] [--documents 150] [--longest 150]

Needle: a relevant document of each query of --needle (default: the first folder) is put among others, at the start, in
the middle or at the end of a text of at least --tokens tokens; its query must find that text among all. Longest: the
--longest documents of most tokens of each folder, and the queries that one of them is relevant to. nDCG@10, with the
bytes of a document's float32 vectors.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from st_aggretriever import load_aggretriever
from st_aggretriever.evaluation.metrics import evaluate_run, mean_figures
from st_aggretriever.folding import need_lexical_part
from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries
from st_aggretriever.windows import encode_each_window, merge_windows

PLACES = ("start", "middle", "end")


class Task(NamedTuple):
    name: str
    queries: dict[str, str]
    documents: dict[str, str]
    qrels: dict[str, dict[str, int]]
    group: dict[str, str]  # query -> where its needle lies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", nargs="+", required=True, type=Path, help="BEIR folders")
    parser.add_argument("--needle", type=Path, help="BEIR folder (default: the first of --data)")
    parser.add_argument("--documents", type=int, default=150, help="texts of the needle test")
    parser.add_argument("--longest", type=int, default=150, help="documents of each folder")
    parser.add_argument("--tokens", type=int, default=1000, help="least length of a text of the needle test")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--overlap", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    model = load_aggretriever(args.model)
    model.max_seq_length = 10**6  # as far as positions go
    positions = model.max_seq_length
    tasks = [needle(args, model), *(longest(args, model, folder) for folder in args.data)]
    result: dict[str, Any] = {}
    for task in tasks:
        lengths = [count_tokens(model, text) for text in task.documents.values()]
        print(f"{task.name}: {len(task.documents)} documents of {min(lengths):,} to {max(lengths):,} tokens (median "
              f"{int(np.median(lengths)):,}), {len(task.qrels)} queries")  # fmt: skip
        rows = measure(args, model, positions, task)
        groups = list(next(iter(rows.values()))["nDCG@10"])
        print(f"{'':34}" + "".join(f"{group:>9}" for group in groups) + f"{'bytes':>10}{'seconds':>9}")
        for name, row in rows.items():
            print(f"{name:34}" + "".join(f"{value:9.4f}" for value in row["nDCG@10"].values())
                  + f"{row['bytes']:10,.0f}{row['seconds']:9.1f}")  # fmt: skip
        result[task.name] = rows
    settings = {name: getattr(args, name) for name in ("documents", "longest", "tokens", "window", "overlap", "seed")}
    versions = {name: version(name) for name in ("st-aggretriever", "torch", "transformers", "sentence-transformers")}
    print(json.dumps({"benchmark": "windows", "model": Path(args.model).name, "rows": result, "settings": settings,
                      "versions": versions, "python": platform.python_version()}))  # fmt: skip


def count_tokens(model: Any, text: str) -> int:
    return len(model.tokenizer(text, truncation=False, verbose=False)["input_ids"])


def needle(args: argparse.Namespace, model: Any) -> Task:
    folder = args.needle or args.data[0]
    queries, corpus = read_queries(folder), dict(read_corpus(folder))
    qrels = {query: {key: grade for key, grade in grades.items() if grade > 0 and key in corpus}
             for query, grades in read_qrels(folder, "test", queries).items()}  # fmt: skip
    judged = {key for grades in qrels.values() for key in grades}
    hay = [text for key, text in sorted(corpus.items()) if key not in judged and text]
    chooser = random.Random(args.seed)
    documents, places = {}, {}
    # One document of each query: of the first ones alone, a few queries would have them all.
    chosen = list(dict.fromkeys(min(grades) for grades in qrels.values() if grades))[: args.documents]
    for number, key in enumerate(chosen):
        place, parts, length = PLACES[number % 3], [], count_tokens(model, corpus[key])
        while length < args.tokens:
            parts.append(chooser.choice(hay))
            length += count_tokens(model, parts[-1])
        parts.insert({"start": 0, "middle": len(parts) // 2, "end": len(parts)}[place], corpus[key])
        documents[key], places[key] = "\n".join(parts), place
    kept = {query: {key: 1 for key in grades if key in documents} for query, grades in qrels.items()}
    # One place a query: of several needles the first counts.
    kept = {query: dict(list(grades.items())[:1]) for query, grades in kept.items() if grades}
    group = {query: places[next(iter(grades))] for query, grades in kept.items()}
    return Task(f"needle in {folder.name}", {query: queries[query] for query in kept}, documents, kept, group)


def longest(args: argparse.Namespace, model: Any, folder: Path) -> Task:
    queries, corpus = read_queries(folder), dict(read_corpus(folder))
    by_length = sorted(corpus, key=lambda key: -count_tokens(model, corpus[key]))
    documents = {key: corpus[key] for key in by_length[: args.longest]}
    qrels = {query: {key: grade for key, grade in grades.items() if key in documents}
             for query, grades in read_qrels(folder, "test", queries).items()}  # fmt: skip
    qrels = {query: grades for query, grades in qrels.items() if any(grade > 0 for grade in grades.values())}
    return Task(f"longest of {folder.name}", {query: queries[query] for query in qrels}, documents, qrels, {})


def measure(args: argparse.Namespace, model: Any, positions: int, task: Task) -> dict[str, dict[str, Any]]:
    texts = list(task.documents.values())
    queries = model.encode_query(list(task.queries.values()), show_progress_bar=False)
    size = 4 * queries.shape[1]
    rows = {}
    for length in dict.fromkeys((args.window, positions)):
        model.max_seq_length = length
        started = time.perf_counter()
        vectors = model.encode_document(texts, show_progress_bar=False)
        seconds = time.perf_counter() - started
        rows[f"cut at {length} tokens"] = row(task, queries @ vectors.T, size, seconds)
    model.max_seq_length = args.window
    options = {"window": args.window, "overlap": args.overlap}
    started = time.perf_counter()
    vectors, owners = encode_each_window(model, texts, **options)
    seconds = time.perf_counter() - started
    part = need_lexical_part(model, "benchmark")
    starts = np.searchsorted(owners, np.arange(len(texts)))
    for cls in ("first", "mean"):
        merged = np.stack([merge_windows(windows, part, cls) for windows in np.split(vectors, starts[1:])])
        rows[f"windows merged, [CLS] {cls}"] = row(task, queries @ merged.T, size, seconds)
    best = np.maximum.reduceat(queries @ vectors.T, starts, axis=1)
    rows["one vector a window, the best"] = row(task, best, size * len(vectors) / len(texts), seconds)
    return rows


def row(task: Task, scores: np.ndarray, size: float, seconds: float) -> dict[str, Any]:
    run = {query: dict(zip(task.documents, values.tolist(), strict=True))
           for query, values in zip(task.queries, scores, strict=True)}  # fmt: skip
    figures = evaluate_run(task.qrels, run, drop_identical_ids=False)
    means = {"all": mean_figures(figures)["nDCG@10"]}
    for group in PLACES if task.group else ():
        chosen = {query: figures[query] for query in figures if task.group[query] == group}
        means[group] = mean_figures(chosen)["nDCG@10"] if chosen else float("nan")
    return {"nDCG@10": means, "bytes": size, "seconds": round(seconds, 1)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
