"""Evaluation on a BEIR folder: figures by hand, run and result files, rules, refusals, the command."""

import hashlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from st_aggretriever import build_aggretriever
from st_aggretriever.cli import main
from st_aggretriever.encoding import model_hash
from st_aggretriever.evaluation.beir import evaluate_beir
from st_aggretriever.evaluation.result import format_result

pytest.importorskip("pytrec_eval")

TERMS = ["cat", "dog", "fish", "bird"]
HEADER = "query-id\tcorpus-id\tscore\n"


class Counter:
    """An encoder whose vector counts four words; remembers the texts that it saw."""

    def __init__(self, similarity: str | None = None) -> None:
        self.similarity_fn_name = similarity
        self.texts: dict[str, list[str]] = {"query": [], "document": []}

    def encode_query(self, texts: list[str], **options: Any) -> np.ndarray:
        return self._encode("query", texts, options)

    def encode_document(self, texts: list[str], **options: Any) -> np.ndarray:
        return self._encode("document", texts, options)

    def _encode(self, side: str, texts: list[str], options: dict[str, Any]) -> np.ndarray:
        assert len(texts) <= 32 * options["batch_size"]
        self.texts[side] += texts
        vectors = np.array([[text.split().count(term) for term in TERMS] for text in texts], np.float64)
        if options["normalize_embeddings"]:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors


def write(folder: Path, documents: dict[str, Any], queries: dict[str, str], qrels: str) -> Path:
    (folder / "qrels").mkdir(parents=True)
    records = [{"_id": key, "text": text} if isinstance(text, str) else {"_id": key, **text}
               for key, text in documents.items()]  # fmt: skip
    (folder / "corpus.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = [json.dumps({"_id": key, "text": text}) + "\n" for key, text in queries.items()]
    (folder / "queries.jsonl").write_text("".join(lines))
    (folder / "qrels" / "test.tsv").write_text(HEADER + qrels)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """For q1 the scores are 10: 2, 9: 2, c: 1, d: 0; for q2 d: 1, the others 0. q0 has no judgement."""
    documents = {"10": "cat cat", "9": "cat cat dog", "c": {"title": "cat", "text": None}, "d": "fish"}
    queries = {"q0": "bird", "q2": "fish", "q1": "cat"}
    return write(tmp_path / "data", documents, queries, "q1\t10\t1\nq1\tc\t2\nq2\t9\t1\n")


# q1: "9" and "10" tie at 2 and "9" comes first; the ideal is grade 2, then 1. q2: d, then c, 9, 10 tied at 0.
Q1 = (1 / math.log2(3) + 2 / math.log2(4)) / (2 + 1 / math.log2(3))
Q2 = 1 / math.log2(4)
FIGURES = {
    "nDCG@10": (Q1 + Q2) / 2,
    "RR@10": (1 / 2 + 1 / 3) / 2,
    "R@100": 1.0,
    "R@1000": 1.0,
    "MAP": ((1 / 2 + 2 / 3) / 2 + 1 / 3) / 2,
}
RUN = """\
q1 Q0 9 1 2.0 st_aggretriever
q1 Q0 10 2 2.0 st_aggretriever
q1 Q0 c 3 1.0 st_aggretriever
q1 Q0 d 4 0.0 st_aggretriever
q2 Q0 d 1 1.0 st_aggretriever
q2 Q0 c 2 0.0 st_aggretriever
q2 Q0 9 3 0.0 st_aggretriever
q2 Q0 10 4 0.0 st_aggretriever
"""


@pytest.mark.parametrize("block_size", [1, 3, 100])
def test_figures_run_and_result_by_hand(data: Path, tmp_path: Path, block_size: int) -> None:
    model = Counter()
    run, output = tmp_path / "test.run", tmp_path / "test.json"
    result = evaluate_beir(
        model, data, block_size=block_size, batch_size=1, run=run, output=output, model_name="counter"
    )
    assert result["figures"] == pytest.approx(FIGURES)
    assert run.read_text() == RUN
    assert json.loads(output.read_text()) == result
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "test.json", "test.run"]
    assert model.texts == {"query": ["cat", "fish"], "document": ["cat cat", "cat cat dog", "cat", "fish"]}
    assert result["counts"] == {
        "queries": 2, "documents": 4, "empty_documents": 0, "dangling_qrels": 0, "queries_without_relevant": 0,
        "dropped_identical_ids": 0, "queries_all_tied": 0, "dropped_though_relevant": 0,
        "truncated_queries": None, "truncated_documents": None,
    }  # fmt: skip
    assert (result["model"], result["encoding"]["dimension"], result["date"][-6:]) == ("counter", 4, "+00:00")
    versions = result["versions"]
    assert set(versions) == {
        "st_aggretriever",
        "python",
        "sentence-transformers",
        "transformers",
        "torch",
        "numpy",
        "datasets",
        "accelerate",
        "faiss",
        "pytrec_eval",
        "bm25s",
        "mteb",
    }
    table = format_result(result)
    assert f"{FIGURES['nDCG@10']:.4f}" in table
    assert all(rule in table for rule in result["rules"])


