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
    _add_quickstart(commands)
    _add_train(commands)
    _add_encode(commands)
    _add_search(commands)
    _add_evaluate(commands)
    _add_fuse(commands)
    _add_convert(commands)
    _add_inspect(commands)
    return parser


def _add_quickstart(commands: argparse._SubParsersAction) -> None:
    quickstart = commands.add_parser(
        "quickstart",
        help="train, search and evaluate in one go",
        description="Train AGG, CLS and mean-pooling models from one backbone, evaluate them beside BM25, show three "
        "searches. Without options it runs on a bundled backbone and sample collection. Run again, it goes on.",
    )
    quickstart.add_argument("--model", metavar="M", help="masked language model (default: the bundled small one)")
    quickstart.add_argument("--data", metavar="FOLDER", help="BEIR folder (default: the bundled sample collection)")
    quickstart.add_argument(
        "--pairs", nargs="+", metavar="FILE", help="training pairs (default: the train split of --data)"
    )
    quickstart.add_argument(
        "--output", default="quickstart", metavar="DIR", help="models and figures (default: %(default)s)"
    )
    quickstart.add_argument(
        "--epochs", type=float, metavar="N", help="passes over the pairs (default: 20 under 1,000 pairs, else 3)"
    )
    quickstart.add_argument("--cls-dim", type=int, default=128, metavar="C", help="(default: %(default)s)")
    quickstart.add_argument("--lexical-dim", type=int, default=640, metavar="D", help="(default: %(default)s)")
    quickstart.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    quickstart.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    quickstart.set_defaults(function=_quickstart)


def _quickstart(args: argparse.Namespace) -> None:
    from st_aggretriever.quickstart import quickstart

    try:
        for line in quickstart(**{name: value for name, value in vars(args).items() if name != "function"}):
            print(line, flush=True)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; what is done stays in {args.output}, the same command goes on") from None


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


def _add_encode(commands: argparse._SubParsersAction) -> None:
    encode = commands.add_parser(
        "encode",
        help="write vectors to disk",
        description="Encode the documents (or queries) of a BEIR folder into blocks of vectors beside their ids and a "
        "manifest. Until it is complete OUTPUT is called OUTPUT.partial; the same command goes on from there.",
    )
    encode.add_argument("--model", required=True, metavar="M", help="folder or Hub id of a sentence-transformers model")
    encode.add_argument("--data", required=True, metavar="FOLDER", help="holds corpus.jsonl and queries.jsonl")
    encode.add_argument("--output", required=True, metavar="DIR", help="folder to write; it must not exist")
    encode.add_argument("--side", choices=("document", "query"), default="document", help="(default: %(default)s)")
    encode.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32", help="on disk (default: %(default)s)"
    )
    encode.add_argument("--batch-size", type=int, default=32, metavar="N", help="texts a batch (default: %(default)s)")
    encode.add_argument(
        "--block-size", type=int, default=20_000, metavar="N", help="texts a block (default: %(default)s)"
    )
    encode.add_argument("--device", help="where the model runs, for instance cpu or cuda:0 (default: a GPU if any)")
    encode.add_argument("--trust-remote-code", action="store_true", help="run the model's own code if it needs to")
    encode.set_defaults(function=_encode)


