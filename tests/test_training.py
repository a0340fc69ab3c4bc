import inspect
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB_SIZE, WORDS, save_backbone
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.base.evaluation import BaseEvaluator

from st_aggretriever import AggretrieverLoss, TrainConfig, build_aggretriever, load_aggretriever, train, training
from st_aggretriever.cli import _parser, main
from st_aggretriever.modules import MLMEncoder
from st_aggretriever.trainer import AggretrieverTrainer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The matrices are too small for more.
    yield
    torch.set_num_threads(threads)


def make_rows(count: int, negatives: int = 0, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs that share four words; every text is another."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        words = rng.sample(WORDS, 14)
        row: dict[str, Any] = {"query": f"{number} {' '.join(words[:6])}", "passage": f"{' '.join(words[2:])} {number}"}
        if negatives:
            row["negatives"] = [f"{' '.join(rng.sample(WORDS, 8))} {number} {n}" for n in range(negatives)]
        rows.append(row)
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """24 pairs: three steps of eight in an epoch."""
    return write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", make_rows(24))


@pytest.fixture
def settings(tiny_bert: str, pairs: str, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": tiny_bert,
        "pairs": [pairs],
        "output": str(tmp_path / "out"),
        "lexical_dim": 16,
        "cls_dim": 8,
        "batch_size": 8,
        "epochs": 2,
        "learning_rate": 1e-2,
        "save_steps": 0,
        "logging_steps": 1,
        "device": "cpu",
    }


def weights(model: SentenceTransformer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> set[str]:
    assert left.keys() == right.keys()
    return {name for name in left if not torch.equal(left[name], right[name])}


def die_at(
    monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException | type[BaseException] = KeyboardInterrupt
) -> None:
    """Interrupt the next run in the middle of its step ``step`` (from 1)."""
    original = AggretrieverTrainer.training_step

    def training_step(self: AggretrieverTrainer, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.state.global_step + 1 == step:
            raise error
        return result

    monkeypatch.setattr(AggretrieverTrainer, "training_step", training_step)


def interrupt(settings: dict[str, Any], step: int) -> str:
    """Run until the middle of a step; returns what the interruption says."""
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, step)
        with pytest.raises(KeyboardInterrupt) as caught:
            train(TrainConfig(**settings))
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# The same weights


@pytest.fixture(scope="module")
def uninterrupted(tiny_bert: str, pairs: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after six steps by ``settings``, without checkpoints."""
    torch.set_num_threads(1)
    output = str(tmp_path_factory.mktemp("uninterrupted") / "out")
    config = TrainConfig(
        model=tiny_bert, pairs=[pairs], output=output, lexical_dim=16, cls_dim=8, batch_size=8, epochs=2,
        learning_rate=1e-2, save_steps=0, logging_steps=1, device="cpu",
    )  # fmt: skip
    return weights(train(config))


def test_the_same_seed_gives_the_same_weights(settings: dict, uninterrupted: dict) -> None:
    torch.manual_seed(99)  # The caller's own random state doesn't count.
    assert differing(weights(train(TrainConfig(**settings))), uninterrupted) == set()


def test_the_seed_reaches_the_new_weights_and_the_order(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_inputs(monkeypatch)
    models = []
    for seed in (0, 1):
        settings["output"] += str(seed)
        models.append(weights(train(TrainConfig(**settings, seed=seed, max_steps=1))))  # a step of warm-up: rate 0
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


def test_a_run_that_ended_before_it_was_saved_takes_no_further_step(
    settings: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings |= {"max_steps": 5, "save_steps": 4}  # the end, inside an epoch, has its checkpoint too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_card", lambda *args: (_ for _ in ()).throw(RuntimeError("disk full")))
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
    assert sorted(path.name for path in (tmp_path / "out.partial").iterdir()) == ["checkpoint-2", "train.json"]


def test_the_last_two_checkpoints_stay_and_load_as_models(settings: dict, tmp_path: Path) -> None:
    settings["save_steps"] = 1
    interrupt(settings, 5)
    names = sorted(path.name for path in (tmp_path / "out.partial").glob("*"))
    assert names == ["checkpoint-3", "checkpoint-4", "train.json"]
    assert load_aggretriever(tmp_path / "out.partial" / "checkpoint-4").encode("a dog").shape == (24,)


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
    assert (tmp_path / "out.partial" / "checkpoint-2").is_dir()


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
    trainer = AggretrieverTrainer(
        model=model, args=args, train_dataset=Dataset.from_dict(columns), loss=AggretrieverLoss(model), evaluator=judge
    )
    trainer.fit()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert differing(weights(model), judge.seen[0]) == set()
    moved = {name.split(".")[0] for name in differing(weights(model), judge.seen[-1])}
    assert moved == {"0", "1", "2", "3"}  # encoder, term weight, linear aggregation, [CLS] projection
    recorded = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert recorded["best_model_checkpoint"] == str(tmp_path / "checkpoint-1")
    assert sorted(path.name for path in tmp_path.glob("check*")) == ["checkpoint-1", "checkpoint-4"]


# ---------------------------------------------------------------------------------------------------------------------
# What is trained, on what


VARIANTS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {"full", "cls", "lexical"}),
    ({"aggregation": "linear"}, {"full", "cls", "lexical"}),
    ({"pooling": "tokens"}, {"full", "cls", "lexical"}),
    ({"pooling": "cls"}, {"full"}),
    ({"pooling": "mean"}, {"full"}),
    ({"pooling": "mean+cls"}, {"full", "cls", "mean"}),
    ({"cls_dim": 0}, {"full"}),
    ({"lexical_dim": 0}, {"full"}),
    ({"cls_dim": 0, "term_weight": "none"}, {"full"}),  # no head at all
    ({"cls_weight": 0.0}, {"full", "lexical"}),
]


@pytest.mark.parametrize(("options", "parts"), VARIANTS, ids=[str(options) for options, _ in VARIANTS])
def test_every_parameter_is_trained_and_every_part_logged(
    settings: dict, options: dict, parts: set, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    original = AggretrieverTrainer.training_step
    untouched = []

    def training_step(self: AggretrieverTrainer, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        untouched.extend(name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None)
        return result

    monkeypatch.setattr(AggretrieverTrainer, "training_step", training_step)
    train(TrainConfig(**settings | options, max_steps=1))
    assert untouched == []
    (entry,) = json.loads((Path(settings["output"]) / "train.json").read_text())["losses"]
    assert set(entry) - {"loss", "grad_norm", "learning_rate", "epoch", "step"} == parts
    assert entry["loss"] == pytest.approx(sum(entry[part] for part in parts), abs=1e-3)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step 1/1: loss ")]
    assert all(part in line for part in parts)


def record_inputs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[tuple[int, ...]], int]]:
    """The token ids of each text, and the length of its prompt, that go into the encoder from here on."""
    original, seen = MLMEncoder.forward, []

    def forward(self: MLMEncoder, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        rows = zip(features["input_ids"].tolist(), features["attention_mask"].sum(1).tolist(), strict=True)
        prompt = features.get("prompt_length")
        seen.append(([tuple(ids[:length]) for ids, length in rows], 0 if prompt is None else int(prompt)))
        return original(self, features, **kwargs)

    monkeypatch.setattr(MLMEncoder, "forward", forward)
    return seen


@pytest.mark.parametrize("prompts", [{}, {"query_prompt": "what: ", "document_prompt": "the word: "}], ids=str)
def test_training_sees_the_tokens_that_encode_sees(
    settings: dict, prompts: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = make_rows(8, negatives=2)
    pairs = [write_rows(tmp_path / "negatives.jsonl", rows)]
    seen = record_inputs(monkeypatch)
    model = train(TrainConfig(**settings | {"pairs": pairs}, max_steps=1, query_length=7, document_length=9, **prompts))
    columns = seen.copy()
    assert [max(map(len, texts)) for texts, _ in columns] == [7, 9, 9, 9]
    seen.clear()
    model.encode_query([row["query"] for row in rows])
    for texts in ([row["passage"] for row in rows], *zip(*(row["negatives"] for row in rows), strict=True)):
        model.encode_document(list(texts))
    assert [(sorted(texts), prompt) for texts, prompt in columns] == [(sorted(texts), p) for texts, p in seen]
    assert [prompt > 0 for _, prompt in columns] == [bool(prompts)] * 4


def test_no_text_comes_twice_in_a_batch(settings: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = make_rows(24)
    for number in range(6):  # Two questions, one passage; and one question, two passages.
        rows[number + 6]["passage"] = rows[number]["passage"]
        rows[number + 12]["query"] = rows[number]["query"]
    seen = record_inputs(monkeypatch)
    train(TrainConfig(**settings | {"pairs": [write_rows(tmp_path / "twice.jsonl", rows)]}))
    assert len(seen) == 12  # query and passage in six steps
    assert all(len(set(texts)) == len(texts) == 8 for texts, _ in seen)


def test_hard_negatives_are_negatives_of_every_query(settings: dict, tmp_path: Path) -> None:
    rows = make_rows(8, negatives=3)
    pairs = [write_rows(tmp_path / "negatives.jsonl", rows)]
    losses = []
    for count in (0, 3):
        output = str(tmp_path / f"out-{count}")
        # A tiny factor makes all scores alike: the loss is then the logarithm of the number of candidates.
        train(TrainConfig(**settings | {"pairs": pairs, "output": output}, negatives=count, scale=1e-6, max_steps=1))
        losses.append(json.loads(Path(output, "train.json").read_text())["losses"][0]["full"])
    assert losses == pytest.approx([torch.tensor(8.0).log().item(), torch.tensor(32.0).log().item()], abs=1e-3)


def test_learning_rates_follow_the_size_and_reach_their_modules(
    settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers: list[AggretrieverTrainer] = []
    monkeypatch.setattr(AggretrieverTrainer, "fit", lambda self, checkpoint: trainers.append(self))
    monkeypatch.setattr(training, "_check_result", lambda *args: None)

    def rates(number: int, **changes: Any) -> tuple[set[float], set[float]]:
        train(TrainConfig(**settings | {"learning_rate": None, "output": f"{settings['output']}-{number}"} | changes))
        trainer = trainers[-1]
        trainer.create_optimizer()
        heads = {id(p) for name, p in trainer.model.named_parameters() if not name.startswith("0.")}
        found: tuple[set[float], set[float]] = (set(), set())
        for group in trainer.optimizer.param_groups:
            for parameter in group["params"]:
                found[id(parameter) in heads].add(group["lr"])
        assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(
            list(trainer.model.parameters())
        )
        return found

    assert rates(1) == ({1e-4}, {1e-3})
    assert rates(2, learning_rate=2e-4) == ({2e-4}, {2e-3})
    assert rates(3, head_learning_rate=0.5) == ({1e-4}, {0.5})
    built = {"lexical_dim": None, "cls_dim": None, "model": f"{settings['output']}-1"}
    assert rates(4, **built) == ({1e-4}, {1e-4})  # its heads are not new
    monkeypatch.setattr(training, "SMALL_BACKBONE", 1000)
    assert rates(5) == ({5e-6}, {5e-6})


def test_an_encoder_takes_over_a_head(settings: dict, headless_bert: str, tiny_bert: str) -> None:
    model = train(TrainConfig(**settings | {"model": headless_bert}, mlm_head_from=tiny_bert, max_steps=1))
    donor = build_aggretriever(tiny_bert, lexical_dim=16).state_dict()
    name = next(name for name in donor if name.endswith("transform.dense.weight"))
    assert torch.equal(model.state_dict()[name], donor[name])  # the only step has a learning rate of 0


def test_training_goes_on_from_an_aggretriever(settings: dict, tmp_path: Path) -> None:
    first = weights(train(TrainConfig(**settings)))
    settings |= {"model": settings["output"], "output": str(tmp_path / "further")}
    with pytest.raises(ValueError, match=r"Aggretriever already and keeps its own lexical_dim, cls_dim\. Leave"):
        train(TrainConfig(**settings))
    del settings["lexical_dim"], settings["cls_dim"]
    second = weights(train(TrainConfig(**settings | {"learning_rate": 1e-30})))
    assert all(torch.allclose(first[name], second[name]) for name in first)  # it started there
    assert not (tmp_path / "further.partial").exists()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_are_trained_in_float32_whatever_the_arithmetic(settings: dict, precision: str, tmp_path: Path) -> None:
    save_backbone(tmp_path / "half")[1].half().save_pretrained(tmp_path / "half")
    model = train(TrainConfig(**settings | {"model": tmp_path / "half"}, precision=precision, max_steps=1))
    assert {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()} == {torch.float32}
    assert model.encode("a dog").dtype == "float32"


# ---------------------------------------------------------------------------------------------------------------------
# What is written


def test_the_written_model_is_the_trained_one(settings: dict) -> None:
    model = train(TrainConfig(**settings, query_prompt="what: "))
    loaded = load_aggretriever(settings["output"])
    assert differing(weights(model), weights(loaded)) == set()
    assert loaded.prompts["query"] == "what: "
    texts = ["quick brown fox", "a ship sails"]
    assert (model.encode_query(texts) == loaded.encode_query(texts)).all()
    card = (Path(settings["output"]) / "README.md").read_text()
    assert "trust_remote_code=True" in card
    assert card.index("load_aggretriever(") < card.index("SentenceTransformer(")


def test_the_record_holds_settings_data_versions_and_losses(settings: dict, pairs: str) -> None:
    train(TrainConfig(**settings, max_steps=2))
    record = json.loads((Path(settings["output"]) / "train.json").read_text())
    assert record["config"] == {field.name: getattr(TrainConfig(**settings, max_steps=2), field.name)
                                for field in fields(TrainConfig)}  # fmt: skip
    assert record["pairs"] == {pairs: 24}
    assert record["resolved"]["learning_rate"] == 1e-2
    assert record["resolved"]["head_learning_rate"] == pytest.approx(1e-1)
    assert (record["resolved"]["steps"], record["resolved"]["device"], record["resolved"]["precision"]) == (
        2,
        "cpu",
        "fp32",
    )
    assert record["versions"]["torch"] == torch.__version__
    assert [entry["step"] for entry in record["losses"]] == [1, 2]
    assert record["seconds"] > 0


def test_an_empty_output_folder_will_do(settings: dict) -> None:
    Path(settings["output"]).mkdir()
    train(TrainConfig(**settings, max_steps=1))
    assert (Path(settings["output"]) / "modules.json").is_file()


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
    few, uneven = make_rows(16, negatives=2), make_rows(16, negatives=2)
    few[6]["negatives"].pop()
    uneven[3]["negatives"].append(uneven[3]["passage"])
    same = make_rows(24)
    for row in same:
        row["passage"] = "the same"
    write_rows(folder / "few.jsonl", few)
    write_rows(folder / "uneven.jsonl", uneven)
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
    yield {"pairs": [folder / "same.jsonl"]}, "the pairs fill only 0 of 3 batches of 8 in which no text comes twice"
    yield {"batch_size": 25}, "batch_size must be at most the number of pairs, 24, got 25"
    yield {"output": folder / "full"}, "full is not empty; nothing was overwritten"
    yield {"output": folder / "file"}, "file is a file; nothing was overwritten"
    yield {"model": folder / "absent"}, "absent"
    yield {"lexical_dim": VOCAB_SIZE}, f"lexical_dim must be at most V // 2 = {VOCAB_SIZE // 2}, got {VOCAB_SIZE}"
    yield {"pooling": "max"}, "pooling must be one of"
    yield {"precision": "fp16"}, "precision must be fp32 or bf16 without a GPU"


def test_bad_input_is_one_sentence_with_exit_code_2_and_leaves_no_trace(
    settings: dict, headless_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    cases = [*bad_inputs(tmp_path), ({"model": headless_bert}, "pooling='tokens'")]
    before = sorted(tmp_path.rglob("*"))
    for change, message in cases:
        assert main(["train", *flags(settings | change)]) == 2, message
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("st-aggretriever: ")
        assert message in error
        assert sorted(tmp_path.rglob("*")) == before, message
    assert (tmp_path / "full" / "mine.txt").read_text() == "keep me"


def test_a_passage_among_its_own_negatives_is_refused(tmp_path: Path) -> None:
    rows = make_rows(4, negatives=2)
    rows[2]["negatives"][1] = rows[2]["passage"]
    path = write_rows(tmp_path / "own.jsonl", rows)
    with pytest.raises(ValueError, match="line 3: the passage stands among its own negatives"):
        training.read_columns([path], None)
    assert list(training.read_columns([path], 1).columns) == ["query", "passage", "negative_1"]


def test_divergence_shows_in_the_lines_and_is_an_error(settings: dict, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ValueError, match="the training diverged"):
        train(TrainConfig(**settings | {"learning_rate": 1e38}))
    assert "loss nan" in capsys.readouterr().err


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
        if value is not None:
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


def test_the_interrupted_command_says_how_to_go_on(settings: dict, capsys: pytest.CaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, 3)
        assert main(["train", *flags(settings | {"save_steps": 2})]) == 130
    assert "checkpoint-2 stays, --resume goes on from it" in capsys.readouterr().err


def test_help_and_settings_need_no_torch() -> None:
    code = (
        "import sys; from st_aggretriever import TrainConfig; from st_aggretriever.cli import _parser; _parser();"
        "TrainConfig(model='m', pairs=['p'], output='o'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
