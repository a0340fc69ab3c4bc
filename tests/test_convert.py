"""Published layouts: read by content, equal vectors, damage named, converted once, written back."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import conftest
import numpy as np
import pytest
import reference
import torch
from safetensors.torch import load_file, save_file

import st_aggretriever.convert as convert_module
import st_aggretriever.model as model_module
from st_aggretriever import MLMEncoder, build_aggretriever, convert_checkpoint, load_aggretriever
from st_aggretriever.cli import main
from st_aggretriever.convert import licence_of, published_layout, save_castorini

H, C, D = 16, 128, 640
FOLDS = 3642  # V mod 1280 = 1082, as BERT's 30,522: the remainder is padded
DROPS = 2564  # V mod 1280 = 4: dropped
TEXTS = ["the quick brown fox", "a", "", "what is dense retrieval in a search engine ? " * 3, "dog dog dog cat"]


class Original(NamedTuple):
    """A checkpoint as its authors would have it in memory."""

    masked_lm: Any
    term_weight: torch.nn.Linear
    cls: torch.nn.Linear

    def encode(self, text: str, length: int, pooling: str = "mlm") -> torch.Tensor:
        """One text's [CLS] and lexical part: the published equations, in loops, with transformers alone."""
        tokenizer = conftest.make_tokenizer()
        ids = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            output = self.masked_lm(input_ids=ids, output_hidden_states=True)
            hidden = output.hidden_states[-1][0]
            weights = self.term_weight(hidden)[1:, 0].tolist()
            vocabulary = output.logits.shape[-1]
            if pooling == "mlm":
                lexical = reference.lexical_weights(output.logits[0, 1:].tolist(), weights, [True] * len(weights))
            else:
                lexical = [0.0] * vocabulary
                for term, weight in zip(ids[0, 1:].tolist(), weights, strict=True):
                    lexical[term] = max(lexical[term], weight)
            folded = reference.aggregate(lexical, D, "signed", "drop")
            return torch.cat([self.cls(hidden[0]), torch.tensor(folded)])


def original(folder: Path, kind: str, vocab_size: int = FOLDS, **changes: Any) -> Original:
    """Random weights, term weights of both signs; folder gets what both layouts share."""
    _, masked_lm = conftest.save_backbone(folder, kind, vocab_size=vocab_size, max_position_embeddings=64, **changes)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(1)
    term_weight, cls = torch.nn.Linear(H, 1), torch.nn.Linear(H, C)
    torch.nn.init.normal_(term_weight.weight, std=1.0)
    return Original(masked_lm, term_weight, cls)


def castorini(folder: Path, kind: str = "bert", vocab_size: int = FOLDS, **changes: Any) -> Original:
    """Write the castorini layout: everything in one pickle, both names of each tied tensor."""
    source = original(folder, kind, vocab_size, **changes)
    tensors = {f"encoder.{name}": tensor.clone() for name, tensor in source.masked_lm.state_dict().items()}
    for name, layer in (("tok_proj", source.term_weight), ("cls_proj", source.cls)):
        tensors |= {f"{name}.{part}": tensor for part, tensor in layer.state_dict().items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "output_hidden_states": True, "architectures": ["X"]}))
    return source


def dhr(folder: Path, kind: str = "bert", vocab_size: int = FOLDS) -> Original:
    """Write the dhr layout: a masked language model with each pair of linear layers in a file of its own."""
    source = original(folder, kind, vocab_size)
    source.masked_lm.save_pretrained(folder)
    for name, layer, dim in (("TermWeightTrans", source.term_weight, 1), ("pooler", source.cls, C)):
        pair = {f"{side}.{part}": t for side in ("linear_q", "linear_p") for part, t in layer.state_dict().items()}
        torch.save(pair, folder / f"{name}.pt")
        (folder / f"{name}_config.json").write_text(json.dumps({"input_dim": H, "output_dim": dim, "tied": True}))
    return source


