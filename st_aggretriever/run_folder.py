"""What a training run leaves on disk: the folder with its checkpoints while it lasts, and the trained model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from st_aggretriever.atomic import check_place, lock_folder
from st_aggretriever.config import FREE, default_of

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

RECORD = "train.json"


def check_output(output: Path, working: Path, *, resume: bool) -> None:
    """Refuse the output of a run where it, or what lies in ``working``, is in the way.

    Raises:
        ValueError: Something else is there, or an interrupted run that isn't to be resumed.
        BlockingIOError: Another run is writing it.
        OSError: The output can't be made.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"train: output {output} is a file; nothing was overwritten. Name a folder.")
    if output.is_dir() and any(output.iterdir()):
        raise ValueError(f"train: output {output} is not empty; nothing was overwritten. Name another folder.")
    if output.is_mount():
        raise ValueError(
            f"train: output {output} is a mount point and can't be put in place whole. Name a folder in it."
        )
    check_place(output)
    with suppress(FileNotFoundError):  # no run, or one that ends just now
        if (working / RECORD).is_file():
            lock_folder(working).close()  # of a run that is alive, which must be neither resumed nor deleted
    if working.exists() and not resume:
        raise ValueError(f"train: {working} holds an interrupted run. Go on with --resume, or delete it.")


def load_finished(start: dict[str, Any], output: Path, *, first: bool) -> SentenceTransformer:
    """The model of a run that a kill met after its end, or that was done already.

    Args:
        start: Settings and data of the run, as its record has them.
        output: Its folder.
        first: Whether this process is the one that writes.

    Raises:
        ValueError: The run was another one, or its record is broken.
    """
    from st_aggretriever.model import load_aggretriever

    check_same(read_record(output), start, output)
    if first:
        shutil.rmtree(output.with_name(output.name + ".partial"), ignore_errors=True)
    return load_aggretriever(output)


