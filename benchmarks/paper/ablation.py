"""Table 6: what each piece of AGG (128 + 640) adds."""

from __future__ import annotations

import published
import table
from arms import Table, agg, rows_of
from scales import Scale


def make(scale: Scale) -> Table:
    rows = rows_of(
        {
            "AGG (agg*)": agg(),
            "agg+": agg(aggregation="positive"),
            "slice mean": agg(aggregation="mean"),
            "learned linear projection": agg(aggregation="linear"),
            "no MLM head": agg(pooling="tokens"),
            "AVERAGE": agg(pooling="mean"),
            "AVERAGE + CLS": agg(pooling="mean+cls"),
            "unpruned lexical weights": agg(aggregation="none"),
            "random slices": agg(slicing="random"),
            "identity instead of abs": agg(term_weight="identity"),
            "without [SEP] in the max": agg(excluded_tokens="special"),
        }
    )
    notes = [
        "All rows have the [CLS] part of 128 dimensions but AVERAGE; unpruned lexical weights have one dimension a "
        "term beside it.",
        "Slices are strided: agg* puts neighbours in the vocabulary into one slice, agg+ ids D apart. So agg* against "
        "agg+ compares the sign's rule and which terms share a slice at once; dimensions.py has both apart, without "
        "training.",
    ]
    if scale.name == "mini":
        notes += [
            "Rows without the MLM head see three times the pairs of the others in about the same time: they are "
            "compared with AGG after equal time, not after equal pairs.",
        ]
    return Table(
        name="ablation",
        title="Table 6: ablation",
        rows=rows,
        seeds=scale.seeds,
        collections=[c.name for c in scale.collections if scale.name != "full" or c.domain == "in-domain"],
        published=published.ABLATION,
        notes=tuple(notes),
    )


if __name__ == "__main__":
    table.main(make)
