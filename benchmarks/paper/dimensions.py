"""Table 7, the paper's Figure 4: each representation alone, by its dimensions; and section 3.2 without any training."""

from __future__ import annotations

from typing import Any

import table
import torch
from arms import Model, Row, Table, agg, cls
from fit import set_length, untrained
from runner import BATCH, Runner
from scales import Scale
from table import summary

from st_aggretriever.modules import SliceMaxAgg

WIDTHS = (128, 256, 768)
ANALYSED = (64, 128, 256, 512, 768, 1024)
QUERIES = 50
ORDERS = 3  # random ones of the vocabulary
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
    notes = [
        "Folded vectors are those of the 768-dimensional model, encoded once.",
        "Slices are strided: agg* puts neighbours in the vocabulary into one slice, agg+ ids D apart. So agg* against "
        "agg+ compares the sign's rule and which terms share a slice at once; section 3.2 below has both apart.",
    ]
    if scale.name == "mini":
        notes += [
            "A [CLS] part or mean wider than the backbone, 192, has no higher rank than that.",
            "mini has a vocabulary of 8,192, so that 128 dimensions compress it as 477 compress BERT's 30,522.",
            "CLS and AVERAGE see three times the pairs of the others in about the same time.",
        ]
    return Table(
        name="dimensions",
        title="Table 7: each representation alone",
        rows=rows,
        seeds=scale.seeds,
        collections=[c.name for c in scale.collections if scale.name != "full" or c.domain == "in-domain"],
        notes=tuple(notes),
    )


def analysis(runner: Runner, _: Table) -> list[dict[str, Any]]:
    """How dot products of folded lexical weights follow those of all of v, on the untrained backbone.

    Strided, agg* and agg+ put different terms together; over random orders of the vocabulary, the same for both, what
    differs is their rule alone.
    """
    queries, documents = lexical_weights(runner)
    size = queries.shape[1]
    shuffled = [torch.randperm(size, generator=torch.Generator().manual_seed(seed)) for seed in range(ORDERS)]
    rows = []
    for slices, orders in (("", [torch.arange(size)]), (", random slices", shuffled)):
        for width in ANALYSED:
            for name, aggregation in SIGNS.items():
                found = [compared(queries[:, order], documents[:, order], width, aggregation) for order in orders]
                cells = {column: summary([figures[column] for figures in found]) for column in found[0]}
                series = name + slices
                rows.append({"name": f"{series}, {width}", "series": series, "width": width, "cells": cells})
    title = (
        f"Section 3.2, untrained {runner.scale.labels['main']}: products of folded weights against v . v, "
        f"V = {size:,}, {len(queries)} queries x {len(documents)} documents, those judged relevant to them and the "
        "collection's first. Error and bias: mean |difference| and mean difference over mean v . v. Rank correlation: "
        "Spearman's, the mean over queries. Misaligned: share of products of two different terms, and their share of "
        "all magnitude. Strided slices put neighbours in the vocabulary, which are about as frequent, into one slice "
        f"of agg*, and ids D apart into one of agg+; random ones are the same for both, mean and deviation over "
        f"{ORDERS} orders."
    )
    columns = list(rows[0]["cells"])
    heading = f"section 3.2: rank correlation with v . v, untrained {runner.scale.labels['main']}"
    return [{"title": title, "columns": columns, "rows": rows, "plots": {"rank correlation": heading}}]


def lexical_weights(runner: Runner) -> tuple[torch.Tensor, torch.Tensor]:
    """(Q, V) of the first collection's first queries, (N, V) of the documents judged relevant to them and its first."""
    collection = next(iter(runner.collections.values()))
    model = untrained(Model(trained=False), runner.backbone("main"), runner.scale, 0)
    set_length(model, runner.scale.search_length)
    texts, qrels = runner._judged(collection)
    asked = list(texts)[:QUERIES]
    relevant = {key for query in asked for key, grade in qrels[query].items() if grade > 0}
    first = runner.scale.analysis_texts
    documents = [
        text for place, (key, text) in enumerate(runner._corpus(collection)()) if place < first or key in relevant
    ]
    options: dict[str, Any] = {"output_value": "lexical_weights", "batch_size": BATCH, "show_progress_bar": False}
    return tuple(  # type: ignore[return-value]
        torch.stack([torch.as_tensor(weights).float().cpu() for weights in encode(some, **options)])
        for encode, some in ((model.encode_query, [texts[query] for query in asked]),
                             (model.encode_document, documents))
    )  # fmt: skip


def compared(queries: torch.Tensor, documents: torch.Tensor, width: int, aggregation: str) -> dict[str, float]:
    """Figures of one width; queries (Q, V), documents (N, V), in the order in which they are sliced."""
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
        "bias": float((scores - exact).mean() / exact.mean()),
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
