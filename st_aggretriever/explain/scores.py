"""A score taken apart: the [CLS] part, and for each lexical dimension the two terms that met there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from st_aggretriever.explain.texts import Term, TextExplanation, explain_texts

# How the two terms of a dimension met. "changed": a stored number there isn't what the text gives, so no term is named.
KINDS = ("exact", "fuzzy", "opposed", "changed", "empty")
PARTS = ("cls", *KINDS[:4])


class Match(NamedTuple):
    """One lexical dimension of a score."""

    slice: int
    contribution: float  # what it adds to the score
    kind: str  # "exact": same term; "fuzzy": two terms in one half slice; "opposed": in the two halves; "changed"
    query: Term | None
    document: Term | None


class Shared(NamedTuple):
    """A term that both texts have among their own tokens, and what became of it in the vectors."""

    name: str
    slice: int
    query: str | None  # None where the term holds the dimension of the query's vector, else the term that does
    document: str | None

    @property
    def kept(self) -> bool:
        return self.query is None and self.document is None


@dataclass(frozen=True, eq=False)
class ScoreExplanation:
    """The dot product of a query's and a document's vector as a sum.

    Attributes:
        query, document: The two texts.
        contributions: (D,) float64, what each lexical dimension adds.
        kinds: (D,) how its two terms met, see :class:`Match`; "empty" where one text has no term there.
        cls: What the rest of the vector adds, the [CLS] part. It isn't explained.
    """

    query: TextExplanation
    document: TextExplanation
    contributions: np.ndarray
    kinds: np.ndarray
    cls: float

    @property
    def score(self) -> float:
        """``cls`` and all contributions: the dot product."""
        return self.cls + float(self.contributions.sum())

    @property
    def cls_share(self) -> float:
        """Share of the [CLS] part in the score; below 0 or above 1 where the parts have different signs."""
        return self.cls / self.score if self.score else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The score as a sum of five: ``cls`` and the lexical contributions by kind."""
        kinds = {kind: float(self.contributions[self.kinds == kind].sum()) for kind in KINDS[:4]}
        return {"cls": self.cls, **kinds}

    def top(self, count: int = 10, kind: str | None = None) -> list[Match]:
        """The dimensions that contribute most by magnitude, of one kind or of all.

        Raises:
            ValueError: An unknown kind, a count below 0.
        """
        if count < 0:
            raise ValueError(f"ScoreExplanation: count must be at least 0, got {count}.")
        if kind is not None and kind not in KINDS:
            raise ValueError(f"ScoreExplanation: kind must be one of {', '.join(KINDS)}, got {kind!r}.")
        order = np.argsort(-np.abs(self.contributions), kind="stable")
        wanted = (self.contributions[order] != 0) & ((self.kinds[order] == kind) | (kind is None))
        return [self.match(int(dimension)) for dimension in order[wanted][:count]]

    def match(self, dimension: int) -> Match:
        """What met in a lexical dimension; no term is named where a stored number isn't what its text gives."""
        named = self.kinds[dimension] != "changed"
        return Match(
            slice=dimension,
            contribution=float(self.contributions[dimension]),
            kind=str(self.kinds[dimension]),
            query=self.query.term(dimension) if named else None,
            document=self.document.term(dimension) if named else None,
        )

    def words(self, side: str) -> np.ndarray:
        """What each word of the query or the document adds: the sum over the dimensions that it fired, changed ones
        left out.

        Args:
            side: ``"query"`` or ``"document"``.

        Returns:
            (len(words),) float64; with the [CLS] part, changed dimensions and those without a term they sum to the
            score.

        Raises:
            ValueError: Another side.
        """
        if side not in ("query", "document"):
            raise ValueError(f"ScoreExplanation: side must be 'query' or 'document', got {side!r}.")
        text = self.query if side == "query" else self.document
        named = (text.fired >= 0) & (self.kinds != "changed")
        return np.bincount(text.fired[named], self.contributions[named], minlength=len(text.words))

    def shared(self) -> list[Shared]:
        """Terms that both texts have among their own tokens: what exact matching would see, and what took their place
        where a dimension isn't theirs. Terms that slices leave out (``remainder="drop"``) aren't among them."""
        found = []
        for id in np.intersect1d(self.query.present, self.document.present):
            dimension = int(self.query.dimension_of[id])
            if dimension < 0 or self.query.vocabulary.is_special(int(id)):
                continue
            owners = [
                None if text.ids[dimension] == id else text.vocabulary.name(int(text.ids[dimension]))
                for text in (self.query, self.document)
            ]
            found.append(Shared(self.query.vocabulary.name(int(id)), dimension, *owners))
        return found


def match(query: TextExplanation, document: TextExplanation) -> ScoreExplanation:
    """The score of two texts by one model, taken apart."""
    if query.vector.shape != document.vector.shape or query.lexical != document.lexical:
        raise ValueError(
            f"explain: query and document must be explained by one model, got vectors of {len(query.vector)} and "
            f"{len(document.vector)} dimensions."
        )
    products = query.vector.astype(np.float64) * document.vector.astype(np.float64)
    contributions = products[query.lexical]
    kinds = np.where(query.signs != document.signs, "opposed", np.where(query.ids == document.ids, "exact", "fuzzy"))
    kinds = np.where((query.ids < 0) | (document.ids < 0), "empty", kinds)
    kinds = np.where((query.changed | document.changed)[query.lexical], "changed", kinds)
    rest = products.sum() - contributions.sum()
    return ScoreExplanation(query, document, contributions, kinds, float(rest))


def explain_scores(
    model: Any,
    query: str,
    documents: Sequence[str],
    *,
    vectors: np.ndarray | None = None,
    tolerance: float = 1e-3,
    batch_size: int = 32,
) -> list[ScoreExplanation]:
    """Take the scores of a query with N documents apart: [CLS] part, and each dimension with the terms that met.

    ``score = q . d = sum over the [CLS] dimensions + sum_n q_n d_n``.

    Args:
        model, tolerance, batch_size: See :func:`explain_texts`.
        query: Its text.
        documents: N texts.
        vectors: (N, dim), the documents' vectors as stored earlier.

    Returns:
        N explanations, in the documents' order.

    Raises:
        As :func:`explain_texts`.

    Example:
        >>> best = explain_scores(model, "who sails a ship?", ["The crew sails it."])[0]  # doctest: +SKIP
        >>> [(match.query.name, match.document.name) for match in best.top(1)]  # doctest: +SKIP
        [('ship', 'sails')]
    """
    if not isinstance(query, str):
        raise TypeError(f"explain_scores: expected one text as the query, got {type(query).__name__}.")
    asked = explain_texts(model, [query], side="query")[0]
    options: dict[str, Any] = {"vectors": vectors, "tolerance": tolerance, "batch_size": batch_size}
    return [match(asked, document) for document in explain_texts(model, documents, **options)]
