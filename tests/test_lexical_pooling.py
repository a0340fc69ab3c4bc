"""MLMLexicalPooling and its tiled vocabulary product against tests/reference.py and autograd."""

from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F

from st_aggretriever import MLMLexicalPooling, SliceMaxAgg, TokenLexicalPooling
from st_aggretriever import modules as package_modules
from st_aggretriever.modules import lexical_max

MASKS = {
    "right padding": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]],
    "left padding": [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]],
    "holes": [[1, 0, 1, 1, 1], [1, 1, 0, 0, 1], [0, 1, 0, 1, 0]],
    "one token": [[1, 0, 0, 0, 0], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]],
}


def inputs(vocabulary: int = 11, states: int = 4, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "states": normal(3, 5, states),
        "weight": normal(vocabulary, states),
        "bias": normal(vocabulary),
        "term_weights": normal(3, 5),
    }


def plain(given: dict[str, Any], keep: torch.Tensor, activation: str) -> torch.Tensor:
    """The formula with every logit in memory, differentiated by autograd."""
    logits = F.linear(given["states"], given["weight"], given["bias"])
    probabilities = logits.softmax(-1) if activation == "softmax" else torch.log1p(torch.relu(logits))
    weighted = (given["term_weights"].unsqueeze(-1) * probabilities).masked_fill(~keep.unsqueeze(-1), -torch.inf)
    best = weighted.max(1).values
    return torch.where(keep.any(1, keepdim=True), best, torch.zeros_like(best))


def set_tile(monkeypatch: pytest.MonkeyPatch, tokens: int, vocabulary: int = 11) -> None:
    """Tiles of so many tokens forward, and backward of as many logits; texts together up to so many tokens."""
    monkeypatch.setattr(package_modules, "_TILE_BYTES", tokens * 4 * vocabulary)
    monkeypatch.setattr(package_modules, "_TILE_TOKENS", 1)
    monkeypatch.setattr(package_modules, "_GROUP_TOKENS", tokens)