WRITERS: dict[str, Callable[..., Original]] = {"castorini": castorini, "dhr": dhr}


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], file: str = "pytorch_model.bin") -> None:
    tensors = torch.load(folder / file, weights_only=True)
    change(tensors)
    torch.save(tensors, folder / file)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test."""
    monkeypatch.setattr(convert_module.constants, "HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "st_aggretriever"


# Vectors


@pytest.mark.parametrize("pooling", ["mlm", "tokens"])
@pytest.mark.parametrize("vocab_size", [FOLDS, DROPS], ids=["padded", "dropped"])
@pytest.mark.parametrize("kind", ["bert", "distilbert"])
@pytest.mark.parametrize("layout", ["castorini", "dhr"])
def test_vectors_equal_the_published_equations(
    tmp_path: Path, layout: str, kind: str, vocab_size: int, pooling: str
) -> None:
    source = WRITERS[layout](tmp_path / "source", kind, vocab_size)
    convert_checkpoint(tmp_path / "source", tmp_path / "ours", pooling=pooling)
    model = load_aggretriever(tmp_path / "ours")
    for encode, length in ((model.encode_query, 32), (model.encode_document, 64)):
        expected = np.stack([source.encode(text, length, pooling).numpy() for text in TEXTS])
        assert expected[:, C:].min() < 0 < expected[:, C:].max()
        alone = np.stack([encode(text) for text in TEXTS])
        assert abs(alone - expected).max() < 2e-6
        together = encode(TEXTS)
        assert abs(abs(together) - abs(expected)).max() < 1e-5
        assert (np.sign(together) != np.sign(expected)).sum() <= 2  # where two maxima are equal but for rounding


def test_an_all_negative_text_is_not_lifted_to_zero_by_padding(tmp_path: Path) -> None:
    """The published code multiplies by the mask, and a padded text's maximum is then at least 0."""
    source = castorini(tmp_path / "source")
    torch.nn.init.zeros_(source.term_weight.weight)
    torch.nn.init.constant_(source.term_weight.bias, -1.0)
    edit(
        tmp_path / "source", lambda t: t.update({f"tok_proj.{k}": v for k, v in source.term_weight.named_parameters()})
    )
    model = convert_checkpoint(tmp_path / "source")
    weights = model.encode([TEXTS[0], TEXTS[3]], output_value=None)[0]["lexical_weights"]
    assert (weights < 0).all()
    assert abs(model.encode(TEXTS) - np.stack([model.encode(text) for text in TEXTS])).max() < 1e-5


def test_settings_are_the_published_ones(tmp_path: Path) -> None:
    castorini(tmp_path / "source")
    model = convert_checkpoint(tmp_path / "source")
    encoder, pooling, aggregation, cls, concat = model
    assert (pooling.term_weight, pooling.activation, pooling.excluded_tokens) == ("identity", "softmax", "cls")
    assert (aggregation.aggregation, aggregation.slicing, aggregation.remainder) == ("signed", "strided", "drop")
    assert (aggregation.lexical_dim, cls.cls_dim, concat.keys[0]) == (D, C, "cls_embedding")
    assert (encoder.query_length, encoder.document_length) == (32, 64), "cut at the backbone's 64 positions"
    assert encoder.model.config.converted_from == "source (castorini layout)"
    assert not encoder.model.config.output_hidden_states
    assert convert_checkpoint(tmp_path / "source", lexical_dim=32).get_embedding_dimension() == C + 32


# Recognition


@pytest.mark.parametrize(("layout", "kind", "name"), [("castorini", "bert", "distilbert-agg"), ("dhr", "bert", "x")])
def test_layout_and_backbone_are_read_from_the_content(tmp_path: Path, layout: str, kind: str, name: str) -> None:
    WRITERS[layout](tmp_path / name, kind)
    assert published_layout(tmp_path / name) == layout
    assert convert_checkpoint(tmp_path / name)[0].model.config.model_type == kind


def test_other_checkpoints_are_no_published_layout(tiny_bert: str, tmp_path: Path) -> None:
    build_aggretriever(tiny_bert, lexical_dim=16).save_pretrained(str(tmp_path / "ours"))
    for path in (tiny_bert, tmp_path / "ours", tmp_path / "nothing"):
        assert published_layout(path) is None
    with pytest.raises(ValueError, match="is no published Aggretriever"):
        convert_checkpoint(tiny_bert)
    with pytest.raises(FileNotFoundError, match="is no folder, nor a Hub id"):
        convert_checkpoint(tmp_path / "nothing")


