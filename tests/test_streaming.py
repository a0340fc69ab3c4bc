"""Training data: every format as rows, read when asked for, the same on every machine and after every restart."""

import gzip
import json
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

from st_aggretriever import TrainConfig, train
from st_aggretriever.mining import mine
from st_aggretriever.readers import hub, judged, store
from st_aggretriever.readers.known import KnownPositivesCollator
from st_aggretriever.readers.store import BadRows, Passages, Records, key_of
from st_aggretriever.readers.training import TrainingData, open_training_data


def jsonl(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def passage(name: str, **more: Any) -> dict[str, Any]:
    return {"docid": name, "title": "t", "text": f"text {name}", **more}


@pytest.fixture
def msmarco(tmp_path: Path) -> Path:
    """Six passages, two queries; the second has two positives."""
    folder = tmp_path / "marco"
    folder.mkdir()
    (folder / "collection.tsv").write_text("".join(f"{number}\tpassage {number}\n" for number in range(6)))
    (folder / "queries.train.tsv").write_text("10\tten\n20\ttwenty\n")
    (folder / "qrels.train.tsv").write_text("10 0 1 1\n20 0 2 1\n20 0 3 1\n")
    return folder


PAIR = {"query": "q", "passage": "p", "title": "t", "negatives": ["m", {"text": "n"}]}
TEVATRON = {"query": "q", "positive_passages": [passage("a")], "negative_passages": [passage("b"), passage("c")]}
DPR = {
    "question": "q",
    "positive_ctxs": [{"title": "t", "text": "p", "score": 1000, "passage_id": "1"}],
    "hard_negative_ctxs": [{"title": "", "text": "m"}, {"title": "t", "text": "n"}],
}
TRIPLET = {"anchor": "q", "positive": "p", "negative": "n"}
ROWS = {
    "pairs": (PAIR, ["q", "t p", "m", "n"]),
    "Tevatron": (TEVATRON, ["q", "t text a", "t text b", "t text c"]),
    "DPR": (DPR, ["q", "t p", "m", "t n"]),
    "triplet": (TRIPLET, ["q", "p", "n"]),
}


@pytest.mark.parametrize("form", ROWS)
def test_format_is_told_by_content(tmp_path: Path, form: str) -> None:
    record, texts = ROWS[form]
    data = open_training_data([jsonl(tmp_path / "rows", record, record)])
    assert [list(data.row(row).values()) for row in range(2)] == [texts, texts]
    assert list(data.row(0)) == data.columns == ["query", "positive", "negative_1", "negative_2"][: len(texts)]


def test_one_json_list_reads_like_lines_whatever_stands_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items are found in pieces: brackets and quotes in texts, letters of several bytes, items longer than a piece."""
    texts = ['"}], [{', "ä 語 \U0001f600", "\\", "x" * 3000, ",", "last"]
    records = [{"question": f"q {text}", "positive_ctxs": [{"text": text}]} for text in texts]
    for indent, escaped in ((4, False), (None, True)):
        (tmp_path / "dpr.json").write_text(json.dumps(records, indent=indent, ensure_ascii=escaped))
        for piece in (7, 64, 2**20):
            monkeypatch.setattr(store, "_CHUNK", piece)
            data = open_training_data([str(tmp_path / "dpr.json")])
            assert [data.row(row)["positive"] for row in range(len(texts))] == texts
    (tmp_path / "dpr.json").write_text(json.dumps(records)[:-40])
    with pytest.raises(ValueError, match=r"dpr\.json entry 6: expected a JSON list of objects, it breaks off here"):
        open_training_data([str(tmp_path / "dpr.json")])


def test_tab_separated_texts_are_rows_and_ids_are_refused(tmp_path: Path) -> None:
    (tmp_path / "triples.tsv").write_text("q one\tp one\tn one\nq two\tp two\tn two\n")
    data = open_training_data([str(tmp_path / "triples.tsv")])
    assert data.row(1) == {"query": "q two", "positive": "p two", "negative_1": "n two"}
    (tmp_path / "qidpidtriples.tsv").write_text("1\t2\t3\n")
    with pytest.raises(ValueError, match="holds ids, not texts: name the folder"):
        open_training_data([str(tmp_path / "qidpidtriples.tsv")])


@pytest.mark.parametrize(
    "query", ["[Solved] q", "[1] q", "{name} q", "{", "[", '{"a": 1} q', "{{x}", '["a"] q', "[[" * 9999]
)
@pytest.mark.parametrize("mark", ["", "\ufeff", "\n"])
def test_tab_separated_texts_may_begin_with_a_bracket(tmp_path: Path, query: str, mark: str) -> None:
    (tmp_path / "rows.tsv").write_text(f"{mark}{query}\tp\tn\nother\tp two\tn\n")
    data = open_training_data([str(tmp_path / "rows.tsv")], max_bad_rows=mark.count("\n"))
    assert list(data.row(0).values()) == [query, "p", "n"]


@pytest.mark.parametrize(
    "text",
    [
        '{"query":\t"q",\t"passage": "p"}\t\n',
        '\t{\t"query": "q", "passage": "p"}\n',
        '[\t{"query":\t"q", "passage": "p"}\t]\t',
        '[{\t"query":\t"q",\n"passage": "p"}]',
        '[\t\n\t{"query": "q", "passage": "p"}]',
        '[\t{\t\n"query": "q", "passage": "p"}]',
    ],
)
def test_tabs_between_the_parts_of_json_are_blanks(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    assert open_training_data([str(tmp_path / "rows.json")]).row(0) == {"query": "q", "positive": "p"}


@pytest.mark.parametrize("text", ['{"query":\t"q" "passage": "p"}\n', '[{"query":\t"q" "passage": "p"}]'])
def test_broken_json_with_tabs_is_no_tab_separated_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match=r"(line|entry) 1: expected a JSON .* malformed"):
        open_training_data([str(tmp_path / "rows.json")])


def test_msmarco_judgements_give_a_row_for_each_positive(msmarco: Path) -> None:
    data = open_training_data([str(msmarco)])
    assert [data.row(row) for row in range(3)] == [
        {"query": "ten", "positive": "passage 1"},
        {"query": "twenty", "positive": "passage 2"},
        {"query": "twenty", "positive": "passage 3"},
    ]
    assert data.counts == {str(msmarco): 3}
    assert [text for _, text, _, _ in data.corpus()] == [f"passage {number}" for number in range(6)]


def test_rows_with_too_few_negatives_can_be_left_out(msmarco: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a first stage that found less than was wanted brings them: nothing else changes for the other rows."""
    triples = msmarco / "qidpidtriples.train.full.2.tsv"
    triples.write_text("10\t1\t0\n20\t2\t4\n20\t2\t5\n20\t3\t0\n20\t3\t1\n20\t3\t4\n")
    with pytest.raises(ValueError, match=r"line 1: expected 2 negatives, or more, got 1.*--drop-short"):
        open_training_data([str(msmarco)], negatives=2)
    whole = open_training_data([str(msmarco)], negatives=1, seed=3)
    data = open_training_data([str(msmarco)], negatives=2, drop_short=True, seed=3)
    assert "fewer than 2 negatives: 1, the first" in caplog.text
    assert (len(data), data.counts, data.short_rows) == (2, {str(msmarco): 2}, {str(msmarco): 1})
    assert data.describe()[str(msmarco)]["short_rows"] == 1
    assert [data.row(row)["positive"] for row in range(2)] == ["passage 2", "passage 3"]
    assert (data.sha256, data.known_keys("twenty")) == (whole.sha256, whole.known_keys("twenty"))
    for again in (pickle.loads(pickle.dumps(data)), pickle.loads(pickle.dumps(data.subset([1, 0]))).subset([1, 0])):
        assert [again.row(row) for row in range(2)] == [data.row(row) for row in range(2)]
    everything = open_training_data([str(msmarco)], negatives=1, drop_short=True)
    assert (len(everything), everything.short_rows) == (3, {})
    with pytest.raises(ValueError, match=r"no row in .*marco has 9 negatives\. Lower --negatives"):
        open_training_data([str(msmarco)], negatives=9, drop_short=True)
    with pytest.raises(ValueError, match="drop_short leaves out rows with too few negatives: say how many"):
        open_training_data([str(msmarco)], drop_short=True)
    with pytest.raises(ValueError, match=r"expected all rows of the data.* without drop_short"):
        mine(None, data, msmarco / "mined.jsonl")


def test_msmarco_triples_that_follow_one_another_are_one_row(msmarco: Path) -> None:
    (msmarco / "qidpidtriples.train.full.2.tsv").write_text(
        "10\t1\t0\n10\t1\t4\n20\t2\t5\n20\t3\t0\n20\t3\t2\n20\t3\t4\n"
    )
    with pytest.raises(
        ValueError, match=r"triples.*line 3: expected 2 negatives, as in the first row, got 1.*--negatives"
    ):
        open_training_data([str(msmarco)])
    data = open_training_data([str(msmarco)], negatives=1)
    assert list(data.row(1).values()) == ["twenty", "passage 2", "passage 5"]
    drawn = set()
    for epoch in range(30):
        data.set_epoch(epoch)
        drawn.add(data.row(2)["negative_1"])
    assert drawn == {"passage 0", "passage 4"}, "passage 2 is a positive of the same query in another row"
    with pytest.raises(ValueError, match=r"line 1: expected 3 negatives, or more, got 2"):
        open_training_data([str(msmarco)], negatives=3)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("10\t1", "three ids"),
        ("30\t1\t2", "query '30' is not in the queries file"),
        ("10\t9\t2", "passage '9' is not in the collection"),
        ("10\t1\t9", "the negative '9' is not in the collection"),
        ("10\t1\t6", "the negative '6' is empty"),
        ("10\t1\t1", "'1' is its own negative"),
        ("", "the line is empty"),
    ],
)
def test_broken_triple_is_named_and_can_be_left_out(msmarco: Path, line: str, sentence: str) -> None:
    (msmarco / "collection.tsv").open("a").write("6\t \n7\tpassage  4\n")
    (msmarco / "qidpidtriples.train.small.tsv").write_text(f"10\t1\t0\n{line}\n20\t2\t5\n")
    with pytest.raises(ValueError, match=rf"^[^ ]*small\.tsv line 2: .*{sentence}"):
        open_training_data([str(msmarco)])
    data = open_training_data([str(msmarco)], max_bad_rows=1)
    assert (len(data), list(data.bad_rows.values())) == (2, [1])
    assert data.row(1)["negative_1"] == "passage 5"


