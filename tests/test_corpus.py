"""Collections by blocks: every form gives the same rows, and what is bad in a file is said."""

import gzip
import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import ROWS, Letters, write_jsonl

from st_aggretriever.bulk import encode_to_disk
from st_aggretriever.explain.documents import read_documents
from st_aggretriever.readers import corpus as corpus_module
from st_aggretriever.readers.beir import read_corpus, read_queries
from st_aggretriever.readers.corpus import Corpus
from st_aggretriever.readers.msmarco import read_tsv
from st_aggretriever.readers.store import BadRows, Passages


def read_all(corpus: Corpus, block_size: int) -> list[tuple[str, str]]:
    count, _ = corpus.scan(block_size)
    return [row for number in range(-(-count // block_size)) for row in corpus.read(number).rows]


def make_corpora(folder: Path) -> dict[str, Path]:
    """The same rows in every form."""
    import pyarrow
    import pyarrow.parquet

    plain = write_jsonl(folder / "plain.jsonl")
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (folder / "msmarco.tsv").write_text("".join(f"{key}\t{text}\n" for key, text in ROWS))
    headed = "id\ttext\n" + "".join(f"{key}\t{text}\n" for key, text in ROWS)
    (folder / "headed.tsv").write_text(headed)
    (folder / "headed.tsv.gz").write_bytes(gzip.compress(("\ufeff" + headed.replace("\n", "\r\n")).encode()))
    (folder / "dpr.tsv").write_text("id\ttext\ttitle\n" + "".join(f'{key}\t"{text}"\t\n' for key, text in ROWS))
    table = pyarrow.table({"other": [1] * len(ROWS), "id": [key for key, _ in ROWS], "contents": [t for _, t in ROWS]})
    pyarrow.parquet.write_table(table, folder / "table.parquet", row_group_size=5)
    parts = folder / "parts"
    parts.mkdir()
    write_jsonl(parts / "a.jsonl", ROWS[:9])
    (parts / "b.jsonl").write_text("")
    (parts / "c.tsv.gz").write_bytes(gzip.compress("".join(f"{k}\t{t}\n" for k, t in ROWS[9:]).encode()))
    (parts / "README").write_text("no texts")
    beir = folder / "beir"
    beir.mkdir()
    lines = [json.dumps({"_id": key, "title": text[0], "text": text[1:] or None}) + "\n" for key, text in ROWS]
    (beir / "corpus.jsonl").write_text("".join(lines))
    return {path.name: path for path in folder.iterdir()}


LINES = {
    **{f"{key}-{text}.jsonl": f'{{"{key}": "a", "{text}": "x"}}\n{{"{key}": 2, "title": "y"}}\n'
       for key in ("_id", "id", "docid", "pid") for text in ("text", "contents", "passage")},
    "several.jsonl": '{"pid": "n", "docid": "n", "id": "a", "passage": "n", "text": "x"}\n{"docid": 2, "text": "y"}\n',
    "plain.tsv": "a\tx\n2\ty\n",
    "headed.tsv": "id\ttext\na\tx\n2\ty\n",
    "dpr.tsv": 'id\ttext\ttitle\na\t"x"\t\n2\t\ty\n',
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_all_readers_find_the_same_ids_and_texts(tmp_path: Path, name: str) -> None:
    """Who encodes a file can mine with it, evaluate on it and have it explained."""
    path = tmp_path / name
    path.write_text(LINES[name])
    rows = [("a", "x"), ("2", "y")]
    assert read_all(Corpus(path), 10) == rows
    passages = Passages(path, BadRows(0, print))
    assert list(passages.stream()) == rows
    assert [passages.text(place) for place in passages.find(["2", "a", "id"]) if place >= 0] == ["y", "x"]
    assert list(read_documents(path)) == rows
    if name.endswith("jsonl"):
        for part in ("corpus", "queries"):
            (tmp_path / f"{part}.jsonl").write_text(LINES[name].replace("title", "text"))
        assert list(read_corpus(tmp_path)) == list(read_queries(tmp_path).items()) == rows
    else:
        assert list(read_tsv(path)) == rows


@pytest.mark.parametrize("block_size", [1, 4, 23, 100])
def test_every_form_gives_the_same_rows_in_blocks(
    tmp_path: Path, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_PARQUET_ROWS", 2)  # less than a row group
    for name, place in make_corpora(tmp_path).items():
        expected = (
            [(key, " ".join(filter(None, (text[0], text[1:])))) for key, text in ROWS] if name == "beir" else ROWS
        )
        corpus = Corpus(place)
        assert read_all(corpus, block_size) == expected, name
        numbers = range(-(-len(ROWS) // block_size))
        for number in [*reversed(numbers), 0]:  # in any order
            assert corpus.read(number).rows == expected[number * block_size : (number + 1) * block_size], name


def test_looking_for_repeated_ids_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    """The scan's memory is 8 bytes a text."""
    corpus = Corpus(write_jsonl(tmp_path / "c.jsonl"))
    keys = np.random.default_rng(0).permutation(2**20).astype(np.uint64)
    tracemalloc.start()
    try:
        corpus._refuse_repeated(keys, lambda number: True)
        assert tracemalloc.get_traced_memory()[1] < keys.nbytes / 8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("piece", [1, 2, 3, 100])
def test_a_repeated_id_is_found_wherever_its_hash_falls(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_PIECE", piece)
    for key, _ in ROWS:
        path = write_jsonl(tmp_path / "c.jsonl", [*ROWS, (key, "again")])
        with pytest.raises(ValueError, match=f"id '{key}' occurs a second time"):
            Corpus(path).scan(4)


def test_a_field_may_be_longer_than_csv_allows(tmp_path: Path) -> None:
    path = tmp_path / "passages.tsv"
    path.write_text(f"id\ttext\ttitle\n1\t{'a' * 150_000}\tb\n")
    assert read_all(Corpus(path), 4) == [("1", "b " + "a" * 150_000)]


def test_patterns_and_several_places_are_read_by_name(tmp_path: Path) -> None:
    for name, part in (("2", ROWS[5:9]), ("1", ROWS[:5]), ("3", ROWS[9:])):
        write_jsonl(tmp_path / f"part-{name}.jsonl", part)
    assert read_all(Corpus(str(tmp_path / "part-*.jsonl")), 4) == ROWS
    assert read_all(Corpus(tmp_path / "part-2.jsonl", tmp_path / "part-1.jsonl"), 4) == ROWS[5:9] + ROWS[:5]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"_id": "1", "text": "a"}\n{"_id": "2"}\n', "line 2: expected a field 'text'"),
        ('{"_id": "1", "text": "a"}\n{"text": \n', "line 2: expected a JSON object, got malformed JSON"),
        ('{"_id": "1", "text": "a"}\n{"_id": "1", "text": "b"}\n', "id '1' occurs a second time"),
        ("1\ta\n2 b\n", "line 2: expected id<tab>text, got '2 b'"),
        ("id\ttext\ttitle\n1\ta\n", "line 2: expected id<tab>text<tab>title"),
        ("id\ttext\ttitle\n1\ta\rb\tc\n", "line 2: expected tab-separated columns"),
        ("no form\n", "expected jsonl, tab-separated lines or Parquet"),
        ("", "holds no text"),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_encoded(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "corpus"
    path.write_text(content)
    model = Letters()
    with pytest.raises(ValueError, match=sentence):
        encode_to_disk(model, Corpus(path), tmp_path / "out")
    assert model.batches == []
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", ["text", "title"])
@pytest.mark.parametrize("value", [["x"], {"x": 1}, 1.5, True])
def test_a_text_that_is_no_string_is_a_bad_row(tmp_path: Path, name: str, value: Any, skip: bool) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"_id": "1", "text": "a"}) + "\n" + json.dumps({"_id": "2", "text": "b", name: value}))
    corpus = Corpus(path, skip_bad=skip)
    if not skip:
        with pytest.raises(ValueError, match=rf"c\.jsonl line 2: expected a string in '{name}', got "):
            corpus.scan(5)
        return
    assert corpus.scan(5)[0] == 2
    assert corpus.read(0).rows == [("1", "a")]
    assert f"line 2: expected a string in '{name}'" in corpus.read(0).bad[0]


def test_empty_texts_are_taken_as_evaluate_takes_them_but_not_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from st_aggretriever.readers.beir import read_corpus

    path = tmp_path / "corpus.jsonl"
    rows = [{"text": "a"}, {"text": None}, {"text": None, "title": "t"}, {"text": " "}, {"text": "", "title": None}]
    path.write_text("".join(json.dumps({"_id": str(n), **row}) + "\n" for n, row in enumerate(rows)))
    assert read_all(Corpus(path), 3) == list(read_corpus(tmp_path))
    assert [record.getMessage() for record in caplog.records] == [
        f"empty texts (null or blanks), encoded as such: 3, the first in {path} line 2"
    ]


def test_a_file_that_is_changed_after_the_scan_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a.tsv", tmp_path / "b.tsv"]
    for path in paths:
        path.write_text(f"{path.stem}1\tone\n{path.stem}2\ttwo\n")
    corpus = Corpus(*paths)
    corpus.scan(2)
    paths[1].write_text("b1\tsix\nb2\tten\n")  # as long as before
    os.utime(paths[1], ns=(1, 1))
    assert corpus.read(0).rows == [("a1", "one"), ("a2", "two")]
    with pytest.raises(ValueError, match=r"b\.tsv was changed while it was being read\. Run the same command again"):
        corpus.read(1)
    copied = pickle.loads(pickle.dumps(corpus))  # as a worker on another machine has it, whose file is a copy
    assert copied.read(1).rows == [("b1", "six"), ("b2", "ten")]
    paths[1].write_text("b1\tsix\n")
    with pytest.raises(ValueError, match=r"b\.tsv was changed"):
        copied.read(1)
    paths[1].write_text("b1\tsix\nb2\tten\n")
    corpus.scan(2)
    assert corpus.read(1).rows == [("b1", "six"), ("b2", "ten")]


def test_ids_that_no_run_can_hold_are_said_before_the_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"_id": key, "text": "x"}) + "\n" for key in ("a", "b c", "d", "e\tf")))
    Corpus(path).scan(10)
    assert f"search can't write to a run: 2, first in {path} line 2" in caplog.text


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(b'{"_id": "1", "text": "a"}\n' * 999)[:-20])
    with pytest.raises(ValueError, match=r"corpus\.jsonl\.gz line \d+: broken gzip data"):
        Corpus(tmp_path / "corpus.jsonl.gz").scan(5)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.jsonl").mkdir()  # a folder where a file should be
    with pytest.raises(IsADirectoryError, match=r"a\.jsonl can't be read \(Is a directory\)"):
        Corpus(tmp_path / "parts")
    (tmp_path / "empty").mkdir()
    for place, sentence in (("none", "none does not exist"), ("no-*", "matches no file"), ("empty", "nor any file of")):
        with pytest.raises(FileNotFoundError, match=sentence):
            Corpus(tmp_path / place)
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + b"\0" * 50)
    with pytest.raises(ValueError, match=r"x\.parquet is no Parquet file"):
        Corpus(tmp_path / "x.parquet").scan(5)


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "table.parquet"
    table = pyarrow.table({"id": [str(n) for n in range(500)], "text": ["a ship"] * 500})
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    for start in (4, 40):  # the first page's header, its content
        path.write_bytes(whole[:start] + b"\xff" * 24 + whole[start + 24 :])
        with pytest.raises(ValueError, match=r"table\.parquet is no Parquet file that can be read: "):
            Corpus(path).scan(5)


def test_a_header_is_no_query_either_and_counts_as_a_line(tmp_path: Path) -> None:
    path = tmp_path / "queries.tsv"
    path.write_text("id\ttext\n1\twho sails\n")
    assert read_all(Corpus(path, side="query"), 4) == [("1", "who sails")]
    path.write_text("id\ttext\n1\twho sails\nid text\n")
    with pytest.raises(ValueError, match="line 3: expected id<tab>text"):
        Corpus(path, side="query").scan(4)
