"""Fold whole vectors, and models: which part of a vector is lexical, when its slices nest, what rounding costs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from st_aggretriever.fold import check_divides, dropped_ids, fold_lexical

logger = logging.getLogger(__name__)

Vectors = TypeVar("Vectors", np.ndarray, Tensor)
ROWS_AT_ONCE = 4096  # folded at a time, so that what lies between stays small
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ROUNDED = (torch.float16, torch.bfloat16, torch.int8)


class LexicalPart(NamedTuple):
    """Where the lexical part lies in a vector, and the rule by which its slices were made."""

    start: int
    width: int  # D
    aggregation: str = "signed"
    slicing: str = "strided"
    remainder: str = "pad"
    term_weight: str = "abs"
    vocab_size: int = 0

    @property
    def depends_on_texts(self) -> bool:
        """Whether a slice may hold nothing but negative weights: the sign of such a one doesn't tell its half."""
        return self.aggregation == "signed" and self.term_weight == "identity"

    def check(self, lexical_dim: int) -> None:
        """Refuse a D' at which folded vectors wouldn't be those of a model of that D'.

        Raises:
            ValueError: Slices that don't nest, a D' that doesn't divide D, or other ids dropped.
        """
        if self.aggregation not in ("signed", "positive"):
            raise ValueError(
                f"fold: aggregation={self.aggregation!r} takes no maximum over slices, so its vectors can't be folded; "
                "'signed' (agg*) and 'positive' (agg+) can."
            )
        if self.slicing != "strided":
            raise ValueError(
                f"fold: slicing={self.slicing!r} can't be folded; strided slices nest. Build the model with "
                "slicing='strided', or with that lexical_dim."
            )
        check_divides(lexical_dim, self.width, "fold: lexical_dim")
        here, there = self._dropped(self.width), self._dropped(lexical_dim)
        if here != there:
            raise ValueError(
                f"fold: under remainder='drop' a model of D = {self.width} drops the first {here} ids of the "
                f"vocabulary, one of D = {lexical_dim} the first {there}, so their slices don't nest. "
                + (f"A model with remainder='pad' has the same vectors at {self.width}, and folds." if not here else
                   "Encode with that lexical_dim instead.")
            )  # fmt: skip

    def _dropped(self, lexical_dim: int) -> int:
        """How many ids lie in no slice."""
        width = 2 * lexical_dim if self.aggregation == "signed" else lexical_dim
        return dropped_ids(self.vocab_size, width, self.remainder)


def lexical_part(model: Any) -> LexicalPart | None:
    """The lexical part in a model's vectors.

    None where they have none, or don't hold it as it is: cut by ``truncate_dim``, normalised for cosine.
    """
    if isinstance(model, Folded):
        return model.part
    modules = list((getattr(model, "_modules", None) or {}).values())
    slices = _slices(modules)
    keys, dims = (getattr(modules[-1], name, None) if modules else None for name in ("keys", "dims"))
    if slices is None or not isinstance(keys, list) or not isinstance(dims, list) or "lexical_embedding" not in keys:
        return None
    similarity = getattr(model, "similarity_fn_name", None) or "dot"
    if getattr(model, "truncate_dim", None) is not None or str(getattr(similarity, "value", similarity)) != "dot":
        return None
    place = keys.index("lexical_embedding")
    return LexicalPart(
        start=sum(dims[:place]),
        width=dims[place],
        aggregation=slices.aggregation,
        slicing=slices.slicing,
        remainder=slices.remainder,
        term_weight=next((module.term_weight for module in modules if hasattr(module, "term_weight")), "none"),
        vocab_size=slices.vocab_size,
    )


def need_lexical_part(model: Any, who: str) -> LexicalPart:
    """As :func:`lexical_part`.

    Raises:
        ValueError: There is none; the message begins with ``who``.
    """
    part = lexical_part(model)
    if part is None:
        raise ValueError(
            f"{who}: the model must be an Aggretriever with a lexical part, compared by dot product and not cut by "
            "truncate_dim; this one's vectors have no such part."
        )
    return part


