"""Learning from a teacher's scores: KL and MarginMSE by the reference, on the full score, the parts, the widths."""

import math
from statistics import fmean
from typing import Any

import pytest
import reference
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss, MarginMSELoss
from sentence_transformers.util import pairwise_dot_score

from st_aggretriever import AggretrieverLoss, Distillation, build_aggretriever
from st_aggretriever.losses.distillation import listwise_kl, margin_mse

C, D, BATCH = 3, 8, 4


@pytest.fixture(scope="module")
def model(tiny_bert: str) -> SentenceTransformer:
    return build_aggretriever(tiny_bert, cls_dim=C, lexical_dim=D)


def columns(negatives: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, C + D, generator=generator, requires_grad=True) for _ in range(2 + negatives)]


def teacher_scores(negatives: int) -> torch.Tensor:
    return 3 * torch.randn(BATCH, 1 + negatives, generator=torch.Generator().manual_seed(9))


def student_scores(vectors: list[torch.Tensor], part: slice, scale: float = 1.0) -> list[list[float]]:
    """By query, the scores of its own candidates."""
    rows = [column[:, part].tolist() for column in vectors]
    return [
        [scale * reference.dot(query, passages[index]) for passages in rows[1:]] for index, query in enumerate(rows[0])
    ]


@pytest.mark.parametrize("negatives", [1, 3])
@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (4.0, 0.3)])
def test_kl_and_margin_mse_equal_the_reference(
    model: SentenceTransformer, negatives: int, temperature: float, scale: float
) -> None:
    distillation = Distillation(
        kl_weight=2.0, margin_mse_weight=0.1, lexical_weight=0.7, cls_weight=0.3, temperature=temperature
    )
    vectors, teacher = columns(negatives), teacher_scores(negatives)
    loss = AggretrieverLoss(model, scale=scale, contrastive_weight=0, distillation=distillation)
    terms = loss.compute_loss_from_embeddings(vectors, teacher)
    parts = {"full": (slice(0, C + D), 1.0), "cls": (slice(0, C), 0.3), "lexical": (slice(C, C + D), 0.7)}
    expected = {
        f"kl_{name}": 2.0
        * weight
        * fmean(
            reference.listwise_kl(wanted, found, temperature)
            for wanted, found in zip(teacher.tolist(), student_scores(vectors, part, scale), strict=True)
        )
        for name, (part, weight) in parts.items()
    }
    expected["margin_mse_full"] = 0.1 * fmean(
        reference.margin_mse(wanted, found)
        for wanted, found in zip(teacher.tolist(), student_scores(vectors, slice(0, C + D), scale), strict=True)
    )
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(expected, rel=1e-5)


def test_terms_are_the_stock_losses(model: SentenceTransformer) -> None:
    vectors, teacher = columns(2), teacher_scores(2)
    distillation = Distillation(margin_mse_weight=1.0, temperature=2.0)
    terms = AggretrieverLoss(model, distillation=distillation).compute_loss_from_embeddings(vectors, teacher)
    kl = DistillKLDivLoss(model, similarity_fct=pairwise_dot_score, temperature=2.0)
    torch.testing.assert_close(terms["kl_full"], kl.compute_loss_from_embeddings(vectors, teacher))
    mse = MarginMSELoss(model, similarity_fct=pairwise_dot_score)
    torch.testing.assert_close(terms["margin_mse_full"], mse.compute_loss_from_embeddings(vectors, teacher))


def test_a_student_that_scores_as_its_teacher_has_loss_and_gradient_zero(model: SentenceTransformer) -> None:
    vectors = columns(2)
    teacher = torch.tensor(student_scores(vectors, slice(0, C + D))) + 5.0  # only differences count
    distillation = Distillation(margin_mse_weight=1.0, lexical_weight=0, cls_weight=0)
    loss = AggretrieverLoss(model, contrastive_weight=0, distillation=distillation)
    terms = loss.compute_loss_from_embeddings(vectors, teacher)
    assert list(terms) == ["kl_full", "margin_mse_full"]
    assert sum(terms.values()).item() == pytest.approx(0.0, abs=1e-5)
    for gradient in torch.autograd.grad(sum(terms.values()), vectors):
        assert gradient.abs().max() < 1e-5


def test_only_a_querys_own_candidates_count(model: SentenceTransformer) -> None:
    vectors, teacher = columns(2), teacher_scores(2)
    loss = AggretrieverLoss(model, contrastive_weight=0, distillation=Distillation())
    whole = loss.compute_loss_from_embeddings(vectors, teacher)
    halves = [
        loss.compute_loss_from_embeddings([column[rows] for column in vectors], teacher[rows])
        for rows in (slice(0, 1), slice(1, BATCH))
    ]
    for name, term in whole.items():
        torch.testing.assert_close(term, 0.25 * halves[0][name] + 0.75 * halves[1][name])


