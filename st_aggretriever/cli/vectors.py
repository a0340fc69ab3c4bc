"""The subcommands over vectors on disk: encode, verify, merge, index, search."""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any

from st_aggretriever.cli.options import add_backend, add_model, add_shape, load_model, shaped


def add_encode(commands: argparse._SubParsersAction) -> None:
    encode = commands.add_parser(
        "encode",
        help="write vectors to disk",
        description="Encode texts into blocks of vectors beside their ids and a manifest. Until it is complete OUTPUT "
        "is called OUTPUT.partial; the same command goes on from there.",
    )
    add_model(encode)
    encode.add_argument(
        "--corpus",
        "--data",
        nargs="+",
        required=True,
        metavar="PLACE",
        help="files, folders or patterns of jsonl or tab-separated lines (also .gz, .zst) or Parquet; of a BEIR folder "
        "corpus.jsonl, or queries.jsonl for --side query",
    )
    encode.add_argument("--output", required=True, metavar="DIR", help="folder to write; it must not exist")
    encode.add_argument("--side", choices=("document", "query"), default="document", help="(default: %(default)s)")
    encode.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32", help="on disk (default: %(default)s)"
    )
    encode.add_argument(
        "--output-format",
        choices=("npy", "parquet"),
        default="npy",
        help="form of a block: npy, which search maps into memory, or parquet with the columns id and vector "
        "(default: %(default)s)",
    )
    encode.add_argument(
        "--block-size", type=int, default=20_000, metavar="N", help="texts a block (default: %(default)s)"
    )
    encode.add_argument(
        "--shard",
        metavar="I",
        help="encode only each N-th block from block I on, into OUTPUT/shard-I-of-N; auto: I and N by the environment "
        "of torchrun or Slurm",
    )
    encode.add_argument("--num-shards", type=int, metavar="N", help="how many shards there are, numbered from 0")
    encode.add_argument(
        "--workers", type=int, metavar="N", help="encode on N GPUs of this machine, or in N processes without GPU"
    )
    encode.add_argument(
        "--bad-rows",
        choices=("fatal", "skip"),
        default="fatal",
        help="skip: leave out and name rows that can't be read or encoded (default: %(default)s)",
    )
    encode.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: --workers actors of Ray Data, here or on the cluster at RAY_ADDRESS (default: %(default)s)",
    )
    add_shape(encode)
    encode.set_defaults(function=_encode)


def _encode(args: argparse.Namespace) -> None:
    from st_aggretriever.bulk import encode_to_disk, prepare_output
    from st_aggretriever.readers.corpus import Corpus
    from st_aggretriever.vectors.manifest import counted
    from st_aggretriever.vectors.parquet import load_pyarrow

    if args.side == "query" and args.windows is not None:
        raise ValueError("encode: --windows are for documents; a query is one text of --side query.")
    shard = _shard(args)
    options = {
        "side": args.side,
        "dtype": args.dtype,
        "batch_size": args.batch_size,
        "block_size": args.block_size,
        "model_name": args.model,
        "shard": shard,
        "skip_bad": args.bad_rows == "skip",
        "files": args.output_format,
        "report": lambda line: print(line, flush=True),
    }
    if args.output_format == "parquet":
        load_pyarrow()
    complete = prepare_output(args.output, shard).exists()  # asked before the model loads
    corpus = Corpus(*args.corpus, side=args.side, skip_bad=options["skip_bad"])
    if args.engine == "ray":
        from st_aggretriever.ray_engine import encode_by_ray

        load = functools.partial(_shaped_model, _plain(args))
        folder = encode_by_ray(load, corpus, args.output, workers=args.workers or 1, device=args.device, **options)
    else:
        devices = _devices(args)
        folder = encode_to_disk(_shaped_model(args, args.device), corpus, args.output, devices=devices, **options)
    made = folder.manifest
    print(f"{'' if complete else 'wrote '}{folder.folder}: {_written(folder)}")
    cut = "unknown" if made["truncated"] is None else f"{made['truncated']:,}"
    if made["windows"]:
        print("documents read whole, in windows of {window} tokens that share {overlap}, [CLS]: {cls}".format(
            **made["windows"]))  # fmt: skip
    else:
        print("length unknown" if made["length"] is None else f"texts cut at {counted(made['length'], 'token')}: {cut}")
    print(f"prompt: {made['prompt']!r}")
    if made["skipped"]:
        print(f"left out: {counted(made['skipped'], args.side)} that could not be read or encoded")
    if made["lexical"] and made["unfoldable"] != 0:
        found = "not known" if made["unfoldable"] is None else f"{made['unfoldable']:,}"
        print(f"texts without a positive term weight: {found}; these vectors can't be folded")


