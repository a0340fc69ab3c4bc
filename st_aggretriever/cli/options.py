"""What subcommands share: options that mean the same everywhere, and the model that --model names."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def add_model(parser: argparse.ArgumentParser, *, bm25: bool = False) -> None:
    """--model, and how it is loaded and run: --batch-size, --device, --trust-remote-code."""
    also = "; or bm25" if bm25 else ""
    parser.add_argument(
        "--model", required=True, metavar="M", help=f"folder or Hub id of any sentence-transformers model{also}"
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="texts a batch (default: %(default)s)")
    parser.add_argument("--device", help="where the model runs, for instance cpu or cuda:0 (default: a GPU if any)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code if it needs to")


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


def say_written(**paths: str | None) -> None:
    """One line for each file that was asked for."""
    for what, path in paths.items():
        if path:
            print(f"{what} written to {path}")


def load_model(name: str, device: str | None, trust_remote_code: bool) -> SentenceTransformer:
    """An Aggretriever by this package's own classes, which need no trust; any other model as it asks for."""
    from pathlib import Path

    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import load_file_path

    from st_aggretriever.model import load_aggretriever

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} can't be used here: {str(error).splitlines()[0]}") from None
    modules = load_file_path(name, "modules.json")
    if modules is not None and "st_aggretriever" not in Path(modules).read_text(encoding="utf-8"):
        return SentenceTransformer(name, device=device, trust_remote_code=trust_remote_code)
    # Without modules.json too: its sentence says more than a mean pooling that nobody asked for would.
    return load_aggretriever(name, device=device)
