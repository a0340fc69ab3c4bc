"""The queries that a model loses against another run, and the terms that lost them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from st_aggretriever.explain.scores import PARTS, Match, ScoreExplanation, Shared, match
from st_aggretriever.explain.table import excerpt, pad, parts_text, printable, term_text
from st_aggretriever.explain.texts import TextExplanation, explain_texts

# What the part that makes most of the gap says about a lost query.
REASONS = {
    "cls": "the [CLS] part prefers the wrong passage, which no term explains",
    "exact": "more of the query's terms stand in the wrong passage, or weigh more there",
    "fuzzy": "other terms of the same half slices met the query's in the wrong passage",
    "opposed": "terms of the other half slices took the query's dimensions in the right passage",
}


@dataclass(frozen=True, eq=False)
class LostQuery:
    """A query whose figure is lower than the other run's.

    Attributes:
        id: Of the query.
        ours, other: Its figures.
        right_id: The relevant document that the other run ranks best, of those that ours ranks behind a worse one.
        right_rank, other_rank: Its places in our run (None where it isn't in it) and the other.
        wrong_id: The first document of our run with a lower grade; ``wrong_rank`` is its place.
        right, wrong: The scores of both, by the model.
        run_gap: The wrong one's score less the right one's in our run, None where that lacks the right one.
    """

    id: str
    ours: float
    other: float
    right_id: str
    right_rank: int | None
    other_rank: int
    wrong_id: str
    wrong_rank: int
    right: ScoreExplanation
    wrong: ScoreExplanation
    run_gap: float | None

    @property
    def gap(self) -> dict[str, float]:
        """By how much the wrong document's score is above the right one's, part by part."""
        right, wrong = self.right.parts, self.wrong.parts
        return {part: wrong[part] - right[part] for part in PARTS}

    @property
    def reason(self) -> str:
        """The part that makes most of the gap."""
        gap = self.gap
        return max(REASONS, key=lambda part: gap[part])

    def dimensions(self, count: int = 5) -> list[tuple[Match, Match]]:
        """The lexical dimensions that make most of the gap, as they stand in the right and in the wrong document."""
        difference = self.wrong.contributions - self.right.contributions
        order = np.argsort(-difference, kind="stable")[:count]
        return [(self.right.match(int(n)), self.wrong.match(int(n))) for n in order if difference[n] > 0]

    @property
    def not_kept(self) -> list[Shared]:
        """Terms that the query shares with the right document, but not in the vectors."""
        return [shared for shared in self.right.shared() if not shared.kept]


@dataclass(frozen=True, eq=False)
class LostQueries:
    """All of them, those first that lost most."""

    metric: str
    against: str
    ours: float  # mean figures
    other: float
    judged: int
    queries: list[LostQuery]
    unexplained: int  # lost, but no document of a lower grade stands before a relevant one in our run
    run_queries: dict[str, int]  # of our run: queries, and those of them that are judged

    @property
    def reasons(self) -> dict[str, int]:
        """How many queries each part lost, most first."""
        return dict(Counter(query.reason for query in self.queries).most_common())

    @property
    def other_model(self) -> int:
        """Queries whose gap in the run isn't what the model gives: the run was made by another one or other lengths."""
        return sum(
            query.run_gap is not None
            and abs(query.run_gap - sum(query.gap.values())) > 1e-2 * max(1.0, abs(query.right.score))
            for query in self.queries
        )


def explain_lost(
    model: Any,
    run: str | Path,
    data: str | Path,
    *,
    against: str | Path = "bm25",
    split: str = "test",
    metric: str = "nDCG@10",
    drop_identical_ids: bool = True,
    batch_size: int = 32,
) -> LostQueries:
    """Explain the queries of an evaluation that the model lost.

    For each, the relevant document that the other run found best is set beside the document that took its place, and
    the gap between their scores is split: ``gap = [CLS] + exact + fuzzy + opposed``.

    Args:
        model: That made ``run``.
        run: File in TREC's format.
        data: BEIR folder with queries, documents and judgements.
        against: Another run, or ``"bm25"``, which is computed here.
        split: Which qrels.
        metric: What is compared, for instance ``nDCG@10``.
        drop_identical_ids: Drop a document whose id is the query's, as the evaluation did.
        batch_size: Texts a batch.

    Raises:
        ValueError: An unknown metric or a bad line; documents of the run that the corpus lacks.
        OSError: A file is missing.
        ImportError: pytrec_eval or, for BM25, bm25s is missing.
    """
    from st_aggretriever.evaluation.beir import read_collection
    from st_aggretriever.evaluation.metrics import check_metric, evaluate_run, rank
    from st_aggretriever.evaluation.runs import known_queries, read_run

    check_metric(metric, "explain")
    collection = read_collection(data, split, ids_in_run=False)
    ours = read_run(run)
    if str(against) == "bm25":
        from st_aggretriever.search.bm25 import search_bm25
        from st_aggretriever.search.retrieve import rankings_of

        hits = search_bm25(collection.queries, collection.corpus(), 1000)
        other = rankings_of(list(collection.queries), hits)
    else:
        other = read_run(against)
    options: dict[str, Any] = {"drop_identical_ids": drop_identical_ids}
    figures = [evaluate_run(collection.qrels, found, **options) for found in (ours, other)]
    change = {query: figures[1][query][metric] - figures[0][query][metric] for query in collection.qrels}
    lost = sorted((query for query in change if change[query] > 0), key=lambda query: -change[query])
    chosen = {}
    for query in lost:
        without = query if drop_identical_ids else None
        places = (list(rank(found.get(query, {}), 1000, without=without)) for found in (ours, other))
        chosen[query] = _right_and_wrong(collection.qrels[query], *places)
    pairs = {query: pair for query, pair in chosen.items() if pair is not None}
    texts = _texts(collection.corpus(), {key for pair in pairs.values() for key in pair[:2]}, run)
    explained = {
        side: dict(zip(keys, explain_texts(model, values, side=side, batch_size=batch_size), strict=True))
        for side, keys, values in (
            ("query", list(pairs), [collection.queries[query] for query in pairs]),
            ("document", list(texts), list(texts.values())),
        )
    }
    return LostQueries(
        metric=metric,
        against=str(against),
        ours=float(np.mean([row[metric] for row in figures[0].values()])),
        other=float(np.mean([row[metric] for row in figures[1].values()])),
        judged=len(collection.qrels),
        queries=[
            _lost(query, pair, (figures[0][query][metric], figures[1][query][metric]), ours[query], explained)
            for query, pair in pairs.items()
        ],
        unexplained=len(chosen) - len(pairs),
        run_queries=known_queries(ours, collection.qrels),
    )


_Pair = tuple[str, str, "int | None", int, int]  # right, wrong, right's place in ours and the other, wrong's in ours


def _right_and_wrong(grades: Mapping[str, int], ours: list[str], other: list[str]) -> _Pair | None:
    """The best found relevant document that a document of a lower grade precedes in our run, and the first of these."""
    for place, right in enumerate(other, start=1):
        if grades.get(right, 0) <= 0:
            continue
        own = ours.index(right) + 1 if right in ours else None
        for before, wrong in enumerate(ours[: None if own is None else own - 1], start=1):
            if max(grades.get(wrong, 0), 0) < grades[right]:
                return right, wrong, own, place, before
    return None


def _texts(corpus: Any, wanted: set[str], run: str | Path) -> dict[str, str]:
    texts = {key: text for key, text in corpus if key in wanted}
    missing = sorted(wanted - set(texts))
    if missing:
        raise ValueError(f"explain: {run} ranks documents that the corpus lacks, {missing[0]!r} for one.")
    return texts


def _lost(
    query: str,
    pair: _Pair,
    figures: tuple[float, float],
    scores: Mapping[str, float],
    explained: Mapping[str, Mapping[str, TextExplanation]],
) -> LostQuery:
    right, wrong, right_rank, other_rank, wrong_rank = pair
    asked, documents = explained["query"][query], explained["document"]
    return LostQuery(
        id=query,
        ours=figures[0],
        other=figures[1],
        right_id=right,
        right_rank=right_rank,
        other_rank=other_rank,
        wrong_id=wrong,
        wrong_rank=wrong_rank,
        right=match(asked, documents[right]),
        wrong=match(asked, documents[wrong]),
        run_gap=scores[wrong] - scores[right] if right in scores else None,
    )


def summary_lines(found: LostQueries) -> Iterator[str]:
    """How many queries were lost, and by which part."""
    yield (
        f"the run has {found.run_queries['queries']:,} queries, {found.run_queries['judged']:,} of the "
        f"{found.judged:,} judged here"
    )
    yield (
        f"{found.metric} {found.ours:.4f}, {found.against} {found.other:.4f}; "
        f"{len(found.queries) + found.unexplained} of {found.judged} queries lost against {found.against}"
    )
    for reason, count in found.reasons.items():
        yield f"  {count:4} by {'[CLS]' if reason == 'cls' else reason}: {REASONS[reason]}"
    if found.unexplained:
        yield f"  {found.unexplained:4} where no document of a lower grade precedes a relevant one in the run"
    if found.other_model:
        yield f"  {found.other_model:4} with scores that this model doesn't give: another model or length made the run"


def format_lost(found: LostQueries, *, shown: int = 10, terms: int = 5) -> Iterator[str]:
    """The summary, and for the ``shown`` worst queries the two documents and the terms that made the gap."""
    yield from summary_lines(found)
    for query in found.queries[:shown]:
        yield ""
        yield f"? {printable(query.id)}: {printable(query.right.query.text)}"
        yield f"  {found.metric} {query.ours:.4f}, {found.against} {query.other:.4f}"
        place = "not in the run" if query.right_rank is None else f"place {query.right_rank}"
        yield f"  right {printable(query.right_id)} ({place}; {found.against} {query.other_rank}): " + excerpt(
            query.right.document.text
        )
        yield f"        {parts_text(query.right)}"
        yield f"  wrong {printable(query.wrong_id)} (place {query.wrong_rank}): {excerpt(query.wrong.document.text)}"
        yield f"        {parts_text(query.wrong)}"
        yield f"  {gap_text(query)}: {REASONS[query.reason]}"
        yield from dimension_lines(query.dimensions(terms))
        if query.not_kept:
            yield f"  shared words that the vectors lost: {'; '.join(map(shared_text, query.not_kept))}"


def gap_text(query: LostQuery) -> str:
    """``gap 1.2 = [CLS] +0.4, fuzzy +0.8``."""
    gap = query.gap
    parts = ", ".join(f"{'[CLS]' if part == 'cls' else part} {gap[part]:+.4f}" for part in REASONS)
    return f"gap {sum(gap.values()):.4f} = {parts}"


def shared_text(shared: Shared) -> str:
    """What took a shared term's dimension, and where."""
    owners = [
        f'"{printable(owner)}" holds it in the {side}'
        for side, owner in (("query", shared.query), ("passage", shared.document))
        if owner is not None
    ]
    return f"{printable(shared.name)} (slice {shared.slice}: {', '.join(owners)})"


def dimension_lines(dimensions: Sequence[tuple[Match, Match]]) -> Iterator[str]:
    """A table of dimensions in the right and the wrong document."""
    if dimensions:
        yield f"  {'gap':>9}  {pad('query term < word', 30)}{pad('right', 38)}{pad('wrong', 38)}slice"
    for right, wrong in dimensions:
        cells = [f"{one.contribution:+.4f} {one.kind} {term_text(one.document)}" for one in (right, wrong)]
        yield (
            f"  {wrong.contribution - right.contribution:+9.4f}  {pad(term_text(right.query), 30)}"
            f"{pad(cells[0], 38)}{pad(cells[1], 38)}{right.slice}"
        )
