"""BM25 by bm25s: Lucene's variant, English stop words and stemming."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from st_aggretriever.search.exact import Hits, order_ties

K1, B = 0.9, 0.4  # Pyserini's defaults for passages, which the published BM25 figures use
RULE = f"BM25 by bm25s: method lucene, k1 {K1}, b {B}, English stop words, Snowball English stemmer"


class BM25:
    """An inverted index in memory.

    Args:
        corpus: ``(id, text)`` of each document.

    Attributes:
        ids: (N,) object: str, in the corpus's order.

    Raises:
        ImportError: bm25s or PyStemmer is missing.
        ValueError: The corpus holds no word at all.
    """

    def __init__(self, corpus: Iterable[tuple[str, str]]) -> None:
        try:
            import bm25s
            import Stemmer
        except ImportError as error:
            raise ImportError(f"BM25 needs bm25s and PyStemmer ({error}). pip install st-aggretriever[eval]") from error

        ids, texts = [], []
        for key, text in corpus:
            ids.append(key)
            texts.append(text)
        self.ids = np.array(ids, dtype=object)
        self._tokenize, self._stemmer = bm25s.tokenize, Stemmer.Stemmer("english")
        documents = self._words(texts)
        if not any(documents):
            raise ValueError(f"search_bm25: the {len(ids)} documents hold no word to index.")
        self._index = bm25s.BM25(method="lucene", k1=K1, b=B)
        self._index.index(documents, show_progress=False)

    def scores(self, queries: Sequence[str]) -> Iterator[np.ndarray]:
        """Stream the (N,) float32 scores of each query; documents that share no word with it score 0."""
        for words in self._words(list(queries)):
            yield self._index.get_scores(words) if words else np.zeros(len(self.ids), np.float32)

    def _words(self, texts: list[str]) -> Any:
        return self._tokenize(texts, stopwords="en", stemmer=self._stemmer, show_progress=False, return_ids=False)


def search_bm25(queries: Mapping[str, str], corpus: Iterable[tuple[str, str]], top_k: int) -> Hits:
    """The ``top_k`` documents of each query by BM25.

    Args:
        queries: Q texts by id.
        corpus: (id, text) of each document; kept in memory as an inverted index.
        top_k: How many to return; fewer where the corpus has fewer.

    Returns:
        Scores and ids, (Q, min(top_k, N)), best first, equal scores by id, descending. As in Lucene a document that
        shares no word with the query is no hit: id None and score -inf fill up.

    Raises:
        ImportError: bm25s or PyStemmer is missing.
        ValueError: The corpus holds no word at all.
    """
    index = BM25(corpus)
    k = min(top_k, len(index.ids))
    scores, found = np.full((len(queries), k), -np.inf, np.float32), np.empty((len(queries), k), object)
    for row, every in enumerate(index.scores(list(queries.values()))):
        one = best_of(every, index.ids, k)
        scores[row, : one.ids.size], found[row, : one.ids.size] = one.scores[0], one.ids[0]
    return Hits(scores, found)


def best_of(every: np.ndarray, ids: np.ndarray, k: int) -> Hits:
    """The up to ``k`` best of one query's (N,) scores, (1, w) each, equal scores by id, descending."""
    # Every document that shares a word and that the cut at k could keep: all that score at least as much as the k-th.
    kept = np.flatnonzero((every > 0) & (every >= np.partition(every, -k)[-k]))
    kept = kept[np.argsort(-every[kept], kind="stable")]
    one = Hits(every[kept][None].astype(np.float32), ids[kept][None])
    order_ties(one, k)
    return Hits(one.scores[:, :k], one.ids[:, :k])
