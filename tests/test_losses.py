"""AggretrieverLoss: the three terms by the reference, on one positive and n hard negatives."""

import pytest
import reference
import torch
from sentence_transformers import SentenceTransformer

from st_aggretriever import AggretrieverLoss, build_aggretriever

C, D, BATCH = 3, 5, 4


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
    with pytest.raises(ValueError, match="cls_weight must be at least 0, got -1"):
        AggretrieverLoss(model, cls_weight=-1)
    with pytest.raises(ValueError, match="build_aggretriever"):
        AggretrieverLoss(SentenceTransformer(modules=list(model)[:-1]))
