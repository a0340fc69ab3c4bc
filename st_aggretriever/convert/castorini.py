"""The layout of ``castorini/aggretriever-*``: one file of weights under the names of the published encoder class.

``encoder.*`` is the whole masked language model, ``tok_proj`` the term weight, ``cls_proj`` the [CLS] projection. The
vector is [CLS] 128, then lexical 640.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from st_aggretriever.convert.checkpoint import (
    PublishedCheckpoint,
    check_names,
    checked_linear,
    checked_masked_lm,
    read_config,
    read_weights,
)

PREFIX = "encoder."
HEADS = ("tok_proj.weight", "tok_proj.bias", "cls_proj.weight", "cls_proj.bias")
# The published classes and what they are built for: these numbers stand in their code, not in config.json.
CLASSES = {"bert": "BertAggretrieverEncoder", "distilbert": "DistlBertAggretrieverEncoder"}
LEXICAL_DIM, CLS_DIM, VOCAB_SIZE = 640, 128, 30522


def is_castorini(names: Iterable[str]) -> bool:
    """Whether a weight file with these names has this layout, also where some are missing."""
    heads = sum(name.startswith(("tok_proj.", "cls_proj.")) for name in names)
    return heads > 0 and any(name.startswith(PREFIX) for name in names)


def read_castorini(folder: Path) -> PublishedCheckpoint:
    """Read a checkpoint of this layout.

    Raises:
        ValueError: A tensor is missing, unexpected or of another shape.
    """
    config = read_config(folder)
    weights = read_weights(folder)
    others = [name for name in weights if not name.startswith(PREFIX)]
    check_names(folder, others, list(HEADS))
    masked_lm = {name.removeprefix(PREFIX): weights[name] for name in weights if name.startswith(PREFIX)}
    layers = {
        layer: {part: weights[f"{layer}.{part}"] for part in ("weight", "bias")} for layer in ("tok_proj", "cls_proj")
    }
    checked = checked_masked_lm(config, masked_lm, PREFIX, folder)
    checked_linear(layers["tok_proj"], "tok_proj", (1, config.hidden_size), folder)
    checked_linear(layers["cls_proj"], "cls_proj", (None, config.hidden_size), folder)
    return PublishedCheckpoint("castorini", config, checked, layers["tok_proj"], layers["cls_proj"])


def why_not_castorini(model: SentenceTransformer) -> list[str]:
    """What the published encoder class can't express of a model, in words; nothing if it can express all."""
    modules: list[Any] = list(model)
    names = [type(module).__name__ for module in modules]  # By name: a model with its own code has other classes.
    if names != ["MLMEncoder", "MLMLexicalPooling", "SliceMaxAgg", "CLSProjection", "Concat"]:
        return [f"its modules are {', '.join(names)}"]
    encoder, pooling, aggregation, cls, _ = modules
    reasons = []
    if hasattr(encoder.model, "get_base_model"):
        reasons.append("it has an adapter that is not merged")
    elif encoder.model.config.model_type not in CLASSES:
        reasons.append(f"its backbone is {encoder.model.config.model_type}, not {' or '.join(CLASSES)}")
    for module, option, expressible in (
        (pooling, "term_weight", "identity"),
        (pooling, "activation", "softmax"),
        (pooling, "excluded_tokens", "cls"),
        (aggregation, "aggregation", "signed"),
        (aggregation, "slicing", "strided"),
        (aggregation, "lexical_dim", LEXICAL_DIM),
        (cls, "cls_dim", CLS_DIM),
    ):
        value = getattr(module, option)
        if value != expressible:
            reasons.append(f"{option} is {value!r}, not {expressible!r}")
    width = 2 * LEXICAL_DIM
    over = aggregation.vocab_size % width
    if over != VOCAB_SIZE % width:
        # The class pads by the remainder of BERT's vocabulary, which is too big to be dropped, whatever the model's.
        reasons.append(f"its vocabulary has {aggregation.vocab_size} entries, which the class can't fold")
    if any(model.prompts.values()):
        reasons.append("it has prompts")
    if model.truncate_dim is not None:
        reasons.append("it truncates its vectors")
    return reasons


def name_warning(model: SentenceTransformer, output: str | Path) -> str | None:
    """A sentence where the published code would take the wrong class: it goes by "distilbert" in the path."""
    encoder: Any = model[0]
    kind = encoder.model.config.model_type
    if ("distilbert" in str(output).lower()) == (kind == "distilbert"):
        return None
    return (
        f"the published code picks its encoder class by the path, and {str(output)!r} "
        f"{'does not name' if kind == 'distilbert' else 'names'} distilbert: rename the folder before use there."
    )


def write_castorini(model: SentenceTransformer, folder: Path) -> None:
    """Write a model so that the published encoder class reads it.

    Raises:
        ValueError: The class can't express the model; the sentence says why.
    """
    reasons = why_not_castorini(model)
    if reasons:
        raise ValueError(f"convert: the published encoder class can't express this model: {'; '.join(reasons)}.")
    encoder: Any = model[0]
    pooling: Any = model[1]
    cls: Any = model[3]
    tensors = {PREFIX + name: tensor for name, tensor in encoder.model.state_dict().items()}
    for layer, module in (("tok_proj", pooling), ("cls_proj", cls)):
        tensors |= {f"{layer}.{name}": tensor for name, tensor in module.linear.state_dict().items()}
    # Float32, which the class computes in. Tied tensors stay one in the file.
    tensors = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    config = copy.deepcopy(encoder.model.config)
    config.output_hidden_states = True
    config.architectures = [CLASSES[config.model_type]]
    config.dtype = torch.float32
    if hasattr(config, "converted_from"):
        del config.converted_from
    config.save_pretrained(folder)
    tokenizer = copy.deepcopy(encoder.tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
