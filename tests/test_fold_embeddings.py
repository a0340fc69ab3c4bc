"""Folding whole vectors: equal to encoding with the smaller D, in memory, on disk and in the commands; refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantize_embeddings

from st_aggretriever import SliceMaxAgg, build_aggretriever, fold_embeddings
from st_aggretriever.bulk import Source, encode_to_disk
from st_aggretriever.cli import main
from st_aggretriever.encoding import Encoder
from st_aggretriever.evaluation.beir import evaluate_beir
from st_aggretriever.folding import Folded, LexicalPart, fold_part, lexical_part
from st_aggretriever.search.retrieve import load_queries
from st_aggretriever.vectors.folder import VectorFolder

TEXTS = ["the quick brown fox", "", "what is dense retrieval in a search engine ?", "a " * 60, "bread needs time"]
D, DIVISORS = 60, [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60]
VOCABULARY = 147


def build(backbone: str, **options: Any) -> SentenceTransformer:
    return build_aggretriever(backbone, **{"lexical_dim": D, "cls_dim": 4, **options})


def weigh(model: SentenceTransformer, bias: float) -> SentenceTransformer:
    """Every token weighs ``bias``."""
    pooling: Any = model[1]
    with torch.no_grad():
        pooling.linear.weight.zero_()
        pooling.linear.bias.fill_(bias)
    return model


@pytest.fixture(scope="module")
def wide(tiny_bert: str) -> SentenceTransformer:
    return build(tiny_bert)


@pytest.fixture(scope="module")
def vectors(wide: SentenceTransformer) -> np.ndarray:
    return wide.encode_document(TEXTS)


@pytest.mark.parametrize("aggregation", ["signed", "positive"])
@pytest.mark.parametrize("lexical_dim", DIVISORS)
def test_folding_equals_slicing_anew_for_every_divisor(aggregation: str, lexical_dim: int) -> None:
    # Few different weights: at most places equal maxima of opposite sign meet.
    weights = torch.from_numpy(np.random.default_rng(lexical_dim).integers(0, 4, (50, VOCABULARY)) / 4).float()
    whole, native = (SliceMaxAgg(VOCABULARY, dim, aggregation=aggregation).aggregate(weights)
                     for dim in (D, lexical_dim))  # fmt: skip
    cls = torch.randn(50, 4)
    folded = fold_embeddings(torch.cat([cls, whole], 1), lexical_dim, cls_dim=4, signed=aggregation == "signed")
    assert torch.equal(folded, torch.cat([cls, native], 1))
    expected = [reference.aggregate(row, lexical_dim, aggregation) for row in weights.tolist()]
    assert folded[:, 4:].tolist() == expected


@pytest.mark.parametrize(("aggregation", "remainder"), [("signed", "pad"), ("signed", "drop"), ("positive", "pad")])
def test_folding_equals_encoding_with_that_dimension(tiny_bert: str, aggregation: str, remainder: str) -> None:
    options = {"aggregation": aggregation, "remainder": remainder}
    model = build(tiny_bert, **options)
    whole = model.encode_document(TEXTS)
    for lexical_dim in (1, 20, 30) if remainder == "pad" else (20, 30):  # V mod 2D' is 27 as V mod 2D is: same ids
        native = build(tiny_bert, lexical_dim=lexical_dim, **options).encode_document(TEXTS)
        assert abs(fold_embeddings(whole, lexical_dim, model=model) - native).max() == 0.0
        assert abs(Folded(model, lexical_dim).encode_document(TEXTS) - native).max() == 0.0


def test_folding_twice_equals_folding_once(vectors: np.ndarray) -> None:
    twice = fold_embeddings(fold_embeddings(vectors, 30, cls_dim=4), 10, cls_dim=4)
    assert np.array_equal(twice, fold_embeddings(vectors, 10, cls_dim=4))


def test_the_lexical_part_is_found_where_it_lies() -> None:
    part = LexicalPart(start=1, width=4)
    assert fold_part(np.array([[7, 1, -2, 3, 2, 8, 9]], np.float32), part, 2)[0].tolist() == [[7, 3, -2, 8, 9]]


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "int8"])
def test_kind_shape_and_dtype_stay(kind: str) -> None:
    many = np.array([[100, 5, -120, 7, 3], [1, -6, 4, 2, 4]]).astype(kind)
    expected = [[100, 7, -120], [1, -6, 4]]
    for given in (many, torch.from_numpy(many)):
        folded = fold_embeddings(given, 2, cls_dim=1)
        assert type(folded) is type(given)
        assert folded.dtype == given.dtype
        assert folded.tolist() == expected
        assert fold_embeddings(given[0], 2, cls_dim=1).tolist() == expected[0]
        assert fold_embeddings(given[:0], 2, cls_dim=1).shape == (0, 3)
    bfloat16 = fold_embeddings(torch.from_numpy(many.astype(np.float32)).bfloat16(), 2, cls_dim=1)
    assert (bfloat16.dtype, bfloat16.tolist()) == (torch.bfloat16, expected)


def test_the_least_int8_has_the_largest_magnitude() -> None:
    assert fold_embeddings(np.array([[127, -128]], np.int8), 1, cls_dim=0).tolist() == [[-128]]


def test_read_only_vectors_fold_and_stay(vectors: np.ndarray) -> None:
    frozen = vectors.copy()
    frozen.flags.writeable = False
    assert fold_embeddings(frozen, 30, cls_dim=4).shape == (5, 34)
    assert np.array_equal(frozen, vectors)


def test_folding_hands_gradients_on() -> None:
    whole = torch.tensor([[1.0, 0.5, -0.1, -0.7, 0.1]], requires_grad=True)
    fold_embeddings(whole, 2, cls_dim=1).sum().backward()
    assert whole.grad is not None
    assert whole.grad.tolist() == [[1, 0, 1, 1, 0]]


def test_rounded_vectors_are_reported_as_approximate(caplog: pytest.LogCaptureFixture) -> None:
    # In float32 1.0001 > 1; float16 has neither of the numbers between. Zeros of both signs are equal in any order.
    exact = np.array([[1.0001, 0.0, -1.0, -0.0], [0.5, 0.25, 0.5, -0.125]], np.float32)
    assert fold_embeddings(exact, 2, cls_dim=0)[0, 0] == np.float32(1.0001)
    assert not caplog.records
    assert fold_embeddings(exact.astype(np.float16), 2, cls_dim=0)[0, 0] == -1
    assert "approximate, as the vectors are float16: 1 places" in caplog.text


def test_int8_of_sentence_transformers_folds_by_its_ranges(vectors: np.ndarray) -> None:
    ranges = np.stack([vectors.min(0) - 1, vectors.max(0) + 1])  # each dimension its own
    rounded = quantize_embeddings(vectors, "int8", ranges=ranges)
    folded = fold_embeddings(rounded, 30, cls_dim=4, ranges=ranges)
    step = (ranges[1] - ranges[0]).max() / 255
    exact = fold_embeddings(vectors, 30, cls_dim=4)
    assert folded.dtype == np.float32
    assert abs(np.abs(folded) - np.abs(exact)).max() <= step
    with pytest.raises(ValueError, match=r"ranges \(2, 64\) go with int8 vectors, got \(2, 3\)"):
        fold_embeddings(rounded, 30, cls_dim=4, ranges=ranges[:, :3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slicing": "random"}, "slicing='random' can't be folded; strided slices nest"),
        ({"aggregation": "mean"}, "aggregation='mean' takes no maximum over slices"),
        ({"aggregation": "linear"}, "aggregation='linear' takes no maximum"),
        ({"aggregation": "none"}, "aggregation='none' takes no maximum"),
        ({"remainder": "drop"}, "D = 60 drops the first 27 ids of the vocabulary, one of D = 12 the first 3"),
        ({"term_weight": "identity"}, "term_weight is 'identity', and folding is exact only while every text has"),
        ({"pooling": "cls"}, "must be an Aggretriever with a lexical part"),
        ({"pooling": "mean"}, "must be an Aggretriever with a lexical part"),
    ],
)
def test_what_does_not_nest_is_refused(tiny_bert: str, options: dict[str, Any], message: str) -> None:
    model = build(tiny_bert, **options)
    with pytest.raises(ValueError, match=message):
        fold_embeddings(model.encode_document(["a fox"]), 12, model=model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lexical_dim": 7}, "lexical_dim must divide the width of the lexical part, 60, got 7; choose among 1, 2, 3"),
        ({"lexical_dim": 0}, "must divide"),
        ({"lexical_dim": 120}, "must divide"),
        ({"cls_dim": 64}, "cls_dim must be at least 0 and below the vectors' 64 dimensions, got 64"),
        ({"vectors": np.zeros((2, 8), np.uint8)}, "floats or int8, got torch.uint8; binary ones"),
        ({"lexical_dim": None}, "lexical_dim must be a whole number, got None"),
        ({"lexical_dim": True}, "lexical_dim must be a whole number, got True"),
        ({"lexical_dim": 2.0}, "lexical_dim must be a whole number, got 2.0"),
        ({"cls_dim": "4"}, "cls_dim must be a whole number, got '4'"),
        ({"signed": "no"}, "signed must be True or False, got 'no'"),
        ({"ranges": np.full((2, 64), np.nan)}, "ranges must be finite numbers"),
        ({"vectors": [[1.0, 2.0]]}, "must be a numpy array or a tensor"),
    ],
)
def test_bad_arguments_are_refused(vectors: np.ndarray, arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"vectors": vectors, "cls_dim": 4, "lexical_dim": 2} | arguments
    with pytest.raises(ValueError, match=message):
        fold_embeddings(given.pop("vectors"), given.pop("lexical_dim"), **given)


def test_vectors_of_another_model_or_width_are_refused(wide: SentenceTransformer, vectors: np.ndarray) -> None:
    with pytest.raises(ValueError, match="the model's vectors have 64 dimensions, these have 63"):
        fold_embeddings(vectors[:, 1:], 30, model=wide)
    with pytest.raises(ValueError, match="cls_dim and signed are read from the model"):
        fold_embeddings(vectors, 30, model=wide, cls_dim=4)
    cut = SentenceTransformer(modules=list(wide), truncate_dim=32, similarity_fn_name="dot")
    assert lexical_part(cut) is None


def texts_of(texts: list[str]) -> Source:
    return Source("texts", lambda: ((f"t{place}", text) for place, text in enumerate(texts)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_vectors_fold_while_they_are_read(
    tiny_bert: str, wide: SentenceTransformer, tmp_path: Path, dtype: str
) -> None:
    encode_to_disk(wide, texts_of(TEXTS), tmp_path / "v", block_size=2, dtype=dtype)
    folder = VectorFolder(tmp_path / "v", lexical_dim=30)
    stored = VectorFolder(tmp_path / "v").load()[1]
    expected = fold_embeddings(stored, 30, cls_dim=4)
    ids, loaded = folder.load()
    assert ids == ["t0", "t1", "t2", "t3", "t4"]
    assert np.array_equal(loaded, expected)
    assert folder.dimension == 34
    assert folder.manifest["parts"] == [["cls_embedding", 4], ["lexical_embedding", 30]]
    assert folder.size == 5 * 64 * np.dtype(dtype).itemsize
    said = folder.folding()
    assert said is not None
    assert ("exactly" in said) == (dtype == "float32")
    assert ("approximately: of 150 places" in said) == (dtype == "float16")
    if dtype == "float32":
        native = build(tiny_bert, lexical_dim=30)
        encode_to_disk(native, texts_of(TEXTS), tmp_path / "native", block_size=2)
        assert np.array_equal(loaded, VectorFolder(tmp_path / "native").load()[1])
    assert VectorFolder(tmp_path / "v", lexical_dim=60).folding() is None


def test_each_block_says_how_many_of_its_texts_cannot_be_folded(tiny_bert: str, tmp_path: Path) -> None:
    texts = ["fox", "the dog sleeps", "rain"]
    model = weigh(build(tiny_bert, term_weight="identity"), 1.0)
    encode_to_disk(model, texts_of(texts), tmp_path / "good", block_size=2)
    good = VectorFolder(tmp_path / "good", lexical_dim=30)
    native = weigh(build(tiny_bert, lexical_dim=30, term_weight="identity"), 1.0)
    encode_to_disk(native, texts_of(texts), tmp_path / "native", block_size=2)
    assert np.array_equal(good.load()[1], VectorFolder(tmp_path / "native").load()[1])

    weigh(model, -1.0)
    encode_to_disk(model, texts_of(texts), tmp_path / "bad", block_size=2)
    records = [json.loads((tmp_path / "bad" / f"block-0000{n}.json").read_text())["unfoldable"] for n in (0, 1)]
    assert records == [2, 1]
    with pytest.raises(ValueError, match="3 of its 3 texts have no token of positive weight, and under"):
        VectorFolder(tmp_path / "bad", lexical_dim=30)
    with pytest.raises(ValueError, match="fold: 3 of these texts have no token of positive weight"):
        Folded(model, 30).encode_document(texts)
    assert VectorFolder(tmp_path / "bad").load()[0] == ["t0", "t1", "t2"]
    plain = encode_to_disk(weigh(build(tiny_bert), -1.0), texts_of(texts), tmp_path / "abs")
    assert plain.manifest["unfoldable"] == 0


def test_a_text_with_one_positive_weight_can_be_folded(tiny_bert: str) -> None:
    """Its slices hold positive numbers, however negative its other tokens are."""
    model = build(tiny_bert, term_weight="identity", excluded_tokens="special")
    pooling: Any = model[1]
    texts = ["fox dog", "fox fox", "cat", "bread"]
    with torch.no_grad():
        features: Any = model.encode(texts, output_value=None)
        states = torch.cat([one["token_embeddings"][1:3] for one in features[:1]])
        pooling.linear.weight.copy_((states[0] - states[1]).unsqueeze(0))
        pooling.linear.bias.copy_(-(states.mean(0) @ pooling.linear.weight[0]))  # fox above 0, dog as far below
    encoder = Encoder(model, 2)
    encoder.encode(["fox dog"], "document")
    assert encoder.unfoldable == 0
    native = build(tiny_bert, term_weight="identity", excluded_tokens="special", lexical_dim=30)
    native[1].load_state_dict(pooling.state_dict())
    assert np.array_equal(Folded(model, 30).encode_query(["fox dog"])[:, 4:], native.encode_query(["fox dog"])[:, 4:])


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beir")
    (folder / "qrels").mkdir()
    for name, texts in (("corpus", TEXTS), ("queries", ["a fox", "bread", "retrieval"])):
        lines = [json.dumps({"_id": f"{name[0]}{place}", "text": text}) for place, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    rows = ["query-id\tcorpus-id\tscore", "q0\tc0\t1", "q1\tc4\t1", "q2\tc2\t1"]
    (folder / "qrels" / "test.tsv").write_text("\n".join(rows))
    return folder


def test_the_commands_fold(
    tiny_bert: str, wide: SentenceTransformer, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide.save_pretrained(str(tmp_path / "wide"))
    narrow = build(tiny_bert, lexical_dim=30)
    narrow.save_pretrained(str(tmp_path / "narrow"))

    def run(*arguments: Any) -> str:
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    def encode(model: str, name: str, *options: Any) -> None:
        run("encode", "--model", tmp_path / model, "--data", collection, "--output", tmp_path / name, *options)

    encode("wide", "d60")
    encode("wide", "q60", "--side", "query")
    encode("wide", "q30", "--side", "query", "--lexical-dim", 30)
    encode("narrow", "d30n")
    encode("narrow", "q30n", "--side", "query")
    for queries, index, options in (("q60", "d60", ["--lexical-dim", 30]), ("q30", "d60", ["--lexical-dim", 30])):
        said = run("search", "--index", tmp_path / index, "--queries", tmp_path / queries,
                   "--run", tmp_path / f"{queries}.trec", *options)  # fmt: skip
        assert "folded to 30 lexical dimensions, exactly" in said
    run("search", "--index", tmp_path / "d30n", "--queries", tmp_path / "q30n", "--run", tmp_path / "native.trec")
    expected = (tmp_path / "native.trec").read_text()
    assert (tmp_path / "q60.trec").read_text() == expected
    assert (tmp_path / "q30.trec").read_text() == expected
    with pytest.raises(ValueError, match="order of parts is cls_embedding 4 ; lexical_embedding 30"):
        load_queries(tmp_path / "q30", VectorFolder(tmp_path / "d60"))
    run("evaluate", "beir", "--model", tmp_path / "wide", "--data", collection, "--lexical-dim", 30,
        "--output", tmp_path / "folded.json")  # fmt: skip
    folded = json.loads((tmp_path / "folded.json").read_text())
    assert folded["figures"] == evaluate_beir(narrow, collection)["figures"]
    assert folded["encoding"]["folded_to"] == 30


def test_folding_what_cannot_be_folded_is_one_sentence(
    tiny_bert: str, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tiny_bert, pooling="cls").save_pretrained(str(tmp_path / "m"))
    common = ["--model", str(tmp_path / "m"), "--data", str(collection), "--output", str(tmp_path / "v")]
    assert main(["encode", *common, "--lexical-dim", "30"]) == 2
    assert "must be an Aggretriever with a lexical part" in capsys.readouterr().err
    assert main(["encode", *common]) == 0
    with pytest.raises(ValueError, match="can't be folded: its manifest names no lexical part"):
        VectorFolder(tmp_path / "v", lexical_dim=30)