def test_a_row_whose_negatives_repeat_its_positive_lacks_them_where_they_are_wanted(msmarco: Path) -> None:
    (msmarco / "collection.tsv").open("a").write("7\tpassage  4\n")
    (msmarco / "qidpidtriples.train.small.tsv").write_text("10\t1\t0\n10\t4\t7\n20\t2\t5\n")
    assert [list(row.values()) for row in map(open_training_data([str(msmarco)], negatives=0).row, range(3))][1][1] == (
        "passage 4"
    )
    with pytest.raises(ValueError, match=r"tsv line 2: expected 1 negatives, or more, got 0\. .* the positive's text"):
        open_training_data([str(msmarco)], negatives=1)


BAD_NEGATIVES = {"unknown": "99", "empty": "6", "left out of the collection": "8"}


@pytest.mark.parametrize("case", [*BAD_NEGATIVES, "the positive's text"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("chunk", [1, 512])
def test_every_row_of_triples_that_were_opened_can_be_drawn(
    msmarco: Path, case: str, place: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in a row the bad negative is: it is left out as if its line weren't there, and the row stays one."""
    monkeypatch.setattr(judged, "_LOOKED_UP", chunk)
    collection = (msmarco / "collection.tsv").read_text()
    (msmarco / "collection.tsv").write_text(f"{collection}6\t \n7\tpassage  1\n8 no tab\n")
    lines = ["10\t1\t0", "10\t1\t5", "20\t2\t4", "20\t2\t5"]
    lines.insert(place, f"10\t1\t{BAD_NEGATIVES.get(case, '7')}")
    (msmarco / "qidpidtriples.train.small.tsv").write_text("\n".join(lines))
    if case in BAD_NEGATIVES:
        with pytest.raises(ValueError, match=rf"small\.tsv line {place + 1}: the negative .* bad row 2"):
            open_training_data([str(msmarco)], max_bad_rows=1)
    data = open_training_data([str(msmarco)], max_bad_rows=1 + (case in BAD_NEGATIVES))
    assert [list(data.row(row).values())[2:] for row in range(len(data))] == [
        ["passage 0", "passage 5"],
        ["passage 4", "passage 5"],
    ]
    with pytest.raises(ValueError, match=r"expected 3 negatives, or more, got 2"):
        open_training_data([str(msmarco)], max_bad_rows=2, negatives=3)


def pack_zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


@pytest.mark.parametrize("pack", [gzip.compress, pack_zstd], ids=["gzip", "zstd"])
@pytest.mark.parametrize("in_memory", [10, 2**20], ids=["disk", "memory"])
def test_compressed_files_read_like_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes], in_memory: int
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(store, "IN_MEMORY", in_memory)
    path = Path(jsonl(tmp_path / "rows", *({**PAIR, "query": f"q {number}"} for number in range(50))))
    plain = path.read_bytes()
    path.write_bytes(pack(plain))
    data = open_training_data([str(path)])
    assert [data.row(row)["query"] for row in (49, 0, 20)] == ["q 49", "q 0", "q 20"]
    copies = [copy for copy in tmp_path.glob("home/**/*") if copy.is_file()]
    assert [copy.read_bytes() for copy in copies] == ([plain] if in_memory == 10 else [])
    # Another content under the same name is another copy.
    path.write_bytes(pack(plain + plain))
    assert len(open_training_data([str(path)])) == 100
    path.write_bytes(pack(plain)[:-9])
    with pytest.raises(ValueError, match=r"rows: broken (gzip|zstd) data"):
        open_training_data([str(path)])


def test_zstd_without_its_package_names_the_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    with pytest.raises(ImportError, match=r'pip install "st-aggretriever\[zst\]"'):
        open_training_data([str(tmp_path / "rows.zst")])


def test_parquet_and_hub_names_are_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset

    table = Dataset.from_list([{"query": f"q{number}", "positive": f"p{number}"} for number in range(3)])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    table.to_parquet(tmp_path / "rows.parquet")
    data = open_training_data([str(tmp_path / "rows.parquet")])
    assert data.row(2) == {"query": "q2", "positive": "p2"}
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: asked.append((args, options)) or table)
    assert open_training_data(["someone/pairs:config"], split="dev").row(0) == {"query": "q0", "positive": "p0"}
    assert asked == [(("someone/pairs", "config"), {"split": "dev"})]


def test_missing_paths_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere/pairs\.jsonl does not exist"):
        open_training_data([str(tmp_path / "nowhere" / "pairs.jsonl")])
    with pytest.raises(FileNotFoundError, match=r"neither corpus\.jsonl \(BEIR\) nor collection\.tsv"):
        open_training_data([str(tmp_path)])

    def offline(*args: Any, **options: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(FileNotFoundError, match=r"someone/pairs is no file or folder here, .* no network"):
        hub.Table("someone/pairs", "train")


BROKEN = {
    "malformed": ('{"query": ', "malformed JSON"),
    "blank": ("", "the line is empty"),
    "no passage": ('{"query": "q"}', "expected the fields 'query' and 'passage'"),
    "positive among negatives": ('{"query": "q", "passage": "a  b", "negatives": ["a b "]}', "its own negatives"),
    "score": ('{"query": "q", "passage": "p", "score": "high"}', "expected a finite number in 'score'"),
    "infinite score": ('{"query": "q", "passage": "p", "score": -Infinity}', "expected a finite number in 'score'"),
    "no score": ('{"query": "q", "passage": "p", "score": NaN}', "expected a finite number in 'score'"),
    "score above all floats": (
        f'{{"query": "q", "passage": "p", "score": 1{"0" * 400}}}',
        "number in 'score', got 10+\\.",
    ),
    "scores above all floats": (
        f'{{"query": "q", "passage": "p", "scores": [-1{"0" * 400}]}}',
        "a finite number in 'scores'",
    ),
    "scores": ('{"query": "q", "passage": "p", "scores": [1, 2]}', "expected 1 numbers in 'scores'"),
    "blank query": ('{"query": " ", "passage": "p"}', "the query is empty"),
    "null query": ('{"query": null, "passage": "p"}', "the query is empty"),
    "null passage": ('{"query": "q", "passage": null}', "a passage is empty"),
    "empty negatives": ('{"query": "q", "passage": "p", "negatives": ["", ""]}', "a negative is empty"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_rows_are_counted_and_stop_past_the_limit(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    line, sentence = BROKEN[case]
    good = json.dumps({"query": "q", "passage": "p"})
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{line}\n{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl line 1: .*{sentence}"):
        open_training_data([str(path)])
    with pytest.raises(ValueError, match=rf"line 3: .*{sentence}.* bad row 2; --max-bad-rows allows 1\."):
        open_training_data([str(path)], max_bad_rows=1)
    caplog.clear()
    data = open_training_data([str(path)], max_bad_rows=2)
    assert (len(data), data.bad_rows, data.describe()[str(path)]["bad_rows"]) == (2, {str(path): 2}, 2)
    assert [f"line {number}" in record.getMessage() for number, record in zip((1, 3), caplog.records, strict=True)] == [
        True,
        True,
    ]


def test_empty_texts_of_a_collection_break_the_rows_that_use_them(msmarco: Path) -> None:
    (msmarco / "collection.tsv").write_text("0\tzero\n1\t \n2\ttwo\n3\tthree\n")
    (msmarco / "queries.train.tsv").write_text("10\tten\n20\ttwenty\n30\t \n")
    with pytest.raises(ValueError, match=r"qrels\.train\.tsv line 1: the passage '1' is empty"):
        open_training_data([str(msmarco)])
    data = open_training_data([str(msmarco)], max_bad_rows=1)
    assert [data.where(row) for row in range(len(data))] == [f"{msmarco}/qrels.train.tsv line {n}" for n in (2, 3)]
    triples = "10\t2\t0\n10\t2\t1\n20\t1\t0\n30\t2\t0\n20\t3\t0\n"
    (msmarco / "qidpidtriples.train.small.tsv").write_text(triples)
    with pytest.raises(ValueError, match=r"small\.tsv line 2: the negative '1' is empty"):
        open_training_data([str(msmarco)])
    data = open_training_data([str(msmarco)], max_bad_rows=3)
    assert [list(data.row(row).values()) for row in range(len(data))] == [
        ["ten", "two", "zero"],
        ["twenty", "three", "zero"],
    ]


LISTS = {
    "after the end": ('[{A}] {"query": "x"}', "nothing after the JSON list's closing bracket, got '{"),
    "second list": ("[{A}]\n[{A}]", "nothing after the JSON list's closing bracket"),
    "between entries": ("[{A} garbage, {A}]", "after entry 1: expected a comma or the list's end, got 'g"),
    "no comma": ("[{A} {A}]", "after entry 1: expected a comma"),
    "two commas": ("[{A},, {A}, {A}]", "entry 2: .*malformed"),
    "inside an entry": ('[{A}, {"query" "q"}, {A}, {A}]', "entry 2: .*malformed JSON .*Expecting ':'"),
    "cut": ("[{A}, {", "entry 2: .*it breaks off here"),
}


@pytest.mark.parametrize("case", LISTS)
@pytest.mark.parametrize("piece", [7, 2**20])
def test_what_is_no_json_list_is_refused(
    tmp_path: Path, case: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_CHUNK", piece)
    text, sentence = LISTS[case]
    (tmp_path / "rows.json").write_text(text.replace("{A}", '{"query": "q", "passage": "p"}') + " \n" * 20)
    with pytest.raises(ValueError, match=rf"rows\.json.*{sentence}"):
        open_training_data([str(tmp_path / "rows.json")])


@pytest.mark.parametrize("header", ["query\tpassage", "Question\tpositive\tnegative_1", "\ufeffanchor\tdocument\r"])
def test_a_header_of_tab_separated_texts_is_no_row(tmp_path: Path, header: str) -> None:
    (tmp_path / "rows.tsv").write_bytes(f"{header}\na\tb\tc\n".encode())
    assert [*open_training_data([str(tmp_path / "rows.tsv")]).row(0).values()] == ["a", "b", "c"]
    (tmp_path / "rows.tsv").write_text("passage\tquery\na\tb\n")
    with pytest.raises(ValueError, match="line 1: expected the columns query<tab>passage"):
        open_training_data([str(tmp_path / "rows.tsv")])


def test_commas_and_empty_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("query,passage\na,b\n")
    with pytest.raises(ValueError, match=r"rows\.csv: tables with commas are not read\. Write jsonl"):
        open_training_data([str(tmp_path / "rows.csv")])
    with pytest.raises(ValueError, match="got an empty one"):
        open_training_data([""])


def test_broken_passages_are_left_out_and_the_others_keep_their_places(tmp_path: Path) -> None:
    (tmp_path / "collection.tsv").write_bytes(b"\xef\xbb\xbf1\tone\nno tab\n2\ttwo \n\n3\t\xff\n4\tfour")
    passages = Passages(tmp_path / "collection.tsv", BadRows(3, str))
    assert list(passages.stream()) == [("1", "one"), ("2", "two"), ("4", "four")]
    assert passages.find(["4", "2", "no", "1"]).tolist() == [2, 1, -1, 0]
    assert [(passages.id(place), passages.text(place)) for place in (2, 0, 1)] == [
        ("4", "four"),
        ("1", "one"),
        ("2", "two"),
    ]
    (tmp_path / "collection.tsv").write_text("1\tone\n2\ttwo\n1\tother\n")
    with pytest.raises(ValueError, match="id '1' occurs a second time"):
        Passages(tmp_path / "collection.tsv", BadRows(0, str))


def many(tmp_path: Path, rows: int = 40, negatives: int = 12) -> str:
    return jsonl(
        tmp_path / "many.jsonl",
        *(
            {"query": f"q{row}", "passage": f"p{row}", "negatives": [f"n{row}.{place}" for place in range(negatives)]}
            for row in range(rows)
        ),
    )


def epochs_of(data: TrainingData, epochs: range) -> list[list[dict[str, Any]]]:
    drawn = []
    for epoch in epochs:
        data.set_epoch(epoch)
        drawn.append([data.row(row) for row in range(len(data))])
    return drawn


def test_negatives_are_drawn_anew_each_epoch_uniformly_and_by_the_seed(tmp_path: Path) -> None:
    path = many(tmp_path)
    data = open_training_data([path], negatives=3, seed=7)
    drawn = epochs_of(data, range(60))
    for row in (row for epoch in drawn for row in epoch):
        number = row["query"][1:]
        names = [row[f"negative_{place}"] for place in (1, 2, 3)]
        assert row["positive"] == f"p{number}"
        assert len(set(names)) == 3
        assert all(name.startswith(f"n{number}.") for name in names)
    assert drawn[0] != drawn[1]
    counts = Counter(row[f"negative_{place}"].split(".")[1] for epoch in drawn for row in epoch for place in (1, 2, 3))
    # 7,200 draws of 12: each 600 times, standard deviation 21.
    assert all(abs(count - 600) < 110 for count in counts.values())
    assert epochs_of(open_training_data([path], negatives=3, seed=7), range(2)) == drawn[:2]
    assert epochs_of(open_training_data([path], negatives=3, seed=8), range(2)) != drawn[:2]
    data.set_epoch(0)  # any order of asking
    assert [data.row(row) for row in reversed(range(40))] == drawn[0][::-1]


def test_rows_are_the_same_in_another_process(tmp_path: Path) -> None:
    path = many(tmp_path, rows=5)
    code = (
        "import sys, json\nfrom st_aggretriever.readers.training import open_training_data\n"
        "data = open_training_data([sys.argv[1]], negatives=2, seed=3)\ndata.set_epoch(4)\n"
        "print(json.dumps([data.row(row) for row in range(5)]), data.sha256)"
    )
    found = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True).stdout
    data = open_training_data([path], negatives=2, seed=3)
    data.set_epoch(4)
    assert found == f"{json.dumps([data.row(row) for row in range(5)])} {data.sha256}\n"
    again = pickle.loads(pickle.dumps(data.subset([3, 1])))
    assert [again.row(0), again.row(1)] == [data.row(3), data.row(1)]


def test_several_positives_of_a_row_take_turns(tmp_path: Path) -> None:
    record = {"query": "q", "positive_passages": [passage("a"), passage("b")], "negative_passages": [passage("c")]}
    data = open_training_data([jsonl(tmp_path / "rows", record)])
    drawn = Counter(epoch[0]["positive"] for epoch in epochs_of(data, range(40)))
    assert set(drawn) == {"t text a", "t text b"}
    assert min(drawn.values()) > 8


def test_a_positive_of_another_row_is_no_negative(tmp_path: Path) -> None:
    """By text, blanks apart: two rows of one query, of which each has the other's positive among its negatives."""
    path = jsonl(
        tmp_path / "rows",
        {"query": "q", "passage": "first", "negatives": ["second one", "x", "y"]},
        {"query": " q ", "passage": "second  one", "negatives": ["first", "z", "y"]},
        {"query": "other", "passage": "first", "negatives": ["second one", "v", "w"]},
    )
    data = open_training_data([path], negatives=2)
    assert [list(data.row(row).values())[2:] for row in (0, 1)] == [["x", "y"], ["z", "y"]]
    with pytest.raises(ValueError, match=r"line 1: expected 3 negatives, as in the first row, got 2"):
        open_training_data([path])


def test_teacher_scores_in_the_data_follow_their_passages(tmp_path: Path) -> None:
    records = [
        {"query": "a", "passage": "p", "negatives": ["m", "n", "o"], "scores": [9, 3, 2, 1]},
        {
            "query": "b",
            "passage": "p",
            "score": 8,
            "negatives": [{"text": t, "score": s} for t, s in (("m", 5), ("n", 4))],
        },
    ]
    path = jsonl(tmp_path / "rows", *records)
    scores = {"a": {"p": 9, "m": 3, "n": 2, "o": 1}, "b": {"p": 8, "m": 5, "n": 4}}
    data = open_training_data([path], negatives=2, scores=True)
    assert data.columns == ["query", "positive", "negative_1", "negative_2", "scores"]
    for row in (row for epoch in epochs_of(data, range(5)) for row in epoch):
        texts = [row[name] for name in ("positive", "negative_1", "negative_2")]
        assert row["scores"] == [scores[row["query"]][text] for text in texts]
    assert data.dataset()[0:2]["scores"] == [data.row(0)["scores"], data.row(1)["scores"]]
    assert "scores" not in open_training_data([path], negatives=2).row(0)
    unscored = jsonl(tmp_path / "unscored", *records, {"query": "c", "passage": "p", "negatives": ["m", "n"]})
    with pytest.raises(ValueError, match=r"unscored: expected a teacher's scores in every row.*--teacher"):
        open_training_data([unscored], negatives=2, scores=True)


def test_batches_equal_those_of_no_duplicates_and_tell_the_data_the_epoch(tmp_path: Path) -> None:
    from sentence_transformers.base.sampler import NoDuplicatesBatchSampler

    rng = random.Random(0)
    records = [{"query": f"q{rng.randrange(60)}", "passage": f"p{rng.randrange(60)}"} for _ in range(100)]
    data = open_training_data([jsonl(tmp_path / "rows", *records)])
    rows = data.dataset()
    assert rows[17] == data.row(17)
    for drop_last in (True, False):
        options: dict[str, Any] = {"batch_size": 8, "drop_last": drop_last, "seed": 5}
        ours = data.batch_sampler(rows, generator=torch.Generator(), **options)
        stock = NoDuplicatesBatchSampler(rows, generator=torch.Generator(), **options)
        for epoch in (0, 3):
            ours.set_epoch(epoch)
            stock.set_epoch(epoch)
            batches = list(ours)
            assert batches == list(stock)
            assert data.epoch == epoch
            for batch in batches:
                keys = [key for row in batch for key in set(data.keys(row))]
                assert len(keys) == len(set(keys))


def test_batches_keep_apart_by_all_positives_of_a_row_but_not_by_negatives(tmp_path: Path) -> None:
    shared = [passage("hub")]
    records = [
        {"query": f"q{n}", "positive_passages": [passage(f"a{n}"), passage(f"a{n // 2}")], "negative_passages": shared}
        for n in range(8)
    ]
    data = open_training_data([jsonl(tmp_path / "rows", *records)])
    batches = list(data.batch_sampler(data.dataset(), batch_size=4, drop_last=False, generator=torch.Generator()))
    assert sorted(row for batch in batches for row in batch) == list(range(8))
    for batch in batches:
        seen = [key for row in batch for key in set(data.keys(row))]
        assert len(seen) == len(set(seen))
    assert max(map(len, batches)) > 1, "all share their negative"


@pytest.mark.parametrize("seed", range(40))
def test_every_epoch_has_as_many_batches_as_the_first(tmp_path: Path, seed: int) -> None:
    """Also where the distinct queries and passages barely fill one; else the first epoch, which is tried, tells."""
    rng = random.Random(seed)
    size, pairs = rng.choice([4, 6, 8]), set[tuple[int, ...]]()
    most = size + rng.randint(0, 3), size + rng.randint(0, 4)
    while len(pairs) < 3 * size:
        pairs.add(tuple(min(int(rng.expovariate(2 / count)), count - 1) for count in most))
    path = jsonl(tmp_path / "rows", *({"query": f"q{query}", "passage": f"p{text}"} for query, text in sorted(pairs)))
    data = open_training_data([path])
    sampler = data.batch_sampler(data.dataset(), batch_size=size, drop_last=True, generator=torch.Generator(), seed=0)
    counts = []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        sampler.set_epoch(epoch)
        assert list(sampler) == batches
        counts.append(len(batches))
    assert counts[0] < len(sampler) or counts == [len(sampler)] * 8


def test_data_that_fill_too_few_batches_are_not_gone_through_for_ever(tmp_path: Path) -> None:
    rows = [("a", 1), *(("b", number) for number in range(600))]
    path = jsonl(tmp_path / "rows", *({"query": query, "passage": f"p{number}"} for query, number in rows))
    data = open_training_data([path])
    sampler = data.batch_sampler(data.dataset(), batch_size=2, drop_last=True, generator=torch.Generator(), seed=0)
    assert (len(list(sampler)), len(sampler)) == (1, 300)


@pytest.mark.parametrize("shared", ["query", "passage"])
def test_many_rows_of_one_query_or_passage_are_not_looked_at_for_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    rows = [{"query": f"q{number}", "passage": f"p{number}"} for number in range(2000)]
    path = jsonl(
        tmp_path / "rows", *({**row, shared: "same"} if number % 2 else row for number, row in enumerate(rows))
    )
    data = open_training_data([path])
    looks = Counter[int]()
    keys = TrainingData.keys

    def counted(self: TrainingData, row: int) -> list[int]:
        looks[row] += 1
        return keys(self, row)

    monkeypatch.setattr(TrainingData, "keys", counted)
    sampler = data.batch_sampler(data.dataset(), batch_size=8, drop_last=True, generator=torch.Generator(), seed=0)
    assert len(list(sampler)) == 250
    assert looks.total() < 3 * 2000


def test_rows_that_an_epoch_leaves_out_are_counted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [("same" if number < 30 else f"q{number}", f"p{number}") for number in range(100)]
    path = jsonl(tmp_path / "rows", *({"query": query, "passage": text} for query, text in rows))
    data = open_training_data([path])
    options = {"batch_size": 8, "drop_last": True, "seed": 0}
    shown = [
        {row for batch in data.batch_sampler(data.dataset(), generator=torch.Generator(), **options) for row in batch}
        for _ in range(2)
    ]
    sentence = f"{100 - len(shown[0])} of 100 rows are in no batch of an epoch"
    assert [record.getMessage()[: len(sentence)] for record in caplog.records] == [sentence]
    caplog.clear()
    plain = open_training_data([many(tmp_path, rows=44)], negatives=1)
    assert len(list(plain.batch_sampler(plain.dataset(), generator=torch.Generator(), **options))) == 5
    assert not caplog.records


def test_negatives_of_a_query_with_many_rows_are_drawn_without_its_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(
        tmp_path / "rows",
        *({"query": "q", "passage": f"p{n}", "negatives": [f"p{(n + 1) % 50}", f"n{n}"]} for n in range(50)),
    )

    def refused(*args: Any) -> Any:
        raise AssertionError("all positives of the query are gathered")

    monkeypatch.setattr(TrainingData, "_known", refused)
    data = open_training_data([path], negatives=1)
    assert [data.row(row)["negative_1"] for row in range(50)] == [f"n{number}" for number in range(50)]


def test_subset_draws_what_its_rows_draw_in_the_whole(tmp_path: Path) -> None:
    data = open_training_data([many(tmp_path)], negatives=2)
    some = data.subset([7, 30])
    assert [some.row(0), some.row(1)] == [data.row(7), data.row(30)]
    assert (len(some), list(some.counts.values()), some.sha256) == (2, [2], data.sha256)
    assert some.keys(1) == data.keys(30)
    some.set_epoch(1)
    assert (some.row(0) != data.row(7), data.epoch) == (True, 0)
    with pytest.raises(IndexError):
        some.row(2)


def test_sha256_changes_with_any_file_that_is_read(msmarco: Path) -> None:
    before = open_training_data([str(msmarco)]).sha256
    assert open_training_data([str(msmarco)]).sha256 == before
    for name in ("collection.tsv", "queries.train.tsv", "qrels.train.tsv"):
        content = (msmarco / name).read_text()
        (msmarco / name).write_text(content.rstrip("\n") + ("\n10 0 4 1\n" if "qrels" in name else " more\n"))
        assert open_training_data([str(msmarco)]).sha256 != before
        (msmarco / name).write_text(content)


def test_records_are_read_at_their_places(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows", *({"n": number, "é": "ü" * number} for number in range(30)))
    records = Records(path)
    assert len(list(records.scan(BadRows(0, str)))) == 30
    assert records[17] == {"n": 17, "é": "ü" * 17}
    assert records.where(17).endswith("rows line 18")
    assert key_of(" a\tb\n") == key_of("a b") != key_of("ab")


def test_a_batch_tells_the_loss_of_positives_that_are_not_in_it(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "rows",
        {"query": "a", "passage": "one", "negatives": ["x"]},
        {"query": "a", "passage": "two", "negatives": ["y"]},
        {"query": "b", "passage": "three", "negatives": [" two"]},
    )
    data = open_training_data([path])
    rows = [data.row(0), data.row(2)]
    batch = KnownPositivesCollator(lambda rows: {"query_input_ids": len(rows)}, data)(rows)
    known, positives, negatives = (
        batch[name].tolist() for name in ("query_known_positives", "positive_text_id", "negative_1_text_id")
    )
    assert (batch["query_input_ids"], len(known[0]), len(known[1])) == (2, 2, 2)
    assert set(known[0]) == {positives[0], negatives[1]}, "the negative of b is a positive of a, in a row elsewhere"
    assert known[1] == [positives[1], -1]
    assert negatives[0] not in {*known[0], *known[1]}
    assert min(*positives, *negatives) >= 0
    alone = open_training_data([jsonl(tmp_path / "alone", {"query": "a", "passage": "one", "negatives": ["x"]})])
    assert KnownPositivesCollator(lambda rows: {}, alone)([alone.row(0)]) == {}
    with_labels = KnownPositivesCollator(SentenceTransformerDataCollator(preprocess_fn=dict), data)
    assert "scores" in with_labels.valid_label_columns


def test_training_on_queries_with_several_positives_runs_by_every_loss(tiny_bert: str, tmp_path: Path) -> None:
    rows = training_runs.make_rows(12, negatives=2)
    again = [{**row, "passage": f"{row['passage']} again"} for row in rows[:4]]
    path = training_runs.write_rows(tmp_path / "rows.jsonl", rows + again)
    for name, options in (("plain", {}), ("cached", {"mini_batch_size": 3})):
        settings: dict[str, Any] = {"model": tiny_bert, "pairs": [path], "output": str(tmp_path / name), "max_steps": 2}
        train(TrainConfig(**settings, lexical_dim=16, cls_dim=8, batch_size=4, device="cpu", **options))
        assert (tmp_path / name / "train.json").is_file()


def test_a_copy_is_stale_when_the_file_was_written_again_at_the_same_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(store, "IN_MEMORY", 10)
    path = tmp_path / "rows.gz"
    for number, text in enumerate(("old", "new")):
        path.write_bytes(gzip.compress(json.dumps({"query": "q", "passage": text}).encode() + b"\n", 0))
        os.utime(path, ns=(number, number))
        assert open_training_data([str(path)]).row(0)["positive"] == text
