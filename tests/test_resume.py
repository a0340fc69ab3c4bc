"""The same weights, whatever happens on the way: interruptions, kills, evaluations."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_backbone
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.base.evaluation import BaseEvaluator
from training_runs import die_at, differing, interrupt, make_rows, record_inputs, weights, write_rows

from st_aggretriever import (
    AggretrieverLoss,
    TrainConfig,
    build_aggretriever,
    load_aggretriever,
    run_folder,
    train,
    trainer,
)
from st_aggretriever.atomic import lock_folder
from st_aggretriever.trainer import AggretrieverTrainer


@pytest.fixture(scope="module")
def uninterrupted(tiny_bert: str, pairs: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after six steps by ``settings``, without checkpoints."""
    output = str(tmp_path_factory.mktemp("uninterrupted") / "out")
    config = TrainConfig(
        model=tiny_bert, pairs=[pairs], output=output, lexical_dim=16, cls_dim=8, batch_size=8, epochs=2,
        learning_rate=1e-2, save_steps=0, logging_steps=1, device="cpu", report=False,
    )  # fmt: skip
    return weights(train(config))


def test_the_same_seed_gives_the_same_weights(settings: dict, uninterrupted: dict) -> None:
    torch.manual_seed(99)  # The caller's own random state doesn't count.
    assert differing(weights(train(TrainConfig(**settings))), uninterrupted) == set()


