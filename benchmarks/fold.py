"""One encoding, many sizes: nDCG@10 and bytes of folded vectors, beside models trained natively at each D.

    python benchmarks/fold.py --model AGG --data FOLDER... --output DIR [--native AGG_320 AGG_160 ...]
        [--fold-aware AGG_FOLDED ...] [--plot fold.png]

Rows: the model's vectors folded to each D; folded from float16; cut to the same size by ``truncate_dim``; each model
of --fold-aware folded likewise; and each model of --native at its own D, in its column. Every model encodes once:
its vectors stay in DIR, and an interrupted run goes on. --check N encodes N documents anew at every divisor of D and
prints the largest difference from folding, which must be 0.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kept import content_of

from st_aggretriever import fold_embeddings, load_aggretriever
from st_aggretriever.evaluation.beir import evaluate_beir
from st_aggretriever.folding import fold_part, need_lexical_part
from st_aggretriever.readers.beir import read_corpus, read_queries

Change = Callable[[np.ndarray], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--native", nargs="*", default=[], type=Path, help="models of other D, each for its column")
    parser.add_argument("--fold-aware", nargs="*", default=[], type=Path, help="models whose loss was taken folded too")
    parser.add_argument("--data", nargs="+", required=True, type=Path, help="BEIR folders")
    parser.add_argument("--output", required=True, type=Path, help="vectors stay here")
    parser.add_argument("--dims", nargs="+", type=int, default=[640, 320, 160, 128, 64])
    parser.add_argument("--length", type=int, default=160, help="tokens of a document")
    parser.add_argument("--check", type=int, default=0, metavar="N")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    whole = Stored(args, args.model)
    rows: dict[str, dict[int, dict[str, float]]] = {
        "folded": whole.figures(args, {dim: whole.folded(dim) for dim in args.dims}),
        "folded from float16": whole.figures(args, {dim: whole.folded(dim, np.float16) for dim in args.dims}),
        "truncate_dim": whole.figures(args, {dim: whole.cut(dim) for dim in args.dims}),
    }
    for path in args.fold_aware:
        model = Stored(args, path)
        rows[f"fold-aware: {path.name}"] = model.figures(args, {dim: model.folded(dim) for dim in args.dims})
    native: dict[int, dict[str, float]] = {}
    for path in args.native:
        model = Stored(args, path)
        native |= model.figures(args, {model.part.width: lambda vectors: vectors})
    if native:
        rows["native"] = native

    sizes = {dim: 4 * (whole.part.start + dim) for dim in args.dims}
    for name in [*(folder.name for folder in args.data), "mean"]:
        print(f"{name + ', nDCG@10':28}" + "".join(f"{f'D = {dim}':>10}" for dim in args.dims))
        for row, figures in rows.items():
            print(f"{row:28}" + "".join(f"{figures[dim][name]:10.4f}" if dim in figures else f"{'-':>10}"
                                        for dim in args.dims))  # fmt: skip
    print(f"{'bytes a vector, float32':28}" + "".join(f"{sizes[dim]:10}" for dim in args.dims))
    half = whole.ambiguous(args.dims)
    print("float16: places where equal magnitudes of opposite sign meet, and that fold otherwise than float32:")
    print(", ".join(f"D = {dim} {met:,} and {other:,} of {places:,}" for dim, (met, other, places) in half.items()))
    differences = check(args) if args.check else {}
    if differences:
        print(f"{args.check} documents encoded anew at {len(differences)} divisors of D: largest difference "
              f"{max(differences.values()):.1e}")  # fmt: skip
    if args.plot:
        plot(args.plot, rows, sizes, ", ".join(folder.name for folder in args.data))
        print(f"curve written to {args.plot}")
    result = {
        "benchmark": "fold",
        "model": args.model.name,
        "nDCG@10": rows,
        "bytes": sizes,
        "float16": half,
        "differences": differences,
        "length": args.length,
        "versions": {
            name: version(name) for name in ("st-aggretriever", "torch", "transformers", "sentence-transformers")
        },
        "python": platform.python_version(),
    }
    print(json.dumps(result))


class Stored:
    """The vectors of one model for all texts of the collections, from disk if they were encoded before."""

    similarity_fn_name = "dot"

    def __init__(self, args: argparse.Namespace, path: Path) -> None:
        model = load(args, path)
        self.part = need_lexical_part(model, "benchmark")
        self.vectors: dict[tuple[str, str], np.ndarray] = {}
        self.documents: list[np.ndarray] = []
        self.change: Change = lambda vectors: vectors
        for folder in args.data:
            texts = {
                "query": list(read_queries(folder).values()),
                "document": [text for _, text in read_corpus(folder)],
            }
            for side, wanted in texts.items():
                file = args.output / f"{content_of(path)[:12]}-{folder.name}-{args.length}-{side}.npy"
                if not file.exists():
                    encode = model.encode_query if side == "query" else model.encode_document
                    np.save(file.with_suffix(".partial.npy"), encode(wanted, show_progress_bar=False))
                    file.with_suffix(".partial.npy").rename(file)
                encoded = np.load(file)
                self.vectors.update(((side, text), vector) for text, vector in zip(wanted, encoded, strict=True))
                if side == "document":
                    self.documents.append(encoded)

    def encode_query(self, texts: Sequence[str], **options: Any) -> np.ndarray:
        return self.change(np.stack([self.vectors["query", text] for text in texts]))

    def encode_document(self, texts: Sequence[str], **options: Any) -> np.ndarray:
        known = [self.vectors["document", text] for text in texts]
        return self.change(np.stack(known))

    def folded(self, dim: int, dtype: Any = np.float32) -> Change:
        return lambda vectors: fold_part(vectors.astype(dtype), self.part, dim)[0].astype(np.float32)

    def cut(self, dim: int) -> Change:
        return lambda vectors: np.ascontiguousarray(vectors[:, : self.part.start + dim])

    def figures(self, args: argparse.Namespace, changes: dict[int, Change]) -> dict[int, dict[str, float]]:
        """D -> collection -> nDCG@10, and the mean."""
        found = {}
        for dim, self.change in changes.items():
            row = {folder.name: evaluate_beir(self, folder, top_k=100)["figures"]["nDCG@10"] for folder in args.data}
            found[dim] = row | {"mean": sum(row.values()) / len(row)}
        return found

    def ambiguous(self, dims: Sequence[int]) -> dict[int, tuple[int, int, int]]:
        """D -> places of the documents that float16 makes ambiguous, that then fold otherwise, and all."""
        counts = {}
        for dim in dims:
            met = other = places = 0
            for vectors in self.documents:
                exact = fold_part(vectors, self.part, dim)[0].astype(np.float16)
                folded, count = fold_part(vectors.astype(np.float16), self.part, dim)
                met, other, places = met + (count or 0), other + int((exact != folded).sum()), places + len(exact) * dim
            counts[dim] = (met, other, places)
        return counts


def load(args: argparse.Namespace, path: Path) -> Any:
    model = load_aggretriever(path)
    model.max_seq_length = args.length
    return model


def check(args: argparse.Namespace) -> dict[int, float]:
    """Divisor of D -> largest difference between folding, and encoding the same documents at that D."""
    texts = [text for _, text in read_corpus(args.data[0])][: args.check]
    model = load(args, args.model)
    vectors = model.encode_document(texts)
    width = need_lexical_part(model, "benchmark").width
    differences = {}
    for dim in (number for number in range(1, width + 1) if width % number == 0):
        native = load(args, args.model)
        slices, last = native[2], native[-1]
        native[2] = type(slices)(slices.vocab_size, dim, aggregation=slices.aggregation, remainder=slices.remainder)
        last.dims = [
            dim if key == "lexical_embedding" else size for key, size in zip(last.keys, last.dims, strict=True)
        ]
        folded = fold_embeddings(vectors, dim, model=model)
        differences[dim] = float(abs(native.encode_document(texts) - folded).max())
    return differences


def plot(path: Path, rows: dict[str, dict[int, dict[str, float]]], sizes: dict[int, int], title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.8), dpi=150)
    looks = {"folded": ("o-", "#1b6ca8"), "truncate_dim": ("s--", "#b05a3c"), "native": ("D", "#3a7d44")}
    for name, figures in rows.items():
        if name == "folded from float16":
            continue  # on the curve above to within a line's width
        style, colour = looks.get(name, ("^-.", "#7a4fa3"))
        dims = [dim for dim in sizes if dim in figures]
        axes.plot([sizes[dim] for dim in dims], [figures[dim]["mean"] for dim in dims], style, color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes.values()), [f"{size:,}\nD {dim}" for dim, size in sizes.items()], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("bytes a vector, float32")
    axes.set_ylabel("nDCG@10")
    axes.set_ylim(bottom=0)
    axes.set_title(f"One encoding, smaller vectors: {title}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("st_aggretriever").setLevel(logging.ERROR)  # the same counts for every size
    main()
