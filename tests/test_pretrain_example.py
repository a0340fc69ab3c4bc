"""examples/pretrain_backbone.py on a few generated sentences: what it writes, that it resumes, what it refuses."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate", reason="the Trainer needs the train extra: pip install 'st-aggretriever[train]'")
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

SCRIPT = Path(__file__).parent.parent / "examples" / "pretrain_backbone.py"
TINY = (
    "--vocab-size 200 --layers 1 --hidden-size 16 --heads 2 --block 16 --batch-size 4"
    " --steps 4 --save-steps 2 --warmup-steps 1"
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pretrain_backbone", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks its module up there
    spec.loader.exec_module(module)
    return module


def sentences(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    subjects, verbs, objects = (
        "baker gardener pilot nurse".split(),
        "sees paints lifts".split(),
        "kite drum lamp".split(),
    )
    return [
        f"The {rng.choice(subjects)} of house {number} {rng.choice(verbs)} a {rng.choice(objects)}."
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    pairs, prose = folder / "facts.jsonl.gz", folder / "prose.txt.gz"
    with gzip.open(pairs, "wt") as file:
        for text in sentences(120, seed=1):
            file.write(json.dumps({"query": "who is it?", "passage": text, "title": ""}) + "\n")
    with gzip.open(prose, "wt") as file:
        file.writelines(f"{text}\n   It is <unk> .\n" for text in sentences(200, seed=2))
    return [str(pairs), str(prose)]


@pytest.fixture(scope="module")
def mini(script, texts, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("run") / "mini"
    assert script.main([*texts, "--output", str(output), *TINY.split()]) == 0
    return output


def test_asset_is_a_masked_lm_in_fp16_with_the_tied_matrix_once(mini):
    stored = load_file(mini / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert sum(tensor.shape == (200, 16) for tensor in stored.values()) == 1
    model = AutoModelForMaskedLM.from_pretrained(mini, dtype=torch.float32)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tokenizer = AutoTokenizer.from_pretrained(mini)
    assert (len(tokenizer), tokenizer.model_max_length, tokenizer.mask_token) == (200, 512, "[MASK]")
    assert tokenizer("THE").input_ids == tokenizer("the").input_ids
    assert sorted(path.name for path in mini.parent.iterdir()) == ["mini"]  # no checkpoints, nothing half-written


def test_positions_past_the_trained_block_continue_the_trained_ones(script, texts, tmp_path):
    args = script.parse_arguments([*texts, "--output", str(tmp_path / "out")])
    model = script.new_model(np.ones(500), args)
    positions = model.bert.embeddings.position_embeddings.weight
    speeds, sinusoids = script.sinusoidal_positions(192)
    fast, slow = (speeds * 128 >= 4 * torch.pi).repeat(2), (speeds * 128 < 4 * torch.pi).repeat(2)
    with torch.no_grad():  # another size, phase and mean than at the start, as training would give
        positions[:128] = 0.3 * sinusoids[:128].roll(96, dims=1) - 0.2 * sinusoids[:128] + 0.7
        expected = 0.3 * sinusoids.roll(96, dims=1) - 0.2 * sinusoids + 0.7
        trained = positions[:128].clone()
    script.extend_positions(model, 128)
    assert torch.equal(positions[:128], trained)
    assert torch.allclose(positions[128:, fast], expected[128:, fast], atol=1e-4)
    assert torch.allclose(positions[128:, slow], trained[1:, slow].mean(0).expand(384, -1), atol=1e-6)


def test_first_layer_starts_with_a_head_for_each_near_neighbour(script, texts, tmp_path):
    args = script.parse_arguments([*texts, "--output", str(tmp_path / "out")])
    torch.manual_seed(0)
    model = script.new_model(np.ones(500), args)
    ids = torch.randint(5, 500, (2, 64))
    with torch.no_grad():
        states, attention = model.bert.embeddings(ids), model.bert.encoder.layer[0].attention.self
        queries, keys = (
            layer(states).view(2, 64, args.heads, -1).transpose(1, 2) for layer in (attention.query, attention.key)
        )  # (B, heads, L, H / heads)
        nearest = (queries @ keys.transpose(-1, -2)).argmax(-1)  # (B, heads, L)
    for head, offset in enumerate([-1, 1, -2, 2]):
        expected = torch.arange(64) + offset
        inside = (expected >= 0) & (expected < 64)
        assert (nearest[:, head] == expected)[:, inside].float().mean() > 0.95


def test_resumed_run_gives_the_same_weights(script, texts, mini, tmp_path, monkeypatch):
    command = [*texts, "--output", str(tmp_path / "mini"), *TINY.split()]

    def stop(*_):
        raise OSError("stopped before the result was written")

    with monkeypatch.context() as patch:
        patch.setattr(script, "write_asset", stop)
        assert script.main(command) == 2
    work = tmp_path / "mini.work"
    (work / "checkpoint-4" / "trainer_state.json").unlink()  # as if it had been stopped while it wrote the second one
    assert script.last_complete_checkpoint(work) == str(work / "checkpoint-2")
    assert script.main([*command, "--resume"]) == 0
    expected, got = load_file(mini / "model.safetensors"), load_file(tmp_path / "mini" / "model.safetensors")
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_evaluation_reports_every_source_beside_the_unigram_baseline(script, texts, mini, capsys):
    assert script.main([*texts, "--evaluate", str(mini), *TINY.split()]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["source"] for row in rows] == ["facts", "prose"]
    assert all(row["masked"] > 0 and 0 <= row["accuracy"] <= 1 and 0 < row["unigram"] < 1 for row in rows)


def test_no_training_text_shares_a_long_run_of_words_with_a_held_out_text(script, tmp_path):
    copied = "one two three four five six seven eight nine ten eleven twelve thirteen"
    half, other = tmp_path / "half.txt.gz", tmp_path / "other.txt.gz"
    lines = sentences(200, seed=3)
    with gzip.open(half, "wt") as file:
        file.writelines(f"{line}\n" for line in [*lines[:-1], f"Say {copied}!"])
    with gzip.open(other, "wt") as file:
        file.writelines(f"{line}\n" for line in [*lines[:99], *[f"{number}: {copied}." for number in range(10)]])
    args = script.parse_arguments([str(half), str(other), "--keep-half", "half", "--output", str(tmp_path / "out")])
    sources = script.read_sources(args)
    assert sources[0].train == lines[:50]  # the first half without its last 50 records
    assert sources[0].held_out == [*lines[100:199], f"Say {copied}!"]
    assert sources[1].train
    assert not any(copied in text for text in sources[1].train)
    assert not set(sources[1].train) & set(sources[1].held_out)


def test_bad_input_is_refused_with_one_sentence_and_exit_code_2(script, texts, mini, tmp_path, capsys):
    broken = tmp_path / "broken.jsonl.gz"
    with gzip.open(broken, "wt") as file:
        file.write('{"query": "no passage"}\n')
    new = str(tmp_path / "new")
    cases = {
        "expected a JSON object with a 'passage'": [str(broken), "--output", str(tmp_path / "other")],
        "exists already": [*texts, "--output", str(mini)],
        "holds no run to go on with": [*texts, "--output", new, "--resume"],
        "holds no model": [*texts, "--evaluate", new],
        "no such file": [str(tmp_path / "absent.txt.gz"), "--output", new],
        "no text file is named prose2": [*texts, "--output", new, "--weight", "prose2=3"],
        "expected NAME=X": [*texts, "--output", new, "--weight", "prose=much"],
    }
    for message, command in cases.items():
        try:
            code = script.main(command)
        except SystemExit as stop:  # argparse's own
            code = stop.code
        assert code == 2
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl.gz"]


def test_resume_refuses_other_settings(script, texts, tmp_path, capsys):
    work = tmp_path / "mini.work"
    work.mkdir()
    (work / "settings.json").write_text(json.dumps({"mask": "0.1"}))
    assert script.main([*texts, "--output", str(tmp_path / "mini"), "--resume", "--mask", "0.3"]) == 2
    assert "mask" in capsys.readouterr().err
