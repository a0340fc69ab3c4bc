"""What a benchmark keeps in its folder, to go on from: of one setting, never taken for another's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from st_aggretriever.atomic import replacing
from st_aggretriever.readers.text import checksum


def content_of(path: str | Path) -> str:
    """SHA-256 of a file, of the weights in a model's folder, or of the name of what lies on the Hub."""
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    sums = " ".join(checksum(file) for file in files) or str(path)
    return sums if len(files) == 1 else hashlib.sha256(sums.encode()).hexdigest()


def keep(output: Path, **settings: Any) -> None:
    """Make the folder for figures of these settings, or go on in it; ends with a sentence where it holds others'."""
    output.mkdir(parents=True, exist_ok=True)
    file = output / "settings.json"
    now = json.loads(json.dumps(settings))
    if not file.exists():
        with replacing(file) as written:
            written.write(json.dumps(now, indent=1) + "\n")
    before = json.loads(file.read_text(encoding="utf-8"))
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise SystemExit(
                f"{output} holds figures made with {name} {str(before.get(name))[:80]}, now it is "
                f"{str(now.get(name))[:80]}. Name another --output."
            )
