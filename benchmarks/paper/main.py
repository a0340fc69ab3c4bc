"""Table 1: backbones x {[CLS], AGG}, beside BM25 and the controls."""

from __future__ import annotations

from dataclasses import replace

import published
import table
from arms import BM25, Model, Row, Table, agg, cls
from scales import Scale


def make(scale: Scale) -> Table:
    rows = [Row(name="BM25", model=BM25)]
    for name in scale.main_backbones:
        label = scale.labels[name]
        rows.append(Row(name=f"{label}: AGG", model=agg(name)))
        rows.append(Row(name=f"{label}: CLS", model=cls(name)))
        if name in scale.control_backbones:
            rows += controls(name, label)
        if name == "main" and scale.steps[0]:
            rows.append(Row(name=f"{label}: AGG, twice the steps", model=replace(agg(name), longer=2)))
            rows.append(Row(name=f"{label}: CLS, twice the steps", model=replace(cls(name), longer=2)))
    collections = [c.name for c in scale.collections if scale.name != "full" or c.domain == "in-domain"]
    if scale.name == "full":
        collections += ["NQ", "TQA"]
    notes = [
        "AGG is 128 + 640 dimensions, CLS 768, mean pooling the backbone's own width.",
        "The [CLS] part of AGG untrained is a random projection, and the larger part of its scores: the lexical part "
        "alone says what the head brings before any training.",
    ]
    if scale.name == "mini":
        notes += [
            "CLS from mini has rank 192 at most, from splade-tiny 128, their widths.",
            "splade-tiny is a BERT-tiny that was trained for retrieval on MS MARCO by its MLM head, which AGG keeps, "
            "while its [CLS] was trained for nothing. So its rows favour AGG, and untrained AGG from it is trained.",
        ]
    return Table(
        name="main",
        title="Table 1: AGG and CLS from each backbone",
        rows=rows,
        seeds=scale.seeds_main,
        collections=collections,
        published=published.MAIN,
        notes=tuple(notes),
    )


def controls(name: str, label: str) -> list[Row]:
    return [
        Row(name=f"{label}: AGG, untrained", model=Model(backbone=name, trained=False)),
        Row(name=f"{label}: AGG, untrained, lexical part", model=Model(backbone=name, trained=False), part="lexical"),
        Row(name=f"{label}: mean pooling, cosine", model=Model(recipe="cosine", backbone=name)),
        Row(name=f"{label}: CLS + BM25", model=cls(name), fused=True),
        Row(name=f"{label}: AGG + BM25", model=agg(name), fused=True),
    ]


if __name__ == "__main__":
    table.main(make)
