"""Explanations as one HTML page, complete in itself: no script, no request, every text escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from st_aggretriever.explain.lost import REASONS, LostQueries, LostQuery, shared_text
from st_aggretriever.explain.scores import PARTS, Match, ScoreExplanation
from st_aggretriever.explain.table import excerpt
from st_aggretriever.explain.texts import Term, TextExplanation

NAMES = {
    "cls": "[CLS] part",
    "exact": "exact",
    "fuzzy": "fuzzy",
    "opposed": "opposed",
    "changed": "changed since stored",
}
MEANINGS = {
    "cls": "the projection of the whole text to a few dimensions; it stands for no words and isn't explained",
    "exact": "the same term stands behind a dimension in both texts",
    "fuzzy": "two terms that share half a slice of the vocabulary met",
    "opposed": "two terms from the two halves of a slice met: a misalignment, which lowers the score",
    "changed": "a stored number isn't what the text gives now, so its term isn't named",
}
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # which HTML doesn't allow
LEVELS = 5  # shades of a word
LINKED = 10  # matches whose words light up with their row
SIDES = ("query", "document")
OPEN = 3  # passages whose tables are open at first


def scores_page(
    explanations: Sequence[ScoreExplanation], ids: Sequence[str], *, model_name: str, terms: int = 10
) -> str:
    """A page for one query and its documents.

    Args:
        explanations: Of one query with N documents, in the order shown.
        ids: N ids.
        model_name: A folder's last part is shown.
        terms: Rows of a table of matches.

    Returns:
        HTML in UTF-8.

    Raises:
        ValueError: No documents.
    """
    if not explanations:
        raise ValueError("explain: a page needs at least one document.")
    query = explanations[0].query
    scale = _Scale(explanations)
    passages = "passage" if len(explanations) == 1 else "passages"
    body = [
        _header(query, model_name, f"{len(explanations)} {passages}", _present(explanations)),
        '<main id="passages">',
        _overview(explanations, ids, scale),
        *(
            _article(explanation, f"{place}. {key}", f"p{place}", scale, terms=terms, is_open=place <= OPEN)
            for place, (explanation, key) in enumerate(zip(explanations, ids, strict=True), start=1)
        ),
        "</main>",
    ]
    return _document(f"Explained: {excerpt(query.text, 60)}", body)


def lost_page(found: LostQueries, *, model_name: str, shown: int = 10, terms: int = 10) -> str:
    """A page for the queries that an evaluation lost: the right document of each beside the wrong one, and the gap."""
    listed = found.queries[:shown]
    pairs = [explanation for query in listed for explanation in (query.right, query.wrong)]
    rows = "".join(
        f"<tr><th scope=row>{_badge(reason)}</th><td class=number>{count}</td><td>{_escape(REASONS[reason])}</td></tr>"
        for reason, count in found.reasons.items()
    )
    notes = []
    if found.unexplained:
        notes.append(f"{found.unexplained} more have no document of a lower grade before a relevant one in the run.")
    if found.other_model:
        notes.append(
            f"{found.other_model} have scores in the run that this model doesn't give: another model or length made it."
        )
    lost = len(found.queries) + found.unexplained
    head = (
        "<header><a class=skip href=#passages>Skip to the queries</a>"
        f"<p class=kicker>{_model(model_name)}</p><h1>{lost} of {found.judged} queries lost against "
        f"{_isolated(Path(found.against).name)}</h1>"
        f"<p class=lead>{_escape(found.metric)} {found.ours:.4f} against {found.other:.4f}. For each query the "
        "relevant passage that the other run found best stands beside the passage that took its place, and the gap "
        f"between their scores is split into its parts.</p>{''.join(f'<p class=note>{note}</p>' for note in notes)}"
        f"{_legend(_present(pairs))}</header>"
    )
    summary = (
        "<div class=scroll><table><caption>Which part of the score made most of the gap</caption><thead><tr>"
        "<th scope=col>part</th><th scope=col class=number>queries</th><th scope=col>what that means</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )
    sections = (_lost_section(query, number, found, terms) for number, query in enumerate(listed, start=1))
    return _document(
        f"{lost} queries lost against {Path(found.against).name}",
        [head, "<main id=passages>", summary if rows else "", *sections, "</main>"],
    )


class _Scale:
    """One scale for all bars and shades of a page, so that they can be compared."""

    def __init__(self, explanations: Sequence[ScoreExplanation]) -> None:
        parts = [list(explanation.parts.values()) for explanation in explanations]
        self.parts = (
            min((sum(value for value in row if value < 0) for row in parts), default=0.0),
            max((sum(value for value in row if value > 0) for row in parts), default=0.0),
        )
        self.dimensions = (
            min((explanation.contributions.min(initial=0) for explanation in explanations), default=0.0),
            max((explanation.contributions.max(initial=0) for explanation in explanations), default=0.0),
        )
        words = [np.abs(explanation.words(side)).max(initial=0) for explanation in explanations for side in SIDES]
        self.word = float(max(words, default=0.0))

    def shade(self, value: float) -> str:
        """The class of a word that adds ``value``; none for less than a 25th of the most."""
        share = abs(value) / self.word if self.word else 0.0
        return f"{'p' if value > 0 else 'n'}{min(LEVELS, 1 + int(share * LEVELS))}" if share >= 0.04 else ""


def _bar(values: Mapping[str, float], scale: tuple[float, float]) -> str:
    """Positive parts one after another to the right of the axis, negative ones to its left."""
    least, most = scale
    width = (most - least) or 1.0
    right = left = zero = -least / width * 100
    drawn = []
    for part, value in values.items():
        size = abs(value) / width * 100
        left -= size if value < 0 else 0
        if size:
            start = right if value > 0 else left
            drawn.append(f'<rect class={part} x="{start:.2f}" width="{size:.2f}" height="10"/>')
        right += size if value > 0 else 0
    return (
        '<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'{"".join(drawn)}<line class=axis x1="{zero:.2f}" x2="{zero:.2f}" y1="-2" y2="12"/></svg>'
    )


def _document(title: str, body: Iterable[str]) -> str:
    style = (resources.files("st_aggretriever") / "explain" / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # Whatever a text holds, nothing runs and nothing is fetched.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="generator" content="st-aggretriever explain">\n'
        f"<title>{_escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<footer>{_how_to_read()}</footer>\n</body>\n</html>\n"
    )


def _header(query: TextExplanation, model_name: str, what: str, parts: Sequence[str]) -> str:
    lexical = query.lexical.stop - query.lexical.start
    rest = len(query.vector) - lexical
    unexplained = (
        f" The [CLS] part of {rest} dimensions isn't explained; its share stands at the head of each passage."
        if rest
        else ""
    )
    return (
        "<header><a class=skip href=#passages>Skip to the passages</a>"
        f"<p class=kicker>{_model(model_name)} · {what}</p>"
        f'<h1 lang="" dir=auto>{_escape(query.text) or "(empty query)"}</h1>'
        "<p class=lead>A score is the dot product of two vectors, so it is a sum over their dimensions. Behind each of "
        f"the {lexical:,} lexical ones stands a term, fired by a word of the text.{unexplained} A word is shaded by "
        "what its terms add to the score.</p>"
        f"{_legend(parts)}</header>"
    )


def _model(name: str) -> str:
    return f"model {_isolated(Path(name).name if Path(name).exists() else name)}"


def _legend(parts: Sequence[str]) -> str:
    shades = (
        '<li><mark class="p2">word</mark><mark class="p5">word</mark> adds to the score</li>'
        '<li><mark class="n3">word</mark> takes from it</li>'
    )
    items = "".join(f'<li><span class="swatch {part}"></span>{NAMES[part]}: {MEANINGS[part]}</li>' for part in parts)
    return f'<ul class=legend aria-label="Legend">{shades}{items}</ul>'


def _present(explanations: Sequence[ScoreExplanation]) -> list[str]:
    """The parts that any of the scores has."""
    return [part for part in PARTS if any(explanation.parts[part] for explanation in explanations)]


def _overview(explanations: Sequence[ScoreExplanation], ids: Sequence[str], scale: _Scale) -> str:
    parts = _present(explanations)
    heads = "".join(f"<th scope=col class=number>{NAMES[part]}</th>" for part in parts)
    rows = []
    for place, (explanation, key) in enumerate(zip(explanations, ids, strict=True), start=1):
        shown = {part: explanation.parts[part] for part in parts}
        cells = "".join(f"<td class=number>{_signed(value)}</td>" for value in shown.values())
        rows.append(
            f'<tr><td class=number>{place}</td><th scope=row><a href="#p{place}">{_isolated(key)}</a> '
            f'<bdi class=soft lang="">{_escape(excerpt(explanation.document.text, 48))}</bdi></th>'
            f"<td class=number><strong>{explanation.score:.3f}</strong></td>"
            f"<td class=bar>{_bar(shown, scale.parts)}</td>{cells}</tr>"
        )
    return (
        '<div class=scroll role=region tabindex=0 aria-label="Scores of all passages"><table>'
        "<caption>Scores and their parts; the bars share one scale</caption><thead><tr>"
        "<th scope=col class=number>#</th>"
        f"<th scope=col>passage</th><th scope=col class=number>score</th><th scope=col>parts</th>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _article(
    explanation: ScoreExplanation, title: str, key: str, scale: _Scale, *, terms: int, is_open: bool, level: int = 2
) -> str:
    matches = explanation.top(terms)
    opposed = explanation.top(terms, "opposed")
    misaligned = int((explanation.kinds == "opposed").sum())
    linked = {match.slice: number for number, match in enumerate(matches[:LINKED]) if match.kind != "changed"}
    head = f"The [CLS] part is {explanation.cls_share:.1%} of the score and isn't explained."
    texts = "".join(
        f"<p class=label>{label}</p>{_shaded(explanation, side, key, scale, linked)}"
        for side, label in (("query", "Query"), ("document", "Passage"))
    )
    return (
        f'<article id="{key}" aria-labelledby="{key}t"><header><h{level} id="{key}t">{_isolated(title)}</h{level}>'
        f"<span class=score>score {explanation.score:.3f}</span></header>"
        + (f"<p class=soft>{head}</p>" if explanation.parts["cls"] else "")
        + _changed(explanation.document)
        + f"<div class=columns><div>{texts}</div><div>{_parts(explanation, scale)}{_words(explanation)}</div></div>"
        + _details(
            f"What met <span class=soft>the {len(matches)} dimensions that count most</span>",
            _matches(explanation, matches, "Dimensions by what they add to the score", scale, key, linked),
            is_open,
        )
        + _details(
            f"Misalignments <span class=soft>{misaligned} dimensions, "
            f"{_signed(explanation.parts['opposed'])} together</span>",
            _matches(
                explanation,
                opposed,
                "Dimensions where the texts hold terms of the two halves of a slice",
                scale,
                key,
                {},
            ),
            False,
        )
        + "</article>"
    )


def _details(summary: str, content: str, is_open: bool) -> str:
    return f"<details{' open' if is_open else ''}><summary>{summary}</summary>{content}</details>" if content else ""


def _changed(text: TextExplanation) -> str:
    count = int(text.changed.sum())
    lexical = int(text.changed[text.lexical].sum())
    return (
        f"<p class=note>{count} of the {len(text.vector)} stored numbers aren't what the text gives now, {lexical} of "
        "them lexical.</p>"
        if count
        else ""
    )


def _shaded(explanation: ScoreExplanation, side: str, key: str, scale: _Scale, linked: Mapping[int, int]) -> str:
    """The text with its words shaded; special tokens that add something stand behind it."""
    text = explanation.query if side == "query" else explanation.document
    added = explanation.words(side)
    rows: dict[int, list[int]] = {}
    for dimension, number in linked.items():
        rows.setdefault(int(text.fired[dimension]), []).append(number)
    parts, behind, position = [], [], 0
    for index, word in enumerate(text.words):
        classes = [scale.shade(added[index]), *(f"m{number}" for number in rows.get(index, []))]
        shown = _escape(word.text)
        if any(classes):
            anchor = f"{key}{side[0]}{index}"
            special = " special" if word.start is None else ""
            shown = (
                f'<mark id="{anchor}" class="{" ".join(filter(None, classes))}{special}" '
                f'title="{shown}: {_signed(added[index])}">{shown}</mark>'
            )
        if word.start is None or word.end is None:
            behind += [shown] if any(classes) else []
            continue
        parts += [_escape(text.text[position : word.start]), shown]
        position = word.end
    rest = _escape(text.text[position:])
    if rest.strip() and text.read:
        rest = f'<span class=cut title="beyond the model\'s length">{rest}</span>'
    return f'<p class=text lang="" dir=auto>{"".join(parts)}{rest} {" ".join(behind)}</p>'


def _parts(explanation: ScoreExplanation, scale: _Scale) -> str:
    rows = "".join(
        f"<tr><th scope=row>{_badge(part)}</th><td class=number>{_signed(value)}</td>"
        f"<td class=bar>{_bar({part: value}, scale.parts)}</td></tr>"
        for part, value in explanation.parts.items()
        if value
    )
    return (
        "<table class=parts><caption>Parts of the score</caption><thead><tr><th scope=col>part</th>"
        "<th scope=col class=number>adds</th><th scope=col>bar</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _words(explanation: ScoreExplanation, count: int = 5) -> str:
    """The shading again, for those who don't see it."""
    added = explanation.words("document")
    order = [int(index) for index in np.argsort(-np.abs(added), kind="stable")[:count] if added[index]]
    listed = ", ".join(f"{_isolated(explanation.document.words[i].text)} {_signed(added[i])}" for i in order)
    return f"<p><span class=soft>Words of the passage that count most:</span> {listed or 'none'}.</p>"


