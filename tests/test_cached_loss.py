"""CachedAggretrieverLoss and the gathering of negatives: value and gradient of the plain loss on the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_backbone
from processes import join_group, run_two_processes
from sentence_transformers import SentenceTransformer
from torch.nn.parallel import DistributedDataParallel

import st_aggretriever
from st_aggretriever import AggretrieverLoss, CachedAggretrieverLoss, Distillation, build_aggretriever

MINI = str(Path(st_aggretriever.__file__).parent / "assets" / "mini")
TEXTS = [
    ["what dog", "who sails the sea", "how cold", "is rain cold", "what dog"],
    ["the lazy dog sleeps over time", "the ship sails", "ice", "the ship sails", "a quick brown dog"],
    ["a cat", "the moon and the sun rises slowly in the sky over paris", "sun", "a cat", "bread"],
    ["the ship sails", "bread needs flour, water, salt", "the sea", "oven", "the lazy dog sleeps over time"],
]
TEACHER = 3 * torch.randn(5, 3, generator=torch.Generator().manual_seed(9))
ALL: dict[str, Any] = {
    "fold_dims": (8, 4),
    "fold_weights": (0.5, 0.3),
    "distillation": Distillation(margin_mse_weight=0.01, temperature=2.0),
}
Outcome = tuple[dict[str, float], dict[str, torch.Tensor]]


@pytest.fixture(scope="module", params=["mini", "roberta"])
def model(request: pytest.FixtureRequest, tiny_roberta: str) -> SentenceTransformer:
    path = MINI if request.param == "mini" else tiny_roberta
    return build_aggretriever(path, cls_dim=4, lexical_dim=16).float().eval()


@pytest.fixture(scope="module")
def model_with_dropout(tmp_path_factory: pytest.TempPathFactory) -> SentenceTransformer:
    folder = save_backbone(
        tmp_path_factory.mktemp("dropout"), hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2
    )[0]
    return build_aggretriever(folder, cls_dim=4, lexical_dim=16).train()


def outcome(loss: torch.nn.Module, texts: list[list[str]] = TEXTS, labels: Any = TEACHER, factor: float = 1) -> Outcome:
    """Values of the terms, and gradients of ``factor`` times their sum."""
    loss.zero_grad()
    preprocess = getattr(loss.model, "module", loss.model).preprocess
    terms = loss([preprocess(column) for column in texts], labels)
    (factor * torch.stack(list(terms.values())).sum()).backward()
    values = {name: term.item() for name, term in terms.items()}
    return values, {name: parameter.grad for name, parameter in loss.named_parameters()}


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Loss to 1e-6, gradients to 1e-5."""
    assert list(found[0]) == list(expected[0])
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "fold-distil"])
def test_cached_loss_equals_the_plain_loss(model: SentenceTransformer, options: dict[str, Any]) -> None:
    expected = outcome(AggretrieverLoss(model, **options))
    for size in ({"mini_batch_size": 1}, {"mini_batch_size": 2}, {"mini_batch_size": 9}, {"mini_batch_num_tokens": 20}):
        assert_same(outcome(CachedAggretrieverLoss(model, **size, **options)), expected)


@pytest.fixture
def double(tiny_bert: str) -> SentenceTransformer:
    return build_aggretriever(tiny_bert, cls_dim=4, lexical_dim=16).double().eval()


@pytest.mark.parametrize("options", [{"mini_batch_size": 1}, {"mini_batch_size": 3}, {"mini_batch_num_tokens": 12}])
def test_cached_loss_is_exact_in_float64(double: SentenceTransformer, options: dict[str, Any]) -> None:
    expected = outcome(AggretrieverLoss(double, **ALL))
    found = outcome(CachedAggretrieverLoss(double, **options, **ALL))
    assert found[0] == pytest.approx(expected[0], rel=1e-13)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_mini_batches_hold_so_many_texts_or_tokens(double: SentenceTransformer) -> None:
    seen: list[torch.Tensor] = []
    double[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]["attention_mask"].sum(1)))
    with torch.no_grad():
        outcome_of = CachedAggretrieverLoss(double, mini_batch_size=2)
        outcome_of([double.preprocess(column) for column in TEXTS[:2]])
        assert [len(lengths) for lengths in seen] == [2, 2, 1, 2, 2, 1]
        seen.clear()
        CachedAggretrieverLoss(double, mini_batch_num_tokens=9)([double.preprocess(column) for column in TEXTS])
    assert max(lengths.sum() for lengths in seen if len(lengths) > 1) <= 9
    assert any(len(lengths) == 1 and lengths.sum() > 9 for lengths in seen)  # one long text
    assert sum(len(lengths) for lengths in seen) == 20


def test_dropout_of_whole_columns_is_that_of_the_plain_loss(model_with_dropout: SentenceTransformer) -> None:
    torch.manual_seed(3)
    expected = outcome(AggretrieverLoss(model_with_dropout, **ALL))
    torch.manual_seed(3)
    found = outcome(CachedAggretrieverLoss(model_with_dropout, mini_batch_size=5, **ALL))
    assert_same(found, expected)
    assert expected[0] != outcome(AggretrieverLoss(model_with_dropout, **ALL))[0]  # the seed matters


