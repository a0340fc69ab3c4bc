"""The subcommands over models: convert, inspect."""

from __future__ import annotations

import argparse
import sys


def add_convert(commands: argparse._SubParsersAction) -> None:
    convert = commands.add_parser(
        "convert",
        help="convert a published checkpoint, or back",
        description="Turn a published Aggretriever (the layouts of castorini/aggretriever-* and of "
        "jacklin/DistilBERT-AGG, recognised by content) into a model of this package with equal vectors. With --to "
        "castorini the other way: any model whose settings the published encoder class can express.",
    )
    convert.add_argument("source", metavar="SOURCE", help="folder or Hub id")
    convert.add_argument("output", metavar="OUTPUT", help="folder to write; it must not exist, or be empty")
    convert.add_argument("--to", choices=("st", "castorini"), default="st", help="layout (default: %(default)s)")
    convert.add_argument(
        "--pooling",
        choices=("mlm", "tokens"),
        help="tokens: the published variant without MLM head, skip_mlm (default: mlm)",
    )
    convert.add_argument("--lexical-dim", type=int, metavar="D", help="as trained; no file records it (default: 640)")
    convert.add_argument("--revision", help="branch, tag or commit of a Hub id")
    convert.set_defaults(function=_convert)


def _convert(args: argparse.Namespace) -> None:
    from st_aggretriever.convert import check_new_folder, convert_checkpoint, licence_of, local_folder, save_castorini
    from st_aggretriever.convert.castorini import name_warning
    from st_aggretriever.model import load_aggretriever

    where = {"revision": args.revision} if args.revision else {}
    if args.to == "castorini":
        if args.pooling or args.lexical_dim:
            raise ValueError("convert: --pooling and --lexical-dim are for --to st; a model has its own.")
        check_new_folder(args.output)
        model = load_aggretriever(args.source, device="cpu", **where)
        licence = licence_of(local_folder(args.source, **where))
        save_castorini(model, args.output, licence)
        warning = name_warning(model, args.output)
        if warning:
            print(f"st-aggretriever: {warning}", file=sys.stderr)
    else:
        options = {"pooling": args.pooling, "lexical_dim": args.lexical_dim}
        given = {name: value for name, value in options.items() if value is not None}
        model = convert_checkpoint(args.source, args.output, **given, **where)
        licence = licence_of(local_folder(args.source, **where))
    print(f"wrote {args.output}: {model.get_embedding_dimension()} dimensions, layout {args.to}")
    print(f"licence: {licence}")


def add_inspect(commands: argparse._SubParsersAction) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="say what a model is, and check it",
        description="Backbone, head, dimensions, pooling, lengths, licence, the code that the model carries, and "
        "checks: tie, finite weights, a sample vector alone and in a padded batch. Exits with 2 if a check fails.",
    )
    inspect.add_argument("model", metavar="PATH", help="folder or Hub id")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(function=_inspect)


def _inspect(args: argparse.Namespace) -> None:
    import json

    from st_aggretriever.inspection import failed_checks, format_report, inspect_model

    report = inspect_model(args.model)
    print(json.dumps(report, indent=2) if args.json else format_report(report))
    failed = failed_checks(report)
    if failed:
        raise ValueError(f"inspect: {args.model} fails {' and '.join(failed)}.")
