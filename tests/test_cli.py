"""The command line as a whole: what goes wrong is one sentence and exit code 2, before the work where it can be."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from st_aggretriever import atomic, build_aggretriever, cli
from st_aggretriever.cli import main


@pytest.mark.parametrize(
    ("error", "caught"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("a fault of ours"), False),
        (ValueError("line 3: expected an id, got 'out of memory'"), None),
    ],
)
def test_only_a_lack_of_memory_is_a_sentence_among_the_faults_of_a_machine(
    error: Exception, caught: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> None:
        raise error

    parsed = SimpleNamespace(parse_args=lambda _: SimpleNamespace(function=fail))
    monkeypatch.setattr(cli, "_parser", lambda: parsed)
    if caught is False:
        with pytest.raises(RuntimeError, match="a fault of ours"):
            main([])
        return
    assert main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("st-aggretriever: out of memory" if caught else "st-aggretriever: line 3")
    assert ("--batch-size" in said) is bool(caught)
    assert len(said.splitlines()) == 1


def test_a_device_without_numbers_is_refused(
    tiny_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4).save_pretrained(str(tmp_path / "m"))
    (tmp_path / "t.jsonl").write_text('{"_id": "1", "text": "a"}\n')
    encode = ["encode", "--model", str(tmp_path / "m"), "--data", str(tmp_path / "t.jsonl")]
    assert main([*encode, "--output", str(tmp_path / "v"), "--device", "meta"]) == 2
    assert "device 'meta' can't be used here" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that takes no file, also of root")
def test_a_folder_that_takes_no_file_is_named_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = str(Path(cli.__file__).parents[1] / "assets" / "sample")
    evaluate = ["evaluate", "beir", "--model", "bm25", "--data", sample]
    for more in (["--run", "/proc/x.trec"], ["--output", "/proc/x.json"]):
        assert main([*evaluate, *more]) == 2
        said = capsys.readouterr()
        assert f"{more[1]} can't be written" in said.err
        assert said.out == ""
    with pytest.raises(OSError, match=r"/proc/x'$"), atomic.replacing("/proc/x"):
        pass


def test_a_model_out_of_reach_is_named(tiny_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text('{"query": "a", "passage": "b"}\n' * 4)
    train = ["train", "--pairs", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "out"), "--batch-size", "2"]
    for more in (["--model", "nope"], ["--model", tiny_bert, "--mlm-head-from", "nope"]):
        assert main([*train, *more]) == 2
        assert "there is no folder 'nope', and no such model on the Hub in reach" in capsys.readouterr().err
