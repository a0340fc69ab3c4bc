"""Table 8: milliseconds to encode a single query, and bytes of an index. Nothing is trained: weights don't matter."""

from __future__ import annotations

import json
import time
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import published
import table
import torch
from arms import Model, Table, agg, cls
from fit import QUERY_LENGTH
from judge import FINDINGS
from runner import Runner
from scales import Scale

from st_aggretriever import build_aggretriever
from st_aggretriever.atomic import replacing
from st_aggretriever.readers.text import checksum
from st_aggretriever.versions import versions

ARMS: dict[str, tuple[Model, str]] = {  # name -> model, how the vocabulary product is computed
    "CLS": (cls(), "none"),
    "AGG": (agg(), "none"),
    "AGG, no MLM head": (agg(pooling="tokens"), "none"),
    "AGG, int8 head": (agg(), "int8"),
}
WARM_UP = 5
MARCO = 8_841_823
PERCENTILES = (1, 50, 99)


def make(scale: Scale) -> Table:
    where = f"{scale.labels['main']}, {scale.latency_queries:,} queries at most, batch 1, one thread"
    notes = (
        f"ms: percentiles of encoding one query; {where}.",
        "Bytes of a flat index: documents x dimensions x 4 or 2, all test collections of the scale together, and the "
        "8,841,823 passages of MS MARCO.",
    )
    return Table(
        name="latency",
        title="Table 8: latency and index size",
        rows=[],
        seeds=(0,),
        collections=[c.name for c in scale.collections],
        published=published.LATENCY,
        notes=notes,
    )


def measured(runner: Runner, _: Table) -> list[dict[str, Any]]:
    rows = []
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    folders = {collection.folder: collection for collection in runner.collections.values()}
    documents = sum(1 for collection in folders.values() for _ in runner._corpus(collection)())
    for device in devices:
        for name, (model, quantize) in ARMS.items():
            if quantize == "int8" and device != "cpu":
                continue
            with closing(runner.alone("latency", wait=True)):  # or two processes would time each other
                found = _kept(runner, f"{name}, {device}", model, quantize, device)
            if found is None:
                continue
            cells = {f"p{p} ms": found[f"p{p}"] for p in PERCENTILES}
            cells |= {f"index {kind} MB": documents * found["dimension"] * size / 1e6 for kind, size in _SIZES}
            cells |= {f"MS MARCO {kind} GB": MARCO * found["dimension"] * size / 1e9 for kind, size in _SIZES}
            rows.append(
                {
                    "name": f"{name}{' (GPU)' if device == 'cuda' else ''}",
                    "cells": {column: {"mean": value, "sd": None, "n": 1} for column, value in cells.items()},
                }
            )
    return [{"title": "", "columns": list(rows[0]["cells"]), "rows": rows, "plot": "p50 ms"}]


_SIZES = (("float32", 4), ("float16", 2))


def _kept(runner: Runner, name: str, model: Model, quantize: str, device: str) -> dict[str, float] | None:
    """The figures of an arm, measured once; None where this CPU can't run an int8 head."""
    stem = "".join(letter if letter.isalnum() else "-" for letter in name)
    path = runner.runs / f"latency-{stem}.json"
    if not path.exists():
        try:
            found = _timed(runner, model, quantize, device)
        except ValueError as error:
            if quantize != "int8":
                raise
            runner.say(f"{name} is left out: {error}")
            return None
        found |= {"findings_sha256": checksum(FINDINGS), "versions": versions()}
        with replacing(path) as file:
            file.write(json.dumps(found) + "\n")
    return json.loads(path.read_text(encoding="utf-8"))


def _timed(runner: Runner, model: Model, quantize: str, device: str) -> dict[str, Any]:
    scale = runner.scale
    lengths = {"query_length": QUERY_LENGTH, "document_length": scale.search_length}
    built = build_aggretriever(runner.backbone("main"), **lengths, **model.options).float().to(device)
    if quantize != "none":
        pooling: Any = built[1]
        pooling.quantize = quantize
    collections = runner.collections.values()
    texts = [text for collection in collections for text in runner._judged(collection)[0].values()]
    queries = list(islice(texts, scale.latency_queries))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken = []
        for query in [*queries[:WARM_UP], *queries]:
            started = time.perf_counter()
            vector = built.encode_query([query], show_progress_bar=False)  # on the CPU when it returns
            taken.append(1000 * (time.perf_counter() - started))
    finally:
        torch.set_num_threads(threads)
    figures = np.percentile(taken[WARM_UP:], PERCENTILES).tolist()
    names = [f"p{p}" for p in PERCENTILES]
    return {**dict(zip(names, figures, strict=True)), "dimension": vector.shape[-1], "queries": len(queries)}


if __name__ == "__main__":
    table.main(make, measured)
