"""Whether explanations are true: contributions sum to the score, and the word ranked first matters more than another.

    python benchmarks/explain_faithfulness.py --model MODEL --data scifact --split train

Sums: random pairs of a query and a document; the [CLS] part and the products of the terms' own weights and signs,
against the dot product of the two vectors, all in float64, and against that of the vectors that encode gives in batches
of its own. Deletions: a query and a relevant document; from the document (and, apart, from the query) the word ranked
first is deleted, and another one at random; the share of pairs in which the score falls further without the first. All
occurrences of a word go. The first word is also set beside the longest and the rarest word of the document (the fewest
documents of the folder hold it), which need no explanation.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from st_aggretriever.explain import ScoreExplanation, explain_texts, match
from st_aggretriever.model import load_aggretriever
from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries
from st_aggretriever.versions import versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="BEIR folder")
    parser.add_argument("--split", default="test")
    parser.add_argument("--pairs", type=int, default=500, help="of the deletions")
    parser.add_argument("--sums", type=int, default=1000, help="of the sums")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = load_aggretriever(args.model, device="cpu")
    queries, corpus = read_queries(args.data), dict(read_corpus(args.data))
    qrels = read_qrels(args.data, args.split, queries)
    rng = random.Random(args.seed)
    sums = measure_sums(model, queries, corpus, args.sums, rng)
    relevant = [(query, key) for query in qrels for key, grade in qrels[query].items() if grade > 0 and key in corpus]
    rng.shuffle(relevant)
    rows = measure_deletions(model, queries, corpus, relevant[: args.pairs], rng)
    print(f"{'':30}{'pairs':>7}{'share':>8}{'fall first':>12}{'fall other':>12}")
    for name, row in rows.items():
        print(f"{name:30}{row['pairs']:7}{row['share']:8.3f}{row['fall_first']:12.3f}{row['fall_other']:12.3f}")
    print(
        f"{sums['pairs']} random pairs: sum and dot product differ by {sums['worst']:.1e} at most, by "
        f"{sums['worst_beside_encode']:.1e} from that of encode"
    )
    print(json.dumps({"data": args.data, "sums": sums, "deletions": rows, "versions": versions()}))


def measure_sums(
    model: Any, queries: dict[str, str], corpus: dict[str, str], count: int, rng: random.Random
) -> dict[str, float]:
    """The largest difference between a score's parts and the dot product of the vectors from ``encode``."""
    pairs = [(rng.choice(list(queries.values())), rng.choice(list(corpus.values()))) for _ in range(count)]
    sides = [list(texts) for texts in zip(*pairs, strict=True)]
    explained = [
        explain_texts(model, texts, side=side) for texts, side in zip(sides, ("query", "document"), strict=True)
    ]
    vectors = [model.encode_query(sides[0]), model.encode_document(sides[1])]
    worst = encoded = 0.0
    for row, (query, document) in enumerate(zip(*explained, strict=True)):
        found = match(query, document)
        # From the terms' own weights and signs, not from the vectors: what a reader would add up.
        named = query.signs * query.weights.astype(np.float64) * document.signs * document.weights
        worst = max(worst, abs(found.cls + named.sum() - dot(query.vector, document.vector)))
        encoded = max(encoded, abs(found.score - dot(vectors[0][row], vectors[1][row])))
    return {"pairs": count, "worst": worst, "worst_beside_encode": encoded}


def dot(one: np.ndarray, two: np.ndarray) -> float:
    return float(one.astype(np.float64) @ two.astype(np.float64))


def measure_deletions(
    model: Any, queries: dict[str, str], corpus: dict[str, str], relevant: list[tuple[str, str]], rng: random.Random
) -> dict[str, dict[str, float]]:
    """How much further scores fall without the first word than without another, for each side and kind of other."""
    asked = explain_texts(model, [queries[query] for query, _ in relevant], side="query")
    found = explain_texts(model, [corpus[key] for _, key in relevant])
    pairs = [match(*pair) for pair in zip(asked, found, strict=True)]
    holding = Counter(word for text in corpus.values() for word in set(words_of(text)))
    others: dict[str, Callable[[list[str]], str]] = {
        "random": rng.choice,
        "longest": lambda words: max(words, key=len),
        "rarest": lambda words: min(words, key=lambda word: holding[word]),
    }
    rows = {}
    for side, kinds in (("document", others), ("query", {"random": rng.choice})):
        for name, choose in kinds.items():
            rows[f"{side}, beside the {name}"] = _deleted(model, pairs, side, choose)
    return rows


def _deleted(
    model: Any, pairs: list[ScoreExplanation], side: str, choose: Callable[[list[str]], str]
) -> dict[str, float]:
    without_first, without_other, kept = [], [], []
    for pair in pairs:
        text = pair.query if side == "query" else pair.document
        # What the model read, and of it the words without signs alone.
        added = Counter[str]()
        for word, value in zip(text.words, pair.words(side), strict=True):
            if word.start is not None and words_of(word.text):
                added[word.text.lower()] += float(value)
        if len(added) < 2:
            continue
        first = max(added, key=lambda word: added[word])
        other = choose(sorted(word for word in added if word != first))
        read = text.text[: text.read]
        without_first.append(delete(read, first))
        without_other.append(delete(read, other))
        kept.append(pair)
    falls = []
    for texts in (without_first, without_other):
        changed = explain_texts(model, texts, side=side)
        scores = [
            (match(text, pair.document) if side == "query" else match(pair.query, text)).score
            for text, pair in zip(changed, kept, strict=True)
        ]
        falls.append(np.array([pair.score for pair in kept]) - np.array(scores))
    return {
        "pairs": len(kept),
        "share": float((falls[0] > falls[1]).mean()),
        "fall_first": float(falls[0].mean()),
        "fall_other": float(falls[1].mean()),
    }


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def delete(text: str, word: str) -> str:
    """The text without any occurrence of the word.

    >>> delete("A ship, the Ship.", "ship")
    'A , the .'
    """
    return " ".join(re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", " ", text, flags=re.IGNORECASE).split()).strip()


if __name__ == "__main__":
    main()
