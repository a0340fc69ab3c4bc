"""Table 4: before and after further training with negatives from the first 200 of the model's own ranking."""

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

    def passages(negatives: int) -> int:
        return scale.further_batch_size * (1 + negatives)

    steps = f"{scale.further_steps:,} steps" if scale.further_steps else f"{scale.further_epochs:g} epochs"
    return Table(
        name="hard_negatives",
        title="Table 4: hard negatives",
        rows=rows,
        seeds=scale.seeds,
        collections=[c.name for c in scale.collections if scale.name != "full" or c.domain == "in-domain"],
        published=published.HARD_NEGATIVES,
        notes=(
            f"Further training: {steps} of {scale.further_batch_size} pairs, from each seed's own plain model.",
            f"A query is compared with {passages(scale.further_negatives)} passages where there are hard negatives, "
            f"with {passages(scale.negatives or 0)} on the same pairs: the difference of the two is that of their "
            "hardness, and of their number where it differs.",
        ),
    )


if __name__ == "__main__":
    table.main(make)
