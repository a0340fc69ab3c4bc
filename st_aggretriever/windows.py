"""Long documents: encode them in windows of tokens, and merge the windows' vectors into one without loss of a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from st_aggretriever.encoding import prompt_of, valid_unicode
from st_aggretriever.fold import fold_lexical
from st_aggretriever.folding import Around, LexicalPart, need_lexical_part, refuse_unfoldable, unfoldable_texts

CLS_CHOICES = ("first", "mean")


def encode_windows(
    model: Any,
    texts: Sequence[str],
    *,
    window: int = 128,
    overlap: int = 32,
    cls: str = "first",
    prompt: str | None = None,
    batch_size: int = 32,
) -> np.ndarray:
    """Encode documents of any length to one vector each, by windows of tokens.

    A text's tokens are cut into windows that overlap; each window stands between the special tokens, and behind the
    prompt, as a text of its own. A maximum over all tokens is the maximum of the windows' maxima, so the lexical part
    is that of all windows' weights together: of the windows' values in a slice the largest magnitude stays with its
    sign, of equal ones the negative (agg+: the maximum). Exact while lexical weights aren't negative. A text that fits
    into one window gets the vector of ``encode_document`` at that length.

    Args:
        model: An Aggretriever.
        texts: n documents.
        window: Tokens of a window, special tokens and prompt included; at most what the model reads.
        overlap: Tokens that a window shares with the one before; the last window ends with the text, and shares more.
        cls: The [CLS] part: the ``"first"`` window's, or the ``"mean"`` over the windows.
        prompt: Put before each window; None takes the model's own for documents.
        batch_size: Windows a batch.

    Returns:
        (n, C + D), float32. A text's vector doesn't depend on the others.

    Raises:
        ValueError: One string instead of a sequence; no Aggretriever with agg* or agg+; a number out of its range;
            under ``term_weight="identity"`` a window without a positive weight.

    Example:
        >>> encode_windows(model, ["a report of many pages"], window=128, overlap=32).shape  # doctest: +SKIP
        (1, 768)
    """
    _check_texts(texts)
    part = _check(model, window, cls)
    vectors, owners = encode_each_window(
        model, texts, window=window, overlap=overlap, prompt=prompt, batch_size=batch_size
    )
    ends = np.searchsorted(owners, np.arange(len(texts)), side="right")
    starts = np.concatenate([[0], ends[:-1]]) if len(texts) else ends
    merged = [merge_windows(vectors[start:end], part, cls) for start, end in zip(starts, ends, strict=True)]
    return np.stack(merged) if merged else np.empty((0, vectors.shape[1]), np.float32)


def encode_each_window(
    model: Any,
    texts: Sequence[str],
    *,
    window: int = 128,
    overlap: int = 32,
    prompt: str | None = None,
    batch_size: int = 32,
) -> tuple[np.ndarray, np.ndarray]:
    """One vector for each window, not merged.

    Args:
        As for :func:`encode_windows`.

    Returns:
        (w, C + D) float32, and (w,) int64: the place in ``texts`` of the text that a window is of. In order.
    """
    _check_texts(texts)
    part = _check(model, window, "first")
    if batch_size < 1:
        raise ValueError(f"encode_windows: batch_size must be at least 1, got {batch_size}.")
    prompt = prompt_of(model, "document") if prompt is None else prompt
    head = _head_length(model, prompt)
    rows: list[list[int]] = []
    owners: list[int] = []
    for place, text in enumerate(texts):
        for ids in _windows_of(model, prompt + text, head, window, overlap):
            rows.append(ids)
            owners.append(place)
    vectors = np.empty((len(rows), sum(model[-1].dims)), np.float32)
    longest_first = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    with unfoldable_texts(model, part) as seen:
        for start in range(0, len(rows), batch_size):
            chosen = longest_first[start : start + batch_size]
            vectors[chosen] = _encode(model, [rows[row] for row in chosen], head if prompt else None)
    refuse_unfoldable(seen, part, len(rows), "encode_windows")
    return vectors, np.array(owners, np.int64)


def _check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise ValueError("encode_windows: expected a sequence of texts, got one string; put it into a list.")
    wrong = [type(text).__name__ for text in texts if not isinstance(text, str)]
    if wrong:
        raise ValueError(f"encode_windows: expected strings as texts, got {wrong[0]}.")


def _check(model: Any, window: int, cls: str) -> LexicalPart:
    part = need_lexical_part(model, "encode_windows")
    if part.aggregation not in ("signed", "positive"):
        raise ValueError(
            f"encode_windows: aggregation={part.aggregation!r} takes no maximum over slices, so the windows' vectors "
            "can't be merged; 'signed' (agg*) and 'positive' (agg+) can."
        )
    if cls not in CLS_CHOICES:
        raise ValueError(f"encode_windows: cls must be one of {', '.join(CLS_CHOICES)}, got {cls!r}.")
    limit = model.max_seq_length
    if limit is not None and window > limit:
        raise ValueError(
            f"encode_windows: the model reads {limit} tokens, so a window can't have {window}; raise its "
            "max_seq_length, or take smaller windows."
        )
    return part


def _head_length(model: Any, prompt: str) -> int:
    """Tokens that stand before the text in each window: [CLS] and the prompt's."""
    encoder = model[0]
    if not prompt:
        return int(encoder.prefix_length)
    alone = model.tokenizer(prompt.rstrip(" "))  # its last blank may belong to the text's first token
    return len(alone["input_ids"]) - int(encoder.suffix_length)


