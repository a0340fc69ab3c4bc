"""Folding the lexical part: the narrower model's slices, by the reference and by the slice rule itself."""

import math

import pytest
import reference
import torch
from sentence_transformers import SentenceTransformer

from st_aggretriever import SliceMaxAgg, build_aggretriever
from st_aggretriever.fold import fold_lexical, folds_signed

VOCABULARY, D = 101, 12  # 101 ids: every width meets a remainder


def random_lexical(rows: int = 6, width: int = D, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lexical_dim", [12, 6, 4, 3, 2, 1])
@pytest.mark.parametrize("aggregation", ["signed", "positive"])
def test_folded_slices_are_those_of_the_narrower_model(aggregation: str, lexical_dim: int) -> None:
    weights = torch.rand(20, VOCABULARY, generator=torch.Generator().manual_seed(1))
    weights = weights.round(decimals=1)  # many equal maxima
    wide, narrow = (SliceMaxAgg(VOCABULARY, dim, aggregation=aggregation) for dim in (D, lexical_dim))
    folded = fold_lexical(wide.aggregate(weights), lexical_dim, signed=aggregation == "signed")
    assert folded.tolist() == narrow.aggregate(weights).tolist()


@pytest.mark.parametrize("lexical_dim", [12, 6, 4, 3, 1])
@pytest.mark.parametrize("signed", [True, False])
def test_folding_equals_the_reference(signed: bool, lexical_dim: int) -> None:
    lexical = random_lexical().round(decimals=0)  # ties of equal and of opposite sign
    folded = fold_lexical(lexical, lexical_dim, signed=signed)
    assert folded.tolist() == [reference.fold(row, lexical_dim, signed) for row in lexical.tolist()]


def test_of_equal_magnitudes_the_negative_wins() -> None:
    for pair in ([0.5, -0.5], [-0.5, 0.5], [0.0, -0.0], [-0.0, 0.0]):
        assert math.copysign(1.0, fold_lexical(torch.tensor(pair), 1).item()) == -1.0, pair


def test_folding_in_two_steps_is_folding_at_once() -> None:
    lexical = random_lexical()
    assert torch.equal(fold_lexical(fold_lexical(lexical, 6), 2), fold_lexical(lexical, 2))


def test_any_leading_dimensions() -> None:
    lexical = random_lexical()
    assert torch.equal(fold_lexical(lexical.view(2, 3, D), 4), fold_lexical(lexical, 4).view(2, 3, 4))
    assert torch.equal(fold_lexical(lexical[0], 4), fold_lexical(lexical, 4)[0])


@pytest.mark.parametrize("signed", [True, False])
def test_gradient_goes_to_the_winning_slice_alone(signed: bool) -> None:
    lexical = torch.tensor([0.5, -0.1, -0.7, 0.1, 0.6, 0.05], requires_grad=True)
    (fold_lexical(lexical, 2, signed=signed) * torch.tensor([3.0, 5.0])).sum().backward()
    assert lexical.grad is not None
    expected = [0.0, 5.0, 3.0, 0.0, 0.0, 0.0] if signed else [0.0, 0.0, 0.0, 5.0, 3.0, 0.0]
    assert lexical.grad.tolist() == expected  # of -0.1 and 0.1 the negative, the first of the two


@pytest.mark.parametrize("signed", [True, False])
def test_of_equal_slices_one_gets_the_whole_gradient(signed: bool) -> None:
    lexical = torch.tensor([0.5, 0.5], requires_grad=True)
    fold_lexical(lexical, 1, signed=signed).sum().backward()
    assert lexical.grad is not None
    assert lexical.grad.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("signed", [True, False])
def test_gradient_equals_finite_differences(signed: bool) -> None:
    lexical = random_lexical(3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda values: fold_lexical(values, 4, signed=signed), lexical)


@pytest.mark.parametrize("signed", [True, False])
def test_nan_stays_where_it_is(signed: bool) -> None:
    lexical = torch.tensor([1.0, 2.0, math.nan, -3.0, 4.0, 0.0])
    folded = fold_lexical(lexical, 2, signed=signed)
    assert folded.isnan().tolist() == [True, False]
    assert folded[1].item() == (-3.0 if signed else 2.0)


@pytest.mark.parametrize("lexical_dim", [0, -4, 5, 24])
def test_a_width_that_does_not_divide_is_refused(lexical_dim: int) -> None:
    with pytest.raises(ValueError, match=r"width of the lexical part, 12, got .*choose among 1, 2, 3, 4, 6, 12"):
        fold_lexical(random_lexical(), lexical_dim)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"aggregation": "positive"}, False),
        ({"aggregation": "mean"}, "aggregation 'signed' or 'positive', got 'mean'"),
        ({"aggregation": "linear"}, "got 'linear'"),
        ({"slicing": "random"}, "slicing 'strided', got 'random'"),
        ({"remainder": "drop"}, "remainder 'pad', got 'drop'"),
        ({"pooling": "cls"}, "the model has none"),
    ],
)
def test_which_models_fold(tiny_bert: str, options: dict, expected: bool | str) -> None:
    model: SentenceTransformer = build_aggretriever(tiny_bert, cls_dim=3, lexical_dim=D, **options)
    if isinstance(expected, bool):
        assert folds_signed(model, "test") is expected
    else:
        with pytest.raises(ValueError, match=f"^test needs .*{expected}"):
            folds_signed(model, "test")
