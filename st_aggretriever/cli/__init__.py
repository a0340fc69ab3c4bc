"""The ``st-aggretriever`` command: thin, a group of subcommands a file, heavy imports inside the functions."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|bad_alloc")  # a GPU's, torch's on the CPU, Faiss's


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 done, 2 bad input, 130 interrupted, 141 the reader of a pipe has gone, 143 terminated.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars go by it too
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal of another encoding than a text's
    with _terminated_as_interrupted() as terminated:
        try:
            args.function(args)
            if sys.stdout is not None:  # closed, as a daemon's may be
                sys.stdout.flush()
        except KeyboardInterrupt as interrupt:
            print(f"st-aggretriever: {str(interrupt) or 'interrupted'}", file=sys.stderr)
            return _leave(143 if terminated else 130)
        except BrokenPipeError:
            # head or less has gone. Not 0: the work may have ended here. Python's shutdown shan't complain of it too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (ValueError, OSError, ImportError, MemoryError, RuntimeError) as error:
            if os.environ.get("ST_AGGRETRIEVER_TRACEBACK") or (message := _sentence(error)) is None:
                raise
            print(f"st-aggretriever: {message.removeprefix('st_aggretriever: ')}", file=sys.stderr)
            return _leave(2)
    return 0


def _sentence(error: Exception) -> str | None:
    """What to tell of an error, on one line; None of one that is a fault of ours."""
    from st_aggretriever.atomic import FULL

    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.errno in FULL and error.filename:
        return f"no space is left for {error.filename} ({error.strerror}). Make room and run the same command again."
    if isinstance(error, (ValueError, OSError, ImportError)):
        return message
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)):
        return f"out of memory ({message[:200].rstrip('.')}). Lower --batch-size or --block-size, or free some."
    return None


@contextmanager
def _terminated_as_interrupted() -> Iterator[list[int]]:
    """Have SIGTERM (kill, timeout, a scheduler) end the command as Ctrl-C does: files closed, workers stopped.

    Gives a list that is empty until then.
    """
    received: list[int] = []
    process = os.getpid()

    def end(number: int, frame: object) -> None:
        if os.getpid() != process:  # a forked child, which is to end at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        received.append(number)
        raise KeyboardInterrupt

    # Not in a thread, where that is forbidden, nor where somebody's own handler is set.
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield received
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(code: int) -> int:
    """A process that has joined a group ends here and now: to free gloo's threads after a failure can wait for ever."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)  # never imported for a message's sake
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
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
