"""benchmarks/encode.py runs at the smallest size, and its arms compute what they are named for."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

SMALL = ["--layers", "1", "--hidden-size", "16", "--vocab-size", "60", "--lexical-dim", "8", "--batch-size", "4"]


@pytest.fixture(scope="module")
def encode() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "encode.py"
    spec = importlib.util.spec_from_file_location("encode_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_arm_is_timed_and_the_last_line_is_json(encode: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    encode.main([*SMALL, "--lengths", "6", "2-6", "--queries", "3", "--repeats", "2", "--training", "--no-memory"])
    arms = set(encode.parse(SMALL).arms)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for part in result["batches"]:
        assert set(part["arms"]) == arms
        assert all(row["seconds"] > 0 for row in part["arms"].values())
    assert [part["real_tokens"] for part in result["batches"]] == [24, 16]  # 2 + 3 + 5 + 6, padded to 24
    assert set(result["latency"]["arms"]["ours"]) == {"p1", "p50", "p99"}
    assert set(result["training"][0]["arms"]) == arms - encode.NO_GRADIENT
    assert result["versions"]["torch"] == torch.__version__


def test_the_published_way_and_ours_give_the_same_vectors(encode: ModuleType) -> None:
    args = encode.parse([*SMALL])
    model = encode.build(args)
    features = encode.batch(args, [6, 2, 4, 3])
    with torch.no_grad():
        torch.testing.assert_close(encode.published(model)(features), encode.ours(model)(features), rtol=0, atol=1e-5)


def test_the_floor_multiplies_each_real_token_once(encode: ModuleType) -> None:
    args = encode.parse([*SMALL])
    model = encode.build(args)
    features = encode.batch(args, [6, 2, 4, 3])
    with torch.no_grad():
        for floor in (encode.floor, encode.floor_onednn):
            assert floor(model)(features).shape == (60, 15)


def test_memory_of_a_step_is_counted_in_bytes_of_this_process(encode: ModuleType) -> None:
    args = encode.parse([*SMALL, "--lengths", "6", "--step", "ours"])
    assert 100e6 < encode.peak_of_training_step(args) < 20e9
