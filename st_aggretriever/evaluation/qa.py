"""Open-domain question answering: the share of questions with an answer in the first 5, 20, 100 passages."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import regex

from st_aggretriever.atomic import check_outputs
from st_aggretriever.evaluation.beir import check_before, find_hits
from st_aggretriever.evaluation.bm25 import find_hits_bm25
from st_aggretriever.evaluation.metrics import rank
from st_aggretriever.evaluation.result import make_result, write_result
from st_aggretriever.readers.dpr import Question, read_passages, read_questions
from st_aggretriever.readers.text import checksum, short_names
from st_aggretriever.search.retrieve import rankings_of

CUTS = (5, 20, 100)
# Words of letters, digits and marks, or any other single character that is neither a separator nor a control character:
# the tokenizer that DrQA and DPR match answers with.
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]", regex.UNICODE)
_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE


def evaluate_qa(
    model: Any,
    passages: str | Path,
    questions: str | Path,
    *,
    match: str = "string",
    top_k: int = 100,
    batch_size: int = 32,
    block_size: int = 50_000,
    run: str | Path | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    backend: str = "auto",
    model_name: str | None = None,
) -> dict[str, Any]:
    """Search the passages for every question and look for its answers in what was found.

    Args:
        model: As for :func:`st_aggretriever.evaluation.beir.evaluate_beir`; None is BM25.
        passages: DPR's Wikipedia passages, ``psgs_w100.tsv``; title and text are encoded, the text alone is matched.
        questions: See :func:`st_aggretriever.readers.dpr.read_questions`.
        match: ``"string"``, or ``"regex"`` for CuratedTREC, whose answers are patterns.
        top_k: Depth of the run; cuts beyond it are left out.
        batch_size, block_size, run, output, overwrite, backend, model_name: As for ``evaluate_beir``.

    Returns:
        ``figures`` (``Hits@5``, ``Hits@20``, ``Hits@100``), counts, rules and where they come from.

    Raises:
        ValueError: An unknown match, top_k below 5, a bad line, an answer that is no regular expression.
        OSError: A file is missing.
    """
    if match not in ("string", "regex"):
        raise ValueError(f"evaluate_qa: match must be string or regex, got {match!r}.")
    if top_k < CUTS[0]:
        raise ValueError(f"evaluate_qa: top_k must be at least {CUTS[0]}, got {top_k}.")
    if model is None:
        check_outputs(run, output, overwrite)
    else:
        check_before(model, run, output, overwrite, batch_size=batch_size, block_size=block_size)
    asked = read_questions(questions)
    matchers = {key: _Matcher(question, match) for key, question in asked.items()}
    total = sum(1 for _ in read_passages(passages))  # and a bad line is found before the work
    texts = {key: question.text for key, question in asked.items()}
    if model is None:
        hits, how = find_hits_bm25(texts, _documents(passages), top_k)
    else:
        options: dict[str, Any] = {"batch_size": batch_size, "block_size": block_size, "backend": backend}
        hits, how = find_hits(model, texts, (_documents(passages), total), top_k, model_name=model_name, **options)
    rankings = {query: rank(found, top_k) for query, found in rankings_of(list(texts), hits).items()}
    places = first_answers(rankings, matchers, passages)
    result = make_result(
        how,
        benchmark="qa",
        data=passages,
        split=Path(questions).name,
        checksums={name: checksum(path) for path, name in short_names((passages, questions)).items()},
        figures=hit_accuracy(list(places.values()), top_k),
        counts={
            "queries": len(asked),
            "documents": total,
            "answers_without_token": sum(matcher.empty for matcher in matchers.values()),
        },
        rules=_rules(match),
        top_k=top_k,
    )
    write_result(result, rankings, run, output)
    return result


def has_answer(text: str, answers: Sequence[str], match: str = "string") -> bool:
    """Whether a text holds one of the answers, by the rule of DrQA and DPR.

    ``"string"``: the answer's tokens stand one after the other in the text's, both in Unicode's NFD form and lower
    case. ``"regex"``: the answer is found as a pattern, whatever the case.

    >>> has_answer("The U.S. capital", ["u.s"]), has_answer("Parisian", ["Paris"])
    (True, False)
    """
    return _Matcher(Question("", list(answers)), match)(text)


def tokens_of(text: str) -> list[str]:
    """Tokens as answers are matched.

    >>> tokens_of("Beyoncé's, 1,000!") == ["beyonce" + chr(0x301), "'", "s", ",", "1", ",", "000", "!"]
    True
    """
    return [token.lower() for token in _TOKEN.findall(unicodedata.normalize("NFD", text))]


class _Matcher:
    """Finds the answers of one question in texts; ``empty`` counts answers without a token, which match nothing."""

    def __init__(self, question: Question, match: str) -> None:
        self.patterns: list[Any] = []
        self.answers: list[list[str]] = []
        self.empty = 0
        for answer in question.answers:
            tokens = tokens_of(answer)
            if not tokens:
                self.empty += 1
            elif match == "regex":
                self.patterns.append(_compiled(answer))
            else:
                self.answers.append(tokens)

    def __call__(self, text: str) -> bool:
        if self.patterns:
            text = unicodedata.normalize("NFD", text)
            return any(pattern.search(text) for pattern in self.patterns)
        tokens = tokens_of(text)
        return any(
            tokens[start : start + len(answer)] == answer
            for answer in self.answers
            for start in range(len(tokens) - len(answer) + 1)
        )


def _compiled(answer: str) -> Any:
    try:
        return regex.compile(unicodedata.normalize("NFD", answer), _FLAGS)
    except regex.error as error:
        raise ValueError(f"evaluate_qa: the answer {answer!r} is no regular expression ({error}).") from None


def first_answers(
    rankings: Mapping[str, Mapping[str, float]], matchers: Mapping[str, Any], passages: str | Path
) -> dict[str, int | None]:
    """Each question's first place, from 1, that holds an answer; None without one. Reads the passages once more."""
    wanted = {key for ranking in rankings.values() for key in ranking}
    texts = {passage.id: passage.text for passage in read_passages(passages) if passage.id in wanted}
    return {
        query: next((place for place, key in enumerate(ranking, start=1) if matchers[query](texts[key])), None)
        for query, ranking in rankings.items()
    }


def hit_accuracy(places: Sequence[int | None], top_k: int = 100) -> dict[str, float]:
    """Share of questions whose first answer stands within each cut.

    >>> hit_accuracy([1, 6, None, 21])
    {'Hits@5': 0.25, 'Hits@20': 0.5, 'Hits@100': 0.75}
    """
    return {
        f"Hits@{cut}": sum(place is not None and place <= cut for place in places) / len(places)
        for cut in CUTS
        if cut <= top_k
    }


def _documents(passages: str | Path) -> Iterator[tuple[str, str]]:
    for passage in read_passages(passages):
        yield passage.id, passage.document


def _rules(match: str) -> list[str]:
    how = (
        "an answer is matched as a sequence of tokens, Unicode NFD, lower case (DrQA's and DPR's rule)"
        if match == "string"
        else "an answer is matched as a regular expression, whatever the case (the rule for CuratedTREC)"
    )
    return [
        how + ", in the passage's text without its title",
        "an answer without any token matches nothing (DPR's code lets it match everything)",
        "equal scores are ordered by passage id, descending",
    ]
