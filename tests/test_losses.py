"""AggretrieverLoss: its terms by the reference; duplicates of positives; folded widths."""

from typing import Any

import pytest
import reference
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import dot_score
from torch.utils._python_dispatch import TorchDispatchMode

from st_aggretriever import AggretrieverLoss, build_aggretriever
from st_aggretriever.losses.duplicates import KnownPositives

C, D, BATCH = 3, 8, 4


@pytest.fixture(scope="module")
def model(tiny_bert: str) -> SentenceTransformer:
    return build_aggretriever(tiny_bert, cls_dim=C, lexical_dim=D)


def columns(negatives: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, C + D, generator=generator, requires_grad=True) for _ in range(2 + negatives)]


def expected_terms(vectors: list[torch.Tensor], scale: float) -> dict[str, float]:
    parts = {"full": slice(0, C + D), "cls": slice(0, C), "lexical": slice(C, C + D)}
    terms = {}
    for name, part in parts.items():
        queries, *passages = (column[:, part] for column in vectors)
        terms[name] = reference.negative_log_likelihood(queries.tolist(), torch.cat(passages).tolist(), scale)
    return terms


@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("scale", [1.0, 0.2])
def test_terms_equal_the_reference(model: SentenceTransformer, negatives: int, scale: float) -> None:
    loss = AggretrieverLoss(model, scale=scale, lexical_weight=0.7, cls_weight=0.3)
    vectors = columns(negatives)
    terms = loss.compute_loss_from_embeddings(vectors)
    expected = expected_terms(vectors, scale)
    assert list(terms) == ["full", "cls", "lexical"]
    assert terms["full"].item() == pytest.approx(expected["full"], rel=1e-5)
    assert terms["lexical"].item() == pytest.approx(0.7 * expected["lexical"], rel=1e-5)
    assert terms["cls"].item() == pytest.approx(0.3 * expected["cls"], rel=1e-5)


def test_weights_default_to_a_half_and_scale_to_one(model: SentenceTransformer) -> None:
    vectors = columns(1)
    terms, expected = AggretrieverLoss(model).compute_loss_from_embeddings(vectors), expected_terms(vectors, 1.0)
    assert sum(terms.values()).item() == pytest.approx(
        expected["full"] + 0.5 * expected["lexical"] + 0.5 * expected["cls"], rel=1e-5
    )


def test_vectors_are_not_normalised(model: SentenceTransformer) -> None:
    vectors = columns(0)
    longer = [2 * column for column in vectors]
    loss = AggretrieverLoss(model)
    assert loss.compute_loss_from_embeddings(vectors)["full"] != loss.compute_loss_from_embeddings(longer)["full"]


def test_a_part_with_weight_zero_has_no_term(model: SentenceTransformer) -> None:
    assert list(AggretrieverLoss(model, cls_weight=0.0).compute_loss_from_embeddings(columns(0))) == ["full", "lexical"]


@pytest.mark.parametrize("options", [{"cls_dim": 0}, {"lexical_dim": 0}, {"pooling": "cls"}, {"pooling": "mean"}])
def test_a_single_part_has_the_full_loss_alone(tiny_bert: str, options: dict) -> None:
    single = build_aggretriever(tiny_bert, **{"cls_dim": C, "lexical_dim": D, **options})
    width = single.get_embedding_dimension()
    vectors = [column[:, :width] for column in columns(0)]
    assert list(AggretrieverLoss(single).compute_loss_from_embeddings(vectors)) == ["full"]


def test_texts_go_through_the_model(model: SentenceTransformer) -> None:
    loss = AggretrieverLoss(model)
    model.eval()
    texts = [["what dog", "who sails"], ["the dog sleeps", "the ship sails"], ["a cat", "the sea"]]
    features = [model.preprocess(column) for column in texts]
    terms = loss(features, torch.zeros(2))
    vectors = [torch.from_numpy(model.encode(column)) for column in texts]
    for name, value in loss.compute_loss_from_embeddings(vectors).items():
        torch.testing.assert_close(terms[name], value)