def test_dropout_is_the_same_in_both_encodings_of_a_mini_batch(model_with_dropout: SentenceTransformer) -> None:
    loss = AggretrieverLoss(model_with_dropout)
    loss.zero_grad()
    torch.manual_seed(3)
    columns = []
    for texts in TEXTS:
        features = model_with_dropout.preprocess(texts)
        halves = [{key: value[rows] if torch.is_tensor(value) else value for key, value in features.items()}
                  for rows in (slice(0, 2), slice(2, 4), slice(4, 5))]  # fmt: skip
        for half in halves:  # as the cached loss does; the widths decide how much is drawn
            width = int(half["attention_mask"].sum(1).max())
            half.update({key: value[:, :width] for key, value in half.items() if torch.is_tensor(value)})
        columns.append(torch.cat([model_with_dropout(half)["sentence_embedding"] for half in halves]))
    known = loss._known_positives([model_with_dropout.preprocess(texts) for texts in TEXTS])
    terms = loss.compute_loss_from_embeddings(columns, None, known)
    sum(terms.values()).backward()
    expected = (
        {name: term.item() for name, term in terms.items()},
        {name: parameter.grad for name, parameter in loss.named_parameters()},
    )
    torch.manual_seed(3)
    assert_same(outcome(CachedAggretrieverLoss(model_with_dropout, mini_batch_size=2)), expected)


def test_random_numbers_go_on_as_if_encoded_once(model_with_dropout: SentenceTransformer) -> None:
    torch.manual_seed(3)
    outcome(AggretrieverLoss(model_with_dropout))
    expected = torch.rand(3)
    torch.manual_seed(3)
    outcome(CachedAggretrieverLoss(model_with_dropout, mini_batch_size=5))
    assert torch.equal(torch.rand(3), expected)


def test_autocast_holds_for_the_second_encoding_too(model: SentenceTransformer) -> None:
    """Training loops have the loss under autocast, and backward outside of it."""

    def under_autocast(loss: AggretrieverLoss, cache: bool) -> Outcome:
        loss.zero_grad()
        # With its cache autocast adds the gradients of the plain loss's columns up in half precision.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            terms = loss([model.preprocess(column) for column in TEXTS])
        torch.stack(list(terms.values())).sum().backward()
        gradients = {name: parameter.grad for name, parameter in loss.named_parameters()}
        return {name: term.item() for name, term in terms.items()}, gradients

    expected = under_autocast(AggretrieverLoss(model), cache=False)
    assert_same(under_autocast(CachedAggretrieverLoss(model, mini_batch_size=5), cache=True), expected)


def test_backward_under_autocast_reaches_every_parameter(model: SentenceTransformer) -> None:
    """Autocast may keep what the first encoding cast: weights without graph."""
    loss = CachedAggretrieverLoss(model, mini_batch_size=2)
    with torch.autocast("cpu", torch.bfloat16):
        outcome(loss)
    assert without_gradient(loss) == []


def test_a_factor_on_the_loss_is_one_on_the_gradients(double: SentenceTransformer) -> None:
    """As gradient accumulation and the scaler of fp16 have it."""
    plain = outcome(CachedAggretrieverLoss(double, mini_batch_size=2))[1]
    for name, gradient in outcome(CachedAggretrieverLoss(double, mini_batch_size=2), factor=0.25)[1].items():
        torch.testing.assert_close(gradient, 0.25 * plain[name])


def test_gradients_of_single_terms_are_refused(double: SentenceTransformer) -> None:
    terms = CachedAggretrieverLoss(double)([double.preprocess(column) for column in TEXTS])
    with pytest.raises(ValueError, match="only the plain sum of the terms"):
        terms["cls"].backward()


def test_two_batches_may_wait_for_their_backward(double: SentenceTransformer) -> None:
    loss = CachedAggretrieverLoss(double, mini_batch_size=2)
    other = [list(reversed(column)) for column in TEXTS[1:3]]
    expected = [outcome(loss, texts)[1] for texts in (TEXTS, [TEXTS[0], *other])]
    loss.zero_grad()
    first = loss([double.preprocess(column) for column in TEXTS])
    second = loss([double.preprocess(column) for column in [TEXTS[0], *other]])
    sum(first.values()).backward()
    sum(second.values()).backward()
    for name, parameter in loss.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[0][name] + expected[1][name])


def test_without_gradients_the_terms_are_the_same(double: SentenceTransformer) -> None:
    with torch.no_grad():
        features = [[double.preprocess(column) for column in TEXTS] for _ in range(2)]
        found = CachedAggretrieverLoss(double, mini_batch_size=2, **ALL)(features[0], TEACHER)
        expected = AggretrieverLoss(double, **ALL)(features[1], TEACHER)
    torch.testing.assert_close(found, expected)
    assert not found["full"].requires_grad


