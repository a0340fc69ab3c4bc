"""A published checkpoint in memory, and the readers' common ground: finding files, reading weights, naming keys."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from sentence_transformers.util import load_file_path
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # the first that is there counts, as in transformers
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
LICENCE_FILES = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*")
# What a conversion reads. Of a Hub repository nothing else is fetched.
FILES = (*WEIGHT_FILES, "*.json", "*.txt", "*.model", "*.pt", "README.md", *LICENCE_FILES)


@dataclass
class PublishedCheckpoint:
    """What both layouts hold: a masked language model and two linear layers.

    ``masked_lm`` has the tensors by transformers' names, each tied pair under one name; ``term_weight`` is
    ``{"weight": (1, H), "bias": (1)}``, ``cls`` is ``{"weight": (C, H), "bias": (C)}``.
    """

    layout: str
    config: Any
    masked_lm: dict[str, Tensor]
    term_weight: dict[str, Tensor]
    cls: dict[str, Tensor]


def local_folder(source: str | Path, **where: Any) -> Path:
    """The folder itself, or a Hub repository's copy in the cache.

    Args:
        **where: ``token``, ``cache_folder``, ``revision``, ``local_files_only``, as for ``load_aggretriever``.

    Raises:
        FileNotFoundError: There is no such folder or repository, or it can't be reached.
    """
    if Path(source).is_dir():
        return Path(source)
    cache = {"cache_dir" if key == "cache_folder" else key: value for key, value in where.items()}
    try:
        return Path(snapshot_download(str(source), allow_patterns=list(FILES), **cache))
    except (HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise FileNotFoundError(f"convert: {str(source)!r} is no folder, nor a Hub id in reach: {reason}") from None


def weight_names(source: str | Path, **where: Any) -> set[str]:
    """Names of the tensors in a checkpoint's weight file; empty without one that can be read."""
    for name in WEIGHT_FILES:
        path = load_file_path(str(source), name, **where)
        if path is None:
            continue
        try:
            if name.endswith(".safetensors"):
                with safe_open(path, framework="pt") as file:
                    return set(file.keys())
            return set(read_pickle(Path(path)))
        except (ValueError, SafetensorError):
            return set()
    return set()


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """Say of a damaged file or folder which it is: what the libraries raise for one, each has its own kinds."""
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:  # tokenizers raises nothing more special
        if "does not recognize this architecture" in str(error) or "Unrecognized configuration class" in str(error):
            raise  # a sound file of a kind that transformers doesn't know
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise ValueError(
            f"convert: {place} is damaged, or holds a value of a wrong kind ({type(error).__name__}: {reason}). Fetch "
            "it again."
        ) from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's weight file, by name."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            if name.endswith(".bin"):
                return read_pickle(folder / name)
            with reading(folder / name):
                return load_file(folder / name)
    raise FileNotFoundError(f"convert: {folder} holds neither {' nor '.join(WEIGHT_FILES)}.")


def read_pickle(path: Path) -> dict[str, Tensor]:
    """A file of ``torch.save`` that holds tensors by name, and nothing that could run code.

    Raises:
        ValueError: It holds anything else, or is damaged.
    """
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            tensors = torch.load(path, mmap=True, **options)
        except RuntimeError:  # Files of torch < 1.6 can't be mapped.
            tensors = torch.load(path, **options)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which is torch's word for a file cut short
            raise
        reason = (str(error) or "it is cut short").splitlines()[0].split(" In PyTorch")[0]
        raise ValueError(f"convert: {path} must hold tensors and nothing else, undamaged: {reason}") from None
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(f"convert: {path} must hold tensors by name, got {type(tensors).__name__}.")
    return dict(tensors)


def read_config(folder: Path) -> Any:
    """The backbone's configuration: by its model_type, whatever the folder's name says."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"convert: {folder} holds no config.json.")
    with reading(folder / "config.json"):
        return AutoConfig.from_pretrained(folder)


def checked_masked_lm(config: Any, weights: dict[str, Tensor], prefix: str, where: Path) -> dict[str, Tensor]:
    """The tensors of the masked language model that ``config`` describes: all of them, no other, tied ones once.

    Args:
        prefix: Stands before each name in the checkpoint; named in messages.

    Raises:
        ValueError: A tensor is missing, unexpected or of another shape, or tied tensors differ.
    """
    with reading(where / "config.json"), torch.device("meta"):
        skeleton = AutoModelForMaskedLM.from_config(config)
    # Versions of transformers before 4.31 saved this table of 0, 1, 2, ... with the weights.
    given = {name: tensor for name, tensor in weights.items() if not _is_position_table(name, tensor)}
    shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    tied: dict[int, list[str]] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    for names in tied.values():
        there = [name for name in names if name in given]
        for other in there[1:]:
            if not torch.equal(given[there[0]], given[other]):
                raise ValueError(
                    f"convert: {where} ties {prefix}{there[0]} and {prefix}{other}, but they differ; one of them was "
                    "lost and drawn anew when the checkpoint was saved."
                )
            del given[other]
        if there and there[0] != names[0]:
            given[names[0]] = given.pop(there[0])
        for other in names[1:]:
            del shapes[other]
    check_names(where, [prefix + name for name in given], [prefix + name for name in shapes])
    for name, shape in shapes.items():
        if given[name].shape != shape:
            raise ValueError(
                f"convert: {prefix}{name} in {where} must be of shape {tuple(shape)} by its config.json, got "
                f"{tuple(given[name].shape)}."
            )
    return given


def checked_linear(layer: Mapping[str, Tensor], name: str, shape: tuple[int | None, int], where: Path) -> None:
    """Raise ValueError unless ``weight`` has ``shape`` (None: any number of rows) and ``bias`` as many entries."""
    weight, bias = layer["weight"], layer["bias"]
    rows, columns = shape
    if weight.dim() != 2 or weight.shape[1] != columns or (rows or len(weight)) != len(weight):
        raise ValueError(
            f"convert: {name}.weight in {where} must be of shape ({rows or 'C'}, {columns}), got {tuple(weight.shape)}."
        )
    if bias.shape != (len(weight),):
        raise ValueError(f"convert: {name}.bias in {where} must have {len(weight)} entries, got {tuple(bias.shape)}.")


def check_names(where: Path, found: list[str], expected: list[str]) -> None:
    """Raise ValueError that names what is missing and what is unexpected."""
    problems = []
    for what, names in (("lacks", set(expected) - set(found)), ("holds unexpected", set(found) - set(expected))):
        if names:
            first = sorted(names)
            more = f" and {len(first) - 5} more" if len(first) > 5 else ""
            problems.append(f"{what} {', '.join(first[:5])}{more}")
    if problems:
        raise ValueError(f"convert: {where} {', and '.join(problems)}; converted, it would give wrong vectors.")


def _is_position_table(name: str, tensor: Tensor) -> bool:
    return name.endswith("embeddings.position_ids") and not tensor.is_floating_point()
