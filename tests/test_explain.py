"""Explanations: the terms and tokens that the equations give, sums that equal the score, and the command."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conftest
import numpy as np
import pytest
import reference
import torch
from sentence_transformers import SentenceTransformer

from st_aggretriever import build_aggretriever, load_aggretriever
from st_aggretriever.bulk import Source, encode_to_disk
from st_aggretriever.cli import main
from st_aggretriever.explain import explain_scores, explain_texts, match
from st_aggretriever.explain.documents import check_index
from st_aggretriever.explain.lost import explain_lost, format_lost
from st_aggretriever.explain.table import pad, printable
from st_aggretriever.explain.texts import Word

C, D = 4, 8
TEXTS = ["The quick brown fox, jumps over!", "a", "", "dense retrieval in a search engine? " * 3, "Bread needs yeast"]


def build(path: str, **options: Any) -> SentenceTransformer:
    """A tiny model whose term weights differ from token to token and, with identity, in sign."""
    model = build_aggretriever(path, **{"lexical_dim": D, "cls_dim": C, "document_length": 64, **options})
    if hasattr(model[1], "linear"):
        torch.manual_seed(3)
        torch.nn.init.normal_(model[1].linear.weight, std=0.5)
        torch.nn.init.constant_(model[1].linear.bias, 3.0)
    return model.to("cpu")


def dot(one: np.ndarray, two: np.ndarray) -> float:
    return float(one.astype(np.float64) @ two.astype(np.float64))


def by_hand(model: Any, text: str, excluded: str) -> list[tuple[int, int, set[int], float]]:
    """For each dimension (term, sign of the half, tokens that give the largest weight, weight), in loops."""
    tokens = model.tokenizer(text, return_tensors="pt")
    ids, mask = tokens["input_ids"][0].tolist(), tokens["attention_mask"][0].tolist()
    pooling, slicer = model[1], model[2]
    with torch.no_grad():
        states = model[0].model.base_model(**tokens).last_hidden_state[0]
        if hasattr(pooling, "activation"):
            logits = model[0].model(**tokens).logits[0].tolist()
            function = {"softmax": reference.softmax, "log1p_relu": reference.log1p_relu}[pooling.activation]
            values = [function(row) for row in logits]
        else:
            values = [[float(t == id) for t in range(slicer.vocab_size)] for id in ids]
        kind = pooling.term_weight
        linear = None if kind == "none" else (pooling.linear.weight[0].tolist(), pooling.linear.bias.item())
        weights = [reference.term_weight(state, *(linear or ([], 0.0)), kind) for state in states.tolist()]
    takes_part = [True] * len(ids) if excluded == "none" else reference.tokens_that_take_part(mask, excluded)
    terms = range(slicer.vocab_size)
    best: list[tuple[float, set[int]]] = []
    for term in terms:
        found = {i: weights[i] * values[i][term] for i in range(len(ids)) if takes_part[i]}
        if not hasattr(pooling, "activation"):
            found = {i: value for i, value in found.items() if ids[i] == term}
        most = max(found.values(), default=0.0)
        best.append((most, {i for i, value in found.items() if value >= most - 1e-6 * abs(most)}))
    width = {"signed": 2 * D, "none": len(terms)}.get(slicer.aggregation, D)
    kept = reference.ids_after_remainder(len(terms), width, slicer.remainder)
    if slicer.slicing == "random":
        order = slicer.permutation.tolist()
        kept = [order[position] for position in kept]
    columns = [kept[column::width] for column in range(width)]
    size = abs if slicer.aggregation == "mean" else float
    winners = [max(column, key=lambda term: size(best[term][0])) for column in columns]
    rows = []
    for dimension in range(D if slicer.aggregation != "none" else width):
        if slicer.aggregation == "signed":
            plus, minus = winners[2 * dimension : 2 * dimension + 2]
            sign = 1 if best[plus][0] > best[minus][0] else -1
            term = plus if sign > 0 else minus
        else:
            term, sign = winners[dimension], 1
        rows.append((term, sign, best[term][1], best[term][0]))
    return rows


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggregation": "positive"},
        {"aggregation": "mean"},
        {"aggregation": "none"},
        {"slicing": "random", "seed": 5},
        {"remainder": "drop"},
        {"pooling": "tokens"},
        {"pooling": "tokens", "term_weight": "identity"},
        {"term_weight": "identity", "excluded_tokens": "special"},
        {"activation": "log1p_relu", "term_weight": "none", "excluded_tokens": "none"},
        {"cls_dim": 0},
    ],
    ids=lambda options: " ".join(map(str, options.values())) or "default",
)
def test_terms_and_tokens_are_the_maxima_of_the_equations(tiny_bert: str, options: dict[str, Any]) -> None:
    model = build(tiny_bert, **options)
    named = 0
    for text, found in zip(TEXTS, explain_texts(model, TEXTS, batch_size=3), strict=True):
        input_ids = model.tokenizer(text)["input_ids"]
        for dimension, row in enumerate(by_hand(model, text, options.get("excluded_tokens", "cls"))):
            term, sign, tokens, weight = row
            if weight == 0:
                assert found.ids[dimension] == -1
                assert found.term(dimension) is None
                continue
            named += 1
            assert found.ids[dimension] == term
            assert found.signs[dimension] == sign
            assert found.weights[dimension] == pytest.approx(weight, rel=1e-4)
            assert found.token_ids[dimension] in {input_ids[token] for token in tokens}
    assert named > 10


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "albert", "modernbert"])
def test_other_backbones_are_explained(tmp_path: Path, kind: str) -> None:
    model = build(conftest.save_backbone(tmp_path, kind)[0])
    for text, found in zip(TEXTS, explain_texts(model, TEXTS), strict=True):
        for dimension, (term, sign, *_) in enumerate(by_hand(model, text, "cls")):
            assert (found.ids[dimension], found.signs[dimension]) == (term, sign)


def test_a_word_is_whole_and_lies_where_it_stands_in_the_text(tiny_bert: str) -> None:
    model = build(tiny_bert, pooling="tokens")
    text = "  Ünbread,  don't 😀 日本 sea\u0301ship  the "
    words = explain_texts(model, [text])[0].words
    placed = [word for word in words if word.start is not None]
    assert [word.text for word in placed] == ["Ünbread", ",", "don", "'", "t", "😀", "日", "本", "sea\u0301ship", "the"]
    assert all(text[word.start : word.end] == word.text for word in placed)
    assert [word.text for word in words if word.start is None] == ["[CLS]", "[SEP]"]


def test_a_prompt_is_no_word_of_the_text(tiny_bert: str) -> None:
    model = build(tiny_bert, include_prompt=True, prompts={"query": "the word: ", "document": ""})
    found = explain_texts(model, ["bread ship"], side="query")[0]
    placed = [word for word in found.words if word.start is not None]
    assert placed == [Word("bread", 0, 5), Word("ship", 6, 10)]
    assert [word.text for word in found.words[:5]] == ["[CLS]", "the", "word", ":", "bread"]
    assert np.allclose(found.vector, model.encode_query("bread ship"), atol=1e-6)


@pytest.mark.parametrize("text", ["a dog \u200b", "a dog\u200d", "a dog \ufffd", "", " "])
def test_what_the_tokenizer_drops_was_not_cut(tiny_bert: str, text: str) -> None:
    explanation = explain_texts(build(tiny_bert), [text], side="document")[0]
    assert explanation.read == len(text)


def test_what_the_length_cuts_off_was_not_read(tiny_bert: str) -> None:
    model = build(tiny_bert, document_length=4)
    found = explain_texts(model, ["bread ship salt oven"])[0]
    assert found.text[: found.read] == "bread ship"


@pytest.mark.parametrize("options", [{}, {"aggregation": "mean"}, {"aggregation": "none"}, {"pooling": "tokens"}])
def test_parts_contributions_and_words_sum_to_the_score(tiny_bert: str, options: dict[str, Any]) -> None:
    model = build(tiny_bert, **options)
    query = model.encode_query(TEXTS[3])
    for text, found in zip(TEXTS, explain_scores(model, TEXTS[3], TEXTS), strict=True):
        assert found.score == pytest.approx(dot(query, model.encode_document(text)), abs=1e-5)
        assert sum(found.parts.values()) == pytest.approx(found.score, abs=1e-9)
        listed = sum(match.contribution for match in found.top(10_000))
        assert found.cls + listed == pytest.approx(found.score, abs=1e-9)
        for side in ("query", "document"):
            assert found.cls + found.words(side).sum() == pytest.approx(found.score, abs=1e-9)


def test_the_kinds_are_what_the_terms_say(tiny_bert: str) -> None:
    """With the texts' own words, all weighing 1, the kinds are known from the ids: half slice = id mod 2D."""
    model = build(tiny_bert, pooling="tokens", term_weight="none", excluded_tokens="special")
    ids = {word: model.tokenizer.convert_tokens_to_ids(word) for word in conftest.WORDS}
    half = ids["bread"] % (2 * D)
    same = next(word for word, id in ids.items() if id % (2 * D) == half and word != "bread")
    other = next(word for word, id in ids.items() if id % (2 * D) == half ^ 1)
    apart = next(word for word, id in ids.items() if id % (2 * D) // 2 != half // 2)
    found = explain_scores(model, "bread", ["bread", same, other, apart])
    shown = [[(one.slice, one.kind, one.contribution) for one in explanation.top()] for explanation in found]
    assert shown == [[(half // 2, "exact", 1.0)], [(half // 2, "fuzzy", 1.0)], [(half // 2, "opposed", -1.0)], []]
    assert [explanation.kinds[half // 2] for explanation in found] == ["exact", "fuzzy", "opposed", "empty"]
    assert [list(found[2].top(kind=kind)) for kind in ("exact", "fuzzy")] == [[], []]


def test_shared_words_name_what_took_their_dimension(tiny_bert: str) -> None:
    model = build(tiny_bert, pooling="tokens", term_weight="none")
    ids = {word: model.tokenizer.convert_tokens_to_ids(word) for word in conftest.WORDS}
    word = "bread"  # every other term of its slice
    rivals = [name for name, id in ids.items() if name != word and id % (2 * D) // 2 == ids[word] % (2 * D) // 2]
    lower = [name for name in rivals if ids[name] % (2 * D) == ids[word] % (2 * D) and ids[name] < ids[word]]
    alone, beside = explain_scores(model, word, [word, f"{word} {lower[0]}"])
    assert [(one.name, one.kept) for one in alone.shared()] == [(word, True)]
    # With all weights 1 the lower id of a half slice wins.
    assert [(one.name, one.query, one.document) for one in beside.shared()] == [(word, None, lower[0])]


def test_a_reloaded_model_is_explained_alike(tiny_bert: str, tmp_path: Path) -> None:
    """With the code that it carries, its classes are others than the package's."""
    model = build(tiny_bert)
    model.save_pretrained(str(tmp_path / "model"))
    bundled = SentenceTransformer(str(tmp_path / "model"), trust_remote_code=True, device="cpu")
    assert type(bundled[1]) is not type(model[1])
    expected = explain_texts(model, TEXTS)
    for loaded in (bundled, load_aggretriever(tmp_path / "model", device="cpu")):
        for one, two in zip(expected, explain_texts(loaded, TEXTS), strict=True):
            assert np.array_equal(one.ids, two.ids)
            assert np.array_equal(one.fired, two.fired)
            assert np.array_equal(one.vector, two.vector)


def test_half_precision_is_explained(tiny_bert: str) -> None:
    model = build(tiny_bert).bfloat16()
    for text, found in zip(TEXTS, explain_texts(model, TEXTS), strict=True):
        assert np.allclose(np.abs(found.vector), np.abs(model.encode_document(text)), atol=0.05)


def test_truncated_vectors_are_explained_as_far_as_they_go(tiny_bert: str) -> None:
    model = build(tiny_bert)
    model.truncate_dim = C + 3
    found = explain_scores(model, TEXTS[0], [TEXTS[4]])[0]
    assert len(found.contributions) == 3
    assert found.score == pytest.approx(dot(model.encode_query(TEXTS[0]), model.encode_document(TEXTS[4])), abs=1e-5)
    model.truncate_dim = C
    with pytest.raises(ValueError, match="truncate_dim 4 cuts the lexical part off"):
        explain_texts(model, TEXTS)


def test_stored_vectors_are_explained_and_differences_are_said(tiny_bert: str) -> None:
    model = build(tiny_bert)
    stored = model.encode_document(TEXTS).astype(np.float16)
    query = model.encode_query(TEXTS[3])
    same = explain_scores(model, TEXTS[3], TEXTS, vectors=stored)
    assert not any(found.document.changed.any() for found in same)
    stored[1, C + 2] += 1.0
    stored[1, 0] -= 1.0
    changed = explain_scores(model, TEXTS[3], TEXTS, vectors=stored)
    assert np.flatnonzero(changed[1].document.changed).tolist() == [0, C + 2]
    assert changed[1].match(2)[2:] == ("changed", None, None)
    assert changed[1].document.term(2) is None
    assert 2 not in {term.slice for term in changed[1].document.top(D)}
    assert changed[1].words("document").sum() + changed[1].cls == pytest.approx(
        changed[1].score - changed[1].contributions[2]
    )
    for row, found in enumerate(changed):
        assert found.score == pytest.approx(dot(query, stored[row].astype(np.float32)), abs=1e-5)
    with pytest.raises(ValueError, match=r"stored vectors of shape \(5, 12\), one for each text by this model, got"):
        explain_texts(model, TEXTS, vectors=stored[:, :-1])
    stored[2, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        explain_texts(model, TEXTS, vectors=stored)


@pytest.mark.parametrize("pooling", ["cls", "mean", "mean+cls"])
def test_a_model_without_lexical_part_is_refused(tiny_bert: str, pooling: str) -> None:
    with pytest.raises(ValueError, match="has no lexical part, so no dimension of it stands for terms"):
        explain_texts(build(tiny_bert, pooling=pooling), ["a"])


def test_what_can_not_be_explained_is_refused(tiny_bert: str) -> None:
    with pytest.raises(ValueError, match="'linear' is a learned projection"):
        explain_texts(build(tiny_bert, aggregation="linear"), ["a"])
    model = build(tiny_bert)
    with pytest.raises(TypeError, match="got one string"):
        explain_texts(model, "a")
    one, two = explain_texts(model, ["a"])[0], explain_texts(build(tiny_bert, lexical_dim=16), ["a"])[0]
    with pytest.raises(ValueError, match="by one model, got vectors of 12 and 20 dimensions"):
        match(one, two)
    model.similarity_fn_name = "cosine"
    with pytest.raises(ValueError, match="compares by"):
        explain_texts(model, ["a"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: str) -> Iterator[Path]:
    """A saved model, a BEIR folder and a run that puts the wrong document first for one of two queries."""
    home = tmp_path_factory.mktemp("explain")
    build(tiny_bert).save_pretrained(str(home / "model"))
    texts = {"d1": "bread flour yeast", "d2": "ship sails the sea", "d3": "paris france capital"}
    lines = [json.dumps({"_id": key, "title": "", "text": text}) for key, text in texts.items()]
    (home / "data" / "qrels").mkdir(parents=True)
    (home / "data" / "corpus.jsonl").write_text("\n".join(lines))
    queries = {"q1": "who sails a ship", "q2": "what is bread"}
    (home / "data" / "queries.jsonl").write_text(
        "\n".join(json.dumps({"_id": key, "text": text}) for key, text in queries.items())
    )
    (home / "data" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t1\nq2\td1\t1\n")
    run = "q1 Q0 d3 1 3.0 x\nq1 Q0 d2 2 2.0 x\nq2 Q0 d1 1 3.0 x\n"
    (home / "ours.trec").write_text(run)
    (home / "other.trec").write_text("q1 Q0 d2 1 3.0 x\nq2 Q0 d1 1 3.0 x\n")
    yield home
    shutil.rmtree(home)


def test_a_lost_query_has_its_gap_split_into_parts(folder: Path) -> None:
    model = load_aggretriever(folder / "model", device="cpu")
    lost = explain_lost(model, folder / "ours.trec", folder / "data", against=folder / "other.trec")
    assert [(query.id, query.right_id, query.wrong_id) for query in lost.queries] == [("q1", "d2", "d3")]
    query = lost.queries[0]
    assert (query.right_rank, query.other_rank, query.wrong_rank) == (2, 1, 1)
    vectors = model.encode_document(["ship sails the sea", "paris france capital"])
    scores = [dot(model.encode_query("who sails a ship"), vector) for vector in vectors]
    assert sum(query.gap.values()) == pytest.approx(scores[1] - scores[0], abs=1e-5)
    assert query.reason == max(("cls", "exact", "fuzzy", "opposed"), key=lambda part: query.gap[part])
    assert lost.other_model == 1  # the scores of the run are made up
    text = "\n".join(format_lost(lost))
    assert "1 of 2 queries lost" in text
    assert "wrong d3 (place 1): paris france capital" in text


def test_a_document_of_the_querys_id_is_kept_where_asked_and_queries_are_counted(folder: Path, tmp_path: Path) -> None:
    model = load_aggretriever(folder / "model", device="cpu")
    data = tmp_path / "data"
    shutil.copytree(folder / "data", data)
    (data / "corpus.jsonl").write_text((data / "corpus.jsonl").read_text().replace("d3", "q1"))
    (tmp_path / "ours").write_text("q1 Q0 q1 1 3.0 x\nq1 Q0 d2 2 2.0 x\nelse Q0 d1 1 3.0 x\n")
    for drop, lost_queries in ((True, ["q2"]), (False, ["q1", "q2"])):
        lost = explain_lost(model, tmp_path / "ours", data, against=folder / "other.trec", drop_identical_ids=drop)
        assert len(lost.queries) + lost.unexplained == len(lost_queries)
        assert ("q1" in [query.id for query in lost.queries]) is not drop
        assert "the run has 2 queries, 1 of the 2 judged here" in "\n".join(format_lost(lost))


def test_bm25_is_the_run_to_lose_against(folder: Path) -> None:
    model = load_aggretriever(folder / "model", device="cpu")
    lost = explain_lost(model, folder / "ours.trec", folder / "data")
    assert [query.id for query in lost.queries] == ["q1"]
    assert lost.other == 1.0


@pytest.mark.parametrize("kind", ["lines", "jsonl", "folder", "index"])
def test_the_command_explains_documents_of_each_kind(
    folder: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [json.loads(line) for line in (folder / "data" / "corpus.jsonl").read_text().splitlines()]
    source, options, ids = tmp_path / "docs.txt", [], ["1", "2", "3"]
    if kind == "lines":
        source.write_text("\n".join(document["text"] for document in documents))
    elif kind == "jsonl":
        source = tmp_path / "docs.jsonl"
        source.write_text("\n".join(json.dumps({"text": document["text"]}) for document in documents))
    else:
        source, ids = folder / "data", ["d1", "d2", "d3"]
    model = load_aggretriever(folder / "model", device="cpu")
    texts = {key: document["text"] for key, document in zip(ids, documents, strict=True)}
    if kind == "index":
        index = tmp_path / "index"
        encode_to_disk(model, Source("corpus", lambda: texts.items()), index, dtype="float16")
        options = ["--index", str(index)]
    assert run(folder, "--query", "who sails", "--docs", str(source), "--top-k", "2", *options) == 0
    printed = capsys.readouterr().out
    scores = {key: dot(model.encode_query("who sails"), model.encode_document(text)) for key, text in texts.items()}
    best = sorted(scores, key=lambda key: -scores[key])[:2]
    assert [line.split(":")[0] for line in printed.splitlines() if line[:2] in ("1.", "2.")] == [
        f"1. {best[0]}",
        f"2. {best[1]}",
    ]
    assert f"score {scores[best[0]]:.2f}"[:-1] in printed
    assert "of the score, is not explained" in printed


def run(folder: Path, *options: str) -> int:
    return main(["explain", "--model", str(folder / "model"), "--device", "cpu", *options])


def test_the_command_explains_texts_and_evaluations(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--query", "who sails a ship") == 0
    assert "of the vector's squared length, is not explained" in capsys.readouterr().out
    assert run(folder, "--query", "\udcff sails", "--docs", str(folder / "data"), "--top-k", "1") == 0  # not UTF-8
    assert capsys.readouterr().out.startswith("query: \ufffd sails")
    assert run(folder, "--docs", str(folder / "data"), "--ids", "d2") == 0
    assert capsys.readouterr().out.startswith("d2: ship sails the sea")
    page = tmp_path / "page.html"
    evaluation = ["--run", str(folder / "ours.trec"), "--data", str(folder / "data")]
    assert run(folder, *evaluation, "--against", str(folder / "other.trec"), "--html", str(page)) == 0
    assert "1 of 2 queries lost against" in capsys.readouterr().out
    assert "Right: d2 (place 2; other.trec 1)" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--query", "a", "--docs", "DATA", "--ids", "d9"], "holds no document 'd9'"),
        (["--query", "a", "--docs", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--query", "a", "--docs", "DATA", "--top-k", "51"], "--top-k must be from 1 to 50, got 51"),
        (["--query", "a", "--html", "page.html"], "a page needs --query and --docs"),
        (["--run", "ours.trec"], "--run and --data together"),
        ([], "give --query and --docs"),
        (["--run", "a", "--data", "b", "--metric", "nope"], "metric must be one of nDCG@10"),
        (["--query", "a", "--keep-identical-ids"], "--keep-identical-ids belongs to --run and --data"),
        (["--query", "a", "--against", "x.trec"], "--against belongs to --run and --data"),
        (["--query", "a", "--lost", "10"], "--lost belongs to --run and --data"),
    ],
)
def test_the_command_says_in_a_sentence_what_is_missing(
    folder: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, *(str(folder / "data") if option == "DATA" else option for option in options)) == 2
    assert sentence in capsys.readouterr().err


def test_stored_vectors_are_of_documents_and_of_this_model(
    folder: Path, tmp_path: Path, tiny_bert: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_aggretriever(folder / "model", device="cpu")
    texts = Source("corpus", lambda: iter([("d1", "bread flour yeast")]))
    for side in ("query", "document"):
        encode_to_disk(model, texts, tmp_path / side, side=side)
    with pytest.raises(ValueError, match="holds query vectors"):
        check_index(tmp_path / "query", model)
    check_index(tmp_path / "document", model)
    assert not caplog.records
    with torch.no_grad():
        next(model.parameters()).add_(1)
    check_index(tmp_path / "document", model)
    assert "were made by another model" in caplog.text


def test_bad_arguments_are_refused_in_a_sentence(tiny_bert: str) -> None:
    model = build(tiny_bert)
    for texts in ("one", [3], [None]):
        with pytest.raises(TypeError, match="explain_texts: expected"):
            explain_texts(model, texts)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="explain_scores: expected one text"):
        explain_scores(model, ["a"], ["b"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tolerance must be at least 0"):
        explain_texts(model, ["a"], tolerance=float("nan"))
    found = explain_scores(model, "a", ["b"])[0]
    for call in (lambda: found.words("foo"), lambda: found.top(-1), lambda: found.document.top(-1)):
        with pytest.raises(ValueError, match=r"side must be|count must be"):
            call()


def test_a_text_can_not_write_on_the_terminal() -> None:
    assert printable("a\x1b[2J\u202eb\n c\x07") == "a\ufffd[2J\ufffdb c\ufffd"
    assert pad("日本語", 6) == "日..  "  # a cell is never cut in half


def test_the_word_ranked_first_matters_more_than_another(mini_model: SentenceTransformer) -> None:
    """The claim of benchmarks/explain_faithfulness.py in small: on the bundled sample, untrained but for the MLM."""
    from st_aggretriever.quickstart import asset
    from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries

    queries = read_queries(asset("sample"))
    corpus, rng = dict(read_corpus(asset("sample"))), np.random.default_rng(0)
    relevant = [
        (queries[query], corpus[key])
        for query, grades in list(read_qrels(asset("sample"), "train", queries).items())[:20]
        for key in grades
    ]
    queries_of, documents_of = zip(*relevant, strict=True)
    asked = explain_texts(mini_model, queries_of, side="query")
    pairs = [match(*pair) for pair in zip(asked, explain_texts(mini_model, documents_of), strict=True)]
    without: list[list[str]] = [[], []]  # the word ranked first; another one
    for pair in pairs:
        added = pair.words("document")
        placed = [index for index, word in enumerate(pair.document.words) if word.start is not None]
        first = max(placed, key=lambda index: added[index])
        other = int(rng.choice([index for index in placed if index != first]))
        for texts, index in zip(without, (first, other), strict=True):
            word = pair.document.words[index]
            texts.append(pair.document.text[: word.start] + pair.document.text[word.end : pair.document.read])
    scores = [
        [match(query, text).score for query, text in zip(asked, explain_texts(mini_model, texts), strict=True)]
        for texts in without
    ]
    share = np.mean([first < other for first, other in zip(*scores, strict=True)])
    assert share > 0.65


@pytest.fixture(scope="module")
def mini_model() -> SentenceTransformer:
    from st_aggretriever.quickstart import asset

    return build_aggretriever(str(asset("mini")), cls_dim=0).to("cpu")
