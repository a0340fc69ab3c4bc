"""The licence of a converted model is its source's: found, written beside the weights, and said."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load

from st_aggretriever.convert.checkpoint import LICENCE_FILES

FIELDS = ("license", "license_name", "license_link")


@dataclass
class Licence:
    """What a checkpoint says of its licence: fields of its model card's metadata, and files."""

    fields: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)

    def __str__(self) -> str:
        name = self.fields.get("license_name") or self.fields.get("license")
        if name:
            return name + (f" ({self.fields['license_link']})" if "license_link" in self.fields else "")
        if self.files:
            return "see " + ", ".join(path.name for path in self.files)
        return "none named by the source: ask its authors before you pass the model on"

    def copy_to(self, folder: Path) -> None:
        for path in self.files:
            shutil.copyfile(path, folder / path.name)


def licence_of(folder: Path) -> Licence:
    """Read the licence of a checkpoint's folder."""
    files = sorted({path for pattern in LICENCE_FILES for path in folder.glob(pattern) if path.is_file()})
    card = folder / "README.md"
    metadata: dict[str, Any] = {}
    if card.is_file():
        try:
            metadata = metadata_load(card) or {}
        except Exception:  # Broken metadata names no licence; what a YAML parser raises is its own affair.
            metadata = {}
    # YAML makes a number of 1.0 and a date of 2024-01-01.
    values = {key: metadata[key] if isinstance(metadata[key], list) else [metadata[key]]
              for key in FIELDS if metadata.get(key)}  # fmt: skip
    return Licence({key: ", ".join(map(str, value)) for key, value in values.items()}, files)
