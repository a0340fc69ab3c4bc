"""BEIR's sets by name: downloads from a local server that breaks off, changes files or refuses; figures that go on."""

import hashlib
import http.server
import io
import json
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from st_aggretriever import build_aggretriever
from st_aggretriever.atomic import lock_file
from st_aggretriever.cli import main
from st_aggretriever.evaluation import beir_sets, download, evaluator, suite
from st_aggretriever.evaluation.beir import evaluate_beir
from st_aggretriever.evaluation.beir_sets import BEIR, LICENSED, NANO, PUBLIC, SMALL, SUBSETS, BeirSet, check_names
from st_aggretriever.evaluation.download import fetch
from st_aggretriever.evaluation.evaluator import BeirEvaluator, nano_evaluator
from st_aggretriever.evaluation.suite import evaluate_sets, format_sets, means
from st_aggretriever.folding import Folded

pytest.importorskip("pytrec_eval")
pytest.importorskip("bm25s")

CORPUS = {"d1": "bread needs yeast", "d2": "a ship sails the sea", "d3": "the moon is a star"}
# Grades that make nDCG@10 easy: q1 finds its document first, q2 has a word that no document has.
QUERIES = {"q1": "yeast", "q2": "paris"}
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t1\n\nq2\td3\t1\n"


def texts(records: dict[str, str]) -> str:
    return "".join(json.dumps({"_id": key, "title": "", "text": text}) + "\n" for key, text in records.items())


def archive(name: str, parts: tuple[str, ...] = ("",)) -> bytes:
    """A zip file as BEIR's, with things in it that nobody asked for."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as out:
        for part in parts:
            out.writestr(f"{name}/{part}corpus.jsonl", texts(CORPUS))
            out.writestr(f"{name}/{part}queries.jsonl", texts(QUERIES))
            out.writestr(f"{name}/{part}qrels/test.tsv", QRELS)
        out.writestr(f"__MACOSX/{name}/corpus.jsonl", "junk")
        out.writestr(f"{name}/../../escaped.txt", "junk")
        out.writestr(f"{name}/padding.bin", bytes(4000))
    return buffer.getvalue()


class Server(http.server.ThreadingHTTPServer):
    """Serves ``files``; ``faults`` are taken one a request: minus a status, or the bytes after which it breaks off."""

    files: dict[str, bytes]
    faults: list[int]
    ranges: list[str | None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        content = self.server.files.get(self.path.lstrip("/"))
        fault = self.server.faults.pop(0) if self.server.faults else 0
        if content is None or fault < 0:
            self.send_error(-fault or 404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : start + fault] if fault else content[start:])

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A stand-in for BEIR's server with two sets, small ones, one of them in two parts."""
    with Server(("127.0.0.1", 0), Handler) as served:
        served.files = {"tiny.zip": archive("tiny"), "forums.zip": archive("forums", ("sea/", "moon/"))}
        served.faults, served.ranges = [], []
        sums = {name: hashlib.md5(content).hexdigest() for name, content in served.files.items()}
        sets = {
            "tiny": BeirSet("tiny", sums["tiny.zip"], 999, {"tiny": (3, 2)}, "cc-test"),
            "forums": BeirSet("forums", sums["forums.zip"], 999, {"forums/sea": (3, 2), "forums/moon": (3, 2)}, "mit"),
        }
        for name, one in sets.items():
            monkeypatch.setitem(BEIR, name, one)
        monkeypatch.setattr(download, "WAIT", 0.0)
        monkeypatch.setattr(download, "_CHUNK", 256)
        monkeypatch.setenv(download.URL_VARIABLE, served.url)
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def test_the_tables_hold_what_was_published() -> None:
    assert len(PUBLIC) == 14
    assert len(SUBSETS["all"]) == 18
    assert len(NANO) == 13
    assert set(SMALL) == {"nfcorpus", "fiqa", "arguana", "scidocs", "scifact"} < set(PUBLIC)
    assert len(BEIR["cqadupstack"].counts) == 12
    # BEIR's table: 13,145 queries and 457K documents in all of CQADupStack.
    documents, queries = np.array(list(BEIR["cqadupstack"].counts.values())).sum(axis=0)
    assert (documents, queries) == (457_199, 13_145)
    assert all(len(one.md5) == 32 and len(set(one.md5) - set("0123456789abcdef")) == 0 for one in BEIR.values())
    assert len({one.md5 for one in BEIR.values()}) == len(BEIR)


