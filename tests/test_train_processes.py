"""Two processes train as one does with their pairs together."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import save_backbone
from training_runs import make_rows, weights, write_rows

from st_aggretriever import TrainConfig, load_aggretriever, train

SETTINGS = {
    "lexical_dim": 16,
    "cls_dim": 8,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "head_learning_rate": 2e-2,
    "mlm_head_learning_rate": 5e-3,
    "save_steps": 2,
    "logging_steps": 1,
    "device": "cpu",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_processes_that_share_their_passages_train_as_one(tmp_path: Path) -> None:
    """As torchrun starts them, over gloo: the pairs of both make the batch of one, whose weights come out."""
    model = save_backbone(tmp_path / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)[0]
    pairs = write_rows(tmp_path / "pairs.jsonl", make_rows(32, negatives=1))
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    arguments += [f"--model={model}", f"--output={tmp_path / 'two'}", "--batch-size=4", "--gather-across-devices"]
    command = [sys.executable, "-m", "st_aggretriever.cli", "train", "--pairs", pairs, *arguments]
    where = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            command,
            env=os.environ | where | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    one = train(TrainConfig(model=model, pairs=[pairs], output=str(tmp_path / "one"), batch_size=8, **SETTINGS))
    (output, error), (other_output, other_error) = (process.communicate() for process in started)
    assert [process.returncode for process in started] == [0, 0], error[-2000:] + other_error[-2000:]
    assert output.startswith("wrote ")
    assert other_output == ""
    assert "step 4/4: loss" in error
    assert "step 4/4: loss" not in other_error
    assert "4 pairs in each of 2 processes, 8 together, negatives of all" in error
    record = json.loads((tmp_path / "two" / "train.json").read_text())
    resolved = {name: record["resolved"][name] for name in ("processes", "batch_size_together", "steps_in_epoch")}
    assert resolved == {"processes": 2, "batch_size_together": 8, "steps_in_epoch": 4}
    alone = json.loads((tmp_path / "one" / "train.json").read_text())
    for entry, expected in zip(record["losses"], alone["losses"], strict=True):
        assert entry["loss"] == pytest.approx(expected["loss"], abs=1e-3)
    two = weights(load_aggretriever(tmp_path / "two"))
    apart = {name: float((two[name] - tensor.cpu()).abs().max()) for name, tensor in weights(one).items()}
    # A key's bias shifts all scores of a query alike: without a gradient, Adam takes its steps from rounding.
    assert {name: gap for name, gap in apart.items() if gap > 1e-3 and not name.endswith("key.bias")} == {}
    assert not (tmp_path / "two.partial").exists()


def test_too_few_pairs_for_all_processes_are_refused(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="the number of pairs, 24 for 4 processes, got 8"):
        train(TrainConfig(**settings))


def test_the_others_wait_for_a_teacher_longer_than_for_a_step(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = {}
    for teacher in ("bm25", "data", None):

        def found(config: TrainConfig, resolved: dict, data: object, args: Any) -> None:
            waits[config.teacher] = args.ddp_timeout
            raise InterruptedError

        monkeypatch.setattr("st_aggretriever.training._teach", found)
        monkeypatch.setattr("st_aggretriever.readers.training.TrainingData.check_scores", lambda self: None)
        with pytest.raises(InterruptedError):
            train(TrainConfig(**settings, teacher=teacher))
    assert waits["bm25"] > 86_400 > waits["data"] == waits[None]


def test_a_process_of_a_group_ends_at_once_after_a_failure(tmp_path: Path) -> None:
    """Whatever threads are left, as gloo's are: torchrun would wait for 30 s, and then kill it."""
    code = (
        "import sys, threading, time, torch\n"
        "from st_aggretriever.cli import main, training\n"
        "def fail(args):\n"
        f"    torch.distributed.init_process_group('gloo', 'file://{tmp_path}/rendezvous', rank=0, world_size=1)\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    raise ValueError('no')\n"
        "training._train = fail\n"
        "sys.exit(main(['train', '--model', 'm', '--pairs', 'p', '--output', 'o']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (2, "st-aggretriever: no\n")