def _encode(args: argparse.Namespace) -> None:
    from st_aggretriever.encoding import Source, encode_to_disk
    from st_aggretriever.readers.beir import read_corpus, read_queries
    from st_aggretriever.vectors import check_output

    check_output(args.output)  # before the model loads
    streams = {"document": lambda: read_corpus(args.data), "query": lambda: read_queries(args.data).items()}
    folder = encode_to_disk(
        _load_model(args.model, args.device, args.trust_remote_code),
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
    print(f"texts cut at {made['length']} tokens: {cut}; prompt: {made['prompt']!r}")


def _add_search(commands: argparse._SubParsersAction) -> None:
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
    search.add_argument("--overwrite", action="store_true", help="replace FILE")
    search.add_argument("--top-k", type=int, default=1000, metavar="K", help="hits a query (default: %(default)s)")
    search.add_argument("--index-dtype", choices=("float32", "float16"), help="round to this (default: as on disk)")
    search.add_argument("--backend", choices=("auto", "faiss", "torch"), default="auto", help="(default: %(default)s)")
    search.add_argument("--device", help="for instance cpu or cuda:0 (default: a GPU if any)")
    search.add_argument(
        "--index-factory", metavar="NAME", help="an approximate index by Faiss's name, for instance IVF1024,PQ96"
    )
    search.add_argument(
        "--index-parameters", default="", metavar="P", help="of its search, for instance nprobe=32 or efSearch=128"
    )
    search.set_defaults(function=_search)


def _search(args: argparse.Namespace) -> None:
    from st_aggretriever import retrieve
    from st_aggretriever.atomic import replacing
    from st_aggretriever.evaluation.beir import check_outputs
    from st_aggretriever.evaluation.runs import run_lines
    from st_aggretriever.vectors import VectorFolder

    check_outputs(args.run, None, args.overwrite)
    if args.index_factory and args.index_dtype:
        raise ValueError("search: --index-factory says itself how numbers are stored; leave --index-dtype out.")
    index = VectorFolder(args.index)
    query_ids, vectors = retrieve.load_queries(args.queries, index)
    print(retrieve.describe_search(index, len(query_ids), args.index_dtype), flush=True)
    if args.index_factory:
        approximate = retrieve.Approximate(args.index_factory, args.index_parameters)
        hits, report = retrieve.search_approximately(index, vectors, args.top_k, approximate)
        print(
            f"{args.index_factory} {args.index_parameters}: recall of the exact {hits.ids.shape[1]} "
            f"{report['recall']:.4f}, index {report['bytes'] / 1e6:,.1f} MB, seconds {report['seconds']}"
        )
    else:
        options = {"dtype": args.index_dtype, "backend": args.backend, "device": args.device}
        hits = retrieve.search_exactly(index, vectors, args.top_k, **options)
    with replacing(args.run) as file:
        file.writelines(run_lines(retrieve.rankings_of(query_ids, hits), args.format))
    print(f"run written to {args.run}: {len(query_ids):,} queries, up to {hits.ids.shape[1]:,} hits each")


def _add_evaluate(commands: argparse._SubParsersAction) -> None:
    evaluate = commands.add_parser("evaluate", help="evaluate a model on a benchmark")
    benchmarks = evaluate.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_beir(benchmarks)
    _add_mteb(benchmarks)
    _add_msmarco(benchmarks)
    _add_qa(benchmarks)
    _add_compare(benchmarks)
    _add_overlap(benchmarks)


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
    beir.add_argument(
        "--exclude-overlap", metavar="FILE", help="written by evaluate overlap: figures without affected queries too"
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
        "exclude_overlap": args.exclude_overlap,
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


def _add_mteb(benchmarks: argparse._SubParsersAction) -> None:
    mteb = benchmarks.add_parser(
        "mteb",
        help="tasks and benchmarks of MTEB",
        description="Run tasks of MTEB (MIRACL, BRIGHT, long-document and other sets by their names there) through "
        "mteb.evaluate with exact search. What OUTPUT holds already is not run again.",
    )
    mteb.add_argument("--model", required=True, metavar="M", help="folder or Hub id of a sentence-transformers model")
    mteb.add_argument("--tasks", nargs="+", default=[], metavar="NAME", help="mteb's names of tasks")
    mteb.add_argument("--benchmark", metavar="NAME", help="mteb's name of a benchmark instead")
    mteb.add_argument("--output", required=True, metavar="DIR", help="results, and the metadata of a submission")
    mteb.add_argument("--name", metavar="ORG/NAME", help="of the model in the results (default: that of --model)")
    mteb.add_argument("--revision", help="of the model in the results (default: the hash of its content)")
    mteb.add_argument("--batch-size", type=int, default=32, metavar="N", help="texts a batch (default: %(default)s)")
    mteb.add_argument("--backend", choices=("auto", "faiss", "torch"), default="auto", help="(default: %(default)s)")
    mteb.add_argument("--device", help="where the model runs, for instance cpu or cuda:0 (default: a GPU if any)")
    mteb.add_argument("--trust-remote-code", action="store_true", help="run the model's own code if it needs to")
    mteb.set_defaults(function=_evaluate_mteb)


def _evaluate_mteb(args: argparse.Namespace) -> None:
    from pathlib import Path

    from st_aggretriever.evaluation.mteb import evaluate_mteb, find_tasks, format_mteb

    tasks = find_tasks(args.tasks, args.benchmark)  # before the model loads
    model = _load_model(args.model, args.device, args.trust_remote_code)
    name = args.name or (Path(args.model).resolve().name if Path(args.model).exists() else args.model)
    options = {"name": name, "revision": args.revision, "batch_size": args.batch_size, "backend": args.backend}
    print(format_mteb(evaluate_mteb(model, tasks, args.output, **options)))
    print(f"results, and model_meta.json for a submission, in {args.output}")


def _add_msmarco(benchmarks: argparse._SubParsersAction) -> None:
    msmarco = benchmarks.add_parser(
        "msmarco",
        help="MS MARCO passages and TREC Deep Learning",
        description="RR@10 and R@1000 on MS MARCO's dev queries, or nDCG@10 on TREC DL's, from the official files.",
    )
    msmarco.add_argument("--model", required=True, metavar="M", help="folder or Hub id; or bm25")
    msmarco.add_argument("--collection", required=True, metavar="FILE", help="collection.tsv, pid<tab>passage")
    msmarco.add_argument("--queries", required=True, metavar="FILE", help="qid<tab>query")
    msmarco.add_argument("--qrels", required=True, metavar="FILE", help="four columns")
    msmarco.add_argument(
        "--measures",
        choices=("dev", "dl"),
        default="dev",
        help="dl: a passage is relevant from grade 2 on (default: %(default)s)",
    )
    msmarco.add_argument("--run", metavar="FILE", help="write the run here")
    msmarco.add_argument("--format", choices=("trec", "msmarco"), default="trec", help="of it (default: %(default)s)")
    msmarco.add_argument("--output", metavar="FILE", help="write figures, rules, counts and versions here, as JSON")
    msmarco.add_argument("--overwrite", action="store_true", help="replace the files of --run and --output")
    msmarco.add_argument("--top-k", type=int, default=1000, metavar="K", help="(default: %(default)s)")
    msmarco.add_argument("--batch-size", type=int, default=32, metavar="N", help="texts a batch (default: %(default)s)")
    msmarco.add_argument("--backend", choices=("auto", "faiss", "torch"), default="auto", help="(default: %(default)s)")
    msmarco.add_argument("--device", help="where the model runs, for instance cpu or cuda:0 (default: a GPU if any)")
    msmarco.add_argument("--trust-remote-code", action="store_true", help="run the model's own code if it needs to")
    msmarco.set_defaults(function=_evaluate_msmarco)


def _evaluate_msmarco(args: argparse.Namespace) -> None:
    from st_aggretriever.evaluation.beir import check_outputs, format_result
    from st_aggretriever.evaluation.msmarco import evaluate_msmarco

    check_outputs(args.run, args.output, args.overwrite)  # before the model loads
    bm25 = args.model == "bm25"
    result = evaluate_msmarco(
        None if bm25 else _load_model(args.model, args.device, args.trust_remote_code),
        args.collection,
        args.queries,
        args.qrels,
        measures=args.measures,
        top_k=args.top_k,
        batch_size=args.batch_size,
        run=args.run,
        run_format=args.format,
        output=args.output,
        overwrite=args.overwrite,
        backend=args.backend,
        model_name=args.model,
    )
    print(format_result(result))
    for what, path in (("run", args.run), ("figures", args.output)):
        if path:
            print(f"{what} written to {path}")


def _add_qa(benchmarks: argparse._SubParsersAction) -> None:
    qa = benchmarks.add_parser(
        "qa",
        help="open-domain question answering",
        description="Hit accuracy at 5, 20 and 100 on DPR's Wikipedia passages: NQ, TriviaQA, WebQuestions, SQuAD and "
        "EntityQuestions by token match, CuratedTREC by --match regex.",
    )
    qa.add_argument("--model", required=True, metavar="M", help="folder or Hub id; or bm25")
    qa.add_argument("--passages", required=True, metavar="FILE", help="psgs_w100.tsv, id<tab>text<tab>title")
    qa.add_argument(
        "--questions", required=True, metavar="FILE", help="DPR's question<tab>answers, or JSON (EntityQuestions)"
    )
    qa.add_argument("--match", choices=("string", "regex"), default="string", help="(default: %(default)s)")
    qa.add_argument("--run", metavar="FILE", help="write the run here, in TREC format")
    qa.add_argument("--output", metavar="FILE", help="write figures, rules, counts and versions here, as JSON")
    qa.add_argument("--overwrite", action="store_true", help="replace the files of --run and --output")
    qa.add_argument("--top-k", type=int, default=100, metavar="K", help="(default: %(default)s)")
    qa.add_argument("--batch-size", type=int, default=32, metavar="N", help="texts a batch (default: %(default)s)")
    qa.add_argument("--backend", choices=("auto", "faiss", "torch"), default="auto", help="(default: %(default)s)")
    qa.add_argument("--device", help="where the model runs, for instance cpu or cuda:0 (default: a GPU if any)")
    qa.add_argument("--trust-remote-code", action="store_true", help="run the model's own code if it needs to")
    qa.set_defaults(function=_evaluate_qa)


def _evaluate_qa(args: argparse.Namespace) -> None:
    from st_aggretriever.evaluation.beir import check_outputs, format_result
    from st_aggretriever.evaluation.qa import evaluate_qa

    check_outputs(args.run, args.output, args.overwrite)  # before the model loads
    result = evaluate_qa(
        None if args.model == "bm25" else _load_model(args.model, args.device, args.trust_remote_code),
        args.passages,
        args.questions,
        match=args.match,
        top_k=args.top_k,
        batch_size=args.batch_size,
        run=args.run,
        output=args.output,
        overwrite=args.overwrite,
        backend=args.backend,
        model_name=args.model,
    )
    print(format_result(result))
    for what, path in (("run", args.run), ("figures", args.output)):
        if path:
            print(f"{what} written to {path}")


def _add_compare(benchmarks: argparse._SubParsersAction) -> None:
    compare = benchmarks.add_parser(
        "compare",
        help="runs, query by query",
        description="Means, paired t-test and randomisation test with Holm's correction, and the queries that changed "
        "most with their first passages (a relevant one has a star).",
    )
    compare.add_argument("runs", nargs="+", metavar="RUN", help="two or more files in TREC's or MS MARCO's format")
    compare.add_argument("--data", required=True, metavar="FOLDER", help="BEIR folder with queries, documents, qrels")
    compare.add_argument("--split", default="test", help="which qrels (default: %(default)s)")
    compare.add_argument("--metric", default="nDCG@10", help="what is compared (default: %(default)s)")
    compare.add_argument("--output", metavar="FILE", help="write figures, tests and every query's figures, as JSON")
    compare.add_argument("--plot", metavar="FILE", help="draw the differences of all queries, as PNG")
    compare.add_argument("--overwrite", action="store_true", help="replace the files of --output and --plot")
    compare.add_argument("--changed", type=int, default=5, metavar="N", help="queries shown (default: %(default)s)")
    compare.add_argument("--resamples", type=int, default=10_000, metavar="N", help="(default: %(default)s)")
    compare.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    compare.add_argument("--keep-identical-ids", action="store_true", help="keep a document whose id is the query's")
    compare.set_defaults(function=_evaluate_compare)


def _evaluate_compare(args: argparse.Namespace) -> None:
    from st_aggretriever.evaluation.beir import check_outputs
    from st_aggretriever.evaluation.compare import compare_runs, format_comparison

    check_outputs(args.plot, args.output, args.overwrite)
    result = compare_runs(
        args.runs,
        args.data,
        split=args.split,
        metric=args.metric,
        drop_identical_ids=not args.keep_identical_ids,
        changed=args.changed,
        resamples=args.resamples,
        seed=args.seed,
        output=args.output,
        plot=args.plot,
    )
    for line in format_comparison(result, args.runs):
        print(line)
    for what, path in (("plot", args.plot), ("figures", args.output)):
        if path:
            print(f"{what} written to {path}")


def _add_overlap(benchmarks: argparse._SubParsersAction) -> None:
    overlap = benchmarks.add_parser(
        "overlap",
        help="training data inside a test set",
        description="Test queries that occur among the training queries, and documents of which at least half of the "
        "8-grams occur in training texts. evaluate beir --exclude-overlap FILE then gives figures without them too.",
    )
    overlap.add_argument("--train", nargs="+", required=True, metavar="FILE", help="training pairs, or BEIR folders")
    overlap.add_argument("--data", required=True, metavar="FOLDER", help="BEIR folder to be evaluated")
    overlap.add_argument("--split", default="test", help="which of its qrels (default: %(default)s)")
    overlap.add_argument("--train-split", default="train", help="qrels of a training folder (default: %(default)s)")
    overlap.add_argument("--output", metavar="FILE", help="write ids, shares, counts and rules here, as JSON")
    overlap.add_argument("--overwrite", action="store_true", help="replace it")
    overlap.set_defaults(function=_evaluate_overlap)


def _evaluate_overlap(args: argparse.Namespace) -> None:
    from st_aggretriever.evaluation.beir import check_outputs
    from st_aggretriever.evaluation.overlap import find_overlap, format_overlap

    check_outputs(None, args.output, args.overwrite)
    options = {"split": args.split, "train_split": args.train_split, "output": args.output}
    print(format_overlap(find_overlap(args.train, args.data, **options)))
    if args.output:
        print(f"written to {args.output}")


def _add_fuse(commands: argparse._SubParsersAction) -> None:
    fuse = commands.add_parser(
        "fuse",
        help="make one run of several",
        description="Fuse runs by reciprocal ranks, or two runs by a convex combination of their scores, each query's "
        "brought to [0, 1]. Its weight is given, or tuned on dev queries that are not among the runs' own.",
    )
    fuse.add_argument("runs", nargs="+", metavar="RUN", help="files in TREC's or MS MARCO's format")
    fuse.add_argument("--method", choices=("rrf", "convex"), default="rrf", help="(default: %(default)s)")
    fuse.add_argument("--output", required=True, metavar="FILE", help="the fused run, in TREC format")
    fuse.add_argument("--overwrite", action="store_true", help="replace it")
    fuse.add_argument("--top-k", type=int, default=1000, metavar="K", help="hits a query (default: %(default)s)")
    fuse.add_argument("--weight", type=float, metavar="W", help="of the first run, 0 to 1")
    fuse.add_argument("--dev-runs", nargs=2, metavar="RUN", help="the same two systems' runs of the dev queries")
    fuse.add_argument("--dev-data", metavar="FOLDER", help="BEIR folder of the dev queries")
    fuse.add_argument("--dev-split", default="dev", help="which qrels of it (default: %(default)s)")
    fuse.add_argument(
        "--dev-ids-reused", action="store_true", help="dev queries are others though their ids occur in the runs"
    )
    fuse.set_defaults(function=_fuse)


def _fuse(args: argparse.Namespace) -> None:
    from st_aggretriever.atomic import replacing
    from st_aggretriever.evaluation.beir import check_outputs, read_collection
    from st_aggretriever.evaluation.fuse import fuse_convex, fuse_rrf, tune_weight
    from st_aggretriever.evaluation.runs import read_run, run_lines

    check_outputs(args.output, None, args.overwrite)
    tuned = args.dev_runs is not None and args.dev_data is not None
    if args.method == "convex" and tuned == (args.weight is not None):
        raise ValueError("fuse: convex takes either --weight, or --dev-runs and --dev-data to tune it.")
    if args.method == "rrf" and (args.weight is not None or args.dev_runs or args.dev_data):
        raise ValueError("fuse: rrf has no weight; leave --weight, --dev-runs and --dev-data out.")
    runs = [read_run(path) for path in args.runs]
    if args.method == "rrf":
        fused = fuse_rrf(runs, top_k=args.top_k)
    else:
        weight = args.weight
        if tuned:
            dev = [read_run(path) for path in args.dev_runs]
            qrels = read_collection(args.dev_data, args.dev_split, ids_in_run=False).qrels
            test_queries = () if args.dev_ids_reused else [query for run in runs for query in run]
            weight, figures = tune_weight(dev, qrels, test_queries=test_queries)
            print("nDCG@10 on the dev queries: " + ", ".join(f"{key} {value:.4f}" for key, value in figures.items()))
        fused = fuse_convex(runs, weight, top_k=args.top_k)
        print(f"weight of {args.runs[0]}: {weight}")
    with replacing(args.output) as file:
        file.writelines(run_lines(fused, "trec"))
    print(f"run written to {args.output}: {len(fused):,} queries")


def _add_convert(commands: argparse._SubParsersAction) -> None:
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
    from st_aggretriever.convert import convert_checkpoint, licence_of, local_folder, save_castorini
    from st_aggretriever.convert.castorini import name_warning
    from st_aggretriever.model import load_aggretriever

    where = {"revision": args.revision} if args.revision else {}
    if args.to == "castorini":
        if args.pooling or args.lexical_dim:
            raise ValueError("convert: --pooling and --lexical-dim are for --to st; a model has its own.")
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


def _add_inspect(commands: argparse._SubParsersAction) -> None:
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