def test_run_holds_each_score_digit_for_digit(data: Path, tmp_path: Path) -> None:
    evaluate_beir(Counter("cosine"), data, run=tmp_path / "run")
    scores = {line.split()[2]: float(line.split()[4]) for line in (tmp_path / "run").read_text().splitlines()[:4]}
    assert scores["9"] == float(np.float32(2 / math.sqrt(5))) != 2 / math.sqrt(5)


def test_cosine_models_are_normalised_and_the_rule_says_so(data: Path) -> None:
    result = evaluate_beir(Counter("cosine"), data)  # q1: c and 10 tie at 1, 9 has 0.894
    assert result["figures"]["nDCG@10"] == pytest.approx((1 + Q2) / 2)
    assert "cosine" in result["rules"][0]
    assert "cosine" not in evaluate_beir(Counter("dot"), data)["rules"][0]
    with pytest.raises(ValueError, match="must be dot or cosine, got manhattan"):
        evaluate_beir(Counter("manhattan"), data)


def test_identical_id_leaves_a_full_ranking(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    documents = {"a": "cat cat cat", "b": "cat cat", "c": "cat"}
    data = write(tmp_path / "data", documents, {"a": "cat", "z": "cat"}, "a\tb\t1\nz\tb\t1\n")
    dropped = evaluate_beir(Counter(), data, top_k=2, run=tmp_path / "dropped")
    assert [line.split()[2] for line in (tmp_path / "dropped").read_text().splitlines()] == ["b", "c", "a", "b"]
    assert dropped["counts"]["dropped_identical_ids"] == 1
    kept = evaluate_beir(Counter(), data, top_k=2, run=tmp_path / "kept", drop_identical_ids=False)
    assert [line.split()[2] for line in (tmp_path / "kept").read_text().splitlines()] == ["a", "b", "a", "b"]
    assert kept["counts"]["dropped_identical_ids"] == 0
    assert "dropped" in " ".join(dropped["rules"])
    assert "dropped" not in " ".join(kept["rules"])
    assert not caplog.records
    (data / "qrels" / "test.tsv").write_text(HEADER + "a\ta\t1\n")
    evaluate_beir(Counter(), data)
    assert "1 document left out for having the query's id though judged relevant" in caplog.text


def test_unknown_documents_lower_the_figures_under_one_warning(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    (data / "qrels" / "test.tsv").write_text(HEADER + "q1\t9\t1\nq1\tghost\t1\nq2\tghost\t1\n")
    with caplog.at_level(logging.WARNING):
        result = evaluate_beir(Counter(), data)
    assert result["figures"]["R@100"] == 0.25
    assert result["figures"]["nDCG@10"] == pytest.approx(1 / (1 + 1 / math.log2(3)) / 2)
    assert result["counts"]["dangling_qrels"] == 2
    assert len(caplog.records) == 1
    assert "2 judgements name documents that are not in the corpus" in caplog.text


def test_empty_documents_and_queries_without_order_are_counted_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = {"1": "", "2": {"title": " ", "text": None}, "3": "cat"}
    data = write(tmp_path / "data", documents, {"q": "cat", "r": "bird"}, "q\t3\t1\nr\t3\t1\n")
    result = evaluate_beir(Counter(), data)
    assert (result["counts"]["empty_documents"], result["counts"]["queries_all_tied"]) == (2, 1)
    assert "2 documents are empty" in caplog.text
    assert "of 1 query all hits have one score" in caplog.text


def test_queries_without_relevant_document_count_zero_and_are_counted(data: Path) -> None:
    (data / "qrels" / "test.tsv").write_text(HEADER + "q1\t9\t1\nq2\td\t0\n")
    result = evaluate_beir(Counter(), data)
    assert result["figures"]["RR@10"] == 0.5
    assert result["counts"]["queries_without_relevant"] == 1


@pytest.mark.parametrize("name", ["run", "output"])
def test_existing_file_is_refused_before_any_work(data: Path, tmp_path: Path, name: str) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    model = Counter()
    with pytest.raises(FileExistsError, match="taken exists"):
        evaluate_beir(model, data, **{name: taken})
    assert taken.read_text() == "mine"
    assert model.texts["query"] == []
    evaluate_beir(model, data, **{name: taken}, overwrite=True)
    assert taken.read_text() != "mine"
    with pytest.raises(FileNotFoundError, match=r"the folder of .* does not exist"):
        evaluate_beir(model, data, **{name: tmp_path / "no" / "file"})
    with pytest.raises(ValueError, match="two outputs are both"):
        evaluate_beir(model, data, run=tmp_path / "one", output=tmp_path / "one")


def test_failure_leaves_no_file(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Counter):
        def encode_document(self, texts: list[str], **options: Any) -> np.ndarray:
            return super().encode_document(texts, **options) * np.nan

    with pytest.raises(ValueError, match="document '10' is not finite"):
        evaluate_beir(Broken(), data, run=tmp_path / "run", output=tmp_path / "json")

    def half(rankings: Any, format: str) -> Any:
        yield "half a run"
        raise OSError("no space left")

    monkeypatch.setattr("st_aggretriever.evaluation.result.run_lines", half)
    with pytest.raises(OSError, match="no space left"):
        evaluate_beir(Counter(), data, run=tmp_path / "run", output=tmp_path / "json")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]

    def full(*_: Any, **__: Any) -> str:
        raise OSError("no space left")

    monkeypatch.undo()
    monkeypatch.setattr("st_aggretriever.evaluation.result.json.dumps", full)
    with pytest.raises(OSError, match="no space left"):
        evaluate_beir(Counter(), data, run=tmp_path / "run", output=tmp_path / "json")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_ids_with_blanks_are_refused_only_where_a_run_is_written(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a b": "cat", "c": "dog"}, {"q": "cat"}, "q\ta b\t1\n")
    assert evaluate_beir(Counter(), data)["figures"]["RR@10"] == 1
    model = Counter()
    with pytest.raises(ValueError, match="document id 'a b' holds blanks"):
        evaluate_beir(model, data, run=tmp_path / "run")
    assert model.texts["query"] == []


def test_last_bad_line_is_found_before_the_first_document_is_encoded(data: Path) -> None:
    with (data / "corpus.jsonl").open("a") as file:
        file.write("{\n")
    model = Counter()
    with pytest.raises(ValueError, match=r"corpus\.jsonl line 5: expected a JSON object"):
        evaluate_beir(model, data)
    assert model.texts["query"] == []


@pytest.fixture(scope="module")
def models(tiny_bert: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of an Aggretriever and of a plain sentence-transformers model."""
    paths = {name: str(tmp_path_factory.mktemp("models") / name) for name in ("aggretriever", "plain")}
    build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4).save_pretrained(paths["aggretriever"])
    encoder = Transformer(tiny_bert)
    plain = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())])
    plain.save_pretrained(paths["plain"])
    return paths


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Texts that are data: empty ones, a lone surrogate, 10,000 words, a null title."""
    documents = {"1": "", "2": "bread \ud800 salt", "3": "sea " * 10_000, "4": {"title": None, "text": "cat"}}
    return write(tmp_path / "odd", documents, {"q": "cat \udfff", "r": ""}, "q\t4\t1\nr\t1\t1\n")


@pytest.mark.parametrize(("name", "similarity"), [("aggretriever", "dot"), ("plain", "cosine")])
def test_command_prints_and_writes_the_figures(
    models: dict[str, str], odd: Path, name: str, similarity: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, run = tmp_path / "out.json", tmp_path / "out.run"
    arguments = ["--model", models[name], "--data", str(odd), "--output", str(output), "--run", str(run)]
    assert main(["evaluate", "beir", *arguments, "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    result = json.loads(output.read_text())
    assert printed.out.startswith(format_result(result))
    assert f"figures written to {output}" in printed.out
    assert "documents" not in printed.err  # no progress bar where nobody watches
    assert result["encoding"]["similarity"] == similarity
    assert result["encoding"]["prompts"] == {"query": "", "document": ""}
    # 3, "sea" 10,000 times, is longer than either model reads; every figure's origin stands beside it.
    assert (result["counts"]["truncated_queries"], result["counts"]["truncated_documents"]) == (0, 1)
    assert "truncated documents: 1" in printed.out
    assert result["model_hash"] == model_hash(SentenceTransformer(models[name], device="cpu", trust_remote_code=True))
    sums = {path: hashlib.sha256((odd / path).read_bytes()).hexdigest() for path in result["checksums"]}
    assert result["checksums"] == sums
    assert sorted(sums) == ["corpus.jsonl", "qrels/test.tsv", "queries.jsonl"]
    if name == "aggretriever":
        assert (result["encoding"]["query_length"], result["encoding"]["document_length"]) == (32, 128)
    assert len(run.read_text().splitlines()) == 2 * 4


def test_command_answers_bad_input_with_one_sentence(
    models: dict[str, str], odd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    broken = write(tmp_path / "broken", {"1": "x"}, {"q": "x"}, "q\t1\t1\nghost\t1\t1\n")
    model = models["aggretriever"]
    cases = [
        ([tmp_path / "no-model", odd], "no folder"),
        ([tmp_path, odd], "no modules.json"),
        ([model, tmp_path / "no-data"], "no-data is not a folder"),
        ([model, odd, "--split", "dev"], "has no qrels/dev.tsv. It has test."),
        ([model, odd, "--output", taken], "taken exists"),
        ([model, odd, "--top-k", 0], "top_k must be at least 1"),
        ([model, odd, "--device", "toaster"], "device 'toaster' can't be used here"),
        ([model, broken], "test.tsv line 3: query 'ghost'"),
    ]
    for (name, data, *more), sentence in cases:
        assert main(["evaluate", "beir", "--model", str(name), "--data", str(data), *map(str, more)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        last = printed.err.splitlines()[-1]  # a bar of transformers may stand before it
        assert last.startswith("st-aggretriever: ")
        assert sentence in last
    assert taken.read_text() == "mine"
