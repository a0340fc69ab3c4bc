"""benchmarks/paper: tables resume, share encodings, print their JSON, and judge findings as they say."""

import dataclasses
import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import st_aggretriever
from st_aggretriever.fold import fold_lexical

MINI = Path(st_aggretriever.__file__).parent / "assets" / "mini"
PAPER = Path(__file__).parent.parent / "benchmarks" / "paper"


@pytest.fixture(scope="module")
def paper() -> Iterator[SimpleNamespace]:
    """The modules of the folder, which import each other by their bare names."""
    import importlib

    names = [path.stem for path in PAPER.glob("*.py")]
    sys.path.insert(0, str(PAPER))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(PAPER))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def small(paper: SimpleNamespace) -> Any:
    """A table of two trained models, seen in several ways, and BM25."""
    agg, cls, Row = paper.arms.agg, paper.arms.cls, paper.arms.Row
    model = agg(cls_dim=8, lexical_dim=16)
    rows = [
        Row(name="BM25", model=paper.arms.BM25),
        Row(name="random: AGG", model=model),
        Row(name="lexical part", model=model, part="lexical"),
        Row(name="folded", model=model, fold=8),
        Row(name="fused", model=model, fused=True),
        Row(name="random: CLS", model=cls(width=8)),
    ]
    names = [collection.name for collection in paper.scales.SMOKE.collections]
    return paper.arms.Table(name="main", title="Small", rows=rows, seeds=(0,), collections=names)


@pytest.fixture(scope="module")
def scale(paper: SimpleNamespace) -> Any:
    return dataclasses.replace(paper.scales.SMOKE, steps=(1, 1))


