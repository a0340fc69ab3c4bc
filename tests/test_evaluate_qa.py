"""Open-domain QA: the answer rule on cases worked by hand, DPR's files, accuracy from end to end."""

import hashlib
import json
from pathlib import Path

import pytest

from st_aggretriever import build_aggretriever
from st_aggretriever.cli import main
from st_aggretriever.evaluation.qa import evaluate_qa, has_answer, hit_accuracy, tokens_of
from st_aggretriever.readers.dpr import read_passages, read_questions

pytest.importorskip("bm25s")
pytest.importorskip("pytrec_eval")


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("He lives in Paris now", ["paris"], True),  # whatever the case
        ("A Parisian street", ["Paris"], False),  # whole tokens only
        ("the 14 December", ["14 december 1972"], False),  # the whole answer
        ("on 14  December\t1972.", ["14 December 1972"], True),  # any blanks between
        ("14 long December 1972", ["14 December"], False),  # one after the other
        ("Caf\u00e9 au lait", ["cafe\u0301"], True),  # composed and decomposed are the same
        ("Cafe au lait", ["caf\u00e9"], False),  # but not without the accent
        ("in the U.S. Senate", ["U.S."], True),
        ("in the US Senate", ["U.S."], False),
        ("rock 'n' roll", ["rock n roll"], False),  # punctuation is a token
        ("it costs $5", ["$5"], True),
        ("nothing here", ["one", "nothing here"], True),  # one of several
        ("at the very end: Rome", ["rome"], True),
        ("Rome", ["rome is"], False),  # longer than the text
        ("\u6771\u4eac\u30bf\u30ef\u30fc", ["\u6771\u4eac"], False),  # a run of letters is one token
        ("anything", ["", " "], False),  # no token, no match
    ],
)
def test_token_rule_by_hand(text: str, answers: list[str], expected: bool) -> None:
    assert has_answer(text, answers) is expected


@pytest.mark.parametrize(
    ("text", "pattern", "expected"),
    [
        ("born in 1969 in Ohio", r"19\d\d", True),
        ("born in 1869", r"19\d\d", False),
        ("NEIL armstrong", r"Neil\s+Armstrong", True),
        ("Parisian", "Paris", True),  # a pattern needs no whole tokens
        ("first\nRome", "^rome", True),  # at the beginning of any line
    ],
)
def test_pattern_rule_by_hand(text: str, pattern: str, expected: bool) -> None:
    assert has_answer(text, [pattern], "regex") is expected


def test_tokens_of_marks_digits_and_control_characters() -> None:
    assert tokens_of("A1\u0301 b-c\u200b\u00a0d") == ["a1\u0301", "b", "-", "c", "d"]


