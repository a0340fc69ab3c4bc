"""Saved models load anywhere: with the package, without it, as plain transformers checkpoints, after saving again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import conftest
import numpy as np
import pytest
import sentence_transformers
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from transformers import AutoModel, AutoModelForMaskedLM

from st_aggretriever import AggretrieverLoss, MLMEncoder, SliceMaxAgg, build_aggretriever, load_aggretriever
from st_aggretriever import modules as package_modules

TEXTS = ["the quick brown fox", "", "what is dense retrieval in a search engine ?", "a " * 60]
OPTIONS: dict[str, dict[str, Any]] = {
    "mlm": {},
    "tokens": {"pooling": "tokens"},
    "mean+cls": {"pooling": "mean+cls"},
    "random": {"slicing": "random", "seed": 3, "prompts": {"query": "what is ", "document": "passage "}},
}

# Run in an interpreter of its own: argv is the folder of models; writes the vectors of each model found there.
SCRIPT = """
import os, sys
import numpy as np, torch
torch.set_num_threads(1)
texts, folder, how = {texts!r}, sys.argv[1], sys.argv[2]
if __name__ == "__main__":
    if how == "package":
        from st_aggretriever import load_aggretriever as load
    else:
        from sentence_transformers import SentenceTransformer
        def load(path):
            return SentenceTransformer(path, trust_remote_code=True)
        try:
            import st_aggretriever
            raise SystemExit("st_aggretriever could be imported")
        except ModuleNotFoundError:
            pass
    for name in sorted(os.listdir(folder)):
        if not os.path.isdir(os.path.join(folder, name)):
            continue
        model = load(os.path.join(folder, name))
        np.save(os.path.join(folder, name + "." + how + ".npy"), model.encode_query(texts))
        if how == "bundle" and name == "mlm":
            pool = model.start_multi_process_pool(["cpu", "cpu"])
            np.save(os.path.join(folder, name + ".pool.npy"), model.encode_query(texts, pool=pool, chunk_size=1))
            model.stop_multi_process_pool(pool)
        if how == "bundle":
            model.save_pretrained(os.path.join(sys.argv[3], name))
"""


def run(script: Path, *arguments: str, without_package: Path | None = None) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if without_package:
        without_package.mkdir(exist_ok=True)
        # Stands before the installed package on the path, also in the workers of a pool.
        (without_package / "st_aggretriever.py").write_text("raise ModuleNotFoundError('st_aggretriever is hidden')")
        environment["PYTHONPATH"] = str(without_package)
        environment["HF_MODULES_CACHE"] = str(without_package / "modules")
    command = [sys.executable, str(script), *arguments]
    result = subprocess.run(command, env=environment, cwd=script.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


def trained_checkpoint(backbone: str, folder: Path) -> tuple[SentenceTransformer, Path]:
    """A model after one step of sentence-transformers' own trainer, and the checkpoint that it wrote."""
    model = build_aggretriever(backbone, lexical_dim=16, cls_dim=4)
    arguments = SentenceTransformerTrainingArguments(
        str(folder / "run"), max_steps=1, save_steps=1, learning_rate=0.1, report_to="none", use_cpu=True
    )
    pairs = Dataset.from_dict({"query": ["what dog", "who sails"], "passage": ["the dog sleeps", "the ship sails"]})
    SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=AggretrieverLoss(model)).train()
    return model, folder / "run" / "checkpoint-1"


@pytest.fixture(scope="module")
def saved(tiny_bert: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """Models saved, moved elsewhere, loaded without the package and saved again; and the vectors expected of them."""
    first, home, again = (tmp_path_factory.mktemp(name) for name in ("first", "moved", "again"))
    expected = {}
    for name, options in OPTIONS.items():
        model = build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=4, **options)
        model.save_pretrained(str(first / name))
        expected[name] = model.encode_query(TEXTS)
        shutil.move(first / name, home / name)
    model, checkpoint = trained_checkpoint(tiny_bert, first)
    expected["checkpoint"] = model.encode_query(TEXTS)
    shutil.move(checkpoint, home / "checkpoint")
    script = tmp_path_factory.mktemp("elsewhere") / "script.py"
    script.write_text(SCRIPT.format(texts=TEXTS))
    hidden = tmp_path_factory.mktemp("hidden")
    run(script, str(home), "bundle", str(again), without_package=hidden)
    run(script, str(home), "package")
    run(script, str(again), "package")
    return home, again, expected


