"""Runs beside each other and fused: tests by hand, Holm, changed queries, the plot, weights tuned on dev only."""

import json
from pathlib import Path

import numpy as np
import pytest

from st_aggretriever.cli import main
from st_aggretriever.evaluation.compare import (
    compare_runs,
    compare_values,
    format_comparison,
    holm,
    randomisation_test,
    t_test,
)
from st_aggretriever.evaluation.fuse import fuse_convex, fuse_rrf, tune_weight
from st_aggretriever.evaluation.runs import read_run, run_lines

pytest.importorskip("pytrec_eval")


def test_t_test_by_hand() -> None:
    # Mean 2, deviation 1, t = 2 sqrt(3) with 2 degrees of freedom: p = 1 - t / sqrt(t^2 + 2).
    t = 2 * np.sqrt(3)
    assert t_test(np.array([1.0, 2.0, 3.0])) == pytest.approx(1 - t / np.sqrt(t * t + 2))
    assert t_test(np.array([-1.0, -2.0, -3.0])) == t_test(np.array([1.0, 2.0, 3.0]))
    assert t_test(np.zeros(5)) == 1.0
    assert t_test(np.full(5, 0.5)) == 0.0
    assert t_test(np.array([1.0])) == 1.0


def test_randomisation_by_hand() -> None:
    # Signs of 0.1, 0.2, -0.3 and a zero: the sum is 0, and every pattern's is at least as far from it.
    assert randomisation_test(np.array([0.1, 0.2, -0.3, 0.0])) == 1.0
    # 0.1 + 0.2 + 0.4: only +++ and --- of eight; sums in floating point must not hide one of them.
    assert randomisation_test(np.array([0.1, 0.2, 0.4])) == 0.25
    # 1 + 1 - 1: |1| is reached by all patterns.
    assert randomisation_test(np.array([1.0, 1.0, -1.0])) == 1.0
    assert randomisation_test(np.zeros(3)) == 1.0
    # 20 equal differences: 2 patterns of 2^20, so none of 2,000 random ones but the observed itself.
    assert randomisation_test(np.ones(20), resamples=2000) == 1 / 2001


def test_sampled_p_agrees_with_all_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([0.5, 0.1, -0.2, 0.3, 0.4, -0.1, 0.2, 0.3])
    exact = randomisation_test(values)
    monkeypatch.setattr("st_aggretriever.evaluation.compare.EXACT_LIMIT", 0)
    assert randomisation_test(values, resamples=20_000) == pytest.approx(exact, abs=0.01)
    assert randomisation_test(values, seed=1) == randomisation_test(values, seed=1)


