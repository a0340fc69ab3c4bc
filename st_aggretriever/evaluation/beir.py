"""Zero-shot evaluation on a BEIR folder: encode, search exactly, score by trec_eval's rules, write run and figures."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from tqdm import tqdm

from st_aggretriever.evaluation.metrics import (
    Qrels,
    evaluate_run,
    import_pytrec_eval,
    mean_figures,
    metric_rules,
    rank,
)
from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries
from st_aggretriever.search import Hits, check_vectors, pick_backend, search

logger = logging.getLogger(__name__)

# Texts go to the model this many batches at a time: enough for it to sort them by length, few enough that the progress
# bar moves.
BATCHES_AT_ONCE = 32


def evaluate_beir(
    model: Any,
    data: str | Path,
    *,
    split: str = "test",
    top_k: int = 1000,
    batch_size: int = 32,
    block_size: int = 50_000,
    run: str | Path | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    drop_identical_ids: bool = True,
    backend: str = "auto",
    model_name: str | None = None,
) -> dict[str, Any]:
    """Evaluate ``model`` on one split of a BEIR folder.

    The whole folder is read and checked before anything is encoded. Documents are encoded and searched in blocks;
    memory holds one block of vectors, the running top-k and the document ids.

    Args:
        model: a SentenceTransformer, or whatever has its ``encode_query`` and ``encode_document``. With cosine as its
            similarity the vectors are normalised, otherwise left as they are; the score is the inner product.
        data: folder with ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/SPLIT.tsv``.
        split: which qrels; only queries that have judgements are searched.
        top_k: depth of the run; metrics that look deeper are left out.
        batch_size: texts a batch.
        block_size: documents a block.
        run: file for the run, in TREC format.
        output: file for the result, as JSON.
        overwrite: replace these two files; otherwise an existing one is an error.
        drop_identical_ids: drop a document whose id is the query's, before the cut at ``top_k``.
        backend: see :func:`st_aggretriever.search.search`; it runs on the model's GPU if there is one.
        model_name: how the result names the model.

    Returns:
        What ``output`` holds: ``figures`` (metric -> mean), ``counts``, ``rules`` and where they come from.

    Raises:
        FileNotFoundError: a part of the folder, or the folder of an output file, is missing.
        FileExistsError: an output file exists.
        ValueError: a bad line, a vector that isn't finite, a similarity other than dot and cosine, an id with blanks
            where a run is to be written.
        ImportError: pytrec_eval or the wanted backend is missing.
    """
    for name, value in (("top_k", top_k), ("batch_size", batch_size), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"evaluate_beir: {name} must be at least 1, got {value}.")
    check_outputs(run, output, overwrite)
    import_pytrec_eval()
    device = str(getattr(model, "device", "cpu"))
    library, device = pick_backend(backend, device if device.startswith("cuda") else "cpu")
    encoder = _Encoder(model, batch_size)

    collection = read_collection(data, split, ids_in_run=run is not None)

    started = time.perf_counter()
    query_vectors = encoder.queries(collection.queries)
    encoded = time.perf_counter()
    hits = search(
        query_vectors,
        encoder.blocks(read_corpus(data), collection.counts["documents"], block_size),
        top_k + drop_identical_ids,  # one deeper, so that a dropped document leaves top_k
        backend=library,
        device=device,
    )
    searched = time.perf_counter()
    how = {
        "model": model_name or str(getattr(getattr(model, "model_card_data", None), "base_model", None) or "unnamed"),
        "rules": [encoder.rule],
        "encoding": encoder.settings(query_vectors.shape[1]) | {"batch_size": batch_size},
        "search": {"backend": library, "device": device, "top_k": top_k},
        "seconds": {
            "encode_queries": round(encoded - started, 3),
            "encode_documents": round(encoder.seconds, 3),
            "search": round(searched - encoded - encoder.seconds, 3),
        },
    }
    return score_hits(collection, hits, how, top_k=top_k, drop_identical_ids=drop_identical_ids, run=run, output=output)


class Collection(NamedTuple):
    """One split of a BEIR folder, checked: its judged queries, their judgements, and counts."""

    data: str | Path
    split: str
    queries: dict[str, str]
    qrels: Qrels
    counts: dict[str, int]


def read_collection(data: str | Path, split: str, *, ids_in_run: bool) -> Collection:
    """Read queries and judgements, and go through the whole corpus once, so that a bad line is found before the work.

    Args:
        ids_in_run: Whether ids will be written into a run file, which can't hold blanks.

    Raises:
        FileNotFoundError: A part of the folder is missing.
        ValueError: A bad line, by file and number, or an id with blanks.
    """
    texts = read_queries(data)
    qrels = read_qrels(data, split, texts)
    queries = {query: texts[query] for query in qrels}
    return Collection(data, split, queries, qrels, _check_corpus(data, qrels, ids_in_run=ids_in_run))


def score_hits(
    collection: Collection,
    hits: Hits,
    how: dict[str, Any],
    *,
    top_k: int,
    drop_identical_ids: bool,
    run: str | Path | None,
    output: str | Path | None,
) -> dict[str, Any]:
    """Score what a search found, and write run and result where asked.

    Args:
        hits: of the collection's queries, in order; one deeper than ``top_k`` where identical ids are dropped.
        how: what made them: ``model``, ``rules``, ``encoding``, ``search`` and ``seconds`` of the result.

    Returns:
        The result of :func:`evaluate_beir`.
    """
    counts = dict(collection.counts)
    rankings, dropped = _rankings(list(collection.queries), hits, top_k, drop_identical_ids)
    counts["dropped_identical_ids"] = len(dropped)
    relevant = sum(collection.qrels[query].get(query, 0) > 0 for query in dropped)
    counts["dropped_though_relevant"] = relevant
    if relevant:
        logger.warning(
            "%s: %d documents were dropped for having their query's id though judged relevant to it. If queries and"
            " documents are numbered apart, keep them: drop_identical_ids=False, --keep-identical-ids.",
            collection.data,
            relevant,
        )
    figures = evaluate_run(collection.qrels, rankings, top_k=top_k, drop_identical_ids=drop_identical_ids)
    result = {
        "benchmark": "beir",
        "data": str(collection.data),
        "split": collection.split,
        "model": how["model"],
        "figures": mean_figures(figures),
        "counts": counts,
        "rules": [*how["rules"], *metric_rules(top_k, drop_identical_ids=drop_identical_ids)],
        "encoding": how["encoding"],
        "search": how["search"],
        "seconds": how["seconds"],
        "versions": _versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if run is not None:
        with _replacing(run) as file:
            file.writelines(_trec_lines(rankings))
    if output is not None:
        with _replacing(output) as file:
            file.write(json.dumps(result, indent=2) + "\n")
    return result


def check_outputs(run: str | Path | None, output: str | Path | None, overwrite: bool) -> None:
    """Refuse output files that exist, that have no folder, or that are one file.

    Raises:
        FileExistsError, FileNotFoundError, ValueError: in this order.
    """
    paths = [Path(path) for path in (run, output) if path is not None]
    for path in paths:
        if path.is_dir() or (path.exists() and not overwrite):
            raise FileExistsError(f"evaluate_beir: {path} exists. Name another file or overwrite it (--overwrite).")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"evaluate_beir: the folder of {path} does not exist. Make it first.")
    if len(paths) == 2 and paths[0].resolve() == paths[1].resolve():
        raise ValueError(f"evaluate_beir: run and output are both {paths[0]}. Name two files.")


def format_result(result: Mapping[str, Any]) -> str:
    """The figures as a small table, with the counts and the rules below."""
    figures, counts = result["figures"], result["counts"]
    lines = [
        f"{result['model']} on {result['data']}, {result['split']}",
        "",
        "  ".join(f"{metric:>7}" for metric in figures),
        "  ".join(f"{value:7.4f}" for value in figures.values()),
        "",
        ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in counts.items()),
        *(f"- {rule}" for rule in result["rules"]),
    ]
    return "\n".join(lines)


class _Encoder:
    """Texts to float32 vectors by any SentenceTransformer; counts the seconds that the documents take."""

    def __init__(self, model: Any, batch_size: int) -> None:
        similarity = getattr(model, "similarity_fn_name", None) or "dot"
        similarity = str(getattr(similarity, "value", similarity))
        if similarity not in ("dot", "cosine"):
            raise ValueError(f"evaluate_beir: the model's similarity must be dot or cosine, got {similarity}.")
        self.model = model
        self.similarity = similarity
        self.options = {
            "batch_size": batch_size,
            "show_progress_bar": False,
            "convert_to_numpy": True,
            "normalize_embeddings": similarity == "cosine",
        }
        self.texts_at_once = BATCHES_AT_ONCE * batch_size
        self.seconds = 0.0

    @property
    def rule(self) -> str:
        if self.similarity == "cosine":
            return "score: cosine, the model's similarity (inner product of vectors normalised to length 1)"
        return "score: inner product of the vectors as the model gives them"

    def queries(self, queries: Mapping[str, str]) -> np.ndarray:
        """(Q, dim) float32, checked here, where a bad one still has a name."""
        vectors = np.asarray(self.model.encode_query(list(queries.values()), **self.options), dtype=np.float32)
        return check_vectors(list(queries), vectors, "query")

    def blocks(
        self, corpus: Iterable[tuple[str, str]], total: int, block_size: int
    ) -> Iterator[tuple[list[str], np.ndarray]]:
        """Stream ``(ids, (n, dim) float32)`` of ``block_size`` documents, under one progress bar over all."""
        documents = iter(corpus)
        with tqdm(total=total, desc="documents", unit="doc", disable=None) as bar:
            while block := list(islice(documents, block_size)):
                started = time.perf_counter()
                parts = []
                for start in range(0, len(block), self.texts_at_once):
                    texts = [text for _, text in block[start : start + self.texts_at_once]]
                    parts.append(np.asarray(self.model.encode_document(texts, **self.options), dtype=np.float32))
                    bar.update(len(texts))
                vectors = np.concatenate(parts)
                self.seconds += time.perf_counter() - started
                yield [key for key, _ in block], vectors

    def settings(self, dimension: int) -> dict[str, Any]:
        """Lengths and prompts of the model, as far as it has them (None otherwise)."""
        try:
            first = self.model[0]
        except (TypeError, KeyError, IndexError):
            first = None
        return {
            "dimension": dimension,
            "similarity": self.similarity,
            "query_length": getattr(first, "query_length", None),
            "document_length": getattr(first, "document_length", None),
            "max_seq_length": getattr(self.model, "max_seq_length", None),
            "prompts": getattr(self.model, "prompts", None),
            "default_prompt_name": getattr(self.model, "default_prompt_name", None),
        }


def _check_corpus(data: str | Path, qrels: Qrels, *, ids_in_run: bool) -> dict[str, int]:
    """Read the whole corpus once, so that a bad line is found before hours of encoding, and count what figures need."""
    unknown = {document for grades in qrels.values() for document in grades}
    documents = 0
    if ids_in_run:
        for query in qrels:
            _check_run_id("query", query)
    for document, _ in read_corpus(data):
        documents += 1
        unknown.discard(document)
        if ids_in_run:
            _check_run_id("document", document)
    dangling = sum(document in unknown for grades in qrels.values() for document in grades)
    if dangling:
        logger.warning(
            "%s: %d judgements name documents that are not in the corpus; they count in the ideal ranking.",
            data,
            dangling,
        )
    return {
        "queries": len(qrels),
        "documents": documents,
        "dangling_qrels": dangling,
        "queries_without_relevant": sum(max(grades.values()) < 1 for grades in qrels.values()),
    }


def _check_run_id(what: str, key: str) -> None:
    if len(key.split()) != 1 or key != key.strip():
        raise ValueError(f"evaluate_beir: {what} id {key!r} holds blanks, which a TREC run can't. Leave the run out.")


def _rankings(queries: list[str], hits: Hits, top_k: int, drop: bool) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Each query's ranking, best first, cut at ``top_k``, and the ids that were dropped as the query's own."""
    rankings = {}
    dropped = []
    for query, ids, scores in zip(queries, hits.ids.tolist(), hits.scores.tolist(), strict=True):
        if drop and query in ids:
            dropped.append(query)
        rankings[query] = rank(dict(zip(ids, scores, strict=True)), top_k, without=query if drop else None)
    return rankings, dropped


def _trec_lines(rankings: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for query, ranking in rankings.items():
        for place, (document, score) in enumerate(ranking.items(), start=1):
            # repr gives the float32 back, digit for digit: no tie appears or goes through rounding.
            yield f"{query} Q0 {document} {place} {score!r} st_aggretriever\n"


@contextmanager
def _replacing(path: str | Path) -> Iterator[TextIO]:
    """A text file that takes its name only when it is complete."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _versions() -> dict[str, str | None]:
    from st_aggretriever import __version__

    versions: dict[str, str | None] = {"st_aggretriever": __version__}
    packages = {
        "sentence-transformers": ["sentence-transformers"],
        "transformers": ["transformers"],
        "torch": ["torch"],
        "faiss": ["faiss-cpu", "faiss-gpu-cu12", "faiss-gpu"],
        "pytrec_eval": ["pytrec-eval-terrier", "pytrec_eval"],
        "bm25s": ["bm25s"],
    }
    for name, distributions in packages.items():
        versions[name] = next(filter(None, map(_installed, distributions)), None)
    return versions


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
