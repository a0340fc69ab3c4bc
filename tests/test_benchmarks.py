"""What benchmarks share: figures that are kept belong to one setting."""

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from st_aggretriever import build_aggretriever


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
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "figures.json").touch()
    with pytest.raises(SystemExit, match=r"not empty and has no settings\.json"):
        kept.keep(tmp_path / "old", **settings)


def test_models_are_told_apart_by_all_they_are_made_of_not_their_names(
    kept: ModuleType, tmp_path: Path, tiny_bert: str
) -> None:
    models = {"a": {}, "b": {}, "other heads": {"seed": 1}, "other slices": {"aggregation": "positive"}}
    for name, options in models.items():
        build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4, **options).save_pretrained(str(tmp_path / name))
    found = [kept.content_of(tmp_path / name) for name in models]
    assert found[0] == found[1]
    assert len(set(found)) == 3
    (tmp_path / "file").write_bytes(b"1")
    assert kept.content_of(tmp_path / "file") == hashlib.sha256(b"1").hexdigest()
    assert kept.content_of("org/model") == kept.content_of(Path("org/model")) != kept.content_of("org/other")
    assert len(kept.content_of("org/model")) == 64
