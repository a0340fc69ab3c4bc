"""Files and folders that take their name only when they are complete, and that one process writes at a time."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room on the disk, in a quota, below the limit of a file's size


@contextmanager
def replacing(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that is written under another name, synced to disk and then renamed; nothing stays after a failure.

    Args:
        path: The final name; an existing file is replaced in one step, behind a symbolic link the file it leads to.
        mode: ``"w"``, text in UTF-8 with ``\\n`` at the ends of lines, or ``"wb"``.
    """
    path = Path(path)
    target = Path(os.path.realpath(path))
    temporary = temporary_of(target)
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        with temporary.open(mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power failure could leave the new name with no content
        temporary.replace(target)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise  # of another file, or with a sentence of its own
        raise OSError(error.errno, error.strerror, str(path)) from None  # by the name that somebody gave
    finally:
        temporary.unlink(missing_ok=True)


def temporary_of(path: Path) -> Path:
    """Where a file lies until it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def partial_of(folder: str | Path) -> Path:
    """Where a folder lies until it is complete."""
    folder = Path(folder)
    return folder.with_name(f"{folder.name}.partial")


def claim_partial(partial: Path, form: str) -> None:
    """Make the folder in which something of a form is written, or take one that was begun.

    Args:
        form: What the ``format`` of its manifest.json says, which is the first thing that is written.

    Raises:
        FileExistsError: It is somebody else's.
    """
    manifest = partial / "manifest.json"
    try:
        partial.mkdir(exist_ok=True)
        begun = json.loads(manifest.read_text(encoding="utf-8"))
        ours = not isinstance(begun, dict) or begun.get("format") == form
    except FileNotFoundError:
        ours = all(re.fullmatch(r"\.lock|\.manifest\.json\.\d+\.tmp", path.name) for path in partial.iterdir())
    except FileExistsError:
        ours = False  # a file
    except (ValueError, RecursionError):
        ours = True  # damaged, which who reads it says
    if not ours:
        raise FileExistsError(f"{partial} is in the way: it holds something else. Move it, or name another output.")


def check_output(output: str | Path) -> None:
    """Refuse a file or folder that exists, or whose own folder doesn't.

    Raises:
        FileExistsError, FileNotFoundError.
    """
    output = Path(output)
    if output.exists():
        raise FileExistsError(f"{output} exists. Name another output.")
    check_parent(output)


def check_outputs(run: str | Path | None, output: str | Path | None, overwrite: bool) -> None:
    """Refuse output files that exist, that have no folder, or that are one file.

    Raises:
        FileExistsError, FileNotFoundError, PermissionError (or another OSError), ValueError: in this order.
    """
    paths = [Path(path) for path in (run, output) if path is not None]
    for path in paths:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no regular file"  # a device, a pipe: replaced, it would be gone
            raise FileExistsError(f"{path} is {kind}. Name a file.")
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists already. Name another file or overwrite it (--overwrite).")
        check_parent(path)
    if len(paths) == 2 and paths[0].resolve() == paths[1].resolve():
        raise ValueError(f"two outputs are both {paths[0]}. Name two files.")


def check_parent(output: Path) -> None:
    """Refuse an output whose folder doesn't exist, or takes no new file: before the work, not after it.

    Raises:
        FileNotFoundError, PermissionError or another OSError.
    """
    target = Path(os.path.realpath(output))  # where a symbolic link leads to
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder of {output} does not exist. Make it first.")
    try:
        probe = temporary_of(target)
        probe.open("wb").close()
        probe.unlink()
    except OSError as error:
        raise type(error)(f"{output} can't be written ({error.strerror}). Name another output.") from None


def check_place(output: Path) -> None:
    """Refuse an output that can't be made together with the folders above it that are missing.

    Raises:
        NotADirectoryError: A file is in the way.
        OSError: The folder that is there takes no new file.
    """
    output = output.absolute()
    above = next(path for path in output.parents if os.path.exists(path))
    if not above.is_dir():
        raise NotADirectoryError(f"{output} can't be made: {above} is a file. Name another output.")
    check_parent(above / output.relative_to(above).parts[0])


def lock_folder(folder: Path) -> IO[Any]:
    """The lock of a folder that one process writes, see :func:`lock_file`."""
    return lock_file(folder / ".lock", f"another process is writing {folder}")


def _is_at(path: Path, file: IO[Any]) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def lock_file(path: Path, busy: str, tries: int = 3) -> IO[Any]:
    """The open file whose lock this process now holds; it ends when that is closed, or with the process.

    Args:
        busy: What to say where another process holds it.
        tries: How often to lock it anew where the file that was locked bears that name no more.

    Raises:
        BlockingIOError: Another one holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows: no lock; an open file there would keep its folder from being renamed
        path.touch()
        return open(os.devnull, "w")
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BlockingIOError(f"{busy}. Wait until it has ended, or name another output.") from None
    except OSError as error:  # a file system that knows no locks
        logger.warning("%s: no lock here (%s). Don't let two processes write it.", path.parent, error.strerror)
        return file
    if tries > 1 and not _is_at(path, file):  # its holder has just removed it: others would lock a new one
        file.close()
        return lock_file(path, busy, tries - 1)
    return file
