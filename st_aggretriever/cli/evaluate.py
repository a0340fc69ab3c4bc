"""The subcommands that measure: evaluate BENCHMARK, fuse."""

from __future__ import annotations

import argparse

from st_aggretriever.cli.options import (
    add_backend,
    add_lengths,
    add_model,
    add_results,
    add_shape,
    evaluation_options,
    load_for_evaluation,
    say_written,
)


def add_evaluate(commands: argparse._SubParsersAction) -> None:
    evaluate = commands.add_parser("evaluate", help="evaluate a model on a benchmark")
    benchmarks = evaluate.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_beir(benchmarks)
    _add_mteb(benchmarks)
    _add_msmarco(benchmarks)
    _add_lotte(benchmarks)
    _add_qa(benchmarks)
    _add_compare(benchmarks)
    _add_overlap(benchmarks)


def _add_beir(benchmarks: argparse._SubParsersAction) -> None:
    beir = benchmarks.add_parser(
        "beir",
        help="BEIR and NanoBEIR by name, or a folder in BEIR's layout",
        description="Encode, search exactly, score by trec_eval's rules: nDCG@10, RR@10, R@100, R@1000, MAP. Sets by "
        "name are downloaded where they aren't yet, after their licence is printed, and checked; run again, the same "
        "command goes on with the next set.",
    )
    add_model(beir, bm25=True)
    what = beir.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", metavar="FOLDER", help="holds corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv")
    what.add_argument(
        "--sets", nargs="+", metavar="NAME", help="BEIR's names, such as scifact nfcorpus, or nano-scifact"
    )
    what.add_argument(
        "--subset",
        choices=("small", "nano", "public", "all"),
        help="small: the paper's five; nano: NanoBEIR's 13; public: the 14 that can be downloaded; all: 18, of which "
        "four need a licence",
    )
    beir.add_argument(
        "--data-dir", default="beir-data", metavar="DIR", help="holds or gets the sets (default: %(default)s)"
    )
    beir.add_argument("--split", help="which qrels, with --data (default: test)")
    beir.add_argument(
        "--block-size", type=int, default=50_000, metavar="N", help="documents in memory (default: %(default)s)"
    )
    beir.add_argument(
        "--keep-identical-ids",
        action="store_true",
        help="with --data: keep a document whose id is the query's (default: drop it)",
    )
    beir.add_argument(
        "--exclude-overlap",
        metavar="FILE",
        help="with --data: written by evaluate overlap; gives figures without affected queries too",
    )
    beir.add_argument("--run", metavar="FILE", help="write the run here; with sets by name a folder, NAME.trec of each")
    beir.add_argument(
        "--output", metavar="FILE", help="write figures, rules, counts and versions here, as JSON; with sets a folder"
    )
    beir.add_argument("--overwrite", action="store_true", help="with --data: replace the files of --run and --output")
    beir.add_argument(
        "--top-k", type=int, default=1000, metavar="K", help="hits a query in the run (default: %(default)s)"
    )
    add_lengths(beir)
    add_shape(beir)
    add_backend(beir)
    beir.set_defaults(function=_evaluate_beir)


def _evaluate_beir(args: argparse.Namespace) -> None:
    if args.data is None:
        _evaluate_sets(args)
        return
    from st_aggretriever.atomic import check_outputs
    from st_aggretriever.evaluation.beir import evaluate_beir
    from st_aggretriever.evaluation.bm25 import evaluate_bm25
    from st_aggretriever.evaluation.result import format_result

    check_outputs(args.run, args.output, args.overwrite)  # before the model loads
    options = {
        "split": args.split or "test",
        "top_k": args.top_k,
        "run": args.run,
        "output": args.output,
        "overwrite": args.overwrite,
        "drop_identical_ids": not args.keep_identical_ids,
        "exclude_overlap": args.exclude_overlap,
    }
    model = load_for_evaluation(args)
    if model is None:
        result = evaluate_bm25(args.data, **options)
    else:
        options |= {"batch_size": args.batch_size, "block_size": args.block_size, "backend": args.backend}
        result = evaluate_beir(model, args.data, model_name=args.model, **options)
    print(format_result(result))
    say_written(run=args.run, figures=args.output)


def _evaluate_sets(args: argparse.Namespace) -> None:
    from st_aggretriever.evaluation.beir_sets import SUBSETS, check_names
    from st_aggretriever.evaluation.suite import evaluate_sets, format_sets

    names = check_names(args.sets or SUBSETS[args.subset])
    only = {"--split": args.split, "--keep-identical-ids": args.keep_identical_ids,
            "--exclude-overlap": args.exclude_overlap, "--overwrite": args.overwrite}  # fmt: skip
    for option, value in only.items():
        if value:
            raise ValueError(f"evaluate beir: {option} belongs to --data; sets by name have rules of their own.")
    if args.output is None:
        raise ValueError("evaluate beir: sets by name need --output DIR for their figures.")
    summary = evaluate_sets(
        load_for_evaluation(args),
        names,
        args.output,
        data=args.data_dir,
        runs=args.run,
        top_k=args.top_k,
        batch_size=args.batch_size,
        block_size=args.block_size,
        backend=args.backend,
        model_name=args.model,
    )
    print("\n".join(format_sets(summary)))
    print(f"figures, one file a set and {args.output}/summary.json, written to {args.output}")


