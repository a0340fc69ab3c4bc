"""Table 9: sparse retrievers from the same backbone and pairs."""

from __future__ import annotations

import published
import table
from arms import BM25, Model, Row, Table, agg, cls
from scales import Scale


def make(scale: Scale) -> Table:
    rows = [
        Row(name="BM25", model=BM25),
        Row(
            name="SPLADE-max",
            model=Model(recipe="splade"),
            note="sentence-transformers' SparseEncoder and SpladeLoss, regularised by the weights of its documentation",
        ),
        Row(
            name="uniCOIL, no expansion",
            model=agg(pooling="tokens", aggregation="none", cls_dim=0),
            note="a weight for each of the text's own tokens, [SEP] among them as in AGG, abs where uniCOIL has a ReLU",
        ),
        Row(name="AGG", model=agg()),
        Row(name="AGG, no MLM head", model=agg(pooling="tokens")),
        Row(name="CLS", model=cls()),
    ]
    return Table(
        name="sparse",
        title="Table 9: sparse retrievers",
        rows=rows,
        seeds=scale.seeds,
        collections=[c.name for c in scale.collections if not c.questions],
        published=published.SPARSE,
        notes=("Sparse vectors are searched exactly, over all of the vocabulary.",),
    )


if __name__ == "__main__":
    table.main(make)
