"""MS MARCO passage ranking and the TREC Deep Learning tracks, from their official files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from st_aggretriever.atomic import check_outputs
from st_aggretriever.evaluation.beir import (
    Collection,
    check_before,
    check_corpus,
    check_numbers,
    evaluate_collection,
)
from st_aggretriever.evaluation.bm25 import evaluate_collection_bm25
from st_aggretriever.evaluation.metrics import import_pytrec_eval
from st_aggretriever.readers.msmarco import read_tsv
from st_aggretriever.readers.qrels import read_qrels_file
from st_aggretriever.readers.text import checksum, short_names

# The least grade that counts as relevant: one for MS MARCO's sparse labels, two in TREC DL, where 1 means "related".
RELEVANCE = {"dev": 1, "dl": 2}


def evaluate_msmarco(
    model: Any,
    collection: str | Path,
    queries: str | Path,
    qrels: str | Path,
    *,
    measures: str = "dev",
    top_k: int = 1000,
    batch_size: int = 32,
    block_size: int = 50_000,
    run: str | Path | None = None,
    run_format: str = "trec",
    output: str | Path | None = None,
    overwrite: bool = False,
    backend: str = "auto",
    model_name: str | None = None,
) -> dict[str, Any]:
    """Evaluate on ``collection.tsv`` with the judged queries of one query file.

    Args:
        model: As for :func:`st_aggretriever.evaluation.beir.evaluate_beir`; None is BM25.
        collection: ``pid<tab>passage``.
        queries: ``qid<tab>query``; only those that ``qrels`` judges are searched.
        qrels: TREC's four columns.
        measures: ``"dev"``: RR@10 and R@1000 with grades of 1 and more; ``"dl"``, the TREC Deep Learning tracks:
            graded nDCG@10, and grades of 2 and more for the rest.
        run_format: ``"trec"`` or ``"msmarco"``.
        top_k, batch_size, block_size, run, output, overwrite, backend, model_name: As for ``evaluate_beir``. Ids of
            queries and passages have nothing to do with each other, so no document is dropped for its id.

    Returns:
        A result as ``evaluate_beir`` gives.

    Raises:
        As ``evaluate_beir``.
    """
    if measures not in RELEVANCE:
        raise ValueError(f"evaluate_msmarco: measures must be dev or dl, got {measures!r}.")
    if model is None:
        check_numbers(top_k=top_k)
        check_outputs(run, output, overwrite)
        import_pytrec_eval()
    else:
        check_before(model, run, output, overwrite, top_k=top_k, batch_size=batch_size, block_size=block_size)
    read = read_msmarco(collection, queries, qrels, relevance=RELEVANCE[measures])
    options: dict[str, Any] = {"top_k": top_k, "drop_identical_ids": False}
    options |= {"run": run, "run_format": run_format, "output": output}
    if model is None:
        return evaluate_collection_bm25(read, **options)
    options |= {"batch_size": batch_size, "block_size": block_size, "backend": backend, "model_name": model_name}
    return evaluate_collection(model, read, **options)


def read_msmarco(collection: str | Path, queries: str | Path, qrels: str | Path, *, relevance: int = 1) -> Collection:
    """Read queries and judgements, and go through all passages once.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A bad line, by file and number.
    """

    def corpus() -> Iterable[tuple[str, str]]:
        return read_tsv(collection)

    texts = dict(read_tsv(queries))
    judged = read_qrels_file(qrels, texts)
    names = short_names((collection, queries, qrels))  # all three may have one name, in folders of their own
    counts = check_corpus(collection, corpus(), judged, ids_in_run=True, relevance=relevance)
    return Collection(
        data=collection,
        split=Path(qrels).name,
        queries={query: texts[query] for query in judged},
        qrels=judged,
        corpus=corpus,
        counts=counts,
        checksums={name: checksum(path) for path, name in names.items()},
        benchmark="msmarco",
        relevance=relevance,
    )
