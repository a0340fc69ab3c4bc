"""Files that take their name only when they are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that is written under another name, synced to disk and then renamed; nothing stays after a failure.

    Args:
        path: The final name; an existing file is replaced in one step.
        mode: ``"w"``, text in UTF-8 with ``\\n`` at the ends of lines, or ``"wb"``.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        with temporary.open(mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power failure could leave the new name with no content
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
