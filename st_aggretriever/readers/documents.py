"""One document as files of any collection write it: a JSON record, or tab-separated columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from st_aggretriever.readers.text import id_of, join_title, split_columns, text_of

# The first one that a record has counts.
ID_FIELDS = ("_id", "id", "docid", "pid")
TEXT_FIELDS = ("text", "contents", "passage")
HEADERS = {b"id\ttext": "tsv", b"id\ttext\ttitle": "dpr"}  # the latter of DPR's passages


def document_of(record: Mapping[str, Any], *, titles: bool = True) -> tuple[str, str]:
    """``(id, text)`` of a JSON record, see :func:`text_in`.

    Raises:
        ValueError: No id, neither text nor title, or one of another type.
    """
    key = id_of(record, next((field for field in ID_FIELDS if field in record), ID_FIELDS[0]))
    return key, text_in(record, titles=titles)


def text_in(record: Mapping[str, Any], *, titles: bool = True) -> str:
    """The text of a JSON record, the title before it unless ``titles`` is False.

    Raises:
        ValueError: Neither text nor title, or one of another type.
    """
    field = next((field for field in TEXT_FIELDS if field in record), None)
    title = text_of(record, "title") if titles else ""
    if field is None and not (titles and "title" in record):
        raise ValueError(
            f"expected a field 'text', 'contents', 'passage' or 'title', got {', '.join(map(repr, record))}."
        )
    return join_title(title, text_of(record, field) if field else "")


def document_in_columns(line: str, *, form: str = "tsv") -> tuple[str, str]:
    """``(id, text)`` of a line ``id<tab>text``, or with ``form="dpr"`` of ``id<tab>text<tab>title``, quoted as in csv.

    Raises:
        ValueError: Another line.
    """
    key, tab, text = line.partition("\t")
    fields = {"id": key, "text": text}
    if form == "dpr":
        columns = split_columns(line)
        tab = tab if len(columns) == 3 else ""
        fields = dict(zip(("id", "text", "title"), columns, strict=False))
    if not tab or len(fields["id"].split()) != 1 or fields["id"] != fields["id"].strip():
        expected = "id<tab>text<tab>title" if form == "dpr" else "id<tab>text"
        raise ValueError(f"expected {expected}, got {line[:200]!r}.")
    return id_of(fields, "id"), join_title(text_of(fields, "title"), text_of(fields, "text"))
