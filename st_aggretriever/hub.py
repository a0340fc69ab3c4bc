"""Publish a model on the Hugging Face Hub: check the folder, write its card, upload it in one commit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from st_aggretriever.card import DOCUMENTS, QUERY, Statement, model_card, read_json, read_results
from st_aggretriever.convert import Licence, licence_of
from st_aggretriever.inspection import failed_checks, inspect_model
from st_aggretriever.model import load_aggretriever
from st_aggretriever.readers.text import checksum, short_names

# Between this process and a fresh one, of the largest number: 0 by the same code, rounding by another version's copy.
TOLERANCE = 1e-5
ATTEMPTS = 3
# What training leaves in a folder and nobody needs in order to use the model, and what isn't the model's at all.
LEFT_OUT = (".*", "__pycache__", "*.tmp", "*.partial", "checkpoint-*", "optimizer.*", "scheduler.pt", "scaler.pt",
            "rng_state*", "training_args.bin", "events.out.tfevents.*", "README.md")  # fmt: skip
TEXTS = (".json", ".md", ".py", ".txt", ".jsonl", ".csv", ".yaml", ".yml")
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")

# Loads the folder as someone does who has sentence-transformers alone.
FRESH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "st_aggretriever":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import json, numpy, torch
from sentence_transformers import SentenceTransformer
folder, output, threads, query, *documents = json.loads(sys.argv[1])
torch.set_num_threads(threads)
model = SentenceTransformer(folder, trust_remote_code=True, device="cpu", local_files_only=True)
numpy.save(output, numpy.concatenate([model.encode_query([query]), model.encode_document(documents)]))
"""