def test_set_comes_whole_with_its_source_after_its_licence_is_said(server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    (path,) = fetch("tiny", tmp_path, say=lambda line: said.append(f"{len(server.ranges)} {line}"))
    assert said[0].startswith(f"0 tiny: 0.0 MB from {server.url}/tiny.zip; licence: cc-test")  # before any request
    assert sorted(file.name for file in path.rglob("*")) == [
        "corpus.jsonl", "qrels", "queries.jsonl", "source.json", "test.tsv",
    ]  # fmt: skip
    assert (path / "qrels" / "test.tsv").read_text() == QRELS.replace("\n\n", "\n")  # empty lines are BEIR's own
    source = json.loads((path / "source.json").read_text())
    assert source["md5"] == BEIR["tiny"].md5
    assert source["sha256"] == hashlib.sha256(server.files["tiny.zip"]).hexdigest()
    assert [file.name for file in tmp_path.iterdir()] == ["tiny"]
    fetch("tiny", tmp_path, say=said.append)
    assert len(server.ranges) == len(said) == 1  # it is there: nothing is asked or said again


def test_broken_connections_are_taken_up_where_they_broke(server: Server, tmp_path: Path) -> None:
    server.faults = [1000, 500]
    fetch("tiny", tmp_path, say=lambda _: None)
    assert server.ranges == [None, "bytes=1000-", "bytes=1500-"]


def test_connection_that_stays_broken_keeps_what_came_for_the_next_run(server: Server, tmp_path: Path) -> None:
    server.faults = [1000] + [-503] * download.TRIES
    with pytest.raises(OSError, match=r"503.*tiny\.zip\.part; run the same command again"):
        fetch("tiny", tmp_path, say=lambda _: None)
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.zip.part"]
    server.ranges.clear()
    fetch("tiny", tmp_path, say=lambda _: None)
    assert server.ranges == ["bytes=1000-"]


def test_interrupted_download_goes_on(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = http.client.HTTPResponse.read

    def interrupted(response: Any, amount: int | None = None) -> bytes:
        if response.headers["Content-Length"] and response.length < len(server.files["tiny.zip"]) - 1000:
            raise KeyboardInterrupt
        return read(response, amount)

    monkeypatch.setattr(http.client.HTTPResponse, "read", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"tiny\.zip\.part is kept"):
        fetch("tiny", tmp_path, say=lambda _: None)
    kept = (tmp_path / "tiny.zip.part").stat().st_size
    assert 1000 < kept < 2000
    monkeypatch.undo()
    monkeypatch.setitem(BEIR, "tiny", BeirSet("tiny", hashlib.md5(server.files["tiny.zip"]).hexdigest(), 9,
                                              {"tiny": (3, 2)}, "mit"))  # fmt: skip
    fetch("tiny", tmp_path, base_url=server.url, say=lambda _: None)
    assert server.ranges == [None, f"bytes={kept}-"]


def test_what_another_process_fetches_is_waited_for_and_taken(server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    held = lock_file(tmp_path / ".tiny.lock", "busy")
    thread = threading.Thread(target=fetch, args=("tiny", tmp_path), kwargs={"say": said.append})
    thread.start()
    while not said:
        assert thread.is_alive()
        time.sleep(0.01)
    assert said == [f"tiny: another process is fetching it into {tmp_path}, waiting for it"]
    (tmp_path / "tiny").mkdir()  # by that process
    held.close()
    thread.join(20)
    assert not thread.is_alive()
    assert (server.ranges, len(said)) == ([], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_download_that_was_complete_but_not_yet_named_is_checked_not_fetched_again(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "tiny.zip.part").write_bytes(server.files["tiny.zip"])
    (path,) = fetch("tiny", tmp_path, say=lambda _: None)
    assert path.is_dir()
    assert len(server.ranges) == 1


@pytest.mark.parametrize("begun", [b"", b"the beginning of another file"])
def test_wrong_checksum_is_named_and_nothing_stays(server: Server, tmp_path: Path, begun: bytes) -> None:
    if begun:
        (tmp_path / "tiny.zip.part").write_bytes(begun)
    else:
        server.files["tiny.zip"] += b"!"
    with pytest.raises(ValueError, match=rf"MD5 is [0-9a-f]{{32}}, expected {BEIR['tiny'].md5}; it was removed"):
        fetch("tiny", tmp_path, say=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_other_counts_than_published_are_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BEIR, "tiny", BEIR["tiny"]._replace(counts={"tiny": (4, 2)}))
    with pytest.raises(ValueError, match="expected 4 documents and 2 judged queries, got 3 and 2"):
        fetch("tiny", tmp_path, say=lambda _: None)
    assert not (tmp_path / "tiny").exists()


def test_missing_file_unknown_name_and_licence_are_said_in_a_sentence(server: Server, tmp_path: Path) -> None:
    server.files.clear()
    with pytest.raises(OSError, match="404"):
        fetch("tiny", tmp_path, say=lambda _: None)
    assert len(server.ranges) == 1  # such an answer isn't asked for again
    with pytest.raises(OSError, match=r"can't be downloaded .* A copy of your own goes in by --data"):
        fetch("tiny", tmp_path, base_url="http://127.0.0.1:9", say=lambda _: None)
    for name in LICENSED:
        with pytest.raises(ValueError, match=rf"{name} needs a licence and can't be downloaded: \w+"):
            fetch(name, tmp_path)
        (tmp_path / name).mkdir()
        assert fetch(name, tmp_path) == [tmp_path / name]  # got by oneself
    with pytest.raises(ValueError, match=r"got scifcat\. BEIR has msmarco, trec-covid"):
        check_names(["scifact", "scifcat"])
    with pytest.raises(ValueError, match="can't stand beside"):
        check_names(["scifact", "nano-scifact"])


def test_a_mirror_may_be_a_folder(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "tiny.zip").write_bytes(server.files["tiny.zip"])
    assert fetch("tiny", tmp_path, base_url=(tmp_path / "mirror").as_uri(), say=lambda _: None)[0].is_dir()
    assert server.ranges == []


def test_sets_are_evaluated_once_and_parts_count_as_their_mean(server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    options: dict[str, Any] = {"data": tmp_path / "data", "say": said.append}
    summary = evaluate_sets(None, ["tiny", "forums", "robust04"], tmp_path / "out", **options)
    # BM25: q1 finds d1 first; q2 shares no word with any document and finds nothing. So does every part.
    assert summary["sets"]["forums"] == summary["sets"]["tiny"] == {
        "nDCG@10": 0.5, "RR@10": 0.5, "R@100": 0.5, "R@1000": 0.5, "MAP": 0.5,
    }  # fmt: skip
    assert summary["means"] == {"2 sets": summary["sets"]["tiny"]}
    assert summary["left_out"] == ["robust04"]
    assert "left out: robust04, which needs a licence: apply for TREC disks 4 and 5" in said[0]
    names = ["forums-moon.json", "forums-sea.json", "summary.json", "tiny.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    assert json.loads((tmp_path / "out" / "tiny.json").read_text())["counts"]["queries_all_tied"] == 0
    # Interrupted before the last forum: only that one is evaluated again.
    (tmp_path / "out" / "forums-moon.json").unlink()
    before = (tmp_path / "out" / "tiny.json").stat().st_mtime_ns
    assert evaluate_sets(None, ["tiny", "forums", "robust04"], tmp_path / "out", **options)["sets"] == summary["sets"]
    assert (tmp_path / "out" / "tiny.json").stat().st_mtime_ns == before
    assert (tmp_path / "out" / "forums-moon.json").exists()
    table = "\n".join(format_sets(summary))
    assert "left out, a licence is needed: robust04" in table
    assert "mean" in table


def test_runs_of_another_evaluation_are_not_replaced_and_missing_ones_are_said(server: Server, tmp_path: Path) -> None:
    data, runs = tmp_path / "data", tmp_path / "runs"
    evaluate_sets(None, ["tiny"], tmp_path / "one", data=data, runs=runs)
    before = (runs / "tiny.trec").read_text()
    (runs / "tiny.trec").write_text("another model's")
    with pytest.raises(FileExistsError, match=r"tiny\.trec is there, but no figures for it in .*two\. Name another"):
        evaluate_sets(None, ["forums", "tiny"], tmp_path / "two", data=data, runs=runs)
    assert (runs / "tiny.trec").read_text() == "another model's"
    assert not (data / "forums").exists()

    (runs / "tiny.trec").unlink()
    said: list[str] = []
    evaluate_sets(None, ["tiny"], tmp_path / "one", data=data, runs=runs, say=said.append)
    assert f"without its run: remove it to have {runs / 'tiny.trec'} written" in said[0]
    (tmp_path / "one" / "tiny.json").unlink()
    evaluate_sets(None, ["tiny"], tmp_path / "one", data=data, runs=runs)
    assert (runs / "tiny.trec").read_text() == before


def test_figures_of_another_model_or_setting_are_not_taken(server: Server, tmp_path: Path, tiny_bert: str) -> None:
    model = build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4).to("cpu")
    options: dict[str, Any] = {"data": tmp_path / "data", "say": lambda _: None}
    evaluate_sets(model, ["tiny"], tmp_path / "out", model_name="one", **options)
    evaluate_sets(model, ["tiny"], tmp_path / "out", model_name="renamed", **options)  # the same by its hash
    with pytest.raises(ValueError, match=r"tiny\.json holds figures of another kind of model \(encoder, now bm25\)"):
        evaluate_sets(None, ["tiny"], tmp_path / "out", **options)
    with pytest.raises(ValueError, match=r"another top_k \(1000, now 10\)"):
        evaluate_sets(model, ["tiny"], tmp_path / "out", top_k=10, **options)
    folded = evaluate_sets(Folded(model, 4), ["tiny"], tmp_path / "folded", **options)
    assert (folded["folded_to"], folded["windows"]) == (4, None)
    assert "is folded to 4 dimensions" in " ".join(folded["rules"])
    queries = tmp_path / "data" / "tiny" / "queries.jsonl"
    queries.write_text(queries.read_text() + "\n".join([json.dumps({"_id": "new", "text": "new"})]) + "\n")
    with pytest.raises(ValueError, match=r"tiny\.json holds figures of other data \(queries\.jsonl changed since\)"):
        evaluate_sets(model, ["tiny"], tmp_path / "out", **options)
    (tmp_path / "out" / "tiny.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tiny\.json is no result"):
        evaluate_sets(model, ["tiny"], tmp_path / "out", **options)


def test_ms_marcos_passages_are_not_dropped_for_a_querys_number(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"data": tmp_path / "data", "say": lambda _: None}
    dropped = evaluate_sets(None, ["tiny"], tmp_path / "one", **options)
    assert "query's is dropped before the cut" in " ".join(dropped["rules"])
    assert suite.NUMBERED_APART == ("msmarco", "nano-msmarco")
    for module in (suite, evaluator):
        monkeypatch.setattr(module, "NUMBERED_APART", ("tiny",))
    evaluate_sets(None, ["tiny"], tmp_path / "two", **options)
    kept = json.loads((tmp_path / "two" / "tiny.json").read_text())
    assert "query's is kept in the cut" in " ".join(kept["rules"])
    seen = []
    monkeypatch.setattr(evaluator, "evaluate_beir", lambda *_, **options: seen.append(options) or kept)
    BeirEvaluator({"tiny": "", "other": ""})(torch.nn.Identity())
    assert [options["drop_identical_ids"] for options in seen] == [False, True]


@pytest.mark.parametrize("name", ["top_k", "batch_size", "block_size"])
def test_a_number_below_one_is_refused_before_anything_is_fetched(server: Server, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        evaluate_sets(None, ["tiny"], tmp_path / "out", data=tmp_path / "data", **{name: 0})
    assert server.ranges == []


def test_a_shallow_evaluation_of_sets_ends_with_what_it_measured(server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    summary = evaluate_sets(None, ["tiny"], tmp_path / "out", data=tmp_path / "data", top_k=5, say=said.append)
    assert "nDCG@10" not in summary["sets"]["tiny"]
    assert any(line.startswith("tiny: ") for line in said)
    assert list(format_sets(summary))


def test_means_are_of_sets_that_belong_together() -> None:
    figures = {name: {"nDCG@10": float(place)} for place, name in enumerate(PUBLIC)}
    found = means({**figures, "msmarco": {"nDCG@10": 99.0}})
    assert list(found) == ["BEIR small (the paper's five)", "13 public sets, without CQADupStack", "all 14 public sets"]
    assert found["all 14 public sets"]["nDCG@10"] == pytest.approx(6.5)
    small = [figures[name]["nDCG@10"] for name in SMALL]
    assert found["BEIR small (the paper's five)"]["nDCG@10"] == pytest.approx(sum(small) / 5)
    assert list(means({name: figures[name] for name in SMALL})) == ["BEIR small (the paper's five)"]
    assert list(means({name: {"nDCG@10": 1.0} for name in NANO})) == ["NanoBEIR, all 13 sets"]
    assert list(means({name: {"nDCG@10": 1.0} for name in list(NANO)[:2]})) == ["NanoBEIR, 2 sets"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Local copies of two of NanoBEIR's repositories, in the Hub's layout."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("nano-scifact", "nano-nq"):
        folder = tmp_path / "hub" / NANO[name].repository
        folder.mkdir(parents=True)
        configs = "".join(
            f"- config_name: {part}\n  data_files:\n  - split: train\n    path: {part}.jsonl\n"
            for part in ("corpus", "queries", "qrels")
        )
        (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
        (folder / "corpus.jsonl").write_text(texts(CORPUS))
        (folder / "queries.jsonl").write_text(texts(QUERIES))
        rows = [{"query-id": "q1", "corpus-id": "d1", "score": 1}, {"query-id": "q2", "corpus-id": "d3", "score": 1}]
        (folder / "qrels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setitem(NANO, name, NANO[name]._replace(documents=3, queries=2))
    return f"{tmp_path / 'hub'}/"


def test_nanobeir_comes_from_the_hub_and_is_the_trainers_evaluator(
    hub: str, tmp_path: Path, tiny_bert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = nano_evaluator(["nano-scifact", "nano-nq"], data=tmp_path / "data", hub=hub)
    model = build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4).to("cpu").train()
    values = judge(model)
    assert model.training
    expected = evaluate_beir(model, tmp_path / "data" / "nano-nq")["figures"]
    assert values["nano-nq_nDCG@10"] == expected["nDCG@10"]
    assert values["NanoBEIR_R@100"] == (values["nano-nq_R@100"] + values["nano-scifact_R@100"]) / 2
    assert judge.primary_metric == "NanoBEIR_nDCG@10"
    assert judge.primary_metric in values
    summary = evaluate_sets(None, ["nano-nq"], tmp_path / "out", data=tmp_path / "data", say=lambda _: None)
    assert summary["benchmark"] == "NanoBEIR"
    assert "never beside BEIR's own" in " ".join(summary["rules"])
    with pytest.raises(ValueError, match="expected names of NanoBEIR"):
        nano_evaluator(["scifact"])
    with pytest.raises(ValueError, match="at least one folder"):
        BeirEvaluator({})
    monkeypatch.setitem(NANO, "nano-nq", NANO["nano-nq"]._replace(documents=4))
    with pytest.raises(ValueError, match="expected 4 documents"):
        fetch("nano-nq", tmp_path / "again", hub=hub, say=lambda _: None)
    with pytest.raises(OSError, match="can't be had from the Hugging Face Hub"):
        fetch("nano-fiqa", tmp_path / "again", hub=hub, say=lambda _: None)


def test_command_by_names(server: Server, tmp_path: Path, tiny_bert: str, capsys: pytest.CaptureFixture[str]) -> None:
    build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4).save_pretrained(str(tmp_path / "model"))
    base = ["evaluate", "beir", "--model", str(tmp_path / "model"), "--device", "cpu"]
    base += ["--sets", "tiny", "forums", "--data-dir", str(tmp_path / "data")]
    command = [*base, "--output", str(tmp_path / "out"), "--run", str(tmp_path / "runs"), "--document-length", "5"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "licence: cc-test" in printed
    assert "queries are cut at 32 tokens, documents at 5; which lengths the Aggretriever paper used" in printed
    assert "on BEIR" in printed
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "forums-moon.trec", "forums-sea.trec", "tiny.trec",
    ]  # fmt: skip
    result = json.loads((tmp_path / "out" / "tiny.json").read_text())
    assert result["encoding"]["document_length"] == 5
    assert result["counts"]["truncated_documents"] == 2  # [CLS] + 5 or 6 words + [SEP]
    for more, sentence in (
        ([*command[:-1], "6"], "another pair of lengths ([32, 5], now [32, 6])"),
        ([*base], "need --output DIR"),
        ([*base, "--output", __file__], "is a file, expected a folder"),
        ([*command, "--split", "dev"], "--split belongs to --data"),
        ([*command[:-1], "9999"], "--document-length must be at least 3 and at most 512"),
    ):
        assert main(more) == 2
        assert sentence in capsys.readouterr().err


def test_a_mirror_that_is_no_address_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'nonsense' is no address of BEIR's zip files"):
        fetch("scifact", tmp_path, base_url="nonsense", say=lambda _: None)


def test_names_of_files_are_flat() -> None:
    assert suite._flat("cqadupstack/android") == "cqadupstack-android"
    assert beir_sets.split_of("msmarco") == "dev"
