"""st-aggretriever inspect: says what a model is, and finds what is wrong with it."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoModelForMaskedLM

import st_aggretriever.modules as package_modules
from st_aggretriever import __version__, build_aggretriever
from st_aggretriever.cli import main
from st_aggretriever.inspection import failed_checks, format_report, inspect_model

V = conftest.VOCAB_SIZE


@pytest.fixture(scope="module")
def saved(tiny_bert: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    model = build_aggretriever(
        tiny_bert, lexical_dim=16, cls_dim=4, query_length=9, document_length=17, prompts={"query": "what is "}
    )
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def found(report: dict[str, Any]) -> dict[str, str]:
    """Failed checks by name."""
    return {check["name"]: check["found"] for check in report["checks"] if not check["passed"]}


def test_the_report_says_what_the_model_is(saved: Path) -> None:
    report = json.loads(json.dumps(inspect_model(saved)))
    assert report["backbone"] == {
        "model_type": "bert",
        "architecture": "BertForMaskedLM",
        "layers": 2,
        "H": 16,
        "vocabulary": V,
        "tokenizer_entries": V,
        "parameters": AutoModelForMaskedLM.from_pretrained(saved).num_parameters(),
        "dtype": "float32",
    }
    assert report["head"] == {"V": V, "E": 16, "tied": True}
    assert report["vector"]["dimension"] == 20
    assert report["vector"]["parts"] == {"cls_embedding": 4, "lexical_embedding": 16}
    assert report["vector"]["similarity"] == "dot"
    assert report["pooling"]["kind"] == "mlm"
    assert report["pooling"]["term_weight"] == "abs"
    assert report["slices"]["aggregation"] == "signed"
    assert report["lengths"] == {"query": 9, "document": 17, "text": 17}
    assert report["prompts"] == {"query": "what is "}
    assert report["bytes_on_disk"] == sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    assert [check["name"] for check in report["checks"]] == ["tie", "finite weights", "sample vector"]
    assert failed_checks(report) == []


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"pooling": "tokens"}, "tokens"),
        ({"pooling": "cls"}, "cls"),
        ({"pooling": "mean"}, "mean"),
        ({"pooling": "mean+cls"}, "mean+cls"),
        ({"lexical_dim": 0}, "cls"),
        ({"cls_dim": 0, "aggregation": "none"}, "mlm"),
        ({"aggregation": "linear"}, "mlm"),
    ],
)
def test_every_layout_has_a_report(tiny_bert: str, tmp_path: Path, options: dict[str, Any], kind: str) -> None:
    build_aggretriever(tiny_bert, **{"lexical_dim": 16, "cls_dim": 4, **options}).save_pretrained(str(tmp_path))
    report = inspect_model(tmp_path)
    assert report["pooling"]["kind"] == kind
    assert (report["head"] is not None) is (kind == "mlm")
    assert failed_checks(report) == []
    assert f"kind {kind}" in format_report(report)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_passes(tiny_bert: str, tmp_path: Path, dtype: torch.dtype) -> None:
    build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=4).to(dtype).save_pretrained(str(tmp_path))
    report = inspect_model(tmp_path)
    assert report["backbone"]["dtype"] == str(dtype).removeprefix("torch.")
    assert failed_checks(report) == []


def test_a_graft_and_a_conversion_are_named(headless_bert: str, tiny_bert: str, tmp_path: Path) -> None:
    model = build_aggretriever(headless_bert, lexical_dim=16, cls_dim=4, mlm_head_from=tiny_bert)
    model[0].model.config.converted_from = "somewhere"
    model.save_pretrained(str(tmp_path))
    report = inspect_model(tmp_path)
    assert report["mlm_head_from"] == Path(tiny_bert).name
    text = format_report(report)
    assert f"MLM head from   {Path(tiny_bert).name}" in text
    assert "converted from  somewhere" in text


@pytest.mark.parametrize(
    ("version", "state", "sentence"),
    [
        (__version__, "same", "same as the installed package"),
        ("0.0.9", "older", f"0.0.9, sha256 .*, OLDER than the installed {__version__}; .* load_aggretriever"),
        ("99.0", "newer", f"99.0, .* newer than the installed {__version__}.* update the package"),
        ("changed", "other", "not the content of the installed"),
        (None, "none", "none: it loads only where st_aggretriever is installed"),
    ],
)
def test_the_copy_of_the_code_is_compared_with_the_installed_one(
    model: Path, version: str | None, state: str, sentence: str
) -> None:
    copy = model / "st_aggretriever.py"
    if version is None:
        copy.unlink()
    elif version == "changed":
        copy.write_text(copy.read_text() + "# changed\n")
    else:
        copy.write_text(copy.read_text().replace(f'__version__ = "{__version__}"', f'__version__ = "{version}"'))
    code = inspect_model(model)["code"]
    assert (code["carried"], code["state"]) == (version is not None, state)
    assert code["installed_sha256"] == hashlib.sha256(Path(package_modules.__file__).read_bytes()).hexdigest()
    if version:
        assert code["sha256"] == hashlib.sha256(copy.read_bytes()).hexdigest()
    assert re.search(sentence, format_report(inspect_model(model)))


def test_the_copy_is_read_and_not_run(model: Path) -> None:
    (model / "st_aggretriever.py").write_text('__version__ = "0.0.1"\nraise SystemExit("this code must not run")\n')
    assert inspect_model(model)["code"]["state"] == "older"


def test_weights_that_are_not_finite_are_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = model / "3_CLSProjection" / "model.safetensors"
    weights = load_file(file)
    weights["linear.bias"][2] = float("nan")
    save_file(weights, file)
    assert found(inspect_model(model))["finite weights"] == "3.linear.bias"
    assert main(["inspect", str(model)]) == 2
    shown = capsys.readouterr()
    assert "finite weights: FAILED, 3.linear.bias" in shown.out
    assert "fails finite weights (3.linear.bias) and sample vector" in shown.err.splitlines()[-1]


def test_a_tie_that_is_stored_twice_is_found(model: Path) -> None:
    file = model / "model.safetensors"
    weights = load_file(file)
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    assert found(inspect_model(model)) == {"tie": "decoder tied, 2 V x E matrices on disk"}


def test_a_vector_that_depends_on_its_batch_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if padding took part in the maximum."""
    monkeypatch.setattr(
        package_modules.MLMLexicalPooling,
        "participating",
        lambda self, features: torch.ones_like(features["attention_mask"], dtype=torch.bool),
    )
    assert "sample vector" in found(inspect_model(model))