@pytest.fixture(scope="module")
def twice(paper: SimpleNamespace, small: Any, scale: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A table that was interrupted in its second training, and what came of it then; and once more when it was done."""
    home = tmp_path_factory.mktemp("paper")

    said: list[str] = []

    def runner() -> Any:
        made = paper.runner.Runner(scale, None, None, home / "work", home / "results")
        made.say = said.append
        return made

    (home / "results").mkdir()
    original, calls = paper.fit.train, []

    def train(config: Any) -> Any:
        calls.append(config.output)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper.fit, "train", train)
        with pytest.raises(KeyboardInterrupt):
            paper.table.fill(runner(), small)
        said.clear()
        resumed, again = runner(), runner()
        result = paper.table.fill(resumed, small)
        repeated = paper.table.fill(again, small)
    paper.table.refresh(scale, home / "results", result)
    return SimpleNamespace(
        home=home, calls=calls, said=said, resumed=resumed, again=again, result=result, repeated=repeated
    )


def test_a_table_that_was_interrupted_trains_nothing_again(twice: Any) -> None:
    first, second, third = twice.calls
    assert second == third != first
    assert twice.resumed.done["train"] == 1
    assert twice.again.done == {"sweep": 0, "train": 0, "mine": 0, "encode": 0}
    assert twice.result["grids"] == twice.repeated["grids"]


def test_what_was_really_done_is_counted_as_it_is_done(twice: Any) -> None:
    # BM25 and the rows of the first model but its fused one were kept; that one's dev split is encoded in its turn.
    assert [line for line in twice.said if line.startswith("main")] == [
        "main: 5 of 6 rows and seeds, last random: CLS, seed 0",
        "main: 6 of 6 rows and seeds, last fused, seed 0",
    ]


def test_an_interruption_while_a_table_is_written_is_one_line(
    paper: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(paper.table.report, "write", interrupt)
    with pytest.raises(SystemExit) as ended:
        paper.table.main(paper.latency.make, paper.latency.measured, ["--work", str(tmp_path / "work")])
    assert ended.value.code == 130
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith("the same command goes on from " + f"{tmp_path / 'work' / 'results'} and {tmp_path / 'work'}")
    )


def test_what_another_process_makes_is_left_to_it_and_waited_for(
    paper: SimpleNamespace, twice: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, row = twice.again, small.rows[1]
    held = runner.alone(runner.run_id(row.model, 0))
    asked: list[str] = []
    original = runner.figures
    monkeypatch.setattr(runner, "figures", lambda row, *rest: asked.append(row.name) or original(row, *rest))
    monkeypatch.setattr(paper.table.time, "sleep", lambda _: held.close())
    names = list(runner.collections)
    with pytest.raises(BlockingIOError):
        original(row, 0, names)
    found = paper.table._figures(runner, small, names)
    of_the_model = [r.name for r in sorted(small.rows, key=lambda r: r.fused) if r.model == row.model]
    assert asked == [r.name for r in sorted(small.rows, key=lambda r: r.fused)] + 2 * of_the_model
    assert found[row.name] == [runner.record(row.model, 0)["figures"][row.view]]


def test_the_better_whole_run_of_the_sweep_is_the_model_of_seed_0(
    paper: SimpleNamespace, twice: Any, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = dataclasses.replace(twice.again.scale, rates=(1e-3, 2e-3, 3e-3), factors=(1.0, 5.0))
    (tmp_path / "results").mkdir()
    runner = paper.runner.Runner(scale, None, None, tmp_path / "work", tmp_path / "results")
    dev = {(1e-3, 1.0): 0.1, (1e-3, 5.0): 0.4, (2e-3, 5.0): 0.6}  # each better than the first by more than noise
    original, fitted = paper.runner.fit, []

    def fit(scale: Any, run: Any, folder: Path) -> dict[str, Any]:
        if not folder.exists():
            fitted.append((run.rate, run.factor, run.seed))
        if run.rate == 3e-3:
            raise paper.runner.DivergedError("train: the training diverged")
        return original(scale, run, folder) | {"dev_curve": [[1, dev[run.rate, run.factor]]]}

    monkeypatch.setattr(paper.runner, "fit", fit)
    model = small.rows[1].model
    runner.trained(model, 0)
    assert fitted == [(1e-3, 1.0, 0), (1e-3, 5.0, 0), (1e-3, 5.0, 0), (2e-3, 5.0, 0), (3e-3, 5.0, 0)]
    assert runner.done == {"sweep": 5, "train": 0, "mine": 0, "encode": 0}
    assert {name: runner.record(model, 0)["training"][name] for name in ("rate", "factor")} == {
        "rate": 2e-3,
        "factor": 5,
    }
    assert not list((tmp_path / "work" / "sweeps").iterdir())
    runner.trained(model, 1)
    assert fitted[5:] == [(2e-3, 5.0, 1)]
    chosen = next((tmp_path / "results").glob("runs-*/sweep-*.json"))
    chosen.write_text(chosen.read_text().replace('"rate": 0.002', '"rate": 0.001'))
    (tmp_path / "work" / "models" / runner.run_id(model, 1) / "fit.json").unlink()
    with pytest.raises(ValueError, match="has another rate or factor than its sweep"):
        runner.trained(model, 1)


def test_sparsity_of_wide_vectors_is_told(paper: SimpleNamespace, twice: Any) -> None:
    row = paper.arms.Row(name="words", model=paper.arms.agg(pooling="tokens", aggregation="none", cls_dim=0))
    table = paper.arms.Table(name="sparse", title="", rows=[row], seeds=(0,), collections=["first"])
    runner = paper.runner.Runner(twice.again.scale, None, None, twice.home / "work", twice.home / "results")
    runner.figures(row, 0, ["first"])
    texts = [text for _, text in runner._corpus(runner.collections["first"])()]
    vectors = runner._model(row.model, 0).encode_document(texts)
    mean = np.count_nonzero(vectors, axis=1).mean()
    assert 1 < mean < 24  # its own tokens, at most as many as are read
    assert paper.table._sparsity_notes(runner, table) == [
        f"words: {mean:,.0f} non-zero weights a document, the mean of all."
    ]


def test_figures_of_other_files_are_refused(paper: SimpleNamespace, twice: Any, small: Any) -> None:
    runner = paper.runner.Runner(twice.again.scale, None, None, twice.home / "work", twice.home / "results")
    qrels = runner.prepared / "first" / "qrels" / "test.tsv"
    content = qrels.read_text()
    qrels.write_text(content.replace("\t1\n", "\t2\n", 1))
    with pytest.raises(ValueError, match="has figures of other files of first than those of --data"):
        runner.figures(small.rows[1], 0, ["first"])
    qrels.write_text(content)


def test_results_of_other_fixed_settings_are_refused(
    paper: SimpleNamespace, twice: Any, scale: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = json.loads((twice.home / "results" / "setting-smoke.json").read_text())
    assert kept["counts"]["train"]["one"] > 0
    for fixed in ({**paper.runner.FIXED, "noise": 0.5}, {**paper.runner.FIXED, "more": 1}):
        monkeypatch.setattr(paper.runner, "FIXED", fixed)
        with pytest.raises(
            ValueError, match=r"results was made with (noise 0.02, now it is 0.5|more None, now it is 1)"
        ):
            paper.runner.Runner(scale, None, None, twice.home / "work", twice.home / "results")


def test_notes_say_steps_choices_and_what_still_rose(
    paper: SimpleNamespace, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(row: str, seed: int, steps: int, factor: float, flat: bool | None, further: str = "") -> dict[str, Any]:
        return {"row": row, "seed": seed, "steps": steps, "rate": 1e-4, "factor": factor, "flat": flat,
                "further": further, "longer": 2 if "twice" in row else 1}  # fmt: skip

    runs = [run("A", 0, 600, 1, False), run("A", 1, 600, 1, False), run("B", 0, 1800, 5, True),
            run("C", 0, 1800, 5, False), run("A, on", 0, 400, 1, None, "hard"),
            run("A, twice", 0, 1200, 1, True)]  # fmt: skip
    monkeypatch.setattr(paper.table, "_curves", lambda runner, table: runs)

    def choose(model: Any) -> dict[str, Any]:
        gain = 0.1 * (model.options.get("pooling") == "cls")
        tried = [{"dev_curve": [[9, 0.9]], "seconds": 100.0}] * 3
        return {"tried": [*tried, *({"dev_curve": [[9, 0.1], [18, f + gain]], "seconds": 1050.0} for f in (0.7, 0.6))]}

    kept = {"training": {"seconds": 500.0}}  # of seed 0 it is a run of the sweep
    runner = SimpleNamespace(scale=paper.scales.MINI, record=lambda model, seed: kept, choose=choose)
    table = dataclasses.replace(small, seeds=(0, 1))
    caveat, *notes = paper.table._training_notes(runner, table)
    assert caveat == paper.scales.MINI.caveat
    assert notes == [
        "Steps of a training. 600: A. 1,800: B; C. 400: A, on. 1,200: A, twice.",
        "Chosen of the learning rates 0.0001, 0.0004 and loss scales 1, 5, 20 (what lies beyond the first and last "
        "wasn't tried). 0.0001 and 1: A. 0.0001 and 5: B; C.",
        "RR@10 on the dev split of whole runs at the learning rates 0.0001, 0.0004, seed 0 (the first one stays where "
        "no other is better by 0.02): random: AGG .700, .600; random: CLS .800, .700.",
        "Runs whose dev figure gained 0.02 or more in their last third: 3 of the 5 that were judged more than once, "
        "A, seed 0, 1; C, seed 0.",
        "Sweeps and trainings of these rows took 1.6 hours of one core, beside another run; of a run that was "
        "interrupted what came after counts.",  # 2 x (2,400 + 500) s
        "findings.json was changed since some runs of this table were begun.",  # these say no checksum
    ]
    untrained = dataclasses.replace(small, rows=small.rows[:1])
    assert paper.table._sweep_notes(runner, untrained) == paper.table._hours(runner, untrained) == []
    runs.clear()
    bare = SimpleNamespace(scale=paper.scales.SMOKE, record=lambda model, seed: {})
    assert paper.table._training_notes(bare, small) == []


def test_a_model_is_called_by_its_whole_row_and_fused_ones_say_their_weights(
    paper: SimpleNamespace, twice: Any, small: Any
) -> None:
    rows = [small.rows[place] for place in (3, 4, 2, 1)]  # folded, fused, lexical part, the whole vector
    runner = twice.again
    assert {run["row"] for run in paper.table._curves(runner, dataclasses.replace(small, rows=rows))} == {"random: AGG"}
    weight = runner.record(small.rows[1].model, 0)["weights"]["all, fused with BM25"]
    title, said = paper.table._fusion_notes(runner, small)[0].split(": ")
    assert title.startswith("Weight of the dense ranking")
    assert said == f"fused {weight:g}."


def test_rows_of_the_ablation_are_what_they_say(paper: SimpleNamespace) -> None:
    """Figures on random weights don't tell them apart."""
    lexical, cls = ["MLMLexicalPooling", "SliceMaxAgg"], ["CLSProjection", "Concat"]
    parts = {"no MLM head": ["TokenLexicalPooling", "SliceMaxAgg", *cls], "AVERAGE": ["MeanProjection", "Concat"],
             "AVERAGE + CLS": ["CLSProjection", "MeanProjection", "Concat"]}  # fmt: skip
    differs = {
        "AGG (agg*)": {},
        "agg+": {"aggregation": "positive"},
        "slice mean": {"aggregation": "mean"},
        "learned linear projection": {"aggregation": "linear"},
        "no MLM head": {},
        "AVERAGE": {"mean_dim": 768, "include_cls": True},
        "AVERAGE + CLS": {"mean_dim": 640, "include_cls": False},
        "unpruned lexical weights": {"aggregation": "none", "lexical_dim": 8192},
        "random slices": {"slicing": "random"},
        "identity instead of abs": {"term_weight": "identity"},
        "without [SEP] in the max": {"excluded_tokens": "special"},
    }
    plain = {"aggregation": "signed", "slicing": "strided", "lexical_dim": 640, "cls_dim": 128, "term_weight": "abs",
             "excluded_tokens": "cls"}  # fmt: skip
    rows = paper.ablation.make(paper.scales.MINI).rows
    assert [row.name for row in rows] == list(differs)
    for row in rows:
        built = paper.fit.untrained(row.model, str(MINI), paper.scales.MINI, 0)
        modules = [module for module in built if type(module).__name__ != "MLMEncoder"]
        assert {type(module).__name__ for module in modules} == set(parts.get(row.name, [*lexical, *cls]))
        settings = {key: value for module in modules for key, value in module.get_config_dict().items()}
        expected = plain | differs[row.name]
        assert {key: settings[key] for key in expected if key in settings} == {
            key: value for key, value in expected.items() if key in settings or key in differs[row.name]
        }
        assert built.get_embedding_dimension() == 768 + (8192 - 640) * (row.name == "unpruned lexical weights")


def test_a_choice_within_the_noise_of_the_dev_figure_stays_with_the_first(paper: SimpleNamespace) -> None:
    def best(*figures: float) -> int:
        return paper.runner._best([{"dev_curve": [[1, 0.0], [2, figure]], "n": n} for n, figure in enumerate(figures)])[
            "n"
        ]

    assert best(0.5, 0.515, 0.4) == 0
    assert best(0.5, 0.515, 0.53) == 2
    assert best(0.5, 0.53, 0.54) == 2


@pytest.mark.parametrize("recipe", ["aggretriever", "cosine", "splade"])
def test_every_recipe_takes_all_steps_and_is_judged_by_the_way(
    paper: SimpleNamespace, twice: Any, tmp_path: Path, recipe: str
) -> None:
    scale = dataclasses.replace(twice.again.scale, evaluations=3)
    run = dataclasses.replace(
        twice.again._fit(paper.arms.Model(recipe=recipe), 0, 1e-3, 1.0, 5), path=twice.again.backbone("main")
    )
    record = paper.fit.fit(scale, run, tmp_path / "model")
    assert [step for step, _ in record["dev_curve"]] == [2, 4, 5]
    whole = dataclasses.replace(run, steps=9)
    judged = [step for step, _ in paper.fit.fit(scale, whole, tmp_path / "whole")["dev_curve"]]
    # The sparse encoder isn't judged in the third of the steps in which it is regularised more and more.
    assert judged == ([6, 9] if recipe == "splade" else [3, 6, 9])
    gain = record["dev_curve"][-1][1] - record["dev_curve"][-2][1]
    assert record["flat"] is (gain < paper.scales.NOISE)
    assert record["steps"] == 5


def test_rows_of_one_model_share_its_encoding(twice: Any, small: Any) -> None:
    # Of each model documents and queries of three collections; for the fused row also those of the dev split.
    assert len(list((twice.home / "work" / "vectors").glob("*/*"))) == 2 * 2 * 3 + 2
    runner, collection = twice.again, twice.again.collections["first"]
    model = small.rows[1].model
    (queries, left), (documents, right) = (
        runner._vectors(model, 0, collection, side).load() for side in ("query", "document")
    )
    folded = [np.concatenate([part[:, :8], fold_lexical(torch.tensor(part[:, 8:]), 8)], 1) for part in (left, right)]
    expected = {
        "random: AGG": left @ right.T,
        "lexical part": left[:, 8:] @ right[:, 8:].T,
        "folded": folded[0] @ folded[1].T,
    }
    for row in small.rows[1:4]:
        ranked = runner._ranked(row, 0, collection)
        scores = [[ranked[query][document] for document in documents] for query in queries]
        np.testing.assert_allclose(scores, expected[row.name], rtol=1e-4, atol=1e-9)
    assert runner.done["encode"] == 0


def test_every_number_of_a_table_is_its_json(paper: SimpleNamespace, twice: Any) -> None:
    results = [twice.home / "results", PAPER / "results"]
    others = ("costs-", "setting-", "pretraining-")
    found = [path for folder in results for path in sorted(folder.glob("*-*.json"))]
    tables = [path for path in found if not path.name.startswith(others)]
    assert tables
    for path in tables:
        result, text = json.loads(path.read_text()), path.with_suffix(".md").read_text()
        assert text == paper.report.markdown(result)
        printed: dict[str, list[str]] = {}
        for line in text.splitlines():
            if line.startswith("| "):
                name, *cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
                printed.setdefault(name, cells)
        for row in result["grids"][0]["rows"]:
            means = [row["cells"][column]["mean"] for column in result["grids"][0]["columns"] if column in row["cells"]]
            shown = [float(cell.split(" +- ")[0]) for cell in printed[row["name"]] if cell.strip()]
            assert shown[: len(means)] == pytest.approx(means, abs=6e-4)


def test_the_summary_of_findings_is_the_tables_json(paper: SimpleNamespace, tmp_path: Path) -> None:
    tables = [json.loads(path.read_text()) for path in (PAPER / "results").glob("*-mini.json")]
    judged = {finding["id"]: finding for table in tables for finding in table.get("findings", [])}
    family = paper.judge.findings_of(paper.scales.MINI)
    verdicts = paper.judge.judge(judged, [finding["id"] for finding in family])
    assert judged
    for key, finding in judged.items():
        assert finding | verdicts[key] == finding
    paper.report.write_summary("mini", family, judged, tmp_path)
    assert (tmp_path / "FINDINGS-mini.md").read_text() == (PAPER / "results" / "FINDINGS-mini.md").read_text()


def test_nothing_of_a_plot_is_cut_off(paper: SimpleNamespace, tmp_path: Path) -> None:
    from matplotlib import image

    rows = [{"name": "a row of some words " * 3, "cells": {"mean": {"mean": 0.5, "sd": 0.1}}}]
    grid = {"plots": {"mean": "a title of many words " * 8}, "rows": rows}
    paper.report.draw({"scale": "mini", "grids": [grid]}, tmp_path / "plot.png")
    pixels = image.imread(tmp_path / "plot.png")[:, :, :3]  # (height, width, RGB)
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge == 1).all()  # white


