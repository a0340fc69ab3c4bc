"""BM25 as a run to compare with."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from st_aggretriever.atomic import check_outputs
from st_aggretriever.evaluation.beir import Collection, check_numbers, read_collection, score_hits
from st_aggretriever.evaluation.metrics import import_pytrec_eval
from st_aggretriever.search.bm25 import RULE, search_bm25
from st_aggretriever.search.exact import Hits


def evaluate_bm25(
    data: str | Path,
    *,
    split: str = "test",
    top_k: int = 1000,
    run: str | Path | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    drop_identical_ids: bool = True,
    exclude_overlap: str | Path | None = None,
) -> dict[str, Any]:
    """Evaluate BM25 on one split of a BEIR folder, by the rules of :func:`evaluate_beir`, whose arguments these are.

    Returns:
        A result as :func:`evaluate_beir` gives; the setting of BM25 is its first rule.

    Raises:
        As :func:`evaluate_beir` and :func:`search_bm25`.
    """
    check_numbers(top_k=top_k)
    check_outputs(run, output, overwrite)
    import_pytrec_eval()
    collection = read_collection(data, split, ids_in_run=run is not None, exclude_overlap=exclude_overlap)
    options: dict[str, Any] = {"top_k": top_k, "drop_identical_ids": drop_identical_ids}
    options |= {"run": run, "output": output}
    return evaluate_collection_bm25(collection, **options)


def evaluate_collection_bm25(
    collection: Collection,
    *,
    top_k: int,
    drop_identical_ids: bool,
    run: str | Path | None,
    output: str | Path | None,
    run_format: str = "trec",
) -> dict[str, Any]:
    """Search and score a collection that was read and checked."""
    hits, how = find_hits_bm25(collection.queries, collection.corpus(), top_k + drop_identical_ids)
    options: dict[str, Any] = {"top_k": top_k, "drop_identical_ids": drop_identical_ids}
    options |= {"run": run, "output": output}
    return score_hits(collection, hits, how, **options, run_format=run_format)


def find_hits_bm25(
    queries: Mapping[str, str], corpus: Iterable[tuple[str, str]], depth: int
) -> tuple[Hits, dict[str, Any]]:
    """Hits by BM25, and how they came about; see :func:`search_bm25`."""
    started = time.perf_counter()
    hits = search_bm25(queries, corpus, depth)
    return hits, {
        "model": "bm25",
        "rules": [RULE],
        "encoding": {},
        "search": {"backend": "bm25s", "device": "cpu"},
        "seconds": {"search": round(time.perf_counter() - started, 3)},
    }
