"""Table 7, the paper's Figure 4: each representation alone, by its dimensions; and section 3.2 without any training."""

from __future__ import annotations

from itertools import islice
from typing import Any

import table
import torch
from arms import Model, Row, Table, agg, cls
from fit import set_length, untrained
from runner import BATCH, Runner
from scales import Scale

from st_aggretriever.modules import SliceMaxAgg

WIDTHS = (128, 256, 768)
ANALYSED = (64, 128, 256, 512, 768, 1024)
QUERIES = 50
SIGNS = {"agg+": "positive", "agg*": "signed"}


def make(scale: Scale) -> Table:
    rows = []
    for width in WIDTHS:
        alone: dict[str, Any] = {"cls_dim": 0, "lexical_dim": width}
        rows.append(Row(name=f"CLS, {width}", model=cls(width=width)))
        rows.append(Row(name=f"agg*, {width}", model=agg(**alone)))
        rows.append(Row(name=f"agg+, {width}", model=agg(**alone, aggregation="positive")))
        rows.append(Row(name=f"linear, {width}", model=agg(**alone, aggregation="linear")))
        rows.append(Row(name=f"AVERAGE, {width}", model=agg(**alone, pooling="mean")))
        if width < WIDTHS[-1]:
            widest = agg(cls_dim=0, lexical_dim=WIDTHS[-1])
            rows.append(Row(name=f"agg* folded from {WIDTHS[-1]}, {width}", model=widest, fold=width))
    return Table(
        name="dimensions",
        title="Table 7: each representation alone",
        rows=rows,
        seeds=scale.seeds,
        collections=[c.name for c in scale.collections if scale.name != "full" or c.domain == "in-domain"],
        notes=(
            "Folded vectors are those of the 768-dimensional model, encoded once.",
            "A [CLS] part or mean wider than the backbone (192 for mini) has no higher rank than that.",
        ),
    )


def analysis(runner: Runner, _: Table) -> list[dict[str, Any]]:
    """How dot products of folded lexical weights follow those of all of v, on the untrained backbone."""
    queries, documents = lexical_weights(runner)
    rows = []
    for width in ANALYSED:
        for name, aggregation in SIGNS.items():
            found = compared(queries, documents, width, aggregation)
            cells = {column: {"mean": value, "sd": None, "n": 1} for column, value in found.items()}
            rows.append({"name": f"{name}, {width}", "series": name, "width": width, "cells": cells})
    title = (
        f"Section 3.2, untrained {runner.scale.labels['main']}: products of folded weights against v . v, "
        f"{len(queries)} queries x {len(documents)} documents. Relative error: mean |difference| / mean v . v. Rank "
        "correlation: Spearman's, the mean over queries. Misaligned: share of products of two different terms, and "
        "their share of all magnitude."
    )
    columns = list(rows[0]["cells"])
    return [{"title": title, "columns": columns, "rows": rows, "plot": "rank correlation"}]


def lexical_weights(runner: Runner) -> tuple[torch.Tensor, torch.Tensor]:
    """(Q, V) and (N, V) of the first collection's first texts."""
    collection = next(iter(runner.collections.values()))
    model = untrained(Model(trained=False), runner.backbone("main"), runner.scale, 0)
    set_length(model, runner.scale.search_length)
    queries = list(runner._judged(collection)[0].values())[:QUERIES]
    documents = [text for _, text in islice(runner._corpus(collection)(), runner.scale.analysis_texts)]
    options: dict[str, Any] = {"output_value": "lexical_weights", "batch_size": BATCH, "show_progress_bar": False}
    return tuple(  # type: ignore[return-value]
        torch.stack([torch.as_tensor(weights) for weights in encode(texts, **options)])
        for encode, texts in ((model.encode_query, queries), (model.encode_document, documents))
    )


def compared(queries: torch.Tensor, documents: torch.Tensor, width: int, aggregation: str) -> dict[str, float]:
    """Figures of one width; queries (Q, V), documents (N, V)."""
    from scipy.stats import spearmanr

    fold = SliceMaxAgg(queries.shape[1], width, aggregation=aggregation)
    exact = queries @ documents.T  # (Q, N)
    left, right = fold.aggregate(queries), fold.aggregate(documents)
    scores = left @ right.T
    both = zip(exact.tolist(), scores.tolist(), strict=True)
    correlation = [float(spearmanr(one, two).statistic) for one, two in both]
    misaligned = total = mass = 0.0
    terms = winners(documents, width, aggregation)
    for row, own in zip(left, winners(queries, width, aggregation), strict=True):
        products = (row * right).abs()  # (N, D)
        other = own != terms
        misaligned += float(other.sum())
        total += other.numel()
        mass += float((products * other).sum())
    everything = float((left.abs() @ right.abs().T).sum())
    return {
        "relative error": float((scores - exact).abs().mean() / exact.mean()),
        "rank correlation": sum(correlation) / len(correlation),
        "misaligned products": misaligned / total,
        "misaligned, by magnitude": mass / everything,
    }


def winners(weights: torch.Tensor, width: int, aggregation: str) -> torch.Tensor:
    """The term behind each slice, (B, V) to (B, D)."""
    halves = 2 if aggregation == "signed" else 1
    period = halves * width
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % period), value=-torch.inf)
    ids = torch.arange(padded.shape[1]).view(-1, width, halves).transpose(0, 1).flatten(1)  # (D, terms of a slice)
    best = padded[:, ids].argmax(-1)  # (B, D)
    return ids.expand(len(weights), -1, -1).gather(2, best.unsqueeze(2)).squeeze(2)


if __name__ == "__main__":
    table.main(make, analysis)
