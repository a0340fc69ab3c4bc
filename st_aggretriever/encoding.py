"""Texts to vectors by any SentenceTransformer, with what made them: lengths, prompts, hash."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from tqdm import tqdm

from st_aggretriever.folding import Folded, lexical_part, unfoldable_texts
from st_aggretriever.search.exact import check_vectors

logger = logging.getLogger(__name__)

# Texts go to the model this many batches at a time: enough for it to sort them by length, few enough that the progress
# bar moves.
BATCHES_AT_ONCE = 32
# The names under which sentence-transformers looks for the prompt of a side, in its order.
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


class Encoder:
    """Texts to float32 vectors, with cosine models normalised and others left as they are.

    Args:
        model: A SentenceTransformer, or whatever has its ``encode_query`` and ``encode_document``.
        batch_size: Texts a batch.

    Attributes:
        seconds: Spent on documents so far.
        truncated: Texts of each side so far that were longer than the model's length, None where its tokenizer or
            length can't be found.
        tokens: Of each side so far that the model read, special ones included, None likewise.
        unfoldable: Texts so far whose vectors can't be folded (see :func:`st_aggretriever.folding.unfoldable_texts`),
            None where that couldn't be watched.

    Raises:
        ValueError: The model's similarity is neither dot nor cosine, or a batch size below 1.
    """

    def __init__(self, model: Any, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"Encoder: batch_size must be at least 1, got {batch_size}.")
        similarity = getattr(model, "similarity_fn_name", None) or "dot"
        similarity = str(getattr(similarity, "value", similarity))
        if similarity not in ("dot", "cosine"):
            raise ValueError(f"Encoder: the model's similarity must be dot or cosine, got {similarity}.")
        self.model = model
        self.part = lexical_part(model)
        self.unfoldable: int | None = 0
        self.similarity = similarity
        self.options = {
            "batch_size": batch_size,
            "show_progress_bar": False,
            "convert_to_numpy": True,
            "normalize_embeddings": similarity == "cosine",
        }
        self.texts_at_once = BATCHES_AT_ONCE * batch_size
        self.seconds = 0.0
        self.truncated: dict[str, int | None] = {
            side: None if length_limit(model, side) is None else 0 for side in PROMPT_NAMES
        }
        self.tokens = dict(self.truncated)

    @property
    def rule(self) -> str:
        if self.similarity == "cosine":
            return "score: cosine, the model's similarity (inner product of vectors normalised to length 1)"
        return "score: inner product of the vectors as the model gives them"

    def encode(self, texts: Sequence[str], side: str) -> np.ndarray:
        """(n, dim) float32 of at most ``texts_at_once`` texts; ``side`` is ``"query"`` or ``"document"``."""
        counted = count_tokens(self.model, texts, side)
        if counted is not None:
            self.tokens[side] = (self.tokens[side] or 0) + counted[0]
            self.truncated[side] = (self.truncated[side] or 0) + counted[1]
        encode = self.model.encode_query if side == "query" else self.model.encode_document
        with unfoldable_texts(self.model, self.part) as seen:
            vectors = np.asarray(encode(list(texts), **self.options), dtype=np.float32)
        if self.part is not None and self.part.depends_on_texts and self.unfoldable is not None:
            watched = sum(map(len, seen)) >= len(texts)
            self.unfoldable = self.unfoldable + sum(int(flags.sum()) for flags in seen) if watched else None
        return vectors

    def manifest(self, side: str, dimension: int, name: str) -> dict[str, Any]:
        """What vectors of this side are made by, as :class:`st_aggretriever.vectors.folder.VectorFolder` keeps it."""
        return {
            "side": side,
            "model": name,
            # Approximations of the same vectors may be compared with them.
            "model_hash": model_hash(self.model, quantize=False),
            "quantize": quantize_of(self.model),
            "dimension": dimension,
            "parts": vector_parts(self.model, dimension),
            "lexical": self.part and self.part._asdict(),
            "similarity": self.similarity,
            "length": length_limit(self.model, side),
            "windows": getattr(self.model, "windows", None) if side == "document" else None,
            "prompt": prompt_of(self.model, side),
        }

    def queries(self, queries: Mapping[str, str]) -> np.ndarray:
        """(Q, dim) float32, checked here, where a bad one still has a name."""
        texts = list(queries.values())
        parts = [
            self.encode(texts[start : start + self.texts_at_once], "query")
            for start in range(0, len(texts), self.texts_at_once)
        ]
        return check_vectors(list(queries), np.concatenate(parts), "query")

    def blocks(
        self, corpus: Iterable[tuple[str, str]], total: int, block_size: int
    ) -> Iterator[tuple[list[str], np.ndarray]]:
        """Stream ``(ids, (n, dim) float32)`` of ``block_size`` documents, under one progress bar over all."""
        documents = iter(corpus)
        with tqdm(total=total, desc="documents", unit="doc", disable=None) as bar:
            while block := list(islice(documents, block_size)):
                started = time.perf_counter()
                vectors = self.block([text for _, text in block], "document", bar)
                self.seconds += time.perf_counter() - started
                yield [key for key, _ in block], vectors

    def block(self, texts: Sequence[str], side: str, bar: tqdm) -> np.ndarray:
        """(n, dim) float32 of any number of texts; moves the bar."""
        parts = []
        for start in range(0, len(texts), self.texts_at_once):
            parts.append(self.encode(texts[start : start + self.texts_at_once], side))
            bar.update(len(parts[-1]))
        return np.concatenate(parts)

    def settings(self, dimension: int) -> dict[str, Any]:
        """Lengths and prompts of the model, as far as it has them (None otherwise)."""
        first = first_module(self.model)
        changed = {name: getattr(self.model, name, None) for name in ("folded_to", "windows")}
        changed["quantize"] = None if (quantize := quantize_of(self.model)) == "none" else quantize
        return {
            "dimension": dimension,
            **{name: value for name, value in changed.items() if value is not None},
            "similarity": self.similarity,
            "query_length": getattr(first, "query_length", None),
            "document_length": getattr(first, "document_length", None),
            "max_seq_length": getattr(self.model, "max_seq_length", None),
            "prompts": getattr(self.model, "prompts", None),
            "default_prompt_name": getattr(self.model, "default_prompt_name", None),
        }


def first_module(model: Any) -> Any:
    """The module that takes the texts, None where the model isn't a sequence of modules."""
    try:
        return model[0]
    except (TypeError, KeyError, IndexError):
        return None