def _matches(
    explanation: ScoreExplanation,
    matches: Sequence[Match],
    caption: str,
    scale: _Scale,
    key: str,
    linked: Mapping[int, int],
) -> str:
    if not matches:
        return ""
    rows = []
    for match in matches:
        number = linked.get(match.slice)
        words = [
            _term(term, None if number is None else f"{key}{side}{text.fired[match.slice]}")
            for side, text, term in (
                ("q", explanation.query, match.query),
                ("d", explanation.document, match.document),
            )
        ]
        rows.append(
            f"<tr{'' if number is None else f' class=m{number}'}><td class=number>{_signed(match.contribution)}</td>"
            f"<td class=bar>{_bar({match.kind: match.contribution}, scale.dimensions)}</td>"
            f"<td>{_badge(match.kind)}</td><td>{words[0]}</td><td>{words[1]}</td>"
            f"<td class=number>{match.slice}</td></tr>"
        )
    return (
        f"<div class=scroll><table><caption>{caption}</caption><thead><tr><th scope=col class=number>adds</th>"
        "<th scope=col>bar</th><th scope=col>how</th><th scope=col>query term, from word</th>"
        "<th scope=col>passage term, from word</th><th scope=col class=number>slice</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _lost_section(query: LostQuery, number: int, found: LostQueries, terms: int) -> str:
    scale = _Scale([query.right, query.wrong])
    against = Path(found.against).name
    place = "not in the run" if query.right_rank is None else f"place {query.right_rank}"
    gap = query.gap
    rows = "".join(
        f"<tr><th scope=row>{_badge(part)}</th><td class=number>{_signed(query.right.parts[part])}</td>"
        f"<td class=number>{_signed(query.wrong.parts[part])}</td><td class=number>{_signed(gap[part])}</td></tr>"
        for part in REASONS
    )
    lost = "".join(f"<li lang=''>{_escape(shared_text(shared))}</li>" for shared in query.not_kept)
    return (
        f'<section class=lost aria-labelledby="l{number}"><h2 id="l{number}" lang="" dir=auto>'
        f"{_escape(query.right.query.text) or '(empty query)'}</h2>"
        f"<p class=kicker>query {_isolated(query.id)} · {_escape(found.metric)} {query.ours:.3f}, {_escape(against)} "
        f"{query.other:.3f}</p><p class=lead>The gap of {sum(gap.values()):.3f} comes mostly from "
        f"<strong>{NAMES[query.reason]}</strong>: {_escape(REASONS[query.reason])}.</p>"
        "<div class=scroll><table class=narrow><caption>The gap, part by part</caption><thead><tr>"
        "<th scope=col>part</th>"
        "<th scope=col class=number>right passage</th><th scope=col class=number>wrong passage</th>"
        f"<th scope=col class=number>gap</th></tr></thead><tbody>{rows}</tbody></table></div>"
        f"{_gap_dimensions(query, terms)}"
        + (f"<p>Words that query and right passage share, but not their vectors:</p><ul>{lost}</ul>" if lost else "")
        + _article(
            query.right,
            f"Right: {query.right_id} ({place}; {against} {query.other_rank})",
            f"r{number}",
            scale,
            terms=terms,
            is_open=False,
            level=3,
        )
        + _article(
            query.wrong,
            f"Wrong: {query.wrong_id} (place {query.wrong_rank})",
            f"w{number}",
            scale,
            terms=terms,
            is_open=False,
            level=3,
        )
        + "</section>"
    )


def _gap_dimensions(query: LostQuery, terms: int) -> str:
    rows = "".join(
        f"<tr><td class=number>{_signed(wrong.contribution - right.contribution)}</td><td>{_term(right.query)}</td>"
        f"{_met(right)}{_met(wrong)}"
        f"<td class=number>{right.slice}</td></tr>"
        for right, wrong in query.dimensions(terms)
    )
    return (
        "<details open><summary>Terms that made the gap</summary><div class=scroll><table>"
        "<caption>Dimensions by how much more they add in the wrong passage</caption><thead><tr>"
        "<th scope=col class=number>gap</th><th scope=col>query term, from word</th>"
        "<th scope=col class=number>right adds</th><th scope=col>how</th><th scope=col>its term</th>"
        "<th scope=col class=number>wrong adds</th><th scope=col>how</th><th scope=col>its term</th>"
        "<th scope=col class=number>slice</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></details>"
        if rows
        else ""
    )


def _met(match: Match) -> str:
    """Three cells: what a dimension adds, how its terms met, and the document's."""
    return (
        f"<td class=number>{_signed(match.contribution)}</td><td>{_badge(match.kind)}</td>"
        f"<td>{_term(match.document)}</td>"
    )


def _term(term: Term | None, anchor: str | None = None) -> str:
    """A term, and the word that fired it where that is another; linked to the word in the text."""
    if term is None:
        return "none"
    word = _isolated(term.word.text)
    linked = f'<a href="#{anchor}">{word}</a>' if anchor else word
    if term.name.casefold() == term.word.text.casefold():
        return linked
    return f"{_isolated(term.name)} <span class=word>from {linked}</span>"


def _escape(text: str) -> str:
    """As text, inside an element or a quoted attribute; characters that HTML lacks as U+FFFD."""
    return html.escape(_CONTROL.sub("\ufffd", text))


def _isolated(text: str) -> str:
    """A text of unknown direction and language inside a line."""
    return f'<bdi lang="">{_escape(text)}</bdi>'


def _badge(part: str) -> str:
    return f'<span class=badge><span class="swatch {part}"></span>{NAMES.get(part, part)}</span>'


def _signed(value: float) -> str:
    """With a sign, a true minus, and three digits after the point."""
    shown = f"{value:+.3f}"
    return "0.000" if not float(shown) else shown.replace("-", "\u2212")


def _how_to_read() -> str:
    entries = {
        "Term and word": "A lexical dimension holds the largest weight that any word of the text gives to any term of "
        "its slice of the vocabulary. The term named is the one that won, and the word is the one that fired it; where "
        "the two differ the model expanded the word. A name that begins with ## goes on a word.",
        "Exact, fuzzy, opposed": "Two texts meet in a dimension by the same term, by two terms of one half of its "
        "slice (which adds to the score without being about the same thing), or by terms of the two halves, whose "
        "product counts against the score.",
        "[SEP] and other tokens in boxes": "Special tokens of the model. They read the whole text, and what they fire "
        "belongs to no word of it.",
        "What shading doesn't tell": "A word fires with all of its context, so the score without it isn't exactly the "
        "score less its share. The [CLS] part has no share for words at all.",
    }
    listed = "".join(f"<dt>{term}</dt><dd>{meaning}</dd>" for term, meaning in entries.items())
    return f"<details><summary>How to read this page</summary><dl>{listed}</dl></details>"