def test_accuracy_by_hand() -> None:
    assert hit_accuracy([5, 6, 20, 21, 100, None], 100) == {"Hits@5": 1 / 6, "Hits@20": 3 / 6, "Hits@100": 5 / 6}
    assert list(hit_accuracy([1], 50)) == ["Hits@5", "Hits@20"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    passages = tmp_path / "psgs.tsv"
    rows = ['1\t"The ""crew"" sails the ship"\tSea', "2\tThe ship is old\tCrew", "3\tBread needs yeast\tBread"]
    filler = [f"{number}\tship number {number}\tShips" for number in range(4, 12)]
    passages.write_text("\n".join(["id\ttext\ttitle", *rows, *filler]) + "\n")
    questions = tmp_path / "test.csv"
    questions.write_text('who sails the ship\t[\'the "crew"\', \'nobody\']\nwhat does bread need\t["salt", "crew"]\n')
    return str(passages), str(questions)


def test_files_of_dpr_and_json(files: tuple[str, str], tmp_path: Path) -> None:
    passage = next(read_passages(files[0]))
    assert passage == ("1", 'The "crew" sails the ship', "Sea")
    assert passage.document == 'Sea The "crew" sails the ship'
    read = read_questions(files[1])
    assert read["0"] == ("who sails the ship", ['the "crew"', "nobody"])
    records = [{"question": "a", "answers": ["x"]}, {"question": "b", "answer": "y"}]
    (tmp_path / "q.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name in ("q.json", "q.jsonl"):
        assert read_questions(tmp_path / name) == {"0": ("a", ["x"]), "1": ("b", ["y"])}
    bad = {"[]": "holds no question",
           "a\tb\n": "line 1: expected question<tab>", "a\t[]\n": "line 1: expected question<tab>",
           "a\t[3]\n": "line 1: expected question<tab>", "a\t3\n": "line 1: expected question<tab>",
           "[{}]": "entry 0: expected an object", "[": "expected a JSON list",
           '{"question": "a"}\n': "line 1: expected an object"}  # fmt: skip
    for content, sentence in bad.items():
        (tmp_path / "bad").write_text(content)
        with pytest.raises(ValueError, match=sentence.replace("[", r"\[")):
            read_questions(tmp_path / "bad")
    long = "x" * 200_000  # more than the csv module takes of itself
    (tmp_path / "long").write_text(f"id\ttext\ttitle\n1\t{long}\ty\n")
    assert next(read_passages(tmp_path / "long")).text == long
    (tmp_path / "long").write_text(f"{long}\t['a']\n")
    assert read_questions(tmp_path / "long")["0"].text == long
    for name, read_all in (("line 2", read_passages), ("line 1", read_questions)):
        (tmp_path / "bad").write_bytes(b"id\ttext\ttitle\n1\ta\rb\tc\n" if name == "line 2" else b"a\rb\t['c']\n")
        with pytest.raises(ValueError, match=f"{name}: expected tab-separated columns on one line"):
            list(read_all(tmp_path / "bad"))
    for content, sentence in (("a\tb\tc\n", "expected the header"), ("id\ttext\ttitle\n1\tx\n", "line 2: expected id"),
                              ("id\ttext\ttitle\n1 \tx\ty\n", "line 2: expected id"),
                              ("id\ttext\ttitle\n1\tx\ty\n1\tx\ty\n", "line 3: id '1' occurs")):  # fmt: skip
        (tmp_path / "bad").write_text(content)
        with pytest.raises(ValueError, match=sentence):
            list(read_passages(tmp_path / "bad"))


def test_bm25_finds_answers_in_texts_not_in_titles(files: tuple[str, str], tmp_path: Path) -> None:
    result = evaluate_qa(None, *files, top_k=20, run=tmp_path / "run")
    # Question 0: passage 1 is first. Question 1: passage 3 is the only hit, without "salt"; passage 1, with the "crew",
    # has no word of the question, and the one in the title of 2 wouldn't count.
    places = [line.split()[2] for line in (tmp_path / "run").read_text().splitlines() if line.startswith("1 ")]
    assert places == ["3"]
    assert result["figures"] == {"Hits@5": 0.5, "Hits@20": 0.5}
    assert result["counts"]["documents"] == 11
    assert sorted(result["checksums"]) == ["psgs.tsv", "test.csv"]


def test_figures_that_cannot_be_written_leave_no_run(
    files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError("no space left")

    monkeypatch.setattr("json.dumps", full)
    with pytest.raises(OSError, match="no space left"):
        evaluate_qa(None, *files, run=tmp_path / "run", output=tmp_path / "out.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["psgs.tsv", "test.csv"]


def test_checksums_of_files_of_one_name_stand_side_by_side(files: tuple[str, str], tmp_path: Path) -> None:
    expected = {}
    for folder, file in zip(("passages", "questions"), files, strict=True):
        (tmp_path / folder).mkdir()
        content = Path(file).rename(tmp_path / folder / "test.tsv").read_bytes()
        expected[f"{folder}/test.tsv"] = hashlib.sha256(content).hexdigest()
    assert evaluate_qa(None, *(tmp_path / name for name in expected))["checksums"] == expected


def test_command_with_a_model(
    files: tuple[str, str], tiny_bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_aggretriever(tiny_bert, lexical_dim=8, cls_dim=4).save_pretrained(str(tmp_path / "model"))
    base = ["evaluate", "qa", "--passages", files[0], "--questions", files[1], "--device", "cpu"]
    output = tmp_path / "out.json"
    assert main([*base, "--model", str(tmp_path / "model"), "--output", str(output), "--match", "regex"]) == 0
    assert "Hits@20" in capsys.readouterr().out
    result = json.loads(output.read_text())
    assert result["figures"]["Hits@20"] == 1.0  # all eleven passages are within 20
    assert result["counts"]["truncated_queries"] == 0
    for more, sentence in (
        (["--top-k", "3"], "top_k must be at least 5"),
        (["--output", str(output)], "out.json exists"),
    ):
        assert main([*base, "--model", "bm25", *more]) == 2
        assert sentence in capsys.readouterr().err
    Path(files[1]).write_text("q\t['(']\n")
    assert main([*base, "--model", "bm25", "--match", "regex"]) == 2
    assert "is no regular expression" in capsys.readouterr().err
