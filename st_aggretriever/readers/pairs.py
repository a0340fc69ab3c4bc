"""Training pairs: a query, a passage that answers it and, where the source has them, passages that don't."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

from st_aggretriever.readers.rows import Example, Passage
from st_aggretriever.readers.text import decode_line, join_title, score_of, text_of

QUERY = ("query", "anchor", "question")
POSITIVE = ("passage", "positive", "answer")
_NUMBERED = re.compile("negative(_[0-9]+)?")
_JSON_START = re.compile(r"(\[\s*)?\{\s*(\"|$)|\[\s*$")


class Pair(TypedDict):
    """One training example."""

    query: str
    passage: str
    negatives: list[str]  # empty where the source has none


def read_pairs(path: str | Path, *, split: str = "train") -> Iterator[Pair]:
    """Stream the training pairs of a file or folder of any format that training takes, with all their negatives.

    Args:
        path: See :func:`st_aggretriever.readers.training.open_training_data`.
        split: Which qrels of a folder; ignored for a file.

    Raises:
        FileNotFoundError: no such file, folder or split.
        ValueError: a bad line, with the file and the line number.
    """
    from st_aggretriever.readers.training import open_training_data

    data = open_training_data([str(path)], split=split, negatives=0)
    for row in range(len(data)):
        example = data.example(row)
        negatives = [data.text_in(row, passage) for passage in example.negatives]
        for positive in example.positives:
            yield Pair(query=example.query, passage=data.text_in(row, positive), negatives=negatives)


def parse(record: dict[str, Any]) -> Example:
    """The row of a record.

    ``query`` (or ``anchor``, ``question``), ``passage`` (or ``positive``, ``answer``) with optional ``title``, and
    negatives in ``negatives``, ``negative``, ``negative_1``, ``negative_2`` ... Scores of a teacher are ``score`` for
    the passage and in each negative, or ``scores``, a list of the passage's and the negatives'.

    Raises:
        ValueError: Other fields, or values of another kind.
    """
    query, passage = _one_of(record, QUERY), _one_of(record, POSITIVE)
    if query is None or passage is None:
        raise ValueError(
            f"expected the fields 'query' and 'passage' (or 'positive'), got {', '.join(map(repr, record)) or 'none'}."
        )
    negatives = record.get("negatives")
    numbered = sorted((name for name in record if _NUMBERED.fullmatch(name)), key=lambda name: (len(name), name))
    if negatives is None:
        negatives = [record[name] for name in numbered]
    elif any(record[name] is not None for name in numbered):
        raise ValueError(f"expected negatives in 'negatives' or in {', '.join(map(repr, numbered))}, got both.")
    if not isinstance(negatives, list):
        raise ValueError(f"expected a list in 'negatives', got {type(negatives).__name__}.")
    positive = Passage(join_title(text_of(record, "title"), text_of(record, passage)), score=score_of(record, "score"))
    return _scored(
        Example(text_of(record, query).strip(), [positive], [_negative(negative) for negative in negatives]), record
    )


def _one_of(record: dict[str, Any], names: tuple[str, ...]) -> str | None:
    found = [name for name in names if name in record]
    return found[0] if len(found) == 1 else None


def _scored(example: Example, record: dict[str, Any]) -> Example:
    """With the scores of a row's ``scores``, where it has them."""
    if record.get("scores") is None:
        return example
    both = (*example.positives, *example.negatives)
    values = record["scores"]
    if not isinstance(values, list) or len(values) != len(both):
        got = f"{len(values)} of them" if isinstance(values, list) else type(values).__name__
        raise ValueError(f"expected {len(both)} numbers in 'scores', the passage's and the negatives', got {got}.")
    scored = [
        passage._replace(score=score_of({"scores": value}, "scores"))
        for passage, value in zip(both, values, strict=True)
    ]
    return Example(example.query, scored[:1], scored[1:])


def _negative(negative: Any) -> Passage:
    if isinstance(negative, dict) and "text" in negative:
        text = join_title(text_of(negative, "title"), text_of(negative, "text"))
        return Passage(text, score=score_of(negative, "score"))
    if not isinstance(negative, str):
        raise ValueError(f"expected strings or objects with 'text' in 'negatives', got {type(negative).__name__}.")
    return Passage(text_of({"negatives": negative}, "negatives").strip())


def begins_json(line: bytes) -> bool:
    """Whether a file whose first line this is holds JSON: an object a line, or one list of them.

    The first query of tab-separated texts may begin with a bracket too: ``[Solved] how ...``.
    """
    text = line.decode("latin-1").strip()
    if "\t" not in text:
        return text[:1] in ("{", "[")
    try:
        return json.JSONDecoder(strict=False).raw_decode(text)[1] == len(text)
    except (ValueError, RecursionError):  # broken, or a list that goes on in the next line
        return bool(_JSON_START.match(text))


def decode_tsv(line: str) -> dict[str, Any]:
    """The record of a ``query<tab>passage`` line, with any number of further columns as negatives.

    Raises:
        ValueError: One column only.
    """
    query, *passages = line.split("\t")
    if not passages:
        raise ValueError(f"expected query<tab>passage, got {line[:200]!r}.")
    return {"query": query, "passage": passages[0], "negatives": passages[1:]}


def is_header(path: str, line: bytes) -> bool:
    """Whether the first line of tab-separated texts names its columns: ``query<tab>passage``, then negatives.

    Raises:
        ValueError: It does, and they stand in another order, or others are there.
    """
    try:
        names = [name.strip().lower() for name in decode_line(line, first=True).split("\t")]
    except ValueError:
        return False
    passage = (*POSITIVE, "document", "text")
    if len(names) < 2 or not {*names[:2]} <= {*QUERY, *passage}:
        return False
    if names[0] in QUERY and names[1] in passage and all(_NUMBERED.fullmatch(name) for name in names[2:]):
        return True
    raise ValueError(
        f"{path} line 1: expected the columns query<tab>passage, then negatives, got the header {'<tab>'.join(names)}. "
        "Reorder them, or write jsonl."
    )


def refuse_ids(path: str, lines: Sequence[bytes]) -> None:
    """Raises ValueError where tab-separated lines hold numbers, which are ids, not texts."""
    if all(field.isdigit() for line in lines for field in line.split()):
        raise ValueError(
            f"{path} holds ids, not texts: name the folder in which it lies beside collection.tsv and the queries "
            "(MS MARCO) or corpus.jsonl and queries.jsonl (BEIR)."
        )
