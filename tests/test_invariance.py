"""A text's vector depends on the text alone: not on its batch, the padding and its side, or the order."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_aggretriever import build_aggretriever

TEXTS = ["hello", "a " * 60, "what is what is what", "", "the quick brown fox jumps over the lazy dog .", "."]
VARIANTS = {
    "default": {},
    "identity": {"term_weight": "identity"},
    "special": {"excluded_tokens": "special"},
    "drop": {"remainder": "drop"},
    "random": {"slicing": "random"},
    "log1p_relu": {"activation": "log1p_relu", "term_weight": "none"},
    "positive": {"aggregation": "positive"},
    "mean of slices": {"aggregation": "mean"},
    "linear": {"aggregation": "linear"},
    "none": {"aggregation": "none"},
    "lexical only": {"cls_dim": 0},
    "no lexical part": {"lexical_dim": 0},
    "tokens": {"pooling": "tokens"},
    "cls": {"pooling": "cls"},
    "mean": {"pooling": "mean"},
    "mean+cls": {"pooling": "mean+cls"},
    "prompts": {"prompts": {"query": "query: ", "document": "passage: "}},
}


def agreement(model: SentenceTransformer, left: np.ndarray, right: np.ndarray) -> int:
    """Assert equality to 1e-5, where a signed lexical dimension may flip between half slices that all but tie.

    Returns:
        The number of dimensions with another sign.
    """
    np.testing.assert_allclose(np.abs(left), np.abs(right), rtol=1e-5, atol=1e-5)
    flipped = (np.sign(left) != np.sign(right)) & (np.abs(left) > 1e-5)
    if any(getattr(module, "aggregation", None) == "signed" for module in model):
        return int(flipped.sum())
    assert not flipped.any()
    return 0


def negative_term_weights(model: SentenceTransformer) -> None:
    for module in model:
        if hasattr(module, "term_weights"):
            module.linear.weight.data.zero_()
            module.linear.bias.data.fill_(-1.0)


@pytest.fixture(params=["tiny_bert", "tiny_distilbert", "tiny_roberta"])
def backbone(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("variant", VARIANTS)
def test_vector_does_not_depend_on_batch_order_or_padding_side(tiny_bert: str, variant: str) -> None:
    check_invariance(build_aggretriever(tiny_bert, **{"lexical_dim": 16, "cls_dim": 4, **VARIANTS[variant]}))


def test_vector_does_not_depend_on_its_batch_in_other_families(backbone: str) -> None:
    check_invariance(build_aggretriever(backbone, lexical_dim=16, cls_dim=4))


def test_negative_term_weights_are_invariant_too(backbone: str) -> None:
    """Where a padding zero in the maximum would show: every true value is below it."""
    model = build_aggretriever(backbone, lexical_dim=16, cls_dim=0, term_weight="identity", aggregation="positive")
    negative_term_weights(model)
    check_invariance(model)
    vectors = model.encode(TEXTS)
    assert (vectors < 0).all(), "with weight -1 no text can have a lexical value of zero or more"


def check_invariance(model: SentenceTransformer) -> None:
    encoders: list[Callable] = [model.encode, model.encode_query]
    for encode in encoders:
        alone = np.stack([encode(text) for text in TEXTS])
        assert np.isfinite(alone).all()
        assert len({vector.tobytes() for vector in alone}) == len(TEXTS), "different texts have different vectors"
        flips = 0
        for batch_size in (1, 2, 4, 32):
            flips += agreement(model, alone, encode(TEXTS, batch_size=batch_size))
        flips += agreement(model, alone, encode(TEXTS[::-1])[::-1])
        flips += agreement(model, alone, encode([*TEXTS, "the sea " * 100])[: len(TEXTS)])
        model.tokenizer.padding_side = "left"
        flips += agreement(model, alone, encode(TEXTS))
        model.tokenizer.padding_side = "right"
        assert flips <= 0.001 * 7 * alone.size


def test_special_tokens_written_in_a_text_are_text(tiny_bert: str) -> None:
    model = build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=0, excluded_tokens="special")
    features = model.preprocess(["dog [SEP] cat", "dog [PAD] cat", "[CLS] dog cat"])
    for row in model[1].participating({**features, "token_embeddings": torch.zeros(3, 5, 16)}):
        assert row.tolist() == [False, True, True, True, False]


def test_plain_encode_equals_encode_document(tiny_bert: str) -> None:
    model = build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=4, query_length=8, document_length=24)
    text = "the sea " * 50
    assert np.array_equal(model.encode(text), model.encode_document(text))
    assert not np.array_equal(model.encode(text), model.encode_query(text))
    assert np.array_equal(model.encode_query(text), model.encode_query("the sea " * 3))  # 6 words between the specials


@pytest.mark.parametrize("prompt", ["what is the ", "what is the"])
@pytest.mark.parametrize("kind", ["tiny_bert", "tiny_bytelevel"])
def test_a_prompt_reaches_the_encoder_but_not_the_maximum(
    kind: str, prompt: str, request: pytest.FixtureRequest
) -> None:
    backbone = request.getfixturevalue(kind)
    options = {"lexical_dim": 16, "cls_dim": 4, "prompts": {"query": prompt, "document": ""}}
    outside = build_aggretriever(backbone, **options)
    inside = build_aggretriever(backbone, include_prompt=True, **options)
    dog = "dog" if prompt.endswith(" ") else " dog"
    for model in (outside, inside):
        assert not np.array_equal(model.encode_query(dog)[:4], model.encode_document(dog)[:4])
    assert np.array_equal(outside.encode_query(dog)[:4], inside.encode_query(dog)[:4])
    assert not np.array_equal(outside.encode_query(dog)[4:], inside.encode_query(dog)[4:])
    values = outside.encode_query(dog, output_value=None)
    expected = [False] * 4 + [True, True]  # [CLS] what is the | dog [SEP]
    assert outside[1].participating({k: v[None] if torch.is_tensor(v) else v for k, v in values.items()}).tolist() == [
        expected
    ]
    # A query that leaves no room behind its prompt has a zero lexical part.
    outside[0].query_length = 4
    assert (outside.encode_query(dog)[4:] == 0).all()


HALVES = {"half": torch.float16, "bfloat16": torch.bfloat16}
LONG = ["", ".", "the quick brown fox jumps over the lazy dog " * 60]


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_half_precision_is_finite_float32_and_close(tiny_bert: str, dtype: torch.dtype) -> None:
    options = {"lexical_dim": 16, "cls_dim": 16, "document_length": 512, "aggregation": "positive"}
    exact = build_aggretriever(tiny_bert, **options).encode(LONG)
    model = build_aggretriever(tiny_bert, **options).to(dtype)
    vectors = model.encode(LONG)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()
    assert cosine(exact, vectors).mean() > 0.999


def test_autocast_is_finite_float32_and_close(tiny_bert: str) -> None:
    model = build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=16, document_length=512, aggregation="positive")
    exact = model.encode(LONG)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        vectors = model.encode(LONG)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()
    assert not np.array_equal(exact, vectors)
    assert cosine(exact, vectors).mean() > 0.999


def cosine(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)


@pytest.mark.parametrize("convert", [{}, {"convert_to_tensor": True}])
def test_half_precision_does_not_collapse_scores_into_ties(tiny_bert: str, convert: dict) -> None:
    exact = build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=4)
    rounded = build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=4).bfloat16()
    words = "dog cat fox bird fish paris france capital city river bread flour water salt oven".split()
    documents = [f"{one} {two}" for one in words for two in words if one != two][:200]
    distinct, negative = [], []
    for model in (exact, rounded):
        vectors = model.encode(documents, **convert)
        scores = model.similarity(model.encode_query("the dog and the sea", **convert), vectors)
        assert scores.dtype == torch.float32
        distinct.append(len(set(scores.flatten().tolist())))
        negative.append(float((torch.as_tensor(vectors)[:, 4:] < 0).float().mean()))
    assert distinct[0] > 195
    assert distinct[1] > 195
    assert negative[1] == pytest.approx(negative[0], abs=0.02)
