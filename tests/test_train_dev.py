"""The development set of a training run: what is evaluated, which weights are kept, when it stops."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from training_runs import die_at, differing, interrupt, make_rows, record_inputs, weights, write_rows

from st_aggretriever import TrainConfig, dev, load_aggretriever, train
from st_aggretriever.dev import DevEvaluator, held_out
from st_aggretriever.evaluation.beir import evaluate_beir
from st_aggretriever.readers.training import open_training_data

pytest.importorskip("pytrec_eval")


@pytest.fixture(scope="session")
def dev_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BEIR folder of 12 queries and documents."""
    folder = tmp_path_factory.mktemp("dev")
    rows = make_rows(12, seed=5)
    write_rows(folder / "corpus.jsonl", [{"_id": f"d{n}", "text": row["passage"]} for n, row in enumerate(rows)])
    write_rows(folder / "queries.jsonl", [{"_id": f"q{n}", "text": row["query"]} for n, row in enumerate(rows)])
    (folder / "qrels").mkdir()
    judged = "".join(f"q{n}\td{n}\t1\n" for n in range(12))
    (folder / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return str(folder)


class Scripted(BaseEvaluator):
    """Gives the scores of a script, and remembers the weights that it was shown."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.primary_metric = "mine"
        self.scores = scores
        self.seen: list[dict[str, torch.Tensor]] = []

    def __call__(self, model: SentenceTransformer, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.seen.append(weights(model))
        return {"mine": self.scores[len(self.seen) - 1], "other": 1.0}


def record_of(settings: dict[str, Any]) -> dict[str, Any]:
    return json.loads((Path(settings["output"]) / "train.json").read_text())


def test_the_run_ends_with_the_weights_of_its_best_evaluation(settings: dict) -> None:
    """Every head among them (sentence-transformers' report 3344)."""
    judge = Scripted(0.1, 0.9, 0.3)
    model = train(TrainConfig(**settings, eval_steps=2, aggregation="linear"), evaluator=judge)
    assert differing(weights(model), judge.seen[1]) == set()
    assert differing(weights(load_aggretriever(settings["output"])), judge.seen[1]) == set()
    moved = {name.split(".")[0] for name in differing(judge.seen[1], judge.seen[2])}
    assert moved == {"0", "1", "2", "3"}  # encoder, term weight, linear aggregation, [CLS] projection
    record = record_of(settings)
    assert [(entry["step"], entry["score"]) for entry in record["dev"]] == [(2, 0.1), (4, 0.9), (6, 0.3)]
    assert (record["best_step"], record["steps"]) == (4, 6)


def test_the_last_weights_are_evaluated_too(settings: dict) -> None:
    judge = Scripted(0.1, 0.2)
    model = train(TrainConfig(**settings, eval_steps=4), evaluator=judge)
    assert [entry["step"] for entry in record_of(settings)["dev"]] == [4, 6]
    assert differing(weights(model), judge.seen[1]) == set()


def test_it_stops_after_so_many_evaluations_without_a_better_one(settings: dict) -> None:
    judge = Scripted(0.1, 0.5, 0.5, 0.4)  # as good is not better
    model = train(TrainConfig(**settings, eval_steps=1, patience=2), evaluator=judge)
    record = record_of(settings)
    assert (record["steps"], record["resolved"]["steps"], record["best_step"]) == (4, 6, 2)
    assert differing(weights(model), judge.seen[1]) == set()


def test_a_run_that_stops_early_knows_its_losses(settings: dict) -> None:
    """However rarely they are logged: here never within the run."""
    train(TrainConfig(**settings | {"logging_steps": 100}, eval_steps=1, patience=1), evaluator=Scripted(0.5, 0.4))
    assert [entry["step"] for entry in record_of(settings)["losses"]] == [1, 2]


def test_a_run_that_had_stopped_before_it_was_saved_takes_no_further_step(
    settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings |= {"eval_steps": 1, "patience": 2}
    judge = Scripted(0.5, 0.4, 0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("st_aggretriever.run_folder._card", lambda *args: 1 / 0)
        with pytest.raises(OSError, match="cannot write the model"):
            train(TrainConfig(**settings), evaluator=judge)
    die_at(monkeypatch, 4, AssertionError("a step too many"))
    model = train(TrainConfig(**settings, resume=True), evaluator=Scripted())
    assert differing(weights(model), judge.seen[0]) == set()


def test_dev_figures_are_those_of_the_evaluation(settings: dict, dev_folder: str) -> None:
    train(TrainConfig(**settings, dev_data=dev_folder, eval_steps=3))
    record = record_of(settings)
    best = next(entry for entry in record["dev"] if entry["step"] == record["best_step"])
    expected = evaluate_beir(load_aggretriever(settings["output"]), dev_folder, split="dev")["figures"]
    assert {name: best[name] for name in ("RR@10", "nDCG@10")} == {
        name: expected[name] for name in ("RR@10", "nDCG@10")
    }
    assert best["RR@10"] == max(entry["RR@10"] for entry in record["dev"])


def test_nanobeir_judges_by_the_mean_of_its_sets(
    settings: dict, dev_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(name: str, folder: str, **_: Any) -> None:
        shutil.copytree(dev_folder, tmp_path / folder / name)
        (tmp_path / folder / name / "qrels" / "dev.tsv").rename(tmp_path / folder / name / "qrels" / "test.tsv")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dev, "NANO", ["nano-scifact", "nano-nq"])
    monkeypatch.setattr(dev, "fetch", fetch)
    train(TrainConfig(**settings, dev_data="nanobeir", eval_steps=3))
    record = record_of(settings)
    expected = evaluate_beir(load_aggretriever(settings["output"]), dev_folder, split="dev")["figures"]["nDCG@10"]
    best = next(entry for entry in record["dev"] if entry["step"] == record["best_step"])
    assert best["score"] == best["NanoBEIR_nDCG@10"] == best["nano-nq_nDCG@10"] == expected


def test_nanobeir_out_of_reach_is_one_sentence(settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        OSError, match=r"can't be had from the Hugging Face Hub.*Fetched elsewhere .* copied to beir-data"
    ):
        train(TrainConfig(**settings, dev_data="nanobeir"))
    assert [path for path in tmp_path.rglob("*") if path.name != "beir-data"] == []


def test_evaluating_leaves_the_weights_as_they_are(settings: dict, dev_folder: str, tmp_path: Path) -> None:
    plain = weights(train(TrainConfig(**settings)))
    settings |= {"output": str(tmp_path / "judged"), "save_steps": 3}
    judge = Scripted(1, 2, 3, 4, 5, 6)
    assert differing(weights(train(TrainConfig(**settings, eval_steps=1), evaluator=judge)), plain) == set()


def test_a_resumed_run_with_evaluations_ends_alike(settings: dict, dev_folder: str, tmp_path: Path) -> None:
    settings |= {"dev_data": dev_folder, "eval_steps": 1, "dev_metric": "nDCG@10"}
    expected = weights(train(TrainConfig(**settings)))
    before = record_of(settings)["dev"]
    settings["output"] = str(tmp_path / "killed")
    assert "checkpoint-3 stays" in interrupt(settings, 4)
    assert differing(weights(train(TrainConfig(**settings, resume=True))), expected) == set()
    assert record_of(settings)["dev"] == before


def test_an_evaluator_that_names_its_figure_late_will_do(settings: dict) -> None:
    rows = make_rows(6, seed=3)
    texts = {f"d{n}": row["passage"] for n, row in enumerate(rows)}
    queries = {f"q{n}": row["query"] for n, row in enumerate(rows)}
    judge = InformationRetrievalEvaluator(queries, texts, {f"q{n}": {f"d{n}"} for n in range(6)}, name="six")
    assert judge.primary_metric is None
    train(TrainConfig(**settings, eval_steps=3), evaluator=judge)
    assert [entry["score"] for entry in record_of(settings)["dev"]] == [
        entry["six_dot_ndcg@10"] for entry in record_of(settings)["dev"]
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Pairs held out


def test_a_query_is_held_out_with_all_its_rows(tmp_path: Path) -> None:
    rows = make_rows(40, negatives=1)
    rows += [{**row, "passage": f"another {row['passage']}"} for row in rows]
    data = open_training_data([write_rows(tmp_path / "pairs.jsonl", rows)])
    left, collection = held_out(data, 0.3, seed=0)
    kept = {left.row(number)["query"] for number in range(len(left))}
    judged = set(collection.queries.values())
    assert kept | judged == {row["query"] for row in rows}
    assert not kept & judged
    assert 4 < len(judged) < 24  # 12 on the mean
    texts = dict(collection.corpus())
    for row in rows:
        if row["query"] in judged:
            key = next(key for key, query in collection.queries.items() if query == row["query"])
            relevant = {texts[document] for document in collection.qrels[key]}
            assert relevant == {row["passage"], row["passage"].removeprefix("another ")} | {
                f"another {row['passage'].removeprefix('another ')}"
            }
            assert row["negatives"][0] in texts.values()


def test_all_positives_of_a_held_out_row_are_judged(tmp_path: Path) -> None:
    rows = [
        {
            "query": f"q {n}",
            "positive_passages": [{"docid": f"p{n}-{p}", "title": "", "text": f"positive {n} {p}"} for p in range(3)],
            "negative_passages": [{"docid": f"n{n}-{p}", "title": "", "text": f"negative {n} {p}"} for p in range(4)],
        }
        for n in range(20)
    ]
    data = open_training_data([write_rows(tmp_path / "rows.jsonl", rows)], negatives=2)
    collection = held_out(data, 0.5, seed=0)[1]
    texts = dict(collection.corpus())
    assert len(texts) == len(collection.queries) * 5
    for key, query in collection.queries.items():
        number = query.removeprefix("q ")
        assert {texts[document] for document in collection.qrels[key]} == {f"positive {number} {p}" for p in range(3)}


def test_held_out_pairs_are_not_trained_on(settings: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings |= {"pairs": [write_rows(tmp_path / "pairs.jsonl", make_rows(40))], "batch_size": 4, "epochs": 1}
    data = open_training_data(settings["pairs"])
    left, _ = held_out(data, 0.4, seed=0)
    seen = record_inputs(monkeypatch)
    monkeypatch.setattr(DevEvaluator, "__call__", lambda self, model, *args, **kwargs: {"RR@10": 1.0, "nDCG@10": 1.0})
    train(TrainConfig(**settings, dev_share=0.4, eval_steps=100))
    queries = [texts for texts, _ in seen[::2]]
    assert len({text for batch in queries for text in batch}) == len(queries) * 4 == len(left) // 4 * 4
    assert record_of(settings)["resolved"]["pairs"] == len(left)
    card = (Path(settings["output"]) / "README.md").read_text()
    assert f" on {len(left)} pairs in " in card
    assert "The training folder's `train.json` has all\nsettings" in card  # which a copy by save_pretrained lacks


def test_a_share_that_holds_out_nothing_or_all_is_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"dev_share 1e-09 of the queries holds out 0 of 24 pairs"):
        train(TrainConfig(**settings, dev_share=1e-9))


def test_two_development_sets_and_patience_without_one_are_refused(settings: dict, dev_folder: str) -> None:
    with pytest.raises(ValueError, match="dev_data and dev_share are two development sets"):
        TrainConfig(**settings, dev_data=dev_folder, dev_share=0.1)
    with pytest.raises(ValueError, match="two development sets"):
        train(TrainConfig(**settings, dev_data=dev_folder), evaluator=Scripted())
    with pytest.raises(ValueError, match="patience needs a development set"):
        train(TrainConfig(**settings, patience=1))
