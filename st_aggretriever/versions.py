"""The versions that a figure or a trained model depends on."""

from __future__ import annotations

import platform
from importlib import metadata

# Name -> the distributions that may hold it.
_PACKAGES = {
    "sentence-transformers": ["sentence-transformers"],
    "transformers": ["transformers"],
    "torch": ["torch"],
    "numpy": ["numpy"],
    "datasets": ["datasets"],
    "accelerate": ["accelerate"],
    "faiss": ["faiss-cpu", "faiss-gpu-cu12", "faiss-gpu"],
    "pytrec_eval": ["pytrec-eval-terrier", "pytrec_eval"],
    "bm25s": ["bm25s"],
    "mteb": ["mteb"],
}


def versions() -> dict[str, str | None]:
    """Of this package, Python, and the packages that can change a number; None for what isn't installed."""
    from st_aggretriever import __version__

    found: dict[str, str | None] = {"st_aggretriever": __version__, "python": platform.python_version()}
    for name, distributions in _PACKAGES.items():
        found[name] = next(filter(None, map(_installed, distributions)), None)
    return found


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
