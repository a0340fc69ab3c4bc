"""What fewer bits a number cost: float16, int8 and binary by sentence-transformers' quantisation, with and without
rescoring, in nDCG@10 and bytes.

    python benchmarks/storage.py --model AGG --data FOLDER --output DIR [--length 160] [--candidates 100 1000]

The vectors are encoded once, into DIR. int8 is quantised by each dimension's range among the documents, binary is the
sign: in a signed lexical part, which half of the slice won. The search by codes gives candidates; "own" rescores them
as sentence-transformers does (the query in float32, the document dequantised), "float16" by the documents' vectors in
half precision, which must then be kept somewhere too. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from kept import content_of
from sentence_transformers.util.quantization import quantize_embeddings, semantic_search_faiss

from st_aggretriever import load_aggretriever
from st_aggretriever.evaluation.metrics import evaluate_run, mean_figures
from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries

DEPTH = 10  # documents that count
BITS = {"float32": 32, "float16": 16, "uint8": 8, "ubinary": 1}
NAMES = {"uint8": "int8", "ubinary": "binary"}  # the same bits with a sign, under which Faiss can't search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path, help="folder in BEIR's layout")
    parser.add_argument("--output", required=True, type=Path, help="where the vectors are kept")
    parser.add_argument("--length", type=int, default=160, help="tokens of a document")
    parser.add_argument("--candidates", nargs="+", type=int, default=[100, 1000])
    args = parser.parse_args()

    documents, document_ids = vectors_of(args, "document")
    queries, query_ids = vectors_of(args, "query")
    qrels = read_qrels(args.data, "test", set(query_ids))

    def ndcg(positions: np.ndarray) -> float:
        run = {query: {document_ids[row]: -float(place) for place, row in enumerate(rows)}
               for query, rows in zip(query_ids, positions.tolist(), strict=True)}  # fmt: skip
        return mean_figures(evaluate_run(qrels, run, top_k=DEPTH))["nDCG@10"]

    half = documents.astype(np.float16)
    rows: dict[str, dict[str, float]] = {}
    dimension = documents.shape[1]
    size = {name: dimension * bits // 8 for name, bits in BITS.items()}
    rows["float32"] = {"nDCG@10": ndcg(best(queries, documents)), "bytes": size["float32"]}
    rows["float16"] = {"nDCG@10": ndcg(best(queries, half.astype(np.float32))), "bytes": size["float16"]}
    for precision, name in NAMES.items():
        codes = quantize_embeddings(documents, precision, calibration_embeddings=documents)
        plain = by_codes(queries, documents, codes, precision, DEPTH)
        rows[name] = {"nDCG@10": ndcg(plain), "bytes": size[precision]}
        if precision == "uint8":
            rows["int8, dequantised"] = {
                "nDCG@10": ndcg(best(queries, dequantised(documents, codes))),
                "bytes": size[precision],
            }
        for count in args.candidates:
            own = by_codes(queries, documents, codes, precision, DEPTH, rescore=count // DEPTH)
            found = by_codes(queries, documents, codes, precision, min(count, len(documents)))
            rows[f"{name}, {count} rescored, own"] = {"nDCG@10": ndcg(own), "bytes": size[precision]}
            rows[f"{name}, {count} rescored, float16"] = {
                "nDCG@10": ndcg(rescored(queries, half, found)),
                "bytes": size[precision] + size["float16"],
            }
    print(f"{args.data.name}, {len(documents):,} documents, {len(qrels)} queries, {dimension} dimensions")
    print(f"{'':32}{'nDCG@10':>10}{'cost':>10}{'bytes':>8}")
    for name, row in rows.items():
        cost = rows["float32"]["nDCG@10"] - row["nDCG@10"]
        print(f"{name:32}{row['nDCG@10']:10.4f}{cost:10.4f}{row['bytes']:8.0f}")
    packages = ("st-aggretriever", "sentence-transformers", "torch", "numpy", "faiss-cpu")
    print(json.dumps({"benchmark": "storage", "data": args.data.name, "length": args.length, "rows": rows,
                      "versions": {name: version(name) for name in packages}}))  # fmt: skip


def vectors_of(args: argparse.Namespace, side: str) -> tuple[np.ndarray, list[str]]:
    """Vectors and ids of a side, encoded where the folder hasn't got them yet."""
    texts = dict(read_corpus(args.data)) if side == "document" else read_queries(args.data)
    if side == "query":
        judged = read_qrels(args.data, "test", set(texts))
        texts = {key: text for key, text in texts.items() if key in judged}
    file = args.output / f"{args.data.name}-{args.length}-{side}-{content_of(args.model)[:12]}.npy"
    if not file.exists():
        model: Any = load_aggretriever(args.model, device="cpu")
        model.max_seq_length = args.length
        encode = model.encode_document if side == "document" else model.encode_query
        args.output.mkdir(exist_ok=True, parents=True)
        np.save(file.with_suffix(".partial.npy"), encode(list(texts.values()), show_progress_bar=False))
        file.with_suffix(".partial.npy").rename(file)
    return np.load(file), list(texts)


def best(queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """(Q, DEPTH) positions of the largest inner products."""
    return np.argsort(-(queries @ documents.T), axis=1, kind="stable")[:, :DEPTH]


def by_codes(
    queries: np.ndarray, documents: np.ndarray, codes: np.ndarray, precision: Any, top_k: int, rescore: int = 0
) -> np.ndarray:
    """(Q, top_k) positions by sentence-transformers' search over codes, the queries quantised as the documents were."""
    hits, _ = semantic_search_faiss(
        queries,
        corpus_embeddings=codes,
        corpus_precision=precision,
        top_k=top_k,
        calibration_embeddings=documents,
        rescore=bool(rescore),
        rescore_multiplier=max(1, rescore),
    )
    return np.array([[hit["corpus_id"] for hit in row] for row in hits])


def dequantised(documents: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """(N, dim) float32: the middles of what the codes stand for, as a store with scalar quantisation reads them."""
    least, largest = documents.min(0), documents.max(0)
    return least + (codes.astype(np.float32) + 0.5) * ((largest - least) / 255)


def rescored(queries: np.ndarray, half: np.ndarray, found: Sequence[Any]) -> np.ndarray:
    """(Q, DEPTH) positions: the candidates by the inner product with the documents in float16."""
    candidates = np.asarray(found)
    rows = []
    for query, places in zip(queries, candidates, strict=True):
        scores = half[places].astype(np.float32) @ query
        rows.append(places[np.argsort(-scores, kind="stable")[:DEPTH]])
    return np.stack(rows)


if __name__ == "__main__":
    main()
