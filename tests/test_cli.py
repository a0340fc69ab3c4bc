"""The command line as a whole: what goes wrong is one sentence and exit code 2, before the work where it can be."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from st_aggretriever import atomic, build_aggretriever, cli
from st_aggretriever.cli import main

SAMPLE = str(Path(cli.__file__).parents[1] / "assets" / "sample")


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
    evaluate = ["evaluate", "beir", "--model", "bm25", "--data", SAMPLE]
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


@pytest.mark.skipif(sys.platform == "win32", reason="no such files")
def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for output in ("/dev/null", str(tmp_path / "pipe")):
        for option in ("--run", "--output"):
            assert main(["evaluate", "beir", "--model", "bm25", "--data", SAMPLE, option, output, "--overwrite"]) == 2
            assert f"{output} is no regular file. Name a file." in capsys.readouterr().err
    assert Path("/dev/null").is_char_device()
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "r").write_text("old")
    (tmp_path / "link").symlink_to(Path("real", "r"))
    with atomic.replacing(tmp_path / "link") as file:
        file.write("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "r").read_text() == "new"
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["r"]


def test_a_link_that_leads_nowhere_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "r")
    assert main(["evaluate", "beir", "--model", "bm25", "--data", SAMPLE, "--run", str(tmp_path / "link")]) == 2
    said = capsys.readouterr()
    assert f"the folder of {tmp_path / 'link'} does not exist" in said.err
    assert said.out == ""


def test_a_command_without_standard_output_ends_as_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed = SimpleNamespace(parse_args=lambda _: SimpleNamespace(function=lambda _: print("done")))
    monkeypatch.setattr(cli, "_parser", lambda: parsed)
    monkeypatch.setattr(sys, "stdout", None)
    assert main([]) == 0


def test_a_name_too_long_for_its_temporary_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(tmp_path / ("r" * 250))
    assert main(["evaluate", "beir", "--model", "bm25", "--data", SAMPLE, "--run", name]) == 2
    said = capsys.readouterr()
    assert "can't be written (File name too long). Name another output." in said.err
    assert said.out == ""


def test_a_full_disk_is_named_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = tmp_path / "r.trec"
    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "fsync", full)
        assert main(["evaluate", "beir", "--model", "bm25", "--data", SAMPLE, "--run", str(run)]) == 2
    assert f"no space is left for {run} (No space left on device). Make room" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_a_command_that_is_terminated_cleans_up_as_one_that_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = []

    def work(_: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleaned.append(True)

    monkeypatch.setattr(cli, "_parser", lambda: SimpleNamespace(parse_args=lambda _: SimpleNamespace(function=work)))
    assert main([]) == 143
    assert cleaned == [True]
    assert capsys.readouterr().err == "st-aggretriever: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.skipif(sys.platform == "win32", reason="no such pipes")
@pytest.mark.parametrize(("encoding", "read", "code"), [("utf-8", False, 141), ("ascii", True, 0)])
def test_a_pipe_without_reader_is_no_success_and_one_of_another_encoding_no_failure(
    encoding: str, read: bool, code: int
) -> None:
    """A child, since the streams of this process are pytest's."""
    script = (
        "import sys; from types import SimpleNamespace as N; from st_aggretriever import cli\n"
        "def work(_):\n sys.stdin.read(); print('caf\\u00e9')\n"
        "cli._parser = lambda: N(parse_args=lambda _: N(function=work))\nsys.exit(cli.main([]))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    if not read:
        child.stdout.close()
    child.stdin.close()
    printed = child.stdout.read() if read else b""
    assert (child.wait(60), child.stderr.read()) == (code, b"")
    assert printed == (b"caf\\xe9\n" if read else b"")


@pytest.mark.parametrize("option", ["--query-length", "--document-length"])
@pytest.mark.parametrize("value", ["0", "-1", "64"])
def test_bm25_takes_no_length_whatever_its_value(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "beir", "--model", "bm25", "--data", SAMPLE, option, value]) == 2
    assert "bm25 reads whole texts. Leave them out." in capsys.readouterr().err


def test_help_promises_no_model_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command, kind in (("explain", "an Aggretriever"), ("encode", "any sentence-transformers model")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"--model M folder or Hub id of {kind}" in " ".join(capsys.readouterr().out.split())
