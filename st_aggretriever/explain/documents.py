"""The documents to be explained: read from a file or a BEIR folder, ranked by the model or taken from an index."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from st_aggretriever.encoding import Encoder, model_hash, valid_unicode
from st_aggretriever.readers.beir import read_corpus
from st_aggretriever.readers.documents import ID_FIELDS, document_of, text_in
from st_aggretriever.readers.msmarco import read_tsv
from st_aggretriever.readers.text import read_jsonl, read_lines
from st_aggretriever.search.exact import search
from st_aggretriever.vectors.folder import VectorFolder

logger = logging.getLogger(__name__)

BLOCK = 10_000  # documents in memory while they are ranked


class Ranked(NamedTuple):
    """Documents in the order of their scores."""

    ids: list[str]
    texts: list[str]
    vectors: np.ndarray | None  # (n, dim) as stored, None where they were not


def read_documents(path: str | Path) -> Iterator[tuple[str, str]]:
    """Stream ``(id, text)`` of a BEIR folder, of jsonl or .tsv (as for encoding; in jsonl without any id the line's
    number is one), or of the lines of any other file, whose ids are the lines' numbers.

    Raises:
        FileNotFoundError: Nothing lies there.
        ValueError: A bad line, by file and number.
    """
    path = Path(path)
    if path.is_dir():
        yield from read_corpus(path)
    elif ".jsonl" in path.suffixes[-2:]:
        seen = set()
        for number, (key, text) in enumerate(read_jsonl(path, _parse), start=1):
            key = key or str(number)
            if key in seen:
                raise ValueError(f"{path} line {number}: id {key!r} occurs a second time.")
            seen.add(key)
            yield key, text
    elif ".tsv" in path.suffixes[-2:]:
        yield from read_tsv(path)
    else:
        yield from ((str(number), line) for number, line in read_lines(path))


def _parse(record: dict[str, Any]) -> tuple[str, str]:
    record = {name: value for name, value in record.items() if name not in ID_FIELDS or value is not None}
    return document_of(record) if any(field in record for field in ID_FIELDS) else ("", text_in(record))


def pick_documents(path: str | Path, ids: Sequence[str]) -> Ranked:
    """The documents of these ids, in this order.

    Raises:
        ValueError: An id that isn't there.
    """
    wanted = dict.fromkeys(ids)
    texts = {key: text for key, text in read_documents(path) if key in wanted}
    missing = [key for key in wanted if key not in texts]
    if missing:
        raise ValueError(f"explain: {path} holds no document {missing[0]!r}.")
    return Ranked(list(wanted), [texts[key] for key in wanted], None)


def rank_documents(
    model: Any, query: str, path: str | Path, top_k: int, *, index: str | Path | None = None, batch_size: int = 32
) -> Ranked:
    """The ``top_k`` documents of the largest dot product with the query.

    Args:
        model: Encodes the query and, without ``index``, all documents.
        query: Its text.
        path: As for :func:`read_documents`.
        top_k: How many; fewer where there are fewer.
        index: Folder of stored document vectors, whose ids are those of ``path``; exactly these are ranked.
        batch_size: Texts a batch.

    Raises:
        ValueError: No documents, or stored vectors of another width, or of documents that ``path`` doesn't hold.
    """
    encoder = Encoder(model, batch_size)
    vectors = encoder.encode([valid_unicode(query)], "query")
    if index is None:
        total = sum(1 for _ in read_documents(path))
        blocks: Iterator[tuple[list[str], np.ndarray]] = encoder.blocks(read_documents(path), total, BLOCK)
    else:
        check_index(index, model)
        folder = VectorFolder(index)
        if folder.dimension != vectors.shape[1]:
            raise ValueError(
                f"explain: the vectors in {index} have {folder.dimension} dimensions, the model's {vectors.shape[1]}."
            )
        blocks = folder.blocks()
    hits = search(vectors, blocks, top_k, backend="torch", device="cpu")
    found = [str(key) for key in hits.ids[0]]
    picked = pick_documents(path, found)
    return picked if index is None else picked._replace(vectors=_stored(VectorFolder(index), found))


def check_index(index: str | Path, model: Any) -> None:
    """Refuse vectors of queries; warn of vectors of another model, whose numbers the explanations call changed.

    Raises:
        ValueError: As said.
    """
    made = VectorFolder(index).manifest
    if made["side"] != "document":
        raise ValueError(f"explain: {index} holds {made['side']} vectors. Name the documents' by --index.")
    if made["model_hash"] not in (None, model_hash(model, quantize=False)):
        logger.warning("explain: the vectors in %s were made by another model, %s.", index, made["model"])


def pick_vectors(index: str | Path, ids: Sequence[str]) -> np.ndarray:
    """(n, dim) float32: the stored vectors of these ids.

    Raises:
        ValueError: An id that isn't there.
    """
    return _stored(VectorFolder(index), list(ids))


def _stored(folder: VectorFolder, ids: list[str]) -> np.ndarray:
    rows = {key: row for row, key in enumerate(ids)}
    vectors = np.full((len(ids), folder.dimension), np.nan, np.float32)
    for keys, block in folder.blocks():
        for position, key in enumerate(keys):
            if key in rows:
                vectors[rows[key]] = block[position]
    missing = np.isnan(vectors).all(1)
    if missing.any():
        raise ValueError(f"explain: {folder.folder} holds no vector of {ids[int(missing.argmax())]!r}.")
    return vectors
