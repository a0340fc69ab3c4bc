"""Fold the lexical part of a vector to fewer slices: what encoding with that D would have given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def fold_lexical(lexical: Tensor, lexical_dim: int, *, signed: bool = True) -> Tensor:
    """Fold D slices to D' = ``lexical_dim``: slice n goes to slice ``n mod D'``.

    Strided slices nest: an id t lies in column ``t mod 2D`` and so, for a divisor D' of D, in column ``t mod 2D'`` of
    the narrower model. Of the slices that meet, the largest magnitude wins with its sign, which is agg* at D' as long
    as the lexical weights are not negative; of equal magnitudes with opposite signs the negative one wins (its own
    rule: ``a <= b`` gives -b, and -0.0 counts as negative). With ``signed=False`` (agg+) the plain maximum wins.
    NaN stays NaN.

    Differentiable: the winning slice gets the gradient, of equal ones the first.

    Args:
        lexical: (..., D).
        lexical_dim: D', a divisor of D.
        signed: Whether the slices are agg* or agg+.

    Returns:
        (..., D').

    Raises:
        ValueError: D' doesn't divide D.

    Example:
        >>> fold_lexical(torch.tensor([[0.5, -0.1, -0.7, 0.1]]), 2)
        tensor([[-0.7000, -0.1000]])
    """
    width = lexical.shape[-1]
    check_divides(lexical_dim, width, "fold_lexical: lexical_dim")
    meeting = lexical.unflatten(-1, (-1, lexical_dim))  # (..., D / D', D')
    if not signed:
        return meeting.max(-2).values
    magnitude = meeting.abs()
    # Among the largest magnitudes a negative one goes first: argmax takes the first of equal values.
    rank = torch.where(torch.signbit(meeting), 2, 1) * (magnitude == magnitude.amax(-2, keepdim=True))
    rank = rank.masked_fill(meeting.isnan(), 3)  # It equals nothing, and would lose to any number.
    return meeting.gather(-2, rank.argmax(-2, keepdim=True)).squeeze(-2)


def dropped_ids(vocab_size: int, width: int, remainder: str) -> int:
    """How many ids at the vocabulary's start lie in no slice: the published rule, which never drops more than 1,000.

    Args:
        width: m: of agg* 2D, else D.
        remainder: ``"pad"`` or ``"drop"``, see :class:`st_aggretriever.SliceMaxAgg`.
    """
    over = vocab_size % width
    return over if remainder == "drop" and over <= 1000 else 0


def check_divides(lexical_dim: int, width: int, name: str) -> None:
    """Refuse a width to fold to that doesn't divide the width of the lexical part.

    Raises:
        ValueError: It doesn't; the message begins with ``name``.
    """
    if not 0 < lexical_dim <= width or width % lexical_dim:
        divisors = ", ".join(str(n) for n in range(1, width + 1) if width % n == 0)
        raise ValueError(
            f"{name} must divide the width of the lexical part, {width}, got {lexical_dim}; choose among {divisors}."
        )


def folds_signed(modules: Iterable[Any], name: str) -> bool:
    """Whether the slices of a model fold as agg* (True) or as agg+ (False).

    Args:
        modules: The modules of the model. The one that makes the slices is known by its attributes: a model that
            carries its own code has other classes than this package.
        name: Who asks; the message of an error begins with it.

    Raises:
        ValueError: There are no slices, or none that nest: strided ones that keep every id.
    """
    slices: Any = next((module for module in modules if hasattr(module, "aggregation")), None)
    if slices is None:
        raise ValueError(f"{name} needs a lexical part to fold, but the model has none; build it with lexical_dim.")
    wanted = {"aggregation": ("signed", "positive"), "slicing": ("strided",), "remainder": ("pad",)}
    for setting, allowed in wanted.items():
        value = getattr(slices, setting)
        if value not in allowed:
            raise ValueError(
                f"{name} needs a model with {setting} {' or '.join(map(repr, allowed))}, got {value!r}: its slices "
                "don't nest, so a folded vector is not that of a narrower model."
            )
    return bool(slices.aggregation == "signed")
