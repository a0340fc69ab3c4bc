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
    notes = (
        "AGG is 128 + 640 dimensions, CLS 768 (from mini of rank 192 at most, from splade-tiny 128, their widths), "
        "mean pooling the backbone's own width; the fusion's weight comes from the dev split of the training pairs.",
    )
    return Table(
        name="main",
        title="Table 1: AGG and CLS from each backbone",
        rows=rows,
        seeds=scale.seeds_main,
        collections=collections,
        published=published.MAIN,
        notes=notes,
    )


def controls(name: str, label: str) -> list[Row]:
    return [
        Row(name=f"{label}: AGG, untrained", model=Model(backbone=name, trained=False)),
        Row(name=f"{label}: mean pooling, cosine", model=Model(recipe="cosine", backbone=name)),
        Row(name=f"{label}: CLS + BM25", model=cls(name), fused=True),
        Row(name=f"{label}: AGG + BM25", model=agg(name), fused=True),
    ]


if __name__ == "__main__":
    table.main(make)
