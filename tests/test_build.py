"""build_aggretriever: every option, its dimensions, and what is refused."""

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import conftest
import numpy as np
import pytest
import reference
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder

from st_aggretriever import AggretrieverLoss, build_aggretriever, load_aggretriever

V = conftest.VOCAB_SIZE
TEXTS = ["the quick brown fox", "", "what is dense retrieval in a search engine ?"]

# options: names of the modules behind the encoder, dimension, whether the MLM head is loaded
LAYOUTS: list[tuple[dict[str, Any], str, int, bool]] = [
    ({}, "MLMLexicalPooling SliceMaxAgg CLSProjection Concat", 20, True),
    ({"cls_dim": 0}, "MLMLexicalPooling SliceMaxAgg Concat", 16, True),
    ({"lexical_dim": 0}, "CLSProjection Concat", 4, False),
    ({"aggregation": "positive"}, "MLMLexicalPooling SliceMaxAgg CLSProjection Concat", 20, True),
    ({"aggregation": "mean"}, "MLMLexicalPooling SliceMaxAgg CLSProjection Concat", 20, True),
    ({"aggregation": "linear"}, "MLMLexicalPooling SliceMaxAgg CLSProjection Concat", 20, True),
    ({"aggregation": "none"}, "MLMLexicalPooling SliceMaxAgg CLSProjection Concat", 4 + V, True),
    (
        {"activation": "log1p_relu", "term_weight": "none"},
        "MLMLexicalPooling SliceMaxAgg CLSProjection Concat",
        20,
        True,
    ),
    ({"slicing": "random"}, "MLMLexicalPooling SliceMaxAgg CLSProjection Concat", 20, True),
    ({"pooling": "tokens"}, "TokenLexicalPooling SliceMaxAgg CLSProjection Concat", 20, False),
    ({"pooling": "tokens", "lexical_dim": 0}, "CLSProjection Concat", 4, False),
    ({"pooling": "cls"}, "CLSProjection Concat", 4, False),
    ({"pooling": "mean"}, "MeanProjection Concat", 20, False),
    ({"pooling": "mean", "cls_dim": 0}, "MeanProjection Concat", 16, False),
    ({"pooling": "mean+cls"}, "MeanProjection CLSProjection Concat", 20, False),
]


def build(folder: str, **options: Any) -> SentenceTransformer:
    return build_aggretriever(folder, **{"lexical_dim": 16, "cls_dim": 4, **options})


@pytest.mark.parametrize(("options", "names", "dim", "head"), LAYOUTS, ids=lambda value: str(value)[:40])
def test_every_layout_encodes_trains_and_round_trips(
    tiny_bert: str, tmp_path: Path, options: dict, names: str, dim: int, head: bool
) -> None:
    model = build(tiny_bert, **options)
    assert type(model) is SentenceTransformer
    assert [type(module).__name__ for module in model] == ["MLMEncoder", *names.split()]
    assert model.get_embedding_dimension() == dim
    assert model[0].head is head
    assert hasattr(model[0].model, "cls") is head, "the MLM head is in memory exactly where it is used"
    assert model.similarity_fn_name == "dot"
    vectors = model.encode(TEXTS)
    assert vectors.shape == (3, dim)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()

    loss = AggretrieverLoss(model)
    sum(loss([model.preprocess(TEXTS[:1]), model.preprocess(TEXTS[2:])]).values()).backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []

    model.eval().save_pretrained(str(tmp_path))
    again = load_aggretriever(tmp_path)
    assert np.array_equal(again.encode(TEXTS), vectors)
    for before, after in zip(model, again, strict=True):
        assert before.get_config_dict() == after.get_config_dict()
    assert {k: v for k, v in again.state_dict().items() if not torch.equal(v, model.state_dict()[k])} == {}


def test_cls_part_comes_first(tiny_bert: str) -> None:
    model = build(tiny_bert)
    values = model.encode(TEXTS[0], output_value=None)
    assert torch.equal(values["sentence_embedding"], torch.cat([values["cls_embedding"], values["lexical_embedding"]]))
    assert model.encode(TEXTS[0], truncate_dim=4).tolist() == values["cls_embedding"].tolist()


@pytest.mark.parametrize("pooling", ["mlm", "tokens", "cls", "mean", "mean+cls"])
def test_seed_fixes_the_new_weights_and_leaves_the_global_one_alone(tiny_bert: str, pooling: str) -> None:
    torch.manual_seed(123)
    expected = torch.rand(1)
    torch.manual_seed(123)
    one = build(tiny_bert, pooling=pooling, seed=1).encode(TEXTS)
    assert torch.equal(torch.rand(1), expected)
    assert np.array_equal(one, build(tiny_bert, pooling=pooling, seed=1).encode(TEXTS))
    assert not np.array_equal(one, build(tiny_bert, pooling=pooling, seed=2).encode(TEXTS))


