"""The ``st-aggretriever`` command: thin, a group of subcommands a file, heavy imports inside the functions."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|bad_alloc")  # a GPU's, torch's on the CPU, Faiss's


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 done, 2 bad input, 130 interrupted)."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars go by it too
    try:
        args.function(args)
    except KeyboardInterrupt as interrupt:
        print(f"st-aggretriever: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return _leave(130)
    except BrokenPipeError:
        # The reader of a pipe (head, less) has gone; keep Python's shutdown from complaining about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError, MemoryError, RuntimeError) as error:
        ours = isinstance(error, (ValueError, OSError, ImportError))
        memory = isinstance(error, MemoryError) or (not ours and OUT_OF_MEMORY.search(str(error)))
        if os.environ.get("ST_AGGRETRIEVER_TRACEBACK") or not (ours or memory):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        if memory:
            message = f"out of memory ({message[:200].rstrip('.')}). Lower --batch-size or --block-size, or free some."
        print(f"st-aggretriever: {message.removeprefix('st_aggretriever: ')}", file=sys.stderr)
        return _leave(2)
    return 0


def _leave(code: int) -> int:
    """A process that has joined a group ends here and now: to free gloo's threads after a failure can wait for ever."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)  # never imported for a message's sake
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _parser() -> argparse.ArgumentParser:
    from st_aggretriever.cli import check, evaluate, explain, export, hub, mine, models, training, vectors

    parser = argparse.ArgumentParser(
        prog="st-aggretriever", description="Train, search with and evaluate Aggretriever models."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    training.add_quickstart(commands)
    training.add_train(commands)
    mine.add_mine(commands)
    vectors.add_encode(commands)
    vectors.add_verify(commands)
    vectors.add_merge(commands)
    vectors.add_index(commands)
    vectors.add_search(commands)
    evaluate.add_evaluate(commands)
    evaluate.add_fuse(commands)
    explain.add_explain(commands)
    models.add_convert(commands)
    models.add_inspect(commands)
    export.add_export(commands)
    check.add_check(commands)
    hub.add_push(commands)
    return parser
