"""BM25 as a run to compare with, by bm25s: Lucene's variant, English stop words and stemming."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from st_aggretriever.evaluation.beir import Collection, check_outputs, read_collection, score_hits
from st_aggretriever.evaluation.metrics import import_pytrec_eval
from st_aggretriever.search import Hits, order_ties

K1, B = 0.9, 0.4  # Pyserini's defaults for passages, which the published BM25 figures use
RULE = f"BM25 by bm25s: method lucene, k1 {K1}, b {B}, English stop words, Snowball English stemmer"


def evaluate_bm25(
    data: str | Path,
    *,
    split: str = "test",
    top_k: int = 1000,
    run: str | Path | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    drop_identical_ids: bool = True,
    exclude_overlap: str | Path | None = None,
) -> dict[str, Any]:
    """Evaluate BM25 on one split of a BEIR folder, by the rules of :func:`evaluate_beir`, whose arguments these are.

    Returns:
        A result as :func:`evaluate_beir` gives; the setting of BM25 is its first rule.

    Raises:
        As :func:`evaluate_beir` and :func:`search_bm25`.
    """
    if top_k < 1:
        raise ValueError(f"evaluate_bm25: top_k must be at least 1, got {top_k}.")
    check_outputs(run, output, overwrite)
    import_pytrec_eval()
    collection = read_collection(data, split, ids_in_run=run is not None, exclude_overlap=exclude_overlap)
    options: dict[str, Any] = {"top_k": top_k, "drop_identical_ids": drop_identical_ids}
    options |= {"run": run, "output": output}
    return evaluate_collection_bm25(collection, **options)


def evaluate_collection_bm25(
    collection: Collection,
    *,
    top_k: int,
    drop_identical_ids: bool,
    run: str | Path | None,
    output: str | Path | None,
    run_format: str = "trec",
) -> dict[str, Any]:
    """Search and score a collection that was read and checked."""
    hits, how = find_hits_bm25(collection.queries, collection.corpus(), top_k + drop_identical_ids)
    options: dict[str, Any] = {"top_k": top_k, "drop_identical_ids": drop_identical_ids}
    options |= {"run": run, "output": output}
    return score_hits(collection, hits, how, **options, run_format=run_format)


def find_hits_bm25(
    queries: Mapping[str, str], corpus: Iterable[tuple[str, str]], depth: int
) -> tuple[Hits, dict[str, Any]]:
    """Hits by BM25, and how they came about; see :func:`search_bm25`."""
    started = time.perf_counter()
    hits = search_bm25(queries, corpus, depth)
    return hits, {
        "model": "bm25",
        "rules": [RULE],
        "encoding": {},
        "search": {"backend": "bm25s", "device": "cpu"},
        "seconds": {"search": round(time.perf_counter() - started, 3)},
    }


def search_bm25(queries: Mapping[str, str], corpus: Iterable[tuple[str, str]], top_k: int) -> Hits:
    """The ``top_k`` documents of each query by BM25.

    Args:
        queries: Q texts by id.
        corpus: (id, text) of each document; kept in memory as an inverted index.
        top_k: How many to return; fewer where the corpus has fewer. Documents that share no word score 0.

    Returns:
        Scores and ids, (Q, min(top_k, N)), best first, equal scores by id, descending.

    Raises:
        ImportError: bm25s or PyStemmer is missing.
        ValueError: The corpus holds no word at all.
    """
    try:
        import bm25s
        import Stemmer
    except ImportError as error:
        raise ImportError(f"BM25 needs bm25s and PyStemmer ({error}). pip install st-aggretriever[eval]") from error

    ids, texts = [], []
    for key, text in corpus:
        ids.append(key)
        texts.append(text)
    stemmer = Stemmer.Stemmer("english")

    def words(batch: list[str]) -> Any:
        return bm25s.tokenize(batch, stopwords="en", stemmer=stemmer, show_progress=False, return_ids=False)

    documents = words(texts)
    if not any(documents):
        raise ValueError(f"search_bm25: the {len(ids)} documents hold no word to index.")
    index = bm25s.BM25(method="lucene", k1=K1, b=B)
    index.index(documents, show_progress=False)
    k = min(top_k, len(ids))
    names = np.array(ids, dtype=object)
    scores, found = np.zeros((len(queries), k), np.float32), np.empty((len(queries), k), object)
    for row, query in enumerate(words(list(queries.values()))):
        every = index.get_scores(query) if query else np.zeros(len(ids), np.float32)
        # Every document that the cut at k could keep: all that score at least as much as the k-th.
        kept = np.flatnonzero(every >= np.partition(every, -k)[-k])
        kept = kept[np.argsort(-every[kept], kind="stable")]
        one = Hits(every[kept][None].astype(np.float32), names[kept][None])
        order_ties(one, k)
        scores[row], found[row] = one.scores[0, :k], one.ids[0, :k]
    return Hits(scores, found)
