"""The subcommands that export: export onnx."""

from __future__ import annotations

import argparse


def add_export(commands: argparse._SubParsersAction) -> None:
    export = commands.add_parser(
        "export", help="write a model for other programs", description="Write a model for other programs."
    )
    formats = export.add_subparsers(title="formats", metavar="FORMAT", required=True)
    _add_onnx(formats)


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
