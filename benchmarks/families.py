"""The table of backbones: which checks of tests/test_mlm_heads.py each architecture passes, by running them.

python benchmarks/families.py
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from test_mlm_heads import EMBEDDERS, FAMILIES  # noqa: E402

# Column -> words in the names of its tests
CHECKS = {
    "logits": ("split_head_equals_the_models_own_logits",),
    "oracle": ("split_head_equals_the_model_with_an_identity_decoder",),
    "reload": ("save_and_reload_is_equal",),
    "on disk": ("vocabulary_matrix_is_on_disk_once",),
    "gradients": ("one_step_gives_every",),
    "type ids": ("token_type_ids",),
    "resized": ("resized_vocabulary",),
    "lengths": ("lengths_are_cut",),
    "empty": ("empty_texts",),
    "left pad": ("padding_side",),
    "no head": ("without_head_is_refused",),
    "graft": ("grafted_head_is",),
}
HOW = ("tokens", "cls", "mean", "grafted head")


def main() -> None:
    outcomes = run_tests()
    families = {
        family: {column: verdict(outcomes, words, f"[{family}]", f"[{family}-", f"-{family}]")
                 for column, words in CHECKS.items()}
        for family in FAMILIES
    }  # fmt: skip
    embedders = {
        name: {how: verdict(outcomes, ("becomes_an_aggretriever",), f"[{name}-{how}]") for how in HOW}
        for name in EMBEDDERS
    }
    fresh = verdict(outcomes, ("fresh_process",), "fresh_process")
    show("backbone", families)
    print(f"a fresh process gives equal tensors and vectors, all {len(FAMILIES)}: {fresh}\n")
    show("embedder without head", embedders)
    packages = ("st-aggretriever", "torch", "transformers", "sentence-transformers")
    result = {
        "benchmark": "families",
        "families": families,
        "embedders": embedders,
        "fresh_process": fresh,
        "versions": {name: version(name) for name in packages},
        "python": platform.python_version(),
    }
    print(json.dumps(result))


def run_tests() -> dict[str, str]:
    """Test name -> passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "tests/test_mlm_heads.py"]
        subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        cases = ElementTree.parse(report).iter("testcase")
        kinds = {"failure": "FAILED", "error": "FAILED", "skipped": "skipped"}
        return {
            case.get("name", ""): next((kinds[child.tag] for child in case if child.tag in kinds), "ok")
            for case in cases
        }


def verdict(outcomes: dict[str, str], words: tuple[str, ...], *marks: str) -> str:
    """ok, where all tests with one of the words and one of the marks in their names passed."""
    found = {
        outcome
        for name, outcome in outcomes.items()
        if any(word in name for word in words) and any(mark in name for mark in marks)
    }
    if not found:
        return "none"
    return "FAILED" if "FAILED" in found else "skipped" if "skipped" in found else "ok"


def show(title: str, rows: dict[str, dict[str, str]]) -> None:
    columns = list(next(iter(rows.values())))
    print(f"{title:22}" + "".join(f"{column:>{len(column) + 3}}" for column in columns))
    for name, row in rows.items():
        print(f"{name:22}" + "".join(f"{row[column]:>{len(column) + 3}}" for column in columns))


if __name__ == "__main__":
    main()
