"""Mined negatives: never a positive, by id or by text; those that the settings ask for; readable, resumable, whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_runs

from st_aggretriever import TrainConfig, build_aggretriever, mining, teacher, train
from st_aggretriever.cli import main
from st_aggretriever.encoding import model_hash
from st_aggretriever.mining import MiningSettings, mine
from st_aggretriever.readers.training import TrainingData, open_training_data
from st_aggretriever.search.bm25 import search_bm25
from st_aggretriever.search.retrieve import rankings_of

WORDS = [f"w{number}" for number in range(12)]


class Bag:
    """Encodes a text as the counts of twelve words, each with its weight; counts the texts that it has encoded."""

    similarity_fn_name = "dot"

    def __init__(self, stop_after: int | None = None) -> None:
        self.documents, self.stop_after = 0, stop_after

    def encode_query(self, texts: list[str], **options: Any) -> np.ndarray:
        weights = 1 + np.arange(len(WORDS)) / 16
        return np.array([[text.split().count(word) for word in WORDS] for text in texts], np.float32) * weights

    def encode_document(self, texts: list[str], **options: Any) -> np.ndarray:
        if self.stop_after is not None and self.documents >= self.stop_after:
            raise KeyboardInterrupt
        self.documents += sum(text != "dimension" for text in texts)
        return np.array([[text.split().count(word) for word in WORDS] for text in texts], np.float32)


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, 6)) + f" {number}" for number in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 documents, 8 queries with two positives each; copies of two positives under other ids."""
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    documents = {f"d{number}": text for number, text in enumerate(texts(40))}
    queries = {
        f"q{number}": f"{documents[f'd{2 * number}'][:-2]} {documents[f'd{2 * number + 1}']}" for number in range(8)
    }
    documents |= {"copy1": f" {documents['d0']}  ", "copy2": documents["d1"].replace(" ", "  "), "self": queries["q2"]}
    write(beir / "corpus.jsonl", *({"_id": key, "text": text} for key, text in documents.items()))
    write(beir / "queries.jsonl", *({"_id": key, "text": text} for key, text in queries.items()))
    judged = "".join(f"q{q}\td{2 * q + place}\t1\n" for q in range(8) for place in (0, 1))
    (beir / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return beir


def lines_of(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    first, *rest = (json.loads(line) for line in path.read_text().splitlines())
    return first, rest


def expected(folder: Path, settings: MiningSettings) -> list[list[str]]:
    """By brute force, for each judgement: ids in order."""
    corpus = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    queries = {r["_id"]: r["text"] for r in map(json.loads, (folder / "queries.jsonl").read_text().splitlines())}
    judged = [line.split("\t") for line in (folder / "qrels" / "train.tsv").read_text().splitlines()[1:]]
    by_id = {document["_id"]: document["text"] for document in corpus}
    found = []
    for query, positive, _ in judged:
        own = {by_id[document].split().__str__() for other, document, _ in judged if other == query}
        own.add(str(queries[query].split()))
        score = {key: float(Bag().encode_query([queries[query]])[0] @ Bag().encode_document([text])[0])
                 for key, text in by_id.items()}  # fmt: skip
        ranked = sorted((key for key in by_id if str(by_id[key].split()) not in own), key=lambda key: -score[key])
        first, last = settings.ranks or (1, settings.depth)
        kept = ranked[: settings.depth][first - 1 : last]
        if settings.margin is not None:
            kept = [key for key in kept if score[key] <= score[positive] - settings.margin]
        if settings.relative_margin is not None:
            kept = [key for key in kept if score[key] <= score[positive] * (1 - settings.relative_margin)]
        found.append([f"{score[key]:.4f}" for key in kept])  # ties may come in any order
    return found


@pytest.mark.parametrize(
    "settings",
    [
        MiningSettings(depth=5),
        MiningSettings(depth=30, ranks=(4, 20)),
        MiningSettings(depth=30, margin=2.5),
        MiningSettings(depth=30, relative_margin=0.4),
    ],
    ids=["depth", "ranks", "margin", "relative margin"],
)
@pytest.mark.parametrize("at_once", [3, 1000])
def test_negatives_are_the_best_hits_that_the_settings_keep(
    folder: Path, tmp_path: Path, settings: MiningSettings, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mining, "QUERIES", at_once)
    monkeypatch.setattr(mining, "BLOCK", 7)
    data = open_training_data([str(folder)])
    manifest = mine(Bag(), data, tmp_path / "mined.jsonl", settings=settings, model_name="bag")
    first, rows = lines_of(tmp_path / "mined.jsonl")
    assert first == manifest
    assert [row["row"] for row in rows] == list(range(16))
    assert [[f"{score:.4f}" for score in row["scores"]] for row in rows] == expected(folder, settings)


def test_no_positive_is_mined_by_id_or_by_text_nor_the_query_itself(folder: Path, tmp_path: Path) -> None:
    """Case 24: two positives a query, and everything else is asked for."""
    data = open_training_data([str(folder)])
    mine(Bag(), data, tmp_path / "mined.jsonl", settings=MiningSettings(depth=1000), model_name="bag")
    corpus = {key: text for key, text, _, _ in data.corpus()}
    for row in lines_of(tmp_path / "mined.jsonl")[1]:
        query = row["row"] // 2
        positives = {f"d{2 * query}", f"d{2 * query + 1}"}
        own = {" ".join(corpus[key].split()) for key in positives} | {data.example(row["row"]).query}
        assert not positives & set(row["negatives"])
        assert not own & {" ".join(corpus[key].split()) for key in row["negatives"]}
        assert len(row["negatives"]) == len(set(row["negatives"])) == 43 - {0: 4, 1: 2, 2: 3}.get(query, 2)


def test_too_few_candidates_are_an_error_that_names_the_parameters(folder: Path, tmp_path: Path) -> None:
    """Case 24: ten negatives from a range of three; and a margin that leaves too few."""
    with pytest.raises(
        ValueError, match=r"10 negatives can't come from a range of 3 ranks.*--negatives.*--depth.*--ranks"
    ):
        MiningSettings(negatives=10, ranks=(5, 7))
    data = open_training_data([str(folder)])
    settings = MiningSettings(depth=30, margin=4.0, negatives=20)
    with pytest.raises(
        ValueError, match=r"train\.tsv line \d+: expected 20 negatives or more, found \d+\..*--depth 30.*--margin 4\.0"
    ):
        mine(Bag(), data, tmp_path / "mined.jsonl", settings=settings, model_name="bag")
    assert not (tmp_path / "mined.jsonl").exists()
    few = [len(scores) for scores in expected(folder, settings)]
    assert 0 < sum(count >= 20 for count in few) < 16
    settings = MiningSettings(depth=30, margin=4.0, negatives=20, drop_short=True)
    manifest = mine(Bag(), data, tmp_path / "mined.jsonl", settings=settings, model_name="bag")
    assert manifest["dropped_rows"] == sum(count < 20 for count in few)
    settings = MiningSettings(depth=30, margin=1e9, drop_short=True)
    with pytest.raises(ValueError, match=r"no row has 1 candidates\. .*--margin 1000000000\.0\)\.$"):
        mine(Bag(), data, tmp_path / "none.jsonl", settings=settings, model_name="bag")
    assert [row["row"] for row in lines_of(tmp_path / "mined.jsonl")[1]] == [r for r in range(16) if few[r] >= 20]
    with pytest.raises(
        ValueError, match=r"mined\.jsonl line \d+: expected 31 negatives, or more, got .*--depth than 30"
    ):
        open_training_data([str(tmp_path / "mined.jsonl")], negatives=31)
    with pytest.raises(ValueError, match=r"mined\.jsonl holds candidates to draw from: say by --negatives"):
        open_training_data([str(tmp_path / "mined.jsonl")])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"depth": 0}, "depth must be at least 1"),
        ({"depth": 5, "ranks": (1, 6)}, "ranks must be within 1 and the depth of 5, got 1 to 6"),
        ({"ranks": (3, 2)}, "ranks must be within"),
        ({"margin": 1.0, "relative_margin": 0.1}, "not both"),
        ({"relative_margin": 1.0}, "at least 0 and below 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        MiningSettings(**settings)


def pairs(tmp_path: Path) -> str:
    """A query in two rows, and a passage of two queries."""
    found = texts(20)
    rows = [{"query": text, "passage": f"{text} answer"} for text in found]
    rows += [{"query": found[0], "passage": "w1 other"}, {"query": "w1 w2", "passage": f"{found[3]} answer"}]
    rows[5]["negatives"] = ["w3 w4 given"]
    return write(tmp_path / "pairs.jsonl", *rows)


def drawn(data: TrainingData, epochs: int) -> dict[str, set[str]]:
    """Query -> negatives of some epochs."""
    found: dict[str, set[str]] = {}
    for epoch in range(epochs):
        data.set_epoch(epoch)
        for row in map(data.row, range(len(data))):
            found.setdefault(row["query"], set()).update(row[name] for name in data.columns[2:])
    return found


def test_plain_pairs_are_mined_from_all_their_passages_and_train(tmp_path: Path) -> None:
    path = pairs(tmp_path)
    settings = MiningSettings(depth=6, negatives=4)
    mine(Bag(), open_training_data([path], negatives=0), tmp_path / "mined.jsonl", settings=settings, model_name="bag")
    data = open_training_data([str(tmp_path / "mined.jsonl")], negatives=4, seed=1)
    base = open_training_data([path], negatives=0)
    assert {tuple(data.row(row).values())[:2] for row in range(22)} == {
        tuple(base.row(row).values()) for row in range(22)
    }
    found = drawn(data, 12)
    assert all(len(negatives) == 6 for negatives in found.values()), "twelve epochs reach all six candidates"
    everything = {text for _, text, _, _ in base.corpus()}
    assert "w3 w4 given" in everything
    assert len(everything) == 22
    for row in range(22):
        example = base.example(row)
        assert found[example.query] <= everything - {example.positives[0].text, example.query}
    assert not found[texts(20)[0]] & {f"{texts(20)[0]} answer", "w1 other"}, "positives of both rows of this query"


def test_the_draw_of_an_epoch_does_not_depend_on_the_epochs_before(tmp_path: Path) -> None:
    mine(None, open_training_data([pairs(tmp_path)], negatives=0), tmp_path / "mined.jsonl",
         settings=MiningSettings(depth=10, negatives=2, drop_short=True))  # fmt: skip
    went, jumped = (open_training_data([str(tmp_path / "mined.jsonl")], negatives=2) for _ in range(2))
    rows = range(len(went))
    epochs = []
    for epoch in range(4):
        went.set_epoch(epoch)
        epochs.append([went.row(row) for row in rows])
    jumped.set_epoch(3)
    assert [jumped.row(row) for row in rows] == epochs[3] != epochs[2]


def test_scores_of_the_miner_are_inner_products_and_can_teach(folder: Path, tmp_path: Path) -> None:
    mine(Bag(), open_training_data([str(folder)]), tmp_path / "mined.jsonl", model_name="bag")
    data = open_training_data([str(tmp_path / "mined.jsonl")], negatives=3, scores=True)
    for row in map(data.row, range(len(data))):
        passages = [row["positive"], row["negative_1"], row["negative_2"], row["negative_3"]]
        assert row["scores"] == pytest.approx(Bag().encode_query([row["query"]])[0] @ Bag().encode_document(passages).T)


def test_bm25_mines_its_own_ranking_without_positives(folder: Path, tmp_path: Path) -> None:
    data = open_training_data([str(folder)])
    manifest = mine(None, data, tmp_path / "mined.jsonl", settings=MiningSettings(depth=8))
    assert (manifest["model"], manifest["model_hash"]) == ("bm25", None)
    corpus = {key: text for key, text, _, _ in data.corpus()}
    for row in lines_of(tmp_path / "mined.jsonl")[1]:
        example, query = data.example(row["row"]), row["row"] // 2
        hits = search_bm25({"q": example.query}, corpus.items(), 60)
        score = rankings_of(["q"], hits)["q"]
        own = {" ".join(corpus[f"d{2 * query + place}"].split()) for place in (0, 1)} | {example.query}
        best = sorted((value for key, value in score.items() if " ".join(corpus[key].split()) not in own))
        assert row["scores"] == pytest.approx(best[::-1][:8])
        assert [score[key] for key in row["negatives"]] == pytest.approx(row["scores"])
        assert row["positive_scores"] == pytest.approx([score.get(f"d{row['row']}", 0.0)])


def test_another_corpus_is_mined_by_id_and_by_text(tmp_path: Path) -> None:
    """Tevatron rows: the positive's id stands in the collection with another text, its text under another id."""
    rows = [
        {"query": f"w1 w2 {n}", "positive_passages": [{"docid": f"p{n}", "title": "", "text": f"w1 w2 {n}th"}]}
        for n in range(3)
    ]
    path = write(tmp_path / "rows.jsonl", *rows)
    lines = [f"p{n}\tw1 w1 w2 w2 changed {n}\n" for n in range(3)] + [f"t{n}\tw1  w2 {n}th\n" for n in range(3)]
    (tmp_path / "collection.tsv").write_text("".join(lines))
    options: dict[str, Any] = {"corpus": str(tmp_path / "collection.tsv"), "model_name": "bag"}
    mine(Bag(), open_training_data([path]), tmp_path / "mined.jsonl", **options)
    for row in lines_of(tmp_path / "mined.jsonl")[1]:
        assert set(row["negatives"]) == {f"{kind}{n}" for kind in "pt" for n in range(3) if n != row["row"]}
    data = open_training_data([str(tmp_path / "mined.jsonl")], negatives=4)
    assert sorted(list(data.row(0).values())[2:]) == [
        "w1  w2 1th",
        "w1  w2 2th",
        "w1 w1 w2 w2 changed 1",
        "w1 w1 w2 w2 changed 2",
    ]
    # Mined again from that file, the same collection is searched, and the texts are found through both files.
    again = mine(Bag(), data, tmp_path / "again.jsonl", model_name="bag")
    assert (again["documents"], again["corpus"]) == (6, None)
    assert lines_of(tmp_path / "again.jsonl")[1] == lines_of(tmp_path / "mined.jsonl")[1]
    twice = open_training_data([str(tmp_path / "again.jsonl")], negatives=4)
    assert list(twice.row(0).values()) == list(data.row(0).values())


@pytest.mark.parametrize("through", ["folder", "mined file", "mined file with a corpus of its own"])
def test_another_corpus_is_mined_without_a_folders_positives_by_id(folder: Path, tmp_path: Path, through: str) -> None:
    """The same collection with titles: every id stands for another text than in the folder."""
    documents = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    corpus = write(tmp_path / "titled.jsonl", *({**document, "title": "a title"} for document in documents))
    options: dict[str, Any] = {"settings": MiningSettings(depth=1000), "model_name": "bag"}
    data = str(folder)
    if through != "folder":
        data = str(tmp_path / "before.jsonl")
        mine(Bag(), open_training_data([str(folder)]), data, corpus=corpus if "corpus" in through else None, **options)
    again = None if "corpus" in through else corpus
    mine(Bag(), open_training_data([data], negatives=0), tmp_path / "mined.jsonl", corpus=again, **options)
    rows = lines_of(tmp_path / "mined.jsonl")[1]
    assert len(rows) == 16
    for row in rows:
        query = row["row"] // 2
        others = {one["_id"] for one in documents} - {f"d{2 * query}", f"d{2 * query + 1}"}
        assert others - {"copy1", "copy2"} <= set(row["negatives"]) <= others  # texts of a mined file count once


def test_bm25_teaches_rows_whose_positives_are_not_in_the_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "cache_folder", lambda: tmp_path / "teachers")
    path = write(tmp_path / "rows.jsonl", *({"query": f"w1 w{n}", "passage": f"w{n} own"} for n in (2, 3)))
    corpus = write(tmp_path / "corpus.jsonl", *({"_id": f"d{n}", "text": f"w1 w4 {n}"} for n in range(5)))
    mine(None, open_training_data([path]), tmp_path / "mined.jsonl", corpus=corpus)
    data = open_training_data([str(tmp_path / "mined.jsonl")], negatives=2)
    both = [text for _, text, _, _ in data.corpus()] + ["w2 own", "w3 own"]
    assert len(both) == 7
    for part in (data, data.subset([1])):  # the index is that of all rows
        row = part.with_teacher(teacher.score_rows(part, teacher.load_teacher("bm25"), epochs=[0])).row(len(part) - 1)
        hits = search_bm25({"q": row["query"]}, [(text, text) for text in both], 7)
        by_text = dict(zip(hits.ids[0].tolist(), hits.scores[0].tolist(), strict=True))
        assert row["scores"] == pytest.approx([by_text[row[name]] for name in ("positive", "negative_1", "negative_2")])


