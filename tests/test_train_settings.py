"""Settings of a training run: refused in one sentence, each a flag of the command line."""

import inspect
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB_SIZE
from safetensors.torch import load_file, save_file
from training_runs import die_at, interrupt, make_rows, write_rows

from st_aggretriever import TrainConfig, build_aggretriever, load_aggretriever, train, training
from st_aggretriever.cli import _parser, main
from st_aggretriever.cli.options import load_model
from st_aggretriever.trainer import AggretrieverTrainer

# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 1}, "batch_size must be at least 2 and finite, got 1"),
        ({"epochs": 0}, "epochs must be above 0"),
        ({"epochs": float("nan")}, "epochs must be above 0 and finite, got nan"),
        ({"max_steps": -1}, "max_steps must be at least 0"),
        ({"warmup_ratio": 1.0}, "warmup_ratio must be at least 0 and below 1, got 1.0"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"head_learning_rate": float("inf")}, "head_learning_rate must be above 0 and finite"),
        ({"cls_weight": -0.5}, "cls_weight must be at least 0"),
        ({"scale": 0.0}, "scale must be above 0"),
        ({"logging_steps": 0}, "logging_steps must be at least 1"),
        ({"negatives": -1}, "negatives must be at least 0"),
        ({"seed": 2**32}, "seed must be at least 0 and below 4294967296"),
        ({"precision": "fp8"}, "precision must be one of auto, fp32, bf16, fp16, got 'fp8'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ({"pairs": []}, "pairs must name at least one file"),
        ({"dev_share": 1.0}, "dev_share must be at least 0 and below 1"),
        ({"eval_steps": 0}, "eval_steps must be at least 1"),
        ({"dev_metric": "MAP"}, "dev_metric must be one of RR@10, nDCG@10"),
        ({"mini_batch_size": 4, "mini_batch_tokens": 99}, "mini_batch_size and mini_batch_tokens both"),
        *(
            ({name: value}, f"{name} has nothing to act on without a teacher. Give one, or leave it out")
            for name, value in {
                "kl_weight": 5.0,
                "margin_mse_weight": 1.0,
                "contrastive_weight": 0.0,
                "temperature": 3.0,
                "teacher_batch_size": 8,
            }.items()
        ),
        ({"dev_split": "x"}, "dev_split has nothing to act on without dev_data, a BEIR folder"),
        ({"dev_split": "x", "dev_share": 0.1}, "dev_split has nothing to act on without dev_data, a BEIR folder"),
        ({"dev_split": "x", "dev_data": "nanobeir"}, "dev_split has nothing to act on without dev_data"),
        ({"dev_metric": "nDCG@10"}, "dev_metric has nothing to act on without dev_data, a BEIR folder, or dev_share"),
        ({"dev_metric": "nDCG@10", "dev_data": "nanobeir"}, "dev_metric has nothing to act on without dev_data"),
        ({"teacher": "bm25", "kl_weight": 0.0}, "with a teacher kl_weight or margin_mse_weight must be above 0"),
        ({"lora_rank": 2, "mlm_head_learning_rate": 1e-3}, "lora_rank leaves the MLM head as it is"),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused(settings: dict, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**settings | change)


def test_a_path_will_do_for_a_string_and_one_for_a_list(settings: dict) -> None:
    paths = {name: Path(name) for name in ("model", "pairs", "output", "mlm_head_from")}
    config = TrainConfig(**settings | paths)
    assert [config.model, config.pairs, config.output, config.mlm_head_from] == [
        "model", ["pairs"], "output", "mlm_head_from"
    ]  # fmt: skip


def bad_inputs(folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Settings that don't fit, each with a part of its sentence."""
    (folder / "empty.jsonl").write_text("")
    (folder / "malformed.jsonl").write_text('{"query": "a", "passage": "b"}\n{"query": \n')
    (folder / "file").write_text("")
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("keep me")
    few, uneven, own = (make_rows(16, negatives=2) for _ in range(3))
    few[6]["negatives"].pop()
    uneven[3]["negatives"].append("one more")
    own[2]["negatives"][1] = own[2]["passage"]
    same = make_rows(24)
    for row in same:
        row["passage"] = "the same"
    write_rows(folder / "few.jsonl", few)
    write_rows(folder / "uneven.jsonl", uneven)
    write_rows(folder / "own.jsonl", own)
    write_rows(folder / "same.jsonl", same)
    yield {"pairs": [folder / "absent.jsonl"]}, "absent.jsonl does not exist"
    yield {"pairs": [folder / "empty.jsonl"]}, "empty.jsonl is empty"
    yield {"pairs": [folder / "malformed.jsonl"]}, "malformed.jsonl line 2: "
    yield {"pairs": [folder / "few.jsonl"]}, "few.jsonl line 7: expected 2 negatives, as in the first row, got 1. --neg"
    yield {"pairs": [folder / "few.jsonl"], "negatives": 2}, "line 7: expected 2 negatives, or more, got 1"
    yield (
        {"pairs": [folder / "uneven.jsonl"], "negatives": None},
        "line 4: expected 2 negatives, as in the first row, got 3",
    )
    yield {"pairs": [folder / "own.jsonl"]}, "own.jsonl line 3: the passage stands among its own negatives"
    yield {"pairs": [folder / "same.jsonl"]}, "the pairs fill only 0 of 3 batches of 8 in which no text comes twice"
    yield {"fold_dims": [5]}, "fold_dims must be widths of at least 1, each once, divisors of lexical_dim 16, got [5]"
    yield {"fold_dims": [8], "fold_weights": [1, 2]}, "one weight for each of the 1 fold_dims, got 2"
    yield {"pairs": [""]}, "pairs must name a file or folder, got an empty name"
    yield {"patience": 1}, "patience needs a development set"
    yield {"eval_steps": 7}, "eval_steps needs a development set"
    yield {"dev_data": folder / "absent"}, "absent"
    yield {"batch_size": 25}, "batch_size must be at most the number of pairs, 24, got 25"
    yield {"output": folder / "full"}, "full is not empty; nothing was overwritten"
    yield {"output": folder / "file"}, "file is a file; nothing was overwritten"
    yield {"output": folder / "file" / "below" / "out"}, f"out can't be made: {folder / 'file'} is a file. Name another"
    yield {"output": "/proc/out"}, "/proc/out can't be written (No such file or directory). Name another output."
    yield {"output": "/proc/below/out"}, "/proc/below can't be written (No such file or directory). Name another"
    yield {"model": folder / "absent"}, "absent"
    yield {"lexical_dim": VOCAB_SIZE}, f"lexical_dim must be at most V // 2 = {VOCAB_SIZE // 2}, got {VOCAB_SIZE}"
    yield {"pooling": "max"}, "pooling must be one of"
    nothing = "has nothing to act on, the model has no such weights"
    yield {"pooling": "cls", "mlm_head_learning_rate": 1e-3}, f"mlm_head_learning_rate {nothing}"
    yield {"pooling": "cls", "term_weight_learning_rate": 1e-3}, f"term_weight_learning_rate {nothing}"
    yield {"precision": "fp16"}, "precision must be fp32 or bf16 without a GPU"


def broken_models(model: str, folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Copies of a model, each with a part of its sentence."""
    shutil.copytree(model, folder / "cut")
    tokenizer = folder / "cut" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8")[:100], encoding="utf-8")
    yield {"model": folder / "cut"}, f"{tokenizer} is broken"
    shutil.copytree(model, folder / "nan")
    weights = load_file(folder / "nan" / "model.safetensors")
    name = next(name for name in sorted(weights) if name.endswith("LayerNorm.weight"))
    weights[name][0] = torch.nan
    save_file(weights, folder / "nan" / "model.safetensors", metadata={"format": "pt"})
    yield {"model": folder / "nan"}, "has weights that are not finite ("


def test_broken_modules_json_is_named(tmp_path: Path) -> None:
    for text, sentence in (("[{", "modules.json is broken"), ("{}", "modules.json holds no list of modules")):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(ValueError, match=sentence):
            load_model(str(tmp_path), "cpu", False)
    with pytest.raises(ValueError, match=r"modules\.json is a file"):
        load_model(str(tmp_path / "modules.json"), "cpu", False)


def test_bad_input_is_one_sentence_with_exit_code_2_and_leaves_no_trace(
    settings: dict, headless_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    cases = [*bad_inputs(tmp_path), ({"model": headless_bert}, "pooling='tokens'")]
    cases += broken_models(settings["model"], tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for change, message in cases:
        assert main(["train", *flags(settings | change)]) == 2, message
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("st-aggretriever: ")
        assert message in error
        assert sorted(tmp_path.rglob("*")) == before, message
    assert (tmp_path / "full" / "mine.txt").read_text() == "keep me"


def test_what_is_refused_is_refused_before_the_teacher_is_asked(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(24, negatives=1)
    settings |= {"pairs": [write_rows(tmp_path / "negatives.jsonl", rows)], "teacher": "bm25", "save_steps": 2}
    same = write_rows(tmp_path / "same.jsonl", [row | {"query": "the same"} for row in rows])
    interrupt(settings, 3)
    partial = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("st_aggretriever.teacher.load_teacher", lambda *args, **kwargs: pytest.fail("it was asked"))
    fresh = {"output": str(tmp_path / "fresh")}
    for change, message in (
        ({"resume": True, "epochs": 3}, "had other settings: epochs"),
        ({"resume": True, "pairs": [same]}, "had other pairs|fill only"),
        (fresh | {"pairs": [same]}, "fill only 0 of 3 batches"),
        (fresh | {"pooling": "mean", "fold_dims": [8]}, "fold_dims"),
    ):
        with pytest.raises(ValueError, match=message):
            train(TrainConfig(**settings | change))
        assert sorted(tmp_path.rglob("*")) == partial


def test_an_interrupted_teacher_says_where_its_scores_are(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt("interrupted; the scores stay")

    settings |= {"pairs": [write_rows(tmp_path / "negatives.jsonl", make_rows(24, negatives=1))], "teacher": "bm25"}
    monkeypatch.setattr("st_aggretriever.teacher.score_rows", interrupted)
    with pytest.raises(KeyboardInterrupt, match="the scores stay"):
        train(TrainConfig(**settings))
    assert not (tmp_path / "out.partial").exists()


def test_divergence_shows_in_the_lines_and_is_an_error(settings: dict, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(training.DivergedError, match=r"diverged \(the loss is nan at step 3\)\. Train anew with lower"):
        train(TrainConfig(**settings | {"learning_rate": 1e38}))
    error = capsys.readouterr().err
    assert "step 3/6: loss nan" in error
    assert "step 4/6" not in error
    assert not Path(settings["output"] + ".partial").exists()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"save_steps": 1, "logging_steps": 100}, "weights are not finite at step 4"),
        ({"save_steps": 3, "logging_steps": 1}, "the loss is nan at step 5"),
        ({"eval_steps": 1, "dev_share": 0.2, "batch_size": 4, "logging_steps": 100}, "not finite at step 4"),
        ({"save_steps": 3, "logging_steps": 100, "max_steps": 4}, "weights are not finite"),
        ({"save_steps": 3, "logging_steps": 1, "lora_rank": 2}, "the loss is nan at step 5"),
    ],
    ids=str,
)
def test_a_run_that_diverges_keeps_its_last_healthy_checkpoint(
    settings: dict, change: dict, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that isn't finite in step 4, as an overflow gives it."""
    original = AggretrieverTrainer.training_step

    def training_step(self: AggretrieverTrainer, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.state.global_step == 3:
            next(parameter for parameter in self.model.parameters() if parameter.grad is not None).grad.fill_(torch.nan)
        return result

    monkeypatch.setattr(AggretrieverTrainer, "training_step", training_step)
    with pytest.raises(training.DivergedError, match=found) as caught:
        train(TrainConfig(**settings | change))
    assert not Path(settings["output"]).exists()
    last = max((tmp_path / "out.partial").glob("checkpoint-*"))
    assert last.name == "checkpoint-3"
    for path in last.glob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())
    if "lora_rank" in change:
        assert "Train anew with lower learning rates and another output" in str(caught.value)
        return
    assert f"{last} stays, its weights finite: train on from it (--model)" in str(caught.value)
    monkeypatch.undo()
    again = {name: value for name, value in settings.items() if name not in ("lexical_dim", "cls_dim")}
    train(TrainConfig(**again | {"model": last, "output": str(tmp_path / "again"), "max_steps": 1}))


def test_a_run_that_stops_too_early_is_an_error(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AggretrieverTrainer, "fit", lambda self, checkpoint: None)
    with pytest.raises(ValueError, match="stopped at step 0 of 6"):
        train(TrainConfig(**settings))


def test_a_missing_extra_names_its_install_command(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None if name == "datasets" else "there")
    with pytest.raises(ImportError, match=r'datasets not installed: pip install "st-aggretriever\[train\]"'):
        train(TrainConfig(**settings))


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def flags(settings: dict[str, Any]) -> list[str]:
    given: list[str] = []
    for name, value in settings.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(value, bool):
            given.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
        elif value is not None:
            given += [f"--{name.replace('_', '-')}", *map(str, values)]
    return given


def test_every_setting_is_a_flag_with_the_same_default() -> None:
    parsed = vars(_parser().parse_args(["train", "--model", "m", "--pairs", "a", "b", "--output", "o"]))
    del parsed["function"]
    assert TrainConfig(**parsed) == TrainConfig(model="m", pairs=["a", "b"], output="o")
    assert parsed.keys() == {field.name for field in fields(TrainConfig)}
    given = ["--cls-dim", "3", "--include-prompt", "--learning-rate", "1e-3", "--resume", "--max-steps", "7"]
    parsed = vars(_parser().parse_args(["train", "--model", "m", "--pairs", "a", "--output", "o", *given]))
    chosen = [parsed[name] for name in ("cls_dim", "include_prompt", "learning_rate", "resume", "max_steps")]
    assert chosen == [3, True, 1e-3, True, 7]
    given = ["--fold-dims", "320", "128", "--fold-weights", "1", "0.5", "--no-report", "--report-to", "wandb"]
    parsed = vars(_parser().parse_args(["train", "--resume-from", "m", "--pairs", "a", "--output", "o", *given]))
    chosen = [parsed[name] for name in ("model", "fold_dims", "fold_weights", "report", "report_to")]
    assert chosen == ["m", [320, 128], [1.0, 0.5], False, ["wandb"]]


def test_the_defaults_shown_are_those_of_build_aggretriever() -> None:
    arguments = inspect.signature(build_aggretriever).parameters
    shown = {field.name: field.metadata["shown"] for field in fields(TrainConfig) if "build" in field.metadata}
    prompts = {name: shown.pop(name) for name in ("query_prompt", "document_prompt")}
    assert prompts == {"query_prompt": "", "document_prompt": ""}
    assert shown == {name: arguments[name].default for name in shown}
    options = {name for name, argument in arguments.items() if argument.kind is argument.KEYWORD_ONLY}
    assert options == {*shown, "prompts", "seed"}


def test_the_command_trains_and_says_what_it_wrote(settings: dict, capsys: pytest.CaptureFixture) -> None:
    assert main(["train", *flags(settings | {"epochs": 1})]) == 0
    output, error = capsys.readouterr()
    assert output == f"wrote {settings['output']}: 24 dimensions; settings and losses in train.json\n"
    assert "step 3/3: loss " in error
    assert load_aggretriever(settings["output"]).encode("a dog").shape == (24,)


def test_a_run_that_is_complete_is_not_said_to_be_written_again(settings: dict, capsys: pytest.CaptureFixture) -> None:
    settings |= {"epochs": 1, "resume": True}
    end = f"{settings['output']}: 24 dimensions; settings and losses in train.json\n"
    for expected in (f"wrote {end}", f"{settings['output']} is complete already\n{end}"):
        assert main(["train", *flags(settings)]) == 0
        assert capsys.readouterr().out == expected


def test_the_interrupted_command_says_how_to_go_on(settings: dict, capsys: pytest.CaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, 3)
        assert main(["train", *flags(settings | {"save_steps": 2})]) == 130
    assert "checkpoint-2 stays, --resume goes on from it" in capsys.readouterr().err


def test_an_interruption_without_words_is_called_one(
    settings: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("st_aggretriever.training.train", interrupted)
    assert main(["train", *flags(settings)]) == 130
    assert capsys.readouterr().err == "st-aggretriever: interrupted\n"


def test_help_and_settings_need_no_torch() -> None:
    code = (
        "import sys; from st_aggretriever import TrainConfig; from st_aggretriever.cli import _parser; _parser();"
        "TrainConfig(model='m', pairs=['p'], output='o'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_begun_with_settings_that_do_nothing_can_be_resumed() -> None:
    for given in ({"temperature": 3.0}, {"dev_split": "x"}, {"dev_metric": "nDCG@10"}):
        TrainConfig(model="m", pairs=["p"], output="o", resume=True, **given)  # type: ignore[arg-type]
