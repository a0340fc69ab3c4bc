"""Training pairs: a query, a passage that answers it and, where the source has them, passages that don't."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries
from st_aggretriever.readers.text import join_title, read_jsonl, text_of

logger = logging.getLogger(__name__)


class Pair(TypedDict):
    """One training example."""

    query: str
    passage: str
    negatives: list[str]  # empty where the source has none


def read_pairs(path: str | Path, *, split: str = "train") -> Iterator[Pair]:
    """Stream the training pairs of a jsonl(.gz) file or of one split of a BEIR folder.

    A line holds ``query``, ``passage`` (or ``positive``), optional ``title`` (put before the passage with one blank
    unless empty) and optional ``negatives``: strings, or objects with ``text`` and optional ``title``. A BEIR folder
    gives one pair for each judgement with a grade of 1 or more, without negatives.

    Args:
        path: the file or folder.
        split: which qrels of a BEIR folder; ignored for a file.

    Raises:
        FileNotFoundError: no such file, folder or split.
        ValueError: a bad line, with the file and the line number.
    """
    if Path(path).is_dir():
        return _read_folder(path, split)
    return read_jsonl(path, _parse)


def _parse(record: dict[str, Any]) -> Pair:
    named = [key for key in ("passage", "positive") if key in record]
    if "query" not in record or len(named) != 1:
        raise ValueError(
            f"expected the fields 'query' and 'passage' (or 'positive'), got {', '.join(map(repr, record)) or 'none'}."
        )
    negatives = record.get("negatives")
    if negatives is None:
        negatives = []
    if not isinstance(negatives, list):
        raise ValueError(f"expected a list in 'negatives', got {type(negatives).__name__}.")
    return Pair(
        query=text_of(record, "query").strip(),
        passage=join_title(text_of(record, "title"), text_of(record, named[0])),
        negatives=[_negative(negative) for negative in negatives],
    )


def _negative(negative: Any) -> str:
    if isinstance(negative, dict) and "text" in negative:
        return join_title(text_of(negative, "title"), text_of(negative, "text"))
    if not isinstance(negative, str):
        raise ValueError(f"expected strings or objects with 'text' in 'negatives', got {type(negative).__name__}.")
    return text_of({"negatives": negative}, "negatives").strip()


def _read_folder(folder: str | Path, split: str) -> Iterator[Pair]:
    queries = read_queries(folder)
    qrels = read_qrels(folder, split, queries)
    positives = [
        (query, document) for query, grades in qrels.items() for document, grade in grades.items() if grade > 0
    ]
    wanted = {document for _, document in positives}
    # Only the judged documents stay in memory.
    texts = {document: text for document, text in read_corpus(folder) if document in wanted}
    unknown = sum(document not in texts for _, document in positives)
    if unknown:
        logger.warning("%s: %d of %d %s pairs left out, their documents are not in the corpus.",
                       folder, unknown, len(positives), split)  # fmt: skip
    for query, document in positives:
        if document in texts:
            yield Pair(query=queries[query], passage=texts[document], negatives=[])
