"""Table 3: small training data, fractions of the pairs."""

from __future__ import annotations

from dataclasses import replace

import table
from arms import BM25, Row, Table, agg, cls
from scales import Scale


def make(scale: Scale) -> Table:
    rows = [Row(name="BM25", model=BM25)]
    for fraction in (*scale.fractions, 1.0):
        for name, model in (("AGG", agg()), ("CLS", cls())):
            rows.append(Row(name=f"{name}, {fraction * 100:g} %", model=replace(model, fraction=fraction)))
    return Table(
        name="small_data",
        title="Table 3: small training data",
        rows=rows,
        seeds=scale.seeds,
        collections=[c.name for c in scale.collections if scale.name != "full" or c.domain == "in-domain"],
        notes=(
            "A smaller share of the pairs is a part of every larger one.",
            "Settings and weights are chosen on the same dev split at every share; at 1 % it has more queries than the "
            "training pairs.",
        ),
    )


if __name__ == "__main__":
    table.main(make)
