"""DPR's files: Wikipedia passages, questions with their answers, and training rows."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from st_aggretriever.readers.rows import Example
from st_aggretriever.readers.rows import Passage as TrainingPassage
from st_aggretriever.readers.text import join_title, read_jsonl, read_lines, split_columns, text_of, why_not_json

PASSAGES_HEADER = ["id", "text", "title"]


class Passage(NamedTuple):
    """A line of ``psgs_w100.tsv``."""

    id: str
    text: str
    title: str

    @property
    def document(self) -> str:
        """Title and text, which a model encodes."""
        return join_title(self.title, self.text)


class Question(NamedTuple):
    """A question with the answers that count."""

    text: str
    answers: list[str]


def read_passages(path: str | Path) -> Iterator[Passage]:
    """Stream the passages of a tab-separated file with the header ``id text title`` (quoted fields, plain or gzip).

    Raises:
        FileNotFoundError: No such file.
        ValueError: Another header, other columns, or an id that came before; the sentence names file and line.
    """
    seen: set[str] = set()
    for number, line in read_lines(path):
        fields = _columns(f"{path} line {number}", line)
        if number == 1:
            if fields != PASSAGES_HEADER:
                raise ValueError(f"{path} line 1: expected the header id<tab>text<tab>title, got {line[:200]!r}.")
            continue
        if len(fields) != 3 or len(fields[0].split()) != 1 or fields[0] != fields[0].strip():
            raise ValueError(f"{path} line {number}: expected id<tab>text<tab>title, got {line[:200]!r}.")
        if fields[0] in seen:
            raise ValueError(f"{path} line {number}: id {fields[0]!r} occurs a second time.")
        seen.add(fields[0])
        text, title = (text_of({"field": field}, "field") for field in fields[1:])
        yield Passage(fields[0], text, title)


def read_questions(path: str | Path) -> dict[str, Question]:
    """Questions by their number in the file, from ``"0"``.

    DPR's ``question<tab>['answer', ...]``; a JSON list (EntityQuestions) or jsonl of objects with ``question`` and
    ``answers`` (or ``answer``: a string or a list). Told by content; plain or gzip.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Another form, no answer, or answers that aren't strings; the sentence names the place.
    """
    first = next(read_lines(path))[1].lstrip()
    if first.startswith("["):
        whole = "\n".join(line for _, line in read_lines(path))
        try:
            records = json.loads(whole)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected a JSON list of questions, got {why_not_json(error)}.") from None
        questions = [_at(f"{path} entry {number}", record) for number, record in enumerate(records)]
        if not questions:
            raise ValueError(f"{path} holds no question.")
    elif first.startswith("{"):
        questions = list(read_jsonl(path, _question))
    else:
        questions = [_from_columns(f"{path} line {number}", line) for number, line in read_lines(path)]
    return {str(number): question for number, question in enumerate(questions)}


def _at(where: str, record: Any) -> Question:
    try:
        return _question(record)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _question(record: Any) -> Question:
    answers = record.get("answers", record.get("answer")) if isinstance(record, dict) else None
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise ValueError("expected an object with 'question' and 'answers', at least one string.")
    return Question(text_of(record, "question").strip(), answers)


def _columns(where: str, line: str) -> list[str]:
    try:
        return split_columns(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _from_columns(where: str, line: str) -> Question:
    fields = _columns(where, line)
    try:
        question, answers = fields[0], ast.literal_eval(fields[1])
        return _question({"question": question, "answers": answers})
    except (ValueError, SyntaxError, IndexError, TypeError, RecursionError, MemoryError):
        raise ValueError(f"{where}: expected question<tab>['answer', ...], got {line[:200]!r}.") from None


def parse_training(record: dict[str, Any]) -> Example:
    """A row of DPR's training files: ``question``, ``positive_ctxs`` and ``hard_negative_ctxs``.

    The contexts' own scores are those of the search that found them, not of a teacher, and are left alone.

    Raises:
        ValueError: No question, or contexts of another form.
    """
    if "question" not in record:
        raise ValueError(f"expected a field 'question', got {', '.join(map(repr, record))}.")
    return Example(
        text_of(record, "question").strip(),
        _contexts(record, "positive_ctxs"),
        _contexts(record, "hard_negative_ctxs"),
    )


def _contexts(record: dict[str, Any], field: str) -> list[TrainingPassage]:
    found = record.get(field)
    if found is None:
        found = []
    if not isinstance(found, list) or not all(isinstance(context, dict) and "text" in context for context in found):
        raise ValueError(f"expected a list of objects with 'title' and 'text' in {field!r}.")
    return [
        TrainingPassage(
            join_title(text_of(context, "title"), text_of(context, "text")),
            id=text_of(context, "passage_id") or text_of(context, "psg_id"),
        )
        for context in found
    ]
