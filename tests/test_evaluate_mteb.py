"""MTEB with tasks in memory: our scores are mteb's, and no model gets another one's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mteb = pytest.importorskip("mteb")

from datasets import Dataset  # noqa: E402
from mteb.abstasks import AbsTaskRetrieval  # noqa: E402
from mteb.abstasks.task_metadata import TaskMetadata  # noqa: E402

from st_aggretriever import build_aggretriever  # noqa: E402
from st_aggretriever.cli import main  # noqa: E402
from st_aggretriever.evaluation.beir import evaluate_beir  # noqa: E402
from st_aggretriever.evaluation.mteb import ExactIndex, evaluate_mteb, find_tasks, format_mteb  # noqa: E402

WORDS = "dog cat fox bird fish paris france capital city river quick brown lazy bread flour water salt oven".split()
DOCUMENTS = {f"d{number}": f"{WORDS[number]} {WORDS[(number * 5 + 1) % 18]} and the" for number in range(18)}
QUERIES = {f"q{number}": f"{WORDS[number]} {WORDS[number + 1]}" for number in range(6)} | {"d7": "brown", "qx": "the"}
QRELS = {f"q{number}": {f"d{number}": 1, f"d{number + 2}": 2} for number in range(6)} | {"d7": {"d7": 1, "d8": 1}}


class InMemory(AbsTaskRetrieval):
    metadata = TaskMetadata(
        name="InMemory", type="Retrieval", main_score="ndcg_at_10", description="words", category="t2t",
        dataset={"path": "none/none", "revision": "1"}, eval_splits=["test"], eval_langs=["eng-Latn"], reference=None,
        modalities=["text"], date=None, domains=None, task_subtypes=None, license=None, annotations_creators=None,
        dialect=None, sample_creation=None, bibtex_citation=None,
    )  # fmt: skip

    def load_data(self, **_: Any) -> None:
        corpus = [{"id": key, "title": "", "text": text} for key, text in DOCUMENTS.items()]
        queries = [{"id": key, "text": text} for key, text in QUERIES.items() if key in QRELS]
        split = {"corpus": Dataset.from_list(corpus), "queries": Dataset.from_list(queries), "relevant_docs": QRELS}
        self.dataset = {"default": {"test": {**split, "top_ranked": None}}}
        self.data_loaded = True


@pytest.fixture(scope="module")
def models(tiny_bert: str) -> list[Any]:
    options = {"lexical_dim": 16, "cls_dim": 4, "query_length": 8, "prompts": {"query": "what is ", "document": ""}}
    return [build_aggretriever(tiny_bert, seed=seed, **options).to("cpu") for seed in (0, 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    (data / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", DOCUMENTS), ("queries", QUERIES)):
        lines = [json.dumps({"_id": key, "text": text}) + "\n" for key, text in texts.items()]
        (data / f"{name}.jsonl").write_text("".join(lines))
    rows = [f"{query}\t{key}\t{grade}\n" for query, grades in QRELS.items() for key, grade in grades.items()]
    (data / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
    return data


def score(result: dict[str, Any]) -> float:
    return float(result["figures"]["InMemory"]["test"]["default"])


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_two_models_in_one_cache_have_their_own_scores_equal_to_ours(
    models: list[Any], folder: Path, tmp_path: Path, backend: str
) -> None:
    ours = [evaluate_beir(model, folder, drop_identical_ids=False)["figures"]["nDCG@10"] for model in models]
    assert ours[0] != pytest.approx(ours[1], abs=1e-3)
    results = [evaluate_mteb(model, [InMemory()], tmp_path / "mteb", name="mine", backend=backend) for model in models]
    assert [score(result) for result in results] == pytest.approx(ours, abs=1e-5)  # mteb rounds to five places
    again = evaluate_mteb(models[0], [InMemory()], tmp_path / "mteb", name="mine")
    assert score(again) == score(results[0])
    assert again["counts"] == {}  # taken from the cache, nothing encoded


def test_a_name_and_revision_belong_to_one_model(models: list[Any], tmp_path: Path) -> None:
    evaluate_mteb(models[0], [InMemory()], tmp_path, name="me/mine", revision="v1")
    with pytest.raises(ValueError, match="results of another model under the name and revision me/mine@v1"):
        evaluate_mteb(models[1], [InMemory()], tmp_path, name="me/mine", revision="v1")


@pytest.mark.parametrize("content", ["[]", "{", None])
def test_an_output_of_another_kind_is_one_sentence(models: list[Any], tmp_path: Path, content: str | None) -> None:
    output = tmp_path / "out"
    if content is None:
        output.write_text("a file")
    else:
        output.mkdir()
        (output / "models.json").write_text(content)
    with pytest.raises((ValueError, FileExistsError), match=r"models\.json is broken|out is a file"):
        evaluate_mteb(models[0], [InMemory()], output, name="mine")


def test_result_holds_prompts_cut_texts_and_a_file_for_a_submission(models: list[Any], tmp_path: Path) -> None:
    models[0].prompts["query"] = "what is the capital city of "
    try:
        result = evaluate_mteb(models[0], [InMemory()], tmp_path, name="mine", batch_size=4)
    finally:
        models[0].prompts["query"] = "what is "
    # [CLS] + 6 + 2 + [SEP] is 10 tokens of the 8 that queries have; "brown" alone makes 9.
    assert result["counts"]["InMemory"] == {
        "document_texts": 18, "truncated_document_texts": 0, "query_texts": 7, "truncated_query_texts": 7,
    }  # fmt: skip
    assert result["prompts"]["InMemory"] == {"query": "what is the capital city of ", "document": ""}
    assert result["datasets"] == {"InMemory": "1"}
    assert json.loads((tmp_path / "st_aggretriever.json").read_text()) == result
    (meta,) = tmp_path.rglob("model_meta.json")
    written = json.loads(meta.read_text())
    assert (written["name"], written["revision"]) == ("local/mine", result["model_hash"][:16])
    text = format_mteb(result)
    assert "query prompt 'what is the capital city of '" in text
    assert f"{score(result):.4f}" in text
    assert "truncated query texts 7" in text


def test_index_reranks_candidates_and_breaks_ties_at_the_cut_by_id() -> None:
    index = ExactIndex(normalise=False)
    index.add_documents(np.array([[1, 0], [1, 0], [3, 0], [0, 2]], np.float32), ["a", "b", "c", "d"])
    scores, positions = index.search(np.array([[1, 0]], np.float32), 2, similarity_fn=np.dot)
    assert (scores, positions) == ([[3.0, 1.0]], [[2, 1]])  # b before a
    ranked = {"q": ["d", "c", "a"]}
    query = np.array([[1, 1]], np.float32)
    scores, positions = index.search(query, 2, np.dot, top_ranked=ranked, query_idx_to_id={0: "q"})
    assert (scores, positions) == ([[3.0, 2.0]], [[1, 0]])
    cosine = ExactIndex(normalise=True)
    cosine.add_documents(np.array([[9, 9], [1, 0]], np.float32), ["a", "b"])
    assert cosine.search(np.array([[5, 0]], np.float32), 1, np.dot) == ([[1.0]], [[1]])


def test_command_refuses_unknown_names_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["evaluate", "mteb", "--model", "no/model", "--output", str(tmp_path / "out")]
    for more, sentence in ((["--tasks", "NoSuchTask"], "NoSuchTask"), (["--benchmark", "NoSuch"], "NoSuch"),
                           ([], "either --tasks or --benchmark")):  # fmt: skip
        assert main([*base, *more]) == 2
        printed = capsys.readouterr().err.strip().splitlines()
        assert sentence in printed[-1]
    assert not (tmp_path / "out").exists()
    assert [task.metadata.name for task in find_tasks(["SciFact"], None)] == ["SciFact"]


def test_command_runs_a_task(
    models: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models[0].save_pretrained(str(tmp_path / "mine"))
    monkeypatch.setattr(mteb, "get_task", lambda name: InMemory())
    arguments = ["--model", str(tmp_path / "mine"), "--tasks", "InMemory", "--output", str(tmp_path / "out")]
    assert main(["evaluate", "mteb", *arguments, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("local/mine (")
    assert "query prompt 'what is '" in printed
