"""The subcommand that publishes: push."""

from __future__ import annotations

import argparse


def add_push(commands: argparse._SubParsersAction) -> None:
    push = commands.add_parser(
        "push",
        help="publish a model on the Hugging Face Hub",
        description="Check a folder (it must load in a fresh process without this package, with equal vectors), write "
        "its model card, and upload both in one commit, with a tag for the card's revision=. With --dry-run nothing "
        "leaves this machine. The token is the one of `hf auth login`, or HF_TOKEN.",
    )
    push.add_argument("path", metavar="PATH", help="folder of a saved Aggretriever")
    push.add_argument("repo_id", metavar="REPO_ID", help="OWNER/NAME")
    push.add_argument("--license", metavar="ID", help="such as apache-2.0 (default: what the folder states)")
    push.add_argument("--license-name", metavar="NAME", help="with --license other")
    push.add_argument("--license-link", metavar="URL", help="with --license other")
    push.add_argument(
        "--results", nargs="+", default=[], metavar="FILE", help="JSON files of evaluate, or folders of them"
    )
    push.add_argument(
        "--data-license",
        nargs="+",
        default=[],
        metavar="NAME=LICENSE",
        help="of training data, by the file's or folder's name; nq/train.jsonl where several are called train.jsonl",
    )
    push.add_argument("--base-model", metavar="ID", help="Hub id of what training started from")
    push.add_argument("--language", nargs="+", default=[], metavar="CODE", help="such as en")
    push.add_argument("--private", action="store_true", help="make a new repository private")
    push.add_argument("--dry-run", action="store_true", help="show the files and the card, and stop")
    push.set_defaults(function=_push)


def _push(args: argparse.Namespace) -> None:
    from st_aggretriever import hub
    from st_aggretriever.card import Statement

    pairs = [pair.partition("=") for pair in args.data_license]
    for name, equals, licence in pairs:
        if not (name and equals and licence):
            raise ValueError(f"push: --data-license takes NAME=LICENSE, got {name + equals + licence!r}.")
    statement = Statement(
        license=args.license,
        license_name=args.license_name,
        license_link=args.license_link,
        results=args.results,
        data_licences={name: licence for name, _, licence in pairs},
        base_model=args.base_model,
        language=args.language,
    )
    plan = hub.plan_push(args.path, args.repo_id, statement)
    print("\n".join(hub.format_plan(plan)), flush=True)
    if args.dry_run:
        print("\nnothing was uploaded")
        return
    url = hub.push(plan, private=args.private)
    print(f"\npushed: {url}, tag {plan.tag}")
