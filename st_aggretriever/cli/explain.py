"""The subcommand that explains: explain."""

from __future__ import annotations

import argparse

from st_aggretriever.cli.options import add_model, load_model, say_written

MOST = 50  # passages on a page
# Options that belong to --run, and their defaults.
OF_A_RUN = {"split": "test", "against": "bm25", "metric": "nDCG@10", "keep_identical_ids": False, "lost": 10}


def add_explain(commands: argparse._SubParsersAction) -> None:
    explain = commands.add_parser(
        "explain",
        help="say which terms stand behind a score",
        description="Take scores apart: the [CLS] part, which isn't explained, and each lexical dimension with the two "
        "terms that met there and the words they came from. With --query and --docs the best documents for the query; "
        "with one of them a text's own terms; with --run and --data the queries that an evaluation lost, and why.",
    )
    add_model(explain, kind="an Aggretriever", quantize=False)
    explain.add_argument("--query", metavar="TEXT", help="the query")
    explain.add_argument(
        "--docs", metavar="FILE", help="documents: lines of text, jsonl, .tsv (id<tab>text), or a BEIR folder"
    )
    explain.add_argument("--ids", nargs="+", metavar="ID", help="these documents (default: the best for the query)")
    explain.add_argument(
        "--top-k", type=int, default=5, metavar="K", help=f"documents, up to {MOST} (default: %(default)s)"
    )
    explain.add_argument(
        "--index", metavar="DIR", help="explain these vectors of the documents, written by encode, and find them there"
    )
    explain.add_argument("--run", metavar="FILE", help="a run of the model in TREC's format")
    explain.add_argument("--data", metavar="FOLDER", help="BEIR folder of the run")
    explain.add_argument("--split", help="which of its qrels (default: test)")
    explain.add_argument("--against", metavar="RUN", help="run that beat it (default: bm25)")
    explain.add_argument("--metric", help="by which (default: nDCG@10)")
    explain.add_argument("--keep-identical-ids", action="store_true", help="keep a document whose id is the query's")
    explain.add_argument("--lost", type=int, metavar="N", help="lost queries shown (default: 10)")
    explain.add_argument("--terms", type=int, default=10, metavar="N", help="dimensions shown (default: %(default)s)")
    explain.add_argument("--html", metavar="FILE", help="write a page, complete in itself, here")
    explain.add_argument("--overwrite", action="store_true", help="replace it")
    explain.set_defaults(function=_explain)


def _explain(args: argparse.Namespace) -> None:
    from st_aggretriever.atomic import check_outputs
    from st_aggretriever.evaluation.metrics import check_metric

    if args.run is None:
        given = [name for name in OF_A_RUN if getattr(args, name) not in (None, False)]
        if given:
            raise ValueError(f"explain: --{given[0].replace('_', '-')} belongs to --run and --data.")
    for name, default in OF_A_RUN.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    for name, value, most in (("top-k", args.top_k, MOST), ("lost", args.lost, MOST), ("terms", args.terms, 1000)):
        if not 1 <= value <= most:
            raise ValueError(f"explain: --{name} must be from 1 to {most}, got {value}.")
    if (args.run is None) != (args.data is None):
        raise ValueError("explain: an evaluation is explained by --run and --data together.")
    if args.run is not None and (args.query is not None or args.docs is not None or args.index is not None):
        raise ValueError("explain: give --run and --data, or --query and --docs, not both.")
    if args.run is None and args.query is None and args.docs is None:
        raise ValueError("explain: give --query and --docs, one of them for a text's own terms, or --run and --data.")
    if args.run is None and args.html and (args.query is None or args.docs is None):
        raise ValueError("explain: a page needs --query and --docs, or --run and --data.")
    if (args.ids or args.index) and args.docs is None:
        raise ValueError("explain: --ids and --index choose among the documents of --docs.")
    check_metric(args.metric, "explain")  # before the model loads, as the rest
    check_outputs(args.html, None, args.overwrite)
    if args.run is not None:
        _explain_run(args)
    elif args.query is not None and args.docs is not None:
        _explain_scores(args)
    else:
        _explain_texts(args)


def _explain_scores(args: argparse.Namespace) -> None:
    from st_aggretriever.explain import explain_scores
    from st_aggretriever.explain.documents import check_index, pick_documents, pick_vectors, rank_documents
    from st_aggretriever.explain.page import scores_page
    from st_aggretriever.explain.table import format_scores

    if args.ids:
        if len(args.ids) > MOST:
            raise ValueError(f"explain: --ids takes up to {MOST} documents, got {len(args.ids)}.")
        documents = pick_documents(args.docs, args.ids)
        if args.index:
            documents = documents._replace(vectors=pick_vectors(args.index, documents.ids))
        model = load_model(args.model, args.device, args.trust_remote_code, "none")
        if args.index:
            check_index(args.index, model)
    else:
        model = load_model(args.model, args.device, args.trust_remote_code, "none")
        documents = rank_documents(
            model, args.query, args.docs, args.top_k, index=args.index, batch_size=args.batch_size
        )
    explanations = explain_scores(
        model, args.query, documents.texts, vectors=documents.vectors, batch_size=args.batch_size
    )
    if args.html:
        _write(args.html, scores_page(explanations, documents.ids, model_name=args.model, terms=args.terms))
    for line in format_scores(explanations, documents.ids, terms=args.terms):
        print(line)
    say_written(page=args.html)


def _explain_texts(args: argparse.Namespace) -> None:
    from itertools import islice

    from st_aggretriever.explain import explain_texts
    from st_aggretriever.explain.documents import check_index, pick_documents, pick_vectors, read_documents
    from st_aggretriever.explain.table import format_texts

    if args.query is not None:
        found = [("query", args.query)]
    elif args.ids:
        picked = pick_documents(args.docs, args.ids)
        found = list(zip(picked.ids, picked.texts, strict=True))
    else:
        found = list(islice(read_documents(args.docs), args.top_k))
    ids, texts = [key for key, _ in found], [text for _, text in found]
    vectors = pick_vectors(args.index, ids) if args.index else None
    model = load_model(args.model, args.device, args.trust_remote_code, "none")
    if args.index:
        check_index(args.index, model)
    side = "document" if args.query is None else "query"
    explanations = explain_texts(model, texts, side=side, vectors=vectors, batch_size=args.batch_size)
    for line in format_texts(explanations, ids, terms=args.terms):
        print(line)


def _explain_run(args: argparse.Namespace) -> None:
    from st_aggretriever.explain.lost import explain_lost, format_lost
    from st_aggretriever.explain.page import lost_page

    found = explain_lost(
        load_model(args.model, args.device, args.trust_remote_code, "none"),
        args.run,
        args.data,
        against=args.against,
        split=args.split,
        metric=args.metric,
        drop_identical_ids=not args.keep_identical_ids,
        batch_size=args.batch_size,
    )
    if args.html:
        _write(args.html, lost_page(found, model_name=args.model, shown=args.lost, terms=args.terms))
    for line in format_lost(found, shown=args.lost, terms=args.terms):
        print(line)
    say_written(page=args.html)


def _write(path: str, page: str) -> None:
    """Before anything is printed: a pipe that closes early (head, less) then loses no page."""
    from st_aggretriever.atomic import replacing

    with replacing(path) as file:
        file.write(page)