def _add_mteb(benchmarks: argparse._SubParsersAction) -> None:
    mteb = benchmarks.add_parser(
        "mteb",
        help="tasks and benchmarks of MTEB",
        description="Run tasks of MTEB (MIRACL, BRIGHT, long-document and other sets by their names there) through "
        "mteb.evaluate with exact search. What OUTPUT holds already is not run again.",
    )
    add_model(mteb)
    mteb.add_argument("--tasks", nargs="+", default=[], metavar="NAME", help="mteb's names of tasks")
    mteb.add_argument("--benchmark", metavar="NAME", help="mteb's name of a benchmark instead")
    mteb.add_argument("--output", required=True, metavar="DIR", help="results, and the metadata of a submission")
    mteb.add_argument("--name", metavar="ORG/NAME", help="of the model in the results (default: that of --model)")
    mteb.add_argument("--revision", help="of the model in the results (default: the hash of its content)")
    add_lengths(mteb)
    add_backend(mteb)
    mteb.set_defaults(function=_evaluate_mteb)


def _evaluate_mteb(args: argparse.Namespace) -> None:
    from pathlib import Path

    from st_aggretriever.evaluation.mteb import evaluate_mteb, find_tasks, format_mteb

    tasks = find_tasks(args.tasks, args.benchmark)  # before the model loads
    model = load_for_evaluation(args)
    if model is None:
        raise ValueError("evaluate mteb: bm25 is no model of mteb's. Name a folder or Hub id.")
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
    add_model(msmarco, bm25=True)
    msmarco.add_argument("--collection", required=True, metavar="FILE", help="collection.tsv, pid<tab>passage")
    msmarco.add_argument("--queries", required=True, metavar="FILE", help="qid<tab>query")
    msmarco.add_argument("--qrels", required=True, metavar="FILE", help="four columns")
    msmarco.add_argument(
        "--measures",
        choices=("dev", "dl"),
        default="dev",
        help="dl: a passage is relevant from grade 2 on (default: %(default)s)",
    )
    msmarco.add_argument(
        "--format", choices=("trec", "msmarco"), default="trec", help="of --run (default: %(default)s)"
    )
    add_results(msmarco, top_k=1000)
    add_lengths(msmarco)
    add_shape(msmarco)
    add_backend(msmarco)
    msmarco.set_defaults(function=_evaluate_msmarco)


def _evaluate_msmarco(args: argparse.Namespace) -> None:
    from st_aggretriever.atomic import check_outputs
    from st_aggretriever.evaluation.msmarco import evaluate_msmarco
    from st_aggretriever.evaluation.result import format_result

    check_outputs(args.run, args.output, args.overwrite)  # before the model loads
    result = evaluate_msmarco(
        load_for_evaluation(args),
        args.collection,
        args.queries,
        args.qrels,
        measures=args.measures,
        run_format=args.format,
        **evaluation_options(args),
    )
    print(format_result(result))
    say_written(run=args.run, figures=args.output)


def _add_lotte(benchmarks: argparse._SubParsersAction) -> None:
    lotte = benchmarks.add_parser(
        "lotte",
        help="LoTTE's long-tail topics",
        description="Success@5: the share of questions with a right passage among the first five, on one topic and "
        "split of LoTTE.",
    )
    add_model(lotte, bm25=True)
    lotte.add_argument(
        "--data",
        required=True,
        metavar="FOLDER",
        help="such as lotte/writing/test: collection.tsv, questions.KIND.tsv and qas.KIND.jsonl",
    )
    lotte.add_argument(
        "--questions", nargs="+", choices=("search", "forum"), default=["search", "forum"], help="(default: both)"
    )
    add_results(lotte, top_k=100)
    add_lengths(lotte)
    add_shape(lotte)
    add_backend(lotte)
    lotte.set_defaults(function=_evaluate_lotte)


def _evaluate_lotte(args: argparse.Namespace) -> None:
    from st_aggretriever.atomic import check_outputs
    from st_aggretriever.evaluation.lotte import evaluate_lotte
    from st_aggretriever.evaluation.result import format_result

    check_outputs(args.run, args.output, args.overwrite)  # before the model loads
    result = evaluate_lotte(
        load_for_evaluation(args),
        args.data,
        kinds=args.questions,
        **evaluation_options(args),
    )
    print(format_result(result))
    say_written(run=args.run, figures=args.output)


