"""Readers: what is data, what is an error, and where the error is said to be."""

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries
from st_aggretriever.readers.corpus import Corpus
from st_aggretriever.readers.dpr import read_questions
from st_aggretriever.readers.pairs import read_pairs
from st_aggretriever.readers.text import id_of
from st_aggretriever.readers.training import open_training_data

HEADER = "query-id\tcorpus-id\tscore\n"


def jsonl(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BEIR folder of three documents and two queries."""
    (tmp_path / "qrels").mkdir()
    documents = [{"_id": "d1", "title": "t", "text": "x"}, {"_id": "d2", "text": "y"}, {"_id": "d3", "text": "z"}]
    (tmp_path / "corpus.jsonl").write_text(jsonl(*documents))
    (tmp_path / "queries.jsonl").write_text(jsonl({"_id": "q1", "text": "one"}, {"_id": "q2", "text": "two"}))
    (tmp_path / "qrels" / "train.tsv").write_text(HEADER + "q1\td1\t2\nq1\td2\t0\nq2\tghost\t1\nq2\td3\t1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"title": "t", "text": "x"}, "t x"),
        ({"title": "t", "text": ""}, "t"),
        ({"title": "t", "text": None}, "t"),
        ({"title": "t"}, "t"),
        ({"title": None, "text": "x"}, "x"),
        ({"title": "", "text": "x"}, "x"),
        ({"text": "x"}, "x"),
        ({"title": " ", "text": " x\n"}, "x"),
        ({"title": "", "text": ""}, ""),
        ({"title": None, "text": None}, ""),
        ({"title": 7, "text": "x"}, "7 x"),
        ({"text": "a \ud800 b"}, "a \ufffd b"),
        ({"text": "\U0001f600"}, "\U0001f600"),
        ({"text": "w " * 10_000}, ("w " * 10_000).strip()),
    ],
)
def test_document_text_is_title_blank_text_without_stray_blanks(folder: Path, record: Any, text: str) -> None:
    (folder / "corpus.jsonl").write_text(jsonl({"_id": "d", **record}))
    assert list(read_corpus(folder)) == [("d", text)]


def test_whole_number_ids_become_strings(folder: Path) -> None:
    (folder / "corpus.jsonl").write_text(jsonl({"_id": 10, "text": "x"}, {"_id": "9", "text": "y"}))
    assert [key for key, _ in read_corpus(folder)] == ["10", "9"]


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_gzip_is_told_by_content(folder: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    data = (folder / "corpus.jsonl").read_bytes()
    (folder / "corpus.jsonl").unlink()
    (folder / name).write_bytes(pack(data))
    assert list(read_corpus(folder)) == [("d1", "t x"), ("d2", "y"), ("d3", "z")]


def test_byte_order_mark_and_windows_line_ends_are_no_part_of_a_record(folder: Path) -> None:
    (folder / "queries.jsonl").write_bytes(b'\xef\xbb\xbf{"_id": "q1", "text": "one"}\r\n{"_id": "q2", "text": "two"}')
    assert read_queries(folder) == {"q1": "one", "q2": "two"}
    (folder / "qrels" / "train.tsv").write_bytes(b"query-id\tcorpus-id\tscore\r\nq1\td1\t1\r\n")
    assert read_qrels(folder, "train", {"q1"}) == {"q1": {"d1": 1}}


GOOD = b'{"_id": "1", "text": "x"}\n'
BAD_LINES = {
    "blank line": (GOOD + b"\n" + GOOD, "line 2: the line is empty"),
    "blank last line": (GOOD + b" \n", "line 2: the line is empty"),
    "malformed": (GOOD + b'{"_id": "2", "text": \n', r"line 2: expected a JSON object, got malformed JSON \(.*column"),
    "not an object": (GOOD + b'["2"]\n', "line 2: expected a JSON object, got list"),
    "no id": (GOOD + b'{"text": "x"}\n', "line 2: expected a field '_id', got only 'text'"),
    "no text": (GOOD + b'{"_id": "2", "body": "x"}\n', "line 2: expected a field 'text'.*got '_id', 'body'"),
    "id is a list": (GOOD + b'{"_id": ["2"], "text": "x"}\n', "line 2: expected a string in '_id', got list"),
    "id is true": (GOOD + b'{"_id": true, "text": "x"}\n', "line 2: expected a string in '_id', got bool"),
    "id is empty": (GOOD + b'{"_id": "", "text": "x"}\n', "line 2: expected a non-empty id without"),
    "id without UTF-8": (GOOD + b'{"_id": "\\ud800", "text": "x"}\n', "line 2: expected a non-empty id without"),
    "text is a list": (GOOD + b'{"_id": "2", "text": ["x"]}\n', "line 2: expected a string in 'text', got list"),
    "same id": (GOOD + b'{"_id": 1, "text": "y"}\n', "line 2: id '1' occurs a second time"),
    "not UTF-8": (GOOD + b'{"_id": "2", "text": "\xff"}\n', "line 2: expected UTF-8"),
    "empty file": (b"", "is empty: expected at least one line"),
    "broken gzip": (gzip.compress(GOOD)[:-9], r"line [12]: broken gzip data"),
}


@pytest.mark.parametrize("case", BAD_LINES)
@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl"])
def test_bad_line_is_named_by_file_and_number(folder: Path, case: str, name: str) -> None:
    content, sentence = BAD_LINES[case]
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{sentence}"):
        list(read_corpus(folder)) if name == "corpus.jsonl" else read_queries(folder)


@pytest.mark.parametrize("raw", [b'{"_id": "q", "text": "a \\ud800"}', b'{"_id": "q", "text": "a \xed\xa0\x80"}'])
def test_lone_surrogate_in_a_text_is_data_escaped_or_raw(folder: Path, raw: bytes) -> None:
    (folder / "queries.jsonl").write_bytes(raw)
    assert read_queries(folder) == {"q": "a \ufffd"}


def test_missing_parts_are_named(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        read_queries(folder / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no qrels/test\.tsv\. It has train\."):
        read_qrels(folder, "test", {"q1"})
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds neither corpus\.jsonl nor corpus\.jsonl\.gz"):
        read_corpus(folder)
    with pytest.raises(FileNotFoundError, match=r"pairs\.jsonl does not exist"):
        list(read_pairs(folder / "pairs.jsonl"))


def test_qrels_of_beir_and_of_trec_read_alike(folder: Path) -> None:
    expected = {"q1": {"d1": 2, "d2": 0}, "q2": {"ghost": 1, "d3": 1}}
    assert read_qrels(folder, "train", {"q1", "q2"}) == expected
    (folder / "qrels" / "trec.tsv").write_text("q1 0 d1 2\nq1\t0\td2\t0\nq2 0 ghost 1\nq2 0 d3 1\n")
    assert read_qrels(folder, "trec", {"q1", "q2"}) == expected
    (folder / "qrels" / "same.tsv").write_text(HEADER + "q1\td1\t1\nq1\td1\t1\n")
    assert read_qrels(folder, "same", {"q1"}) == {"q1": {"d1": 1}}


BAD_QRELS = {
    "no header": ("q1\td1\t1\n", "line 1: expected the header query-id<tab>corpus-id<tab>score, got 'q1"),
    "other header": ("corpus-id\tquery-id\tscore\nd1\tq1\t1\n", "line 1: expected the header"),
    "two columns": (HEADER + "q1\td1\n", "line 2: expected the columns query-id"),
    "blanks for tabs": (HEADER + "q1 d1 1\n", "line 2: expected the columns query-id"),
    "three columns under TREC": ("q1 0 d1 1\nq1 d2 1\n", "line 2: expected the columns query 0 document grade"),
    "grade not whole": (HEADER + "q1\td1\t1\nq1\td2\t0.5\n", "line 3: expected an integer as the grade, got '0.5'"),
    "grade that trec_eval takes all memory for": (HEADER + "q1\td1\t3000000000\n", "line 2: expected a grade from"),
    "grade of many digits": (HEADER + "q1\td1\t" + "9" * 5000 + "\n", "line 2: expected a grade from"),
    "grade far below": ("q1 0 d1 -10001\n", "line 1: expected a grade from"),
    "no grade": (HEADER + "q1\td1\t\n", "line 2: expected an integer as the grade, got ''"),
    "unknown query": (HEADER + "q1\td1\t1\nq9\td1\t1\n", "line 3: query 'q9' is not in the queries file"),
    "two grades": (HEADER + "q1\td1\t1\nq1\td1\t2\n", "line 3: query 'q1', document 'd1' has another grade"),
    "blank line": (HEADER + "\nq1\td1\t1\n", "line 2: the line is empty"),
    "header alone": (HEADER, "holds no judgement"),
    "empty": ("", "is empty"),
}


@pytest.mark.parametrize("case", BAD_QRELS)
def test_bad_qrels_are_named_by_file_and_number(folder: Path, case: str) -> None:
    content, sentence = BAD_QRELS[case]
    (folder / "qrels" / "bad.tsv").write_text(content)
    with pytest.raises(ValueError, match=rf"bad\.tsv.*{sentence}"):
        read_qrels(folder, "bad", {"q1", "q2"})


@pytest.mark.parametrize(
    ("record", "passage", "negatives"),
    [
        ({"passage": "p"}, "p", []),
        ({"positive": "p"}, "p", []),
        ({"passage": "p", "title": "t"}, "t p", []),
        ({"passage": "p", "title": ""}, "p", []),
        ({"passage": "p", "title": None}, "p", []),
        ({"passage": "p", "negatives": None}, "p", []),
        ({"passage": "p", "negatives": ["m", " n "]}, "p", ["m", "n"]),
        ({"passage": "p", "negatives": [{"title": "t", "text": "n"}, {"text": "\ud800"}]}, "p", ["t n", "\ufffd"]),
    ],
)
def test_pair_is_query_passage_negatives(tmp_path: Path, record: Any, passage: str, negatives: list[str]) -> None:
    (tmp_path / "pairs.jsonl").write_text(jsonl({"query": " q", **record}))
    assert list(read_pairs(tmp_path / "pairs.jsonl")) == [{"query": "q", "passage": passage, "negatives": negatives}]


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"passage": "p"}, "expected the fields 'query' and 'passage'.*got 'passage'"),
        ({"query": "q", "text": "p"}, "expected the fields"),
        ({"query": "q", "passage": "p", "positive": "p"}, "expected the fields"),
        ({"query": ["q"], "passage": "p"}, "expected a string in 'query', got list"),
        ({"query": "q", "passage": "p", "negatives": "n"}, "expected a list in 'negatives', got str"),
        ({"query": "q", "passage": "p", "negatives": [1]}, "'negatives', got int"),
        ({"query": "q", "passage": "p", "negatives": [{"title": "t"}]}, "'negatives', got dict"),
        ({"query": "q", "passage": "p", "negatives": ["n"], "negative_1": "m"}, "or in 'negative_1', got both"),
    ],
)
def test_bad_pair_is_named_by_file_and_number(tmp_path: Path, record: Any, sentence: str) -> None:
    (tmp_path / "pairs.jsonl").write_text(jsonl({"query": "q", "passage": "p"}, record))
    with pytest.raises(ValueError, match=rf"pairs\.jsonl line 2: .*{sentence}"):
        list(read_pairs(tmp_path / "pairs.jsonl"))


def test_folder_gives_a_pair_for_each_relevant_known_document(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pairs = list(read_pairs(folder))
    assert pairs == [
        {"query": "one", "passage": "t x", "negatives": []},
        {"query": "two", "passage": "z", "negatives": []},
    ]
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        "1 of 3 train pairs left out, their documents are not in the corpus."
    ]


# What reads JSON, and what stands around a record there.
JSON_READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "corpus.jsonl": ("%s\n", lambda path: list(read_corpus(path.parent))),
    "blocks.jsonl": ("%s\n", lambda path: Corpus(path).scan(5)),
    "pairs.jsonl": ("%s\n", lambda path: list(read_pairs(path))),
    "training.jsonl": ("%s\n", lambda path: open_training_data([path])),
    "training.json": ("[%s]\n", lambda path: open_training_data([path])),
    "questions.jsonl": ("%s\n", read_questions),
    "questions.json": ("[%s]\n", read_questions),
}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [("[" * 100_000 + "]" * 100_000, "JSON nested too deeply"), ("1" * 5000, "a number with too many digits")],
)
@pytest.mark.parametrize("name", JSON_READERS)
def test_json_beyond_pythons_limits_is_named_in_plain_words(
    tmp_path: Path, name: str, value: str, sentence: str
) -> None:
    around, read = JSON_READERS[name]
    record = (
        f'{{"_id": "1", "text": "a", "query": "q", "passage": "p", "question": "q", "answers": ["x"], "x": {value}}}'
    )
    (tmp_path / name).write_text(around % record)
    with pytest.raises(
        ValueError, match=rf"{name}( line 1| entry 1)?: expected a JSON \S+( of questions)?, got {sentence}\.$"
    ):
        read(tmp_path / name)


def test_an_empty_id_is_called_empty() -> None:
    for bad in ("", "a\0", "\ud800"):
        with pytest.raises(ValueError, match="expected a non-empty id without NUL and lone surrogates in '_id', got "):
            id_of({"_id": bad}, "_id")
