"""The report of a training run, and what it says without matplotlib."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from training_runs import make_rows, write_rows

from st_aggretriever import TrainConfig, report, train


@pytest.fixture
def record() -> dict[str, Any]:
    """Of a run that was resumed at step 40 and stopped early at 60 of 100."""
    losses = [
        {"step": step, "epoch": step / 50, "loss": 4.0 / step, "full": 2.0 / step, "cls": 1.0 / step,
         "lexical": 1.0 / step, "learning_rate": 1e-4, "grad_norm": 1.0}
        for step in range(2, 62, 2)
    ]  # fmt: skip
    return {
        "config": {"model": "some/backbone", "pairs": ["p.jsonl"], "output": "out", "resume": True, "batch_size": 16,
                   "patience": 2, "fold_dims": [320], "learning_rate": None},
        "pairs": {"p.jsonl": 1234},
        "data": {"p.jsonl": {"format": "pairs", "rows": 1234, "bad_rows": 5}},
        "teacher": {"name": "bm25"},
        "resolved": {"processes": 2, "batch_size_together": 32, "pairs": 1200, "steps": 100, "device": "cpu",
                     "precision": "fp32", "learning_rate": 1e-4, "head_learning_rate": 1e-3},
        "steps": 60, "best_step": 20, "steps_before_resuming": 40, "seconds": 30.0,
        "memory": {"rss_gb": 1.234, "gpu_gb": None},
        "losses": losses,
        "dev": [{"step": 20, "RR@10": 0.5, "nDCG@10": 0.6}, {"step": 40, "RR@10": 0.4, "nDCG@10": 0.55},
                {"step": 60, "RR@10": 0.3, "nDCG@10": 0.5}],
    }  # fmt: skip


def test_the_report_says_data_settings_losses_dev_time_and_memory(record: dict, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.write_report(record, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "# Training from some/backbone" in text
    assert "60 of 100 steps of 32 pairs (16 in each of 2), 30 s on cpu (fp32)" in text
    assert "| p.jsonl | pairs | 1,234 | 5 |" in text
    assert "1,200 pairs were trained on." in text
    assert "Teacher: bm25." in text
    assert "| batch_size | 16 |" in text
    assert "| fold_dims | [320] |" in text
    assert "| head_learning_rate | 0.001 |" in text
    assert "| output |" not in text
    assert "| step | loss | full | cls | lexical |" in text
    assert "| 60 | 0.0667 | 0.0333 | 0.0167 | 0.0167 |" in text  # 4 / 60, 2 / 60, 1 / 60
    assert "The weights of step 20 were kept. Stopped early: 2 evaluations without a better one." in text
    assert "| 40 | 0.4000 | 0.5500 |" in text
    assert "- 30.0 s since step 40, 1.5 s a step" in text
    assert "- 1.23 GB of memory" in text
    assert "GPU" not in text
    assert "![losses, learning rate and dev figures by step](curves.png)" in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(text.splitlines()) < 80  # a page


def test_the_report_counts_what_was_held_out_among_the_rows(record: dict, tmp_path: Path) -> None:
    record["config"]["dev_share"] = 0.1
    record["data"]["p.jsonl"]["rows"] = 1200  # what is left to train on
    report.write_report(record, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| p.jsonl | pairs | 1,234 | 5 |" in text
    assert "1,200 pairs were trained on, 34 held out as the development set." in text


def test_a_teacher_on_this_machine_is_named_without_its_path(record: dict, tmp_path: Path) -> None:
    record["teacher"] = {"name": str(tmp_path / "my-agg")}
    report.write_report(record, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "Teacher: my-agg." in text
    assert str(tmp_path) not in text


def test_without_matplotlib_the_text_stands_alone(
    record: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report.write_report(record, tmp_path)
    assert 'pip install "st-aggretriever[plot]"' in (tmp_path / "report.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def test_an_evaluator_of_many_figures_shows_the_one_that_counts(record: dict, tmp_path: Path) -> None:
    for entry in record["dev"]:
        entry |= {f"figure {number}": 0.1 for number in range(20)} | {"score": 0.25}
    report.write_report(record, tmp_path)
    assert "| step | score |" in (tmp_path / "report.md").read_text()


def test_a_run_without_logged_step_has_a_report(record: dict, tmp_path: Path) -> None:
    report.write_report(record | {"losses": [], "dev": [], "steps": 0}, tmp_path)
    assert "no step was logged" in (tmp_path / "report.md").read_text()


def test_a_run_leaves_its_report_beside_the_model(settings: dict, tmp_path: Path) -> None:
    pairs = write_rows(tmp_path / "own.jsonl", make_rows(16))
    train(TrainConfig(**settings | {"report": True, "pairs": [pairs]}, max_steps=2))
    text = (Path(settings["output"]) / "report.md").read_text()
    losses = json.loads((Path(settings["output"]) / "train.json").read_text())["losses"]
    assert f"| 2 | {losses[1]['loss']:.4f} |" in text
    assert "| own.jsonl | " in text
    assert str(tmp_path) not in text
