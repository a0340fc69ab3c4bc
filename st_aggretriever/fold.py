"""Fold the lexical part of a vector to fewer slices: what encoding with that D would have given."""

from __future__ import annotations

import torch
from torch import Tensor


def fold_lexical(lexical: Tensor, lexical_dim: int, *, signed: bool = True) -> Tensor:
    """Fold D slices to D' = ``lexical_dim``: slice n goes to slice ``n mod D'``.

    Strided slices nest: an id t lies in column ``t mod 2D`` and so, for a divisor D' of D, in column ``t mod 2D'`` of
    the narrower model. Of the slices that meet, the largest magnitude wins with its sign, which is agg* at D' as long
    as the lexical weights are not negative; of equal magnitudes with opposite signs the negative one wins (its own
    rule: ``a <= b`` gives -b, and -0.0 counts as negative). With ``signed=False`` (agg+) the plain maximum wins.

    Differentiable: the winning slice gets the gradient.

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
    if not 0 < lexical_dim <= width or width % lexical_dim:
        divisors = ", ".join(str(n) for n in range(1, width + 1) if width % n == 0)
        raise ValueError(
            f"fold_lexical: lexical_dim must divide the width of the lexical part, {width}, got {lexical_dim}; "
            f"choose among {divisors}."
        )
    meeting = lexical.unflatten(-1, (-1, lexical_dim))  # (..., D / D', D')
    if not signed:
        return meeting.amax(-2)
    magnitude = meeting.abs()
    # Among the largest magnitudes a negative one goes first: argmax takes the first of equal values.
    rank = torch.where(torch.signbit(meeting), 2, 1) * (magnitude == magnitude.amax(-2, keepdim=True))
    return meeting.gather(-2, rank.argmax(-2, keepdim=True)).squeeze(-2)