def _plain(args: argparse.Namespace) -> argparse.Namespace:
    """Without the function, and with a folder's absolute path: another process loads the model."""
    place = os.path.abspath(args.model) if os.path.isdir(args.model) else args.model
    return argparse.Namespace(**{**vars(args), "function": None, "model": place})


def _shaped_model(args: argparse.Namespace, device: str | None) -> Any:
    return shaped(load_model(args.model, device, args.trust_remote_code, args.quantize), args)


def _shard(args: argparse.Namespace) -> tuple[int, int] | None:
    from st_aggretriever.vectors.shards import check_shard, shard_from

    if args.shard == "auto":
        if args.num_shards is not None:
            raise ValueError("encode: --shard auto takes the number of shards from the environment too.")
        shard = shard_from()
        _own_gpu(args)
        return shard
    if (args.shard is None) != (args.num_shards is None):
        raise ValueError("encode: --shard I and --num-shards N belong together.")
    if args.shard is None:
        return None
    if not args.shard.isdecimal():
        raise ValueError(f"encode: --shard must be a number from 0 or auto, got {args.shard!r}.")
    return check_shard((int(args.shard), args.num_shards))


def _own_gpu(args: argparse.Namespace) -> None:
    """Of several GPUs on a machine, each of its processes takes one."""
    import torch

    count = torch.cuda.device_count()
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or ""
    if args.device is None and args.workers is None and count > 1 and local.isdecimal():
        args.device = f"cuda:{int(local) % count}"


def _devices(args: argparse.Namespace) -> list[str]:
    """One for each of --workers; the model itself then stays on the CPU."""
    if args.workers is None:
        return []
    import torch

    from st_aggretriever.vectors.manifest import counted

    if args.workers < 1:
        raise ValueError(f"encode: --workers must be at least 1, got {args.workers}.")
    count = torch.cuda.device_count()
    if args.device not in (None, "cpu", "cuda"):
        raise ValueError("encode: --workers N takes the first N GPUs; --device can be cpu or cuda beside it.")
    if args.device == "cpu" or not count:
        args.device = "cpu"
        return ["cpu"] * args.workers
    if args.workers > count:
        raise ValueError(
            f"encode: --workers {args.workers}, but this machine has {counted(count, 'GPU')}. Use --device cpu there."
        )
    args.device = "cpu"
    return [f"cuda:{number}" for number in range(args.workers)]


def add_verify(commands: argparse._SubParsersAction) -> None:
    verify = commands.add_parser(
        "verify",
        help="check vectors on disk",
        description="Check counts, ids, checksums and finite numbers of what encode or merge wrote, and by which "
        "model. Exit code 2 where something is wrong.",
    )
    verify.add_argument("folders", nargs="+", metavar="DIR", help="vectors, or a folder that holds all shards")
    verify.add_argument("--model", metavar="M", help="the model that should have made them")
    verify.add_argument("--trust-remote-code", action="store_true", help="run the model's own code if it needs to")
    verify.add_argument(
        "--mend",
        action="store_true",
        help="take damaged blocks away and call DIR unfinished: the same encode command then makes them again",
    )
    verify.set_defaults(function=_verify)


