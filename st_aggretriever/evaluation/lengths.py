"""How many tokens of a text a model reads, changed for an evaluation, and what to say of it."""

from __future__ import annotations

from typing import Any

from st_aggretriever.encoding import first_module, length_limit

LEAST = 3  # [CLS], one token, [SEP]


def set_lengths(model: Any, query_length: int | None = None, document_length: int | None = None) -> None:
    """Cut queries and documents at other lengths than the model's own; None leaves one as it is.

    Args:
        model: A SentenceTransformer whose first module has ``query_length`` and ``document_length``.
        query_length, document_length: Tokens, special ones included.

    Raises:
        ValueError: A length below 3 or beyond the model's positions, or a model without lengths by side.
    """
    encoder = first_module(model)
    for side, length in (("query", query_length), ("document", document_length)):
        if length is None:
            continue
        if not hasattr(encoder, f"{side}_length"):
            raise ValueError(f"--{side}-length: {type(encoder).__name__} has no length for a {side} of its own.")
        limit = _positions(encoder)
        if length < LEAST or (limit is not None and length > limit):
            most = f"at most {limit}, the model's positions" if limit is not None else "no less"
            raise ValueError(f"--{side}-length must be at least {LEAST} and {most}, got {length}.")
        setattr(encoder, f"{side}_length", length)


def length_rules(model: Any) -> list[str]:
    """Where texts are cut or read in windows, and what is folded; nothing of a model that doesn't say."""
    rules = []
    query, document = (length_limit(model, side) for side in ("query", "document"))
    if windows := getattr(model, "windows", None):
        rules.append(
            (f"queries are cut at {query} tokens; " if query is not None else "")
            + f"documents are read whole, in windows of {windows['window']} tokens that share {windows['overlap']}; the"
            f" [CLS] part is the {'mean over the windows' if windows['cls'] == 'mean' else 'first window'}'s"
        )
    elif query is not None and document is not None:
        paper = "; which lengths the Aggretriever paper used outside MS MARCO is unknown"
        own = hasattr(first_module(model), "query_length")
        rules.append(f"queries are cut at {query} tokens, documents at {document}{paper if own else ''}")
    if folded := getattr(model, "folded_to", None):
        rules.append(f"the lexical part of queries and documents is folded to {folded} dimensions")
    return rules


def _positions(encoder: Any) -> int | None:
    """Tokens that the encoder can read; the RoBERTa family can't use all of its positions."""
    usable = getattr(encoder, "_usable_positions", None)
    if usable is not None:
        found: int | None = usable()
        return found
    limit = getattr(getattr(getattr(encoder, "model", None), "config", None), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
