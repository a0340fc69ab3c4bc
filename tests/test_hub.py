"""Publishing: checks, card, files, one commit, against a small stand-in of the Hub on this machine."""

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import HfApi, ModelCard
from sentence_transformers import SentenceTransformer
from test_convert import castorini

from st_aggretriever import build_aggretriever, card, convert_checkpoint, hub, load_aggretriever
from st_aggretriever.card import Statement
from st_aggretriever.cli import main
from st_aggretriever.encoding import Encoder, model_hash
from st_aggretriever.evaluation.lengths import set_lengths

TOKEN = "hf_" + "NobodyShallSeeThisOne" * 2
STATEMENT = Statement(
    license="mit", data_licences={"pairs.jsonl": "cc-by-4.0"}, language=["en"], base_model="some/bert"
)
RECORD = {
    "config": {"model": "/home/someone/bert", "pairs": ["/home/someone/pairs.jsonl"], "output": "/home/someone/m",
               "batch_size": 32, "lexical_weight": 0.5, "resume": True, "pooling": None},
    "pairs": {"/home/someone/pairs.jsonl": 1234},
    "resolved": {"learning_rate": 0.0001, "steps": 200},
    "versions": {"torch": "2.13.0"},
}  # fmt: skip


class StandIn(ThreadingHTTPServer):
    """What a push needs of the Hub: repositories of commits in memory, and requests that can be made to fail."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.failures: list[tuple[str, int, bool]] = []  # (part of the path, status, whether it was done all the same)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def files(self, repository: str) -> dict[str, bytes]:
        return self.repositories[repository]["files"]


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        """What the repository's main branch is, asked for where a commit would change nothing."""
        name = re.findall(r"/api/models/([^/]+/[^/]+)/revision/main", self.path)[0]
        self.answer({"id": name, "sha": self.server.repositories[name]["commits"][-1]})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.fails() is None:
            self.server.objects[hashlib.sha256(content).hexdigest()] = content
            self.answer({})

    def fails(self) -> tuple[str, int, bool] | None:
        """Whether this request was chosen to fail; answered already if nothing shall be done."""
        failure = next((failure for failure in self.server.failures if failure[0] in self.path), None)
        if failure is not None:
            self.server.failures.remove(failure)
            if not failure[2]:
                self.answer({"error": f"no, {self.headers.get('Authorization')}"}, failure[1])
        return failure

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.path, self.headers.get("Authorization", "")))
        failure = self.fails()
        if failure is not None and not failure[2]:
            return
        value, status = self.done(content)
        self.answer(*((value, status) if failure is None else ({"error": "lost"}, failure[1])))

    def done(self, content: bytes) -> tuple[Any, int]:
        server = self.server
        if self.path.endswith("/api/repos/create"):
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}"
            found = name in server.repositories
            server.repositories.setdefault(name, {"files": {}, "commits": [], "tags": {}, "asked": asked})
            return {"url": f"{server.url}/{name}", "id": name, "error": "exists"}, 409 if found else 200
        if self.path.endswith("/api/validate-yaml"):
            return {"errors": [], "warnings": []}, 200
        if self.path.endswith("/objects/batch"):
            asked = json.loads(content)["objects"]
            objects = [item if item["oid"] in server.objects else
                       item | {"actions": {"upload": {"href": f"{server.url}/upload/{item['oid']}"}}}
                       for item in asked]  # fmt: skip
            return {"transfer": "basic", "objects": objects}, 200
        name, action = re.findall(r"/api/models/([^/]+/[^/]+)/(\w+)/", self.path)[0]
        repository = server.repositories[name]
        if action == "preupload":
            return {"files": [self.mode(repository, file["path"]) for file in json.loads(content)["files"]]}, 200
        if action == "tag":
            tags = repository["tags"]
            tag, revision = json.loads(content)["tag"], self.path.rpartition("/")[2]
            return {}, 409 if tags.setdefault(tag, revision) != revision else 200
        assert action == "commit"
        lines = [json.loads(line) for line in content.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repository["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository["files"][value["path"]] = server.objects[value["oid"]]
        oid = hashlib.sha1(content).hexdigest()
        repository["commits"].append(oid)
        return {"commitOid": oid, "commitUrl": f"{server.url}/{name}/commit/{oid}", "pullRequestUrl": None}, 200

    def mode(self, repository: dict[str, Any], path: str) -> dict[str, Any]:
        held = repository["files"].get(path)
        large = path.endswith(".safetensors")
        oid = None
        if held is not None:
            blob = hashlib.sha1(b"blob %d\0" % len(held) + held).hexdigest()
            oid = hashlib.sha256(held).hexdigest() if large else blob
        return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    server = StandIn()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub._commit_api, "is_xet_available", lambda: False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(hub.time, "sleep", lambda seconds: None)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def folder(tiny_bert: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    build_aggretriever(tiny_bert, lexical_dim=20, cls_dim=4).save_pretrained(str(folder))
    (folder / "train.json").write_text(json.dumps(RECORD))
    (folder / "checkpoint-5").mkdir()
    for name in ("training_args.bin", ".env", "checkpoint-5/optimizer.pt"):
        (folder / name).write_text("x")
    return folder


@pytest.fixture
def same_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One test starts the fresh process; the others needn't wait for it."""
    monkeypatch.setattr(hub, "_check_fresh_process", lambda *_: 0.0)


@pytest.fixture(scope="module")
def plan(folder: Path) -> hub.Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "_check_fresh_process", lambda *_: 0.0)
        return hub.plan_push(folder, "me/my-agg", STATEMENT)


def result_of(model: SentenceTransformer, **changes: Any) -> dict[str, Any]:
    return {"benchmark": "beir", "data": "/home/someone/scifact", "split": "test", "model": "m",
            "model_hash": model_hash(model), "figures": {"nDCG@10": 0.5, "RR@10": 0.25},
            "rules": ["trec_eval's"], "encoding": {"document_length": 128}} | changes  # fmt: skip


def test_the_command_pushes_once_and_changes_nothing_here(
    folder: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the fresh process."""
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: HfApi(endpoint=stand_in.url))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    arguments = ["push", str(folder), "me/my-agg", "--license", "mit", "--data-license", "pairs.jsonl=cc0-1.0"]
    assert main([*arguments, "--dry-run"]) == 0
    shown = capfd.readouterr()
    assert "largest difference of vectors 0.0e+00" in shown.out
    assert "model.safetensors" in shown.out
    assert "left out: .env, checkpoint-5/optimizer.pt, training_args.bin" in shown.out
    assert 'load_aggretriever("me/my-agg", revision="model-' in shown.out
    assert not stand_in.requests
    monkeypatch.setattr(hub, "_check_fresh_process", lambda *_: 0.0)
    assert main([*arguments, "--private"]) == 0
    pushed = capfd.readouterr()
    assert stand_in.repositories["me/my-agg"]["asked"]["visibility"] == "private"
    assert len(stand_in.repositories["me/my-agg"]["commits"]) == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert f"Bearer {TOKEN}" in {authorization for _, authorization in stand_in.requests}  # so it was there to leak
    sent = b"".join(stand_in.files("me/my-agg").values())
    assert TOKEN not in shown.out + shown.err + pushed.out + pushed.err
    assert TOKEN.encode() not in sent
    assert b"/home/someone" not in sent


def test_a_folder_without_working_code_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = type("Done", (), {"returncode": 1, "stderr": "Traceback\nRuntimeError: broken\n"})
    monkeypatch.setattr(hub.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ValueError, match="doesn't load without this package: RuntimeError: broken"):
        hub.plan_push(folder, "me/m", STATEMENT)
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "st_aggretriever.py").unlink()
    with pytest.raises(ValueError, match=r"doesn't carry st_aggretriever\.py"):
        hub.plan_push(tmp_path / "m", "me/m", STATEMENT)


def test_other_vectors_elsewhere_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    expected = np.concatenate([model.encode_query([card.QUERY]), model.encode_document(card.DOCUMENTS)])

    def run(command: list[str], **_: Any) -> Any:
        np.save(json.loads(command[-1])[1], expected + np.float32(0.01))
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(hub.subprocess, "run", run)
    with pytest.raises(ValueError, match=r"gives other vectors \(by 1\.0e-02\)"):
        hub.plan_push(folder, "me/m", STATEMENT)


def test_all_files_go_in_one_commit_with_a_tag(plan: hub.Plan, folder: Path, stand_in: StandIn) -> None:
    url = hub.push(plan, api=HfApi(endpoint=stand_in.url))
    repository = stand_in.repositories["me/my-agg"]
    assert repository["commits"] == [url.rpartition("/")[2]]
    assert repository["tags"] == {plan.tag: repository["commits"][0]}
    kept = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    kept -= {"training_args.bin", ".env", "checkpoint-5/optimizer.pt"}
    assert set(stand_in.files("me/my-agg")) == kept | {"README.md"}
    for name in ("model.safetensors", "st_aggretriever.py", "3_CLSProjection/model.safetensors"):
        assert stand_in.files("me/my-agg")[name] == (folder / name).read_bytes()
    assert stand_in.files("me/my-agg")["README.md"].decode() == plan.card


def test_an_existing_repository_is_updated_in_one_commit(plan: hub.Plan, stand_in: StandIn) -> None:
    api = HfApi(endpoint=stand_in.url)
    hub.push(plan, api=api)
    stand_in.files("me/my-agg")["figure.png"] = b"of another hand"
    hub.push(plan, api=api)
    assert len(stand_in.repositories["me/my-agg"]["commits"]) == 1  # nothing new, no commit
    changed = plan._replace(uploads=[hub.Upload("train.json", b"{}"), *plan.uploads[:1]])
    hub.push(changed, api=api)
    assert len(stand_in.repositories["me/my-agg"]["commits"]) == 2
    assert stand_in.files("me/my-agg")["train.json"] == b"{}"
    assert stand_in.files("me/my-agg")["figure.png"] == b"of another hand"


@pytest.mark.parametrize(
    ("where", "status"),
    [
        ("repos/create", 500),
        ("validate-yaml", 500),
        ("/upload/", 400),
        ("/tag/", 503),
        ("/commit/", 503),
        ("/commit/", 429),
    ],
)
def test_a_failure_of_the_server_is_tried_again(plan: hub.Plan, stand_in: StandIn, where: str, status: int) -> None:
    stand_in.failures = [(where, status, False)]
    hub.push(plan, api=HfApi(endpoint=stand_in.url))
    assert stand_in.failures == []
    assert len(stand_in.repositories["me/my-agg"]["commits"]) == 1
    assert list(stand_in.repositories["me/my-agg"]["tags"]) == [plan.tag]


def test_a_commit_whose_answer_was_lost_is_not_made_twice(plan: hub.Plan, stand_in: StandIn) -> None:
    stand_in.failures = [("/commit/", 502, True)]
    hub.push(plan, api=HfApi(endpoint=stand_in.url))
    assert len(stand_in.repositories["me/my-agg"]["commits"]) == 1


def test_a_refusal_is_one_sentence_without_the_token(plan: hub.Plan, stand_in: StandIn) -> None:
    stand_in.failures = [("/commit/", 403, False)]
    with pytest.raises(OSError, match=r"the Hub refused with 403: .*Log in with `hf auth login`") as caught:
        hub.push(plan, api=HfApi(endpoint=stand_in.url))
    assert TOKEN not in str(caught.value)  # though the server sent it back
    assert [path for path, _ in stand_in.requests if "/commit/" in path] == ["/api/models/me/my-agg/commit/main"]
    stand_in.failures = [("/commit/", 500, False)] * 3
    with pytest.raises(OSError, match="refused with 500"):
        hub.push(plan, api=HfApi(endpoint=stand_in.url))
    assert stand_in.files("me/my-agg") == {}
    with pytest.raises(OSError, match="can't be reached"):
        hub.push(plan, api=HfApi(endpoint="http://127.0.0.1:9"))


def test_the_card_is_valid_and_says_what_it_must(folder: Path, same_vectors: None, tmp_path: Path) -> None:
    model = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    results = [result_of(model), result_of(model, encoding={"folded_to": 10, "document_length": 128})]
    for place, result in enumerate(results):
        (tmp_path / f"{place}.json").write_text(json.dumps(result))
    (tmp_path / "summary.json").write_text("{}")
    statement = Statement(license="mit", results=[tmp_path], data_licences={"pairs.jsonl": "cc-by-4.0"})
    plan = hub.plan_push(folder, "me/my-agg", statement)
    parsed = ModelCard(plan.card)
    assert parsed.data.license == "mit"
    assert parsed.data.library_name == "sentence-transformers"
    figures = {(one.dataset_name, one.metric_name): one.metric_value for one in parsed.data.eval_results or []}
    assert figures == {("scifact", "nDCG@10"): 0.5, ("scifact", "RR@10"): 0.25}  # the folded ones in the text alone
    snippets = re.findall(r"```python\n(.*?)```", parsed.text, re.DOTALL)
    assert f'load_aggretriever("me/my-agg", revision="{plan.tag}")' in snippets[0]
    assert "trust_remote_code" not in snippets[0]
    assert f'SentenceTransformer("me/my-agg", trust_remote_code=True, revision="{plan.tag}")' in snippets[1]
    for snippet in snippets:
        compile(snippet, "snippet", "exec")
    said = ["| pairs.jsonl | 1,234 | cc-by-4.0 |", "batch_size 32", "learning_rate 0.0001", "torch 2.13.0",
            "| scifact, test, documents of 128 tokens | 0.5000 | 0.2500 |", "folded to 10 |", "trec_eval's",
            "lin-etal-2023-aggretriever", "query: who sails a ship?", hashlib.sha256(
                (folder / "st_aggretriever.py").read_bytes()).hexdigest()]  # fmt: skip
    assert [what for what in said if what not in plan.card] == []
    assert "/home/someone" not in plan.card
    assert "$" not in parsed.text


def test_the_tag_names_the_files_not_the_card(folder: Path, same_vectors: None, tmp_path: Path) -> None:
    plans = [hub.plan_push(folder, "me/m", Statement(license=name)) for name in ("mit", "apache-2.0")]
    assert plans[0].tag == plans[1].tag
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "NOTICE").write_text("new")
    assert hub.plan_push(tmp_path / "m", "me/m", Statement(license="mit")).tag != plans[0].tag


def test_without_a_licence_nothing_is_pushed(folder: Path, same_vectors: None, capsys: Any) -> None:
    assert main(["push", str(folder), "me/m", "--dry-run"]) == 2
    assert "push: no licence is stated. State by --license" in capsys.readouterr().err
    for bad in ("Apache 2.0", "other"):
        with pytest.raises(ValueError, match=r"identifier of the Hub's|needs its name"):
            Statement(license=bad)


def test_a_converted_checkpoint_keeps_its_licence(same_vectors: None, tmp_path: Path) -> None:
    castorini(tmp_path / "source")
    (tmp_path / "source" / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    convert_checkpoint(tmp_path / "source", tmp_path / "m")
    plan = hub.plan_push(tmp_path / "m", "me/m", Statement())
    assert ModelCard(plan.card).data.license == "cc-by-nc-4.0"
    with pytest.raises(ValueError, match=r"is under cc-by-nc-4\.0; it can't be published under mit"):
        hub.plan_push(tmp_path / "m", "me/m", Statement(license="mit"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_hash": "0" * 64}, r"figures of another model \(m, 000000000000\), not of this one"),
        ({"figures": None}, None),
    ],
)
def test_figures_of_another_model_are_refused(
    folder: Path, same_vectors: None, tmp_path: Path, change: dict[str, Any], message: str | None
) -> None:
    model = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    result = result_of(model, **change)
    if result["figures"] is None:
        del result["figures"]
    (tmp_path / "r.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match=message or "is no result of evaluate"):
        hub.plan_push(folder, "me/m", Statement(license="mit", results=[tmp_path / "r.json"]))


def test_what_must_not_leave_is_refused(folder: Path, same_vectors: None, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "notes.txt").write_text(f"login with {TOKEN}")
    with pytest.raises(ValueError, match=r"notes\.txt holds what looks like a token") as caught:
        hub.plan_push(tmp_path / "m", "me/m", STATEMENT)
    assert TOKEN not in str(caught.value)
    for name in ("m", "a/b/c", "me/two words", "me/-x"):
        with pytest.raises(ValueError, match="push: "):
            hub.plan_push(folder, name, STATEMENT)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        hub.plan_push(tmp_path / "nowhere", "me/m", STATEMENT)
    with pytest.raises(FileNotFoundError, match=r"there are no results at .*gone\.json"):
        hub.plan_push(folder, "me/m", Statement(license="mit", results=[tmp_path / "gone.json"]))
    # TensorBoard puts the machine's name into its files' names.
    (tmp_path / "m" / "notes.txt").unlink()
    (tmp_path / "m" / "runs").mkdir()
    (tmp_path / "m" / "runs" / "events.out.tfevents.17.some-host.1.0").touch()
    plan = hub.plan_push(tmp_path / "m", "me/m", STATEMENT)
    assert not [upload.path for upload in plan.uploads if "events" in upload.path]
    assert "runs/events.out.tfevents.17.some-host.1.0" in plan.left_out
    with pytest.raises(ValueError, match=r"other\.jsonl is none of the training data; these are pairs\.jsonl"):
        hub.plan_push(folder, "me/m", Statement(license="mit", data_licences={"other.jsonl": "mit"}))


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/home/someone/nq/train.jsonl", "/home/someone/tq/train.jsonl"], ["nq/train.jsonl", "tq/train.jsonl"]),
        (["nq/train.jsonl", "/home/someone/tq/train.jsonl"], ["nq/train.jsonl", "tq/train.jsonl"]),
        (["/home/someone/a/x/p.tsv", "/home/someone/b/x/p.tsv", "/d/q.tsv"], ["a/x/p.tsv", "b/x/p.tsv", "q.tsv"]),
    ],
)
def test_training_data_of_one_name_stay_apart(
    folder: Path, same_vectors: None, tmp_path: Path, paths: list[str], names: list[str]
) -> None:
    shutil.copytree(folder, tmp_path / "m")
    record = RECORD | {"pairs": {path: number for number, path in enumerate(paths, start=1000)}}
    record["config"] = RECORD["config"] | {"pairs": paths}
    (tmp_path / "m" / "train.json").write_text(json.dumps(record))
    licences = dict.fromkeys(names[1:], "cc0-1.0")
    plan = hub.plan_push(tmp_path / "m", "me/m", Statement(license="mit", data_licences=licences))
    uploaded = json.loads(next(upload.content for upload in plan.uploads if upload.path == "train.json"))
    assert uploaded["pairs"] == {name: number for number, name in enumerate(names, start=1000)}
    assert uploaded["config"]["pairs"] == names
    for number, name in enumerate(names):
        assert f"| {name} | 1,00{number} | {licences.get(name, 'not stated')} |" in plan.card
    name = Path(paths[0]).name
    with pytest.raises(ValueError, match=f"{name} is none of the training data; these are {names[0]}, "):
        hub.plan_push(tmp_path / "m", "me/m", Statement(license="mit", data_licences={name: "mit"}))


@pytest.mark.parametrize(
    ("lengths", "quantize", "said"),
    [
        ((None, 256), "none", "| scifact, test, queries of 32 and documents of 256 tokens | 0.5000"),
        ((16, None), "none", "| scifact, test, queries of 16 and documents of 128 tokens | 0.5000"),
        ((None, None), "bf16", "documents of 128 tokens, vocabulary product in bf16 | 0.5000"),
    ],
)
def test_figures_of_this_model_otherwise_than_saved_stand_under_what_they_are(
    folder: Path, same_vectors: None, tmp_path: Path, lengths: tuple[Any, Any], quantize: str, said: str
) -> None:
    """As ``evaluate --document-length`` and ``--quantize`` write them: the hash is of the model as it was measured."""
    model = load_aggretriever(folder, device="cpu", quantize=quantize)
    set_lengths(model, *lengths)
    encoding = Encoder(model, 1).settings(24)
    (tmp_path / "r.json").write_text(json.dumps(result_of(model, encoding=encoding)))
    plan = hub.plan_push(folder, "me/m", Statement(license="mit", results=[tmp_path / "r.json"]))
    assert said in plan.card
    assert not ModelCard(plan.card).data.eval_results  # of a model that doesn't behave so by itself
    (tmp_path / "r.json").write_text(json.dumps(result_of(model, encoding=encoding | {"document_length": 99})))
    with pytest.raises(ValueError, match="figures of another model"):
        hub.plan_push(folder, "me/m", Statement(license="mit", results=[tmp_path / "r.json"]))


@pytest.mark.parametrize(
    "change",
    [
        {"data": None},
        {"figures": {"SciFact": {"test": {"default": 0.5}}}},  # as evaluate mteb nests them, without data
        {"figures": {"nDCG@10": "0.5"}},
        {"figures": [0.5]},
        {"encoding": [1]},
        {"rules": [{}]},
    ],
)
def test_what_is_no_result_is_refused_by_name_and_left_out_of_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any]
) -> None:
    model = load_aggretriever(folder, device="cpu")
    found = tmp_path / "found"
    found.mkdir()
    (found / "other.json").write_text(json.dumps(result_of(model, **change)))
    monkeypatch.setattr(hub, "_check_fresh_process", lambda *_: pytest.fail("looked at the results too late"))
    for path, sentence in ((found / "other.json", r"other\.json is no"), (found, "found holds no")):
        with pytest.raises(
            ValueError, match=f"{sentence} result of evaluate: expected 'data', 'model_hash' and numbers"
        ):
            hub.plan_push(folder, "me/m", Statement(license="mit", results=[path]))
    (found / "r.trec").write_text("1 Q0 2 1 0.5 x\n")
    with pytest.raises(ValueError, match=r"r\.trec is no JSON: expected what evaluate --output has written"):
        hub.plan_push(folder, "me/m", Statement(license="mit", results=[found / "r.trec"]))
    monkeypatch.setattr(hub, "_check_fresh_process", lambda *_: 0.0)
    (found / "r.json").write_text(json.dumps(result_of(model)))
    assert "| 0.5000 | 0.2500 |" in hub.plan_push(folder, "me/m", Statement(license="mit", results=[found])).card


def test_figures_of_whole_documents_name_no_length_at_which_these_are_cut() -> None:
    encoding = {"query_length": 32, "document_length": 128, "windows": {"window": 40, "overlap": 8}}
    said = card._result_name({"data": "data/scifact", "split": "test", "encoding": encoding})
    assert said == "scifact, test, queries of 32 tokens, documents in windows of 40"
