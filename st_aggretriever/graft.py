"""Give an encoder that has lost its masked-language-model head the head of the model it was made from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from st_aggretriever.modules import MLMEncoder


def graft_head(encoder_path: str, head_path: str, folder: str | Path, encoder_kwargs: dict[str, Any]) -> str:
    """Write a whole masked language model: the encoder of one checkpoint, the MLM head of another.

    Where the other ties its decoder to its word embeddings, the result ties it to the encoder's, as any training that
    goes on from here would; the transform, the bias and an untied decoder are the other's.

    Args:
        encoder_path: Folder or Hub id of the encoder, loaded with ``encoder_kwargs``.
        head_path: Folder or Hub id of the masked language model that the encoder was made from.
        folder: Where to write.

    Returns:
        The head's source, to be recorded: its Hub id and revision, or its folder's name.

    Raises:
        ValueError: The two differ in model_type, sizes or vocabulary, or the other has no pretrained head.
    """
    encoder = MLMEncoder(encoder_path, head=False, **encoder_kwargs)
    donor = MLMEncoder(head_path, head=True)
    ours, theirs = _facts(encoder), _facts(donor)
    for what, value in theirs.items():
        if ours[what] != value:
            raise ValueError(
                f"build_aggretriever: mlm_head_from={head_path!r} must have the same {what} as {encoder_path!r}, got "
                f"{value} and {ours[what]}; name the masked language model that the encoder was made from."
            )
    _check_vocabulary(encoder, donor, encoder_path, head_path)

    model: Any = donor.model
    config = copy.deepcopy(encoder.model.config)
    config.tie_word_embeddings = model.config.tie_word_embeddings
    config.architectures = None
    whole = type(model)(config)
    prefix = f"{model.base_model_prefix}."
    head = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefix)}
    _, unexpected = whole.load_state_dict(head, strict=False)
    if unexpected:
        raise ValueError(
            f"build_aggretriever: the head of {head_path!r} does not fit {encoder_path!r}: {', '.join(unexpected)}."
        )
    # After the head: so a tied decoder ends as the encoder's word embeddings.
    getattr(whole, model.base_model_prefix).load_state_dict(encoder.model.state_dict())
    whole.save_pretrained(folder)
    encoder.processor.save_pretrained(folder)
    revision = getattr(model.config, "_commit_hash", None)
    return Path(head_path).resolve().name if Path(head_path).is_dir() else head_path + (f"@{revision}" * bool(revision))


def _facts(encoder: MLMEncoder) -> dict[str, Any]:
    """What must agree, by a name for messages."""
    model: Any = encoder.model
    embeddings = model.get_input_embeddings().weight
    return {
        "model_type": model.config.model_type,
        "hidden size": encoder.get_embedding_dimension(),
        "embedding size": embeddings.shape[1],
        "vocabulary size": embeddings.shape[0],
        "activation": getattr(model.config, "hidden_act", getattr(model.config, "activation", None)),
    }


def _check_vocabulary(encoder: MLMEncoder, donor: MLMEncoder, encoder_path: str, head_path: str) -> None:
    """Raise ValueError unless the two tokenizers give each entry the same id."""
    ours, theirs = encoder.tokenizer.get_vocab(), donor.tokenizer.get_vocab()  # type: ignore[union-attr]
    differing = sorted(entry for entry in {*ours, *theirs} if ours.get(entry) != theirs.get(entry))
    if differing:
        entry = differing[0]
        raise ValueError(
            f"build_aggretriever: the tokenizers of {encoder_path!r} and mlm_head_from={head_path!r} differ in "
            f"{len(differing)} entries, the first being {entry!r} with id {ours.get(entry)} and {theirs.get(entry)}; "
            "name the masked language model that the encoder was made from."
        )
