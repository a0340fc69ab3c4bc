"""Files of relevance judgements: BEIR's three tab-separated columns under a header, or TREC's four without one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from st_aggretriever.readers.text import read_lines

HEADER = ["query-id", "corpus-id", "score"]
_INTEGER = re.compile(r"[+-]?[0-9]+")
_GRADES = 10_000  # trec_eval takes memory for every grade up to the highest


def read_qrels_file(path: str | Path, query_ids: Collection[str]) -> dict[str, dict[str, int]]:
    """Relevance grades, query id -> document id -> grade, in the file's order.

    Args:
        query_ids: the ids that exist; a judgement of another query is an error.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no header, wrong columns, a grade that is no integer or beyond 10,000, an unknown query, two
            grades for one pair.
    """
    qrels: dict[str, dict[str, int]] = {}
    for number, query, document, grade in _judgements(path):
        where = f"{path} line {number}"
        if _INTEGER.fullmatch(grade) is None:
            raise ValueError(f"{where}: expected an integer as the grade, got {grade!r}.")
        if len(grade) > 20 or abs(int(grade)) > _GRADES:
            raise ValueError(f"{where}: expected a grade from -{_GRADES:,} to {_GRADES:,}, got {grade[:40]}.")
        if query not in query_ids:
            raise ValueError(f"{where}: query {query!r} is not in the queries file. Add it there or remove the line.")
        if qrels.setdefault(query, {}).setdefault(document, int(grade)) != int(grade):
            raise ValueError(f"{where}: query {query!r}, document {document!r} has another grade further up.")
    if not qrels:
        raise ValueError(f"{path} holds no judgement.")
    return qrels


def lines_of(path: str | Path, pairs: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """File and line of some judgements, for sentences; reads the file again, as memory has no line numbers."""
    found: dict[tuple[str, str], str] = {}
    for number, query, document, _ in _judgements(path):
        if (query, document) in pairs:
            found.setdefault((query, document), f"{path} line {number}")
    return found


def _judgements(path: str | Path) -> Iterator[tuple[int, str, str, str]]:
    """Line number, query, document and grade as it stands there."""
    trec = False
    for number, line in read_lines(path):
        if number == 1:
            if line.split("\t") == HEADER:
                continue
            fields = line.split()
            trec = len(fields) == 4 and _INTEGER.fullmatch(fields[3]) is not None
            if not trec:
                raise ValueError(f"{path} line 1: expected the header {'<tab>'.join(HEADER)}, got {line!r}. Add it.")
        fields = line.split() if trec else line.split("\t")
        if len(fields) != (4 if trec else 3):
            expected = "query 0 document grade" if trec else "<tab>".join(HEADER)
            raise ValueError(f"{path} line {number}: expected the columns {expected}, got {line!r}.")
        yield number, fields[0], fields[-2], fields[-1]
