"""The subcommand that mines hard negatives: mine."""

from __future__ import annotations

import argparse

from st_aggretriever.cli.options import add_backend, add_model, load_model


def add_mine(commands: argparse._SubParsersAction) -> None:
    mine = commands.add_parser(
        "mine",
        help="mine hard negatives for training",
        description="Search, by inner product and exactly, or by BM25, for the passages that rank high for a training "
        "query and are none of its positives, by id and by text. train --pairs FILE --negatives N then draws N of them "
        "anew for each epoch. Meanwhile the vectors lie in OUTPUT.partial, from which the same command goes on.",
    )
    add_model(mine, bm25=True)
    mine.add_argument(
        "--data", nargs="+", required=True, metavar="PATH", help="training data, as train --pairs takes them"
    )
    mine.add_argument(
        "--corpus",
        metavar="PATH",
        help="collection or BEIR folder to mine from (default: the data's own collection, or all passages of its rows)",
    )
    mine.add_argument("--output", required=True, metavar="FILE", help="jsonl that train --pairs takes; must not exist")
    mine.add_argument("--split", default="train", help="of folders and Hub datasets (default: %(default)s)")
    mine.add_argument(
        "--depth", type=int, default=200, metavar="K", help="hits a query that are no positives (default: %(default)s)"
    )
    mine.add_argument(
        "--ranks", nargs=2, type=int, metavar=("FIRST", "LAST"), help="keep these of them (default: 1 to the depth)"
    )
    margin = mine.add_mutually_exclusive_group()
    margin.add_argument(
        "--margin", type=float, metavar="X", help="keep scores of at most the positive's minus X (default: all)"
    )
    margin.add_argument(
        "--relative-margin",
        type=float,
        metavar="R",
        help="keep scores of at most the positive's minus R times its absolute value, for instance 0.05 (default: all)",
    )
    mine.add_argument(
        "--negatives",
        type=int,
        default=1,
        metavar="N",
        help="how many training will draw: a row with fewer candidates is an error (default: %(default)s)",
    )
    mine.add_argument("--drop-short", action="store_true", help="leave such rows out instead")
    mine.add_argument(
        "--max-bad-rows", type=int, default=0, metavar="N", help="broken rows to leave out (default: %(default)s)"
    )
    add_backend(mine)
    mine.set_defaults(function=_mine)


def _mine(args: argparse.Namespace) -> None:
    from st_aggretriever.atomic import check_output
    from st_aggretriever.mining import MiningSettings, mine
    from st_aggretriever.readers.training import open_training_data

    settings = MiningSettings(
        depth=args.depth,
        ranks=tuple(args.ranks) if args.ranks else None,
        margin=args.margin,
        relative_margin=args.relative_margin,
        negatives=args.negatives,
        drop_short=args.drop_short,
    )
    check_output(args.output)  # before anything is read
    data = open_training_data(args.data, negatives=0, split=args.split, max_bad_rows=args.max_bad_rows)
    bm25 = args.model == "bm25"
    model = None if bm25 else load_model(args.model, args.device, args.trust_remote_code, args.quantize)
    try:
        manifest = mine(
            model,
            data,
            args.output,
            settings=settings,
            model_name=args.model,
            corpus=args.corpus,
            batch_size=args.batch_size,
            backend=args.backend,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; what is done stays in {args.output}.partial, the same command goes on"
        ) from None
    print(
        f"wrote {args.output}: {manifest['rows']:,} rows of {manifest['queries']:,} queries, from "
        f"{manifest['documents']:,} documents by {manifest['model']}, depth {manifest['depth']}"
    )
    if manifest["dropped_rows"]:
        print(f"left out, with fewer than {manifest['negatives']} candidates: {manifest['dropped_rows']:,} rows")