@pytest.mark.parametrize("how", ["package", "bundle"])
@pytest.mark.parametrize("name", [*OPTIONS, "checkpoint"])
def test_a_fresh_process_gives_the_same_vectors(saved: Any, name: str, how: str) -> None:
    home, _, expected = saved
    assert abs(np.load(home / f"{name}.{how}.npy") - expected[name]).max() == 0.0


def test_a_pool_of_workers_gives_the_same_vectors_without_the_package(saved: Any) -> None:
    home, _, expected = saved
    assert abs(np.load(home / "mlm.pool.npy") - expected["mlm"]).max() < 1e-5


@pytest.mark.parametrize("name", [*OPTIONS, "checkpoint"])
def test_a_model_saved_again_without_the_package_still_loads_with_it(saved: Any, name: str) -> None:
    home, again, expected = saved
    assert abs(np.load(again / f"{name}.package.npy") - expected[name]).max() == 0.0
    assert (again / name / "st_aggretriever.py").read_bytes() == Path(package_modules.__file__).read_bytes()
    assert json.loads((again / name / "modules.json").read_text()) == json.loads(
        (home / name / "modules.json").read_text()
    )


@pytest.mark.parametrize("where", [0, 1], ids=["saved", "saved again"])
def test_the_folder_is_an_ordinary_masked_language_model(saved: Any, tiny_bert: str, where: int) -> None:
    masked_lm, info = AutoModelForMaskedLM.from_pretrained(saved[where] / "mlm", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert masked_lm.get_output_embeddings().weight is masked_lm.get_input_embeddings().weight
    original = AutoModelForMaskedLM.from_pretrained(tiny_bert)
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, masked_lm.state_dict()[name]), name


def test_without_head_the_folder_is_an_ordinary_encoder(saved: Any) -> None:
    model, info = AutoModel.from_pretrained(saved[0] / "tokens", add_pooling_layer=False, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.architectures == ["BertModel"]


def test_the_vocabulary_matrix_is_stored_once(saved: Any) -> None:
    wide = [
        (path, name)
        for path in (saved[0] / "mlm").rglob("*.safetensors")
        for name, tensor in load_file(path).items()
        if tensor.dim() == 2 and tensor.shape[0] == conftest.VOCAB_SIZE
    ]
    assert len(wide) == 1, wide


def test_an_untied_decoder_stays_untied(tmp_path: Path) -> None:
    folder, _ = conftest.save_backbone(tmp_path / "backbone", tie_word_embeddings=False)
    model = build_aggretriever(folder, lexical_dim=16, cls_dim=4)
    vectors = model.encode(TEXTS)
    model.save_pretrained(str(tmp_path / "saved"))
    again = load_aggretriever(tmp_path / "saved")
    masked_lm = again[0].model
    assert masked_lm.get_output_embeddings().weight is not masked_lm.get_input_embeddings().weight
    assert not torch.equal(masked_lm.get_output_embeddings().weight, masked_lm.get_input_embeddings().weight)
    assert np.array_equal(again.encode(TEXTS), vectors)


def test_push_to_hub_uploads_a_folder_that_loads(
    tiny_bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hub:
        """Stands for the Hub: keeps what is uploaded."""

        def __init__(self, token: str | None = None) -> None: ...

        def create_repo(self, **kwargs: Any) -> Any:
            return type("Repo", (), {"repo_id": kwargs["repo_id"]})()

        def upload_folder(self, folder_path: str, **kwargs: Any) -> Any:
            shutil.copytree(folder_path, tmp_path / "uploaded")
            return type("Commit", (), {"commit_url": "url"})()

    monkeypatch.setattr("sentence_transformers.base.model.HfApi", Hub)
    model = build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=4)
    model.push_to_hub("someone/something", replace_model_card=True)
    for again in (
        load_aggretriever(tmp_path / "uploaded"),
        SentenceTransformer(str(tmp_path / "uploaded"), trust_remote_code=True),
    ):
        assert np.array_equal(again.encode(TEXTS), model.encode(TEXTS))


def test_settings_of_the_model_round_trip(tiny_bert: str, tmp_path: Path) -> None:
    model = build_aggretriever(
        tiny_bert,
        lexical_dim=16,
        cls_dim=4,
        query_length=9,
        document_length=17,
        prompts={"query": "q ", "document": "d "},
    )
    model.truncate_dim = 8
    model.save_pretrained(str(tmp_path))
    again = load_aggretriever(tmp_path)
    assert (again.prompts, again.truncate_dim, again.similarity_fn_name) == (model.prompts, 8, "dot")
    assert (again[0].query_length, again[0].document_length, again.max_seq_length) == (9, 17, 17)
    assert load_aggretriever(tmp_path, truncate_dim=5).encode("dog").shape == (5,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_round_trips(tiny_bert: str, tmp_path: Path, dtype: torch.dtype) -> None:
    model = build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=4).to(dtype)
    model.save_pretrained(str(tmp_path))
    again = load_aggretriever(tmp_path)
    assert {p.dtype for p in again.parameters()} == {dtype}
    assert np.array_equal(again.encode(TEXTS), model.encode(TEXTS))


def test_loading_without_the_package_asks_for_the_flag(saved: Any) -> None:
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        SentenceTransformer(str(saved[0] / "mlm"))


def copy_of(saved: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0] / "mlm", tmp_path / "model"))


