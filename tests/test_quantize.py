"""The vocabulary product in fewer bits: what it computes, what it costs, and where it is refused or said."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import conftest
import numpy as np
import pytest
import reference
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

import st_aggretriever.modules as M
from st_aggretriever import build_aggretriever, load_aggretriever
from st_aggretriever.cli import main
from st_aggretriever.encoding import model_hash
from st_aggretriever.inspection import failed_checks, format_report, inspect_model
from st_aggretriever.vectors.folder import VectorFolder

V, E = 37, 12
TEXTS = ["the quick brown fox", "what is dense retrieval in a search engine ?", "", "a"]
BITS = ("int8", "bf16")


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both products of int8; where oneDNN's isn't there, the plain one twice."""
    if not request.param:
        monkeypatch.setattr(M, "_INT8_PACK", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return conftest.save_backbone(tmp_path_factory.mktemp("backbone"), "bert", num_hidden_layers=1)[0]


def build(folder: str, quantize: str = "none", **options: Any) -> SentenceTransformer:
    model = build_aggretriever(folder, **{"lexical_dim": 16, "cls_dim": 4, **options})
    model[1].quantize = quantize  # type: ignore[assignment]
    return model


def random_head(seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """States (B, L, E), decoder and bias, term weights with a zero and negative ones, tokens that take part."""
    torch.manual_seed(seed)
    keep = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]).bool()
    weights = torch.randn(4, 5)
    weights[0, 2] = 0.0
    return torch.randn(4, 5, E), spread * torch.randn(V, E), torch.randn(V), weights, keep


def whole(rows: list[float]) -> tuple[list[int], float]:
    scale = max(map(abs, rows)) / 127
    return [round(value / scale) for value in rows], scale


@pytest.mark.usefixtures("packed")
def test_int8_logits_are_products_of_whole_numbers_with_a_scale_for_each_row_and_token() -> None:
    states, weight, bias, *_ = random_head()
    found = M._QuantisedDecoder(weight, bias, "int8").approximate(states[0])
    assert found.dtype == torch.float32
    for token, state in enumerate(states[0].tolist()):
        left, left_scale = whole(state)
        for term, row in enumerate(weight.tolist()):
            right, right_scale = whole(row)
            expected = sum(a * b for a, b in zip(left, right, strict=True)) * left_scale * right_scale
            assert found[token, term].item() == pytest.approx(expected + bias[term].item(), abs=1e-5)


@pytest.mark.parametrize("quantize", BITS)
@pytest.mark.parametrize("activation", ["softmax", "log1p_relu"])
@pytest.mark.usefixtures("packed")
def test_with_every_term_chosen_nothing_is_lost(quantize: str, activation: str) -> None:
    states, weight, bias, weights, keep = random_head()
    decoder = M._QuantisedDecoder(weight, bias, quantize)
    approximate, exact = M.quantised_lexical_max(states, decoder, weights, keep, activation)
    expected = M.lexical_max(states, weight, bias, weights, keep, activation)
    everything = torch.arange(V).expand(len(states), V)
    assert (exact(everything) - expected).abs().max() < 1e-5
    assert 1e-5 < (approximate - expected).abs().max() < 0.1
    assert not approximate[2].any()
    assert not exact(everything)[2].any()


@pytest.mark.parametrize("quantize", BITS)
def test_chosen_terms_take_the_place_of_their_approximations_in_the_softmax(quantize: str) -> None:
    states, weight, bias, weights, keep = random_head()
    decoder = M._QuantisedDecoder(weight, bias, quantize)
    _, exact = M.quantised_lexical_max(states, decoder, weights, keep, "softmax")
    ids = torch.randperm(V)[:9].repeat(4, 1)
    found = exact(ids)
    rounded = decoder.approximate(states.flatten(0, 1)).view(4, 5, V)
    for text in (0, 1, 3):
        logits = rounded[text].clone()
        logits[:, ids[text]] = (states[text] @ weight[ids[text]].T) + bias[ids[text]]
        expected = reference.lexical_weights(logits.tolist(), weights[text].tolist(), keep[text].tolist())
        np.testing.assert_allclose(found[text], [expected[term] for term in ids[text].tolist()], atol=1e-5)


