"""The subcommands that train: quickstart, train."""

from __future__ import annotations

import argparse
from typing import Any, get_args


def add_quickstart(commands: argparse._SubParsersAction) -> None:
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


def add_train(commands: argparse._SubParsersAction) -> None:
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
