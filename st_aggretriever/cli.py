"""The ``st-aggretriever`` command: thin, one function a subcommand, heavy imports inside the functions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 done, 2 bad input, 130 interrupted)."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars go by it too
    try:
        args.function(args)
    except KeyboardInterrupt as interrupt:
        print(f"st-aggretriever: {interrupt or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe (head, less) has gone; keep Python's shutdown from complaining about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("ST_AGGRETRIEVER_TRACEBACK"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"st-aggretriever: {message}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="st-aggretriever", description="Train, search with and evaluate Aggretriever models."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_evaluate(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction) -> None:
    from dataclasses import MISSING, fields
    from typing import get_type_hints

    from st_aggretriever.training import TrainConfig

    train = commands.add_parser(
        "train",
        help="train a model on pairs",
        description="Train an Aggretriever on question/passage pairs. Meanwhile checkpoints lie in OUTPUT.partial; "
        "OUTPUT appears as a whole at the end, with settings, data and losses in its train.json.",
    )
    hints = get_type_hints(TrainConfig)
    for option in fields(TrainConfig):
        shown = option.metadata.get("shown")
        help = option.metadata["help"].replace("%", "%%") + (f" (default: {shown})" if shown not in (None, "") else "")
        keywords: dict[str, Any] = {"help": help, "default": option.default}
        if option.default is MISSING:
            keywords = {"help": help, "required": True}
        kinds = [kind for kind in (int, float, bool) if kind in (hints[option.name], *get_args(hints[option.name]))]
        if bool in kinds:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords |= {"type": kinds[0] if kinds else str, "choices": option.metadata.get("choices")}
            if hints[option.name] == list[str]:
                keywords["nargs"] = "+"
        train.add_argument(f"--{option.name.replace('_', '-')}", **keywords)
    train.set_defaults(function=_train)


def _train(args: argparse.Namespace) -> None:
    from st_aggretriever.training import TrainConfig, train

    config = TrainConfig(**{name: value for name, value in vars(args).items() if name != "function"})
    model = train(config)
    print(f"wrote {config.output}: {model.get_embedding_dimension()} dimensions; settings and losses in train.json")


def _add_evaluate(commands: argparse._SubParsersAction) -> None:
    evaluate = commands.add_parser("evaluate", help="evaluate a model on a benchmark")
    benchmarks = evaluate.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_beir(benchmarks)


def _add_beir(benchmarks: argparse._SubParsersAction) -> None:
    beir = benchmarks.add_parser(
        "beir",
        help="a folder in BEIR's layout",
        description="Encode, search exactly, score by trec_eval's rules: nDCG@10, RR@10, R@100, R@1000, MAP.",
    )
    beir.add_argument(
        "--model", required=True, metavar="M", help="folder or Hub id of any sentence-transformers model; or bm25"
    )
    beir.add_argument(
        "--data", required=True, metavar="FOLDER", help="holds corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv"
    )
    beir.add_argument("--split", default="test", help="which qrels (default: %(default)s)")
    beir.add_argument("--run", metavar="FILE", help="write the run here, in TREC format")
    beir.add_argument("--output", metavar="FILE", help="write figures, rules, counts and versions here, as JSON")
    beir.add_argument("--overwrite", action="store_true", help="replace the files of --run and --output")
    beir.add_argument("--top-k", type=int, default=1000, metavar="K", help="depth of the run (default: %(default)s)")
    beir.add_argument("--batch-size", type=int, default=32, metavar="N", help="texts a batch (default: %(default)s)")
    beir.add_argument(
        "--block-size", type=int, default=50_000, metavar="N", help="documents in memory (default: %(default)s)"
    )
    beir.add_argument(
        "--backend", choices=("auto", "faiss", "torch"), default="auto", help="search by (default: %(default)s)"
    )
    beir.add_argument("--device", help="where the model runs, for instance cpu or cuda:0 (default: a GPU if any)")
    beir.add_argument(
        "--keep-identical-ids", action="store_true", help="keep a document whose id is the query's (default: drop it)"
    )
    beir.add_argument("--trust-remote-code", action="store_true", help="run the model's own code if it needs to")
    beir.set_defaults(function=_evaluate_beir)


def _evaluate_beir(args: argparse.Namespace) -> None:
    from st_aggretriever.evaluation.beir import check_outputs, evaluate_beir, format_result
    from st_aggretriever.evaluation.bm25 import evaluate_bm25

    check_outputs(args.run, args.output, args.overwrite)  # before the model loads
    options = {
        "split": args.split,
        "top_k": args.top_k,
        "run": args.run,
        "output": args.output,
        "overwrite": args.overwrite,
        "drop_identical_ids": not args.keep_identical_ids,
    }
    if args.model == "bm25":
        result = evaluate_bm25(args.data, **options)
    else:
        result = evaluate_beir(
            _load_model(args.model, args.device, args.trust_remote_code),
            args.data,
            batch_size=args.batch_size,
            block_size=args.block_size,
            backend=args.backend,
            model_name=args.model,
            **options,
        )
    print(format_result(result))
    for what, path in (("run", args.run), ("figures", args.output)):
        if path:
            print(f"{what} written to {path}")


def _load_model(name: str, device: str | None, trust_remote_code: bool) -> SentenceTransformer:
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


if __name__ == "__main__":
    sys.exit(main())