def test_means_come_from_the_figures_of_each_query(paper: SimpleNamespace, twice: Any, small: Any) -> None:
    row = small.rows[1]
    figures = twice.again.record(row.model, 0)["figures"][row.view]
    by_collection = [np.mean(figures[name]["nDCG@10"]) for name in ("first", "second")]
    cells = twice.result["grids"][0]["rows"][1]["cells"]
    assert cells["first nDCG@10"]["mean"] == pytest.approx(by_collection[0])
    assert cells["mean"]["mean"] == pytest.approx(np.mean(by_collection))


def test_dev_and_test_passages_are_in_no_training_pair(paper: SimpleNamespace, twice: Any) -> None:
    prepared = twice.again.prepared
    train = {json.loads(line)["passage"] for line in (prepared / "train-all.jsonl").open()}
    for name in ("dev-all", paper.scales.IN_DOMAIN):
        held_out = {json.loads(line)["text"] for line in (prepared / name / "corpus.jsonl").open()}
        assert held_out
        assert not held_out & train
    counts = json.loads((prepared / "counts.json").read_text())
    for name in ("dev-all", "dev-one", "dev-two", paper.scales.IN_DOMAIN):
        split = "test" if name == paper.scales.IN_DOMAIN else "dev"
        judged = {line.split("\t")[0] for line in (prepared / name / "qrels" / f"{split}.tsv").open()} - {"query-id"}
        queries = sum(1 for _ in (prepared / name / "queries.jsonl").open())
        assert len(judged) == queries - counts["left out as seen"][name] > 0
    half = paper.data.pairs_file(prepared, twice.again.scale, "all", 0.5, twice.again.work).read_text().splitlines()
    quarter = paper.data.pairs_file(prepared, twice.again.scale, "all", 0.25, twice.again.work).read_text().splitlines()
    assert set(quarter) < set(half) < set((prepared / "train-all.jsonl").read_text().splitlines())


