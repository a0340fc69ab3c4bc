"""Explanations as lines for a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

from st_aggretriever.explain.scores import Match, ScoreExplanation
from st_aggretriever.explain.texts import Term, TextExplanation

EXCERPT = 100  # characters of a text
COLUMN = 34  # of a term and its word


def printable(text: str) -> str:
    """Blanks joined to one, and control and bidirectional characters, which could rewrite the screen, replaced."""
    joined = " ".join(text.split())
    return "".join("\ufffd" if unicodedata.category(character) in ("Cc", "Cf") else character for character in joined)


def excerpt(text: str, limit: int = EXCERPT) -> str:
    """The text, or its beginning."""
    text = printable(text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def term_text(term: Term | None) -> str:
    """A term, the word it came from where that is another, and the token where that is only a part of the word.

    >>> term_text(Term(3, "bread", 7, 1.0, 1.0, 1, Word("loaf", 0, 4), "loaf", True))
    'bread < loaf'
    """
    if term is None:
        return "-"
    word = term.word.text
    if term.name.casefold() == word.casefold():
        return printable(term.name)
    part = "" if term.token.casefold() in (word.casefold(), term.name.casefold()) else f" ({term.token})"
    return printable(f"{term.name} < {word}{part}")


def parts_text(explanation: ScoreExplanation) -> str:
    """``score = [CLS] ... + exact ... + fuzzy ... + opposed ...``, the share of [CLS] with it."""
    named = {name: value for name, value in explanation.parts.items() if name not in ("cls", "changed") or value}
    shown = [f"{'[CLS]' if name == 'cls' else name} {value:+.4f}" for name, value in named.items()]
    return f"{explanation.score:.4f} = {', '.join(shown)}"


def format_scores(explanations: Sequence[ScoreExplanation], ids: Sequence[str], *, terms: int = 10) -> Iterator[str]:
    """The query, and for each document the parts of its score and the ``terms`` dimensions that count most."""
    if not explanations:
        return
    query = explanations[0].query
    yield f"query: {printable(query.text)}"
    yield from _read(query)
    for place, (explanation, key) in enumerate(zip(explanations, ids, strict=True), start=1):
        yield ""
        yield f"{place}. {printable(key)}: {excerpt(explanation.document.text)}"
        yield from _read(explanation.document)
        if query.lexical.start or len(query.vector) > query.lexical.stop:
            yield f"   the [CLS] part, {explanation.cls_share:.1%} of the score, is not explained"
        yield f"   score {parts_text(explanation)}"
        yield from changed_lines(explanation.document)
        yield from match_lines(explanation.top(terms))


def match_lines(matches: Sequence[Match]) -> Iterator[str]:
    """A table of dimensions."""
    if not matches:
        yield "   no term of the query's meets one of the document's"
        return
    yield f"   {'adds':>9}  {'how':8}{pad('query term < word', COLUMN)}{pad('document term < word', COLUMN)}slice"
    for match in matches:
        yield (
            f"   {match.contribution:+9.4f}  {match.kind:8}{pad(term_text(match.query), COLUMN)}"
            f"{pad(term_text(match.document), COLUMN)}{match.slice}"
        )


def format_texts(explanations: Sequence[TextExplanation], ids: Sequence[str], *, terms: int = 10) -> Iterator[str]:
    """Each text's largest dimensions."""
    for number, (explanation, key) in enumerate(zip(explanations, ids, strict=True)):
        if number:
            yield ""
        yield f"{printable(key)}: {excerpt(explanation.text)}"
        yield from _read(explanation)
        if explanation.unexplained:
            yield f"   the [CLS] part, {explanation.unexplained:.1%} of the vector's squared length, is not explained"
        yield from changed_lines(explanation)
        yield f"   {'value':>9}  {'weight':>8}  {pad('term < word', COLUMN)}{'slice':>6}  half"
        for term in explanation.top(terms):
            half = "+" if term.sign > 0 else "-"
            yield (
                f"   {term.value:+9.4f}  {term.weight:8.4f}  {pad(term_text(term), COLUMN)}{term.slice:6}  {half}"
                f"{'  expansion' if term.expansion else ''}"
            )


def changed_lines(explanation: TextExplanation) -> Iterator[str]:
    """Where a stored vector isn't what its text gives."""
    count = int(explanation.changed.sum())
    if count:
        lexical = np.flatnonzero(explanation.changed[explanation.lexical])
        named = ", ".join(str(slice) for slice in lexical[:5]) + (", ..." if len(lexical) > 5 else "")
        yield (
            f"   {count} of {len(explanation.vector)} stored numbers are not what the text gives now"
            + (f"; {len(lexical)} of them lexical, slices {named}" if len(lexical) else "")
        )


def _read(explanation: TextExplanation) -> Iterator[str]:
    rest = explanation.text[explanation.read :].strip()
    if rest and explanation.read:
        yield f"   read as far as {explanation.read} of {len(explanation.text)} characters, the model's length"


def pad(text: str, width: int) -> str:
    """``text`` cut or filled to as many columns of a terminal, one of them blank.

    >>> pad("bread", 4), pad("日本", 6)
    ('b.. ', '日本  ')
    """
    if _columns(text) > width - 1:
        while _columns(text) > width - 3:
            text = text[:-1]
        text += ".."
    return text + " " * (width - _columns(text))


def _columns(text: str) -> int:
    return sum(
        0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )
