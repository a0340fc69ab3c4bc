"""Table 2: zero-shot, set by set, and trained on one source alone."""

from __future__ import annotations

from dataclasses import replace

import published
import table
from arms import BM25, Model, Row, Table, agg, cls
from scales import Scale


def make(scale: Scale) -> Table:
    rows = [
        Row(name="BM25", model=BM25),
        Row(name="AGG", model=agg()),
        Row(name="CLS", model=cls()),
        Row(name="mean pooling, cosine", model=Model(recipe="cosine")),
    ]
    for source in [name for name in scale.sources if name != "msmarco"]:
        for name, model in (("AGG", agg()), ("CLS", cls())):
            rows.append(Row(name=f"{name}, trained on {source}", model=replace(model, source=source)))
    return Table(
        name="zero_shot",
        title="Table 2: zero-shot retrieval",
        rows=rows,
        seeds=scale.seeds,
        collections=[c.name for c in scale.collections if c.domain != "in-domain"],
        published=published.ZERO_SHOT,
    )


if __name__ == "__main__":
    table.main(make)
