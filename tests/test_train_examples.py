"""The training examples from end to end, on made-up data and a tiny model."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from st_aggretriever import load_aggretriever

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))  # where the teacher's scores are kept


def test_msmarco_example_has_the_papers_setting_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "agg"
    run_example(monkeypatch, "train_msmarco.py", "--dry-run", "--output", output, "--hard-negatives", "--as-published")
    record = json.loads((output / "train.json").read_text())
    config, resolved = record["config"], record["resolved"]
    assert (config["epochs"], config["negatives"], config["query_length"], config["document_length"]) == (3, 7, 32, 128)
    assert (config["lexical_dim"], config["cls_dim"]) == (640, 128)
    assert (config["lexical_weight"], config["cls_weight"], config["scale"]) == (0.5, 0.5, 1.0)
    assert (resolved["learning_rate"], resolved["head_learning_rate"], config["warmup_ratio"]) == (5e-6, 5e-6, 0.1)
    further = json.loads((tmp_path / "agg-hard" / "train.json").read_text())
    assert (further["config"]["epochs"], further["config"]["negatives"]) == (2, 7)
    assert further["config"]["model"] == str(output)
    settings = runpy.run_path(str(EXAMPLES / "train_msmarco.py"))
    assert (settings["PAPER"]["batch_size"], settings["PAPER"]["precision"]) == (8, "fp16")
    model = load_aggretriever(tmp_path / "agg-hard")
    assert model[1].term_weight == "identity"
    assert model.encode("what speaks of number 3").shape == (768,)


def test_modern_example_runs_in_three_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--dry-run", "--output", tmp_path]
    run_example(monkeypatch, "train_modern.py", *arguments)
    home = tmp_path / "agg"
    record = json.loads((home / "distilled" / "train.json").read_text())
    assert record["config"]["model"] == str(home / "plain")
    assert {"full", "lexical_320", "kl_full", "kl_full_64"} <= record["losses"][-1].keys()
    written = {path: path.stat().st_mtime_ns for path in home.rglob("*.json*")}
    run_example(monkeypatch, "train_modern.py", *arguments)  # nothing is done again
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*.json*")} == written
    assert load_aggretriever(home / "distilled").encode_query("a dog").shape == (768,)


@pytest.mark.parametrize(("script", "option"), [("train_msmarco.py", "--data"), ("train_modern.py", "--pairs")])
def test_a_training_example_ends_bad_input_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, option: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_example(monkeypatch, script, option, "nowhere.jsonl", "--output", tmp_path / "out")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{script}: nowhere.jsonl")
    assert error.count("\n") == 1
