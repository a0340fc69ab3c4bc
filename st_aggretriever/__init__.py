"""Aggretriever (Lin, Li, Lin; TACL 2023) as sentence-transformers modules.

Names load on first use, so that ``import st_aggretriever`` and ``st-aggretriever --help`` stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from st_aggretriever.config import TrainConfig
    from st_aggretriever.convert import convert_checkpoint
    from st_aggretriever.explain import explain_scores, explain_texts
    from st_aggretriever.folding import fold_embeddings
    from st_aggretriever.losses import AggretrieverLoss, CachedAggretrieverLoss, Distillation
    from st_aggretriever.model import build_aggretriever, load_aggretriever
    from st_aggretriever.modules import (
        CLSProjection,
        Concat,
        MeanProjection,
        MLMEncoder,
        MLMLexicalPooling,
        SliceMaxAgg,
        TokenLexicalPooling,
    )
    from st_aggretriever.modules import __version__ as __version__
    from st_aggretriever.training import train
    from st_aggretriever.windows import encode_windows

_HOME = {
    "MLMEncoder": "modules",
    "MLMLexicalPooling": "modules",
    "TokenLexicalPooling": "modules",
    "SliceMaxAgg": "modules",
    "CLSProjection": "modules",
    "MeanProjection": "modules",
    "Concat": "modules",
    "__version__": "modules",
    "AggretrieverLoss": "losses",
    "CachedAggretrieverLoss": "losses",
    "Distillation": "losses",
    "build_aggretriever": "model",
    "explain_scores": "explain",
    "explain_texts": "explain",
    "convert_checkpoint": "convert",
    "encode_windows": "windows",
    "fold_embeddings": "folding",
    "load_aggretriever": "model",
    "TrainConfig": "config",
    "train": "training",
}

__all__ = [
    "AggretrieverLoss",
    "CLSProjection",
    "CachedAggretrieverLoss",
    "Concat",
    "Distillation",
    "MLMEncoder",
    "MLMLexicalPooling",
    "MeanProjection",
    "SliceMaxAgg",
    "TokenLexicalPooling",
    "TrainConfig",
    "build_aggretriever",
    "convert_checkpoint",
    "encode_windows",
    "explain_scores",
    "explain_texts",
    "fold_embeddings",
    "load_aggretriever",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'st_aggretriever' has no attribute {name!r}")
    value = getattr(import_module(f"st_aggretriever.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
