"""Tevatron's training rows: ``query``, ``positive_passages`` and ``negative_passages`` with docid, title and text."""

from __future__ import annotations

from typing import Any

from st_aggretriever.readers.rows import Example, Passage
from st_aggretriever.readers.text import id_of, join_title, score_of, text_of


def parse(record: dict[str, Any]) -> Example:
    """The row of a record; ``negative_passages`` may be missing.

    Raises:
        ValueError: No query, or passages of another form.
    """
    if "query" not in record:
        raise ValueError(f"expected a field 'query', got {', '.join(map(repr, record))}.")
    return Example(
        text_of(record, "query").strip(),
        _passages(record, "positive_passages"),
        _passages(record, "negative_passages"),
    )


def _passages(record: dict[str, Any], field: str) -> list[Passage]:
    found = record.get(field)
    if found is None:
        found = []
    if not isinstance(found, list):
        raise ValueError(f"expected a list in {field!r}, got {type(found).__name__}.")
    return [_passage(passage, field) for passage in found]


def _passage(passage: Any, field: str) -> Passage:
    if not isinstance(passage, dict) or "text" not in passage:
        got = ", ".join(map(repr, passage)) if isinstance(passage, dict) else type(passage).__name__
        raise ValueError(f"expected objects with 'docid', 'title' and 'text' in {field!r}, got {got}.")
    key = id_of(passage, "docid") if passage.get("docid") is not None else ""
    text = join_title(text_of(passage, "title"), text_of(passage, "text"))
    return Passage(text, id=key, score=score_of(passage, "score"))