def length_limit(model: Any, side: str) -> int | None:
    """Tokens, special ones included, after which the model cuts a text of this side; None if unknown."""
    if not callable(getattr(model, "tokenizer", None)):
        return None
    limit = getattr(first_module(model), f"{side}_length", None) or getattr(model, "max_seq_length", None)
    return int(limit) if limit else None


def prompt_of(model: Any, side: str) -> str:
    """The text that ``encode_query`` or ``encode_document`` puts before each text."""
    prompts = getattr(model, "prompts", None) or {}
    name = next((name for name in PROMPT_NAMES[side] if name in prompts), getattr(model, "default_prompt_name", None))
    return prompts.get(name) or ""


def valid_unicode(text: str) -> str:
    """The text with U+FFFD for a lone surrogate, as an Aggretriever's encoder reads it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def count_truncated(model: Any, texts: Sequence[str], side: str, *, prompt: str | None = None) -> int | None:
    """How many texts are longer, with prompt and special tokens, than what the model reads; None if that is unknown.

    Args:
        prompt: The text put before each; None takes the model's own of this side.
    """
    counted = count_tokens(model, texts, side, prompt=prompt)
    return None if counted is None else counted[1]


def count_tokens(model: Any, texts: Sequence[str], side: str, *, prompt: str | None = None) -> tuple[int, int] | None:
    """How many tokens the model reads of these texts, and how many of the texts it cuts; None if that is unknown."""
    limit = length_limit(model, side)
    if limit is None:
        return None
    if prompt is None:
        prompt = prompt_of(model, side)
    tokens = model.tokenizer(
        [valid_unicode(prompt + text) for text in texts],
        truncation=False,
        padding=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warning about texts beyond the positions: these are counted, not encoded
    )["input_ids"]
    lengths = [len(row) for row in tokens]
    if side == "document" and getattr(model, "windows", None):
        return sum(lengths), 0  # the model reads them to the end
    return sum(min(length, limit) for length in lengths), sum(length > limit for length in lengths)


def quantize_of(model: Any) -> str:
    """In how many bits the model computes its vocabulary product: ``"none"`` (as it is), ``"int8"`` or ``"bf16"``."""
    modules = getattr(model, "_modules", {}).values()
    return next((module.quantize for module in modules if isinstance(getattr(module, "quantize", None), str)), "none")


def model_hash(model: Any, *, quantize: bool = True) -> str | None:
    """SHA-256 of what makes a model's vectors: modules with their settings, weights, tokenizer, prompts, truncate_dim.

    Equal for equal models on any device and under any name; None for an object that isn't a torch module. With
    ``quantize=False`` also equal for a model whose vocabulary product is quantised and one whose isn't.
    """
    if not hasattr(model, "state_dict"):
        return None
    digest = hashlib.sha256()
    for module in getattr(model, "_modules", {}).values():
        settings: dict[str, Any] = dict(getattr(module, "get_config_dict", dict)())
        if not quantize or settings.get("quantize") == "none":
            settings.pop("quantize", None)
        digest.update(json.dumps([type(module).__name__, settings], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes_of(tensor))
    backend = getattr(getattr(model, "tokenizer", None), "backend_tokenizer", None)
    if backend is not None:
        # Truncation and padding change with every call; the lengths stand in the modules' settings.
        parts = {
            key: value for key, value in json.loads(backend.to_str()).items() if key not in ("truncation", "padding")
        }
        digest.update(json.dumps(parts, sort_keys=True).encode())
    prompts = [prompt_of(model, side) for side in PROMPT_NAMES]
    digest.update(json.dumps([prompts, getattr(model, "truncate_dim", None)]).encode())
    return digest.hexdigest()


def _bytes_of(tensor: Any) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def vector_parts(model: Any, dimension: int) -> list[list[Any]]:
    """What a vector is made of, in order: ``[[name, width], ...]``; one nameless part for other models.

    >>> vector_parts(object(), 384)
    [['embedding', 384]]
    """
    if isinstance(model, Folded):
        return model.parts
    try:
        last = model[-1]
    except (TypeError, KeyError, IndexError):
        last = None
    keys, dims = getattr(last, "keys", None), getattr(last, "dims", None)
    if isinstance(keys, list) and isinstance(dims, list) and sum(dims) == dimension:
        return [[key, dim] for key, dim in zip(keys, dims, strict=True)]
    return [["embedding", dimension]]
