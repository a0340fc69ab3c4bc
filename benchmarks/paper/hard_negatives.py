"""Table 4: before and after two more epochs with negatives from the first 200 of the model's own ranking."""

from __future__ import annotations

from dataclasses import replace

import published
import table
from arms import Row, Table, agg, cls
from scales import Scale


def make(scale: Scale) -> Table:
    rows = []
    for name, model in (("AGG", agg()), ("CLS", cls())):
        rows.append(Row(name=name, model=model))
        rows.append(Row(name=f"{name}, hard negatives", model=replace(model, further="hard")))
        rows.append(Row(name=f"{name}, further on the same pairs", model=replace(model, further="same")))
    steps = f"{scale.further_steps:,} steps" if scale.further_steps else f"{scale.further_epochs:g} epochs"
    return Table(
        name="hard_negatives",
        title="Table 4: hard negatives",
        rows=rows,
        seeds=scale.seeds,
        collections=[c.name for c in scale.collections if scale.name != "full" or c.domain == "in-domain"],
        published=published.HARD_NEGATIVES,
        notes=(f"Further training: {steps}, from each seed's own plain model.",),
    )


if __name__ == "__main__":
    table.main(make)
