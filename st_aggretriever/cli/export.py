"""The subcommands that export: export onnx, export milvus, export qdrant."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any


def add_export(commands: argparse._SubParsersAction) -> None:
    export = commands.add_parser(
        "export",
        help="write a model, or vectors, for other programs",
        description="Write a model, or vectors, for other programs.",
    )
    formats = export.add_subparsers(title="formats", metavar="FORMAT", required=True)
    _add_onnx(formats)
    _add_milvus(formats)
    _add_qdrant(formats)


def _add_onnx(formats: argparse._SubParsersAction) -> None:
    onnx = formats.add_parser(
        "onnx",
        help="the whole pipeline as one ONNX file",
        description="Write model.onnx (token ids and mask in, the vector out, any batch and length), its tokenizer and "
        "a README into a new folder. The file is compared with the model on five shapes; if it differs by more than "
        "1e-5 nothing is written.",
    )
    onnx.add_argument("model", metavar="PATH", help="folder or Hub id of an Aggretriever")
    onnx.add_argument("output", metavar="OUT", help="folder to write; it must not exist")
    onnx.add_argument("--int8", action="store_true", help="also model_int8.onnx, with its measured difference")
    onnx.set_defaults(function=_onnx)


def _onnx(args: argparse.Namespace) -> None:
    from st_aggretriever.export.onnx import SHAPES, export_onnx

    report = export_onnx(args.model, args.output, int8=args.int8)
    print(
        f"wrote {report.folder}: checked at {len(SHAPES)} shapes, largest difference {report.difference:.1e}, "
        f"{report.turned} signs turned where two halves are equal"
    )
    if report.int8:
        print("model_int8.onnx: " + ", ".join(f"{name.replace('_', ' ')} {x:.5f}" for name, x in report.int8.items()))


def _add_milvus(formats: argparse._SubParsersAction) -> None:
    milvus = formats.add_parser(
        "milvus",
        help="vectors into a collection of Milvus",
        description="Put a folder of document vectors into a Milvus collection by inner product. The ids are kept; "
        "what is there already is compared and not added again, so the same command goes on where it was stopped. "
        "Needs the extra [milvus].",
    )
    _add_store(milvus, "a file whose name ends with .db for the embedded Milvus, or http://HOST:PORT")
    milvus.add_argument(
        "--index",
        default="FLAT",
        metavar="TYPE",
        help="FLAT is exact; AUTOINDEX, HNSW, HNSW_SQ, IVF_FLAT, IVF_SQ8, and on a server more (default: %(default)s)",
    )
    milvus.set_defaults(function=_milvus)


def _add_qdrant(formats: argparse._SubParsersAction) -> None:
    qdrant = formats.add_parser(
        "qdrant",
        help="vectors into a collection of Qdrant",
        description="Put a folder of document vectors into a Qdrant collection by inner product. A document's id is "
        "the payload 'id' of its point; what is there already is compared and not added again. Needs the extra "
        "[qdrant].",
    )
    _add_store(qdrant, "http://HOST:PORT, or a folder for the client's local mode")
    qdrant.set_defaults(function=_qdrant)


def _add_store(parser: argparse.ArgumentParser, uri: str) -> None:
    parser.add_argument("--vectors", required=True, metavar="DIR", help="folder of `st-aggretriever encode`")
    parser.add_argument("--uri", required=True, help=uri)
    parser.add_argument("--collection", metavar="NAME", help="default: the folder's name")
    parser.add_argument("--token-env", metavar="VARIABLE", help="environment variable with the store's token or key")


def _milvus(args: argparse.Namespace) -> None:
    from st_aggretriever.export.milvus import Milvus

    _export_vectors(args, lambda collection, token: Milvus(args.uri, collection, token=token, index=args.index))


def _qdrant(args: argparse.Namespace) -> None:
    from st_aggretriever.export.qdrant import Qdrant

    _export_vectors(args, lambda collection, key: Qdrant(args.uri, collection, api_key=key))


def _export_vectors(args: argparse.Namespace, connect: Callable[[str, str | None], Any]) -> None:
    from st_aggretriever.export.stores import collection_name, export_vectors
    from st_aggretriever.vectors.folder import VectorFolder
    from st_aggretriever.vectors.manifest import counted

    token = None
    if args.token_env is not None:
        token = os.environ.get(args.token_env)
        if not token:
            raise ValueError(f"--token-env {args.token_env}: there is no such environment variable.")
    folder = VectorFolder(args.vectors)
    store = connect(args.collection or collection_name(args.vectors), token)
    try:
        done = export_vectors(store, folder)
    finally:
        store.close()
    print(
        f"{args.uri}, collection {done.collection}: {done.added:,} of {counted(done.rows, 'vector')} added, "
        f"{done.rows - done.added:,} there before; it holds {done.held:,}, compared by inner product"
    )