def test_negative_weights_and_foreign_models_are_refused(model: SentenceTransformer, tiny_bert: str) -> None:
    with pytest.raises(ValueError, match="cls_weight must be at least 0 and finite, got -1"):
        AggretrieverLoss(model, cls_weight=-1)
    with pytest.raises(ValueError, match="build_aggretriever"):
        AggretrieverLoss(SentenceTransformer(modules=list(model)[:-1]))
    with pytest.raises(ValueError, match="no term is left"):
        AggretrieverLoss(model, contrastive_weight=0)
    with pytest.raises(ValueError, match="columns of queries and positives, got 1"):
        AggretrieverLoss(model)([model.preprocess(["dog"])])


@pytest.mark.parametrize("negatives", [0, 2])
def test_terms_are_multiple_negatives_ranking_losses(model: SentenceTransformer, negatives: int) -> None:
    """The stock loss with dot products, in value and gradient, where no passage comes twice."""
    stock = MultipleNegativesRankingLoss(model, scale=0.3, similarity_fct=dot_score)
    vectors = columns(negatives)
    terms = AggretrieverLoss(model, scale=0.3, lexical_weight=1, cls_weight=1).compute_loss_from_embeddings(vectors)
    for name, part in {"full": slice(0, C + D), "cls": slice(0, C), "lexical": slice(C, C + D)}.items():
        expected = stock.compute_loss_from_embeddings([column[:, part] for column in vectors], torch.empty(0))
        torch.testing.assert_close(terms[name], expected)
        gradients = [torch.autograd.grad(term, vectors, retain_graph=True) for term in (terms[name], expected)]
        torch.testing.assert_close(*gradients)


def test_contrastive_weight_is_a_factor_on_every_term(model: SentenceTransformer) -> None:
    vectors = columns(1)
    plain = AggretrieverLoss(model).compute_loss_from_embeddings(vectors)
    weighted = AggretrieverLoss(model, contrastive_weight=0.25).compute_loss_from_embeddings(vectors)
    torch.testing.assert_close(weighted, {name: 0.25 * term for name, term in plain.items()})