def _windows_of(model: Any, text: str, head: int, window: int, overlap: int) -> Iterator[list[int]]:
    """The token ids of each window of a text (its prompt before it), special tokens included."""
    ids = model.tokenizer(valid_unicode(text), truncation=False, padding=False, verbose=False)["input_ids"]
    tail = int(model[0].suffix_length)
    room = window - head - tail
    if not 0 <= overlap < room:
        raise ValueError(
            f"encode_windows: of a window's {window} tokens {head + tail} are special ones and the prompt's, which "
            f"leaves {room}; overlap must be at least 0 and smaller than that, got {overlap}."
        )
    end = len(ids) - tail
    before, content, behind = ids[:head], ids[head:end], ids[end:]
    last = max(0, len(content) - room)
    for start in [*range(0, last, room - overlap), last]:
        yield [*before, *content[start : start + room], *behind]


def _encode(model: Any, rows: list[list[int]], prompt_length: int | None) -> np.ndarray:
    """(n, C + D) of a batch of windows."""
    longest = max(map(len, rows))
    padding = model.tokenizer.pad_token_id
    features: dict[str, Any] = {
        "input_ids": torch.tensor([row + [padding] * (longest - len(row)) for row in rows], device=model.device),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows],
                                       device=model.device),
    }  # fmt: skip
    if prompt_length is not None:
        features["prompt_length"] = prompt_length
    model.eval()
    with torch.inference_mode():
        vectors: Tensor = model(features)["sentence_embedding"]
    return vectors.float().cpu().numpy()


def merge_windows(windows: np.ndarray, part: LexicalPart, cls: str) -> np.ndarray:
    """The one vector (dim,) of a text's windows (w, dim)."""
    merged = windows.mean(0, dtype=np.float32) if cls == "mean" else windows[0].copy()
    lexical = slice(part.start, part.start + part.width)
    # Side by side the windows are slices that meet where their places agree.
    side_by_side = torch.from_numpy(np.ascontiguousarray(windows[:, lexical])).flatten()
    merged[lexical] = fold_lexical(side_by_side, part.width, signed=part.aggregation == "signed").numpy()
    return merged


class Windowed(Around):
    """A model that reads documents by :func:`encode_windows`, and queries as ever, for all that asks it for either.

    Args:
        model: An Aggretriever.
        window, overlap, cls: See :func:`encode_windows`.

    Attributes:
        windows: These settings, for the manifest of vectors on disk and the result of an evaluation.
    """

    def __init__(self, model: Any, *, window: int = 128, overlap: int = 32, cls: str = "first") -> None:
        super().__init__(model)
        self.windows: dict[str, Any] = {"window": window, "overlap": overlap, "cls": cls}
        encode_windows(model, [""], **self.windows)  # refuses a bad setting before any file is read

    def encode_query(self, texts: Sequence[str], **options: Any) -> np.ndarray:
        return self.model.encode_query(texts, **options)

    def encode_document(self, texts: Sequence[str], *, batch_size: int = 32, **options: Any) -> np.ndarray:
        return encode_windows(self.model, texts, batch_size=batch_size, **self.windows)