def test_empty_documents_are_not_mined_and_only_queries_with_rows_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *({"query": f"w{n}", "passage": f"w{n} x"} for n in (1, 2, 3)))
    (tmp_path / "collection.tsv").write_text("e\t \na\tw1 a\nb\tw2 b\n")
    options: dict[str, Any] = {"corpus": str(tmp_path / "collection.tsv")}
    options["settings"] = MiningSettings(drop_short=True, depth=5)
    mine(Bag(), open_training_data([path]), tmp_path / "dense.jsonl", **options)
    assert [sorted(row["negatives"]) for row in lines_of(tmp_path / "dense.jsonl")[1]] == [["a", "b"]] * 3
    assert lines_of(tmp_path / "dense.jsonl")[0]["documents"] == 2  # none is searched to be left out
    made = mine(None, open_training_data([path]), tmp_path / "bm25.jsonl", **options)
    assert (made["rows"], made["dropped_rows"], made["queries"]) == (2, 1, 2)


@pytest.mark.parametrize("value", [None, "rows.jsonl", [], [1]])
def test_a_manifest_of_other_values_is_refused(folder: Path, tmp_path: Path, value: Any) -> None:
    mine(Bag(), open_training_data([str(folder)]), tmp_path / "mined.jsonl")
    manifest, rows = lines_of(tmp_path / "mined.jsonl")
    write(tmp_path / "mined.jsonl", manifest | {"data": value}, *rows)
    with pytest.raises(ValueError, match=r"mined\.jsonl line 1: expected a list of paths in 'data'"):
        open_training_data([str(tmp_path / "mined.jsonl")], negatives=1)


