"""MS MARCO's files: ``id<tab>text`` collections and queries (either may be gzip)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from st_aggretriever.readers.text import read_lines, text_of


def read_tsv(path: str | Path) -> Iterator[tuple[str, str]]:
    """Stream ``(id, text)`` in the file's order; memory grows with the ids only.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A line without tab, without id or with blanks in it, or an id that came before; the sentence names
            file and line.
    """
    seen: set[str] = set()
    for number, line in read_lines(path):
        key, tab, text = line.partition("\t")
        if not tab or not key or len(key.split()) != 1 or key != key.strip():
            raise ValueError(f"{path} line {number}: expected 'id<tab>text', got {line[:200]!r}.")
        if key in seen:
            raise ValueError(f"{path} line {number}: id {key!r} occurs a second time.")
        seen.add(key)
        yield key, text_of({"text": text}, "text").strip()
