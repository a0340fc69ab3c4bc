"""Table 8: milliseconds to encode a single query, and bytes of an index. Nothing is trained: weights don't matter."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
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
        f"ms: percentiles of encoding one query; {where}; the arms by turns.",
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
        with closing(runner.alone("latency", wait=True)):  # or two processes would time each other
            found = _kept(runner, device)
        for name, arm in found["arms"].items():
            cells = {f"p{p} ms": arm[f"p{p}"] for p in PERCENTILES}
            cells["p50 / CLS"] = arm["p50"] / found["arms"]["CLS"]["p50"]
            cells |= {f"index {kind} MB": documents * arm["dimension"] * size / 1e6 for kind, size in _SIZES}
            cells |= {f"MS MARCO {kind} GB": MARCO * arm["dimension"] * size / 1e9 for kind, size in _SIZES}
            rows.append(
                {
                    "name": f"{name}{' (GPU)' if device == 'cuda' else ''}",
                    "cells": {column: {"mean": value, "sd": None, "n": 1} for column, value in cells.items()},
                }
            )
    return [
        {
            "title": "",
            "columns": list(rows[0]["cells"]),
            "rows": rows,
            "plots": {"p50 ms": "Table 8: encoding one query, median"},
        }
    ]


_SIZES = (("float32", 4), ("float16", 2))


def _kept(runner: Runner, device: str) -> dict[str, Any]:
    """The figures of all arms on a device, measured once."""
    path = runner.runs / f"latency-{device}.json"
    if not path.exists():
        found = {"arms": _timed(runner, device), "findings_sha256": checksum(FINDINGS), "versions": versions()}
        with replacing(path) as file:
            file.write(json.dumps(found) + "\n")
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def _timed(runner: Runner, device: str) -> dict[str, dict[str, Any]]:
    """Every arm encodes a query before any encodes the next one: what slows the machine down slows all of them."""
    collections = runner.collections.values()
    texts = [text for collection in collections for text in runner._judged(collection)[0].values()]
    queries = list(islice(texts, runner.scale.latency_queries))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        built = dict(_built(runner, device, queries[0]))
        taken: dict[str, list[float]] = {name: [] for name in built}
        for query in [*queries[:WARM_UP], *queries]:
            for name, model in built.items():
                started = time.perf_counter()
                model.encode_query([query], show_progress_bar=False)  # on the CPU when it returns
                taken[name].append(1000 * (time.perf_counter() - started))
    finally:
        torch.set_num_threads(threads)
    names = [f"p{p}" for p in PERCENTILES]
    return {
        name: {
            **dict(zip(names, np.percentile(taken[name][WARM_UP:], PERCENTILES).tolist(), strict=True)),
            "dimension": model.get_embedding_dimension(),
            "queries": len(queries),
        }
        for name, model in built.items()
    }


def _built(runner: Runner, device: str, query: str) -> Iterator[tuple[str, Any]]:
    """The arms that this machine can run, by name."""
    lengths = {"query_length": QUERY_LENGTH, "document_length": runner.scale.search_length}
    for name, (model, quantize) in ARMS.items():
        built = build_aggretriever(runner.backbone("main"), **lengths, **model.options).float().to(device)
        if quantize != "none":
            if device != "cpu":
                continue
            pooling: Any = built[1]
            pooling.quantize = quantize
            try:
                built.encode_query([query], show_progress_bar=False)
            except ValueError as error:
                runner.say(f"{name} is left out: {error}")
                continue
        yield name, built


if __name__ == "__main__":
    table.main(make, measured)
