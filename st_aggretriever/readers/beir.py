"""BEIR folders: ``corpus.jsonl``, ``queries.jsonl`` (each may be compressed) and ``qrels/SPLIT.tsv``."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from st_aggretriever.readers.documents import document_of
from st_aggretriever.readers.judged import JudgedSource
from st_aggretriever.readers.qrels import read_qrels_file
from st_aggretriever.readers.store import BadRows, Passages
from st_aggretriever.readers.text import find_text, read_jsonl


def read_corpus(folder: str | Path) -> Iterator[tuple[str, str]]:
    """Stream ``(document id, title + blank + text)`` in the file's order; memory grows with the ids only.

    Raises:
        FileNotFoundError: no corpus file.
        ValueError: a bad line (see :func:`read_jsonl`), a line with neither title nor text, an id that came before.
    """
    return read_jsonl(find_text(folder, "corpus.jsonl"), _Records(titles=True))


def read_queries(folder: str | Path) -> dict[str, str]:
    """Query texts by id, in the file's order.

    Raises:
        FileNotFoundError: no queries file.
        ValueError: a bad line (see :func:`read_jsonl`), a line without text, an id that came before.
    """
    return dict(read_jsonl(find_text(folder, "queries.jsonl"), _Records(titles=False)))


def read_qrels(folder: str | Path, split: str, query_ids: Collection[str]) -> dict[str, dict[str, int]]:
    """Relevance grades of one split, see :func:`read_qrels_file`.

    Raises:
        FileNotFoundError: no such split; the sentence names those that are there.
        ValueError: as :func:`read_qrels_file`.
    """
    return read_qrels_file(_qrels_path(Path(folder), split), query_ids)


class _Records:
    """Parses records into ``(id, text)`` and remembers the ids, to refuse the second of a kind."""

    def __init__(self, *, titles: bool) -> None:
        self.titles = titles
        self.seen: set[str] = set()

    def __call__(self, record: dict[str, Any]) -> tuple[str, str]:
        key, text = document_of(record, titles=self.titles)
        if key in self.seen:
            raise ValueError(f"id {key!r} occurs a second time.")
        self.seen.add(key)
        return key, text


def _qrels_path(folder: Path, split: str) -> Path:
    find_text(folder, "queries.jsonl")  # the folder itself is missing or no BEIR folder: say that first
    try:
        return find_text(folder / "qrels", f"{split}.tsv")
    except FileNotFoundError:
        found = sorted({path.name.split(".tsv")[0] for path in (folder / "qrels").glob("*.tsv*")})
        there = f"It has {', '.join(found)}." if found else f"{folder / 'qrels'} holds no .tsv file."
        raise FileNotFoundError(f"{folder} has no qrels/{split}.tsv. {there}") from None


def open_training(folder: str | Path, split: str, bad: BadRows) -> JudgedSource:
    """A row for each judgement of 1 and more of one split, without negatives.

    Raises:
        FileNotFoundError: A part of the folder is missing.
        ValueError: A bad line; in the corpus, one more than ``bad`` allows.
    """
    queries = read_queries(folder)
    path = _qrels_path(Path(folder), split)
    qrels = read_qrels_file(path, queries)
    passages = Passages(find_text(folder, "corpus.jsonl"), bad)
    texts = (find_text(folder, "queries.jsonl"), queries)
    return JudgedSource(str(folder), texts, passages, bad, form="BEIR", qrels=(path, qrels))