@pytest.fixture(params=[1, 2, 3, 6, 10_000], ids=lambda tokens: f"tile of {tokens}")
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    set_tile(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("activation", ["softmax", "log1p_relu"])
@pytest.mark.parametrize("mask", MASKS)
def test_lexical_weights_equal_the_reference(tile: int, mask: str, activation: str) -> None:
    given = inputs()
    keep = torch.tensor(MASKS[mask]) != 0
    with torch.no_grad():
        without_gradient = lexical_max(**given, keep=keep, activation=activation)
    given["weight"].requires_grad_()
    with_gradient = lexical_max(**given, keep=keep, activation=activation)
    logits = F.linear(given["states"].double(), given["weight"].double(), given["bias"].double())
    for text in range(3):
        expected = reference.lexical_weights(
            logits[text].tolist(), given["term_weights"][text].tolist(), keep[text].tolist(), activation
        )
        for result in (without_gradient, with_gradient):
            torch.testing.assert_close(result[text], torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("activation", ["softmax", "log1p_relu"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_equal_autograd_on_the_plain_formula(tile: int, mask: str, activation: str) -> None:
    keep = torch.tensor(MASKS[mask]) != 0
    weights = torch.randn(3, 11, generator=torch.Generator().manual_seed(1))
    gradients = []
    for function in (lexical_max, plain):
        given = {name: tensor.requires_grad_() for name, tensor in inputs().items()}
        output = (
            function(**given, keep=keep, activation=activation)
            if function is lexical_max
            else function(given, keep, activation)
        )
        (output * weights).sum().backward()
        gradients.append({name: tensor.grad for name, tensor in given.items()})
    for name, expected in gradients[1].items():
        assert expected.abs().max() > 1e-3, f"the gradient of {name} is zero: the comparison would show nothing"
        torch.testing.assert_close(gradients[0][name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["softmax", "log1p_relu"])
def test_gradcheck_in_float64(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, 2)
    given = {name: tensor.requires_grad_() for name, tensor in inputs(dtype=torch.float64).items()}
    keep = torch.tensor(MASKS["right padding"]) != 0
    assert torch.autograd.gradcheck(
        lambda *tensors: lexical_max(*tensors, keep=keep, activation=activation), tuple(given.values())
    )


@pytest.mark.parametrize("vocabulary", [8, 9, 11, 12, 15])
def test_head_and_slices_equal_the_reference_whatever_the_remainder(tile: int, vocabulary: int) -> None:
    """V mod 2D = 0, 1, 3, 0, 3 at D = 4 and 2D = 8 or, of the last two, D = 6 and 2D = 12."""
    dim = 4 if vocabulary < 12 else 6
    given, keep = inputs(vocabulary), torch.tensor(MASKS["holes"]) != 0
    aggregate = SliceMaxAgg(vocabulary, dim).aggregate
    logits = F.linear(given["states"].double(), given["weight"].double(), given["bias"].double())
    result = aggregate(lexical_max(**given, keep=keep, activation="softmax"))
    for text in range(3):
        weights = reference.lexical_weights(
            logits[text].tolist(), given["term_weights"][text].tolist(), keep[text].tolist()
        )
        expected = torch.tensor(reference.aggregate(weights, dim, "signed"))
        torch.testing.assert_close(result[text], expected, rtol=0, atol=1e-6)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs(vocabulary).items()}
        output = (
            plain(leaves, keep, "softmax")
            if dtype == torch.float64
            else lexical_max(**leaves, keep=keep, activation="softmax")
        )
        aggregate(output).square().sum().backward()
        gradients.append([tensor.grad for tensor in leaves.values()])
    for found, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["softmax", "log1p_relu"])
def test_weight_of_zero_has_the_gradient_of_its_probabilities(activation: str) -> None:
    """``d (w p) / dw = p``, also at w = 0, where the output doesn't tell p."""
    gradients = []
    for function in (lexical_max, plain):
        given = inputs()
        given["term_weights"] = torch.zeros(3, 5)
        given = {name: tensor.requires_grad_() for name, tensor in given.items()}
        keep = torch.zeros(3, 5, dtype=torch.bool)
        keep[:, 1] = True
        output = (
            function(given, keep, activation)
            if function is plain
            else function(**given, keep=keep, activation=activation)
        )
        (output * torch.arange(11.0)).sum().backward()
        gradients.append(given["term_weights"].grad)
    assert gradients[1][:, 1].abs().min() > 0.1
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("library", ["oneDNN", "torch"])
def test_products_of_either_library_are_the_same(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large enough to be cut into blocks, with the rows of a text in several tiles."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4, 70, 24, generator=generator)
    weight = torch.randn(301, 24, generator=generator)
    given = {"states": states, "weight": weight, "bias": torch.randn(301, generator=generator)}
    given["term_weights"] = torch.randn(4, 70, generator=generator)
    keep = torch.rand(4, 70, generator=generator) < 0.7
    weights = torch.randn(4, 301, generator=generator)
    set_tile(monkeypatch, 30, 301)
    if library == "torch":
        monkeypatch.setattr(package_modules, "_ONEDNN_LINEAR", None)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = {name: tensor.detach().clone().to(dtype).requires_grad_() for name, tensor in given.items()}
        output = (
            lexical_max(**leaves, keep=keep, activation="softmax")
            if dtype == torch.float32
            else plain(leaves, keep, "softmax")
        )
        (output * weights).sum().backward()
        results.append([output.detach(), *(tensor.grad for tensor in leaves.values())])
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


def test_decoder_that_is_frozen_costs_no_product_and_changes_no_other_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = torch.tensor(MASKS["holes"]) != 0
    gradients, products, linear = [], [], package_modules._linear
    monkeypatch.setattr(package_modules, "_linear", lambda *given: products.append(1) or linear(*given))
    for frozen in (False, True):
        given = {name: tensor.requires_grad_() for name, tensor in inputs().items()}
        if frozen:
            given["weight"].requires_grad_(False)
            given["bias"].requires_grad_(False)
        products.clear()
        lexical_max(**given, keep=keep, activation="softmax").square().sum().backward()
        assert (given["weight"].grad is None) == frozen
        assert (given["bias"].grad is None) == frozen
        assert len(products) == (3 if frozen else 4)
        gradients.append([given["states"].grad, given["term_weights"].grad])
    assert all(map(torch.equal, *gradients))


def test_padding_never_meets_the_decoder(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that are multiplied by the decoder are the tokens that take part."""
    rows = []
    linear = package_modules._linear

    def counting(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(x))
        return linear(x, *rest)

    monkeypatch.setattr(package_modules, "_linear", counting)
    for mask in MASKS.values():
        rows.clear()
        lexical_max(**inputs(), keep=torch.tensor(mask) != 0, activation="softmax")
        assert sum(rows) == torch.tensor(mask).sum()


def test_batch_without_any_token_that_takes_part_still_reaches_every_parameter() -> None:
    """Under DDP a parameter without a gradient stops the run."""
    given = {name: tensor.requires_grad_() for name, tensor in inputs().items()}
    output = lexical_max(**given, keep=torch.zeros(3, 5, dtype=torch.bool), activation="softmax")
    assert output.shape == (3, 11)
    assert output.eq(0).all()
    output.sum().backward()
    assert all(tensor.grad.eq(0).all() for tensor in given.values())


def test_decoder_without_bias() -> None:
    given = inputs()
    given["bias"] = None
    given["weight"].requires_grad_()
    keep = torch.tensor(MASKS["right padding"]) != 0
    output = lexical_max(**given, keep=keep, activation="softmax")
    torch.testing.assert_close(output, plain(given, keep, "softmax"))
    output.sum().backward()
    assert given["weight"].grad.abs().sum() > 0


def test_text_without_tokens_is_zero_and_has_no_gradient() -> None:
    given = {name: tensor.requires_grad_() for name, tensor in inputs().items()}
    keep = torch.zeros(3, 5, dtype=torch.bool)
    keep[1, 2] = True
    output = lexical_max(**given, keep=keep, activation="softmax")
    assert output[0].eq(0).all()
    assert output[1].ne(0).all()
    assert output[2].eq(0).all()
    output[:, 0].sum().backward()  # The sum over all terms would be the term weight, whatever the states.
    gradient = given["states"].grad.abs().sum(-1)
    assert gradient[1, 2] > 1e-4
    assert gradient.sum() == gradient[1, 2]


def test_negative_weights_are_not_hidden_by_padding() -> None:
    """With every weight -1 the maximum is the least negative value, not a padding zero."""
    given = inputs() | {"term_weights": -torch.ones(3, 5)}
    for mask in MASKS.values():
        assert lexical_max(**given, keep=torch.tensor(mask) != 0, activation="softmax").lt(0).all()


@pytest.mark.parametrize("tokens", [1, 2, 3], ids=lambda tokens: f"tile of {tokens}")
def test_of_equal_maxima_the_first_token_gets_the_gradient(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, tokens, 2)
    states = torch.ones(1, 3, 2, requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    output = lexical_max(states, weight, None, torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), "softmax")
    output[0, 0].backward()
    assert states.grad[0, 0].abs().sum() > 0
    assert states.grad[0, 1:].eq(0).all()


def test_nan_is_not_hidden() -> None:
    given = inputs()
    given["states"][0, 1] = float("nan")
    keep = torch.ones(3, 5, dtype=torch.bool)
    assert lexical_max(**given, keep=keep, activation="softmax")[0].isnan().all()
    given["weight"].requires_grad_()
    assert lexical_max(**given, keep=keep, activation="softmax")[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_ends_in_float32(dtype: torch.dtype) -> None:
    given = {name: tensor.requires_grad_() for name, tensor in inputs(dtype=dtype).items()}
    given["term_weights"] = given["term_weights"].detach().float().requires_grad_()
    keep = torch.tensor(MASKS["right padding"]) != 0
    output = lexical_max(**given, keep=keep, activation="softmax")
    assert output.dtype == torch.float32
    exact = plain({name: tensor.float() for name, tensor in given.items()}, keep, "softmax")
    torch.testing.assert_close(output, exact, rtol=0.05, atol=0.01)
    weights = torch.randn(3, 11, generator=torch.Generator().manual_seed(1))
    (output * weights).sum().backward()
    assert all(tensor.grad.dtype == tensor.dtype for tensor in given.values())
    leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    (plain(leaves, keep, "softmax") * weights).sum().backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(given[name].grad.double(), leaf.grad, rtol=0.1, atol=0.02)


def test_autocast_takes_the_product_in_half_and_keeps_gradients() -> None:
    given = {name: tensor.requires_grad_() for name, tensor in inputs().items()}
    keep = torch.tensor(MASKS["right padding"]) != 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = lexical_max(**given, keep=keep, activation="softmax")
    exact = lexical_max(**given, keep=keep, activation="softmax")
    assert output.dtype == torch.float32
    assert not torch.equal(output, exact)
    torch.testing.assert_close(output, exact, rtol=0.05, atol=0.01)
    output.sum().backward()
    assert given["weight"].grad.dtype == torch.float32
    assert given["weight"].grad.abs().sum() > 0


def features(mask: list[list[int]], vocabulary: int = 11, **more: Any) -> dict[str, Any]:
    given = inputs(vocabulary)
    return {
        "token_embeddings": given["states"],
        "mlm_states": given["states"],
        "decoder_weight": given["weight"],
        "decoder_bias": given["bias"],
        "attention_mask": torch.tensor(mask),
        "input_ids": torch.arange(15).view(3, 5) % vocabulary,
        **more,
    }


@pytest.mark.parametrize("term_weight", ["abs", "identity", "none"])
@pytest.mark.parametrize("excluded", ["cls", "special"])
@pytest.mark.parametrize("mask", MASKS)
def test_module_equals_the_reference(term_weight: str, excluded: str, mask: str) -> None:
    torch.manual_seed(0)
    module = MLMLexicalPooling(4, term_weight=term_weight, excluded_tokens=excluded)
    if term_weight != "none":
        torch.nn.init.normal_(module.linear.weight)
    given = features(MASKS[mask])
    logits = F.linear(given["mlm_states"].double(), given["decoder_weight"].double(), given["decoder_bias"].double())
    output = module(dict(given))
    assert not {"mlm_states", "decoder_weight", "decoder_bias"} & set(output)
    for text in range(3):
        weights = [
            1.0
            if term_weight == "none"
            else reference.term_weight(
                state.tolist(), module.linear.weight[0].tolist(), module.linear.bias.item(), term_weight
            )
            for state in given["token_embeddings"][text]
        ]
        takes_part = reference.tokens_that_take_part(MASKS[mask][text], excluded)
        expected = reference.lexical_weights(logits[text].tolist(), weights, takes_part)
        torch.testing.assert_close(output["lexical_weights"][text], torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "length", [3, torch.tensor([3]), torch.tensor([3, 3, 3])], ids=["int", "tensor of 1", "tensor of B"]
)
@pytest.mark.parametrize("mask", ["right padding", "left padding"])
def test_prompt_tokens_stay_out_of_the_maximum(length: Any, mask: str) -> None:
    module = MLMLexicalPooling(4, term_weight="none")
    given = features(MASKS[mask], prompt_length=length)
    takes_part = module.participating(given)
    expected = [reference.tokens_that_take_part(row, "cls", prompt_length=3) for row in MASKS[mask]]
    assert takes_part.tolist() == expected
    assert module(dict(given))["lexical_weights"][2].eq(0).all()  # two tokens, both of the prompt
    everything = MLMLexicalPooling(4, term_weight="none", include_prompt=True).participating(given)
    assert everything.tolist() == [reference.tokens_that_take_part(row, "cls") for row in MASKS[mask]]


def test_special_excludes_as_many_tokens_as_the_tokenizer_appends() -> None:
    module = MLMLexicalPooling(4, excluded_tokens="special")
    given = features([[1, 1, 1, 1, 1]] * 3)
    for appended in (0, 1, 2):
        expected = reference.tokens_that_take_part([1] * 5, "special", appended=appended)
        assert module.participating(given | {"suffix_length": appended})[0].tolist() == expected


def test_term_weight_starts_near_one() -> None:
    torch.manual_seed(0)
    module = MLMLexicalPooling(768)
    assert module.linear.bias.item() == 1.0
    assert module.linear.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("mask", ["right padding", "left padding"])
def test_token_pooling_holds_the_weight_of_each_own_token(mask: str) -> None:
    module = TokenLexicalPooling(1, 6, term_weight="identity")
    torch.nn.init.ones_(module.linear.weight)
    torch.nn.init.zeros_(module.linear.bias)
    given = {
        "token_embeddings": torch.tensor([[9.0, 3.0, -2.0, 5.0, 1.0]] * 3).unsqueeze(-1),
        "input_ids": torch.tensor([[0, 4, 2, 4, 3]] * 3),
        "attention_mask": torch.tensor(MASKS[mask]),
    }
    # Token 0 is [CLS] where nothing is padded. By hand: id 4 occurs twice, 3.0 and 5.0.
    expected = {
        "right padding": [[0, 0, -2.0, 1.0, 5.0, 0], [0, 0, -2.0, 0, 3.0, 0], [0, 0, 0, 0, 3.0, 0]],
        "left padding": [[0, 0, -2.0, 1.0, 5.0, 0], [0, 0, 0, 1.0, 5.0, 0], [0, 0, 0, 1.0, 0, 0]],
    }
    output = module(given)["lexical_weights"]
    assert output.tolist() == expected[mask]
    output.sum().backward()
    assert module.linear.weight.grad.isfinite().all()
    assert module.linear.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "arguments", [{"term_weight": "relu"}, {"activation": "gelu"}, {"excluded_tokens": "sep"}, {"hidden_size": 0}]
)
def test_an_option_out_of_range_is_named_with_the_choices(arguments: dict[str, Any]) -> None:
    (name, value), *_ = arguments.items()
    with pytest.raises(ValueError, match=rf"MLMLexicalPooling: {name} must be .*{value}"):
        MLMLexicalPooling(**{"hidden_size": 4, **arguments})


def test_flattened_batches_are_refused() -> None:
    given = features(MASKS["right padding"], cu_seq_lens_q=torch.tensor([0, 5, 8, 10]))
    with pytest.raises(ValueError, match="unpad_inputs=False"):
        MLMLexicalPooling(4)(given)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the most elements that any operation returned, in the forward and in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_array_of_texts_times_tokens_times_vocabulary_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, tokens, vocabulary, tile = 24, 512, 1000, 64
    monkeypatch.setattr(package_modules, "_TILE_BYTES", tile * 4 * vocabulary)
    states = torch.randn(texts, tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    keep = torch.ones(texts, tokens, dtype=torch.bool)
    with LargestTensor() as largest:
        output = lexical_max(states, weight, None, torch.ones(texts, tokens), keep, "softmax")
        output.sum().backward()
    assert weight.grad.abs().sum() > 0
    assert largest.elements <= max(texts * vocabulary, texts * tokens * 4, tile * vocabulary)
    assert largest.elements < texts * tokens * vocabulary / 100
