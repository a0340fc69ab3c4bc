"""Table 5: how 768 dimensions are split between [CLS] and words."""

from __future__ import annotations

import published
import table
from arms import Row, Table, agg, cls
from scales import Scale

SPLITS = ((0, 768), (128, 640), (256, 512), (384, 384), (512, 256))


def make(scale: Scale) -> Table:
    rows = [Row(name=f"{c} + {d}", model=agg(cls_dim=c, lexical_dim=d)) for c, d in SPLITS if c != 128]
    rows.insert(1, Row(name="128 + 640", model=agg()))
    rows.append(Row(name="768 + 0", model=cls()))
    rows.append(Row(name="128 + 640, [CLS] part alone", model=agg(), part="cls"))
    rows.append(Row(name="128 + 640, lexical part alone", model=agg(), part="lexical"))
    return Table(
        name="balance",
        title="Table 5: [CLS] and lexical dimensions, 768 in all",
        rows=rows,
        seeds=scale.seeds,
        collections=[c.name for c in scale.collections if scale.name != "full" or c.domain == "in-domain"],
        published=published.BALANCE,
        notes=(
            "The parts alone are columns of the same vectors.",
            "A [CLS] part or mean wider than the backbone (192 for mini) has no higher rank than that.",
        ),
    )


if __name__ == "__main__":
    table.main(make)