def read_record(folder: Path) -> dict[str, Any]:
    """The ``train.json`` of a run; raises ValueError where it isn't what a run has written."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"train: {path} is broken ({error}). Delete {folder} and train anew.") from None
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise ValueError(f"train: {path} is not the record of a run. Delete or move {folder} and train anew.")
    return record


def check_same(before: dict[str, Any], now: dict[str, Any], where: Path) -> None:
    """Raises ValueError where two runs differ in a setting, in their pairs or, where both know it, their start."""
    old, new = before.get("config", {}), json.loads(json.dumps(now["config"]))
    # A run of an older version lacks the settings that came later: it had their defaults.
    old = {name: old.get(name, default_of(name)) for name in new}
    for name, default in (("evaluator", None), ("processes", 1)):
        old[name], new[name] = before.get(name, default), now[name]
    started, starts = before.get("model_sha256"), now.get("model_sha256")  # the first runs didn't note it
    # The same model may lie elsewhere by now, as the one in this package does after a reinstallation; if it is taken
    # as what it was then, a backbone or an Aggretriever, whose heads have another learning rate.
    moved = started and started == starts and before.get("new_heads") == now.get("new_heads") is not None
    free = FREE | {"model"} if moved else FREE
    changed = [name for name in new if name not in free and old[name] != new[name]]
    if changed:
        found = ", ".join(f"{name} ({old[name]}, now {new[name]})" for name in changed)
        raise ValueError(f"train: the run in {where} had other settings: {found}. Resume with the same ones.")
    if before.get("pairs_sha256") != now["pairs_sha256"]:
        raise ValueError(f"train: the run in {where} had other pairs. Resume with the same ones, in the same order.")
    # A checkpoint doesn't hold all of it: of adapters nothing but these.
    if started and starts and started != starts:
        raise ValueError(
            f"train: the run in {where} started from another model: {new['model']} has changed since. Put the old one "
            f"back, or delete {where} and train anew."
        )


@contextmanager
def working_folder(working: Path, start: dict[str, Any], *, first: bool) -> Iterator[str | None]:
    """Make the folder of a run, or take up the one that is there; gives its last checkpoint.

    On an error it stays if it has a checkpoint or the trained model, else it goes. Only the ``first`` of several
    processes touches it.

    Raises:
        ValueError: What is there is no run's, or the run's settings or pairs were others.
        BlockingIOError: Another run is writing it.
    """
    from transformers.trainer_utils import get_last_checkpoint

    from st_aggretriever.trainer import publish

    if not first:
        # The first process makes and removes it; nobody takes a step before all have found the checkpoint.
        yield get_last_checkpoint(str(working)) if working.is_dir() else None
        return
    if working.exists():
        if not (working / RECORD).is_file():
            raise ValueError(f"train: {working} is not the folder of a run (it has no {RECORD}). Delete or move it.")
    else:
        beside = working.with_name(working.name + ".new")
        beside.mkdir(parents=True, exist_ok=True)
        _write_json(beside / RECORD, start)
        publish(beside, working)
    lock = lock_folder(working)
    try:
        check_same(read_record(working), start, working)
        checkpoint = get_last_checkpoint(str(working))
    except BaseException:
        lock.close()
        raise
    try:
        yield checkpoint
    except BaseException as error:
        last = get_last_checkpoint(str(working))
        if last is None and not _is_whole(working):
            shutil.rmtree(working, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt) and not str(error):  # a teacher's has a sentence of its own
            kept = f"{last} stays, --resume goes on from it" if last else "there was no checkpoint yet, nothing stays"
            if _is_whole(working):
                kept = f"the trained model is in {working / 'model'}"
            raise KeyboardInterrupt(f"interrupted; {kept}") from None
        raise
    finally:
        lock.close()


def write_model(model: SentenceTransformer, record: dict[str, Any], working: Path, output: Path) -> None:
    """Write the model with its record and report, whole or not at all; raises OSError."""
    from st_aggretriever.report import write_report
    from st_aggretriever.trainer import publish

    folder = working / "model"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(str(folder), create_model_card=False)
        (folder / "README.md").write_text(_card(model, record), encoding="utf-8")
        _write_json(folder / RECORD, record)
        if record["config"]["report"]:
            write_report(record, folder)
        if (working / "runs").is_dir():
            shutil.copytree(working / "runs", folder / "runs")  # TensorBoard's
        publish(folder, output)
    except Exception as error:  # Also safetensors' own one for a full disk.
        where = f". It is trained, and whole in {folder}: move it from there" if _is_whole(working) else ""
        raise OSError(f"cannot write the model {output}: {error}{where}") from error


def _is_whole(working: Path) -> bool:
    """Whether the trained model lies there; its record is written after its weights."""
    return (working / "model" / RECORD).is_file()


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _card(model: SentenceTransformer, record: dict[str, Any]) -> str:
    """A short model card; the stock one's snippet lacks ``trust_remote_code``, and it quotes training texts."""
    config, resolved = record["config"], record["resolved"]
    base = Path(config["model"]).name if Path(config["model"]).exists() else config["model"]
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags:
- sentence-transformers
- dense-retrieval
- aggretriever
---

# Aggretriever from {base}

A dense retrieval model: queries and documents become vectors of {model.get_embedding_dimension()} dimensions, compared
by dot product (Lin, Li, Lin: Aggretriever, TACL 2023).

```python
from st_aggretriever import load_aggretriever  # pip install st-aggretriever

model = load_aggretriever("path/to/this/folder")
scores = model.similarity(model.encode_query(["a question"]), model.encode_document(["a passage"]))
```

Without that package, by the code that lies beside the weights:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder", trust_remote_code=True)
```

Trained from {base} on {resolved["pairs"]:,} pairs in {resolved["steps"]:,} steps of {config["batch_size"]}, learning
rate {resolved["learning_rate"]:g} (heads {resolved["head_learning_rate"]:g}). The training folder's `{RECORD}` has all
settings and the losses.
"""
