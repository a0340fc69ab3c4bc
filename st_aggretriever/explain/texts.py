"""The terms behind a text's lexical dimensions, and the word of the text that fired each."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers.util import batch_to_device
from torch import Tensor
from tqdm import tqdm

from st_aggretriever.encoding import length_limit, prompt_of, valid_unicode
from st_aggretriever.fold import dropped_ids
from st_aggretriever.search.exact import check_vectors

TILE_BYTES = 32 * 2**20  # of logits at a time
# Scripts written without blanks between words: each token is a word of its own there.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")


class Word(NamedTuple):
    """A word of a text as the tokenizer cuts it, whole again; ``start`` and ``end`` are None for what isn't in the
    text itself: special tokens and the prompt's."""

    text: str
    start: int | None = None
    end: int | None = None


class Term(NamedTuple):
    """What stands behind one lexical dimension of one text."""

    slice: int  # the dimension, from 0, within the lexical part
    name: str  # the vocabulary's entry; "##" before one that goes on a word
    id: int
    weight: float  # its lexical weight
    value: float  # the vector's number there: with agg* the weight with the sign of its half slice
    sign: int  # of its half slice, +1 or -1; +1 where slices have no halves
    word: Word  # of the text, in which the token stands that gave the term its weight
    token: str  # that token
    expansion: bool  # whether the term is another one than that token