def test_interrupted_mining_goes_on_and_gives_the_same_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mining, "BLOCK", 10)
    data = open_training_data([str(folder)])
    mine(Bag(), data, tmp_path / "whole.jsonl", model_name="bag")
    with pytest.raises(KeyboardInterrupt):
        mine(Bag(stop_after=20), data, tmp_path / "mined.jsonl", model_name="bag")
    assert not (tmp_path / "mined.jsonl").exists()
    assert (tmp_path / "mined.jsonl.partial").is_dir()
    model = Bag()
    mine(model, data, tmp_path / "mined.jsonl", model_name="bag")
    assert model.documents == 43 - 20
    assert (tmp_path / "mined.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    assert not (tmp_path / "mined.jsonl.partial").exists()
    with pytest.raises(FileExistsError, match=r"mined\.jsonl exists\. Name another output"):
        mine(model, data, tmp_path / "mined.jsonl", model_name="bag")


def test_other_settings_use_the_vectors_again_and_another_model_does_not(folder: Path, tmp_path: Path) -> None:
    data = open_training_data([str(folder)])
    settings = MiningSettings(depth=30, margin=3.0, negatives=30)
    with pytest.raises(ValueError, match="expected 30 negatives"):
        mine(Bag(), data, tmp_path / "mined.jsonl", settings=settings, model_name="bag")
    with pytest.raises(ValueError, match="holds vectors of another model or corpus"):
        mine(Bag(), data, tmp_path / "mined.jsonl", model_name="other")
    model = Bag()
    mine(model, data, tmp_path / "mined.jsonl", settings=MiningSettings(depth=3), model_name="bag")
    assert model.documents == 0
    assert all(len(row["negatives"]) == 3 for row in lines_of(tmp_path / "mined.jsonl")[1])


def test_a_folder_that_is_no_mining_run_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mined.jsonl.partial").mkdir()
    (tmp_path / "mined.jsonl.partial" / "mine").write_text("precious")
    with pytest.raises(FileExistsError, match="is in the way"):
        mine(Bag(), open_training_data([str(folder)]), tmp_path / "mined.jsonl")
    assert (tmp_path / "mined.jsonl.partial" / "mine").read_text() == "precious"


def test_mined_file_is_refused_where_its_data_have_changed_and_moves_with_them(folder: Path, tmp_path: Path) -> None:
    mine(Bag(), open_training_data([str(folder)]), tmp_path / "mined.jsonl", model_name="bag")
    there = tmp_path / "elsewhere"
    there.mkdir()
    folder.rename(there / "beir")
    (tmp_path / "mined.jsonl").rename(there / "mined.jsonl")
    assert len(open_training_data([str(there / "mined.jsonl")], negatives=2)) == 16
    with (there / "beir" / "qrels" / "train.tsv").open("a") as file:
        file.write("q0\td30\t1\n")
    with pytest.raises(ValueError, match=r"was mined for other rows than .*beir hold now\. Mine again"):
        open_training_data([str(there / "mined.jsonl")], negatives=2)


def test_broken_line_of_a_mined_file_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mined.jsonl"
    mine(Bag(), open_training_data([str(folder)]), path, model_name="bag")
    good = path.read_text().splitlines()
    broken = {
        '{"row": 16, "positive_scores": [1], "negatives": [], "scores": []}': "row of the data, 0 to 15",
        '{"row": 1, "positive_scores": [1], "negatives": ["d9"], "scores": []}': "list of 1 numbers in 'scores'",
        '{"row": 1, "positive_scores": [], "negatives": [], "scores": []}': "list of 1 numbers in 'positive_scores'",
        '{"row": 1, "positive_scores": [1], "negatives": "d9", "scores": [1]}': "list of ids in 'negatives'",
    }
    for line, sentence in broken.items():
        path.write_text("\n".join([*good[:3], line, *good[4:]]) + "\n")
        with pytest.raises(ValueError, match=rf"mined\.jsonl line 4: .*{sentence}"):
            open_training_data([str(path)], negatives=1)
    path.write_text("\n".join([good[0], good[1].replace('"d', '"ghost')]) + "\n")
    with pytest.raises(ValueError, match=r"passage 'ghost.* is not in"):
        open_training_data([str(path)], negatives=1).row(0)


def test_command_mines_by_a_model_on_disk(tiny_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=8)
    model.save_pretrained(str(tmp_path / "model"))
    path = pairs(tmp_path)
    arguments = ["mine", "--model", str(tmp_path / "model"), "--data", path, "--output", str(tmp_path / "mined.jsonl")]
    assert main([*arguments, "--depth", "12", "--ranks", "3", "9", "--negatives", "3", "--device", "cpu"]) == 0
    assert "22 rows of 21 queries, from 22 documents" in capsys.readouterr().out
    manifest, rows = lines_of(tmp_path / "mined.jsonl")
    assert (manifest["model_hash"], manifest["depth"], manifest["ranks"]) == (model_hash(model), 12, [3, 9])
    assert manifest["data"] == ["pairs.jsonl"]
    data = open_training_data([path], negatives=0)
    corpus = [(key, text) for key, text, _, _ in data.corpus()]
    vectors = model.encode_document([text for _, text in corpus])
    for row in rows[:5]:
        example = data.example(row["row"])
        scores = model.encode_query([example.query])[0] @ vectors.T
        keys, _ = data.known_positives(row["row"])
        ranked = sorted(
            (float(score) for score, (_, _, key, _) in zip(scores, data.corpus(), strict=True) if key not in keys),
            reverse=True,
        )
        assert row["scores"] == pytest.approx(ranked[2:9], rel=1e-4)
    assert main([*arguments, "--negatives", "3"]) == 2
    assert "exists" in capsys.readouterr().err
    arguments[-1] = str(tmp_path / "other.jsonl")
    assert main([*arguments, "--negatives", "10", "--ranks", "1", "3"]) == 2
    assert "10 negatives can't come from a range of 3 ranks" in capsys.readouterr().err


def test_a_resumed_training_run_draws_the_negatives_of_its_epoch(
    tiny_bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = training_runs.make_rows(16, negatives=6)
    settings: dict[str, Any] = {
        "model": tiny_bert, "pairs": [training_runs.write_rows(tmp_path / "rows.jsonl", rows)], "negatives": 2,
        "lexical_dim": 16, "cls_dim": 8, "batch_size": 4, "epochs": 2, "learning_rate": 1e-2, "save_steps": 2,
        "device": "cpu",
    }  # fmt: skip
    given: list[tuple[str, ...]] = []
    original = TrainingData.row

    def row(self: TrainingData, number: int) -> dict[str, Any]:
        values = original(self, number)
        given.append(tuple(values.values()))
        return values

    monkeypatch.setattr(TrainingData, "row", row)
    whole = training_runs.weights(train(TrainConfig(**settings, output=str(tmp_path / "whole"))))
    uninterrupted = given[-32:]
    first, second = uninterrupted[:16], uninterrupted[16:]
    assert sorted(texts[0] for texts in first) == sorted(texts[0] for texts in second)
    assert len(set(first) & set(second)) < 8, "the second epoch has other negatives"
    output = str(tmp_path / "resumed")
    training_runs.interrupt(
        {**settings, "output": output}, step=7
    )  # in the second epoch, after the checkpoint of step 6
    given.clear()
    resumed = training_runs.weights(train(TrainConfig(**settings, output=output, resume=True)))
    assert given[-8:] == second[-8:]
    assert not training_runs.differing(whole, resumed)


def test_bm25_mines_no_passage_without_a_word_of_the_query(tmp_path: Path) -> None:
    rows = [
        {"query": f"w{n}", "passage": f"w{n} answer", "negatives": [f"w{n} other", "unrelated words"]} for n in range(3)
    ]
    data = open_training_data([write(tmp_path / "rows.jsonl", *rows)], negatives=0)
    mine(None, data, tmp_path / "mined.jsonl", settings=MiningSettings(depth=50))
    mined = open_training_data([str(tmp_path / "mined.jsonl")], negatives=1)
    assert [mined.row(row)["negative_1"] for row in range(3)] == ["w0 other", "w1 other", "w2 other"]
    assert all(len(row["negatives"]) == 1 for row in lines_of(tmp_path / "mined.jsonl")[1])


def test_the_best_of_several_positives_counts_for_the_margin(tmp_path: Path) -> None:
    """Scores of w0: the positives 4 and 1; candidates 3, 2, 1."""
    positives = [{"docid": key, "text": " ".join(["w0"] * count)} for key, count in (("a", 4), ("b", 1))]
    others = [{"docid": f"n{count}", "text": " ".join(["w0"] * count) + " w5"} for count in (3, 2, 1)]
    path = write(tmp_path / "rows.jsonl", {"query": "w0", "positive_passages": positives, "negative_passages": others})
    mine(Bag(), open_training_data([path], negatives=0), tmp_path / "mined.jsonl", settings=MiningSettings(margin=2.0))
    (row,) = lines_of(tmp_path / "mined.jsonl")[1]
    assert (row["positive_scores"], row["scores"]) == ([4.0, 1.0], [2.0, 1.0])
