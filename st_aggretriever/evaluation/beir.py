"""Zero-shot evaluation on a BEIR folder: encode, search exactly, score by trec_eval's rules, write run and figures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from st_aggretriever.atomic import check_outputs
from st_aggretriever.encoding import Encoder, model_hash
from st_aggretriever.evaluation.lengths import length_rules
from st_aggretriever.evaluation.metrics import (
    Qrels,
    evaluate_run,
    import_pytrec_eval,
    mean_figures,
    metric_rules,
    rank,
)
from st_aggretriever.evaluation.result import make_result, write_result
from st_aggretriever.evaluation.runs import check_run_id
from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries
from st_aggretriever.readers.text import checksum, find_text
from st_aggretriever.search.exact import Hits, pick_backend, search
from st_aggretriever.search.retrieve import rankings_of
from st_aggretriever.vectors.manifest import counted

logger = logging.getLogger(__name__)


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
    exclude_overlap: str | Path | None = None,
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
        exclude_overlap: file written by :func:`st_aggretriever.evaluation.overlap.find_overlap` for this data; the
            result then holds ``without_overlap``, the figures without the queries that it calls affected.
        backend: see :func:`st_aggretriever.search.exact.search`; it runs on the model's GPU if there is one.
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
    check_before(model, run, output, overwrite, top_k=top_k, batch_size=batch_size, block_size=block_size)
    collection = read_collection(data, split, ids_in_run=run is not None, exclude_overlap=exclude_overlap)
    return evaluate_collection(
        model,
        collection,
        top_k=top_k,
        batch_size=batch_size,
        block_size=block_size,
        run=run,
        output=output,
        drop_identical_ids=drop_identical_ids,
        backend=backend,
        model_name=model_name,
    )


def check_before(
    model: Any, run: str | Path | None, output: str | Path | None, overwrite: bool, **numbers: int
) -> None:
    """Refuse what can be refused before any file is read: numbers below 1, outputs, the model's similarity.

    Raises:
        As :func:`evaluate_beir`.
    """
    check_numbers(**numbers)
    check_outputs(run, output, overwrite)
    import_pytrec_eval()
    Encoder(model, 1)


def check_numbers(**numbers: int) -> None:
    """Raises ValueError where one is below 1."""
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"evaluate: {name} must be at least 1, got {value}.")


def evaluate_collection(
    model: Any,
    collection: Collection,
    *,
    top_k: int,
    batch_size: int,
    block_size: int,
    run: str | Path | None,
    output: str | Path | None,
    drop_identical_ids: bool,
    backend: str,
    model_name: str | None,
    run_format: str = "trec",
) -> dict[str, Any]:
    """Encode, search and score a collection that was read and checked; see :func:`evaluate_beir` for the arguments."""
    hits, how = find_hits(
        model,
        collection.queries,
        (collection.corpus(), collection.counts["documents"]),
        top_k + drop_identical_ids,  # one deeper, so that a dropped document leaves top_k
        batch_size=batch_size,
        block_size=block_size,
        backend=backend,
        model_name=model_name,
    )
    options: dict[str, Any] = {"top_k": top_k, "drop_identical_ids": drop_identical_ids}
    options |= {"run": run, "output": output}
    return score_hits(collection, hits, how, **options, run_format=run_format)


def find_hits(
    model: Any,
    queries: Mapping[str, str],
    corpus: tuple[Iterable[tuple[str, str]], int],
    depth: int,
    *,
    batch_size: int,
    block_size: int,
    backend: str,
    model_name: str | None,
) -> tuple[Hits, dict[str, Any]]:
    """Encode queries and documents and search.

    Args:
        queries: Q texts by id.
        corpus: (id, text) of each document, and how many they are.
        depth: Hits a query.

    Returns:
        (Q, min(depth, N)) hits, and how they came about, for :func:`score_hits`.
    """
    device = str(getattr(model, "device", "cpu"))
    library, device = pick_backend(backend, device if device.startswith("cuda") else "cpu")
    encoder = Encoder(model, batch_size)
    started = time.perf_counter()
    query_vectors = encoder.queries(queries)
    encoded = time.perf_counter()
    blocks = encoder.blocks(*corpus, block_size)
    hits = search(query_vectors, blocks, depth, backend=library, device=device)
    searched = time.perf_counter()
    return hits, {
        "model": model_name or str(getattr(getattr(model, "model_card_data", None), "base_model", None) or "unnamed"),
        "model_hash": model_hash(model),
        "truncated": encoder.truncated,
        "rules": [encoder.rule, *length_rules(model)],
        "encoding": encoder.settings(query_vectors.shape[1]) | {"batch_size": batch_size},
        "search": {"backend": library, "device": device},
        "seconds": {
            "encode_queries": round(encoded - started, 3),
            "encode_documents": round(encoder.seconds, 3),
            "search": round(searched - encoded - encoder.seconds, 3),
        },
    }


class Collection(NamedTuple):
    """One split of a BEIR folder, or of another benchmark, checked: judged queries, judgements, documents, counts."""

    data: str | Path
    split: str
    queries: dict[str, str]
    qrels: Qrels
    corpus: Callable[[], Iterable[tuple[str, str]]]  # streams (id, text)
    counts: dict[str, int]
    checksums: dict[str, str]  # file -> SHA-256 of its bytes as they lie there
    exclude_overlap: str | None = None  # the file that names the affected queries
    affected: frozenset[str] = frozenset()
    benchmark: str = "beir"
    relevance: int = 1  # the least grade of a relevant document


def read_collection(
    data: str | Path, split: str, *, ids_in_run: bool, exclude_overlap: str | Path | None = None
) -> Collection:
    """Read queries and judgements, and go through the whole corpus once, so that a bad line is found before the work.

    Args:
        ids_in_run: Whether ids will be written into a run file, which can't hold blanks.
        exclude_overlap: File of ``evaluate overlap`` that names affected queries.

    Raises:
        FileNotFoundError: A part of the folder, or that file, is missing.
        ValueError: A bad line, by file and number, an id with blanks, or a file about other data.
    """
    texts = read_queries(data)
    qrels = read_qrels(data, split, texts)
    queries = {query: texts[query] for query in qrels}

    def corpus() -> Iterable[tuple[str, str]]:
        return read_corpus(data)

    counts = check_corpus(data, corpus(), qrels, ids_in_run=ids_in_run)
    collection = Collection(data, split, queries, qrels, corpus, counts, data_checksums(data, split))
    if exclude_overlap is None:
        return collection
    from st_aggretriever.evaluation.overlap import excluded_queries  # which reads collections itself

    affected = excluded_queries(exclude_overlap, split, collection.checksums)
    return collection._replace(exclude_overlap=str(exclude_overlap), affected=frozenset(affected))


def score_hits(
    collection: Collection,
    hits: Hits,
    how: dict[str, Any],
    *,
    top_k: int,
    drop_identical_ids: bool,
    run: str | Path | None,
    output: str | Path | None,
    run_format: str = "trec",
) -> dict[str, Any]:
    """Score what a search found, and write run and result where asked.

    Args:
        hits: of the collection's queries, in order; one deeper than ``top_k`` where identical ids are dropped.
        how: what made them: ``model``, ``rules``, ``encoding``, ``search`` and ``seconds`` of the result, and of a
            model ``model_hash`` and ``truncated`` (side -> count).

    Returns:
        The result of :func:`evaluate_beir`.
    """
    counts = dict(collection.counts)
    rankings, dropped = _rankings(list(collection.queries), hits, top_k, drop_identical_ids)
    counts["dropped_identical_ids"] = len(dropped)
    counts["queries_all_tied"] = tied = _all_tied(rankings)
    if tied:
        logger.warning(
            "%s: of %s all hits have one score; the order of ids decides.", collection.data, counted(tied, "query")
        )
    relevant = sum(collection.qrels[query].get(query, 0) > 0 for query in dropped)
    counts["dropped_though_relevant"] = relevant
    if relevant:
        logger.warning(
            "%s: %s left out for having the query's id though judged relevant to it. If queries and documents are"
            " numbered apart, keep them: drop_identical_ids=False, --keep-identical-ids.",
            collection.data,
            counted(relevant, "document"),
        )
    options: dict[str, Any] = {"drop_identical_ids": drop_identical_ids, "relevance": collection.relevance}
    figures = evaluate_run(collection.qrels, rankings, top_k=top_k, **options)
    result = make_result(
        how,
        benchmark=collection.benchmark,
        data=collection.data,
        split=collection.split,
        checksums=collection.checksums,
        figures=mean_figures(figures),
        without_overlap=_without_overlap(collection, figures),
        counts=counts,
        rules=metric_rules(top_k, **options),
        top_k=top_k,
    )
    write_result(result, rankings, run, output, run_format)
    return result


def _without_overlap(collection: Collection, figures: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """The result's part on the queries that training hasn't touched; None where none are to be left out."""
    if collection.exclude_overlap is None:
        return None
    kept = {query: row for query, row in figures.items() if query not in collection.affected}
    return {
        "file": collection.exclude_overlap,
        "queries": len(kept),
        "excluded": len(figures) - len(kept),
        "figures": mean_figures(kept) if kept else {},
    }


def check_corpus(
    data: str | Path, corpus: Iterable[tuple[str, str]], qrels: Qrels, *, ids_in_run: bool, relevance: int = 1
) -> dict[str, int]:
    """Read the whole corpus once, so that a bad line is found before hours of encoding, and count what figures need."""
    unknown = {document for grades in qrels.values() for document in grades}
    documents = empty = 0
    if ids_in_run:
        for query in qrels:
            check_run_id("query", query)
    for document, text in corpus:
        documents += 1
        empty += not text.strip()
        unknown.discard(document)
        if ids_in_run:
            check_run_id("document", document)
    dangling = sum(document in unknown for grades in qrels.values() for document in grades)
    if dangling:
        logger.warning(
            "%s: %d judgements name documents that are not in the corpus; they count in the ideal ranking.",
            data,
            dangling,
        )
    if empty:
        logger.warning("%s: %d documents are empty; a model finds them by chance.", data, empty)
    return {
        "queries": len(qrels),
        "documents": documents,
        "empty_documents": empty,
        "dangling_qrels": dangling,
        "queries_without_relevant": sum(max(grades.values()) < relevance for grades in qrels.values()),
    }


def data_checksums(data: str | Path, split: str) -> dict[str, str]:
    """SHA-256 of the three files of one split, by their names within the folder."""
    data = Path(data)
    sums = {}
    for folder, name in ((data, "corpus.jsonl"), (data, "queries.jsonl"), (data / "qrels", f"{split}.tsv")):
        path = find_text(folder, name)
        sums[path.relative_to(data).as_posix()] = checksum(path)
    return sums


def _rankings(queries: list[str], hits: Hits, top_k: int, drop: bool) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Each query's ranking, best first, cut at ``top_k``, and the ids that were dropped as the query's own."""
    rankings = {}
    dropped = []
    for query, found in rankings_of(queries, hits).items():
        if drop and query in found:
            dropped.append(query)
        rankings[query] = rank(found, top_k, without=query if drop else None)
    return rankings, dropped


def _all_tied(rankings: Mapping[str, Mapping[str, float]]) -> int:
    """Queries that found more than one document, all with one score."""
    return sum(len(ranking) > 1 and len(set(ranking.values())) == 1 for ranking in rankings.values())