def test_loss_is_in_float32_under_autocast(model: SentenceTransformer) -> None:
    vectors = [4 * column.detach() for column in columns(1)]
    expected = AggretrieverLoss(model).compute_loss_from_embeddings(vectors)
    with torch.autocast("cpu", torch.bfloat16):
        found = AggretrieverLoss(model).compute_loss_from_embeddings(vectors)
    assert {name: term.item() for name, term in found.items()} == {name: term.item() for name, term in expected.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Duplicates of positives

TEXTS = [
    ["who sails", "what dog", "who sails", "is rain cold"],
    ["the ship sails", "the dog sleeps", "a ship", "the ship sails"],
    ["the dog sleeps", "a ship", "the moon", "the moon"],
]
# By query, the positions among the 4 positives and the 4 negatives: 0 and 2 share a query, so both positives serve both
# ("the ship sails" also as query 3's, "a ship" also as query 1's negative); query 1's own text is query 0's negative.
LEFT_OUT = {0: {2, 3, 5}, 1: {4}, 2: {0, 3, 5}, 3: {0}}


def mask_of(known: KnownPositives, count: int = BATCH) -> dict[int, set[int]]:
    return {row: set(values.nonzero().flatten().tolist()) for row, values in enumerate(known.mask(0, count))}


def test_known_positives_are_found_by_text(model: SentenceTransformer) -> None:
    assert mask_of(KnownPositives([model.preprocess(column) for column in TEXTS])) == LEFT_OUT


def test_known_positives_of_some_rows_are_those_rows_of_the_whole(model: SentenceTransformer) -> None:
    known = KnownPositives([model.preprocess(column) for column in TEXTS])
    assert torch.equal(torch.cat([known.mask(0, 1), known.mask(1, 3), known.mask(3, 4)]), known.mask(0, 4))


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_compared_without_padding(tiny_bert: str, side: str) -> None:
    model = build_aggretriever(tiny_bert, cls_dim=C, lexical_dim=D)
    model.tokenizer.padding_side = side
    longer = [*TEXTS[2][:3], "the moon and the sun and the star and the sea"]  # this column is padded further
    known = KnownPositives([model.preprocess(column) for column in (*TEXTS[:2], longer)])
    assert mask_of(known) == LEFT_OUT


def test_texts_that_differ_after_the_cut_only_are_the_same(tiny_bert: str) -> None:
    model = build_aggretriever(tiny_bert, cls_dim=C, lexical_dim=D, query_length=8, document_length=8)
    texts = [["a", "the"], ["dog " * 6 + "cat", "dog " * 6 + "fox"]]
    assert mask_of(KnownPositives([model.preprocess(column) for column in texts]), 2) == {0: {1}, 1: {0}}
    texts = [["a", "the"], ["dog " * 5 + "cat", "dog " * 5 + "fox"]]  # with [CLS] and [SEP] 8
    assert mask_of(KnownPositives([model.preprocess(column) for column in texts]), 2) == {0: set(), 1: set()}


def test_known_positives_by_id_need_not_be_in_the_batch(model: SentenceTransformer) -> None:
    texts = [["dog", "cat", "fox"], ["the dog", "the cat", "the fox"], ["sea", "sun", "moon"]]
    features: list[dict[str, Any]] = [model.preprocess(column) for column in texts]
    features[0]["known_positives"] = torch.tensor([[10, 21], [11, -1], [12, 10]])
    features[1]["text_id"] = torch.tensor([10, 11, 12])
    features[2]["text_id"] = torch.tensor([20, 21, -1])  # -1 is unknown, and no padding's equal
    assert mask_of(KnownPositives(features), 3) == {0: {4}, 1: set(), 2: {0}}


class Operations(TorchDispatchMode):
    """Counts the operations that torch runs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_known_positives_by_id_cost_no_operation_each(model: SentenceTransformer) -> None:
    """What one query with thousands of positives brings into a batch is found all at once, as one by one."""
    generator = torch.Generator().manual_seed(0)
    texts = [["dog", "cat", "fox"], ["the dog", "the cat", "the fox"], ["sea", "sun", "moon"]]
    counts = []
    for most in (4, 3000):
        features: list[dict[str, Any]] = [model.preprocess(column) for column in texts]
        known = torch.randint(-1, 9, (3, most), generator=generator)
        known[:, 4:] += 100 * (known[:, 4:] >= 0)
        ids = torch.randint(-1, 9, (2, 3), generator=generator)
        features[0]["known_positives"], features[1]["text_id"], features[2]["text_id"] = known, *ids
        with Operations() as operations:
            found = KnownPositives(features)
            masks = [found.mask(0, 1), found.mask(1, 3)]
        counts.append(operations.count)
        expected = ((known[:, :, None] == ids.flatten()) & (known[:, :, None] >= 0)).any(1)
        expected[range(3), range(3)] = False
        assert torch.equal(torch.cat(masks), expected)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("by_id", [False, True])
def test_duplicates_of_a_positive_are_not_negatives(model: SentenceTransformer, by_id: bool) -> None:
    """Value by the reference over the passages that are left; no gradient from those left out."""
    features: list[dict[str, Any]] = [model.preprocess(column) for column in TEXTS]
    left_out = LEFT_OUT
    if by_id:
        left_out = {**LEFT_OUT, 3: {0, 2}}
        features[0]["known_positives"] = torch.tensor([[-1], [-1], [-1], [7]])
        features[1]["text_id"] = torch.tensor([1, 2, 7, 1])
        features[2]["text_id"] = torch.tensor([2, 3, 4, 4])
    vectors = columns(1)
    terms = AggretrieverLoss(model).compute_loss_from_embeddings(vectors, known=KnownPositives(features))
    queries, *passages = vectors
    expected = reference.negative_log_likelihood(queries.tolist(), torch.cat(passages).tolist(), 1.0, left_out)
    assert terms["full"].item() == pytest.approx(expected, rel=1e-5)
    alone = vectors[0].detach().requires_grad_()
    loss = AggretrieverLoss(model, lexical_weight=0, cls_weight=0)
    loss.compute_loss_from_embeddings([alone, *vectors[1:]], known=KnownPositives(features))["full"].backward()
    shares = torch.softmax(
        (queries @ torch.cat(passages).T).masked_fill(KnownPositives(features).mask(0, BATCH), -torch.inf), 1
    )
    shares[range(BATCH), range(BATCH)] -= 1
    torch.testing.assert_close(alone.grad, (shares @ torch.cat(passages) / BATCH).detach())


def test_a_query_whose_every_negative_is_a_duplicate_has_loss_zero(model: SentenceTransformer) -> None:
    features = [model.preprocess(column) for column in (["what dog", "who sails"], ["a dog", "a dog"])]
    terms = AggretrieverLoss(model)(features)
    sum(terms.values()).backward()
    assert {name: term.item() for name, term in terms.items()} == {"full": 0.0, "cls": 0.0, "lexical": 0.0}
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    model.zero_grad()


def test_a_hard_negative_that_repeats_the_positive_changes_nothing(model: SentenceTransformer) -> None:
    model.eval()
    loss = AggretrieverLoss(model)
    texts = [["what dog"], ["a dog"], ["a ship"], ["a dog"]]
    terms = [loss([model.preprocess(column) for column in columns]) for columns in (texts, texts[:3])]
    torch.testing.assert_close(terms[0], terms[1])
    assert terms[0]["full"].item() > 0


# ---------------------------------------------------------------------------------------------------------------------
# Folded widths


@pytest.mark.parametrize("aggregation", ["signed", "positive"])
@pytest.mark.parametrize(
    ("fold_dims", "fold_weights", "weights"),
    [
        ((4,), None, {8: 1.0, 4: 1.0}),
        ((8, 4, 1), (0.5, 2.0, 3.0), {8: 0.5, 4: 2.0, 1: 3.0}),
        ((2, 8), (0.7, 0.0), {2: 0.7}),
    ],
)
def test_folded_terms_equal_the_reference(
    tiny_bert: str, aggregation: str, fold_dims: Any, fold_weights: Any, weights: dict[int, float]
) -> None:
    model = build_aggretriever(tiny_bert, cls_dim=C, lexical_dim=D, aggregation=aggregation)
    loss = AggretrieverLoss(model, lexical_weight=0.4, fold_dims=fold_dims, fold_weights=fold_weights)
    vectors = columns(1)
    terms = loss.compute_loss_from_embeddings(vectors)
    expected = {"cls": 0.5 * expected_terms(vectors, 1.0)["cls"]}
    for dim, weight in weights.items():
        folded = [
            [reference.fold(row[C:], dim, aggregation == "signed") for row in column.tolist()] for column in vectors
        ]
        whole = [
            [row[:C] + part for row, part in zip(column.tolist(), parts, strict=True)]
            for column, parts in zip(vectors, folded, strict=True)
        ]
        suffix = "" if dim == D else f"_{dim}"
        nll = reference.negative_log_likelihood
        expected[f"full{suffix}"] = weight * nll(whole[0], whole[1] + whole[2])
        expected[f"lexical{suffix}"] = weight * 0.4 * nll(folded[0], folded[1] + folded[2])
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(expected, rel=1e-5)


def test_a_lexical_part_alone_folds(tiny_bert: str) -> None:
    model = build_aggretriever(tiny_bert, cls_dim=0, lexical_dim=D)
    vectors = [column[:, C:].detach() for column in columns(0)]
    terms = AggretrieverLoss(model, fold_dims=(4,)).compute_loss_from_embeddings(vectors)
    folded = [[reference.fold(row, 4) for row in column.tolist()] for column in vectors]
    assert list(terms) == ["full", "full_4"]
    assert terms["full_4"].item() == pytest.approx(reference.negative_log_likelihood(*folded), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "fold_dims", "fold_weights", "message"),
    [
        ({}, (3,), None, "fold_dims must divide the width of the lexical part, 8, got 3"),
        ({}, (4, 4), None, "must come once"),
        ({}, (4, 2), (1.0,), "one weight for each of the 2 fold_dims, got 1"),
        ({}, (), (1.0,), "one weight for each of the 0 fold_dims, got 1"),
        ({}, (4,), (-1.0,), "fold_weights must be at least 0"),
        ({"pooling": "cls"}, (4,), None, "the model has none"),
        ({"pooling": "mean+cls"}, (4,), None, "the model has none"),
        ({"aggregation": "mean"}, (4,), None, "got 'mean'"),
        ({"aggregation": "none"}, (4,), None, "got 'none'"),
        ({"slicing": "random"}, (4,), None, "got 'random'"),
        ({"remainder": "drop"}, (4,), None, "got 'drop'"),
    ],
)
def test_folds_that_do_not_suit_the_model_are_refused(
    tiny_bert: str, options: dict, fold_dims: Any, fold_weights: Any, message: str
) -> None:
    model = build_aggretriever(tiny_bert, cls_dim=C, lexical_dim=D, **options)
    with pytest.raises(ValueError, match=message):
        AggretrieverLoss(model, fold_dims=fold_dims, fold_weights=fold_weights)