def _verify(args: argparse.Namespace) -> None:
    from st_aggretriever.encoding import model_hash
    from st_aggretriever.vectors.manifest import counted
    from st_aggretriever.vectors.shards import find_folders, in_order, open_folder
    from st_aggretriever.vectors.verify import reopen, verify

    paths = find_folders(args.folders)
    expected = None
    if args.model is not None:
        expected = model_hash(load_model(args.model, "cpu", args.trust_remote_code), quantize=False)
    opened, faults = [], 0
    for path in paths:  # each, whatever is wrong with the others
        try:
            folder = open_folder(path)
        except (ValueError, OSError) as error:
            faults += 1
            print(" ".join(str(error).split()), flush=True)
            continue
        opened.append(folder)
        found = verify(folder, model_hash=expected)
        faults += len(found)
        for fault in found:
            print(fault.sentence)
        what = counted(len(found), "fault") if found else "right"
        print(
            f"{folder.folder}: {_made_of(folder)} in {counted(folder.manifest['blocks'], 'block')}: {what}", flush=True
        )
        if found and args.mend:
            try:
                print(f"its good blocks are in {reopen(folder, found)}: run the same encode command again")
            except (ValueError, OSError) as error:
                print(error)
    if len(opened) == len(paths):
        try:
            in_order(opened)
        except (ValueError, OSError) as error:
            faults += 1
            print(error)
    if faults:
        raise ValueError(f"verify: {counted(faults, 'fault')} in {counted(len(paths), 'folder')}. See above.")


def _written(folder: Any) -> str:
    from st_aggretriever.vectors.manifest import counted

    size = f"{folder.layout.dtype}, {folder.size / 1e6:,.1f} MB"
    return f"{_made_of(folder)}, {size}, {counted(folder.manifest['blocks'], 'block')}"


def _made_of(folder: Any) -> str:
    from st_aggretriever.vectors.manifest import counted

    made = folder.manifest
    return f"{counted(folder.rows, made['side'] + ' vector')} of {counted(made['dimension'], 'dimension')}"


def add_merge(commands: argparse._SubParsersAction) -> None:
    merge = commands.add_parser(
        "merge",
        help="put shards of vectors together",
        description="Check all shards of one collection and put their blocks into one folder, as one process would "
        "have written it. Files are linked where the file system can, and take no space then. After an interruption "
        "the same command goes on.",
    )
    merge.add_argument("folders", nargs="+", metavar="DIR", help="all shards, or the folder that holds them")
    merge.add_argument("--output", required=True, metavar="DIR", help="folder to write; it must not exist")
    merge.add_argument("--copy", action="store_true", help="copy the files instead of linking them")
    merge.set_defaults(function=_merge)


def _merge(args: argparse.Namespace) -> None:
    from st_aggretriever.vectors.shards import merge_shards

    folder = merge_shards(args.folders, args.output, copy=args.copy)
    print(f"wrote {args.output}: {_written(folder)}")


def add_search(commands: argparse._SubParsersAction) -> None:
    search = commands.add_parser(
        "search",
        help="search vectors on disk",
        description="Search the vectors that encode wrote, exactly, or by an approximate Faiss index whose recall is "
        "printed. Queries of another model, order of parts or dimension are refused.",
    )
    search.add_argument(
        "--index",
        nargs="+",
        required=True,
        metavar="DIR",
        help="document vectors, written by encode or merge; also several, or a folder that holds shards",
    )
    search.add_argument(
        "--workers", type=int, default=1, metavar="N", help="search N of several folders at a time (default: 1)"
    )
    search.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: an actor of Ray for each folder, here or on the cluster at RAY_ADDRESS (default: %(default)s)",
    )
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
    search.add_argument("--on-disk", metavar="DIR", help="search by an index on disk that the command index built")
    search.add_argument(
        "--recall-queries",
        type=int,
        metavar="N",
        help="with --on-disk: measure its recall against exact search on the first N queries (default: 100)",
    )
    search.add_argument("--save-index", metavar="FILE", help="keep the index of --index-factory in this file")
    search.add_argument(
        "--load-index", metavar="FILE", help="search by an index that --save-index wrote for the same vectors"
    )
    add_backend(search)
    search.set_defaults(function=_search)


