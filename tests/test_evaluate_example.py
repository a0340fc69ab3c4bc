"""examples/evaluate_beir.py, from end to end on the sample collection."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from st_aggretriever import build_aggretriever
from st_aggretriever.quickstart import asset

pytest.importorskip("pytrec_eval")
pytest.importorskip("bm25s")
SCRIPT = Path(__file__).parent.parent / "examples" / "evaluate_beir.py"


def test_example_evaluates_compares_and_goes_on_with_the_same_model_and_files_only(
    tiny_bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, data = tmp_path / "out", tmp_path / "sample"
    shutil.copytree(asset("sample"), data)
    for seed in (0, 1):
        model = build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4, seed=seed)
        model.save_pretrained(str(tmp_path / f"model{seed}"))

    def run(name: str = "model0", *more: str) -> tuple[list[str], dict[str, int]]:
        arguments = ["--model", tmp_path / name, "--data", data, "--output", output, *more]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        files = {path.name: path.stat().st_mtime_ns for path in output.iterdir()}
        return capsys.readouterr().out.splitlines(), files

    first, written = run("model0", "--document-length", "16")
    assert "bm25 nDCG@10" in first[0]
    assert first[-1].startswith("sample: model - bm25")
    assert len(written) == 4
    (figures,) = output.glob("sample.test.model-*.json")
    assert json.loads(figures.read_text())["encoding"]["document_length"] == 16
    assert run("model0", "--document-length", "16") == (first, written)
    others = [run("model1", "--document-length", "16"), run("model0")]
    assert all(lines[1] != first[1] for lines, _ in others)
    assert len(others[-1][1]) == 8
    queries = data / "queries.jsonl"
    queries.write_text(queries.read_text() + json.dumps({"_id": "new", "text": "new"}) + "\n")
    assert sum(times != written.get(name) for name, times in run("model0", "--document-length", "16")[1].items()) == 8
    with pytest.raises(SystemExit) as ended:
        run("model0", "--split", "dev")
    assert ended.value.code == 2
    assert "dev.tsv" in capsys.readouterr().err