def test_holm_by_hand() -> None:
    # 0.01 * 4, 0.02 * 3, 0.03 * 2, 0.9 * 1, never falling: 0.04, 0.06, 0.06, 0.9.
    assert holm([0.9, 0.01, 0.03, 0.02]) == pytest.approx([0.9, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


def test_differences_are_counted() -> None:
    found = compare_values(np.array([0.0, 1.0, 0.5]), np.array([1.0, 0.5, 0.5]))
    assert {key: found[key] for key in ("better", "worse", "equal")} == {"better": 1, "worse": 1, "equal": 1}
    assert found["difference"] == pytest.approx(0.5 / 3)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", "abcd"), ("queries", "1234")):
        rows = [json.dumps({"_id": key, "text": f"text of {key}"}) + "\n" for key in texts]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    header = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels" / "test.tsv").write_text(header + "1\ta\t1\n2\ta\t1\n3\ta\t1\n")
    (folder / "qrels" / "dev.tsv").write_text(header + "4\tb\t1\n")
    return folder


def write_run(path: Path, rankings: dict[str, str]) -> Path:
    run = {query: {key: float(-place) for place, key in enumerate(keys)} for query, keys in rankings.items()}
    path.write_text("".join(run_lines(run, "trec")))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    # RR@10 of "a" at 1, 2, 3: one run has 1, 1/2, 1/3, the other 1, 1, 0 (no hit for query 3).
    one = write_run(tmp_path / "one.trec", {"1": "abc", "2": "ba", "3": "cba"})
    two = write_run(tmp_path / "two.trec", {"1": "adc", "2": "ab"})
    three = tmp_path / "three.tsv"
    three.write_text("1\tb\t1\n1\ta\t2\n2\tb\t1\n2\ta\t2\n3\tb\t1\n3\ta\t2\n")
    return [str(one), str(two), str(three)]


def test_comparison_by_hand(data: Path, runs: list[str], tmp_path: Path) -> None:
    result = compare_runs(runs, data, metric="RR@10", output=tmp_path / "out.json")
    assert {name: row["RR@10"] for name, row in result["figures"].items()} == pytest.approx(
        {"one.trec": (1 + 1 / 2 + 1 / 3) / 3, "two.trec": 2 / 3, "three.tsv": 1 / 2}
    )
    pair = result["pairs"][0]
    assert pair["runs"] == ["one.trec", "two.trec"]
    assert (pair["better"], pair["worse"], pair["equal"]) == (1, 1, 1)
    assert [(row["query"], row["one.trec"], row["two.trec"]) for row in pair["changed"]] == [
        ("2", 0.5, 1.0), ("3", pytest.approx(1 / 3), 0.0),
    ]  # fmt: skip
    assert pair["p_randomisation"] == 1.0 == pair["p_randomisation_holm"]
    assert "over 3 pairs" in result["rules"][-1]
    assert json.loads((tmp_path / "out.json").read_text()) == result


def test_runs_of_one_name_in_two_folders_go_by_their_paths(data: Path, runs: list[str], tmp_path: Path) -> None:
    files = [tmp_path / name / "run.trec" for name in ("before", "after")]
    for file, run in zip(files, runs, strict=False):
        file.parent.mkdir()
        file.write_text(Path(run).read_text())
    assert list(compare_runs(files, data)["figures"]) == [str(file) for file in files]


def test_bad_input_is_one_sentence(data: Path, runs: list[str], tmp_path: Path) -> None:
    for files, sentence in (
        (runs[:1], "two or more different runs"),
        ([runs[0], runs[0]], "two or more different runs"),
    ):
        with pytest.raises(ValueError, match=sentence):
            compare_runs(files, data)
    with pytest.raises(ValueError, match="metric must be one of nDCG@10, RR@10"):
        compare_runs(runs, data, metric="P@3")
    for name, value, least in (("resamples", 0, 1), ("resamples", -5, 1), ("seed", -1, 0), ("changed", -1, 0)):
        with pytest.raises(ValueError, match=f"{name} must be at least {least}, got {value}"):
            compare_runs(runs, data, **{name: value})  # type: ignore[arg-type]
    bad = {"1 Q0 a 1 x tag": "expected 'query Q0", "1 a": "expected 'query Q0", "1 Q0 a 1 nan t": "score is NaN",
           "1 Q0 a 1 2 t\n1 Q0 a 2 1 t": "line 2: query '1' had document 'a' before"}  # fmt: skip
    for line, sentence in bad.items():
        (tmp_path / "bad").write_text(line + "\n")
        with pytest.raises(ValueError, match=sentence):
            read_run(tmp_path / "bad")


def test_a_document_of_the_querys_id_is_shown_only_where_it_counts(data: Path, tmp_path: Path) -> None:
    (data / "corpus.jsonl").write_text("".join(json.dumps({"_id": key, "text": key}) + "\n" for key in "1ab"))
    files = [write_run(tmp_path / "one", {"1": "1ba"}), write_run(tmp_path / "two", {"1": "1ab", "9": "a"})]
    for drop in (True, False):
        lines = list(format_comparison(compare_runs(files, data, metric="RR@10", drop_identical_ids=drop), files))
        assert any(line.startswith("      1: ") for line in lines) is not drop
        assert "two: 2 queries, 1 of the 3 judged here" in lines


def test_command_shows_changed_queries_and_draws(
    data: Path, runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    arguments = [*runs, "--data", str(data), "--metric", "RR@10", "--plot", str(plot)]
    assert main(["evaluate", "compare", *arguments]) == 0
    out = capsys.readouterr().out
    assert "two.trec - one.trec: RR@10 +0.0556; 1 queries better, 1 worse, 1 equal" in out
    assert "? 2: text of 2\n    one.trec 0.5000\n      b: text of b\n    * a: text of a\n    two.trec 1.0000" in out
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert main(["evaluate", "compare", *arguments]) == 2
    assert "plot.png exists" in capsys.readouterr().err


def test_rrf_by_hand() -> None:
    fused = fuse_rrf([{"q": {"a": 3.0, "b": 2.0}}, {"q": {"b": 0.9, "c": 0.5}, "p": {"a": 1.0}}])
    assert fused["q"] == pytest.approx({"b": 1 / 62 + 1 / 61, "a": 1 / 61, "c": 1 / 62})
    assert list(fused["q"]) == ["b", "a", "c"]
    assert fused["p"] == pytest.approx({"a": 1 / 61})
    assert list(fuse_rrf([{"q": {"9": 1.0, "10": 1.0}}, {"q": {}}])["q"]) == ["9", "10"]  # ties by id, descending
    with pytest.raises(ValueError, match="two or more runs, got 1"):
        fuse_rrf([{}])


def test_convex_combination_by_hand() -> None:
    one, two = {"q": {"a": 10.0, "b": 5.0, "c": 0.0}}, {"q": {"c": 0.2, "d": 0.1}, "p": {"x": 7.0}}
    fused = fuse_convex([one, two], 0.75)
    assert fused["q"] == pytest.approx({"a": 0.75, "b": 0.375, "c": 0.25, "d": 0.0})
    assert list(fused["q"]) == ["a", "b", "c", "d"]
    assert fused["p"] == {"x": 0.25}  # one hit: it has the highest score there is
    assert list(fuse_convex([one, two], 0.75, top_k=2)["q"]) == ["a", "b"]
    with pytest.raises(ValueError, match="scores must be finite numbers"):
        fuse_convex([{"q": {"a": float("inf"), "b": 1.0}}, two], 0.5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        fuse_convex([one, two], 1.5)
    with pytest.raises(ValueError, match="expected two runs, got 3"):
        fuse_convex([one, two, two], 0.5)


def test_weight_is_tuned_on_dev_queries_only() -> None:
    good, bad = {"4": {"b": 1.0, "a": 0.0}}, {"4": {"a": 1.0, "b": 0.0}}
    weight, figures = tune_weight([good, bad], {"4": {"b": 1}}, test_queries=["1", "2"])
    # At 0.5 both score 0.5 and "b" stands first by its id; everything above is as good.
    assert weight == 0.5
    assert figures["0.45"] < figures["0.50"] == figures["1.00"] == 1.0
    with pytest.raises(ValueError, match="1 dev queries, '4' among them, are queries of the runs"):
        tune_weight([good, bad], {"4": {"b": 1}}, test_queries=["4"])


def test_a_dev_document_of_its_querys_id_counts_where_they_are_numbered_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = {"4": {"4": 1.0, "a": 0.0}}, {"4": {"a": 1.0, "4": 0.0}}
    weight, figures = tune_weight([good, bad], {"4": {"4": 1}}, drop_identical_ids=False)
    assert (weight, figures["0.55"]) == (0.55, 1.0)  # at 0.5 both score 0.5, and "a" stands first by its id
    assert not caplog.records
    weight, figures = tune_weight([good, bad], {"4": {"4": 1}})
    assert (weight, set(figures.values())) == (0.5, {0.0})
    assert "1 dev document left out for having the query's id though judged relevant" in caplog.text


def test_fuse_command(data: Path, runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "fused"
    fuse = ["fuse", *runs[:2], "--output", str(output), "--overwrite"]
    assert main(fuse) == 0
    # a 2/61, c 2/63, then d and b with 1/62 each, ties by id, descending.
    assert list(read_run(output)["1"]) == ["a", "c", "d", "b"]
    dev = [str(write_run(tmp_path / f"dev-{name}", {"4": keys})) for name, keys in (("one", "ab"), ("two", "ba"))]
    tune = ["--method", "convex", "--dev-runs", *dev, "--dev-data", str(data)]
    capsys.readouterr()
    assert main([*fuse, *tune]) == 0
    assert f"weight of {runs[0]}: 0.5" in capsys.readouterr().out  # b stands first by its id at 0.5, and below
    for wrong, sentence in (
        (["--method", "convex"], "convex takes either --weight"),
        (["--weight", "0.5"], "rrf has no weight; leave --weight out"),
        (["--dev-ids-reused", "--dev-split", "x"], "rrf has no weight; leave --dev-split, --dev-ids-reused out"),
        (["--method", "convex", "--weight", "0.5", "--dev-runs", *dev], "--weight needs no dev set"),
        (["--method", "convex", "--weight", "2"], "weight must be between 0 and 1"),
        ([*tune, "--dev-split", "test"], "3 dev queries, '1' among them"),
    ):
        before = output.read_bytes()
        assert main([*fuse, *wrong]) == 2
        assert sentence in capsys.readouterr().err
        assert output.read_bytes() == before
    assert main([*fuse, *tune, "--dev-split", "test", "--dev-ids-reused", "--keep-identical-ids"]) == 0
