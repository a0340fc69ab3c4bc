"""The loss of Aggretriever for batches whose activations don't fit into memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from torch import Tensor

from st_aggretriever.losses.aggretriever import AggretrieverLoss, _float32
from st_aggretriever.losses.duplicates import KnownPositives


class CachedAggretrieverLoss(CachedLossMixin, AggretrieverLoss):
    """:class:`AggretrieverLoss` with the activations of one mini-batch at a time: the batch may be of any size.

    GradCache (Gao, Zhang, Han, Callan 2021): encode all mini-batches without keeping activations; take the loss over
    the whole batch and its gradient with respect to the vectors; encode each mini-batch again, now with activations,
    and carry that gradient on. All terms share the one cached gradient. Value and gradient are those of the plain loss;
    with dropout too, as the second encoding repeats the random state of the first: a mini-batch draws what the plain
    loss would draw for a column of those texts. Costs one more forward pass.

    Args:
        model: An Aggretriever.
        mini_batch_size: Texts in a mini-batch, and queries that are scored against all passages at a time.
        mini_batch_num_tokens: Fill mini-batches up to so many real tokens instead; a longer text is one by itself.
        **options: As for :class:`AggretrieverLoss`.

    Returns:
        The weighted terms by name. Their sum is what backward is for: the gradients of the terms are not kept apart.

    Raises:
        ValueError: A size is not positive, or as for :class:`AggretrieverLoss`.

    Example:
        >>> loss = CachedAggretrieverLoss(model, mini_batch_size=16)
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        for name, size in (("mini_batch_size", mini_batch_size), ("mini_batch_num_tokens", mini_batch_num_tokens)):
            if size is not None and size < 1:
                raise ValueError(f"CachedAggretrieverLoss: {name} must be at least 1, got {size}.")
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self._known: KnownPositives | None = None
        self._values: dict[str, Tensor] = {}

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> dict[str, Tensor]:
        features = [_batch_wide(column) for column in sentence_features]
        self._known = self._known_positives(features)
        try:
            total = self.forward_cached(features, labels)
            values = self._values
        finally:
            self._known, self._values = None, {}
        if not total.requires_grad:
            return values
        return dict(zip(values, _Terms.apply(total, torch.stack(list(values.values()))).unbind(), strict=True))

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Any],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: Any = None,
    ) -> tuple[Tensor, Any]:
        """Encode a mini-batch; the second time in the arithmetic of the first, also where autocast ended in between."""
        if random_state is None:
            device = sentence_feature["input_ids"].device.type
            arithmetic = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        else:
            arithmetic, random_state = random_state
        with torch.autocast(*arithmetic):
            vectors, random_state = super().embed_minibatch(
                sentence_feature, begin, end, with_grad, copy_random_state, random_state
            )
        return vectors, (arithmetic, random_state)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The sum of the terms, from vectors by column and mini-batch; with ``with_backward`` these get gradients."""
        embeddings = [torch.cat(column) for column in reps]
        batch = len(embeddings[0])
        teacher = self._teacher_scores(embeddings, labels)
        values: dict[str, Tensor] = {}
        with _float32(embeddings[0]):
            blocks = self._blocks(embeddings)
            # Leaves of their own: so the scores of some queries at a time can go backward, and what all have in common
            # (folding, and gathering, which waits for the other processes) once.
            queries, passages = ([block.detach().requires_grad_(with_backward) for block in side] for side in blocks)
            for begin in range(0, batch, self.mini_batch_size):
                end = begin + self.mini_batch_size
                terms = self._terms(
                    [block[begin:end] for block in queries],
                    passages,
                    begin,
                    batch,
                    None if teacher is None else teacher[begin:end],
                    self._known,
                )
                if with_backward:
                    torch.stack(list(terms.values())).sum().backward()
                for name, value in terms.items():
                    values[name] = values.get(name, 0.0) + value.detach()
            if with_backward:
                ends = [
                    (block, leaf.grad)
                    for side, leaves in zip(blocks, (queries, passages), strict=True)
                    for block, leaf in zip(side, leaves, strict=True)
                    if leaf.grad is not None
                ]
                torch.autograd.backward([block for block, _ in ends], [grad for _, grad in ends])
        self._values = values
        return torch.stack(list(values.values())).sum()

    def get_config_dict(self) -> dict[str, Any]:
        return super().get_config_dict() | {
            "mini_batch_size": self.mini_batch_size,
            "mini_batch_num_tokens": self.mini_batch_num_tokens,
        }


def _batch_wide(features: dict[str, Any]) -> dict[str, Any]:
    """A column whose prompt length, where a tensor has one for all its texts, can't be cut into mini-batches."""
    length = features.get("prompt_length")
    if isinstance(length, Tensor) and length.numel() == 1:
        return features | {"prompt_length": int(length)}
    return features


class _Terms(torch.autograd.Function):
    """The terms, such that the gradient of their sum is that of the total, which carries the cached gradients on."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if (grad != grad[0]).any():
            raise ValueError(
                "CachedAggretrieverLoss: only the plain sum of the terms has a gradient; weight the terms by the "
                "loss's arguments instead."
            )
        return grad[0], None