def test_prompts_do_not_take_part_in_either(double: SentenceTransformer) -> None:
    """A prompt's length may come as a number or, from a data loader, as a tensor with one entry for the column."""
    gradients = []
    for loss in (AggretrieverLoss(double), CachedAggretrieverLoss(double, mini_batch_size=2)):
        loss.zero_grad()
        features = [double.preprocess(column, prompt="query: ") for column in TEXTS]
        for column in features:
            column["prompt_length"] = torch.tensor([int(column["prompt_length"])])
        sum(loss(features).values()).backward()
        gradients.append({name: parameter.grad for name, parameter in loss.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize(("options", "message"), [({"mini_batch_size": 0}, "mini_batch_size must be at least 1, got 0"),
                                                  ({"mini_batch_num_tokens": -3}, "mini_batch_num_tokens must be"),
                                                  ({"scale": 0}, "scale must be above 0")])  # fmt: skip
def test_sizes_out_of_range_are_refused(double: SentenceTransformer, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CachedAggretrieverLoss(double, **options)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"cls_dim": 0},
    {"lexical_dim": 0},
    {"pooling": "tokens"},
    {"pooling": "cls"},
    {"pooling": "mean"},
    {"pooling": "mean+cls"},
    {"aggregation": "positive"},
    {"aggregation": "mean"},
    {"aggregation": "linear"},
    {"aggregation": "none"},
    {"term_weight": "identity"},
    {"term_weight": "none", "activation": "log1p_relu"},
    {"excluded_tokens": "special", "slicing": "random", "remainder": "drop"},
]


def without_gradient(loss: torch.nn.Module) -> list[str]:
    return [name for name, parameter in loss.named_parameters() if parameter.requires_grad and parameter.grad is None]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("loss_class", [AggretrieverLoss, CachedAggretrieverLoss])
def test_every_parameter_has_a_gradient_in_every_variant(tiny_bert: str, variant: dict, loss_class: type) -> None:
    model = build_aggretriever(tiny_bert, **{"cls_dim": 4, "lexical_dim": 16, **variant})
    loss = loss_class(model)
    outcome(loss)
    assert without_gradient(loss) == []


# ---------------------------------------------------------------------------------------------------------------------
# Two processes


def gathering_worker(rank: int, rendezvous: str, backbone: str) -> None:
    """One of two processes, each with half of the queries: DDP's gradients against one process with the whole batch."""
    join_group(rank, rendezvous)
    texts, teacher = [column[:4] for column in TEXTS], TEACHER[:4]
    halves = slice(2 * rank, 2 * rank + 2)
    single = build_aggretriever(backbone, cls_dim=4, lexical_dim=16).double().eval()
    expected = outcome(AggretrieverLoss(single, **ALL), texts, teacher)
    alone = outcome(AggretrieverLoss(single, **ALL), [column[halves] for column in texts], teacher[halves])
    for loss in (
        AggretrieverLoss(single, gather_across_devices=True, **ALL),
        CachedAggretrieverLoss(single, gather_across_devices=True, mini_batch_size=1, **ALL),
        CachedAggretrieverLoss(single, gather_across_devices=True, mini_batch_num_tokens=15, **ALL),
    ):
        model = build_aggretriever(backbone, cls_dim=4, lexical_dim=16).double().eval()
        loss.model = DistributedDataParallel(model)
        values, gradients = outcome(loss, [column[halves] for column in texts], teacher[halves])
        assert without_gradient(loss) == []
        mean = torch.tensor(list(values.values()), dtype=torch.float64)
        torch.distributed.all_reduce(mean)
        assert (mean / 2).tolist() == pytest.approx(list(expected[0].values()), rel=1e-12)
        assert values["full"] > alone[0]["full"] + 1e-3  # the others' passages are negatives
        for name, gradient in expected[1].items():
            torch.testing.assert_close(gradients[name.replace("model.", "model.module.", 1)], gradient, msg=name)
    vectors = [torch.from_numpy(single.encode(column)) for column in texts]
    whole = AggretrieverLoss(single).compute_loss_from_embeddings(vectors)["full"]
    gathering = AggretrieverLoss(single, gather_across_devices=True)
    share = gathering.compute_loss_from_embeddings([column[halves] for column in vectors])["full"]
    torch.distributed.all_reduce(share)
    assert share.item() / 2 == pytest.approx(whole.item(), rel=1e-12)
    unequal = [column[: 2 + rank] for column in texts]
    with pytest.raises(ValueError, match="got 2 x 3, 3 x 3"):
        gathering([single.preprocess(column) for column in unequal])


def test_two_processes_have_the_gradients_of_one_with_the_whole_batch(tiny_bert: str, tmp_path: Path) -> None:
    """Passages of the other process are negatives, its duplicates of a positive are not; DDP averages."""
    run_two_processes(gathering_worker, tmp_path, tiny_bert)


def test_gathering_with_one_process_changes_nothing(double: SentenceTransformer) -> None:
    expected = outcome(AggretrieverLoss(double))
    assert_same(outcome(AggretrieverLoss(double, gather_across_devices=True)), expected)