def test_a_model_without_words_for_the_sample_is_no_failure_of_its_length(tiny_bert: str, tmp_path: Path) -> None:
    """The shortest lengths cut both sample texts to three tokens."""
    build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=4, document_length=3, query_length=3).save_pretrained(
        str(tmp_path)
    )
    assert failed_checks(inspect_model(tmp_path)) == []


def test_the_command_prints_text_and_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{saved}\n  layout          st_aggretriever\n")
    assert "vector          20 = cls 4 + lexical 16; dot" in text
    assert main(["inspect", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vector"]["dimension"] == 20


def test_what_is_no_model_ends_in_one_sentence(
    tiny_bert: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(model / "model.safetensors")
    del weights["cls.predictions.bias"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    SentenceTransformer(modules=[Transformer(tiny_bert), Pooling(16)]).save_pretrained(str(tmp_path / "embedder"))
    for path, message in (
        (tmp_path / "embedder", "is a SentenceTransformer, but no Aggretriever"),
        (tmp_path / "nowhere", "there is no folder"),
        (tiny_bert, "call build_aggretriever"),
        (model, "cls.predictions.bias"),
    ):
        assert main(["inspect", str(path)]) == 2
        error = capsys.readouterr().err
        assert message in error.splitlines()[-1]
        assert "Traceback" not in error
