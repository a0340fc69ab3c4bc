"""The pipeline as ONNX: equal to the model in every variant, or nothing is written."""

import errno
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import conftest
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import nn

from st_aggretriever import build_aggretriever
from st_aggretriever.cli import main
from st_aggretriever.export import onnx as export
from st_aggretriever.export.onnx import export_onnx

TEXTS = ["the quick brown fox", "what is dense retrieval in a search engine ?", "a", ""]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return conftest.save_backbone(tmp_path_factory.mktemp("backbone"), "bert", num_hidden_layers=1)[0]


def build(backbone: str, **options: Any) -> SentenceTransformer:
    return build_aggretriever(backbone, **{"lexical_dim": 16, "cls_dim": 4, **options})


def read_as_the_readme_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str], **replaced: str
) -> np.ndarray:
    """The vectors by the folder's own Python, for these texts."""
    code = (folder / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert '["a document"]' in code
    code = code.replace('["a document"]', repr(texts))
    for before, after in replaced.items():
        assert before in code
        code = code.replace(before, after)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["vectors"]


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "modernbert"])
def test_the_folder_gives_the_models_vectors(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = conftest.save_backbone(tmp_path / "backbone", kind)
    model = build(folder, document_length=9)
    model.save_pretrained(str(tmp_path / "model"))
    expected = model.encode_document(TEXTS)
    assert main(["export", "onnx", str(tmp_path / "model"), str(tmp_path / "onnx")]) == 0
    found = read_as_the_readme_says(tmp_path / "onnx", monkeypatch, TEXTS)
    assert found.dtype == np.float32
    assert abs(found - expected).max() < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backbone", "model", "onnx"]


@pytest.mark.parametrize(
    "options",
    [
        {"aggregation": "positive", "remainder": "drop", "excluded_tokens": "special"},
        {"aggregation": "mean", "term_weight": "identity"},
        {"aggregation": "linear", "excluded_tokens": "none"},
        {"aggregation": "none"},
        {"slicing": "random", "remainder": "drop", "term_weight": "identity"},
        {"activation": "log1p_relu", "term_weight": "none", "cls_dim": 0},
        {"pooling": "tokens", "excluded_tokens": "special"},
        {"pooling": "cls"},
        {"pooling": "mean"},
        {"pooling": "mean+cls"},
    ],
    ids=str,
)
def test_every_variant_is_exported(backbone: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """By the check that the export itself makes, at five shapes."""
    report = export_onnx(build(backbone, **options), tmp_path / "onnx")
    assert report.difference < 1e-5
    assert (tmp_path / "onnx" / "model.onnx").is_file()


def test_prompts_reach_the_encoder_but_not_the_maximum(
    backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "what is "
    model = build(backbone, prompts={"query": prompt})
    export_onnx(model, tmp_path / "onnx")
    texts = [prompt + text for text in TEXTS]
    whole = read_as_the_readme_says(tmp_path / "onnx", monkeypatch, texts)
    number = '[len(tokenizer.encode(prompt.rstrip(" ")).ids) - 1]'
    code = {"[0]  # with a prompt: " + number: number.replace("prompt", repr(prompt))}
    found = read_as_the_readme_says(tmp_path / "onnx", monkeypatch, texts, **code)
    assert abs(found - model.encode_query(TEXTS)).max() < 1e-5
    assert abs(found - whole).max() > 1e-3
    assert abs(whole - model.encode(texts)).max() < 1e-5


def test_int8_is_written_and_measured(backbone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(backbone).save_pretrained(str(tmp_path / "model"))
    assert main(["export", "onnx", "--int8", str(tmp_path / "model"), str(tmp_path / "onnx")]) == 0
    assert "model_int8.onnx: mean cosine 0.99" in capsys.readouterr().out
    readme = (tmp_path / "onnx" / "README.md").read_text(encoding="utf-8")
    assert "on 64 passages mean cosine 0.9" in readme
    assert (tmp_path / "onnx" / "model_int8.onnx").is_file()


def test_a_file_that_differs_is_not_written(
    backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if padding took part in the maximum."""
    plain = export._plain_lexical

    def padded(pooling: Any, features: dict[str, Any]) -> dict[str, Any]:
        monkeypatch.setattr(pooling, "participating", lambda f: torch.ones_like(f["attention_mask"]) > 0)
        return plain(pooling, features)

    build(backbone).save_pretrained(str(tmp_path / "model"))
    monkeypatch.setattr(export, "_plain_lexical", padded)
    monkeypatch.setattr(export, "_trace", _trace_apart(export._trace, monkeypatch))
    assert main(["export", "onnx", str(tmp_path / "model"), str(tmp_path / "onnx")]) == 2
    assert "differ from the model's by" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def _trace_apart(trace: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pooling is changed in the trace alone."""

    def traced(*args: Any) -> None:
        trace(*args)
        monkeypatch.undo()

    return traced


def test_a_sign_may_turn_only_where_two_halves_are_equal(
    backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = export._run
    monkeypatch.setattr(export, "_run", lambda *args: torch.cat([run(*args)[:, :4], -run(*args)[:, 4:]], 1))
    with pytest.raises(ValueError, match="differ from the model's by"):
        export_onnx(build(backbone), tmp_path / "onnx")
    even = build(backbone)
    head: Any = even[0].model
    nn.init.zeros_(head.get_output_embeddings().bias)
    nn.init.zeros_(head.cls.predictions.transform.LayerNorm.weight)
    nn.init.zeros_(head.cls.predictions.transform.LayerNorm.bias)  # every logit is 0: all halves are equal
    report = export_onnx(even, tmp_path / "onnx")
    assert report.turned == sum(texts for texts, _ in export.SHAPES) * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_given_model_stays_as_it_is(backbone: str, tmp_path: Path, dtype: torch.dtype) -> None:
    model = build(backbone).to(dtype).train()
    model[1].quantize = "int8"  # type: ignore[assignment]
    model.truncate_dim = 9
    assert export_onnx(model, tmp_path / "onnx").difference < 1e-5
    assert next(model.parameters()).dtype == dtype
    assert (model.training, model[1].quantize) == (True, "int8")
    session = export._session(tmp_path / "onnx" / "model.onnx")
    assert session.get_outputs()[0].shape[1] == 9
    assert [node.name for node in session.get_inputs()] == ["input_ids", "attention_mask"]


def full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = Transformer(backbone)
    stock = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())])
    with pytest.raises(ValueError, match="no Aggretriever"):
        export_onnx(stock, tmp_path / "onnx")
    lowered = build(backbone)
    lowered[0].do_lower_case = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match="tokenizer that lowercases"):
        export_onnx(lowered, tmp_path / "onnx")
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there exists"):
        export_onnx(lowered, tmp_path / "there")
    with pytest.raises(FileNotFoundError, match="Make it first"):
        export_onnx(lowered, tmp_path / "no" / "onnx")
    (tmp_path / "onnx.partial").mkdir()
    (tmp_path / "onnx.partial" / "mine.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match=r"onnx\.partial is in the way"):
        export_onnx(build(backbone), tmp_path / "onnx")
    with pytest.raises(ValueError, match=r"mine\.txt is a file"):
        export_onnx(tmp_path / "onnx.partial" / "mine.txt", tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(export, "_trace", full)
        with pytest.raises(OSError, match=r"cannot write .*other: .*No space left"):
            export_onnx(build(backbone), tmp_path / "other")
    assert (tmp_path / "onnx.partial" / "mine.txt").read_text() == "keep me"
    shutil.rmtree(tmp_path / "onnx.partial")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", "onnx", backbone, str(tmp_path / "onnx")]) == 2
    assert 'pip install "st-aggretriever[onnx]"' in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_tokenizer_beside_the_file_is_the_models(backbone: str, tmp_path: Path) -> None:
    export_onnx(build(backbone, pooling="cls"), tmp_path / "onnx")
    vocabulary = json.loads((tmp_path / "onnx" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert len(vocabulary) == conftest.VOCAB_SIZE
    assert len((tmp_path / "onnx" / "README.md").read_text(encoding="utf-8").splitlines()) <= 18