def _slices(modules: Sequence[Any]) -> Any:
    """The module that makes the slices, by its settings: a model may carry its own copy of the class."""
    return next((module for module in modules if hasattr(module, "aggregation") and hasattr(module, "slicing")), None)


def fold_embeddings(
    vectors: Vectors,
    lexical_dim: int = 320,
    *,
    model: Any = None,
    cls_dim: int | None = None,
    signed: bool | None = None,
    ranges: np.ndarray | None = None,
) -> Vectors:
    """Fold whole vectors ``[cls_embedding ; lexical_embedding]`` to fewer lexical dimensions, without encoding again.

    Of the slices that merge the largest magnitude stays with its sign; of equal magnitudes the negative one does
    (agg+: the maximum). Strided slices nest, and the maximum of maxima is the maximum: for float32 vectors of
    non-negative lexical weights and every divisor of D the result equals encoding with that D, difference 0. Fold
    queries and documents alike.

    Half precision and int8 are folded too, approximately: rounding can make magnitudes of opposite sign equal, and
    which one was larger is then lost. A warning counts these places.

    Args:
        vectors: (dim,) or (n, dim), numpy or torch; float32, float64, float16, bfloat16 or int8.
        lexical_dim: D', a divisor of D.
        model: The model that made them: order, D and rule are read from it, and checked. Without it the vectors must
            be ``[cls ; lexical]`` of strided slices with no id dropped, and of non-negative weights.
        cls_dim: C, if not given 128; what lies behind is lexical.
        signed: Whether the slices are agg* (if not given) or agg+.
        ranges: (2, dim), of int8 by sentence-transformers' ``quantize_embeddings``: the least and the largest value of
            each dimension that it was given. Without, int8 is taken to have one scale, and zero at 0.

    Returns:
        (C + D',) or (n, C + D'), of the kind and dtype of ``vectors``; with ``ranges`` float32.

    Raises:
        ValueError: An argument of a wrong kind; D' doesn't divide D; random slices, or none; ``remainder="drop"`` that
            drops other ids at D'; a model with ``term_weight="identity"`` (the published checkpoints), for which
            folding is exact only while every text has a positive weight, which its vectors don't show; another dtype.

    Example:
        >>> fold_embeddings(np.array([[9.0, 0.5, -0.1, -0.7, 0.1]]), 2, cls_dim=1).tolist()
        [[9.0, -0.7, -0.1]]
    """
    if not isinstance(vectors, np.ndarray | Tensor) or vectors.ndim < 1:
        raise ValueError(
            f"fold_embeddings: vectors must be a numpy array or a tensor (n, dim), got {type(vectors).__name__}."
        )
    for name, value in (("lexical_dim", lexical_dim), ("cls_dim", 0 if cls_dim is None else cls_dim)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise ValueError(f"fold_embeddings: {name} must be a whole number, got {value!r}.")
    if signed is not None and not isinstance(signed, bool | np.bool_):
        raise ValueError(f"fold_embeddings: signed must be True or False, got {signed!r}.")
    if ranges is not None and not (np.asarray(ranges).dtype.kind in "fiu" and np.isfinite(ranges).all()):
        raise ValueError("fold_embeddings: ranges must be finite numbers (2, dim), those of quantize_embeddings.")
    part = _given_part(int(vectors.shape[-1]), model, cls_dim, signed)
    part.check(lexical_dim)
    if model is not None and part.depends_on_texts:
        raise ValueError(
            "fold_embeddings: the model's term_weight is 'identity', and folding is exact only while every text has a "
            "positive weight, which vectors don't show. encode and search with --lexical-dim check it; where you know "
            "it, give cls_dim instead of the model."
        )
    folded, ambiguous = fold_part(vectors, part, lexical_dim, ranges)
    if ambiguous is not None:
        assumed = str(vectors.dtype).endswith("int8") and ranges is None
        logger.warning(
            "fold_embeddings: approximate, as the vectors are %s: %d places hold equal magnitudes of opposite sign.%s",
            vectors.dtype,
            ambiguous,
            " int8 is taken to have one scale; give the ranges of quantize_embeddings." if assumed else "",
        )
    return folded


def _given_part(dim: int, model: Any, cls_dim: int | None, signed: bool | None) -> LexicalPart:
    """What fold_embeddings is told of the vectors, by a model or by numbers."""
    if model is not None:
        if cls_dim is not None or signed is not None:
            raise ValueError("fold_embeddings: cls_dim and signed are read from the model; leave them out.")
        part = need_lexical_part(model, "fold_embeddings")
        expected = sum(model[-1].dims) if not isinstance(model, Folded) else sum(width for _, width in model.parts)
        if dim != expected:
            raise ValueError(f"fold_embeddings: the model's vectors have {expected} dimensions, these have {dim}.")
        return part
    start = 128 if cls_dim is None else cls_dim
    if not 0 <= start < dim:
        raise ValueError(
            f"fold_embeddings: cls_dim must be at least 0 and below the vectors' {dim} dimensions, got {start}."
        )
    return LexicalPart(start, dim - start, "signed" if signed is None or signed else "positive")


def fold_part(
    vectors: Vectors, part: LexicalPart, lexical_dim: int, ranges: np.ndarray | None = None
) -> tuple[Vectors, int | None]:
    """Fold the lexical part of whole vectors, the others left as they are.

    Args:
        vectors: (..., dim).
        ranges: See :func:`fold_embeddings`.

    Returns:
        The folded vectors; and how many places hold equal magnitudes, not zero, of opposite sign among the merging
        slices, which rounding has made incomparable: None for numbers that weren't rounded, and for agg+.
    """
    if isinstance(vectors, Tensor):
        return _fold_tensor(vectors, part, lexical_dim, ranges)
    rows = vectors.reshape(-1, vectors.shape[-1])
    done = [_fold_tensor(torch.from_numpy(np.array(rows[start : start + ROWS_AT_ONCE])), part, lexical_dim, ranges)
            for start in range(0, max(1, len(rows)), ROWS_AT_ONCE)]  # fmt: skip
    counts = [count for _, count in done if count is not None]
    folded = np.concatenate([tensor.numpy() for tensor, _ in done])
    return folded.reshape(*vectors.shape[:-1], folded.shape[-1]), sum(counts) if counts else None


def _fold_tensor(
    vectors: Tensor, part: LexicalPart, lexical_dim: int, ranges: np.ndarray | None
) -> tuple[Tensor, int | None]:
    dtype = vectors.dtype
    if dtype not in FLOATS and dtype != torch.int8:
        raise ValueError(f"fold: vectors must be of floats or int8, got {dtype}; binary ones can't be folded.")
    if ranges is not None:
        vectors = _from_int8(vectors, ranges)
    elif dtype == torch.int8:
        vectors = vectors.short()  # -128 has no magnitude in int8
    stop = part.start + part.width
    before, lexical, behind = vectors.tensor_split((part.start, stop), dim=-1)
    signed = part.aggregation == "signed"
    folded = torch.cat([before, fold_lexical(lexical, lexical_dim, signed=signed), behind], dim=-1)
    ambiguous = _ambiguous(lexical, lexical_dim) if signed and dtype in ROUNDED else None
    return folded if ranges is not None else folded.to(dtype), ambiguous


def _ambiguous(lexical: Tensor, lexical_dim: int) -> int:
    """Places where the largest magnitude, not zero, occurs with both signs."""
    meeting = lexical.unflatten(-1, (-1, lexical_dim))
    largest = meeting.amax(-2)
    return int(((largest > 0) & (largest == -meeting.amin(-2))).sum())


def _from_int8(vectors: Tensor, ranges: np.ndarray) -> Tensor:
    """The middle of each value's bin, float32; quantize_embeddings cuts each dimension's range into 255 of them."""
    expected = (2, vectors.shape[-1])
    if vectors.dtype != torch.int8 or np.shape(ranges) != expected:
        raise ValueError(
            f"fold: ranges {expected} go with int8 vectors, got {np.shape(ranges)} and {vectors.dtype} vectors."
        )
    least, largest = torch.as_tensor(np.asarray(ranges, np.float32), device=vectors.device)
    return least + (vectors.float() + 128.5) * (largest - least) / 255


@contextmanager
def unfoldable_texts(model: Any, part: LexicalPart | None) -> Iterator[list[Tensor]]:
    """Watch a model encode: for each of its batches, which texts have a slice of nothing but negative weights.

    Only where that can be (``term_weight="identity"`` under agg*: a text none of whose tokens weighs more than 0); the
    list stays empty otherwise, and where the model runs in other processes.
    """
    seen: list[Tensor] = []
    slices = _slices(list((getattr(model, "_modules", None) or {}).values()))
    if part is None or not part.depends_on_texts or slices is None:
        yield seen
        return
    # agg+ of 2D columns: the maxima of the half slices.
    halves = type(slices)(
        slices.vocab_size, 2 * slices.lexical_dim, aggregation="positive",
        slicing=slices.slicing, remainder=slices.remainder, seed=slices.seed,
    )  # fmt: skip

    def look(module: Any, inputs: Any, features: dict[str, Tensor]) -> None:
        weights = halves.to(features["lexical_weights"].device).aggregate(features["lexical_weights"])  # (B, 2D)
        seen.append((weights.unflatten(-1, (-1, 2)).amax(-1) < 0).any(-1).cpu())

    handle = slices.register_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


class Around:
    """A model inside another object, which answers for it but for what a subclass changes."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not there yet: while unpickling
            raise AttributeError(name)
        return getattr(self.model, name)

    def __getitem__(self, index: int) -> Any:
        return self.model[index]


class Folded(Around):
    """A model with its vectors folded to ``lexical_dim``, for all that asks ``encode_query`` and ``encode_document``.

    Args:
        model: An Aggretriever.
        lexical_dim: D', a divisor of its D.

    Attributes:
        part: The lexical part of the folded vectors.
        parts: Names and widths of all parts, in order.
        folded_to: D'.

    Raises:
        ValueError: It has no lexical part, or one that can't be folded to D'. While encoding, under
            ``term_weight="identity"``: a text has no positive weight.
    """

    def __init__(self, model: Any, lexical_dim: int) -> None:
        super().__init__(model)
        self.whole = need_lexical_part(model, "fold")
        self.whole.check(lexical_dim)
        self.part = self.whole._replace(width=lexical_dim)
        self.folded_to = lexical_dim
        names, widths = model[-1].keys, model[-1].dims
        self.parts = [[name, lexical_dim if name == "lexical_embedding" else width]
                      for name, width in zip(names, widths, strict=True)]  # fmt: skip

    def encode_query(self, texts: Sequence[str], **options: Any) -> np.ndarray:
        return self._encode(self.model.encode_query, texts, options)

    def encode_document(self, texts: Sequence[str], **options: Any) -> np.ndarray:
        return self._encode(self.model.encode_document, texts, options)

    def _encode(self, encode: Any, texts: Sequence[str], options: dict[str, Any]) -> np.ndarray:
        with unfoldable_texts(self.model, self.whole) as seen:
            vectors = np.asarray(encode(texts, **options), dtype=np.float32)
        refuse_unfoldable(seen, self.whole, len(texts), "fold")
        return fold_part(vectors, self.whole, self.part.width)[0]


def refuse_unfoldable(seen: Sequence[Tensor], part: LexicalPart, texts: int, who: str) -> None:
    """Refuse what :func:`unfoldable_texts` found, or couldn't see.

    Raises:
        ValueError: As said.
    """
    if not part.depends_on_texts or not texts:
        return
    if sum(map(len, seen)) < texts:
        raise ValueError(f"{who}: under term_weight='identity' texts must be encoded in this process, to be checked.")
    found = sum(int(flags.sum()) for flags in seen)
    if found:
        raise ValueError(
            f"{who}: {found} of these texts have no token of positive weight. The model's term_weight is 'identity', "
            "and the sign of such a vector doesn't tell which half of a slice it came from."
        )