def test_the_seed_reaches_the_new_weights_and_the_order(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_inputs(monkeypatch)
    models = []
    settings["learning_rate"] = 1e-60  # no step at all in float32
    for seed in (0, 1):
        settings["output"] += str(seed)
        models.append(weights(train(TrainConfig(**settings, seed=seed, max_steps=1))))
    assert differing(*models) == {"1.linear.weight", "3.linear.weight", "3.linear.bias"}
    assert sorted(seen[0][0]) != sorted(seen[2][0])  # other queries in the first batch


# Steps 1-3 are the first epoch, 4-6 the second: resumed inside one, at its boundary, in the second, and after the end.
@pytest.mark.parametrize(("save_steps", "death", "last"), [(2, 4, 2), (3, 4, 3), (2, 6, 4), (1, 6, 5)])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    settings: dict, uninterrupted: dict, save_steps: int, death: int, last: int, tmp_path: Path
) -> None:
    settings["save_steps"] = save_steps
    assert f"checkpoint-{last} stays, --resume goes on from it" in interrupt(settings, death)
    assert not Path(settings["output"]).exists()
    assert (tmp_path / "out.partial" / f"checkpoint-{last}").is_dir()
    model = train(TrainConfig(**settings, resume=True))
    assert differing(weights(model), uninterrupted) == set()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    record = json.loads((tmp_path / "out" / "train.json").read_text())
    assert record["steps_before_resuming"] == last
    assert [entry["step"] for entry in record["losses"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "options",
    [
        {"mini_batch_size": 3, "negatives": 2, "fold_dims": [8]},
        {"teacher": "bm25", "negatives": 1},
        {"lora_rank": 2, "negatives": 0, "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_a_resumed_run_ends_alike_with_every_loss(settings: dict, options: dict, tmp_path: Path) -> None:
    """In the second epoch, whose negatives are another draw than the first's."""
    settings |= options | {"pairs": [write_rows(tmp_path / "negatives.jsonl", make_rows(24, negatives=3))]}
    expected = weights(train(TrainConfig(**settings)))
    settings |= {"output": str(tmp_path / "killed"), "save_steps": 1}
    assert "checkpoint-4 stays" in interrupt(settings, 5)
    assert differing(weights(train(TrainConfig(**settings, resume=True))), expected) == set()


@pytest.mark.parametrize(
    ("logging_steps", "save_steps", "death"), [(4, 3, 4), (4, 3, 6), (6, 2, 5), (100, 1, 3), (2, 2, 4)]
)
def test_a_resumed_run_logs_the_losses_of_an_uninterrupted_one(
    settings: dict, logging_steps: int, save_steps: int, death: int, tmp_path: Path
) -> None:
    """Wherever its checkpoint lies between two lines, whose means they are."""
    settings |= {"logging_steps": logging_steps, "save_steps": save_steps}
    train(TrainConfig(**settings))
    settings["output"] = str(tmp_path / "killed")
    interrupt(settings, death)
    train(TrainConfig(**settings, resume=True))
    expected, found = (json.loads((tmp_path / name / "train.json").read_text()) for name in ("out", "killed"))
    assert found["steps_before_resuming"] > 0
    assert found["losses"] == expected["losses"]


def test_killed_at_random_moments_it_ends_alike_and_no_checkpoint_is_corrupt(tiny_bert: str) -> None:
    """By SIGKILL, with the cached loss; the benchmark itself does it ten times to four kinds of runs."""
    script = Path(__file__).parent.parent / "benchmarks" / "kill_and_resume.py"
    command = [sys.executable, str(script), "--model", tiny_bert, "--kinds", "cached", "--kills", "3"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])["results"]["cached"]
    assert found["kills"] == 3
    assert (found["corrupt"], found["equal"]) == (0, True)


def test_removing_an_old_checkpoint_takes_its_name_first(
    settings: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    original = trainer.shutil.rmtree

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(Path(path).name)
        original(path, *args, **kwargs)

    monkeypatch.setattr(trainer.shutil, "rmtree", rmtree)
    settings["save_steps"] = 1
    interrupt(settings, 5)
    assert set(seen) == {"writing"}


@pytest.mark.parametrize("begun", [False, True])
def test_nothing_to_resume_is_said(settings: dict, capsys: pytest.CaptureFixture, begun: bool) -> None:
    settings |= {"max_steps": 1, "resume": True}
    if begun:  # a kill before the first checkpoint
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_folder.shutil, "rmtree", lambda *args, **kwargs: None)
            die_at(patch, 1)
            with pytest.raises(KeyboardInterrupt):
                train(TrainConfig(**settings))
        capsys.readouterr()
    train(TrainConfig(**settings))
    assert "nothing to resume in" in capsys.readouterr().err


def test_a_trained_model_that_cannot_take_its_place_stays(
    settings: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output, original = Path(settings["output"]), run_folder._card
    output.mkdir()  # empty, which is allowed

    def card(*args: Any) -> str:
        (output / "train.log").write_text("somebody else's, written meanwhile")
        return original(*args)

    monkeypatch.setattr(run_folder, "_card", card)
    with pytest.raises(OSError, match=r"cannot write the model .*It is trained, and whole in .*out\.partial/model:"):
        train(TrainConfig(**settings | {"max_steps": 1, "save_steps": 0}))
    assert (output / "train.log").exists()
    assert load_aggretriever(tmp_path / "out.partial" / "model").encode("a dog").any()


def test_a_run_ends_in_the_same_words_after_settings_were_added(settings: dict) -> None:
    """A finished run of an older version lacks the settings that came later: it had their defaults."""
    train(TrainConfig(**settings, max_steps=1))
    path = Path(settings["output"]) / "train.json"
    record = json.loads(path.read_text())
    for name in ("fold_dims", "teacher", "lora_rank"):
        del record["config"][name]
    path.write_text(json.dumps(record))
    train(TrainConfig(**settings, max_steps=1, resume=True))
    with pytest.raises(ValueError, match=r"other settings: lora_rank \(0, now 2\)"):
        train(TrainConfig(**settings, max_steps=1, resume=True, lora_rank=2))


def test_a_run_that_ended_before_it_was_saved_takes_no_further_step(
    settings: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings |= {"max_steps": 5, "save_steps": 4}  # the end, inside an epoch, has its checkpoint too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "_card", lambda *args: (_ for _ in ()).throw(RuntimeError("disk full")))
        with pytest.raises(OSError, match=r"cannot write the model .*out: disk full"):
            train(TrainConfig(**settings))
    assert not Path(settings["output"]).exists()
    (tmp_path / "out.partial" / "model" / "stale").write_text("from the first attempt")
    last = weights(load_aggretriever(tmp_path / "out.partial" / "checkpoint-5"))
    die_at(monkeypatch, 6, AssertionError("a step too many"))
    assert differing(weights(train(TrainConfig(**settings, resume=True))), last) == set()
    assert not (tmp_path / "out" / "stale").exists()


def test_a_half_written_checkpoint_is_never_taken_up(settings: dict, uninterrupted: dict, tmp_path: Path) -> None:
    settings["save_steps"] = 2
    original = AggretrieverTrainer._save_rng_state

    def killed(self: AggretrieverTrainer, folder: str) -> None:
        if self.state.global_step == 4:
            raise KeyboardInterrupt
        original(self, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AggretrieverTrainer, "_save_rng_state", killed)
        with pytest.raises(KeyboardInterrupt):
            train(TrainConfig(**settings))
    partial = tmp_path / "out.partial"
    assert [path.name for path in partial.glob("checkpoint-*")] == ["checkpoint-2"]
    (partial / "writing" / "checkpoint-4").mkdir(parents=True)  # What kill -9 would leave.
    (partial / "writing" / "checkpoint-4" / "stale").write_text("half")
    interrupt(settings | {"resume": True}, 5)
    assert (partial / "checkpoint-4").is_dir()
    assert not (partial / "checkpoint-4" / "stale").exists()
    assert differing(weights(train(TrainConfig(**settings, resume=True))), uninterrupted) == set()


def test_a_full_disk_is_an_error_and_keeps_the_last_checkpoint(settings: dict, tmp_path: Path) -> None:
    settings["save_steps"] = 2
    original = AggretrieverTrainer._save_optimizer_and_scheduler

    def full(self: AggretrieverTrainer, folder: str) -> None:
        if self.state.global_step == 4:
            raise RuntimeError("no space left")
        original(self, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AggretrieverTrainer, "_save_optimizer_and_scheduler", full)
        with pytest.raises(OSError, match=r"cannot write the checkpoint .*checkpoint-4: no space left"):
            train(TrainConfig(**settings))
    assert sorted(path.name for path in (tmp_path / "out.partial").iterdir()) == [".lock", "checkpoint-2", "train.json"]


def test_resume_refuses_a_damaged_run_and_names_the_file(settings: dict, tmp_path: Path) -> None:
    settings["save_steps"] = 1
    interrupt(settings, 3)
    partial = tmp_path / "out.partial"
    files = [path for path in (partial / "checkpoint-2").rglob("*") if path.is_file()]
    needed = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "model.safetensors", "files.json"}
    assert needed <= {path.name for path in files}
    for path in files:
        whole = path.read_bytes()
        for damaged in (None, whole[:-1], bytes([whole[0] ^ 1]) + whole[1:]) if whole else (None,):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(
                ValueError, match=f"{path.name}.* Delete .*checkpoint-2 to go on from the checkpoint be"
            ):
                trainer.check_checkpoint(partial / "checkpoint-2")
        path.write_bytes(whole)
    trainer.check_checkpoint(partial / "checkpoint-2")
    (partial / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"optimizer\.pt is missing"):
        train(TrainConfig(**settings, resume=True))
    record = partial / "train.json"
    whole_record = record.read_text()
    for text, sentence in (
        (whole_record[:50], "broken"),
        ("[1]", "not the record"),
        ('{"config": 1}', "not the record"),
    ):
        record.write_text(text)
        with pytest.raises(ValueError, match=f"train.json is {sentence}"):
            run_folder.read_record(partial)
    record.write_text(whole_record)
    with lock_folder(partial), pytest.raises(BlockingIOError, match="another process is writing"):
        run_folder.working_folder(partial, {"config": {}}, first=True).__enter__()


def test_the_last_two_checkpoints_stay_and_load_as_models(settings: dict, tmp_path: Path) -> None:
    settings["save_steps"] = 1
    interrupt(settings, 5)
    names = sorted(path.name for path in (tmp_path / "out.partial").glob("*"))
    assert names == [".lock", "checkpoint-3", "checkpoint-4", "train.json"]
    assert load_aggretriever(tmp_path / "out.partial" / "checkpoint-4").encode("a dog").shape == (24,)


def test_what_is_no_checkpoint_stays_beside_them(settings: dict, uninterrupted: dict, tmp_path: Path) -> None:
    settings["save_steps"] = 1
    interrupt(settings, 3)
    others = ["checkpoint-2-backup", "checkpoint-x", "checkpoint-", "my-checkpoint-1"]
    for name in others:
        shutil.copytree(tmp_path / "out.partial" / "checkpoint-2", tmp_path / "out.partial" / name)
    interrupt(settings | {"resume": True}, 6)
    left = {path.name for path in (tmp_path / "out.partial").iterdir()}
    assert left == {*others, "checkpoint-4", "checkpoint-5", ".lock", "train.json"}
    assert differing(weights(train(TrainConfig(**settings, resume=True))), uninterrupted) == set()


def test_an_interrupted_run_without_checkpoint_leaves_nothing(settings: dict, tmp_path: Path) -> None:
    assert "nothing stays" in interrupt(settings, 2)
    assert list(tmp_path.iterdir()) == []


def test_resume_refuses_other_settings_and_other_pairs(settings: dict, tmp_path: Path) -> None:
    settings["save_steps"] = 2
    interrupt(settings, 3)
    with pytest.raises(ValueError, match=r"other settings: batch_size \(8, now 4\)"):
        train(TrainConfig(**settings | {"batch_size": 4}, resume=True))
    other = write_rows(tmp_path / "other.jsonl", make_rows(24, seed=1))
    with pytest.raises(ValueError, match="had other pairs"):
        train(TrainConfig(**settings | {"pairs": [other]}, resume=True))
    with pytest.raises(ValueError, match="holds an interrupted run"):
        train(TrainConfig(**settings))
    record = json.loads((tmp_path / "out.partial" / "train.json").read_text())
    (tmp_path / "out.partial" / "train.json").write_text(json.dumps(record | {"processes": 2}))
    with pytest.raises(ValueError, match=r"other settings: processes \(2, now 1\)"):
        train(TrainConfig(**settings, resume=True))
    assert (tmp_path / "out.partial" / "checkpoint-2").is_dir()


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_is_alive_is_neither_resumed_nor_called_interrupted(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    settings["save_steps"] = 2
    interrupt(settings, 3)
    monkeypatch.setattr("st_aggretriever.training._open_data", lambda config: pytest.fail("it has begun to work"))
    with (
        lock_folder(tmp_path / "out.partial"),
        pytest.raises(BlockingIOError, match=r"another process is writing .*Wait until it has ended"),
    ):
        train(TrainConfig(**settings, resume=resume))
    (tmp_path / "out.partial" / "train.json").unlink()  # somebody else's folder then, which gets no lock from us
    (tmp_path / "out.partial" / ".lock").unlink()
    if not resume:
        with pytest.raises(ValueError, match="holds an interrupted run"):
            train(TrainConfig(**settings))
        assert not (tmp_path / "out.partial" / ".lock").exists()


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}], ids=str)
def test_resume_refuses_another_starting_model(settings: dict, options: dict, tmp_path: Path) -> None:
    """Of the same name: a checkpoint of adapters has nothing else of it."""
    settings |= options | {"model": save_backbone(tmp_path / "bert")[0], "save_steps": 2}
    expected = weights(train(TrainConfig(**settings)))
    settings["output"] = str(tmp_path / "killed")
    interrupt(settings, 3)
    save_backbone(tmp_path / "bert", seed=7)
    with pytest.raises(
        ValueError, match=r"started from another model: .*bert has changed since\. Put the old one back"
    ):
        train(TrainConfig(**settings, resume=True))
    assert (tmp_path / "killed.partial" / "checkpoint-2").is_dir()
    save_backbone(tmp_path / "bert")
    interrupt(settings | {"resume": True}, 5)
    path = tmp_path / "killed.partial" / "train.json"
    record = json.loads(path.read_text())
    assert len(record.pop("model_sha256")) == 64
    path.write_text(json.dumps(record))  # as the first runs have it
    assert differing(weights(train(TrainConfig(**settings, resume=True))), expected) == set()


def test_a_run_goes_on_where_its_starting_model_has_moved(settings: dict, tmp_path: Path) -> None:
    settings |= {"model": save_backbone(tmp_path / "bert")[0], "save_steps": 2}
    expected = weights(train(TrainConfig(**settings)))
    settings["output"] = str(tmp_path / "killed")
    interrupt(settings, 3)
    moved = settings | {"model": str((tmp_path / "bert").rename(tmp_path / "moved"))}
    save_backbone(tmp_path / "other", seed=7)
    with pytest.raises(ValueError, match=r"had other settings: model \(.*bert, now .*other\)"):
        train(TrainConfig(**settings | {"model": str(tmp_path / "other")}, resume=True))
    again = TrainConfig(**moved, resume=True)
    record = tmp_path / "killed.partial" / "train.json"
    content = record.read_text()
    # As of an Aggretriever equal to that backbone with new heads, which learn at another rate; as of an older version.
    for other in ('"new_heads": false', '"of older runs": null'):
        record.write_text(content.replace('"new_heads": true', other))
        with pytest.raises(ValueError, match=r"had other settings: model \(.*bert, now .*moved\)"):
            train(again)
    record.write_text(content)
    assert differing(weights(train(again)), expected) == set()
    again.model = str((tmp_path / "moved").rename(tmp_path / "once more"))
    assert differing(weights(train(again)), expected) == set()  # as it is, finished


def test_resume_starts_a_new_run_and_takes_a_finished_one_as_it_is(settings: dict, tmp_path: Path) -> None:
    first = weights(train(TrainConfig(**settings, resume=True)))
    (tmp_path / "out.partial").mkdir()  # Killed between the last rename and the removal of this folder.
    again = train(TrainConfig(**settings, resume=True))
    assert differing(weights(again), first) == set()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ValueError, match="other settings"):
        train(TrainConfig(**settings | {"epochs": 1}, resume=True))
    other = write_rows(tmp_path / "other.jsonl", make_rows(24, seed=1))
    with pytest.raises(ValueError, match="had other pairs"):
        train(TrainConfig(**settings | {"pairs": [other]}, resume=True))


class Falling(BaseEvaluator):
    """Says of each checkpoint that it is worse than the one before, and remembers its weights."""

    primary_metric = "score"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, torch.Tensor]] = []

    def __call__(self, model: SentenceTransformer, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.seen.append(weights(model))
        return {"score": -float(len(self.seen))}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("cache")))  # where a teacher's scores are kept


def test_the_best_checkpoint_is_restored_whole(tiny_bert: str, tmp_path: Path) -> None:
    model = build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=8, aggregation="linear")
    rows = make_rows(24)
    judge = Falling()
    args = SentenceTransformerTrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=8, learning_rate=1e-2, save_steps=1, save_total_limit=2,
        eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, metric_for_best_model="score",
        greater_is_better=True, report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    columns = {name: [row[name] for row in rows] for name in ("query", "passage")}
    run = AggretrieverTrainer(
        model=model, args=args, train_dataset=Dataset.from_dict(columns), loss=AggretrieverLoss(model), evaluator=judge
    )
    run.fit()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert differing(weights(model), judge.seen[0]) == set()
    moved = {name.split(".")[0] for name in differing(weights(model), judge.seen[-1])}
    assert moved == {"0", "1", "2", "3"}  # encoder, term weight, linear aggregation, [CLS] projection
    recorded = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert recorded["best_model_checkpoint"] == str(tmp_path / "checkpoint-1")
    assert sorted(path.name for path in tmp_path.glob("check*")) == ["checkpoint-1", "checkpoint-4"]