def test_mean_is_over_all_real_tokens_and_mean_cls_leaves_cls_out(tiny_bert: str) -> None:
    for pooling, first in (("mean", 0), ("mean+cls", 1)):
        model = build(tiny_bert, pooling=pooling)
        values = model.encode([TEXTS[0], TEXTS[2]], output_value=None)[0]
        tokens = int(values["attention_mask"].sum())
        mean = values["token_embeddings"][first:tokens].mean(0)
        torch.testing.assert_close(values["mean_embedding"], model[1].linear(mean))


def test_no_tokens_but_specials_gives_a_zero_lexical_part(tiny_bert: str) -> None:
    model = build(tiny_bert, excluded_tokens="special")
    assert (model.encode("")[4:] == 0).all()
    assert (model.encode("dog")[4:] != 0).all()


def test_lengths_count_the_special_tokens(tiny_bert: str) -> None:
    model = build(tiny_bert, query_length=5, document_length=7)
    assert model.preprocess(["dog " * 50], task="query")["input_ids"].shape == (1, 5)
    assert model.preprocess(["dog " * 50], task="document")["input_ids"].shape == (1, 7)
    assert model.preprocess(["dog " * 50])["input_ids"].shape == (1, 7)


def test_roberta_is_cut_at_its_usable_positions(tiny_roberta: str, tmp_path: Path) -> None:
    """514 positions, of which the padding index and what is below are lost."""
    model = build(tiny_roberta, document_length=2000)
    assert model.max_seq_length == 512
    assert np.isfinite(model.encode("dog " * 2000)).all()
    model.save_pretrained(str(tmp_path))
    assert load_aggretriever(tmp_path).max_seq_length == 512


def test_token_type_ids_do_not_reach_distilbert(tiny_distilbert: str) -> None:
    model = build(tiny_distilbert)
    model.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert "token_type_ids" in model.preprocess(TEXTS)
    assert np.isfinite(model.encode(TEXTS)).all()


def test_resized_vocabulary_gives_the_decoder_its_width(tmp_path: Path) -> None:
    """22 added tokens and a resize, as the published 30,544: the decoder decides, not config or tokenizer."""
    folder, masked_lm = conftest.save_backbone(tmp_path / "a")
    tokenizer = conftest.make_tokenizer()
    tokenizer.add_tokens([f"[new{i}]" for i in range(22)])
    masked_lm.resize_token_embeddings(V + 22)
    masked_lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for pooling in ("mlm", "tokens"):
        model = build(folder, pooling=pooling)
        assert model[2].vocab_size == V + 22
        assert np.isfinite(model.encode("dog [new21]")).all()