def check_index_options(args: argparse.Namespace) -> None:
    """Refuse options of search that don't belong together, and an index file that is there already."""
    from st_aggretriever.atomic import check_outputs

    if args.on_disk and (args.index_factory or args.load_index or args.save_index or args.index_dtype):
        raise ValueError("search: --on-disk is an index; leave --index-factory, --load-index, --save-index and"
                         " --index-dtype out.")  # fmt: skip
    if args.index_factory and args.load_index:
        raise ValueError("search: --index-factory builds an index, --load-index reads one. Give one of them.")
    if (args.save_index or args.index_parameters) and not (args.index_factory or args.load_index or args.on_disk):
        raise ValueError("search: --save-index and --index-parameters belong to --index-factory or --load-index.")
    if args.save_index and args.load_index:
        raise ValueError("search: --load-index reads what is in a file already; leave --save-index out.")
    if (args.index_factory or args.load_index) and args.index_dtype:
        raise ValueError("search: an approximate index says itself how numbers are stored; leave --index-dtype out.")
    if (args.index_factory or args.load_index) and args.workers != 1:
        raise ValueError("search: --index-factory and --load-index search one folder; leave --workers out.")
    if (args.index_factory or args.load_index or args.on_disk) and args.engine != "local":
        raise ValueError("search: an approximate index is searched by this process; leave --engine out.")
    if args.engine != "local" and args.workers != 1:
        raise ValueError("search: Ray has an actor for each folder; leave --workers out.")
    if args.recall_queries is None:
        args.recall_queries = 100
    elif not args.on_disk:
        raise ValueError("search: --recall-queries belongs to --on-disk.")
    elif args.recall_queries < 0:
        raise ValueError(f"search: --recall-queries must be 0 or more, got {args.recall_queries}.")
    check_outputs(args.run, args.save_index, args.overwrite)


def _search(args: argparse.Namespace) -> None:
    from st_aggretriever.atomic import replacing
    from st_aggretriever.evaluation.runs import check_run_id, run_lines
    from st_aggretriever.search import retrieve
    from st_aggretriever.search.approximate import build_index, load_index, save_index, search_approximately
    from st_aggretriever.search.shards import ShardSearch
    from st_aggretriever.vectors.folder import VectorFolder
    from st_aggretriever.vectors.manifest import counted
    from st_aggretriever.vectors.shards import open_shards

    check_index_options(args)
    folders = open_shards(args.index, args.lexical_dim)
    index, queries = folders[0], VectorFolder(args.queries, args.lexical_dim)
    for folder in folders:
        query_ids, vectors = retrieve.load_queries(queries, folder)
    advice = "Encode it under another id."
    for key in query_ids:  # all of them before the search
        check_run_id("query", key, advice)
    for folder in folders:
        for number in range(folder.manifest["blocks"]):
            for key in folder.ids(number):
                check_run_id("document", key, advice)
    exact = not (args.on_disk or args.index_factory or args.load_index)
    print(retrieve.describe_search(folders, len(query_ids), args.index_dtype, exact=exact), flush=True)
    if args.on_disk:
        hits = _search_on_disk(args, folders, vectors)
    elif args.index_factory or args.load_index:
        if len(folders) > 1:
            raise ValueError("search: --index-factory and --load-index take one folder. Merge the shards first.")
        if args.load_index:
            built = load_index(args.load_index, index)
        else:
            built = build_index(index, args.index_factory, args.index_parameters)
        if args.save_index:
            save_index(args.save_index, built, index)
            print(f"index written to {args.save_index}", flush=True)
        options = {"backend": args.backend, "device": args.device}
        hits, report = search_approximately(index, vectors, args.top_k, built, args.index_parameters, **options)
        print(
            f"{' '.join([report['factory'], report['parameters']]).strip()}: recall of the exact {hits.ids.shape[1]} "
            f"{report['recall']:.4f}, index {report['bytes'] / 1e6:,.1f} MB, seconds {report['seconds']}"
        )
    else:
        options = {"dtype": args.index_dtype, "backend": args.backend, "device": args.device}
        if args.engine == "ray":
            from st_aggretriever.ray_engine import search_by_ray

            hits = search_by_ray(folders, vectors, args.top_k, **options)
        else:
            with ShardSearch(folders, workers=args.workers, **options) as shards:
                hits = shards.search(vectors, args.top_k)
    for folder in (queries, *folders):
        if folder.folding():
            print(folder.folding())
    with replacing(args.run) as file:
        file.writelines(run_lines(retrieve.rankings_of(query_ids, hits), args.format))
    most = counted(hits.ids.shape[1], "hit")
    print(f"run written to {args.run}: {counted(len(query_ids), 'query')}, up to {most} each")


