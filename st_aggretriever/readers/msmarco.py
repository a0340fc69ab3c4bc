"""MS MARCO's files: ``id<tab>text`` collections and queries, plain or compressed; and a folder of them to train on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from st_aggretriever.readers.documents import HEADERS, document_in_columns
from st_aggretriever.readers.judged import JudgedSource
from st_aggretriever.readers.qrels import read_qrels_file
from st_aggretriever.readers.store import BadRows, Passages, find_first
from st_aggretriever.readers.text import find_text, read_lines


def read_tsv(path: str | Path) -> Iterator[tuple[str, str]]:
    """Stream ``(id, text)`` in the file's order, without or below the header ``id text`` (or ``id text title``).

    Memory grows with the ids only.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A line without tab, without id or with blanks in it, or an id that came before; the sentence names
            file and line.
    """
    seen: set[str] = set()
    form = "tsv"
    for number, line in read_lines(path):
        if number == 1 and (header := line.encode()) in HEADERS:
            form = HEADERS[header]
            continue
        try:
            key, text = document_in_columns(line, form=form)
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
        if key in seen:
            raise ValueError(f"{path} line {number}: id {key!r} occurs a second time.")
        seen.add(key)
        yield key, text
    if not seen:
        raise ValueError(f"{path} holds no text.")


def open_training(folder: str | Path, split: str, bad: BadRows) -> JudgedSource:
    """The rows of a folder with MS MARCO's passage files: ``collection.tsv``, queries, and triples of ids or qrels.

    ``queries.SPLIT.tsv`` (or ``queries.tsv``); ``qidpidtriples.SPLIT.full.2.tsv``, ``qidpidtriples.SPLIT.full.tsv``,
    ``qidpidtriples.SPLIT.small.tsv`` or ``qidpidtriples.tsv``, else ``qrels.SPLIT.tsv`` (or ``qrels.tsv``), without
    negatives. Each may be compressed.

    Raises:
        FileNotFoundError: A part of the folder is missing.
        ValueError: A bad line; in the collection and the triples, one more than ``bad`` allows.
    """
    where = find_first(folder, f"queries.{split}.tsv", "queries.tsv")
    queries = (where, dict(read_tsv(where)))
    names = (*(f"qidpidtriples.{split}.{kind}.tsv" for kind in ("full.2", "full", "small")), "qidpidtriples.tsv")
    given = (f"qrels.{split}.tsv", "qrels.tsv")
    pairs = find_first(folder, *names, *given)
    passages = Passages(find_text(folder, "collection.tsv"), bad)
    options: dict[str, Any] = {"form": "MS MARCO"}
    if pairs.name.startswith("qidpidtriples"):
        options["triples"] = pairs
    else:
        options["qrels"] = (pairs, read_qrels_file(pairs, queries[1]))
    return JudgedSource(str(folder), queries, passages, bad, **options)