def test_castorini_in_safetensors_is_read_too(tmp_path: Path) -> None:
    castorini(tmp_path)
    expected = convert_checkpoint(tmp_path).encode(TEXTS)
    tensors = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").unlink()
    assert np.array_equal(convert_checkpoint(tmp_path).encode(TEXTS), expected)


@pytest.mark.parametrize("layout", ["castorini", "dhr"])
@pytest.mark.parametrize("pooling", ["mlm", "tokens", "cls", "mean"])
def test_building_on_a_published_checkpoint_is_refused_and_the_way_named(
    tmp_path: Path, layout: str, pooling: str
) -> None:
    WRITERS[layout](tmp_path)
    with pytest.raises(ValueError, match=rf"published Aggretriever \({layout} layout\).*load_aggretriever.*convert"):
        build_aggretriever(tmp_path, pooling=pooling)


def test_an_encoder_around_a_castorini_folder_names_the_way(tmp_path: Path) -> None:
    castorini(tmp_path)
    for head in (True, False):
        with pytest.raises(ValueError, match=r"would be random: .* is a published Aggretriever: load it with .*load_"):
            MLMEncoder(str(tmp_path), head=head)


# Damage


def test_position_tables_of_old_versions_are_tolerated(tmp_path: Path) -> None:
    castorini(tmp_path)
    expected = convert_checkpoint(tmp_path).encode(TEXTS)
    edit(tmp_path, lambda t: t.update({"encoder.bert.embeddings.position_ids": torch.arange(64)[None]}))
    assert np.array_equal(convert_checkpoint(tmp_path).encode(TEXTS), expected)


@pytest.mark.parametrize("lost", ["cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"])
def test_one_name_of_a_tied_pair_is_enough(tmp_path: Path, lost: str) -> None:
    castorini(tmp_path)
    expected = convert_checkpoint(tmp_path).encode(TEXTS)
    edit(tmp_path, lambda t: t.pop(f"encoder.{lost}"))
    assert np.array_equal(convert_checkpoint(tmp_path).encode(TEXTS), expected)


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    """A decoder that was lost and drawn anew when the checkpoint was saved once more."""
    castorini(tmp_path)
    edit(tmp_path, lambda t: t["encoder.cls.predictions.decoder.weight"].normal_())
    with pytest.raises(
        ValueError, match=r"ties encoder\.\S*word_embeddings.* and encoder\.\S*decoder.*but they differ"
    ):
        convert_checkpoint(tmp_path)


def test_an_untied_decoder_stays_untied_and_must_be_there(tmp_path: Path) -> None:
    castorini(tmp_path, tie_word_embeddings=False)
    masked_lm = convert_checkpoint(tmp_path)[0].model
    assert not torch.equal(masked_lm.get_output_embeddings().weight, masked_lm.get_input_embeddings().weight)
    edit(tmp_path, lambda t: t.pop("encoder.cls.predictions.decoder.weight"))
    with pytest.raises(ValueError, match=r"lacks encoder\.cls\.predictions\.decoder\.weight"):
        convert_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("tok_proj.bias"), r"lacks tok_proj\.bias"),
        (lambda t: t.pop("cls_proj.weight"), r"lacks cls_proj\.weight"),
        (lambda t: t.pop("encoder.vocab_transform.weight"), r"lacks encoder\.vocab_transform\.weight"),
        (lambda t: t.update({"encoder.pooler.weight": torch.ones(2)}), r"unexpected encoder\.pooler\.weight"),
        (lambda t: t.update({"other": torch.ones(2)}), "unexpected other"),
        (
            lambda t: t.update({"tok_proj.weight": torch.ones(2, H)}),
            r"tok_proj\.weight .*shape \(1, 16\), got \(2, 16\)",
        ),
        (lambda t: t.update({"cls_proj.bias": torch.ones(3)}), r"cls_proj\.bias .*128 entries, got \(3,\)"),
        (
            lambda t: t.update({"encoder.vocab_layer_norm.bias": torch.ones(3)}),
            r"vocab_layer_norm\.bias .* shape \(16,\) by its config\.json, got \(3,\)",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, change: Callable[[dict], Any], message: str) -> None:
    castorini(tmp_path, "distilbert")
    edit(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["TermWeightTrans.pt", "pooler.pt"])
