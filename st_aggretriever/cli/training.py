"""The subcommands that train: quickstart, train."""

from __future__ import annotations

import argparse
from pathlib import Path
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

    from st_aggretriever.config import GROUPS, TrainConfig, default_of

    train = commands.add_parser(
        "train",
        help="train a model on pairs",
        usage="%(prog)s --model MODEL --pairs PAIRS [PAIRS ...] --output OUTPUT [options]",
        description="Train an Aggretriever on question/passage pairs. Meanwhile checkpoints lie in OUTPUT.partial; "
        "OUTPUT appears as a whole at the end, with a report, and settings, data and losses in train.json. Several "
        "processes: torchrun --nproc-per-node N -m st_aggretriever.cli train ...",
    )
    hints = get_type_hints(TrainConfig)
    group: Any = train
    for option in fields(TrainConfig):
        if option.name in GROUPS:
            group = train.add_argument_group(GROUPS[option.name])
        shown = option.metadata.get("shown")
        help = option.metadata["help"].replace("%", "%%") + (f" (default: {shown})" if shown not in (None, "") else "")
        keywords: dict[str, Any] = {"help": help, "dest": option.name, "default": default_of(option.name)}
        if option.default is MISSING and option.default_factory is MISSING:
            keywords |= {"required": True}
            del keywords["default"]
        kinds = [kind for kind in (int, float, bool) if kind in _kinds(hints[option.name])]
        if bool in kinds:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords |= {"type": kinds[0] if kinds else str, "choices": option.metadata.get("choices")}
            keywords["metavar"] = None if keywords["choices"] else "N" if kinds else option.name.upper()
            if getattr(hints[option.name], "__origin__", None) is list:
                keywords["nargs"] = "+"
        names = [f"--{option.name.replace('_', '-')}"]
        if option.name == "model":
            names.append("--resume-from")  # The paper's word for two further epochs with mined negatives.
        group.add_argument(*names, **keywords)
    train.set_defaults(function=_train)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """``int`` of ``int``, ``int | None`` and ``list[int]``."""
    return (hint, *get_args(hint))


def _train(args: argparse.Namespace) -> None:
    from st_aggretriever.config import TrainConfig
    from st_aggretriever.run_folder import RECORD
    from st_aggretriever.training import is_first, train

    config = TrainConfig(**{name: value for name, value in vars(args).items() if name != "function"})
    complete = config.resume and (Path(config.output) / RECORD).is_file()
    model = train(config)
    if not is_first():
        return
    files = "train.json, a summary in report.md" if config.report else "train.json"
    written = f"{config.output} is complete already\n" if complete else "wrote "
    print(f"{written}{config.output}: {model.get_embedding_dimension()} dimensions; settings and losses in {files}")
