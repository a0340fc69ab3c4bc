"""Small training runs: rows to train on, weights to compare, deaths at a chosen step."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WORDS
from sentence_transformers import SentenceTransformer

from st_aggretriever import TrainConfig, modules, train
from st_aggretriever.modules import MLMEncoder
from st_aggretriever.trainer import AggretrieverTrainer


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


def record_inputs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[tuple[int, ...]], int]]:
    """The token ids of each text, and the length of its prompt, that go into the encoder from here on."""
    original, seen = MLMEncoder.forward, []

    def forward(self: MLMEncoder, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        rows = zip(features["input_ids"].tolist(), features["attention_mask"].sum(1).tolist(), strict=True)
        prompt = features.get("prompt_length")
        seen.append(([tuple(ids[:length]) for ids, length in rows], 0 if prompt is None else int(prompt)))
        return original(self, features, **kwargs)

    monkeypatch.setattr(MLMEncoder, "forward", forward)
    monkeypatch.setattr(modules, "write_check", lambda *args: None)  # its texts are encoded when a model is saved
    return seen
