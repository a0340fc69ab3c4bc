"""The training loss of Aggretriever: in-batch softmax over dot products, on the whole vector and on each part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import all_gather_with_grad, get_rank, get_world_size
from torch import Tensor, nn

from st_aggretriever.fold import check_divides, fold_lexical, folds_signed
from st_aggretriever.losses.distillation import Distillation, listwise_kl, margin_mse
from st_aggretriever.losses.duplicates import KnownPositives


class AggretrieverLoss(nn.Module):
    """``NLL(full) + 0.5 NLL(lexical) + 0.5 NLL(cls)``, each the negative log-likelihood of the positive.

    For query q_i with positive p_i, and all passages p of the batch (every positive and every hard negative serves
    every query; Lin, Li, Lin 2023), without normalisation:

        NLL = - mean_i log( exp(scale q_i . p_i) / sum over p not in K_i of exp(scale q_i . p) )

    K_i, the passages left out, are the other known positives of query i: see :class:`KnownPositives`. Without such
    duplicates a term is that of ``MultipleNegativesRankingLoss(scale=scale, similarity_fct=dot_score)``. The parts are
    slices of ``sentence_embedding``, by the widths of the model's last module; a model with one part has NLL(full)
    alone. All of it is in float32, whatever autocast says.

    **Fold-aware** (``fold_dims``), a Matryoshka for dot products: with l_d the lexical part folded to d slices
    (:func:`fold_lexical`; no second encoding) and ``[cls ; l_d]`` the whole vector then,

        sum over d of w_d ( NLL([cls ; l_d]) + lexical_weight NLL(l_d) ) + cls_weight NLL(cls)

    over the d of ``fold_dims`` and the model's own D, which has weight 1 where ``fold_dims`` doesn't name it.

    **Distillation**: KL and MarginMSE against a teacher's scores of each query's own candidates, added to the above,
    with the same w_d: see :class:`Distillation`.

    Args:
        model: An Aggretriever, whose last module has ``keys`` and ``dims``.
        scale: Factor on the scores, an inverse temperature.
        lexical_weight: Weight of the lexical part's term (also of the mean part's, with ``pooling="mean+cls"``).
        cls_weight: Weight of the [CLS] part's term.
        contrastive_weight: Factor on all NLL terms; 0 leaves distillation alone.
        fold_dims: Widths d of the lexical part, divisors of D, each a further term.
        fold_weights: Their w_d; 1 each if not given.
        distillation: Weights and temperature for learning from a teacher.
        gather_across_devices: Take the passages of all processes as negatives. Each process has the mean over its own
            queries; the average over the processes, of values and (as DDP does) of gradients, is then what one process
            with the whole batch would have. All processes need batches of the same size.

    Inputs: texts in columns (query, positive, negative 1, ..., negative n). With ``distillation`` n is at least 1 and
    the labels are the teacher's scores (B, 1 + n), in the order of the columns; without, labels are ignored.

    Returns:
        The weighted terms by name: ``full``, ``cls``, ``lexical``; at a width d beside D ``full_d``, ``lexical_d``; of
        distillation ``kl_full``, ``kl_cls``, ``kl_lexical``, ``margin_mse_full``, likewise with ``_d``. Each is (): the
        trainer adds them up and logs each. A term with weight 0 is not there.

    Raises:
        ValueError: A weight is negative, no term is left, the model's last module does not say its parts, or
            ``fold_dims`` doesn't suit the model: D no multiple, or slices that don't nest (another aggregation than
            agg* and agg+, ``slicing="random"``, ``remainder="drop"``).

    Example:
        >>> loss = AggretrieverLoss(model, fold_dims=(320, 128), distillation=Distillation(temperature=2.0))
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *,
        scale: float = 1.0,
        lexical_weight: float = 0.5,
        cls_weight: float = 0.5,
        contrastive_weight: float = 1.0,
        fold_dims: Sequence[int] = (),
        fold_weights: Sequence[float] | None = None,
        distillation: Distillation | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        _check("scale", scale, above=True)
        _check("lexical_weight", lexical_weight)
        _check("cls_weight", cls_weight)
        _check("contrastive_weight", contrastive_weight)
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
        self.contrastive_weight = contrastive_weight
        self.fold_dims = tuple(int(dim) for dim in fold_dims)
        self.fold_weights = (1.0,) * len(self.fold_dims) if fold_weights is None else tuple(map(float, fold_weights))
        self.distillation = distillation
        self.gather_across_devices = gather_across_devices
        self.parts = [str(key).removesuffix("_embedding") for key in last.keys]
        self.widths = [int(dim) for dim in last.dims]
        self._signed = True
        self._fold_widths = self._check_folds(model)
        self._views = [view for view in self._all_views() if any(view.weights)]
        if not self._views:
            raise ValueError(
                "AggretrieverLoss: all weights are 0, so no term is left; give contrastive_weight or others."
            )

    def _check_folds(self, model: SentenceTransformer) -> dict[int, float]:
        """The weight of each width of the lexical part, its own first; without a lexical part none."""
        own = dict(zip(self.parts, self.widths, strict=True)).get("lexical", 0)
        if not self.fold_dims and not self.fold_weights:
            return {own: 1.0} if own else {}
        self._signed = folds_signed(model, "AggretrieverLoss: fold_dims")
        for dim in self.fold_dims:
            check_divides(dim, own, "AggretrieverLoss: each of fold_dims")
        if len(set(self.fold_dims)) < len(self.fold_dims):
            raise ValueError(f"AggretrieverLoss: each of fold_dims must come once, got {self.fold_dims}.")
        if len(self.fold_weights) != len(self.fold_dims):
            raise ValueError(
                f"AggretrieverLoss: fold_weights must have one weight for each of the {len(self.fold_dims)} fold_dims, "
                f"got {len(self.fold_weights)}."
            )
        for weight in self.fold_weights:
            _check("each of fold_weights", weight)
        return {own: 1.0} | dict(zip(self.fold_dims, self.fold_weights, strict=True))

    def _all_views(self) -> list[_View]:
        """What is scored: the whole vector, each part alone, then the same at each folded width.

        Blocks are the columns of a vector that belong together: the parts in order, then the folded lexical parts.
        """
        teacher = self.distillation
        kl_weight, mse_weight = (teacher.kl_weight, teacher.margin_mse_weight) if teacher else (0.0, 0.0)

        def part(name: str, block: int, factor: float = 1.0) -> _View:
            weight = self.cls_weight if name == "cls" else self.lexical_weight
            kl = 0.0 if teacher is None else teacher.cls_weight if name == "cls" else teacher.lexical_weight
            return _View(name, (block,), (factor * self.contrastive_weight * weight, factor * kl_weight * kl, 0.0))

        def whole(name: str, blocks: tuple[int, ...], factor: float = 1.0) -> _View:
            return _View(name, blocks, (factor * self.contrastive_weight, factor * kl_weight, factor * mse_weight))

        factors = list(self._fold_widths.values()) or [1.0]
        count = len(self.parts)
        views = [whole("full", tuple(range(count)), factors[0])]
        for block, name in enumerate(self.parts if count > 1 else []):
            views.append(part(name, block, factors[0] if name == "lexical" else 1.0))
        others = tuple(block for block, name in enumerate(self.parts) if name != "lexical")
        for block, (dim, factor) in enumerate(list(self._fold_widths.items())[1:], start=count):
            views.append(whole(f"full_{dim}", (*others, block), factor))
            if count > 1:
                views.append(part(f"lexical_{dim}", block, factor))
        return views

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> dict[str, Tensor]:
        features = list(sentence_features)
        known = self._known_positives(features)
        embeddings = [self.model(column)["sentence_embedding"] for column in features]
        return self.compute_loss_from_embeddings(embeddings, labels, known)

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | None = None, known: KnownPositives | None = None
    ) -> dict[str, Tensor]:
        """The weighted terms from vectors: a list of (B, C + D), query, positive, negatives.

        The gradient with respect to the vectors is all that a gradient cache needs.

        Args:
            embeddings: One tensor a column.
            labels: The teacher's scores (B, 1 + n), for distillation.
            known: The passages to leave out as negatives; none without.
        """
        teacher = self._teacher_scores(embeddings, labels)
        with _float32(embeddings[0]):
            queries, passages = self._blocks(embeddings)
            return self._terms(queries, passages, 0, len(embeddings[0]), teacher, known)

    def _known_positives(self, features: list[dict[str, Any]]) -> KnownPositives:
        if len(features) < 2:
            raise ValueError(f"{type(self).__name__}: needs columns of queries and positives, got {len(features)}.")
        return KnownPositives(features, gather_across_devices=self.gather_across_devices)

    def _teacher_scores(self, embeddings: list[Tensor], labels: Tensor | None) -> Tensor | None:
        """(B, 1 + n), or None where nothing is distilled."""
        if self.distillation is None:
            return None
        expected = (len(embeddings[0]), len(embeddings) - 1)
        if expected[1] < 2:
            raise ValueError("AggretrieverLoss: distillation needs at least one negative for each query, got none.")
        if labels is None or tuple(labels.shape) != expected:
            found = "none" if labels is None else f"shape {tuple(labels.shape)}"
            raise ValueError(
                f"AggretrieverLoss: distillation needs the teacher's scores as labels of shape {expected} (queries; "
                f"the positive and its negatives), got {found}. Give the data a column 'scores' with a list a row."
            )
        if not labels.isfinite().all():
            raise ValueError("AggretrieverLoss: the teacher's scores must be finite, got NaN or infinity.")
        return labels.detach().to(torch.promote_types(embeddings[0].dtype, torch.float32))

    def _blocks(self, embeddings: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The vectors by block: the parts, then the folded lexical parts; (B, width) and (P, width) each.

        Passages are column by column, with ``gather_across_devices`` process by process.
        """
        passages = torch.cat(embeddings[1:])
        if self.gather_across_devices:
            passages = all_gather_with_grad(passages)
        both = []
        for vectors in (embeddings[0], passages):
            vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
            blocks = list(vectors.split(self.widths, dim=1))
            for dim in list(self._fold_widths)[1:]:
                blocks.append(fold_lexical(blocks[self.parts.index("lexical")], dim, signed=self._signed))
            both.append(blocks)
        return both[0], both[1]

    def _terms(
        self,
        queries: list[Tensor],
        passages: list[Tensor],
        begin: int,
        batch: int,
        teacher: Tensor | None,
        known: KnownPositives | None,
    ) -> dict[str, Tensor]:
        """The terms' shares that come from some queries of a batch: those from row ``begin`` on.

        Args:
            queries: By block, (b, width).
            passages: By block, (P, width).
            begin: Where in the batch the queries begin.
            batch: Queries of the batch, over which a term is the mean.
            teacher: (b, 1 + n).
            known: The passages to leave out as negatives.
        """
        rows = torch.arange(len(queries[0]), device=queries[0].device)
        first = get_rank() * (len(passages[0]) // get_world_size()) if self.gather_across_devices else 0
        own = first + begin + rows  # (b): the column of each query's positive
        needed = sorted({block for view in self._views for block in view.blocks})
        # Dot products add up: the score of the whole vector is the sum of its parts' scores.
        scores = {block: self.scale * queries[block] @ passages[block].T for block in needed}  # (b, P)
        left_out = known.mask(begin, begin + len(rows)) if known else None
        terms: dict[str, Tensor] = {}
        for view in self._views:
            contrastive, kl, mse = view.weights
            student = sum(scores[block] for block in view.blocks)
            assert isinstance(student, Tensor)
            if contrastive:
                seen = student if left_out is None else student.masked_fill(left_out, -torch.inf)
                terms[view.name] = contrastive / batch * F.cross_entropy(seen, own, reduction="sum")
            if teacher is None or self.distillation is None:
                continue
            # A query's own candidates stand one column of the batch apart.
            candidates = own[:, None] + batch * torch.arange(teacher.shape[1], device=own.device)
            ranked = student.gather(1, candidates)  # (b, 1 + n)
            if kl:
                terms[f"kl_{view.name}"] = kl / batch * listwise_kl(teacher, ranked, self.distillation.temperature)
            if mse:
                terms[f"margin_mse_{view.name}"] = mse / batch * margin_mse(teacher, ranked)
        return terms

    def get_config_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "lexical_weight": self.lexical_weight,
            "cls_weight": self.cls_weight,
            "contrastive_weight": self.contrastive_weight,
            "fold_dims": self.fold_dims,
            "fold_weights": self.fold_weights,
            "distillation": None if self.distillation is None else asdict(self.distillation),
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


class _View(NamedTuple):
    """Something that is scored by itself: the sum of some blocks."""

    name: str
    blocks: tuple[int, ...]
    weights: tuple[float, float, float]  # of NLL, KL, MarginMSE


def _check(name: str, value: float, *, above: bool = False) -> None:
    if not 0 <= value < math.inf or (above and value == 0):
        least = "above 0" if above else "at least 0"
        raise ValueError(f"AggretrieverLoss: {name} must be {least} and finite, got {value}.")


def _float32(tensor: Tensor) -> torch.autocast:
    """Half precision would round scores of 20 to eighths."""
    return torch.autocast(tensor.device.type, enabled=False)
