"""Learning from a teacher's scores of a query's own candidates: listwise KL and MarginMSE."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How :class:`AggretrieverLoss` follows a teacher, whose scores come as the label column.

    With t the teacher's scores of a query's n + 1 candidates (its positive, then its own negatives) and s the
    student's, ``scale`` times the dot products:

        KL        = T^2 sum_k p_k (log p_k - log q_k),   p = softmax(t / T),   q = softmax(s / T)
        MarginMSE = 1/n sum_k ((s_0 - s_k) - (t_0 - t_k))^2,   k = 1 .. n

    each a mean over the queries (Hinton, Vinyals, Dean 2015, for T^2 too; Lin, Yang, Lin 2020; Hofstätter et al. 2020).
    KL is taken on the full score and on each part. MarginMSE is taken on the full score alone: the parts' scores add
    up to it, so parts that each met the teacher's margin would together overshoot it.

    Args:
        kl_weight: Weight of the KL term on the full score.
        margin_mse_weight: Weight of MarginMSE.
        lexical_weight: Weight of the KL term on the lexical part, a factor on ``kl_weight`` (also of the mean part's,
            with ``pooling="mean+cls"``).
        cls_weight: The same for the [CLS] part.
        temperature: T > 0, of teacher and student. Cross-encoder logits go well with 1 and more; scores between 0 and
            1 are nearly uniform under a softmax, and want a T near 0.1, or better their logits.

    Raises:
        ValueError: A weight is negative or not finite, both terms have weight 0, or the temperature is not positive.
    """

    kl_weight: float = 1.0
    margin_mse_weight: float = 0.0
    lexical_weight: float = 0.5
    cls_weight: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < math.inf or (name == "temperature" and value == 0):
                least = "above 0" if name == "temperature" else "at least 0"
                raise ValueError(f"Distillation: {name} must be {least} and finite, got {value}.")
        if not self.kl_weight + self.margin_mse_weight:
            raise ValueError("Distillation: kl_weight and margin_mse_weight are both 0; give one of them, or leave it.")


def listwise_kl(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """``T^2 KL(softmax(teacher / T) || softmax(student / T))``, summed over queries.

    Args:
        teacher, student: (B, 1 + n), scores.
        temperature: T.

    Example:
        >>> teacher = torch.tensor([[3.0, 1.0]]).log()
        >>> round(listwise_kl(teacher, torch.zeros(1, 2), 1.0).item(), 4)  # 3/4 log(3/2) + 1/4 log(1/2)
        0.1308
    """
    target = torch.log_softmax(teacher / temperature, 1)
    found = torch.log_softmax(student / temperature, 1)
    return temperature**2 * F.kl_div(found, target, reduction="sum", log_target=True)


def margin_mse(teacher: Tensor, student: Tensor) -> Tensor:
    """Squared difference between the margins of teacher and student: mean over negatives, summed over queries.

    Args:
        teacher, student: (B, 1 + n), scores, the positive's first.

    Example:
        >>> margin_mse(torch.tensor([[5.0, 2.0, 3.0]]), torch.tensor([[4.0, 2.0, 1.0]]))  # ((2 - 3)^2 + (3 - 2)^2) / 2
        tensor(1.)
    """
    margins = [scores[:, :1] - scores[:, 1:] for scores in (teacher, student)]
    return (margins[1] - margins[0]).square().mean(1).sum()