class Upload(NamedTuple):
    """One file of the commit."""

    path: str  # in the repository
    content: bytes | Path

    @property
    def size(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    def sha256(self) -> str:
        if isinstance(self.content, bytes):
            return hashlib.sha256(self.content).hexdigest()
        return checksum(self.content)


class Plan(NamedTuple):
    """What a push will do."""

    repo_id: str
    uploads: list[Upload]  # the card among them, as README.md
    left_out: list[str]
    card: str
    tag: str
    difference: float  # of vectors between this process and a fresh one without the package


def plan_push(folder: str | Path, repo_id: str, statement: Statement) -> Plan:
    """Check a model's folder, and write its card; nothing leaves this machine and the folder stays as it is.

    Args:
        folder: A saved Aggretriever.
        repo_id: ``OWNER/NAME`` on the Hub.
        statement: What the card says beyond what the folder does.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It is no Aggretriever, fails a check of :func:`inspect_model`, doesn't load without this package or
            gives other vectors there; no licence is stated, or another than the converted checkpoint's; a result of
            another model; a file that holds a token of the Hub.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"push: there is no folder {str(folder)!r}.")
    for path in statement.results:
        if not Path(path).exists():
            raise FileNotFoundError(f"push: there are no results at {str(path)!r}.")
    _check_repo_id(repo_id)
    report = inspect_model(folder)
    licence = _licence(folder, report, statement)
    failed = failed_checks(report)
    if failed:
        raise ValueError(f"push: {folder} fails {' and '.join(failed)}.")
    if not report["code"]["carried"]:
        raise ValueError(
            f"push: {folder} doesn't carry st_aggretriever.py, so nobody could load it without this package. Load it "
            "with load_aggretriever and save it again."
        )
    uploads, left_out = _uploads(folder)
    model = load_aggretriever(folder, device="cpu")
    results = read_results(statement.results, model)
    content = hashlib.sha256("".join(f"{upload.path} {upload.sha256()}\n" for upload in uploads).encode())
    tag = f"model-{content.hexdigest()[:12]}"
    card = model_card(
        folder, repo_id, tag, statement=statement, licence=licence, report=report, results=results, model=model
    )
    uploads = sorted([*uploads, Upload("README.md", card.encode())])
    difference = _check_fresh_process(folder, model)  # last, as it takes longest
    return Plan(repo_id, uploads, left_out, card, tag, difference)


def push(plan: Plan, *, private: bool = False, api: Any = None) -> str:
    """Upload what was planned in one commit, and tag it with the revision that the card names.

    The repository is made if it doesn't exist; files there that the plan doesn't have stay. A failure of the network
    or the server is tried again; as everything is one commit, a failed push leaves the repository as it was.

    Args:
        plan: Of :func:`plan_push`.
        private: Make a new repository private.
        api: A ``huggingface_hub.HfApi``; None takes the usual one, with the token that is logged in.

    Returns:
        The commit's address.

    Raises:
        OSError: The Hub can't be reached, or refuses.
        ValueError: The Hub finds the card invalid.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi() if api is None else api

    def commit() -> Any:
        # New operations each time: used ones remember what the repository held before.
        operations = [CommitOperationAdd(upload.path, upload.content if isinstance(upload.content, bytes)
                                         else str(upload.content)) for upload in plan.uploads]  # fmt: skip
        return api.create_commit(plan.repo_id, operations, commit_message=f"Upload {plan.tag} by st-aggretriever push")

    _tried(lambda: api.create_repo(plan.repo_id, private=private, exist_ok=True))
    made = _tried(commit)
    _tried(lambda: api.create_tag(plan.repo_id, tag=plan.tag, revision=made.oid, exist_ok=True))
    return str(made.commit_url)


def _tried(call: Any) -> Any:
    """The call's value; a failure of the network or the server is tried again, and said in one sentence in the end."""
    from huggingface_hub.errors import HfHubHTTPError

    network: Any = HfHubHTTPError.__bases__[0]  # the root of the HTTP library's errors, whichever it is
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except (network, RuntimeError) as error:  # the upload of a large file wraps its failure in a RuntimeError
            response = getattr(error, "response", None)
            status = getattr(response, "status_code", None)
            if attempt < ATTEMPTS and (status is None or status == 429 or status >= 500):
                time.sleep(2.0 ** (attempt - 1))
                continue
            raise OSError(_without_token(_reason(error, status))) from None
    raise AssertionError


def _reason(error: Exception, status: int | None) -> str:
    if status is None:
        return f"push: the Hub can't be reached ({type(error).__name__}: {error}). Try again: nothing is done twice."
    said = getattr(error, "server_message", None) or str(error).splitlines()[0]
    login = " Log in with `hf auth login`, with a token that may write there." if status in (401, 403) else ""
    return f"push: the Hub refused with {status}: {said}{login}"


def _without_token(message: str) -> str:
    from huggingface_hub import get_token

    token = get_token()
    return TOKEN.sub("hf_...", message.replace(token, "hf_...") if token else message)


def format_plan(plan: Plan) -> Iterator[str]:
    """Files with their sizes, what stays at home, the check, and the card."""
    yield f"{plan.repo_id}, tag {plan.tag}"
    for upload in plan.uploads:
        yield f"  {upload.size:>13,}  {upload.path}"
    total = sum(upload.size for upload in plan.uploads)
    yield f"  {total:>13,}  bytes in {len(plan.uploads)} files, one commit"
    if plan.left_out:
        yield f"left out: {', '.join(plan.left_out)}"
    yield f"loaded in a fresh process without the package: largest difference of vectors {plan.difference:.1e}"
    yield from ("", "README.md:", "", plan.card.rstrip("\n"))


def _check_repo_id(repo_id: str) -> None:
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(f"push: {error}") from None
    if repo_id.count("/") != 1:
        raise ValueError(f"push: the repository must be named OWNER/NAME, got {repo_id!r}.")


def _licence(folder: Path, report: Mapping[str, Any], statement: Statement) -> Licence:
    """What is stated, by the caller or by the folder; a converted checkpoint's own can't be changed."""
    found = licence_of(folder)
    fields = {"license": statement.license, "license_name": statement.license_name,
              "license_link": statement.license_link}  # fmt: skip
    stated = {key: value for key, value in fields.items() if value}
    source = report["converted_from"]
    if (
        source
        and found.fields.get("license")
        and stated.get("license", found.fields["license"]) != found.fields["license"]
    ):
        raise ValueError(
            f"push: the model was converted from {source}, which is under {found.fields['license']}; it can't be "
            f"published under {statement.license}. Leave the licence out to carry it along."
        )
    if not stated and not found.fields.get("license"):
        where = f" (the folder has {', '.join(path.name for path in found.files)})" if found.files else ""
        raise ValueError(
            f"push: no licence is stated{where}. State by --license the one under which you may publish these weights, "
            "for instance apache-2.0; the backbone's and the training data's decide."
        )
    return Licence(found.fields | stated if source else stated or found.fields, found.files)


def _uploads(folder: Path) -> tuple[list[Upload], list[str]]:
    """All files but the card, and the names of what is left out."""
    uploads: list[Upload] = []
    left_out: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(fnmatch(part, pattern) for part in path.relative_to(folder).parts for pattern in LEFT_OUT):
            if path.is_file() and name != "README.md":
                left_out.append(name)
        elif path.is_file():
            content = _without_paths(path) if name == "train.json" else path
            _refuse_token(path, content)
            uploads.append(Upload(name, content))
    return uploads, left_out


def _refuse_token(path: Path, content: bytes | Path) -> None:
    if path.suffix in TEXTS and path.stat().st_size < 2**26:
        raw = content if isinstance(content, bytes) else content.read_bytes()
        if TOKEN.search(raw.decode("utf-8", "ignore")):
            raise ValueError(f"push: {path} holds what looks like a token of the Hub (hf_...). Take it out first.")


def _without_paths(path: Path) -> bytes:
    """``train.json`` with the paths of this machine cut to names: where someone's data lie is nobody's business.

    Those of training data are cut to what tells them apart, as in the card.
    """
    record = read_json(path)
    names = short_names(record.get("pairs") or {}) if isinstance(record, dict) else {}

    def shorten(value: Any) -> Any:
        if isinstance(value, dict):
            return {shorten(key): shorten(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [shorten(inner) for inner in value]
        if isinstance(value, str) and os.path.isabs(value):
            return names.get(value, Path(value).name)
        return value

    return (json.dumps(shorten(record), indent=2, ensure_ascii=False) + "\n").encode()


def _check_fresh_process(folder: Path, model: Any) -> float:
    """The largest difference between vectors here and in a process that has the folder's own code alone."""
    import torch

    expected = np.concatenate([model.encode_query([QUERY]), model.encode_document(DOCUMENTS)])
    with tempfile.TemporaryDirectory() as elsewhere:
        output = Path(elsewhere, "vectors.npy")
        task = json.dumps([str(folder.resolve()), str(output), torch.get_num_threads(), QUERY, *DOCUMENTS])
        environment = os.environ | {"HF_MODULES_CACHE": str(Path(elsewhere, "modules")), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", FRESH, task]
        done = subprocess.run(command, env=environment, cwd=elsewhere, capture_output=True, text=True, check=False)
        if done.returncode or not output.exists():
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise ValueError(f"push: {folder} doesn't load without this package: {lines[-1]}")
        found = np.load(output)
    if found.shape != expected.shape:
        raise ValueError(
            f"push: without this package {folder} gives vectors of {found.shape[1]} dimensions, with it of "
            f"{expected.shape[1]}. Load it with load_aggretriever and save it again."
        )
    difference = float(abs(found - expected).max())
    if not difference <= TOLERANCE * max(1.0, float(abs(expected).max())):
        raise ValueError(
            f"push: without this package {folder} gives other vectors (by {difference:.1e}). Load it with "
            "load_aggretriever and save it again, so that it carries the present code."
        )
    return difference
