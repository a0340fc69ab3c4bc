"""Encoding and search on Ray: the same files, poisoned rows, killed actors. Skipped where Ray isn't installed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from folders import ROWS, Letters, files, write_jsonl  # noqa: E402

from st_aggretriever.bulk import encode_to_disk  # noqa: E402
from st_aggretriever.ray_engine import encode_by_ray, search_by_ray  # noqa: E402
from st_aggretriever.readers.corpus import Corpus  # noqa: E402
from st_aggretriever.search.retrieve import search_exactly  # noqa: E402
from st_aggretriever.vectors.shards import open_shards  # noqa: E402
from st_aggretriever.vectors.verify import verify  # noqa: E402

# Of starting Ray and its workers on a machine that is busy with other work.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def two_cores() -> Iterator[None]:
    """Ray with two cores: a pool that took both would wait for ever."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    runtime = {"env_vars": {"PYTHONPATH": paths}}
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=runtime, logging_level="ERROR")
    yield
    ray.shutdown()


class Load:
    """Gives the model in each actor; the first actor that gets to a marked text kills itself."""

    def __init__(self, flag: Path | None = None, **options: Any) -> None:
        self.flag, self.options = flag, options

    def __call__(self, device: str | None) -> Letters:
        flag = self.flag

        class Dying(Letters):
            def encode_document(self, texts: list[str], **options: Any) -> np.ndarray:
                if flag is not None and texts != ["dimension"] and not flag.exists():
                    flag.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().encode_document(texts, **options)

        return Dying(**self.options)


@pytest.mark.parametrize(("dies", "form"), [(False, "npy"), (True, "npy"), (False, "parquet")])
def test_a_pool_of_two_on_two_cores_writes_what_one_process_does(tmp_path: Path, dies: bool, form: str) -> None:
    path = write_jsonl(tmp_path / "c.jsonl")
    load = Load(tmp_path / "flag" if dies else None)
    whole = encode_to_disk(Letters(), Corpus(path), tmp_path / "whole", block_size=4, files=form)
    lines: list[str] = []
    options: dict[str, Any] = {"workers": 2, "device": "cpu", "block_size": 4, "files": form, "report": lines.append}
    made = encode_by_ray(load, Corpus(path), tmp_path / "v", **options)
    assert (tmp_path / "flag").exists() == dies
    assert files(made.folder) == files(whole.folder)
    assert lines[-1].startswith("23 of 23 documents, ")


def test_it_goes_on_with_what_another_run_left(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [*ROWS, ("last", "xx")])
    whole = encode_to_disk(Letters(), Corpus(path), tmp_path / "whole", block_size=4)
    with pytest.raises(ValueError, match=r"document 'last': the model can't encode it \(index out of range\)"):
        encode_by_ray(Load(poison="xx"), Corpus(path), tmp_path / "v", device="cpu", block_size=1)
    assert (tmp_path / "v.partial" / "block-00000.json").exists()
    assert not (tmp_path / "v.partial" / "block-00023.json").exists()
    done = encode_to_disk(Letters(), Corpus(path), tmp_path / "v", block_size=1)
    assert done.load()[1].tolist() == whole.load()[1].tolist()


def test_a_poisoned_row_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [("x", "a"), ("y", "abba"), ("z", "cc")]
    corpus = Corpus(write_jsonl(tmp_path / "c.jsonl", rows))
    folder = encode_by_ray(Load(poison="bb"), corpus, tmp_path / "v", device="cpu", block_size=2, skip_bad=True)
    assert folder.load()[0] == ["x", "z"]
    assert folder.manifest["skipped"] == 1
    assert "left out: 'y': the model can't encode it" in caplog.text
    assert verify(folder) == []


def test_search_by_actors_equals_search_of_the_whole(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl")
    whole = encode_to_disk(Letters(), Corpus(path), tmp_path / "whole", block_size=4)
    for shard in range(3):
        encode_to_disk(Letters(), Corpus(path), tmp_path / "shards", block_size=4, shard=(shard, 3))
    queries = np.random.default_rng(0).integers(-2, 3, (5, 3)).astype(np.float32)
    expected = search_exactly(whole, queries, 9)
    shards = open_shards([tmp_path / "shards"])
    found = search_by_ray(shards, queries, 9)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.scores.tolist() == expected.scores.tolist()
    block = shards[1].folder / "block-00000.npy"
    block.write_bytes(block.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"block-00000\.npy is broken"):
        search_by_ray(shards, queries, 9)
