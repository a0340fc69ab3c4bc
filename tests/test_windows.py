"""Long documents in windows of tokens: one vector, the maximum over all of them; the commands."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_aggretriever import build_aggretriever, encode_windows
from st_aggretriever.cli import main
from st_aggretriever.evaluation.beir import evaluate_beir
from st_aggretriever.evaluation.lengths import length_rules
from st_aggretriever.folding import Folded
from st_aggretriever.windows import Windowed, encode_each_window

WORDS = "the dog sleeps and the ship sails to the moon slowly when rain is cold paris bread oven yeast star sea".split()
LONG, SHORT, MIDDLE = " ".join(WORDS * 3), "fox jumps", " ".join(WORDS)
PROMPT = "passage word "


def build(backbone: str, **options: Any) -> SentenceTransformer:
    return build_aggretriever(backbone, **{"lexical_dim": 20, "cls_dim": 4, "document_length": 16, **options})


@pytest.fixture(scope="module")
def model(tiny_bert: str) -> SentenceTransformer:
    return build(tiny_bert)


@pytest.fixture(scope="module", params=["tiny_bert", "tiny_bytelevel"])
def prompted(request: pytest.FixtureRequest) -> SentenceTransformer:
    return build(request.getfixturevalue(request.param), prompts={"document": PROMPT, "query": ""})


def windows_by_hand(text: str, room: int, overlap: int) -> list[str]:
    """Of a text of whole words, each one token."""
    words, starts = text.split(), [0]
    while starts[-1] + room < len(words):
        starts.append(min(starts[-1] + room - overlap, len(words) - room))
    return [" ".join(words[start : start + room]) for start in starts]


def close(found: np.ndarray, expected: np.ndarray) -> None:
    """As the same text in two batches: to 1e-5, where two halves of a slice tie but for the sign."""
    assert abs(np.abs(found) - np.abs(expected)).max() < 1e-5
    assert (np.sign(found) != np.sign(expected)).mean() < 0.01


@pytest.mark.parametrize("aggregation", ["signed", "positive"])
@pytest.mark.parametrize("kind", ["tiny_bert", "tiny_roberta"])
def test_windows_merge_to_the_maximum_over_all_their_weights(
    kind: str, aggregation: str, request: pytest.FixtureRequest
) -> None:
    model = build(request.getfixturevalue(kind), aggregation=aggregation)
    texts = windows_by_hand(LONG, room=14, overlap=5)
    assert len(texts) == 7
    features: Any = model.encode(texts, output_value=None)
    weights = torch.stack([one["lexical_weights"] for one in features]).amax(0, keepdim=True)
    slices: Any = model[2]
    expected = [*features[0]["cls_embedding"].tolist(), *slices.aggregate(weights)[0].tolist()]
    close(encode_windows(model, [LONG], window=16, overlap=5)[0], np.array(expected, np.float32))
    each, owners = encode_each_window(model, [SHORT, LONG], window=16, overlap=5)
    close(each, model.encode([SHORT, *texts]))
    assert owners.tolist() == [0, 1, 1, 1, 1, 1, 1, 1]


def test_merged_values_are_values_of_windows_to_the_bit(model: SentenceTransformer) -> None:
    each, _ = encode_each_window(model, [LONG], window=16, overlap=5)
    merged = encode_windows(model, [LONG], window=16, overlap=5)[0]
    for place in range(4, 24):
        best = abs(each[:, place]).max()
        assert merged[place] == (-best if -best in each[:, place] else best)
    assert np.array_equal(merged[:4], each[0, :4])


def test_cls_is_of_the_first_window_or_the_mean(model: SentenceTransformer) -> None:
    each, _ = encode_each_window(model, [LONG], window=16, overlap=5)
    mean = encode_windows(model, [LONG], window=16, overlap=5, cls="mean")[0]
    assert abs(mean[:4] - each[:, :4].mean(0)).max() < 1e-6
    assert np.array_equal(mean[4:], encode_windows(model, [LONG], window=16, overlap=5)[0, 4:])


def test_a_text_of_one_window_has_the_vector_of_encode_document(prompted: SentenceTransformer) -> None:
    texts = [SHORT, "", "what is dense retrieval ?"]
    close(encode_windows(prompted, texts, window=16, overlap=5), prompted.encode_document(texts))


def test_a_prompt_stands_before_each_window_and_takes_no_part(prompted: SentenceTransformer) -> None:
    texts = windows_by_hand(LONG, room=12, overlap=5)  # 16 less [CLS], [SEP] and two words of the prompt
    each, _ = encode_each_window(prompted, [LONG], window=16, overlap=5)
    close(each, prompted.encode_document(texts))
    given, _ = encode_each_window(build_like(prompted), [LONG], window=16, overlap=5, prompt=PROMPT)
    assert np.array_equal(given, each)


def build_like(model: SentenceTransformer) -> SentenceTransformer:
    return SentenceTransformer(modules=list(model), similarity_fn_name="dot")


def test_a_vector_depends_on_its_text_alone(model: SentenceTransformer) -> None:
    texts = [LONG, SHORT, "", MIDDLE, LONG + " fox"]
    alone = np.concatenate([encode_windows(model, [text], window=16, overlap=5) for text in texts])
    for batch_size in (1, 3, 100):
        close(encode_windows(model, texts[::-1], window=16, overlap=5, batch_size=batch_size)[::-1], alone)
    assert encode_windows(model, [], window=16, overlap=5).shape == (0, 24)


def test_a_word_anywhere_reaches_the_vector(model: SentenceTransformer) -> None:
    """Cut at the model's length it is gone."""
    with_needle = [" ".join([*WORDS[:place], "fox", *WORDS[place:]]) for place in (0, 11, 22)]
    plain, *needles = model.encode_document([MIDDLE, *with_needle])
    assert np.array_equal(plain, needles[-1])
    vectors = encode_windows(model, [MIDDLE, *with_needle], window=16, overlap=5)
    assert not np.array_equal(vectors[0], vectors[3])


