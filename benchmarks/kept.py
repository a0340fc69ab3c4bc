"""What a benchmark keeps in its folder, to go on from: of one setting, never taken for another's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from st_aggretriever.atomic import replacing
from st_aggretriever.readers.text import checksum


def content_of(path: str | Path) -> str:
    """SHA-256 of a file, of the weights and settings in a model's folder, or of the name of what lies on the Hub."""
    path = Path(path)
    if path.is_file():
        return checksum(path)
    files = sorted(file for file in path.rglob("*") if file.suffix in (".safetensors", ".bin", ".json"))
    sums = [f"{file.relative_to(path).as_posix()} {checksum(file)}" for file in files]
    return hashlib.sha256("\n".join(sums or [str(path)]).encode()).hexdigest()


def keep(output: Path, **settings: Any) -> None:
    """Make the folder for figures of these settings, or go on in it; ends with a sentence where it holds others', or
    doesn't say whose.
    """
    output.mkdir(parents=True, exist_ok=True)
    file = output / "settings.json"
    now = json.loads(json.dumps(settings))
    if not file.exists():
        if any(output.iterdir()):
            raise SystemExit(f"{output} is not empty and has no settings.json. Name another --output.")
        with replacing(file) as written:
            written.write(json.dumps(now, indent=1) + "\n")
    before = json.loads(file.read_text(encoding="utf-8"))
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise SystemExit(
                f"{output} holds figures made with {name} {str(before.get(name))[:80]}, now it is "
                f"{str(now.get(name))[:80]}. Name another --output."
            )