@pytest.mark.parametrize("quantize", BITS)
def test_tiles_do_not_change_a_weight(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile keeps its approximations, several make those of the chosen terms again."""
    states, weight, bias, weights, keep = random_head()
    decoder = M._QuantisedDecoder(weight, bias, quantize)
    ids = torch.stack([torch.randperm(V)[:9] for _ in range(4)])
    results = []
    for tokens in (1, 2, 64):
        monkeypatch.setattr(M, "_TILE_TOKENS", tokens)
        monkeypatch.setattr(M, "_TILE_BYTES", 4 * V * tokens)
        approximate, exact = M.quantised_lexical_max(states, decoder, weights, keep, "softmax")
        results.append((approximate, exact(ids)))
    for approximate, exactly in results[:2]:
        torch.testing.assert_close(approximate, results[2][0], rtol=0, atol=1e-6)
        torch.testing.assert_close(exactly, results[2][1], rtol=0, atol=1e-6)


def test_no_probability_exceeds_one() -> None:
    """A peaked distribution: the exact logit of the peak over the approximate sum alone would give 1.1 and more."""
    states, weight, bias, weights, keep = random_head(spread=40.0)
    decoder = M._QuantisedDecoder(weight, bias, "int8")
    approximate, exact = M.quantised_lexical_max(states, decoder, torch.ones_like(weights), keep, "softmax")
    best = approximate.topk(5, dim=1).indices
    naive = (states[0] @ weight.T + bias - decoder.approximate(states[0]).logsumexp(1, keepdim=True)).exp()
    assert naive[keep[0]].max() > 1.1
    assert exact(best).max() <= 1 + 1e-6
    assert exact(best)[0].max() > 0.99


@pytest.mark.parametrize("quantize", BITS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggregation": "positive", "slicing": "random", "remainder": "drop"},
        {"activation": "log1p_relu", "term_weight": "none", "remainder": "drop"},
        {"aggregation": "mean"},
        {"aggregation": "none"},
        {"aggregation": "linear"},
    ],
    ids=str,
)
def test_vectors_are_close_to_the_whole_heads(folder: str, quantize: str, options: dict[str, Any]) -> None:
    model = build(folder, **options)
    exact = model.encode(TEXTS)
    model[1].quantize = quantize  # type: ignore[assignment]
    vectors = model.encode(TEXTS)
    assert vectors.dtype == np.float32
    assert (vectors != exact).any()
    np.testing.assert_array_equal(vectors[:, :4], exact[:, :4])  # [CLS]
    scale = abs(exact).max()
    close = abs(abs(vectors) - abs(exact)) < 0.02 * scale
    assert close.mean() > 0.97
    assert (np.signbit(vectors) != np.signbit(exact)).mean() < 0.1
    assert abs(abs(vectors) - abs(exact)).max() < 0.15 * scale


def test_winners_are_looked_up_under_every_slice_rule() -> None:
    """Weights that are their ids, doubled by the exact ones: any other id would show."""
    ids = torch.randperm(V).float().unsqueeze(0)
    for options in ({}, {"remainder": "drop"}, {"slicing": "random"}, {"slicing": "random", "remainder": "drop"}):
        for aggregation in ("signed", "positive"):
            agg = M.SliceMaxAgg(V, 5, aggregation=aggregation, **options)  # type: ignore[arg-type]
            found = agg.aggregate(ids, lambda chosen: 2 * ids.gather(1, chosen))
            torch.testing.assert_close(found, 2 * agg.aggregate(ids))


@pytest.mark.parametrize("quantize", BITS)
def test_the_copy_follows_weights_that_are_changed_past_autograd(folder: str, quantize: str) -> None:
    model, fresh = build(folder, quantize), build(folder, quantize)
    model.encode(TEXTS)
    for changed in (model, fresh):
        weight = changed[0].model.get_output_embeddings().weight
        weight.data.mul_(0.5)
    assert np.array_equal(model.encode(TEXTS), fresh.encode(TEXTS))


def test_training_goes_on_from_a_quantised_model_without(
    folder: str, pairs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(folder, "int8").save_pretrained(str(tmp_path / "m"))
    settings = ["--max-steps", "1", "--batch-size", "4", "--device", "cpu", "--no-report"]
    arguments = ["--model", str(tmp_path / "m"), "--pairs", pairs, "--output", str(tmp_path / "out"), *settings]
    assert main(["train", *arguments]) == 0
    assert (
        "has quantize='int8', which has no gradient: it is trained, and saved, with 'none'" in capsys.readouterr().err
    )
    assert load_aggretriever(tmp_path / "out")[1].quantize == "none"


def test_training_with_a_quantised_head_is_refused(folder: str) -> None:
    model = build(folder, "int8")
    features = model.preprocess(TEXTS)
    with pytest.raises(ValueError, match=r"quantize='int8' has no gradient. Set .* 'none' to train"):
        model(dict(features))
    with torch.no_grad():
        model(dict(features))
    model[1].quantize = "none"  # type: ignore[assignment]
    model(dict(features))["sentence_embedding"].sum().backward()


def test_the_copy_follows_the_weights_and_stays_at_home(folder: str) -> None:
    model = build(folder, "int8")
    head: Any = model[1]
    first = model.encode(TEXTS)
    copied = head._quantised
    np.testing.assert_array_equal(model.encode(TEXTS), first)
    assert head._quantised is copied
    decoder: Any = model[0].model.get_output_embeddings()  # type: ignore[union-attr, operator]
    with torch.no_grad():
        decoder.weight.mul_(-1)
    assert (model.encode(TEXTS) != first).any()
    assert head._quantised is not copied
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert twin._quantised is None
        assert twin.quantize == "int8"
    assert not [name for name in model.state_dict() if "quantised" in name]


@pytest.mark.parametrize("quantize", BITS)
def test_the_setting_is_saved_or_not_by_choice_and_the_bundled_code_runs_it(
    folder: str, tmp_path: Path, quantize: str
) -> None:
    build(folder).save_pretrained(str(tmp_path / "whole"))
    model = load_aggretriever(tmp_path / "whole", quantize=quantize)
    vectors = model.encode(TEXTS)
    model.save_pretrained(str(tmp_path / "quantised"))
    assert json.loads((tmp_path / "quantised/1_MLMLexicalPooling/config.json").read_text())["quantize"] == quantize
    again = load_aggretriever(tmp_path / "quantised")
    bundled = SentenceTransformer(str(tmp_path / "quantised"), trust_remote_code=True)
    assert type(bundled[1]) is not M.MLMLexicalPooling
    for other in (again, bundled):
        assert other[1].quantize == quantize
        np.testing.assert_array_equal(other.encode(TEXTS), vectors)
    plain = load_aggretriever(tmp_path / "quantised", quantize="none")
    np.testing.assert_array_equal(plain.encode(TEXTS), load_aggretriever(tmp_path / "whole").encode(TEXTS))


def test_bad_settings_are_refused_in_a_sentence(folder: str, tmp_path: Path) -> None:
    build(folder).save_pretrained(str(tmp_path / "mlm"))
    build_aggretriever(folder, pooling="tokens", lexical_dim=16).save_pretrained(str(tmp_path / "tokens"))
    with pytest.raises(ValueError, match="quantize must be one of 'none', 'int8', 'bf16', got 'int4'"):
        load_aggretriever(tmp_path / "mlm", quantize="int4")
    with pytest.raises(ValueError, match="no vocabulary product that quantize='int8'"):
        load_aggretriever(tmp_path / "tokens", quantize="int8")
    with pytest.raises(ValueError, match="quantize must be one of"):
        build(folder, "int4").encode(TEXTS)
    with pytest.raises(ValueError, match="for the CPU, but the model is on meta"):
        M._QuantisedDecoder(torch.empty(4, 4, device="meta"), None, "int8")


def test_a_cpu_whose_product_overflows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(M, "_INT8_PACK", None)
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.int() @ b.int()).clamp(-32768, 32767))
    with pytest.raises(ValueError, match="int8 product overflows"):
        M._QuantisedDecoder(torch.ones(8, 16), None, "int8")


def test_inspect_says_it_and_finds_a_head_that_lost_too_much(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(folder, "int8").save_pretrained(str(tmp_path))
    report = inspect_model(tmp_path)
    assert report["pooling"]["quantize"] == "int8"
    assert failed_checks(report) == []
    assert "quantised head: passed, int8: cosine of the lexical part " in format_report(report)
    # Logits that are noise choose the wrong winners.
    monkeypatch.setattr(
        M._QuantisedDecoder, "approximate", lambda self, states: torch.randn(len(states), len(self.rows))
    )
    assert any("quantised head" in name for name in failed_checks(inspect_model(tmp_path)))


def test_the_command_line_quantises_queries_against_whole_documents(folder: str, tmp_path: Path) -> None:
    build(folder).save_pretrained(str(tmp_path / "model"))
    data = tmp_path / "data"
    (data / "qrels").mkdir(parents=True)
    (data / "corpus.jsonl").write_text('{"_id": "d", "title": "", "text": "the dog sleeps"}\n')
    (data / "queries.jsonl").write_text('{"_id": "q", "text": "what dog"}\n')
    common = ["encode", "--model", str(tmp_path / "model"), "--data", str(data), "--device", "cpu"]
    assert main([*common, "--output", str(tmp_path / "documents")]) == 0
    assert main([*common, "--output", str(tmp_path / "queries"), "--side", "query", "--quantize", "int8"]) == 0
    queries, documents = (VectorFolder(tmp_path / name).manifest for name in ("queries", "documents"))
    assert (queries["quantize"], documents["quantize"]) == ("int8", "none")
    search = ["search", "--index", str(tmp_path / "documents"), "--queries", str(tmp_path / "queries")]
    assert main([*search, "--run", str(tmp_path / "run"), "--backend", "torch"]) == 0
    assert main(["evaluate", "beir", "--model", "bm25", "--data", str(data), "--quantize", "int8"]) == 2


def test_a_quantised_model_has_its_own_hash_but_comparable_vectors(folder: str) -> None:
    model = build(folder)
    hashed = model_hash(model)
    model[1].quantize = "int8"  # type: ignore[assignment]
    assert model_hash(model) != hashed
    assert model_hash(model, quantize=False) == hashed


def test_explaining_is_refused(folder: str) -> None:
    from st_aggretriever.explain.texts import explain_texts

    with pytest.raises(ValueError, match="head is quantised"):
        explain_texts(build(folder, "int8"), TEXTS[:1])
