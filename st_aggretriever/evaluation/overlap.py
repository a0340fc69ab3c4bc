"""Training data inside a test set: queries that training has seen, and documents made of training texts."""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from st_aggretriever.atomic import replacing
from st_aggretriever.evaluation.beir import read_collection
from st_aggretriever.readers.beir import read_corpus
from st_aggretriever.readers.pairs import read_pairs
from st_aggretriever.readers.text import checksum, why_not_json
from st_aggretriever.versions import versions

WORDS = 8  # of a gram
SHARE = 0.5  # of a document's grams
FORMAT = "st_aggretriever overlap, 1"
_WORD = re.compile(r"\w+")


def find_overlap(
    train: Sequence[str | Path],
    data: str | Path,
    *,
    split: str = "test",
    train_split: str = "train",
    output: str | Path | None = None,
) -> dict[str, Any]:
    """Find what of one split of a BEIR folder lies in training files.

    Texts are compared as sequences of words: Unicode's compatibility form, lower case, without punctuation. A test
    query is seen if it equals a training query. A document is seen if at least half of its different 8-grams of words
    occur in training passages, negatives and queries; a text of fewer words is one gram. Memory grows with the number
    of different training grams, 8 bytes each.

    Args:
        train: Training pairs, files or BEIR folders, as :func:`st_aggretriever.readers.pairs.read_pairs` reads them.
        data: BEIR folder.
        split: Its qrels that name the test queries.
        train_split: Which qrels of a training folder.
        output: File for the result, as JSON; ``evaluate beir --exclude-overlap`` reads it.

    Returns:
        ``queries`` (seen ones), ``documents`` (id -> share of seen grams), ``affected_queries`` (seen, or with a seen
        document among the relevant), counts, rules and checksums.

    Raises:
        ValueError: No training file, or a bad line.
        OSError: A file is missing.
    """
    if not train:
        raise ValueError("find_overlap: expected at least one training file, got none.")
    collection = read_collection(data, split, ids_in_run=False)
    questions, grams = _training_side(train, train_split)
    seen_queries = [query for query, text in collection.queries.items() if tuple(words_of(text)) in questions]
    documents = {}
    for key, text in _watched(read_corpus(data), collection.counts["documents"], "documents"):
        share = share_of(text, grams)
        if share >= SHARE:
            documents[key] = round(share, 4)
    touched = [
        query
        for query, grades in collection.qrels.items()
        if any(grade > 0 and key in documents for key, grade in grades.items())
    ]
    either = {*seen_queries, *touched}
    affected = [query for query in collection.queries if query in either]
    result = {
        "format": FORMAT,
        "data": str(data),
        "split": split,
        "checksums": collection.checksums,
        "train": {str(path): _checksum_of(path) for path in train},
        "counts": {
            "queries": len(collection.queries),
            "queries_seen": len(seen_queries),
            "documents": collection.counts["documents"],
            "documents_seen": len(documents),
            "queries_with_seen_relevant_document": len(touched),
            "queries_affected": len(affected),
        },
        "rules": [
            "texts compared as words: Unicode NFKC, lower case, without punctuation",
            "a query is seen if it equals a training query",
            f"a document is seen if at least {SHARE:.0%} of its different {WORDS}-grams of words occur in training"
            " texts (passages, negatives, queries); a shorter text is one gram",
            "a query is affected if it is seen, or one of its relevant documents is",
        ],
        "queries": seen_queries,
        "affected_queries": affected,
        "documents": documents,
        "versions": versions(),
    }
    if output is not None:
        with replacing(output) as file:
            file.write(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return result


def words_of(text: str) -> list[str]:
    """The words of a text as they are compared.

    >>> words_of("What's the ﬁrst, then?")
    ['what', 's', 'the', 'first', 'then']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def grams_of(text: str) -> set[int]:
    """Hashes of the different 8-grams of words of a text; of the whole text if it is shorter; none without words."""
    words = words_of(text)
    if not words:
        return set()
    # Python's hash: good within one process, which is all that is needed.
    return {hash(tuple(words[start : start + WORDS])) for start in range(max(1, len(words) - WORDS + 1))}


def share_of(text: str, grams: np.ndarray) -> float:
    """The share of a text's grams that are among ``grams``, sorted int64; 0 for a text without words."""
    own = np.fromiter(grams_of(text), np.int64)
    if not len(own) or not len(grams):
        return 0.0
    place = np.minimum(np.searchsorted(grams, own), len(grams) - 1)
    return float((grams[place] == own).mean())


def excluded_queries(path: str | Path, split: str, checksums: Mapping[str, str]) -> list[str]:
    """The affected queries of a file that :func:`find_overlap` wrote for the same data.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Another format, split or data, or a damaged file.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is broken ({why_not_json(error)}).") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by evaluate overlap.")
    affected = found.get("affected_queries")
    needed = ("data", "split", "checksums", "affected_queries")
    if missing := [key for key in needed if key not in found]:
        raise ValueError(f"{path} lacks {', '.join(missing)}. Run evaluate overlap again.")
    if not isinstance(affected, list) or not all(isinstance(query, str) for query in affected):
        raise ValueError(f"{path}: expected a list of ids in 'affected_queries'. Run evaluate overlap again.")
    if found["split"] != split or found["checksums"] != dict(checksums):
        raise ValueError(
            f"{path} is about {found['data']}, split {found['split']}, which is not the data evaluated here. Run"
            " evaluate overlap on it."
        )
    return affected


def format_overlap(result: Mapping[str, Any], shown: int = 5) -> str:
    """Counts, a few ids and the rules."""
    counts = result["counts"]
    documents = list(result["documents"])
    return "\n".join(
        [
            f"{result['data']}, {result['split']}, against {', '.join(result['train'])}",
            "",
            f"queries seen in training: {counts['queries_seen']:,} of {counts['queries']:,}"
            + _some(result["queries"], shown),
            f"documents seen in training: {counts['documents_seen']:,} of {counts['documents']:,}"
            + _some(documents, shown),
            f"queries with a seen relevant document: {counts['queries_with_seen_relevant_document']:,}",
            f"queries affected: {counts['queries_affected']:,}",
            *(f"- {rule}" for rule in result["rules"]),
        ]
    )


def _some(ids: Collection[str], shown: int) -> str:
    first = list(ids)[:shown]
    return f" ({', '.join(first)}{', ...' if len(ids) > len(first) else ''})" if first else ""


def _training_side(train: Sequence[str | Path], split: str) -> tuple[set[tuple[str, ...]], np.ndarray]:
    """The training queries as words, and all grams of the training texts, sorted."""
    questions: set[tuple[str, ...]] = set()
    parts: list[np.ndarray] = []
    waiting = array("q")
    for path in train:
        for pair in _watched(read_pairs(path, split=split), None, str(path)):
            questions.add(tuple(words_of(pair["query"])))
            for text in (pair["query"], pair["passage"], *pair["negatives"]):
                waiting.extend(grams_of(text))
            if len(waiting) > 2**22:
                parts = [np.unique(np.concatenate([*parts, np.frombuffer(waiting, np.int64)]))]
                waiting = array("q")
    questions.discard(())
    return questions, np.unique(np.concatenate([*parts, np.frombuffer(waiting, np.int64)]))


def _watched(items: Iterable[Any], total: int | None, what: str) -> Iterator[Any]:
    yield from tqdm(items, total=total, desc=what, unit="text", disable=None)


def _checksum_of(path: str | Path) -> str | None:
    return checksum(path) if Path(path).is_file() else None
