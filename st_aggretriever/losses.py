"""The training loss of Aggretriever: in-batch softmax over dot products, on the whole vector and on each part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import dot_score
from torch import Tensor, nn


class AggretrieverLoss(nn.Module):
    """``NLL(full) + 0.5 NLL(lexical) + 0.5 NLL(cls)``, each the negative log-likelihood of the positive.

    Each term is :class:`MultipleNegativesRankingLoss` with dot products (no normalisation, no temperature) over all
    passages of the batch: every positive and every hard negative serves every query (Lin, Li, Lin 2023). The parts are
    slices of ``sentence_embedding``, by the widths of the model's last module; a model with one part has NLL(full)
    alone.

    Args:
        model: An Aggretriever, whose last module has ``keys`` and ``dims``.
        scale: Factor on the scores, an inverse temperature.
        lexical_weight: Weight of the lexical part's term (also of the mean part's, with ``pooling="mean+cls"``).
        cls_weight: Weight of the [CLS] part's term.
        gather_across_devices: Use the passages of all processes as negatives.

    Inputs: texts in columns (query, positive, negative 1, ..., negative n); no labels.

    Returns:
        The weighted terms by name, ``{"full": (), "lexical": (), "cls": ()}``: the trainer adds them up and logs each.

    Raises:
        ValueError: A weight is negative, or the model's last module does not say its parts.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *,
        scale: float = 1.0,
        lexical_weight: float = 0.5,
        cls_weight: float = 0.5,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        for name, weight in (("lexical_weight", lexical_weight), ("cls_weight", cls_weight)):
            if weight < 0:
                raise ValueError(f"AggretrieverLoss: {name} must be at least 0, got {weight}.")
        # By attribute, not by class: a model that carries its own code has other classes than this package.
        last: Any = model[-1]
        if not (hasattr(last, "keys") and hasattr(last, "dims")):
            raise ValueError(
                f"AggretrieverLoss: the model's last module must be a Concat with keys and dims, got "
                f"{type(last).__name__}; build the model with build_aggretriever."
            )
        self.model = model
        self.scale = scale
        self.lexical_weight = lexical_weight
        self.cls_weight = cls_weight
        self.gather_across_devices = gather_across_devices
        weights = {"cls": cls_weight}
        self.parts: list[tuple[str, int, float]] = []  # name, width, weight
        for key, dim in zip(last.keys, last.dims, strict=True):
            name = str(key).removesuffix("_embedding")
            self.parts.append((name, int(dim), weights.get(name, lexical_weight)))
        self.nll = MultipleNegativesRankingLoss(
            model, scale=scale, similarity_fct=dot_score, gather_across_devices=gather_across_devices
        )

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        return self.compute_loss_from_embeddings(embeddings, labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> dict[str, Tensor]:
        """The weighted terms from vectors: a list of (B, C + D), query, positive, negatives.

        The gradient with respect to the vectors is all that a gradient cache needs.
        """
        unused = embeddings[0] if labels is None else labels  # The ranking loss takes labels, and ignores them.
        terms = {"full": self.nll.compute_loss_from_embeddings(embeddings, unused)}
        if len(self.parts) == 1:
            return terms
        widths = [width for _, width, _ in self.parts]
        columns = zip(*(torch.split(vectors, widths, dim=1) for vectors in embeddings), strict=True)
        for (name, _, weight), vectors in zip(self.parts, columns, strict=True):
            if weight:
                terms[name] = weight * self.nll.compute_loss_from_embeddings(list(vectors), unused)
        return terms

    def get_config_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "lexical_weight": self.lexical_weight,
            "cls_weight": self.cls_weight,
            "gather_across_devices": self.gather_across_devices,
        }

    @property
    def citation(self) -> str:
        return """
@article{lin-etal-2023-aggretriever,
    title = "Aggretriever: A Simple Approach to Aggregate Textual Representations for Robust Dense Passage Retrieval",
    author = "Lin, Sheng-Chieh and Li, Minghan and Lin, Jimmy",
    journal = "Transactions of the Association for Computational Linguistics",
    year = "2023",
}
"""
