"""The bundled sample collection: layout, counts, split hygiene and word overlap (no model, no network)."""

import json
import re
from collections import Counter, defaultdict
from difflib import SequenceMatcher
from pathlib import Path

import pytest

import st_aggretriever

SAMPLE = Path(st_aggretriever.__file__).parent / "assets" / "sample"
TOPICS = {
    "comp", "cook", "gard", "heal", "hist", "home", "law", "mon",
    "mus", "nat", "pet", "sch", "spor", "tran", "trav", "work",
}  # fmt: skip
STOP = set(
    "a about all am an and any are as at be been before but by can cannot could did do does doing down for from "
    "get had has have he her him his how i if in into is it its let may me more must my never no not of off on once "
    "one only or our out over shall she should so some such than that the their them then there these they this "
    "those through to too under up us was we were what when where whether which while who whom whose why will "
    "with without would you your".split()
)
# Bounds on the mean share of a paraphrase query's content words found in its relevant passage.
MAX_SHARED_WORDS = 0.25
MAX_SHARED_STEMS = 0.33


def read_jsonl(name):
    lines = (SAMPLE / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_qrels(split):
    header, *rows = (SAMPLE / "qrels" / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
    assert header == "query-id\tcorpus-id\tscore"
    return [tuple(row.split("\t")) for row in rows]


def content_words(text, stem=False):
    words = {word for word in re.findall(r"[^\W_]+", text.lower()) if word not in STOP}
    return {word[:5] for word in words} if stem else words  # five letters: a crude stem, so that leaf finds leafy


def contains_term(term, text):
    return re.search(rf"(?<!\w){re.escape(term.lower())}(?!\w)", text.lower()) is not None


@pytest.fixture(scope="module")
def corpus():
    return {row["_id"]: row for row in read_jsonl("corpus.jsonl")}


@pytest.fixture(scope="module")
def texts(corpus):
    return {key: f"{row['title']} {row['text']}" for key, row in corpus.items()}


@pytest.fixture(scope="module")
def queries():
    return {row["_id"]: row for row in read_jsonl("queries.jsonl")}


@pytest.fixture(scope="module")
def relevant():
    result = {}
    for split in ("train", "test"):
        result[split] = defaultdict(set)
        for query, passage, _ in read_qrels(split):
            result[split][query].add(passage)
    return result


def test_layout_and_unique_ids():
    rows = read_jsonl("corpus.jsonl")
    assert all(set(row) == {"_id", "title", "text"} for row in rows)
    assert len({row["_id"] for row in rows}) == len(rows)
    assert all(re.fullmatch(r"[a-z]+-\d{2}", row["_id"]) for row in rows)
    rows = read_jsonl("queries.jsonl")
    assert all(set(row) == {"_id", "text", "metadata"} for row in rows)
    assert len({row["_id"] for row in rows}) == len(rows)
    assert all(re.fullmatch(r"q-(train|test)-\d{3}", row["_id"]) for row in rows)


def test_counts(corpus, relevant):
    assert len(corpus) >= 300
    per_topic = Counter(key.split("-")[0] for key in corpus)
    assert set(per_topic) == TOPICS
    assert len(TOPICS) >= 12
    assert min(per_topic.values()) >= 20
    assert len(relevant["train"]) >= 150
    assert len(relevant["test"]) >= 100


def test_passages_are_short_and_distinct(corpus):
    assert all(row["title"].strip() and row["text"].strip() for row in corpus.values())
    assert all(row["text"] == row["text"].strip() for row in corpus.values())
    lengths = [len(row["text"].split()) for row in corpus.values()]
    assert min(lengths) >= 35
    assert max(lengths) <= 95
    assert len({row["title"].lower() for row in corpus.values()}) == len(corpus)
    bags = {key: content_words(row["text"]) for key, row in corpus.items()}
    keys = sorted(bags)
    for i, a in enumerate(keys):  # nothing repeated, and nothing nearly repeated
        for b in keys[i + 1 :]:
            assert len(bags[a] & bags[b]) / len(bags[a] | bags[b]) < 0.5, (a, b)


def test_every_qrel_resolves(corpus, queries, relevant):
    for split in ("train", "test"):
        rows = read_qrels(split)
        assert len({row[:2] for row in rows}) == len(rows)
        assert {score for *_, score in rows} == {"1"}
        assert {passage for _, passage, _ in rows} <= set(corpus)
        assert set(relevant[split]) == {key for key in queries if key.startswith(f"q-{split}-")}


def test_splits_share_nothing(queries, relevant):
    assert not set(relevant["train"]) & set(relevant["test"])
    normal = [" ".join(re.findall(r"[^\W_]+", row["text"].lower())) for row in queries.values()]
    assert len(set(normal)) == len(normal)
    train, test = (set().union(*relevant[split].values()) for split in ("train", "test"))
    assert not train & test


def test_query_kinds(queries):
    kinds = Counter((key.split("-")[1], row["metadata"]["kind"]) for key, row in queries.items())
    assert set(kinds) == {("train", "open"), ("train", "exact"), ("test", "paraphrase"), ("test", "exact")}
    share = kinds["test", "exact"] / (kinds["test", "exact"] + kinds["test", "paraphrase"])
    assert 0.2 <= share <= 0.3
    assert all(("term" in row["metadata"]) == (row["metadata"]["kind"] == "exact") for row in queries.values())


def test_exact_queries_need_their_rare_term(corpus, texts, queries, relevant):
    for key, row in queries.items():
        if row["metadata"]["kind"] != "exact":
            continue
        term = row["metadata"]["term"]
        right = relevant[key.split("-")[1]][key]
        holders = {passage for passage, text in texts.items() if contains_term(term, text)}
        assert contains_term(term, row["text"]), key
        assert right <= holders, key
        assert len(holders) <= 3, key
        (passage,) = right
        title = corpus[passage]["title"]
        siblings = [
            other
            for other, candidate in corpus.items()
            if other != passage and SequenceMatcher(None, title, candidate["title"]).ratio() >= 0.7
        ]
        assert siblings, f"{key}: no passage about a similar term"


@pytest.mark.parametrize(("stem", "bound"), [(False, MAX_SHARED_WORDS), (True, MAX_SHARED_STEMS)])
def test_paraphrase_queries_share_few_words(texts, queries, relevant, stem, bound):
    bags = {key: content_words(text, stem) for key, text in texts.items()}
    shares, fooled, rivals = [], 0, []
    for key, right in relevant["test"].items():
        if queries[key]["metadata"]["kind"] != "paraphrase":
            continue
        words = content_words(queries[key]["text"], stem)
        best = max(len(words & bags[passage]) for passage in right)
        shares.append(best / len(words))
        topics = {passage.split("-")[0] for passage in right}
        wrong = {passage: len(words & bag) for passage, bag in bags.items() if passage not in right}
        fooled += max(wrong.values()) >= best
        rivals.append(sum(n > 0 and passage.split("-")[0] in topics for passage, n in wrong.items()))
    assert sum(shares) / len(shares) < bound
    assert fooled / len(shares) > 0.5  # some wrong passage shares as many words as the right one
    assert sum(rivals) / len(rivals) >= 2  # near misses: same topic, some of the query's words, not the answer
