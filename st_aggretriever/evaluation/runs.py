"""Run files: what a search found, in TREC's six columns or MS MARCO's three, written and read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from st_aggretriever.readers.text import read_lines

FORMATS = ("trec", "msmarco")


def trec_lines(rankings: Mapping[str, Mapping[str, float]], tag: str = "st_aggretriever") -> Iterator[str]:
    """Lines ``query Q0 document place score tag`` of rankings whose hits stand best first."""
    for query, ranking in rankings.items():
        for place, (document, score) in enumerate(ranking.items(), start=1):
            # repr gives the float32 back, digit for digit: no tie appears or goes through rounding.
            yield f"{query} Q0 {document} {place} {score!r} {tag}\n"


def msmarco_lines(rankings: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Lines ``query<tab>document<tab>place``, which MS MARCO's own script reads."""
    for query, ranking in rankings.items():
        for place, document in enumerate(ranking, start=1):
            yield f"{query}\t{document}\t{place}\n"


def run_lines(rankings: Mapping[str, Mapping[str, float]], format: str) -> Iterator[str]:
    """Lines of a run file.

    Raises:
        ValueError: An unknown format, an id with blanks.
    """
    if format not in FORMATS:
        raise ValueError(f"run_lines: format must be one of {', '.join(FORMATS)}, got {format!r}.")
    for query, ranking in rankings.items():
        check_run_id("query", query)
        for document in ranking:
            check_run_id("document", document)
    return trec_lines(rankings) if format == "trec" else msmarco_lines(rankings)


def read_run(path: str | Path) -> dict[str, dict[str, float]]:
    """A run, query id -> document id -> score, in the file's order.

    A file in MS MARCO's format has places instead of scores; its score is minus the place, so that the order stays.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A bad line, by file and number: neither six columns nor three, a score that is no number, a
            document that the query had before.
    """
    run: dict[str, dict[str, float]] = {}
    for number, line in read_lines(path):
        fields = line.split()
        try:
            if len(fields) == 6:
                query, document, score = fields[0], fields[2], float(fields[4])
            elif len(fields) == 3:
                query, document, score = fields[0], fields[1], -float(int(fields[2]))
            else:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"{path} line {number}: expected 'query Q0 document place score tag' or"
                f" 'query<tab>document<tab>place', got {line[:200]!r}."
            ) from None
        if math.isnan(score):
            raise ValueError(f"{path} line {number}: the score is NaN.")
        if document in run.setdefault(query, {}):
            raise ValueError(f"{path} line {number}: query {query!r} had document {document!r} before.")
        run[query][document] = score
    return run


def known_queries(run: Mapping[str, object], qrels: Mapping[str, object]) -> dict[str, int]:
    """How many queries a run has, and how many of them are judged: few where it is a run over other data.

    >>> known_queries({"a": {}, "b": {}}, {"b": {}, "c": {}})
    {'queries': 2, 'judged': 1}
    """
    return {"queries": len(run), "judged": sum(query in qrels for query in run)}


def check_run_id(what: str, key: str, advice: str = "Leave the run out.") -> None:
    """Refuse an id that a run file can't hold, with an advice what to do.

    Raises:
        ValueError: It holds blanks.
    """
    if len(key.split()) != 1 or key != key.strip():
        raise ValueError(f"{what} id {key!r} holds blanks, which a TREC run can't. {advice}")
