"""The page of explanations: every text escaped, nothing fetched; and, where there is a browser, what a reader sees."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import chromium
import pytest
from sentence_transformers import SentenceTransformer

from st_aggretriever import build_aggretriever
from st_aggretriever.explain import ScoreExplanation, explain_scores
from st_aggretriever.explain.page import scores_page

HOSTILE = [
    "<script>document.title='taken'</script> bread",
    "\"' onmouseover='alert(1)' & <img src=x onerror=alert(2)> ship",
    "😀 bread 👩\u200d🍳 </p></main><style>*{display:none}</style>",
    "مرحبا بالعالم bread خبز",
    "[SEP] [CLS] <!-- bread --> \x00\x1b]0;",
    "",
]
QUERY = 'what is <b>bread</b> & "ship" 😀 مرحبا'


@pytest.fixture(scope="module")
def model(tiny_bert: str) -> SentenceTransformer:
    return build_aggretriever(tiny_bert, lexical_dim=32, cls_dim=4).to("cpu")


@pytest.fixture(scope="module")
def explanations(model: SentenceTransformer) -> list[ScoreExplanation]:
    return explain_scores(model, QUERY, HOSTILE)


@pytest.fixture(scope="module")
def page(explanations: list[ScoreExplanation]) -> str:
    return scores_page(explanations, [f"<i>{n}" for n in range(len(HOSTILE))], model_name="<u>tiny", terms=12)


class Elements(HTMLParser):
    """What a parser finds: elements with attributes, ids, and whether all that open are closed in order."""

    VOID = ("meta", "rect", "line", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_no_text_becomes_markup_and_nothing_is_fetched(page: str) -> None:
    elements = Elements(page).found
    tags = {tag for tag, _ in elements}
    assert not tags & {"script", "img", "link", "iframe", "object", "b", "i", "u"}
    assert [tag for tag, _ in elements].count("style") == 1
    attributes = {name for _, values in elements for name in values}
    assert not {name for name in attributes if name.startswith("on")} | attributes & {"src", "style"}
    links = [values["href"] for _, values in elements if "href" in values]
    assert links
    assert all(link and link.startswith("#") for link in links)
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_ids_are_unique_and_links_lead_somewhere(page: str) -> None:
    elements = Elements(page).found
    ids = [values["id"] for _, values in elements if "id" in values]
    assert len(ids) == len(set(ids))
    assert {values["href"] for _, values in elements if "href" in values} <= {f"#{id}" for id in ids}


def test_tables_have_captions_and_heads(page: str) -> None:
    tables = re.findall(r"<table.*?</table>", page, re.DOTALL)
    assert len(tables) > len(HOSTILE)
    for table in tables:
        assert table.count("<caption>") == 1
        assert "<th scope=col" in table


def test_the_page_says_what_the_explanation_holds(page: str, explanations: list[ScoreExplanation]) -> None:
    for found in explanations:
        assert f"score {found.score:.3f}" in page
        assert f"The [CLS] part is {found.cls_share:.1%} of the score and isn&#x27;t" in page.replace("'", "&#x27;")


@pytest.mark.parametrize("count", [1, 50])
def test_one_passage_and_fifty_make_a_page(model: SentenceTransformer, count: int) -> None:
    texts = [f"bread {n} ship" for n in range(count)]
    text = scores_page(explain_scores(model, "ship", texts), list(map(str, range(count))), model_name="m")
    assert [tag for tag, _ in Elements(text).found].count("article") == count


def test_a_page_needs_a_document() -> None:
    with pytest.raises(ValueError, match="at least one document"):
        scores_page([], [], model_name="m")


@pytest.fixture(scope="module")
def browser(page: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if chromium.PATH is None:
        pytest.skip("no Chromium is installed")
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page, encoding="utf-8")
    one = chromium.Chromium()
    one.show_as()
    one.open(path)
    one.path = path  # type: ignore[attr-defined]
    yield one
    one.close()


def test_a_browser_shows_it_without_error_or_request(browser: Any) -> None:
    assert browser.complaints == []
    assert browser.requests == [browser.path.resolve().as_uri()]


def test_a_browser_shows_hostile_text_as_text(browser: Any, explanations: list[ScoreExplanation]) -> None:
    assert browser.evaluate("document.title") == 'Explained: what is <b>bread</b> & "ship" 😀 مرحبا'
    assert browser.evaluate("document.querySelector('h1').textContent") == QUERY
    shown = browser.evaluate("[...document.querySelectorAll('article .text:last-child')].map(e => e.textContent)")
    # HTML has no NUL and no escape; everything else stands there, character for character.
    for text, found in zip(shown, HOSTILE, strict=True):
        assert text.startswith(found.replace("\x00", "\ufffd").replace("\x1b", "\ufffd"))
    assert browser.evaluate("document.querySelectorAll('article').length") == len(HOSTILE)
    directions = browser.evaluate(
        "[...document.querySelectorAll('article .text:last-child')].map(e => getComputedStyle(e).direction)"
    )
    assert directions == ["ltr", "ltr", "ltr", "rtl", "ltr", "ltr"]


def test_words_are_shaded_by_what_they_add(browser: Any, explanations: list[ScoreExplanation]) -> None:
    backgrounds = "[...document.querySelectorAll('#p1 mark:is(.p1,.p2,.p3,.p4,.p5)')].map(e => getComputedStyle(e)"
    light = browser.evaluate(f"{backgrounds}.backgroundColor)")
    assert light
    assert "rgba(0, 0, 0, 0)" not in light
    browser.show_as(scheme="dark")
    dark = browser.evaluate(f"{backgrounds}.backgroundColor)")
    assert not set(light) & set(dark)
    browser.show_as()
    # One scale for the whole page: the word that adds most to any score has the deepest shade.
    added = {
        f"p{place}{side[0]}{index}": value
        for place, found in enumerate(explanations, start=1)
        for side in ("query", "document")
        for index, value in enumerate(found.words(side))
    }
    strongest = max(added, key=lambda anchor: abs(added[anchor]))
    assert browser.evaluate(f"document.getElementById('{strongest}').className").split()[0] == "p5"
    shaded = set(browser.evaluate("[...document.querySelectorAll('mark:not(header mark)')]"
                                  ".filter(e => /\\b[pn][1-5]\\b/.test(e.className)).map(e => e.id)"))  # fmt: skip
    assert shaded == {anchor for anchor, value in added.items() if abs(value) >= 0.04 * abs(added[strongest])}


CONTRAST = """(() => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (c !== 'rgba(0, 0, 0, 0)') return c; } };
  let least = 99;
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || e.closest('svg')) continue;
    const [one, two] = [light(getComputedStyle(e).color), light(behind(e))];
    least = Math.min(least, (Math.max(one, two) + .05) / (Math.min(one, two) + .05));
  }
  return least;
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(browser: Any, scheme: str) -> None:
    """WCAG 2's AA asks for 4.5 to 1."""
    browser.show_as(scheme=scheme)
    assert browser.evaluate(CONTRAST) >= 4.5


def test_the_keyboard_reaches_everything_and_opens_it(browser: Any) -> None:
    browser.show_as()
    browser.call("Page.reload")
    browser.open(browser.path)
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.textContent") == "Skip to the passages"
    closed = "document.querySelector('#p1 details:not([open])')"
    assert browser.evaluate(f"{closed} !== null")
    reached = set()
    for _ in range(400):
        browser.press("Tab")
        name = browser.evaluate("document.activeElement.tagName")
        reached.add(name)
        if name == "SUMMARY" and browser.evaluate(f"document.activeElement.parentElement === {closed}"):
            browser.press("Enter")
            break
    assert reached >= {"A", "SUMMARY"}
    assert browser.evaluate("document.activeElement.parentElement.open")


def test_nothing_is_wider_than_a_small_screen(browser: Any) -> None:
    browser.show_as(width=360)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360


def test_print_shows_what_is_folded_away(browser: Any) -> None:
    browser.show_as(media="print")
    hidden = (
        "[...document.querySelectorAll('article details:not([open]) table')].map(e => e.getBoundingClientRect().height)"
    )
    assert min(browser.evaluate(hidden)) > 20