def test_identity_weights_are_checked_window_by_window(tiny_bert: str) -> None:
    model = build(tiny_bert, term_weight="identity")
    pooling: Any = model[1]
    with torch.no_grad():
        pooling.linear.weight.zero_()
        pooling.linear.bias.fill_(-1.0)
    with pytest.raises(ValueError, match="encode_windows: 7 of these texts have no token of positive weight"):
        encode_windows(model, [LONG], window=16, overlap=5)
    with torch.no_grad():
        pooling.linear.bias.fill_(1.0)
    assert encode_windows(model, [LONG], window=16, overlap=5).shape == (1, 24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 17}, "the model reads 16 tokens, so a window can't have 17"),
        ({"overlap": 14}, "which leaves 14; overlap must be at least 0 and smaller than that, got 14"),
        ({"overlap": -1}, "overlap must be at least 0"),
        ({"window": 2}, "which leaves 0; overlap"),
        ({"cls": "last"}, "cls must be one of first, mean, got 'last'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"prompt": "a " * 14}, "which leaves 0; overlap"),
    ],
)
def test_bad_windows_are_refused(model: SentenceTransformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_windows(model, [LONG], **{"window": 16, "overlap": 5, **options})


@pytest.mark.parametrize(("option", "value"), [("pooling", "cls"), ("aggregation", "mean")])
def test_vectors_without_maxima_are_refused(tiny_bert: str, option: str, value: str) -> None:
    with pytest.raises(ValueError, match=r"must be an Aggretriever with a lexical part|takes no maximum over slices"):
        Windowed(build(tiny_bert, **{option: value}), window=16, overlap=5)


@pytest.mark.parametrize("texts", ["one text", [None], [b"bytes"]])
def test_what_is_no_list_of_texts_is_refused(model: SentenceTransformer, texts: Any) -> None:
    with pytest.raises(ValueError, match="encode_windows: expected"):
        encode_windows(model, texts, window=16, overlap=5)


def test_the_commands_read_whole_documents(
    model: SentenceTransformer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.save_pretrained(str(tmp_path / "m"))
    (tmp_path / "qrels").mkdir()
    corpus = [{"_id": "d0", "text": LONG}, {"_id": "d1", "text": SHORT}]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, corpus)))
    (tmp_path / "queries.jsonl").write_text(json.dumps({"_id": "q0", "text": "sea"}))
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1")

    def run(*arguments: Any) -> int:
        return main([*arguments[:1], *map(str, arguments[1:])])

    common = ["--model", tmp_path / "m", "--data", tmp_path]
    windows = ["--windows", 16, "--overlap", 5]
    shape = [*windows, "--lexical-dim", 10]
    assert run("encode", *common, "--output", tmp_path / "v", *shape, "--window-cls", "mean") == 0
    assert "read whole, in windows of 16 tokens that share 5, [CLS]: mean" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "v" / "manifest.json").read_text())
    assert manifest["windows"] == {"window": 16, "overlap": 5, "cls": "mean"}
    assert manifest["truncated"] == 0
    expected = Folded(Windowed(model, window=16, overlap=5, cls="mean"), 10).encode_document([LONG, SHORT])
    assert np.array_equal(np.load(tmp_path / "v" / "block-00000.npy"), expected)
    evaluate = ["evaluate", "beir", *common, *windows, "--output", tmp_path / "figures.json"]
    assert run(*evaluate, "--document-length", 9) == 2
    assert "--windows reads whole documents" in capsys.readouterr().err
    assert run(*evaluate) == 0
    printed = capsys.readouterr().out
    assert "documents are read whole, in windows of 16 tokens that share 5; the [CLS] part is the first" in printed
    assert "documents at" not in printed
    assert "is folded" not in printed
    rules = length_rules(Folded(Windowed(model, window=16, overlap=5, cls="mean"), 10))
    assert "the [CLS] part is the mean over the windows" in rules[0]
    assert rules[1:] == ["the lexical part of queries and documents is folded to 10 dimensions"]
    result = json.loads((tmp_path / "figures.json").read_text())
    assert result["encoding"]["windows"]["window"] == 16
    assert result["counts"]["truncated_documents"] == 0
    assert result["figures"] == evaluate_beir(Windowed(model, window=16, overlap=5), tmp_path)["figures"]
    assert run("encode", *common, "--output", tmp_path / "w", "--side", "query", *windows) == 2
    assert run("encode", *common, "--output", tmp_path / "w", "--overlap", 5) == 2
    assert not (tmp_path / "w.partial").exists()