def test_folded_widths_have_their_terms_with_their_weights(model: SentenceTransformer) -> None:
    vectors, teacher = columns(2), teacher_scores(2)
    distillation = Distillation(kl_weight=0.5, margin_mse_weight=0.1, temperature=2.0)
    loss = AggretrieverLoss(model, contrastive_weight=0, fold_dims=(4,), fold_weights=(3.0,), distillation=distillation)
    terms = loss.compute_loss_from_embeddings(vectors, teacher)
    assert list(terms) == [
        *("kl_full", "margin_mse_full", "kl_cls", "kl_lexical", "kl_full_4", "margin_mse_full_4", "kl_lexical_4")
    ]
    folded = [torch.tensor([row[:C] + reference.fold(row[C:], 4) for row in column.tolist()]) for column in vectors]
    pairs = list(zip(teacher.tolist(), student_scores(folded, slice(0, C + 4)), strict=True))
    kl = 3.0 * 0.5 * fmean(reference.listwise_kl(wanted, found, 2.0) for wanted, found in pairs)
    mse = 3.0 * 0.1 * fmean(reference.margin_mse(wanted, found) for wanted, found in pairs)
    assert terms["kl_full_4"].item() == pytest.approx(kl, rel=1e-5)
    assert terms["margin_mse_full_4"].item() == pytest.approx(mse, rel=1e-5)
    pairs = list(zip(teacher.tolist(), student_scores(folded, slice(C, C + 4)), strict=True))
    kl = 3.0 * 0.5 * 0.5 * fmean(reference.listwise_kl(wanted, found, 2.0) for wanted, found in pairs)
    assert terms["kl_lexical_4"].item() == pytest.approx(kl, rel=1e-5)


def test_distillation_adds_to_the_contrastive_terms(model: SentenceTransformer) -> None:
    vectors, teacher = columns(2), teacher_scores(2)
    plain = AggretrieverLoss(model).compute_loss_from_embeddings(vectors, teacher)  # labels without use
    alone = AggretrieverLoss(model, contrastive_weight=0, distillation=Distillation())
    both = AggretrieverLoss(model, distillation=Distillation()).compute_loss_from_embeddings(vectors, teacher)
    expected = plain | alone.compute_loss_from_embeddings(vectors, teacher)
    assert both.keys() == expected.keys()
    for name, term in both.items():
        torch.testing.assert_close(term, expected[name])


def test_texts_and_scores_go_through_the_model(model: SentenceTransformer) -> None:
    model.eval()
    texts = [["what dog", "who sails"], ["the dog sleeps", "the ship sails"], ["a cat", "the sea"]]
    teacher = torch.tensor([[5.0, 1.0], [2.0, 3.0]], dtype=torch.float64)  # as Python floats arrive
    loss = AggretrieverLoss(model, distillation=Distillation())
    terms = loss([model.preprocess(column) for column in texts], teacher)
    vectors = [torch.from_numpy(model.encode(column)) for column in texts]
    for name, value in loss.compute_loss_from_embeddings(vectors, teacher).items():
        torch.testing.assert_close(terms[name], value)
        assert value.dtype == torch.float32


@pytest.mark.parametrize(
    ("labels", "negatives", "message"),
    [
        (None, 2, r"labels of shape \(4, 3\) .*got none"),
        (torch.zeros(BATCH), 2, r"labels of shape \(4, 3\) .*got shape \(4,\)"),
        (torch.zeros(BATCH, 2), 2, r"labels of shape \(4, 3\) .*got shape \(4, 2\)"),
        (torch.zeros(BATCH, 1), 0, "at least one negative"),
        (torch.tensor([[0.0, math.nan, 1.0]] * BATCH), 2, "must be finite, got NaN"),
    ],
)
def test_scores_that_do_not_fit_are_refused(
    model: SentenceTransformer, labels: Any, negatives: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AggretrieverLoss(model, distillation=Distillation()).compute_loss_from_embeddings(columns(negatives), labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_weight": -1}, "kl_weight must be at least 0 and finite, got -1"),
        ({"lexical_weight": math.inf}, "lexical_weight must be at least 0"),
        ({"temperature": 0}, "temperature must be above 0 and finite, got 0"),
        ({"temperature": math.nan}, "temperature must be above 0"),
        ({"kl_weight": 0}, "both 0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"Distillation: .*{message}"):
        Distillation(**options)


def test_the_examples_of_the_functions() -> None:
    teacher = torch.tensor([[3.0, 1.0]]).log()
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert listwise_kl(teacher, torch.zeros(1, 2), 1.0).item() == pytest.approx(expected, rel=1e-6)
    assert margin_mse(torch.tensor([[5.0, 2.0, 3.0]]), torch.tensor([[4.0, 2.0, 1.0]])).item() == 1.0
