"""What benchmarks share: figures that are kept belong to one setting."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    monkeypatch.delitem(sys.modules, "kept", raising=False)
    return importlib.import_module("kept")


def test_figures_of_other_settings_are_refused(kept: ModuleType, tmp_path: Path) -> None:
    settings = {"model": "a", "steps": 200, "data": ("x", "y")}
    kept.keep(tmp_path / "out", **settings)
    kept.keep(tmp_path / "out", **settings)
    for changed in ({"steps": 300}, {"data": ["x"]}, {"more": 1}):
        (name,) = changed
        with pytest.raises(SystemExit, match=f"holds figures made with {name} .*Name another --output"):
            kept.keep(tmp_path / "out", **settings | changed)


def test_models_are_told_apart_by_their_weights_not_their_names(kept: ModuleType, tmp_path: Path) -> None:
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    one, same, other = (kept.content_of(tmp_path / name) for name in "abc")
    assert one == same != other
    assert kept.content_of(tmp_path / "a" / "model.safetensors") == one
    assert kept.content_of("org/model") == kept.content_of(Path("org/model")) != kept.content_of("org/other")
    assert len(kept.content_of("org/model")) == 64
