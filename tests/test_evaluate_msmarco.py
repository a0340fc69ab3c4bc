"""MS MARCO's and TREC DL's files: relevance thresholds by hand, ids that coincide, run formats, bad lines."""

import gzip
import hashlib
import json
import math
from pathlib import Path

import pytest

from st_aggretriever import build_aggretriever
from st_aggretriever.cli import main
from st_aggretriever.evaluation.metrics import evaluate_run, metric_rules
from st_aggretriever.evaluation.msmarco import evaluate_msmarco
from st_aggretriever.evaluation.runs import read_run

pytrec_eval = pytest.importorskip("pytrec_eval")

# "yeast" is in 1 (twice) and 2; "sea" in 3 alone. Passage ids are query ids too.
PASSAGES = {"1": "yeast, yeast", "2": "yeast and bread", "3": "the sea", "4": "salt"}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    with gzip.open(tmp_path / "collection.tsv.gz", "wt") as file:
        file.write("".join(f"{key}\t{text}\n" for key, text in PASSAGES.items()))
    (tmp_path / "queries.tsv").write_text("1\tyeast\n3\tsea\n7\tnobody judged this\n")
    (tmp_path / "qrels.txt").write_text("1 Q0 1 1\n1 Q0 2 3\n3 Q0 3 1\n")
    return [str(tmp_path / name) for name in ("collection.tsv.gz", "queries.tsv", "qrels.txt")]


def test_dev_counts_grade_one_and_keeps_passages_with_the_querys_id(files: list[str]) -> None:
    result = evaluate_msmarco(None, *files)
    # Query 1 finds 1, 2; query 3 finds 3: all first places are relevant, though their ids are the queries'.
    assert result["figures"]["RR@10"] == 1.0
    assert result["figures"]["R@1000"] == 1.0
    assert result["counts"]["queries"] == 2
    assert result["counts"]["dropped_identical_ids"] == 0
    assert "grade of 1 or more" in " ".join(result["rules"])
    assert sorted(result["checksums"]) == ["collection.tsv.gz", "qrels.txt", "queries.tsv"]


def test_checksums_of_files_of_one_name_stand_side_by_side(tmp_path: Path) -> None:
    contents = {"collection": "1\tyeast\n2\tthe sea\n", "queries": "1\tyeast\n", "qrels": "1 Q0 1 1\n"}
    for folder, content in contents.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "dev.tsv").write_text(content)
    result = evaluate_msmarco(None, *(tmp_path / folder / "dev.tsv" for folder in contents))
    expected = {f"{name}/dev.tsv": hashlib.sha256(text.encode()).hexdigest() for name, text in contents.items()}
    assert result["checksums"] == expected


def test_dl_counts_grade_two_for_all_but_ndcg(files: list[str]) -> None:
    result = evaluate_msmarco(None, *files, measures="dl")
    # Query 1: passage 1 has grade 1, so the first relevant one stands second; query 3 has none.
    assert result["figures"]["RR@10"] == pytest.approx((1 / 2 + 0) / 2)
    assert result["figures"]["R@100"] == pytest.approx((1 + 0) / 2)
    ndcg = (1 + 3 / math.log2(3)) / (3 + 1 / math.log2(3))
    assert result["figures"]["nDCG@10"] == pytest.approx((ndcg + 1) / 2)
    assert result["counts"]["queries_without_relevant"] == 1
    assert "grade of 2 or more" in " ".join(result["rules"])


def test_relevance_level_is_trec_evals() -> None:
    qrels = {"q": {"a": 1, "b": 2, "c": 3, "d": 1}, "only": {"a": 1}}
    run = {"q": {"a": 4.0, "b": 3.0, "d": 2.0}, "only": {"a": 1.0}}
    measures = {"ndcg_cut.10", "recall.100", "map", "recip_rank"}
    trec = pytrec_eval.RelevanceEvaluator(qrels, measures, relevance_level=2).evaluate(run)
    for query, row in evaluate_run(qrels, run, relevance=2).items():
        theirs = trec[query]
        assert [row[name] for name in ("nDCG@10", "R@100", "MAP", "RR@10")] == [
            theirs[name] for name in ("ndcg_cut_10", "recall_100", "map", "recip_rank")
        ]
    with pytest.raises(ValueError, match="relevance must be at least 1, got 0"):
        evaluate_run(qrels, run, relevance=0)
    assert metric_rules() == metric_rules(relevance=1)


def test_command_with_a_model_and_both_run_formats(
    files: list[str], tiny_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4).save_pretrained(str(tmp_path / "model"))
    collection, queries, qrels = files
    base = ["evaluate", "msmarco", "--collection", collection, "--queries", queries, "--qrels", qrels]
    base += ["--model", str(tmp_path / "model"), "--device", "cpu", "--measures", "dl"]
    runs = [str(tmp_path / "run.trec"), str(tmp_path / "run.tsv")]
    output = tmp_path / "out.json"
    assert main([*base, "--run", runs[0], "--output", str(output)]) == 0
    assert main([*base, "--run", runs[1], "--format", "msmarco"]) == 0
    assert "nDCG@10" in capsys.readouterr().out
    trec, msmarco = map(read_run, runs)
    assert {query: list(row) for query, row in trec.items()} == {query: list(row) for query, row in msmarco.items()}
    assert list(trec) == ["1", "3"]
    assert sorted(trec["1"]) == ["1", "2", "3", "4"]
    result = json.loads(output.read_text())
    assert (result["benchmark"], result["split"], result["counts"]["truncated_documents"]) == (
        "msmarco",
        "qrels.txt",
        0,
    )


def test_bad_files_are_named_before_any_work(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    collection, queries, qrels = files
    base = ["evaluate", "msmarco", "--model", "bm25", "--collection", collection, "--queries", queries]
    for content, sentence in (("1 Q0 1\n", "qrels.txt line 1"), ("9 Q0 1 1\n", "query '9' is not in the queries file")):
        Path(qrels).write_text(content)
        assert main([*base, "--qrels", qrels]) == 2
        assert sentence in capsys.readouterr().err
    for content, sentence in (("1 yeast\n", "queries.tsv line 1: expected id<tab>text"),
                              ("1\ta\n1\tb\n", "queries.tsv line 2: id '1' occurs a second time"),
                              ("a b\tc\n", "line 1: expected id<tab>text"),
                              ("id\ttext\n", "holds no text")):  # fmt: skip
        Path(queries).write_text(content)
        assert main([*base, "--qrels", qrels]) == 2
        assert sentence in capsys.readouterr().err
    with pytest.raises(ValueError, match="measures must be dev or dl"):
        evaluate_msmarco(None, *files, measures="test")
    for top_k in (0, -5):
        with pytest.raises(ValueError, match=f"top_k must be at least 1, got {top_k}"):
            evaluate_msmarco(None, *files, top_k=top_k)