def _add_qa(benchmarks: argparse._SubParsersAction) -> None:
    qa = benchmarks.add_parser(
        "qa",
        help="open-domain question answering",
        description="Hit accuracy at 5, 20 and 100 on DPR's Wikipedia passages: NQ, TriviaQA, WebQuestions, SQuAD and "
        "EntityQuestions by token match, CuratedTREC by --match regex.",
    )
    add_model(qa, bm25=True)
    qa.add_argument("--passages", required=True, metavar="FILE", help="psgs_w100.tsv, id<tab>text<tab>title")
    qa.add_argument(
        "--questions", required=True, metavar="FILE", help="DPR's question<tab>answers, or JSON (EntityQuestions)"
    )
    qa.add_argument("--match", choices=("string", "regex"), default="string", help="(default: %(default)s)")
    add_results(qa, top_k=100)
    add_lengths(qa)
    add_shape(qa)
    add_backend(qa)
    qa.set_defaults(function=_evaluate_qa)


def _evaluate_qa(args: argparse.Namespace) -> None:
    from st_aggretriever.atomic import check_outputs
    from st_aggretriever.evaluation.qa import evaluate_qa
    from st_aggretriever.evaluation.result import format_result

    check_outputs(args.run, args.output, args.overwrite)  # before the model loads
    result = evaluate_qa(
        load_for_evaluation(args),
        args.passages,
        args.questions,
        match=args.match,
        **evaluation_options(args),
    )
    print(format_result(result))
    say_written(run=args.run, figures=args.output)


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
    from st_aggretriever.atomic import check_outputs
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
    say_written(plot=args.plot, figures=args.output)


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
    from st_aggretriever.atomic import check_outputs
    from st_aggretriever.evaluation.overlap import find_overlap, format_overlap

    check_outputs(None, args.output, args.overwrite)
    options = {"split": args.split, "train_split": args.train_split, "output": args.output}
    print(format_overlap(find_overlap(args.train, args.data, **options)))
    if args.output:
        print(f"written to {args.output}")


def add_fuse(commands: argparse._SubParsersAction) -> None:
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
    fuse.add_argument("--dev-split", help="which qrels of it (default: dev)")
    fuse.add_argument(
        "--dev-ids-reused", action="store_true", help="dev queries are others though their ids occur in the runs"
    )
    fuse.add_argument(
        "--keep-identical-ids", action="store_true", help="keep a dev document whose id is the query's, while tuning"
    )
    fuse.set_defaults(function=_fuse)


def _fuse(args: argparse.Namespace) -> None:
    from st_aggretriever.atomic import check_outputs, replacing
    from st_aggretriever.evaluation.beir import read_collection
    from st_aggretriever.evaluation.fuse import fuse_convex, fuse_rrf, tune_weight
    from st_aggretriever.evaluation.runs import read_run, run_lines

    check_outputs(args.output, None, args.overwrite)
    tuned = args.dev_runs is not None and args.dev_data is not None
    if args.method == "convex" and tuned == (args.weight is not None):
        raise ValueError("fuse: convex takes either --weight, or --dev-runs and --dev-data to tune it.")
    about_dev = ("dev_runs", "dev_data", "dev_split", "dev_ids_reused", "keep_identical_ids")
    given = [f"--{name.replace('_', '-')}" for name in about_dev if getattr(args, name)]
    if args.weight is not None and given:
        raise ValueError(f"fuse: --weight needs no dev set; leave {', '.join(given)} out.")
    if args.method == "rrf" and (args.weight is not None or given):
        raise ValueError(f"fuse: rrf has no weight; leave {', '.join(given or ['--weight'])} out.")
    runs = [read_run(path) for path in args.runs]
    if args.method == "rrf":
        fused = fuse_rrf(runs, top_k=args.top_k)
    else:
        weight = args.weight
        if tuned:
            dev = [read_run(path) for path in args.dev_runs]
            qrels = read_collection(args.dev_data, args.dev_split or "dev", ids_in_run=False).qrels
            test_queries = () if args.dev_ids_reused else [query for run in runs for query in run]
            keep = args.keep_identical_ids
            weight, figures = tune_weight(dev, qrels, test_queries=test_queries, drop_identical_ids=not keep)
            print("nDCG@10 on the dev queries: " + ", ".join(f"{key} {value:.4f}" for key, value in figures.items()))
        fused = fuse_convex(runs, weight, top_k=args.top_k)
        print(f"weight of {args.runs[0]}: {weight}")
    with replacing(args.output) as file:
        file.writelines(run_lines(fused, "trec"))
    print(f"run written to {args.output}: {len(fused):,} queries")
