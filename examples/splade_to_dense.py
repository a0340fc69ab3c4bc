"""Turn a SPLADE model into a dense one, without training, for a vector store that has no sparse index.

    python examples/splade_to_dense.py naver/splade-cocondenser-ensembledistil OUTPUT

The SPLADE weights of a text, `log(1 + relu(logit))` at their maximum over its tokens, are folded into D dimensions:
a slice of the vocabulary becomes its largest weight, with the sign of the half of the slice it came from. The score is
the dot product, as SPLADE's. It costs effectiveness: see benchmarks/splade_dense.py, which measures how much.

Any SPLADE checkpoint of the fill-mask layout will do, or a SparseEncoder's folder, with max pooling and one encoder for
queries and documents.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sentence_transformers import SentenceTransformer

from st_aggretriever import build_aggretriever


def splade_to_dense(
    splade: str, lexical_dim: int = 1280, query_length: int = 64, document_length: int = 256
) -> SentenceTransformer:
    """A dense model of ``lexical_dim`` dimensions; with as many as the vocabulary has entries it would be SPLADE."""
    return build_aggretriever(
        splade,
        activation="log1p_relu",
        term_weight="none",
        excluded_tokens="none",  # SPLADE's maximum takes [CLS] and [SEP] in
        cls_dim=0,
        lexical_dim=lexical_dim,
        query_length=query_length,
        document_length=document_length,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("splade", help="folder or Hub id of a SPLADE model")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--lexical-dim", type=int, default=1280, metavar="D", help="dimensions (default: %(default)s)")
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"{args.output} exists")

    model = splade_to_dense(args.splade, args.lexical_dim)
    queries = ["what makes bread rise?"]
    documents = ["Yeast makes the dough rise before it goes into the oven.", "The ship sails at night."]
    scores = model.similarity(model.encode_query(queries), model.encode_document(documents))
    for document, score in zip(documents, scores[0].tolist(), strict=True):
        print(f"{score:8.3f}  {document}")
    model.save_pretrained(str(args.output))
    size = model.get_embedding_dimension()
    print(f"wrote {args.output}: {size} dimensions, {4 * size:,} bytes a document in float32, {2 * size:,} in float16")


if __name__ == "__main__":
    main()
