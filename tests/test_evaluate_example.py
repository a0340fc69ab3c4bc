"""examples/evaluate_beir.py, from end to end on the sample collection."""

import runpy
import sys
from pathlib import Path

import pytest

from st_aggretriever import build_aggretriever
from st_aggretriever.quickstart import asset

pytest.importorskip("pytrec_eval")
pytest.importorskip("bm25s")
SCRIPT = Path(__file__).parent.parent / "examples" / "evaluate_beir.py"


def test_example_evaluates_compares_and_goes_on(
    tiny_bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4).save_pretrained(str(tmp_path / "model"))
    arguments = ["--model", tmp_path / "model", "--data", asset("sample"), "--output", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments), "--document-length", "16"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    first = capsys.readouterr().out
    assert "bm25 nDCG@10" in first.splitlines()[0]
    assert "sample: model - bm25" in first
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert sorted(written) == ["sample.bm25.json", "sample.bm25.trec", "sample.model.json", "sample.model.trec"]
    assert '"document_length": 16' in (tmp_path / "out" / "sample.model.json").read_text()
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out == first
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == written
