"""SliceMaxAgg: the slice rules by hand, against tests/reference.py, and over the vocabularies people have."""

import pytest
import reference
import torch

from st_aggretriever import SliceMaxAgg

# Vocabularies of BERT cased and uncased, a resized one, RoBERTa, ModernBERT, XLM-R, and one that is nearly nothing.
VOCABULARIES = (57, 28_996, 30_522, 30_544, 50_265, 50_368, 250_002)


def weights(vocabulary: int, texts: int = 2) -> torch.Tensor:
    return torch.randn(texts, vocabulary, generator=torch.Generator().manual_seed(0))


def test_signed_by_hand() -> None:
    # D = 2: ids 0, 4, 8 in slice 0 +; 1, 5, 9 in slice 0 -; 2, 6 in slice 1 +; 3, 7 in slice 1 -.
    lexical = torch.tensor([[0.1, 0.5, 0.3, 0.2, 0.9, 0.4, 0.7, 0.8, 0.6, 0.95]])
    assert SliceMaxAgg(10, 2).aggregate(lexical).tolist() == [[pytest.approx(-0.95), pytest.approx(-0.8)]]
    # remainder="drop" loses ids 0 and 1 and renumbers: 2, 6 | 3, 7 | 4, 8 | 5, 9.
    dropped = SliceMaxAgg(10, 2, remainder="drop").aggregate(lexical)
    assert dropped.tolist() == [[pytest.approx(-0.8), pytest.approx(-0.95)]]


def test_positive_and_mean_by_hand() -> None:
    lexical = torch.tensor([[1.0, 5.0, 3.0, 2.0, 9.0]])
    assert SliceMaxAgg(5, 2, aggregation="positive").aggregate(lexical).tolist() == [[9.0, 5.0]]
    assert SliceMaxAgg(5, 2, aggregation="mean").aggregate(lexical).tolist() == [[pytest.approx(13 / 3), 3.5]]
    mean = SliceMaxAgg(5, 2, aggregation="mean", remainder="drop").aggregate(lexical)
    assert mean.tolist() == [[3.5, 6.0]]


def test_a_tie_is_negative() -> None:
    result = SliceMaxAgg(2, 1).aggregate(torch.tensor([[0.5, 0.5], [0.0, 0.0]]))
    assert result.tolist() == [[-0.5], [0.0]]
    assert result.signbit().all()


def test_none_passes_the_weights_through() -> None:
    module = SliceMaxAgg(57, 8, aggregation="none")
    assert module.get_embedding_dimension() == 57
    assert torch.equal(module.aggregate(weights(57)), weights(57))


def test_linear_is_a_projection_without_bias() -> None:
    module = SliceMaxAgg(57, 8, aggregation="linear")
    assert [tuple(p.shape) for p in module.parameters()] == [(8, 57)]
    torch.testing.assert_close(module.aggregate(weights(57)), weights(57) @ module.linear.weight.T)
    assert module.aggregate(torch.zeros(1, 57)).eq(0).all()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dim", [8, 128, 640])
@pytest.mark.parametrize("aggregation", ["signed", "positive", "mean"])
@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_every_rule_equals_the_reference(vocabulary: int, dim: int, aggregation: str, remainder: str) -> None:
    if (2 * dim if aggregation == "signed" else dim) > vocabulary:
        with pytest.raises(ValueError, match=r"lexical_dim must be at most V.*got"):
            SliceMaxAgg(vocabulary, dim, aggregation=aggregation, remainder=remainder)
        return
    lexical = weights(vocabulary, texts=1)
    result = SliceMaxAgg(vocabulary, dim, aggregation=aggregation, remainder=remainder).aggregate(lexical)
    expected = torch.tensor([reference.aggregate(lexical[0].tolist(), dim, aggregation, remainder)])
    torch.testing.assert_close(result, expected, rtol=0, atol=0 if aggregation != "mean" else 1e-6)


@pytest.mark.parametrize(
    ("aggregation", "dims", "dropped"),
    [("signed", (128, 256, 640, 768), (58, 314, 0, 0)), ("positive", (128, 256, 640, 768), (58, 58, 442, 570))],
)
def test_published_remainders_at_the_bert_vocabulary(
    aggregation: str, dims: tuple[int, ...], dropped: tuple[int, ...]
) -> None:
    """Ids below the published remainder never show; the next one does."""
    for dim, lost in zip(dims, dropped, strict=True):
        module = SliceMaxAgg(30_522, dim, aggregation=aggregation, remainder="drop")
        for term, seen in ((lost - 1, False), (lost, True)):
            if term >= 0:
                one_hot = torch.zeros(1, 30_522)
                one_hot[0, term] = 1.0
                assert bool(module.aggregate(one_hot).abs().max() == 1.0) is seen


@pytest.mark.parametrize("slicing", ["strided", "random"])
@pytest.mark.parametrize("vocabulary", [57, 1000])
def test_every_id_is_in_exactly_one_slice(slicing: str, vocabulary: int) -> None:
    module = SliceMaxAgg(vocabulary, 8, slicing=slicing)
    hits = module.aggregate(torch.eye(vocabulary)).abs() == 1.0  # row t: where id t alone shows
    assert hits.sum(1).eq(1).all()
    sizes = hits.sum(0)
    assert sizes.sum() == vocabulary
    assert sizes.max() - sizes.min() <= 2  # a slice is two halves, each within one of the others


def test_random_slices_follow_the_seed_and_are_the_strided_rule_on_a_permutation() -> None:
    lexical = weights(57)
    one, same, other = (SliceMaxAgg(57, 8, slicing="random", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.aggregate(lexical), same.aggregate(lexical))
    assert not torch.equal(one.aggregate(lexical), other.aggregate(lexical))
    assert sorted(one.permutation.tolist()) == list(range(57))
    assert torch.equal(one.aggregate(lexical), SliceMaxAgg(57, 8).aggregate(lexical[:, one.permutation]))


def test_gradient_goes_to_the_winner_of_the_winning_half() -> None:
    lexical = torch.tensor([[0.1, 0.5, 0.9, 0.4]], requires_grad=True)  # + ids 0, 2; - ids 1, 3
    SliceMaxAgg(4, 1).aggregate(lexical).sum().backward()
    assert lexical.grad.tolist() == [[0, 0, 1, 0]]
    lexical.grad = None
    SliceMaxAgg(4, 1).aggregate(1 - lexical).sum().backward()  # 0.9, 0.5, 0.1, 0.6: + wins with id 0
    assert lexical.grad.tolist() == [[-1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 145, "lexical_dim": 640}, r"lexical_dim must be at most V // 2 = 72, got 640"),
        ({"vocab_size": 145, "lexical_dim": 146, "aggregation": "positive"}, r"at most V = 145, got 146"),
        ({"vocab_size": 145, "lexical_dim": 0}, "lexical_dim must be a whole number of at least 1, got 0"),
        ({"vocab_size": 145, "lexical_dim": 8, "aggregation": "max"}, "aggregation must be one of 'signed'"),
        ({"vocab_size": 145, "lexical_dim": 8, "slicing": "blocks"}, "slicing must be one of"),
        ({"vocab_size": 145, "lexical_dim": 8, "remainder": "wrap"}, "remainder must be one of"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SliceMaxAgg(**arguments)


def test_a_wrong_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="V = 57 columns, got 58"):
        SliceMaxAgg(57, 8).aggregate(torch.zeros(1, 58))
