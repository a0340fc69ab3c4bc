"""The subcommands over vectors on disk: encode, search."""

from __future__ import annotations

import argparse

from st_aggretriever.cli.options import add_backend, add_model, add_shape, load_model, shaped


def add_encode(commands: argparse._SubParsersAction) -> None:
    encode = commands.add_parser(
        "encode",
        help="write vectors to disk",
        description="Encode the documents (or queries) of a BEIR folder into blocks of vectors beside their ids and a "
        "manifest. Until it is complete OUTPUT is called OUTPUT.partial; the same command goes on from there.",
    )
    add_model(encode)
    encode.add_argument("--data", required=True, metavar="FOLDER", help="holds corpus.jsonl and queries.jsonl")
    encode.add_argument("--output", required=True, metavar="DIR", help="folder to write; it must not exist")
    encode.add_argument("--side", choices=("document", "query"), default="document", help="(default: %(default)s)")
    encode.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32", help="on disk (default: %(default)s)"
    )
    encode.add_argument(
        "--block-size", type=int, default=20_000, metavar="N", help="texts a block (default: %(default)s)"
    )
    add_shape(encode)
    encode.set_defaults(function=_encode)


def _encode(args: argparse.Namespace) -> None:
    from st_aggretriever.encoding import Source, encode_to_disk
    from st_aggretriever.readers.beir import read_corpus, read_queries
    from st_aggretriever.vectors import check_output

    check_output(args.output)  # before the model loads
    if args.side == "query" and args.windows is not None:
        raise ValueError("encode: --windows are for documents; a query is one text of --side query.")
    streams = {"document": lambda: read_corpus(args.data), "query": lambda: read_queries(args.data).items()}
    folder = encode_to_disk(
        shaped(load_model(args.model, args.device, args.trust_remote_code, args.quantize), args),
        Source(args.data, streams[args.side]),
        args.output,
        side=args.side,
        dtype=args.dtype,
        batch_size=args.batch_size,
        block_size=args.block_size,
        model_name=args.model,
    )
    made = folder.manifest
    print(
        f"wrote {args.output}: {made['rows']:,} {args.side} vectors of {made['dimension']} dimensions, "
        f"{made['dtype']}, {folder.size / 1e6:,.1f} MB, {made['blocks']} blocks"
    )
    cut = "unknown" if made["truncated"] is None else f"{made['truncated']:,}"
    if made["windows"]:
        print("documents read whole, in windows of {window} tokens that share {overlap}, [CLS]: {cls}".format(
            **made["windows"]))  # fmt: skip
    else:
        print(f"texts cut at {made['length']} tokens: {cut}")
    print(f"prompt: {made['prompt']!r}")
    if made["lexical"] and made["unfoldable"] != 0:
        found = "not known" if made["unfoldable"] is None else f"{made['unfoldable']:,}"
        print(f"texts without a positive term weight: {found}; these vectors can't be folded")


def add_search(commands: argparse._SubParsersAction) -> None:
    search = commands.add_parser(
        "search",
        help="search vectors on disk",
        description="Search the vectors that encode wrote, exactly, or by an approximate Faiss index whose recall is "
        "printed. Queries of another model, order of parts or dimension are refused.",
    )
    search.add_argument("--index", required=True, metavar="DIR", help="document vectors, written by encode")
    search.add_argument("--queries", required=True, metavar="DIR", help="query vectors, written by encode --side query")
    search.add_argument("--run", required=True, metavar="FILE", help="write the hits here")
    search.add_argument("--format", choices=("trec", "msmarco"), default="trec", help="of FILE (default: %(default)s)")
    search.add_argument("--overwrite", action="store_true", help="replace the files of --run and --save-index")
    search.add_argument("--top-k", type=int, default=1000, metavar="K", help="hits a query (default: %(default)s)")
    search.add_argument(
        "--lexical-dim", type=int, metavar="D", help="fold both sides' lexical part to D while reading, a divisor of it"
    )
    search.add_argument("--index-dtype", choices=("float32", "float16"), help="round to this (default: as on disk)")
    search.add_argument("--device", help="for instance cpu, cuda:0, or cuda:0,cuda:1 for both (default: a GPU if any)")
    search.add_argument(
        "--index-factory", metavar="NAME", help="an approximate index by Faiss's name, for instance IVF1024,PQ96"
    )
    search.add_argument(
        "--index-parameters", default="", metavar="P", help="of its search, for instance nprobe=32 or efSearch=128"
    )
    search.add_argument("--save-index", metavar="FILE", help="keep the index of --index-factory in this file")
    search.add_argument(
        "--load-index", metavar="FILE", help="search by an index that --save-index wrote for the same vectors"
    )
    add_backend(search)
    search.set_defaults(function=_search)


def check_index_options(args: argparse.Namespace) -> None:
    """Refuse options of search that don't belong together, and an index file that is there already."""
    from st_aggretriever.evaluation.beir import check_outputs

    if args.index_factory and args.load_index:
        raise ValueError("search: --index-factory builds an index, --load-index reads one. Give one of them.")
    if (args.save_index or args.index_parameters) and not (args.index_factory or args.load_index):
        raise ValueError("search: --save-index and --index-parameters belong to --index-factory or --load-index.")
    if args.save_index and args.load_index:
        raise ValueError("search: --load-index reads what is in a file already; leave --save-index out.")
    if (args.index_factory or args.load_index) and args.index_dtype:
        raise ValueError("search: an approximate index says itself how numbers are stored; leave --index-dtype out.")
    check_outputs(args.run, args.save_index, args.overwrite)


def _search(args: argparse.Namespace) -> None:
    from st_aggretriever import retrieve
    from st_aggretriever.approximate import build_index, load_index, save_index, search_approximately
    from st_aggretriever.atomic import replacing
    from st_aggretriever.evaluation.runs import run_lines
    from st_aggretriever.vectors import VectorFolder

    check_index_options(args)
    index, queries = (VectorFolder(folder, args.lexical_dim) for folder in (args.index, args.queries))
    query_ids, vectors = retrieve.load_queries(queries, index)
    print(retrieve.describe_search(index, len(query_ids), args.index_dtype), flush=True)
    if args.index_factory or args.load_index:
        if args.load_index:
            built = load_index(args.load_index, index)
        else:
            built = build_index(index, args.index_factory, args.index_parameters)
        if args.save_index:
            save_index(args.save_index, built, index)
            print(f"index written to {args.save_index}", flush=True)
        hits, report = search_approximately(index, vectors, args.top_k, built, args.index_parameters)
        print(
            f"{' '.join([report['factory'], *args.index_parameters.split()])}: recall of the exact {hits.ids.shape[1]} "
            f"{report['recall']:.4f}, index {report['bytes'] / 1e6:,.1f} MB, seconds {report['seconds']}"
        )
    else:
        options = {"dtype": args.index_dtype, "backend": args.backend, "device": args.device}
        hits = retrieve.search_exactly(index, vectors, args.top_k, **options)
    for folder in (queries, index):
        if folder.folding():
            print(folder.folding())
    with replacing(args.run) as file:
        file.writelines(run_lines(retrieve.rankings_of(query_ids, hits), args.format))
    print(f"run written to {args.run}: {len(query_ids):,} queries, up to {hits.ids.shape[1]:,} hits each")
