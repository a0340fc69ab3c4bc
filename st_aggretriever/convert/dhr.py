"""The layout of ``jacklin/DistilBERT-AGG``: a masked language model, and two files of linear layers beside it.

``pooler.pt`` is the [CLS] projection, ``TermWeightTrans.pt`` the term weight; each holds a layer for queries and one
for passages, equal where its configuration says ``tied``. The published vector is lexical 640, then [CLS] 128: here
[CLS] goes first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.util import load_file_path
from torch import Tensor

from st_aggretriever.convert.checkpoint import (
    PublishedCheckpoint,
    check_names,
    checked_linear,
    checked_masked_lm,
    read_config,
    read_pickle,
    read_weights,
    reading,
)

UNTIED = ("query_model", "passage_model")


def is_dhr(source: str | Path, **where: Any) -> bool:
    """Whether a folder or Hub repository has this layout, tied or not."""
    marks = ("TermWeightTrans.pt", "TermWeightTrans_config.json", f"{UNTIED[0]}/config.json")
    return any(load_file_path(str(source), mark, **where) is not None for mark in marks)


def read_dhr(folder: Path) -> PublishedCheckpoint:
    """Read a checkpoint of this layout.

    Raises:
        ValueError: It is untied, or a tensor is missing, unexpected or of another shape.
        FileNotFoundError: A file is missing.
    """
    if any((folder / name).is_dir() for name in UNTIED):
        raise ValueError(f"convert: {folder} has {' and '.join(UNTIED)}: {_ONE_ENCODER}")
    config = read_config(folder)
    term_weight = _read_layer(folder, "TermWeightTrans")
    cls = _read_layer(folder, "pooler")
    masked_lm = checked_masked_lm(config, read_weights(folder), "", folder)
    checked_linear(term_weight, "TermWeightTrans.pt: linear_q", (1, config.hidden_size), folder)
    checked_linear(cls, "pooler.pt: linear_q", (None, config.hidden_size), folder)
    return PublishedCheckpoint("dhr", config, masked_lm, term_weight, cls)


_ONE_ENCODER = (
    "an untied model, with one encoder for queries and another for passages, can't be one Aggretriever; none is "
    "published."
)


def _read_layer(folder: Path, name: str) -> dict[str, Tensor]:
    """The one linear layer of a tied pair."""
    file, settings = folder / f"{name}.pt", folder / f"{name}_config.json"
    for path in (file, settings):
        if not path.is_file():
            raise FileNotFoundError(f"convert: {folder} holds no {path.name}, which the dhr layout needs.")
    tensors = read_pickle(file)
    sides = ("linear_q", "linear_p")
    check_names(file, list(tensors), [f"{side}.{part}" for side in sides for part in ("weight", "bias")])
    query, passage = ({part: tensors[f"{side}.{part}"] for part in ("weight", "bias")} for side in sides)
    with reading(settings):
        tied = json.loads(settings.read_text(encoding="utf-8")).get("tied")
    if tied is not True or not all(torch.equal(query[part], passage[part]) for part in query):
        raise ValueError(f"convert: {file} is not tied: {_ONE_ENCODER}")
    return query