def test_code_in_the_folder_is_not_run_by_our_loader(saved: Any, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path)
    (folder / "st_aggretriever.py").write_text("raise SystemExit('this code must not run')")
    assert load_aggretriever(folder).encode("dog").shape == (20,)


def test_an_unknown_setting_is_refused_by_name(saved: Any, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path)
    path = folder / "2_SliceMaxAgg" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sharpness": 3}))
    with pytest.raises(ValueError, match=r"SliceMaxAgg: unknown setting sharpness.*known are vocab_size"):
        load_aggretriever(folder)


def test_a_missing_head_weight_is_named(saved: Any, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["cls.predictions.transform.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"cls\.predictions\.transform\.dense\.weight"):
        load_aggretriever(folder)
    shutil.rmtree(folder)
    folder = copy_of(saved, tmp_path)
    save_file({}, folder / "3_CLSProjection" / "model.safetensors")
    with pytest.raises(ValueError, match=r"3_CLSProjection .*linear\.weight"):
        load_aggretriever(folder)


def test_foreign_modules_and_missing_folders_are_refused(saved: Any, tiny_bert: str, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path)
    entries = json.loads((folder / "modules.json").read_text())
    entries[1]["type"] = "os.system"
    (folder / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=r"built of 'os\.system'"):
        load_aggretriever(folder)
    with pytest.raises(ValueError, match="call build_aggretriever"):
        load_aggretriever(tiny_bert)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load_aggretriever(tmp_path / "nowhere")


@pytest.mark.parametrize("version", ["6.1.0", "7.0.0", "5.4.1"])
def test_another_sentence_transformers_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(sentence_transformers, "__version__", version)
    source = Path(package_modules.__file__).read_text(encoding="utf-8")
    with pytest.raises(ImportError, match=rf"needs sentence-transformers >=6.2,<7, but {version} is installed"):
        exec(compile(source, "st_aggretriever.py", "exec"), {"__name__": "bundled"})


def test_classes_go_by_their_public_name() -> None:
    assert (MLMEncoder.__module__, SliceMaxAgg.__module__) == ("st_aggretriever", "st_aggretriever")


@pytest.mark.parametrize("file", ["model.safetensors", "1_MLMLexicalPooling/model.safetensors"])
@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", None])
def test_damaged_weights_are_one_sentence(saved: Any, tmp_path: Path, file: str, content: bytes | None) -> None:
    path = copy_of(saved, tmp_path) / file
    path.write_bytes(path.read_bytes()[:100] if content is None else content)
    with pytest.raises(ValueError, match=r"can't be read: .*git-LFS pointer"):
        load_aggretriever(tmp_path / "model")


def test_a_damaged_modules_file_is_named(saved: Any, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path)
    (folder / "modules.json").write_text("")
    with pytest.raises(ValueError, match=r"modules\.json is not JSON"):
        load_aggretriever(folder)


@pytest.mark.parametrize(
    ("key", "value"), [("keys", 3), ("dims", None), ("cls_dim", "x"), ("hidden_size", [1]), ("vocab_size", "147")]
)
def test_a_config_with_a_value_of_a_wrong_kind_is_named(tiny_bert: str, tmp_path: Path, key: str, value: Any) -> None:
    build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4).save_pretrained(str(tmp_path / "m"))
    files = [file for file in (tmp_path / "m").glob("*/config.json") if key in json.loads(file.read_text())]
    files[0].write_text(json.dumps({**json.loads(files[0].read_text()), key: value}))
    with pytest.raises(ValueError, match=r".") as caught:
        load_aggretriever(tmp_path / "m", device="cpu")
    assert files[0].parent.name.split("_")[-1] in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("gone", r"1_MLMLexicalPooling has no weights \(model\.safetensors\)"),
        ("another's", r"the weights in .*1_MLMLexicalPooling don't fit its config\.json \(size mismatch for linear"),
        ("another size", r"the weights in .*/m don't fit its config\.json"),
        ("no last module", r"modules\.json has no Concat"),
    ],
)
def test_parts_of_a_model_that_are_missing_or_do_not_fit_are_named(
    tiny_bert: str, tmp_path: Path, damage: str, sentence: str
) -> None:
    folder = tmp_path / "m"
    build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4).save_pretrained(str(folder))
    config, modules = (json.loads((folder / name).read_text()) for name in ("config.json", "modules.json"))
    if damage == "gone":
        (folder / "1_MLMLexicalPooling" / "model.safetensors").unlink()
    elif damage == "another's":
        shutil.copy(folder / "3_CLSProjection" / "model.safetensors", folder / "1_MLMLexicalPooling")
    elif damage == "another size":
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))
    else:
        (folder / "modules.json").write_text(json.dumps(modules[:-1]))
    with pytest.raises(ValueError, match=f"load_aggretriever: .*{sentence}.*etch"):
        load_aggretriever(folder, device="cpu")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", r"the weights in .* can't be read"),
        (b"", r"the weights in .* can't be read"),
        (0.5, r"the weights in .* can't be read"),
        ({"hidden_size": 32}, r"the weights in .* don't fit its config\.json"),
        ({"hidden_act": "foo"}, r"the config\.json of .* holds a value of a wrong kind \('foo'\)"),
        ({"hidden_size": "16"}, r"the config\.json of .* holds a value of a wrong kind \(.*'hidden_size'"),
    ],
)
def test_a_damaged_backbone_is_named(tiny_bert: str, tmp_path: Path, damage: Any, sentence: str) -> None:
    folder = shutil.copytree(tiny_bert, tmp_path / "m")
    if isinstance(damage, dict):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | damage))
    else:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        whole = (folder / "pytorch_model.bin").read_bytes()
        (folder / "pytorch_model.bin").write_bytes(
            damage if isinstance(damage, bytes) else whole[: int(damage * len(whole))]
        )
    with pytest.raises(ValueError, match=f"build_aggretriever: {sentence}.* again"):
        build_aggretriever(folder, lexical_dim=8, cls_dim=4)


@pytest.mark.parametrize("content", ["[]", '{"prompts": {"query": 3}}', '{"prompts": ["query: "]}'])
def test_settings_of_another_form_are_named(saved: Any, tmp_path: Path, content: str) -> None:
    folder = copy_of(saved, tmp_path)
    (folder / "config_sentence_transformers.json").write_text(content)
    with pytest.raises(ValueError, match=r"config_sentence_transformers\.json must hold an object"):
        load_aggretriever(folder)


@pytest.mark.parametrize("content", ["{}", "null", "[3]", '[{"type": 3, "path": ""}]', '[{"type": "x"}]'])
def test_a_list_of_modules_of_another_form_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ValueError, match=r"modules\.json holds no list of modules"):
        load_aggretriever(tmp_path)