@pytest.mark.parametrize("text", ["\ud800", "a \udfff b", "\ud83d\ude00", "dog " * 10_000, "\x00", "\u202e", " "])
def test_odd_texts_are_data(tiny_bert: str, text: str) -> None:
    vector = build(tiny_bert).encode(text)
    assert np.isfinite(vector).all()
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert np.array_equal(vector, build(tiny_bert).encode(clean))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, "pooling must be one of mlm, tokens, cls, mean, mean\\+cls, got 'max'"),
        ({"lexical_dim": -1}, "lexical_dim must be a whole number of at least 0, got -1"),
        ({"cls_dim": 1.5}, "cls_dim must be a whole number of at least 0, got 1.5"),
        ({"query_length": 2}, "query_length must be a whole number of at least 3, got 2"),
        ({"cls_dim": 0, "lexical_dim": 0}, "no part left"),
        ({"cls_dim": 0, "pooling": "cls"}, "no part left; give cls_dim at least 1"),
        ({"lexical_dim": 640}, f"lexical_dim must be at most V // 2 = {V // 2}, got 640"),
        ({"term_weight": "relu"}, "term_weight must be one of 'abs', 'identity', 'none', got 'relu'"),
        ({"aggregation": "max"}, "aggregation must be one of"),
        ({"backend": "onnx"}, "backend must be 'torch', got 'onnx'"),
    ],
)
def test_bad_options_are_refused_by_name(tiny_bert: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(tiny_bert, **options)


@pytest.mark.parametrize("pooling", ["mlm", "tokens", "cls", "mean", "mean+cls"])
@pytest.mark.parametrize(
    "option", ["aggregation", "term_weight", "activation", "slicing", "remainder", "excluded_tokens"]
)
def test_a_wrong_name_is_refused_for_every_pooling(tiny_bert: str, pooling: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be one of .*, got 'sgined'"):
        build(tiny_bert, pooling=pooling, **{option: "sgined"})


def test_unknown_options_are_refused_by_name(tiny_bert: str) -> None:
    with pytest.raises(TypeError, match="lexcal_dim"):
        build_aggretriever(tiny_bert, lexcal_dim=16)


def test_a_checkpoint_without_mlm_head_is_refused_and_the_way_out_named(headless_bert: str) -> None:
    with pytest.raises(ValueError, match=r"cls\.predictions\.decoder\.bias.*pooling='tokens', 'cls', 'mean'"):
        build(headless_bert)
    for pooling in ("tokens", "cls", "mean", "mean+cls"):
        assert np.isfinite(build(headless_bert, pooling=pooling).encode(TEXTS)).all()


def test_one_missing_head_weight_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, _ = conftest.save_backbone(tmp_path, "distilbert")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["vocab_transform.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"would be random: vocab_transform\.weight\."):
        build(folder)


def test_an_architecture_without_known_head_is_refused(tmp_path: Path) -> None:
    folder, _ = conftest.save_backbone(tmp_path, "deberta-v2", legacy=False)
    with pytest.raises(ValueError, match="deberta-v2' without legacy=True"):
        build(folder)


def test_a_causal_model_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    conftest.make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"gpt2.*is not a masked language model"):
        build(str(tmp_path))


def test_a_tokenizer_without_cls_is_refused(tiny_bert: str, tmp_path: Path) -> None:
    from tokenizers import processors

    shutil.copytree(tiny_bert, tmp_path, dirs_exist_ok=True)
    tokenizer = conftest.make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"must put one special token .* but it puts 0"):
        build(str(tmp_path))


def test_a_decoder_that_is_no_plain_linear_layer_is_refused(tiny_bert: str) -> None:
    model = build(tiny_bert)
    model[0].model.cls.predictions.decoder = torch.nn.Sequential(model[0].model.cls.predictions.decoder)
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Linear, got torch\.nn.modules\.container\.Sequential"):
        model.encode("dog")


# SPLADE models and other folders of sentence-transformers


@pytest.fixture(scope="module")
def sparse(tiny_bert: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[SparseEncoder, str]:
    """A SPLADE model of sentence-transformers, and its folder."""
    folder = tmp_path_factory.mktemp("sparse")
    model = SparseEncoder(tiny_bert, device="cpu")
    model.save_pretrained(str(folder))
    return model, str(folder)


SPLADE: dict[str, Any] = {"activation": "log1p_relu", "term_weight": "none", "cls_dim": 0, "excluded_tokens": "none"}


@pytest.mark.parametrize("layout", ["SparseEncoder", "fill-mask"])
def test_a_splade_model_unfolded_is_the_sparse_encoder(
    tiny_bert: str, sparse: tuple[SparseEncoder, str], layout: str
) -> None:
    folder = sparse[1] if layout == "SparseEncoder" else tiny_bert
    expected = sparse[0].encode(TEXTS, convert_to_sparse_tensor=False).cpu().numpy()
    assert expected.std() > 0.1
    vectors = build(folder, **SPLADE, aggregation="none").encode(TEXTS)
    assert vectors.shape == (3, V)
    assert abs(vectors - expected).max() < 1e-5


def test_a_folded_splade_model_is_the_fold_of_its_weights(sparse: tuple[SparseEncoder, str], tmp_path: Path) -> None:
    model = build(sparse[1], **SPLADE)
    assert not [name for name, _ in model[1].named_parameters()], "nothing to train"
    assert [type(module).__name__ for module in model] == ["MLMEncoder", "MLMLexicalPooling", "SliceMaxAgg", "Concat"]
    weights = sparse[0].encode(TEXTS, convert_to_sparse_tensor=False).cpu()
    expected = [reference.aggregate(row.tolist(), 16, "signed") for row in weights]
    vectors = model.encode(TEXTS)
    assert abs(abs(vectors) - abs(np.array(expected))).max() < 1e-5
    model.save_pretrained(str(tmp_path))
    assert np.array_equal(load_aggretriever(tmp_path).encode(TEXTS), vectors)


def test_the_example_writes_a_dense_model(
    sparse: tuple[SparseEncoder, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    example = Path(__file__).parent.parent / "examples" / "splade_to_dense.py"
    output = tmp_path / "dense"
    monkeypatch.setattr("sys.argv", [str(example), sparse[1], str(output), "--lexical-dim", "32"])
    runpy.run_path(str(example), run_name="__main__")
    assert "32 dimensions, 128 bytes a document in float32, 64 in float16" in capsys.readouterr().out
    model = load_aggretriever(output)
    assert np.array_equal(model.encode(TEXTS), build(sparse[1], **{**SPLADE, "lexical_dim": 32}).encode(TEXTS))
    assert (model[0].query_length, model[0].document_length) == (64, 256)


def saved_elsewhere(folder: str, target: Path) -> Path:
    """The folder as old versions saved it: the encoder in one of its own."""
    shutil.copytree(folder, target / "0_Transformer", ignore=shutil.ignore_patterns("modules.json", "1_*"))
    (target / "1_SpladePooling").mkdir()
    shutil.copy(Path(folder, "1_SpladePooling", "config.json"), target / "1_SpladePooling")
    entries = json.loads(Path(folder, "modules.json").read_text())
    entries[0]["path"] = "0_Transformer"
    (target / "modules.json").write_text(json.dumps(entries))
    return target


@pytest.mark.parametrize("pooling", ["mlm", "tokens"])
def test_an_encoder_in_a_folder_of_its_own_is_found(
    sparse: tuple[SparseEncoder, str], tmp_path: Path, pooling: str
) -> None:
    expected = build(sparse[1], pooling=pooling).encode(TEXTS)
    assert np.array_equal(build(saved_elsewhere(sparse[1], tmp_path), pooling=pooling).encode(TEXTS), expected)


@pytest.mark.parametrize(("option", "value"), [("pooling_strategy", "sum"), ("activation_function", "log1p_relu")])
def test_a_splade_model_of_another_rule_is_refused(
    sparse: tuple[SparseEncoder, str], tmp_path: Path, option: str, value: str
) -> None:
    shutil.copytree(sparse[1], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "1_SpladePooling" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), option: value}))
    with pytest.raises(ValueError, match=rf"takes SPLADE models with {option}=.* has '{value}'"):
        build(str(tmp_path), **SPLADE)
    assert build(str(tmp_path)).get_embedding_dimension() == 20, "as a starting point for training it will do"


def test_a_router_is_refused(sparse: tuple[SparseEncoder, str], tmp_path: Path) -> None:
    """Inference-free SPLADE models: a table for queries, an encoder for documents."""
    shutil.copytree(sparse[1], tmp_path, dirs_exist_ok=True)
    entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.router.Router"}]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="has a Router, with one encoder for queries and another for documents"):
        build(str(tmp_path), **SPLADE)


# Tokenizers


def test_a_folder_without_tokenizer_is_refused(tiny_bert: str, tmp_path: Path) -> None:
    """transformers make a tokenizer of special tokens there, to which all words are unknown."""
    shutil.copytree(tiny_bert, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match=r"has no tokenizer with words in it \(5 entries, all special\)"):
        build(str(tmp_path))


@pytest.mark.parametrize("pooling", ["mlm", "tokens", "cls"])
def test_a_tokenizer_with_more_entries_than_embeddings_is_refused(tmp_path: Path, pooling: str) -> None:
    folder, _ = conftest.save_backbone(tmp_path, vocab_size=V - 1)
    with pytest.raises(ValueError, match=rf"has {V} entries, but the model embeds only {V - 1}; .*resize_token"):
        build(folder, pooling=pooling)


def test_a_decoder_wider_than_the_tokenizer_keeps_its_width(tmp_path: Path) -> None:
    """Vocabularies are padded to round sizes: 30,528 rows for 30,522 entries."""
    folder, _ = conftest.save_backbone(tmp_path, vocab_size=160)
    model = build(folder)
    assert model[2].vocab_size == 160
    assert model.encode(TEXTS, output_value=None)[0]["lexical_weights"].shape == (160,)


def test_a_tokenizer_that_pads_left_gives_the_same_vectors(tiny_bert: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "padding_side": "left"}))
    for pooling in ("mlm", "tokens", "cls", "mean", "mean+cls"):
        model = build(str(tmp_path), pooling=pooling)
        assert model.preprocess(TEXTS)["attention_mask"][1, 0] == 0
        assert abs(model.encode(TEXTS) - build(tiny_bert, pooling=pooling).encode(TEXTS)).max() < 1e-5


def test_a_missing_or_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        build(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"is no transformers checkpoint: it has no config\.json"):
        build(str(tmp_path))