def test_damage_of_dhr_layers_is_named(tmp_path: Path, file: str) -> None:
    dhr(tmp_path)
    edit(tmp_path, lambda t: t.pop("linear_p.bias"), file)
    with pytest.raises(ValueError, match=rf"{file} lacks linear_p\.bias"):
        convert_checkpoint(tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"holds no {file}"):
        convert_checkpoint(tmp_path)


def test_untied_models_are_refused(tmp_path: Path) -> None:
    dhr(tmp_path / "a")
    settings = tmp_path / "a" / "pooler_config.json"
    settings.write_text(settings.read_text().replace("true", "false"))
    dhr(tmp_path / "b")
    edit(tmp_path / "b", lambda t: t.update({"linear_p.weight": t["linear_p.weight"] + 1}), "TermWeightTrans.pt")
    for name in ("query_model", "passage_model"):
        dhr(tmp_path / "c" / name)
    for name in "abc":
        with pytest.raises(ValueError, match="one encoder for queries and another for passages"):
            convert_checkpoint(tmp_path / name)


class Harmful:
    """Unpickled, it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_file_that_would_run_code_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    dhr(tmp_path / "source")
    torch.save({"linear_q.weight": Harmful(tmp_path / "ran")}, tmp_path / "source" / "pooler.pt")
    with pytest.raises(ValueError, match=r"pooler\.pt must hold tensors and nothing else"):
        convert_checkpoint(tmp_path / "source")
    (tmp_path / "source" / "pooler.pt").write_bytes(b"\x80\x02nonsense")
    with pytest.raises(ValueError, match="undamaged"):
        convert_checkpoint(tmp_path / "source")
    assert not (tmp_path / "ran").exists()


def set_hidden_size(folder: Path, value: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": value}))


@pytest.mark.parametrize("command", ["convert", "inspect"])
@pytest.mark.parametrize(
    ("file", "break_it"),
    [
        ("model.safetensors", lambda folder: os.truncate(folder / "model.safetensors", 200)),
        ("model.safetensors", lambda folder: (folder / "model.safetensors").write_bytes(b"")),
        ("tokenizer.json", lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0"}')),
        ("tokenizer.json", lambda folder: (folder / "tokenizer.json").write_text("{")),
        ("TermWeightTrans_config.json", lambda folder: (folder / "TermWeightTrans_config.json").write_text("[]")),
        ("pooler_config.json", lambda folder: (folder / "pooler_config.json").write_text("{")),
        ("config.json", lambda folder: set_hidden_size(folder, "x")),
        ("config.json", lambda folder: set_hidden_size(folder, 17)),  # no multiple of the heads
        ("config.json", lambda folder: (folder / "config.json").write_text("[]")),
    ],
)
def test_a_damaged_source_is_one_sentence_that_names_the_file(
    tmp_path: Path, file: str, break_it: Callable[[Path], Any], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    dhr(source)
    break_it(source)
    assert main([command, str(source), *([str(tmp_path / "out")] if command == "convert" else [])]) == 2
    assert f"convert: {source / file} is damaged, or holds a value of a wrong kind (" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """transformers would make a tokenizer of five special tokens, to which every text is the same."""
    castorini(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="holds no tokenizer"):
        convert_checkpoint(tmp_path)


# Output folders and the cache


def test_output_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    castorini(tmp_path / "source")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("kept")
    with pytest.raises(FileExistsError, match="full is not empty"):
        convert_checkpoint(tmp_path / "nowhere", tmp_path / "full")  # found before the source is looked at
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]
    (tmp_path / "empty").mkdir()
    convert_checkpoint(tmp_path / "source", tmp_path / "empty")
    convert_checkpoint(tmp_path / "source", tmp_path / "new" / "deep")
    assert (tmp_path / "empty" / "modules.json").is_file()
    assert (tmp_path / "new" / "deep" / "modules.json").is_file()

    def disk_full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(convert_module, "_write_card", disk_full)
    with pytest.raises(OSError, match="no space left"):
        convert_checkpoint(tmp_path / "source", tmp_path / "late")
    with pytest.raises(OSError, match="no space left"):
        load_aggretriever(tmp_path / "source")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "full", "empty", "new", "hf"}
    assert list((tmp_path / "hf" / "st_aggretriever").iterdir()) == []


@pytest.mark.parametrize("layout", ["castorini", "dhr"])
def test_load_converts_once_and_again_when_the_source_changes(
    tmp_path: Path, cache: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[layout](tmp_path / "source")
    expected = convert_checkpoint(tmp_path / "source").encode(TEXTS)
    assert np.array_equal(load_aggretriever(tmp_path / "source").encode(TEXTS), expected)
    made = list(cache.iterdir())
    assert len(made) == 1
    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "_convert", lambda *_: pytest.fail("converted a second time"))
        again = load_aggretriever(tmp_path / "source", truncate_dim=5, model_kwargs={"dtype": torch.bfloat16})
    assert again.encode("dog").shape == (5,)
    assert again[0].model.dtype == torch.bfloat16
    file = {"castorini": "pytorch_model.bin", "dhr": "TermWeightTrans.pt"}[layout]
    edit(tmp_path / "source", lambda t: [tensor.add_(0.25) for name, tensor in t.items() if "bias" in name], file)
    assert not np.array_equal(load_aggretriever(tmp_path / "source").encode(TEXTS), expected)
    assert len(list(cache.iterdir())) == 2


# Back to the published layout


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_round_trip_gives_equal_tensors_and_a_file_that_transformers_alone_can_read(tmp_path: Path, kind: str) -> None:
    source = castorini(tmp_path / "source", kind)
    convert_checkpoint(tmp_path / "source", tmp_path / "ours")
    save_castorini(load_aggretriever(tmp_path / "ours"), tmp_path / "back")
    before, after = (
        torch.load(tmp_path / name / "pytorch_model.bin", weights_only=True) for name in ("source", "back")
    )
    assert set(before) == set(after)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["output_hidden_states"] is True
    assert config["architectures"] == [
        {"bert": "BertAggretrieverEncoder", "distilbert": "DistlBertAggretrieverEncoder"}[kind]
    ]
    assert "converted_from" not in config
    masked_lm = type(source.masked_lm)(type(source.masked_lm.config).from_pretrained(tmp_path / "back"))
    masked_lm.load_state_dict({k.removeprefix("encoder."): v for k, v in after.items() if k.startswith("encoder.")})
    read = Original(masked_lm.eval(), torch.nn.Linear(H, 1), torch.nn.Linear(H, C))
    for name, layer in (("tok_proj", read.term_weight), ("cls_proj", read.cls)):
        layer.load_state_dict({part: after[f"{name}.{part}"] for part in ("weight", "bias")})
    expected = torch.stack([read.encode(text, 32) for text in TEXTS]).numpy()
    back = load_aggretriever(tmp_path / "back")
    assert abs(np.stack([back.encode_query(text) for text in TEXTS]) - expected).max() < 2e-6
    assert back.tokenizer.get_vocab() == conftest.make_tokenizer().get_vocab()


def test_a_trained_model_of_the_published_settings_can_be_written(tmp_path: Path) -> None:
    """A model built here, and a half-precision one, which the file holds in float32."""
    folder, _ = conftest.save_backbone(tmp_path / "backbone", vocab_size=FOLDS)
    model = build_aggretriever(folder, term_weight="identity", remainder="pad")
    model.bfloat16()
    save_castorini(model, tmp_path / "back")
    tensors = torch.load(tmp_path / "back" / "pytorch_model.bin", weights_only=True)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    model.float()
    again = load_aggretriever(tmp_path / "back", model_kwargs={"dtype": torch.float32})
    assert abs(again.encode_query(TEXTS) - model.encode_query(TEXTS)).max() < 1e-5


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"term_weight": "abs"}, "term_weight is 'abs', not 'identity'"),
        ({"activation": "log1p_relu"}, "activation is 'log1p_relu', not 'softmax'"),
        ({"excluded_tokens": "special"}, "excluded_tokens is 'special', not 'cls'"),
        ({"aggregation": "positive"}, "aggregation is 'positive', not 'signed'"),
        ({"slicing": "random"}, "slicing is 'random', not 'strided'"),
        ({"lexical_dim": 512}, "lexical_dim is 512, not 640"),
        ({"cls_dim": 64}, "cls_dim is 64, not 128"),
        ({"cls_dim": 0}, "its modules are MLMEncoder, MLMLexicalPooling, SliceMaxAgg, Concat"),
        ({"pooling": "tokens"}, "its modules are MLMEncoder, TokenLexicalPooling"),
        ({"prompts": {"query": "q: "}}, "it has prompts"),
        ({"kind": "roberta"}, "its backbone is roberta, not bert or distilbert"),
        ({"vocab_size": DROPS}, "its vocabulary has 2564 entries"),
    ],
)
def test_what_the_published_class_cannot_express_is_refused_by_reason(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    options = {"kind": "bert", "vocab_size": FOLDS, "term_weight": "identity", **options}
    folder, _ = conftest.save_backbone(tmp_path / "a", options.pop("kind"), vocab_size=options.pop("vocab_size"))
    model = build_aggretriever(folder, **options)
    with pytest.raises(ValueError, match=f"can't express this model: {reason}"):
        save_castorini(model, tmp_path / "back")
    assert not (tmp_path / "back").exists()


# Licences and the command line


def test_the_licence_is_carried_both_ways_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    castorini(tmp_path / "distilbert-source", "distilbert")
    (tmp_path / "distilbert-source" / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n# Some model\n")
    (tmp_path / "distilbert-source" / "LICENSE").write_text("the terms")
    ours, back = tmp_path / "ours", tmp_path / "distilbert-back"
    assert main(["convert", str(tmp_path / "distilbert-source"), str(ours)]) == 0
    assert main(["convert", str(ours), str(back), "--to", "castorini"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("licence: cc-by-nc-4.0") == 2
    assert "st-aggretriever:" not in shown.err
    for folder in (ours, back):
        assert "license: cc-by-nc-4.0" in (folder / "README.md").read_text().split("---")[1]
        assert (folder / "LICENSE").read_text() == "the terms"


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ("license: 1.0", "1.0"),
        ("license: [mit, 2]", "mit, 2"),
        ("license: 2024-01-01", "2024-01-01"),
        ("license: other\nlicense_name: 2\nlicense_link: [1, x]", "2 (1, x)"),
        ("license: {a: b}", "{'a': 'b'}"),
    ],
)
def test_a_licence_of_any_kind_of_value_is_carried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stated: str, said: str
) -> None:
    castorini(tmp_path / "source")
    (tmp_path / "source" / "README.md").write_text(f"---\n{stated}\n---\n")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "ours")]) == 0
    assert f"licence: {said}\n" in capsys.readouterr().out
    assert str(licence_of(tmp_path / "ours")) == said


@pytest.mark.parametrize("card", [None, "# no metadata", "---\ntags: [a]\n---\n", "---\nlicense: [\n---\n"])
def test_the_absence_of_a_licence_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], card: str | None) -> None:
    castorini(tmp_path / "source")
    if card:
        (tmp_path / "source" / "README.md").write_text(card)
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "ours")]) == 0
    assert "licence: none named by the source" in capsys.readouterr().out
    assert "none named by the source" in (tmp_path / "ours" / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out"], "is no folder, nor a Hub id"),
        (["source", "source"], "is not empty"),
        (["source", "out", "--lexical-dim", "9999"], "lexical_dim must be at most V // 2 = 1821, got 9999"),
        (["source", "out", "--to", "castorini", "--pooling", "tokens"], "--pooling and --lexical-dim are for --to st"),
    ],
)
def test_bad_input_ends_in_one_sentence_and_exit_code_2(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    castorini(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *arguments]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert message in error.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_made_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(convert_module, "_convert", lambda *_: pytest.fail("converted before the output was looked at"))
    monkeypatch.setattr(model_module, "load_aggretriever", lambda *_, **__: pytest.fail("loaded before"))
    for output in ("file/x", "file/x/y"):
        for to in ("st", "castorini"):
            assert main(["convert", "source", str(tmp_path / output), "--to", to]) == 2
            error = capsys.readouterr().err
            assert f"{tmp_path / output} can't be made: {tmp_path / 'file'} is a file." in error


def test_a_link_to_an_empty_folder_is_filled_where_it_leads(tmp_path: Path) -> None:
    castorini(tmp_path / "source")
    for name in ("there", "gone"):
        (tmp_path / f"link-{name}").symlink_to(tmp_path / name)
    (tmp_path / "there").mkdir()
    for name in ("there", "gone"):
        convert_checkpoint(tmp_path / "source", tmp_path / f"link-{name}")
        assert (tmp_path / f"link-{name}").is_symlink()
        assert (tmp_path / name / "modules.json").is_file()


def test_a_path_that_misleads_the_published_code_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    castorini(tmp_path / "source", "distilbert")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "plain"), "--to", "castorini"]) == 0
    assert "does not name distilbert" in capsys.readouterr().err


# The real ones


@pytest.mark.hub
@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("castorini/aggretriever-distilbert", "distilbert"),
        ("castorini/aggretriever-cocondenser", "bert"),
        ("jacklin/DistilBERT-AGG", "distilbert"),
    ],
)
def test_the_real_checkpoint_converts(source: str, kind: str, tmp_path: Path) -> None:
    """Sizes as published, and the vector by way of transformers alone. benchmarks/README.md has the commands that
    reproduce the published RR@10."""
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    try:
        folder = Path(snapshot_download(source, local_files_only=True))
    except OSError:
        pytest.skip(f"{source} is not in the cache")
    model = convert_checkpoint(source, tmp_path / "ours")
    assert (model[0].model.config.model_type, model[0].vocab_size()) == (kind, 30522)
    assert model.get_embedding_dimension() == 768
    file = folder / "pytorch_model.bin"
    tensors = torch.load(file, weights_only=True) if file.is_file() else load_file(folder / "model.safetensors")
    if "dhr" in model[0].model.config.converted_from:
        masked_lm = AutoModelForMaskedLM.from_pretrained(folder).eval()
        term, cls = (torch.load(folder / name, weights_only=True) for name in ("TermWeightTrans.pt", "pooler.pt"))
        heads = [term["linear_q.weight"], term["linear_q.bias"], cls["linear_q.weight"], cls["linear_q.bias"]]
    else:
        masked_lm = AutoModelForMaskedLM.from_config(model[0].model.config).eval()
        inside = {name.removeprefix("encoder."): tensor for name, tensor in tensors.items()}
        assert masked_lm.load_state_dict(inside, strict=False).missing_keys == []
        heads = [tensors[f"{name}.{part}"] for name in ("tok_proj", "cls_proj") for part in ("weight", "bias")]
    ids = AutoTokenizer.from_pretrained(folder)("what is dense retrieval?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        output = masked_lm(input_ids=ids, output_hidden_states=True)
        hidden = output.hidden_states[-1][0]
        weights = torch.nn.functional.linear(hidden[1:], *heads[:2])
        lexical = (output.logits[0, 1:].softmax(-1) * weights).amax(0)
        folded = reference.aggregate(lexical.tolist(), D, "signed", "drop")
        expected = torch.cat([torch.nn.functional.linear(hidden[0], *heads[2:]), torch.tensor(folded)])
    assert abs(model.encode_query("what is dense retrieval?") - expected.numpy()).max() < 1e-4


def test_a_source_that_is_copied_elsewhere_keeps_its_name_without_the_way(tmp_path: Path) -> None:
    castorini(tmp_path / "secret" / "source")
    convert_checkpoint(tmp_path / "secret" / "source", tmp_path / "ours")
    shutil.rmtree(tmp_path / "secret")
    written = [path for path in (tmp_path / "ours").rglob("*") if path.is_file()]
    assert not [path for path in written if b"secret" in path.read_bytes()]