def test_the_caveat_quotes_the_counted_overlap_with_the_pretraining(paper: SimpleNamespace) -> None:
    counted = json.loads((PAPER / "results" / "pretraining-overlap.json").read_text())
    numbers = [(found["in the pretraining"], found["judged pairs"]) for found in counted.values()]
    for text in (paper.scales.MINI.caveat, (PAPER / "README.md").read_text()):
        quoted = re.search(r"(\d+) of the (\d+)\s+judged pairs of the held-out test and (\d+) of the (\d+)", text)
        assert quoted
        assert [tuple(map(int, quoted.groups()[:2])), tuple(map(int, quoted.groups()[2:]))] == numbers


def test_a_pair_is_seen_if_its_record_starts_in_a_block_that_was_trained(
    paper: SimpleNamespace, tmp_path: Path
) -> None:
    overlap = paper.pretraining_overlap
    pairs = [{"query": f"which {n}?", "passage": f"number {n} is it", "title": "T"} for n in range(60)]
    with gzip.open(tmp_path / "few.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(pair) + "\n" for pair in pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        example = overlap.pretraining()
    words = [str(tmp_path / "few.jsonl.gz"), "--output", str(tmp_path / "out"), "--block", "12"]
    (source,) = example.read_sources(example.parse_arguments(words))
    assert overlap.trained_records(example, words) == set(source.train)
    few = overlap.trained_records(example, [*words, "--weight", "few=0.5"])
    assert few == set(source.train[: len(few)])
    tokenizer = example.AutoTokenizer.from_pretrained(overlap.asset("mini"))
    blocks = example.to_blocks(source.train, tokenizer, 12)
    used = blocks[: round(len(blocks) / 2), 1:-1].ravel()
    assert len(few) == (used[:-1] == tokenizer.sep_token_id).sum() + 1  # all but a last one are followed by another

    records = overlap.records_of(example, tmp_path / "few.jsonl.gz")
    assert records["which 7?", "T number 7 is it"] == "which 7? number 7 is it"
    folder = tmp_path / "judged"
    paper.data._write_collection(folder, "test", pairs[:40], 40)
    found = overlap.count(folder, "test", records, {"which 7? number 7 is it", "which 50? number 50 is it"})
    assert found == {"queries": 40, "judged pairs": 40, "in the pretraining": 1}


def test_the_command_that_made_mini_is_read_from_its_readme(paper: SimpleNamespace) -> None:
    words = paper.pretraining_overlap.command(Path("data"))
    assert "data/pairs/medquad.jsonl.gz" in words
    assert "data/text/wikitext2_valid_test.txt.gz" in words
    assert "medquad=0.7" in words
    assert not any("TEXTS" in word or "PAIRS" in word or "\\" in word for word in words)


# ---------------------------------------------------------------------------------------------------------------------
# Findings


def figures_of(*rows: Any) -> dict[str, dict[str, np.ndarray]]:
    return {f"row {number}": {name: np.array(v, float) for name, v in row.items()} for number, row in enumerate(rows)}


def test_collections_weigh_the_same_whatever_their_queries(paper: SimpleNamespace) -> None:
    figures = figures_of({"a": [[1.0] * 9], "b": [[0.0]]}, {"a": [[0.0] * 9], "b": [[0.0]]})
    finding = {"rows": {"row 0": 1, "row 1": -1}}
    result = paper.judge.contrast(finding, figures, {"row 0": "x", "row 1": "y"}, resamples=50)
    assert result["difference"] == 0.5
    assert result["interval"] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(("n", "quantile"), [(2, 12.706), (3, 4.303), (5, 2.776)])
def test_the_mean_of_few_seeds_is_drawn_from_students_t(paper: SimpleNamespace, n: int, quantile: float) -> None:
    seeds = np.arange(n) ** 2.0
    values = paper.judge._seed_weights(n, 40_000, np.random.default_rng(0)) @ seeds
    error = seeds.std(ddof=1) / n**0.5
    drawn = (values - seeds.mean()) / error
    for sign in (-1, 1):  # 2.5 % lie beyond the tabulated quantile on each side
        assert np.mean(sign * drawn > quantile) == pytest.approx(0.025, abs=0.003)


@pytest.mark.parametrize(("seeds", "queries", "both"), [(0.01, 0, 0), (0, 0.1, 0), (0.01, 0.1, 0.1), (0, 0, 0.2)])
def test_true_nulls_are_rejected_at_most_as_often_as_p_says(
    paper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, seeds: float, queries: float, both: float
) -> None:
    monkeypatch.setattr(paper.judge, "MORE", 1)
    rng = np.random.default_rng(1)
    finding = {"rows": {"row 0": 1, "row 1": -1}}
    rejected = []
    for _ in range(200):
        easy = rng.normal(0, queries, (1, 60))
        rows = ({"a": sign * easy + rng.normal(0, seeds, (3, 1)) + rng.normal(0, both, (3, 60))} for sign in (-1, 1))
        result = paper.judge.contrast(finding, figures_of(*rows), {"row 0": "x", "row 1": "y"}, resamples=400)
        rejected.append((result["p"] < 0.05, result["p_variants"]["apart"] < 0.05))
    test, apart = np.mean(rejected, axis=0)
    assert test < 0.085
    assert apart < 0.085
    if not seeds and not both:
        assert min(test, apart) > 0.02
    if both:
        assert test < 0.02  # it is cautious there, and says so


def test_seeds_and_queries_drawn_apart_leave_out_what_is_of_both(paper: SimpleNamespace) -> None:
    seeds, queries = np.array([[0.1], [0.2], [0.6]]), np.linspace(0, 1, 50)[None]
    added, mixed = seeds + queries, np.outer([1, -1, 0], [1, -1] * 25)
    for values, equal in ((added, True), (mixed, False)):
        crossed, apart = paper.judge._resampled(
            {"row 0": 1}, figures_of({"a": values}), {"row 0": "x"}, 700, np.random.default_rng(0)
        )
        assert crossed.shape == apart.shape == (700,)
        assert np.allclose(crossed, apart) == equal
    assert np.abs(apart).max() < 1e-12 < np.abs(crossed).max()


def test_rows_of_one_model_are_resampled_together(paper: SimpleNamespace) -> None:
    figures = figures_of({"a": [[0.0, 0.5], [1.0, 0.5]]}, {"a": [[0.0, 0.5], [1.0, 0.5]]})
    finding = {"rows": {"row 0": 1, "row 1": -1}}
    together = paper.judge.contrast(finding, figures, {"row 0": "x", "row 1": "x"}, resamples=50)
    apart = paper.judge.contrast(finding, figures, {"row 0": "x", "row 1": "y"}, resamples=50)
    assert together["interval"] == [0.0, 0.0]
    assert apart["interval"][0] < 0 < apart["interval"][1]


def test_verdicts_follow_sign_margin_and_the_whole_family(paper: SimpleNamespace) -> None:
    def result(difference: float, p: float, margin: float = 0.0) -> dict[str, Any]:
        variants = {"more draws": p, "apart": 0.001}
        return {"difference": difference, "p": p, "margin": margin, "p_variants": variants}

    results = {
        "a": result(0.1, 0.001),
        "b": result(-0.1, 0.001),
        "c": result(0.1, 0.02),
        "d": result(-0.01, 0.001, 0.02),
    }
    few = paper.judge.judge(results, [*results])
    assert [few[key]["verdict"] for key in "abcd"] == ["holds", "contradicted", "holds", "holds"]
    many = paper.judge.judge(results, [*results, *(f"open {n}" for n in range(10))])
    assert many["a"]["p_holm"] == pytest.approx(0.014)  # 14 findings, of which 10 have no result yet
    assert many["c"]["verdict"] == many["c"]["variants"]["more draws"]["verdict"] == "not resolved"
    assert many["c"]["variants"]["apart"] == {"p_holm": pytest.approx(0.014), "verdict": "holds"}


def test_findings_name_rows_that_their_tables_have(paper: SimpleNamespace) -> None:
    made = {module.make(paper.scales.MINI).name: module.make(paper.scales.MINI) for module in paper.every.TABLES}
    findings = paper.judge.findings_of(paper.scales.MINI)
    assert len({finding["id"] for finding in findings}) == len(findings)
    for finding in findings:
        assert finding["rows"].keys() <= {row.name for row in made[finding["table"]].rows}


# ---------------------------------------------------------------------------------------------------------------------
# Estimates, and section 3.2


def test_a_dry_run_lists_every_training_and_evaluation(
    paper: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paper.every.run(
        ["--scale", "full", "--dry-run", "--work", str(tmp_path / "work"), "--results", str(tmp_path / "r")]
    )
    lines = capsys.readouterr().out.splitlines()
    models = {row.model for module in paper.every.TABLES for row in module.make(paper.scales.FULL).rows} - {
        paper.arms.BM25
    }
    trained = [line for line in lines if re.match(r"train +\d+ x ", line)]
    assert len(trained) == len({model for model in models if model.trained})
    assert len([line for line in lines if re.match(r"encode +\d+ x ", line)]) == len(models)
    assert all(re.search(r"\d GPU h +\d+\.\d\d GB$", line) for line in trained)
    assert not (tmp_path / "work").exists()


def test_winners_are_the_terms_behind_a_slice(paper: SimpleNamespace) -> None:
    weights = torch.tensor([[0.1, 0.2, 0.0, 0.9, 0.8, 0.3, 0.7]])
    # agg+ at 2: even ids, odd ids. agg* at 2: ids mod 4 in {0, 1}, in {2, 3}.
    assert paper.dimensions.winners(weights, 2, "positive").tolist() == [[4, 3]]
    assert paper.dimensions.winners(weights, 2, "signed").tolist() == [[4, 3]]
    assert paper.dimensions.winners(weights[:, :4], 1, "signed").tolist() == [[3]]


def test_slices_of_one_term_lose_nothing_and_shared_ones_misalign(paper: SimpleNamespace) -> None:
    queries = torch.tensor([[0.1, 0.9, 0.0, 0.3]])
    documents = torch.tensor([[0.5, 0.2, 0.1, 0.0], [0.0, 0.7, 0.3, 0.2]])
    exact = paper.dimensions.compared(queries, documents, 4, "positive")
    assert exact == {
        "relative error": 0,
        "bias": 0,
        "rank correlation": pytest.approx(1),
        "misaligned products": 0,
        "misaligned, by magnitude": 0,
    }
    # agg+ at 2: the query's terms 0 and 1; the documents' 0 and 1, 2 and 1: one of four products is misaligned, and of
    # the magnitudes .05 + .18 + .03 + .63 it is .03.
    folded = paper.dimensions.compared(queries, documents, 2, "positive")
    assert folded["misaligned products"] == pytest.approx(0.25)
    assert folded["misaligned, by magnitude"] == pytest.approx(0.03 / 0.89)
    # v . v: .23 and .69; folded .05 + .18 = .23 and .03 + .63 = .66.
    assert -folded["bias"] == pytest.approx(folded["relative error"]) == pytest.approx(0.03 / 0.92, 1e-4)