class Vocabulary:
    """Names of a tokenizer's entries."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        first = tokenizer.convert_ids_to_tokens(range(min(2000, len(tokenizer))))
        # Byte-level and SentencePiece vocabularies mark the start of words; WordPiece marks what goes on a word.
        self._marks_starts = any(piece and piece[0] in "\u0120\u2581" and len(piece) > 1 for piece in first)
        self._names: dict[int, str] = {}

    def name(self, id: int) -> str:
        if id not in self._names:
            self._names[id] = self._name(id)
        return self._names[id]

    def is_special(self, id: int) -> bool:
        return id in self._special

    def _name(self, id: int) -> str:
        # A decoder may have more rows than the tokenizer has entries.
        piece = self.tokenizer.convert_ids_to_tokens(id) if id < len(self.tokenizer) else None
        if not piece:
            return f"[id {id}]"
        if id in self._special or not self._marks_starts:
            return piece
        plain = self.tokenizer.convert_tokens_to_string([piece]).strip()
        if not plain or "\ufffd" in plain:  # a blank, or some bytes of a character
            plain = piece
        return plain if piece[0] in "\u0120\u2581" else f"##{plain}"


@dataclass(frozen=True, eq=False)
class TextExplanation:
    """A text's vector, and for each of its D lexical dimensions the term and the word behind it.

    Attributes:
        text: As it was encoded; ``read`` is how many of its characters reached the model, all unless it was cut.
        vector: (dim,) float32, the model's, or the stored one.
        lexical: Where the lexical part lies in it.
        words: Of the text, in order, special tokens included.
        ids: (D,) the term of each dimension, -1 where no term has a weight.
        weights: (D,) float32, its lexical weight.
        signs: (D,) +1 or -1, its half slice; all +1 where slices have no halves.
        fired: (D,) index into ``words``, -1 where there is no term.
        token_ids: (D,) the token that fired.
        present: (n,) the ids of the text's own tokens that take part.
        dimension_of: (V,) the dimension of each term, -1 where it has none.
        changed: (dim,) bool, where a stored vector isn't what the text gives; ``ids`` and ``fired`` of such a
            dimension are the text's, not the stored number's, and :meth:`term` names nothing there.
    """

    text: str
    read: int
    vector: np.ndarray
    lexical: slice
    words: list[Word]
    ids: np.ndarray
    weights: np.ndarray
    signs: np.ndarray
    fired: np.ndarray
    token_ids: np.ndarray
    present: np.ndarray
    dimension_of: np.ndarray
    changed: np.ndarray
    vocabulary: Vocabulary

    @property
    def values(self) -> np.ndarray:
        """(D,) the lexical part of the vector."""
        return self.vector[self.lexical]

    @property
    def unexplained(self) -> float:
        """Share of the vector's squared length outside the lexical part: the [CLS] part, which isn't explained."""
        squares = self.vector.astype(np.float64) ** 2
        total = float(squares.sum())
        return 1 - float(squares[self.lexical].sum()) / total if total else 0.0

    def term(self, dimension: int) -> Term | None:
        """What stands behind a lexical dimension, None where nothing does or its stored number isn't the text's."""
        if self.ids[dimension] < 0 or self.changed[self.lexical][dimension]:
            return None
        id, token = int(self.ids[dimension]), int(self.token_ids[dimension])
        return Term(
            slice=dimension,
            name=self.vocabulary.name(id),
            id=id,
            weight=float(self.weights[dimension]),
            value=float(self.values[dimension]),
            sign=int(self.signs[dimension]),
            word=self.words[self.fired[dimension]],
            token=self.vocabulary.name(token),
            expansion=id != token,
        )

    def top(self, count: int = 10) -> list[Term]:
        """The terms of the largest dimensions, by magnitude; ``count`` is at least 0."""
        if count < 0:
            raise ValueError(f"TextExplanation: count must be at least 0, got {count}.")
        order = np.argsort(-np.abs(self.values), kind="stable")
        named = (self.ids >= 0) & ~self.changed[self.lexical]
        terms = (self.term(int(dimension)) for dimension in order[named[order]][:count])
        return [term for term in terms if term is not None]


def explain_texts(
    model: Any,
    texts: Sequence[str],
    *,
    side: str = "document",
    vectors: np.ndarray | None = None,
    tolerance: float = 1e-3,
    batch_size: int = 32,
) -> list[TextExplanation]:
    """The term behind every lexical dimension of each text, and the token that fired it.

    A dimension of agg* is ``+-max v[t]`` over a half slice and ``v[t] = max_i w_i p_i[t]`` over tokens: the term is
    the t and the token the i of the maxima. With ``aggregation="mean"`` the term named is the slice's largest.

    Args:
        model: An Aggretriever with ``pooling`` mlm or tokens, however it was loaded.
        texts: N texts.
        side: ``"query"`` or ``"document"``: length and prompt.
        vectors: (N, dim) as stored earlier, to be explained in the place of what the model gives now; where they
            differ stands in ``changed``.
        tolerance: By which a stored number may differ, relative to itself and to 0.01: 1e-3 takes float16.
        batch_size: Texts a batch.

    Raises:
        ValueError: The model's dimensions stand for no terms, the stored vectors don't fit the texts in number or
            width, or a vector isn't finite, or a number is out of range.
        TypeError: ``texts`` is one string, or holds something else.

    Example:
        >>> explain_texts(model, ["The crew sails the ship."])[0].top(1)[0].name  # doctest: +SKIP
        'ship'
    """
    if isinstance(texts, str):
        raise TypeError("explain_texts: expected a sequence of texts, got one string; put it into a list.")
    texts = list(texts)
    wrong = [type(text).__name__ for text in texts if not isinstance(text, str)]
    if wrong:
        raise TypeError(f"explain_texts: expected strings as texts, got {wrong[0]}.")
    if not tolerance >= 0:
        raise ValueError(f"explain_texts: tolerance must be at least 0, got {tolerance}.")
    if side not in ("query", "document"):
        raise ValueError(f"explain_texts: side must be 'query' or 'document', got {side!r}.")
    if batch_size < 1:
        raise ValueError(f"explain_texts: batch_size must be at least 1, got {batch_size}.")
    explainer = _Explainer(model, side)
    texts = [valid_unicode(text) for text in texts]  # what the tokenizer gets: offsets count these characters
    found: list[TextExplanation] = []
    with tqdm(
        total=len(texts), desc="explained", unit="text", disable=None if len(texts) > batch_size else True
    ) as bar:
        for start in range(0, len(texts), batch_size):
            found += explainer.batch(texts[start : start + batch_size])
            bar.update(min(batch_size, len(texts) - start))
    if vectors is not None:
        found = _with_stored(found, np.asarray(vectors), tolerance)
    return found


class _Explainer:
    """Runs a model's modules one after another, and looks at what passes between them."""

    def __init__(self, model: Any, side: str) -> None:
        modules = list(model) if hasattr(model, "__iter__") else []
        # By what they have: a model that was loaded with the code it carries is of other classes than ours.
        self.pooling = next((module for module in modules if hasattr(module, "participating")), None)
        self.slicer = next((module for module in modules if hasattr(module, "aggregation")), None)
        joined = next((module for module in reversed(modules) if hasattr(module, "dims")), None)
        if self.pooling is None or self.slicer is None or joined is None:
            raise ValueError(
                "explain: this model has no lexical part, so no dimension of it stands for terms; only an Aggretriever "
                "with pooling 'mlm' or 'tokens' and a lexical_dim of at least 1 can be explained."
            )
        if getattr(self.pooling, "quantize", "none") != "none":
            raise ValueError(
                f"explain: the model's head is quantised ({self.pooling.quantize}), so its weights are approximate; "
                "load it with quantize='none'."
            )
        if self.slicer.aggregation == "linear":
            raise ValueError(
                "explain: aggregation 'linear' is a learned projection that mixes all terms into every dimension; no "
                "dimension stands for terms of its own."
            )
        similarity = getattr(model, "similarity_fn_name", None) or "dot"
        if str(getattr(similarity, "value", similarity)) != "dot":
            raise ValueError(
                f"explain: a score is explained as a dot product, but this model compares by {similarity}."
            )
        start = sum(joined.dims[: joined.keys.index("lexical_embedding")])
        width = self.slicer.get_embedding_dimension()
        if model.truncate_dim is not None:
            width = min(width, model.truncate_dim - start)
        if width < 1:
            raise ValueError(f"explain: truncate_dim {model.truncate_dim} cuts the lexical part off; leave it out.")
        self.lexical = slice(start, start + width)
        self.model, self.side = model, side
        self.prompt = prompt_of(model, side)
        self.vocabulary = Vocabulary(model.tokenizer)
        self.table = slice_table(self.slicer)
        columns = torch.arange(self.table.shape[1]) // (2 if self.slicer.aggregation == "signed" else 1)
        columns[columns >= width] = -1
        home = torch.full((self.slicer.vocab_size + 1,), -1)  # the last takes the table's padding
        home[self.table] = columns.expand_as(self.table)
        self.dimension_of = home[:-1].numpy()

    @torch.inference_mode()
    def batch(self, texts: list[str]) -> list[TextExplanation]:
        self.model.eval()
        # Slow tokenizers know no offsets: words then go by the names of tokens.
        offsets = {"text": {"return_offsets_mapping": True}} if self.model.tokenizer.is_fast else None
        features = self.model.preprocess(texts, prompt=self.prompt, task=self.side, processing_kwargs=offsets)
        features = batch_to_device(features, self.model.device)
        head: tuple[Any, ...] = ()
        for module in self.model:
            if module is self.pooling and hasattr(module, "activation"):
                head = features["mlm_states"], features["decoder_weight"], features["decoder_bias"]
            features = module(features)
        vectors = features["sentence_embedding"][:, : self.model.truncate_dim]  # (B, dim)
        check_vectors(texts, vectors.float().cpu().numpy(), self.side)
        width = self.lexical.stop - self.lexical.start
        if not torch.equal(vectors[:, self.lexical], features["lexical_embedding"][:, :width]):
            raise ValueError(
                "explain: a module after Concat changes the vector, so its dimensions aren't the lexical part's; "
                "explain the model without it."
            )
        assert self.slicer is not None
        ids, signs = winning_terms(features["lexical_weights"], self.table, self.slicer.aggregation)  # (B, D)
        ids, signs = ids[:, :width], signs[:, :width]
        weights = features["lexical_weights"].gather(1, ids)
        return [
            self._text(text, row, features, head, vectors[row], ids[row], signs[row], weights[row])
            for row, text in enumerate(texts)
        ]

    def _read(self, text: str, words: list[Word], tokens: int) -> int:
        limit = length_limit(self.model, self.side)
        if limit is None or tokens < limit:
            return len(text)  # also what the tokenizer drops at the end
        return max((word.end for word in words if word.end is not None), default=0)

    def _text(
        self,
        text: str,
        row: int,
        features: dict[str, Any],
        head: tuple[Any, ...],
        vector: Tensor,
        ids: Tensor,
        signs: Tensor,
        weights: Tensor,
    ) -> TextExplanation:
        pooling: Any = self.pooling
        tokens = features["input_ids"][row]  # (L)
        takes_part = pooling.participating(features)[row].nonzero().squeeze(1)  # (T)
        has_term = weights != 0
        values, fired = self._firing(features, head, row, takes_part, ids[has_term])
        _check_reproduced(values, weights[has_term], features["token_embeddings"].dtype)
        token = torch.full_like(ids, -1)
        token[has_term] = takes_part[fired]
        offsets = features["offset_mapping"][row].tolist() if "offset_mapping" in features else [(0, 0)] * len(tokens)
        real = features["attention_mask"][row].bool().tolist()
        words, of_token = self._words(text, tokens.tolist(), offsets, real)
        where = token.cpu().numpy()
        named = has_term.cpu().numpy()
        return TextExplanation(
            text=text,
            read=self._read(text, words, sum(real)),
            vector=vector.float().cpu().numpy(),
            lexical=self.lexical,
            words=words,
            ids=np.where(named, ids.cpu().numpy(), -1),
            weights=weights.float().cpu().numpy(),
            signs=signs.cpu().numpy(),
            fired=np.where(named, of_token[where], -1),
            token_ids=np.where(named, tokens.cpu().numpy()[where], -1),
            present=tokens[takes_part].unique().cpu().numpy(),
            dimension_of=self.dimension_of,
            changed=np.zeros(len(vector), dtype=bool),
            vocabulary=self.vocabulary,
        )

    def _firing(
        self, features: dict[str, Any], head: tuple[Any, ...], row: int, takes_part: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weight of each of the K terms ``ids`` (K), and which of the T tokens that take part gave it (K)."""
        pooling: Any = self.pooling
        term_weights = pooling.term_weights(features["token_embeddings"][row, takes_part])  # (T)
        if head:
            states, weight, bias = head
            return winning_tokens(states[row, takes_part], weight, bias, term_weights, ids, pooling.activation)
        if not len(ids):
            return term_weights[:0], ids
        own = features["input_ids"][row, takes_part, None] == ids  # (T, K)
        values, fired = torch.where(own, term_weights[:, None], -torch.inf).max(0)
        return values, fired

    def _words(
        self, text: str, tokens: list[int], offsets: list[Sequence[int]], real: list[bool]
    ) -> tuple[list[Word], np.ndarray]:
        """The words of a text, and for each of its L tokens the index of its word (-1 for padding)."""
        words: list[Word] = []
        of_token = np.full(len(tokens), -1)
        for position, (start, end) in enumerate(offsets):
            if not real[position]:
                continue
            start, end = max(start - len(self.prompt), 0), end - len(self.prompt)
            start += len(text[start:end]) - len(text[start:end].lstrip())  # byte-level tokens begin with the blank
            before = words[-1].end if words else None
            if start >= end:
                words.append(Word(self.vocabulary.name(tokens[position])))
            elif before is not None and (start < before or _one_word(text[before - 1 : start + 1])):
                first: Any = words[-1].start
                words[-1] = Word(text[first : max(end, before)], first, max(end, before))
            else:
                words.append(Word(text[start:end], start, end))
            of_token[position] = len(words) - 1
        return words, of_token


def slice_table(slicer: Any) -> Tensor:
    """(rows, m): column j holds the ids of half slice (agg*) or slice j, -1 where there is no more."""
    ids = torch.arange(slicer.vocab_size)
    if slicer.aggregation == "none":
        return ids.unsqueeze(0)
    width = slicer.lexical_dim * (2 if slicer.aggregation == "signed" else 1)  # m
    if slicer.slicing == "random":
        ids = slicer.permutation.cpu()
    ids = ids[dropped_ids(slicer.vocab_size, width, slicer.remainder) :]
    return F.pad(ids, (0, -len(ids) % width), value=-1).view(-1, width)


def winning_terms(lexical_weights: Tensor, table: Tensor, aggregation: str) -> tuple[Tensor, Tensor]:
    """The term of each dimension, (B, D) ids, and the sign of its half slice, (B, D); the largest of a mean's.

    Args:
        lexical_weights: (B, V).
        table: (rows, m), from :func:`slice_table`.
        aggregation: That of the slices.
    """
    table = table.to(lexical_weights.device)
    values = lexical_weights[:, table.clamp(min=0)]  # (B, rows, m)
    if aggregation == "mean":
        values = values.abs()
    best, row = values.masked_fill(table < 0, -torch.inf).max(1)  # (B, m)
    ids = table.expand(len(row), *table.shape).gather(1, row.unsqueeze(1)).squeeze(1)  # (B, m)
    if aggregation != "signed":
        return ids, torch.ones_like(ids)
    best, ids = best.unflatten(1, (-1, 2)), ids.unflatten(1, (-1, 2))  # (B, D, 2)
    half = (best[..., 0] <= best[..., 1]).long()  # of equal halves the negative one, as agg* has it
    return ids.gather(2, half.unsqueeze(2)).squeeze(2), 1 - 2 * half


def winning_tokens(
    states: Tensor, weight: Tensor, bias: Tensor | None, term_weights: Tensor, ids: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """``max`` and ``argmax over tokens i of w_i f(states_i . weight_t + bias_t)`` for a few terms t, tile by tile.

    Args:
        states: (T, E), the decoder's inputs of one text's tokens that take part.
        weight, bias: (V, E) and (V) or None, the decoder.
        term_weights: (T).
        ids: (K), the terms.
        activation: ``"softmax"`` (which needs the whole vocabulary) or ``"log1p_relu"``.

    Returns:
        (K) values in float32, and (K) indices into the tokens, of equal ones the first.
    """
    dtype = torch.promote_types(states.dtype, weight.dtype)
    states, weight, bias = states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    best = term_weights.new_full(ids.shape, -torch.inf)
    winner = torch.zeros_like(ids)
    size = max(1, TILE_BYTES // (4 * len(weight)))
    for start in range(0, len(states), size):
        logits = F.linear(states[start : start + size], weight, bias)  # (n, V)
        accurate = torch.promote_types(logits.dtype, torch.float32)
        if activation == "softmax":
            chosen = torch.softmax(logits, 1, dtype=accurate)[:, ids]
        else:
            chosen = logits[:, ids].to(accurate).relu().log1p()
        value, index = (chosen * term_weights[start : start + size, None]).max(0)
        winner = torch.where(value > best, index + start, winner)
        best = torch.maximum(best, value)
    return best, winner


def _check_reproduced(values: Tensor, weights: Tensor, dtype: torch.dtype) -> None:
    """The tokens named give the weights that the model gave; half precision rounds products of other sizes apart."""
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 0.2
    if not torch.allclose(values.to(weights.dtype), weights, rtol=tolerance, atol=1e-6):
        worst = float((values - weights).abs().max())
        raise ValueError(
            f"explain: the text's tokens don't give the lexical weights that the model gave (they differ by "
            f"{worst:.1e}); its pooling is not the one that this version explains."
        )


def _one_word(boundary: str) -> bool:
    """Whether two tokens belong to one word: what lies from the last character of one to the first of the other, where
    tokenizers may have dropped accents, is letters, marks and digits."""
    inside = all(unicodedata.category(character)[0] in "LMN" for character in boundary)
    return inside and not _UNSPACED.search(boundary)


def _with_stored(found: list[TextExplanation], vectors: np.ndarray, tolerance: float) -> list[TextExplanation]:
    """The same explanations around stored vectors."""
    width = len(found[0].vector) if found else 0
    if vectors.shape != (len(found), width):
        raise ValueError(
            f"explain: expected stored vectors of shape ({len(found)}, {width}), one for each text by this model, got "
            f"{vectors.shape}."
        )
    stored = check_vectors([explanation.text[:80] for explanation in found], vectors.astype(np.float32), "stored")
    explained = []
    for explanation, vector in zip(found, stored, strict=True):
        now = explanation.vector
        changed = np.abs(now - vector) > tolerance * np.maximum(np.abs(now), 0.01)
        explained.append(replace(explanation, vector=vector, changed=changed))
    return explained