def _search_on_disk(args: argparse.Namespace, folders: Any, vectors: Any) -> Any:
    from st_aggretriever.search.exact import Hits
    from st_aggretriever.search.ondisk import search_on_disk
    from st_aggretriever.search.retrieve import recall
    from st_aggretriever.search.shards import ShardSearch
    from st_aggretriever.vectors.manifest import counted

    hits, report = search_on_disk(args.on_disk, folders, vectors, args.top_k, parameters=args.index_parameters)
    line = f"{' '.join([report['factory'], *args.index_parameters.split()])}: {report['bytes'] / 1e6:,.1f} MB on disk"
    sample = min(args.recall_queries, len(vectors))
    if sample > 0:
        with ShardSearch(folders, workers=args.workers, backend=args.backend, device=args.device) as shards:
            exact = shards.search(vectors[:sample], args.top_k)
        found = recall(Hits(hits.scores[:sample], hits.ids[:sample]), exact)
        line += f", recall of the exact {exact.ids.shape[1]} {found:.4f} on {counted(sample, 'query')}"
    print(f"{line}, seconds {report['seconds']}")
    return hits


def add_index(commands: argparse._SubParsersAction) -> None:
    index = commands.add_parser(
        "index",
        help="build an approximate index that stays on disk",
        description="Train an inverted file of compressed codes on a sample of the vectors and fill it on disk, part "
        "by part, for more vectors than fit in memory. After an interruption the same command goes on.",
    )
    index.add_argument("--vectors", nargs="+", required=True, metavar="DIR", help="document vectors, as for search")
    index.add_argument(
        "--factory", required=True, metavar="NAME", help="an inverted file by Faiss's name, for instance IVF65536,PQ96"
    )
    index.add_argument("--output", required=True, metavar="DIR", help="folder to write; it must not exist")
    index.add_argument(
        "--training-vectors", type=int, default=1_000_000, metavar="N", help="size of the sample (default: %(default)s)"
    )
    index.set_defaults(function=_index)


def _index(args: argparse.Namespace) -> None:
    from st_aggretriever.search.ondisk import build_on_disk
    from st_aggretriever.vectors.manifest import counted
    from st_aggretriever.vectors.shards import open_shards

    if args.training_vectors < 1:
        raise ValueError(f"index: --training-vectors must be at least 1, got {args.training_vectors}.")
    folders = open_shards(args.vectors)
    path = build_on_disk(folders, args.factory, args.output, training_vectors=args.training_vectors)
    size = sum(file.stat().st_size for file in path.iterdir())
    rows = counted(sum(folder.rows for folder in folders), "vector")
    print(f"wrote {path}: {rows} in {args.factory}, {size / 1e6:,.1f} MB")
