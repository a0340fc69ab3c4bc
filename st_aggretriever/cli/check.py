"""The subcommand that judges vectors made elsewhere: check."""

from __future__ import annotations

import argparse


def add_check(commands: argparse._SubParsersAction) -> None:
    check = commands.add_parser(
        "check",
        help="whether a folder, an ONNX file or a server gives the model's vectors",
        description="Every saved model carries check.json: three texts with their vectors. Hold a model's folder, the "
        "file of export onnx, or a running server (OpenAI's way or text-embeddings-inference's) against it. Exits with "
        "2 where the vectors are wrong or refused.",
    )
    check.add_argument(
        "target", metavar="PATH|URL", help="folder, .onnx file, or http://HOST:PORT with or without route"
    )
    check.add_argument("--model", metavar="FOLDER", help="whose check.json counts (default: the path's own)")
    check.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference, in parts of the vector's largest number (default: 0.001, or 0.02 where the model was "
        "saved in half precision or quantised)",
    )
    check.add_argument("--name", help="the model's name on an OpenAI-style server (default: the first that it lists)")
    check.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable with the server's key")
    check.set_defaults(function=_check)


def _check(args: argparse.Namespace) -> None:
    from st_aggretriever.check import api_key_from, check

    key = api_key_from(args.api_key_env)
    verdict, what = check(args.target, model=args.model, tolerance=args.tolerance, name=args.name, api_key=key)
    for number, (difference, cosine) in enumerate(zip(verdict.differences, verdict.cosines, strict=True), 1):
        print(f"text {number}: difference {difference:.1e}, cosine {cosine:.5f}")
    if not verdict.right:
        raise ValueError(f"check: {what}: {verdict.sentence}")
    print(f"{what}: {verdict.sentence}")
