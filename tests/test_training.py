"""What is trained, on what, and what a run leaves behind."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_backbone
from training_runs import differing, make_rows, record_inputs, weights, write_rows

from st_aggretriever import TrainConfig, build_aggretriever, load_aggretriever, train, training
from st_aggretriever.trainer import AggretrieverTrainer

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


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.9])
def test_a_run_of_one_step_trains_at_the_full_rate(settings: dict, warmup: float) -> None:
    """And of two: the first, of the warm-up, at none, the last at the full one."""
    for steps, rates in ((1, [1e-2]), (2, [1e-2, 5e-3] if warmup == 0 else [0.0, 1e-2 if warmup < 0.5 else 5e-3])):
        settings["output"] += str(steps)
        start = weights(build_aggretriever(settings["model"], lexical_dim=16, cls_dim=8))
        model = train(TrainConfig(**settings, max_steps=steps, warmup_ratio=warmup))
        losses = json.loads((Path(settings["output"]) / "train.json").read_text())["losses"]
        assert [entry["learning_rate"] for entry in losses] == pytest.approx(rates)
        assert {name.split(".")[0] for name in differing(weights(model), start)} == {"0", "1", "3"}


def test_modules_have_learning_rates_of_their_own(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: dict[str, float] = {}

    def fit(self: AggretrieverTrainer, checkpoint: str | None) -> None:
        self.create_optimizer()
        group_of = {id(p): group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
        rates.update({name: group_of[id(p)] for name, p in self.model.named_parameters()})

    monkeypatch.setattr(AggretrieverTrainer, "fit", fit)
    monkeypatch.setattr(training, "_check_result", lambda *args: None)
    own = {"head_learning_rate": 0.2, "term_weight_learning_rate": 0.3, "mlm_head_learning_rate": 0.4}
    train(TrainConfig(**settings | {"learning_rate": 0.1}, **own))
    assert rates["0.model.bert.embeddings.word_embeddings.weight"] == 0.1  # tied to the decoder
    assert rates["0.model.bert.encoder.layer.0.output.dense.weight"] == 0.1
    assert rates["0.model.cls.predictions.transform.dense.weight"] == 0.4
    assert rates["1.linear.weight"] == rates["1.linear.bias"] == 0.3
    assert rates["3.linear.weight"] == 0.2


def test_lora_trains_adapters_and_heads_and_leaves_an_ordinary_model(settings: dict) -> None:
    pytest.importorskip("peft")
    start = weights(build_aggretriever(settings["model"], lexical_dim=16, cls_dim=8))
    model = train(TrainConfig(**settings, lora_rank=2))
    loaded = load_aggretriever(settings["output"])
    assert differing(weights(model), weights(loaded)) == set()
    moved = differing(start, weights(loaded))
    assert {name for name in moved if not name.startswith("0.")} == {
        name for name in start if not name.startswith("0.")
    }
    encoder = {name for name in moved if name.startswith("0.")}
    assert encoder
    assert all(name.endswith("weight") and ".encoder.layer." in name for name in encoder)  # merged linear layers


def test_gradient_checkpointing_changes_nothing_but_memory(settings: dict, tmp_path: Path) -> None:
    backbone = save_backbone(tmp_path / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)[0]
    settings |= {"model": backbone, "max_steps": 3}
    plain = weights(train(TrainConfig(**settings)))
    settings["output"] = str(tmp_path / "saving")
    saving = weights(train(TrainConfig(**settings, gradient_checkpointing=True)))
    assert all(torch.allclose(plain[name], saving[name], atol=1e-6) for name in plain)


def test_a_teacher_adds_its_parts_to_the_loss(settings: dict, tmp_path: Path) -> None:
    rows = [row | {"scores": [3.0, 1.0, 0.0]} for row in make_rows(16, negatives=2)]
    settings |= {"pairs": [write_rows(tmp_path / "scored.jsonl", rows)], "max_steps": 1}
    train(TrainConfig(**settings, teacher="data", fold_dims=[8], margin_mse_weight=0.5))
    record = json.loads((Path(settings["output"]) / "train.json").read_text())
    (entry,) = record["losses"]
    parts = {"full", "cls", "lexical", "full_8", "lexical_8", "kl_full", "kl_cls", "kl_lexical", "margin_mse_full"}
    assert parts <= entry.keys()
    assert record["teacher"] == {"name": "scores in the data"}
    settings["output"] = str(tmp_path / "alone")
    train(TrainConfig(**settings, teacher="data", contrastive_weight=0.0))
    (entry,) = json.loads((Path(settings["output"]) / "train.json").read_text())["losses"]
    assert entry["loss"] == pytest.approx(sum(entry[name] for name in ("kl_full", "kl_cls", "kl_lexical")), abs=1e-3)


def test_a_teacher_needs_negatives_and_scores(settings: dict, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the pairs have no negatives"):
        train(TrainConfig(**settings, teacher="bm25"))
    pairs = write_rows(tmp_path / "negatives.jsonl", make_rows(16, negatives=1))
    with pytest.raises(ValueError, match="expected a teacher's scores in every row"):
        train(TrainConfig(**settings | {"pairs": [pairs]}, teacher="data"))


def test_the_cached_loss_takes_the_steps_of_the_plain_one(settings: dict, tmp_path: Path) -> None:
    backbone = save_backbone(tmp_path / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)[0]
    settings |= {"model": backbone, "max_steps": 3}
    plain = weights(train(TrainConfig(**settings)))
    for number, options in enumerate(({"mini_batch_size": 3}, {"mini_batch_tokens": 50})):
        settings["output"] = str(tmp_path / f"cached-{number}")
        cached = weights(train(TrainConfig(**settings, **options)))
        assert {name for name in plain if not torch.allclose(plain[name], cached[name], atol=1e-4)} <= {
            f"0.model.bert.encoder.layer.{layer}.attention.self.key.bias" for layer in (0, 1)
        }  # without a gradient, Adam takes their steps from rounding


def test_lengths_and_widths_beyond_the_backbone_are_said(settings: dict, capsys: pytest.CaptureFixture) -> None:
    train(TrainConfig(**settings | {"cls_dim": 100}, max_steps=1, document_length=100_000))
    error = capsys.readouterr().err
    assert "document_length 100000 is cut to 512, all that the backbone's positions allow" in error
    assert "cls_dim 100 is above the backbone's width 16" in error
    assert "query_length" not in error


def test_tensorboards_files_lie_beside_the_model(
    settings: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ImportError, match="report_to 'nonsense' is not installed"):
        train(TrainConfig(**settings, report_to=["nonsense"]))
    original = AggretrieverTrainer.fit

    def fit(self: AggretrieverTrainer, checkpoint: str | None) -> None:
        original(self, checkpoint)
        (Path(self.args.output_dir) / "runs" / "one").mkdir(parents=True)

    monkeypatch.setattr(AggretrieverTrainer, "fit", fit)
    train(TrainConfig(**settings, max_steps=1))
    assert (Path(settings["output"]) / "runs" / "one").is_dir()


def test_an_encoder_takes_over_a_head(settings: dict, headless_bert: str, tiny_bert: str) -> None:
    settings |= {"model": headless_bert, "learning_rate": 1e-60}  # no step at all in float32
    model = train(TrainConfig(**settings, mlm_head_from=tiny_bert, max_steps=1))
    donor = build_aggretriever(tiny_bert, lexical_dim=16).state_dict()
    name = next(name for name in donor if name.endswith("transform.dense.weight"))
    assert torch.equal(model.state_dict()[name], donor[name])


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
