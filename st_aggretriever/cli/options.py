"""What subcommands share: options that mean the same everywhere, and the model that --model names."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def add_model(
    parser: argparse.ArgumentParser,
    *,
    kind: str = "any sentence-transformers model",
    bm25: bool = False,
    quantize: bool = True,
) -> None:
    """--model, and how it is loaded and run: --batch-size, --device, --trust-remote-code, --quantize."""
    also = "; or bm25" if bm25 else ""
    parser.add_argument("--model", required=True, metavar="M", help=f"folder or Hub id of {kind}{also}")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="texts a batch (default: %(default)s)")
    parser.add_argument("--device", help="where the model runs, for instance cpu or cuda:0 (default: a GPU if any)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code if it needs to")
    if quantize:
        parser.add_argument(
            "--quantize",
            choices=("none", "int8", "bf16"),
            help="compute an Aggretriever's vocabulary product in fewer bits; int8 on a CPU only (default: as saved)",
        )


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """--query-length and --document-length of an evaluation."""
    for side in ("query", "document"):
        help = (
            f"cut a {side} after so many tokens (default: the model's own, 32 for a query, 128 for a document as built)"
        )
        parser.add_argument(f"--{side}-length", type=int, metavar="N", help=help)


def add_shape(parser: argparse.ArgumentParser) -> None:
    """--lexical-dim, and --windows with --overlap and --window-cls: other vectors from the same model."""
    parser.add_argument(
        "--lexical-dim", type=int, metavar="D", help="fold an Aggretriever's lexical part to D, a divisor of its own"
    )
    parser.add_argument(
        "--windows", type=int, metavar="N", help="read an Aggretriever's whole documents, N tokens at a time"
    )
    parser.add_argument("--overlap", type=int, metavar="N", help="tokens that two windows share (default: 32)")
    parser.add_argument(
        "--window-cls", choices=("first", "mean"), help="[CLS] part of a document in windows (default: first)"
    )


def shaped(model: SentenceTransformer, args: argparse.Namespace) -> Any:
    """The model with the vectors that :func:`add_shape`'s options ask for."""
    if args.windows is None and (args.overlap is not None or args.window_cls is not None):
        raise ValueError("--overlap and --window-cls belong to --windows.")
    result: Any = model
    if args.windows is not None:
        from st_aggretriever.windows import Windowed

        overlap = 32 if args.overlap is None else args.overlap
        result = Windowed(result, window=args.windows, overlap=overlap, cls=args.window_cls or "first")
    if args.lexical_dim is not None:
        from st_aggretriever.folding import Folded

        result = Folded(result, args.lexical_dim)
    return result


def add_backend(parser: argparse.ArgumentParser) -> None:
    """--backend of exact search."""
    parser.add_argument(
        "--backend", choices=("auto", "faiss", "torch"), default="auto", help="search by (default: %(default)s)"
    )


def add_results(parser: argparse.ArgumentParser, *, top_k: int) -> None:
    """--run, --output, --overwrite and --top-k of an evaluation."""
    parser.add_argument("--run", metavar="FILE", help="write the run here")
    parser.add_argument("--output", metavar="FILE", help="write figures, rules, counts and versions here, as JSON")
    parser.add_argument("--overwrite", action="store_true", help="replace the files of --run and --output")
    parser.add_argument(
        "--top-k", type=int, default=top_k, metavar="K", help="hits a query in the run (default: %(default)s)"
    )


def evaluation_options(args: argparse.Namespace) -> dict[str, Any]:
    """What add_model, add_results and add_backend ask for, by the names that the benchmarks take."""
    names = ("top_k", "batch_size", "run", "output", "overwrite", "backend")
    return {name: getattr(args, name) for name in names} | {"model_name": args.model}


def say_written(**paths: str | None) -> None:
    """One line for each file that was asked for."""
    for what, path in paths.items():
        if path:
            print(f"{what} written to {path}")


def load_for_evaluation(args: argparse.Namespace) -> SentenceTransformer | None:
    """What --model names, with the lengths that were asked for; None for bm25."""
    from st_aggretriever.evaluation.lengths import set_lengths

    if args.model == "bm25":
        if args.query_length is not None or args.document_length is not None:
            raise ValueError("--query-length and --document-length: bm25 reads whole texts. Leave them out.")
        if any(getattr(args, name, None) is not None for name in ("lexical_dim", "windows", "overlap", "window_cls")):
            raise ValueError(
                "--lexical-dim, --windows, --overlap and --window-cls: bm25 has no vectors. Leave them out."
            )
        if getattr(args, "quantize", None):
            raise ValueError("--quantize: bm25 has no vocabulary product. Leave it out.")
        return None
    if args.document_length is not None and getattr(args, "windows", None) is not None:
        raise ValueError("--document-length: --windows reads whole documents, a window at a time. Give one of them.")
    model = load_model(args.model, args.device, args.trust_remote_code, args.quantize)
    set_lengths(model, args.query_length, args.document_length)
    return shaped(model, args) if hasattr(args, "lexical_dim") else model


def load_model(
    name: str, device: str | None, trust_remote_code: bool, quantize: str | None = None
) -> SentenceTransformer:
    """An Aggretriever by this package's own classes, which need no trust; any other model as it asks for."""
    import json
    from pathlib import Path

    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import load_file_path

    from st_aggretriever.model import load_aggretriever

    try:
        torch.empty(0, device=device).cpu()  # "meta" has no numbers
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} can't be used here: {str(error).splitlines()[0]}") from None
    if Path(name).is_file():
        raise ValueError(f"--model {name} is a file: expected a model's folder or Hub id.")
    modules = load_file_path(name, "modules.json")
    if modules is not None:
        try:
            entries = json.loads(Path(modules).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"--model {name}: {modules} is broken ({error}). Save or fetch the model again.") from None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"--model {name}: {modules} holds no list of modules. Save or fetch the model again.")
    if modules is not None and "st_aggretriever" not in Path(modules).read_text(encoding="utf-8"):
        if quantize not in (None, "none"):
            raise ValueError(f"--quantize is for an Aggretriever, and {name} is none. Leave it out.")
        return SentenceTransformer(name, device=device, trust_remote_code=trust_remote_code)
    if modules is None and not Path(name).is_dir() and load_file_path(name, "config.json") is None:
        raise FileNotFoundError(
            f"--model {name}: there is no folder of that name, and no such model on the Hub in reach."
        )
    # Without modules.json too: its sentence says more than a mean pooling that nobody asked for would.
    return load_aggretriever(name, device=device, quantize=quantize)
