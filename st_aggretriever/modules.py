"""Aggretriever as sentence-transformers modules, in pipeline order.

Lin, Li, Lin: *Aggretriever: A Simple Approach to Aggregate Textual Representations for Robust Dense Passage
Retrieval*, TACL 2023, arXiv:2208.00511: "the paper" below.

    SentenceTransformer(modules=[MLMEncoder, MLMLexicalPooling, SliceMaxAgg, CLSProjection, Concat])

Symbols: B texts in the batch, L tokens of the longest, V vocabulary (rows of the MLM decoder), H hidden size, E input
size of the decoder (H except in ALBERT and ELECTRA), D lexical dimension, C dimension of the [CLS] part.

A saved model carries this one file as ``st_aggretriever.py`` beside its weights, so that it loads where the package
is not installed. It therefore imports nothing but the standard library, torch, transformers, safetensors and
sentence_transformers.
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoModel, AutoModelForMaskedLM
from transformers.utils import logging as transformers_logging

__version__ = "0.1.0"

_FIRST_SUPPORTED, _FIRST_UNSUPPORTED = (6, 2), (7, 0)
if not _FIRST_SUPPORTED <= tuple(int(n) for n in sentence_transformers.__version__.split(".")[:2]) < _FIRST_UNSUPPORTED:
    raise ImportError(
        f"st_aggretriever {__version__} needs sentence-transformers >=6.2,<7, but "
        f'{sentence_transformers.__version__} is installed: pip install "sentence-transformers>=6.2,<7".'
    )

from sentence_transformers.base.modules import Module, Transformer  # noqa: E402

# Where each architecture keeps its MLM head: the steps from the last hidden state to the decoder's input, and the
# decoder. Written out because attribute order misleads (DistilBERT registers `activation` before `vocab_transform`).
# "gelu" is the function; every other step is a submodule.
_MLM_HEADS: dict[str, tuple[tuple[str, ...], str]] = {
    "bert": (("cls.predictions.transform",), "cls.predictions.decoder"),
    "nomic_bert": (("cls.predictions.transform",), "cls.predictions.decoder"),
    "deberta-v2": (("cls.predictions.transform",), "cls.predictions.decoder"),
    "distilbert": (("vocab_transform", "activation", "vocab_layer_norm"), "vocab_projector"),
    "roberta": (("lm_head.dense", "gelu", "lm_head.layer_norm"), "lm_head.decoder"),
    "xlm-roberta": (("lm_head.dense", "gelu", "lm_head.layer_norm"), "lm_head.decoder"),
    "camembert": (("lm_head.dense", "gelu", "lm_head.layer_norm"), "lm_head.decoder"),
    "mpnet": (("lm_head.dense", "gelu", "lm_head.layer_norm"), "lm_head.decoder"),
    "electra": (("generator_predictions",), "generator_lm_head"),
    "albert": (("predictions.dense", "predictions.activation", "predictions.LayerNorm"), "predictions.decoder"),
    "modernbert": (("head",), "decoder"),
    "eurobert": ((), "lm_head"),
}

# One tile of vocabulary logits in float32. On a CPU small enough that the allocator hands the same pages out again:
# fresh ones cost as much as the passes over them. 16 MiB are 137 tokens at V = 30,522. On an accelerator (not measured
# here) a tile should be worth the launch of its kernels.
_TILE_BYTES = 16 * 2**20
_ACCELERATOR_TILE_BYTES = 256 * 2**20
# The least tokens in a tile of the forward pass, whatever V: with fewer, reading the decoder is what takes the time.
_TILE_TOKENS = 64
# About how many tokens the backward pass takes together: with more, the copies for its products grow, with fewer, it
# reads the decoder more often.
_GROUP_TOKENS = 2048

# oneDNN's float32 product on x86: on an AMD CPU (Zen 5, one thread) torch.mm, by MKL, reaches 65 to 105 GFLOP/s, oneDNN
# 160 to 230. torch has it as an operator for its compiler only: where it is missing, torch.mm serves.
_ONEDNN_LINEAR = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    else None
)


# How the vocabulary product may be computed at inference.
QUANTIZE = ("none", "int8", "bf16")

# What a saved model says of itself: its vectors of these texts, of which the last is longer than 128 tokens.
CHECK_FILE = "check.json"
CHECK_FORMAT = "st_aggretriever check, 1"
CHECK_TEXTS = (
    "who sails a ship?",
    "Bread needs flour, water and salt; the heat of the oven does the rest.",
    " ".join(f"On day {day} the crew sailed {day} miles, ate bread and watched the moon." for day in range(1, 13)),
)


class MLMEncoder(Transformer):
    """Encode texts, and hand on what the masked-language-model head needs.

    With ``head=True`` the model is an ``AutoModelForMaskedLM`` of which :meth:`forward` runs the encoder and the small
    transform of the head. The product with the vocabulary is left to :class:`MLMLexicalPooling`, which gets the
    decoder's weight and bias as features: so the matrix stays where transformers keeps (and ties) it. With
    ``head=False`` it is an ``AutoModel`` without pooler. Either way the saved folder is an ordinary checkpoint.

    Args:
        model_name_or_path: Folder or Hub id of a pretrained (masked language) model.
        head: Whether to load and use the MLM head.
        **kwargs: As :class:`sentence_transformers.base.modules.Transformer`, for instance ``query_length`` and
            ``document_length`` (tokens with the special ones; cut at what the positions allow), ``model_kwargs``.

    Features in: ``input_ids`` and ``attention_mask`` (B, L). Features out: ``token_embeddings`` (B, L, H),
    ``suffix_length`` (special tokens that the tokenizer appends), and with a head ``mlm_states`` (B, L, E),
    ``decoder_weight`` (V, E), ``decoder_bias`` (V) or None.

    Raises:
        ValueError: The checkpoint has no pretrained MLM head where one is needed, lacks other weights, or a backend
            other than torch is asked for.
    """

    config_keys: list[str] = [*Transformer.config_keys, "head"]

    def __init__(self, model_name_or_path: str, *, head: bool = True, **kwargs: Any) -> None:
        kwargs["transformer_task"] = "fill-mask" if head else "feature-extraction"
        kwargs["modality_config"] = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
        kwargs["module_output_name"] = "token_embeddings"
        if kwargs.get("unpad_inputs") is None:
            kwargs["unpad_inputs"] = False  # Flattened batches come without the attention mask that pooling needs.
        super().__init__(model_name_or_path, **kwargs)
        self.head = head
        if head:
            _mlm_head(self.model)
        self._check_tokenizer(model_name_or_path)
        limit = self._usable_positions()
        if limit is not None:
            tokenizer: Any = self.tokenizer
            tokenizer.model_max_length = min(tokenizer.model_max_length, limit)
            self.query_length = None if self.query_length is None else min(self.query_length, limit)
            self.document_length = None if self.document_length is None else min(self.document_length, limit)
        self.prefix_length, self.suffix_length = self._special_tokens_around()

    def _load_model(
        self,
        model_name_or_path: str,
        transformer_task: Any,
        config: Any,
        backend: str,
        is_peft_model: bool,
        **model_kwargs: Any,
    ) -> Any:
        if backend != "torch":
            raise ValueError(
                f"MLMEncoder: backend must be 'torch', got {backend!r}. That backend would replace the encoder by one "
                "without hidden states or MLM head and return wrong vectors."
            )
        if is_peft_model:
            model_kwargs.pop("revision", None)  # It names a version of the adapter, not of the base model.
        if transformer_task == "fill-mask":
            return _from_pretrained(AutoModelForMaskedLM, model_name_or_path, config, model_kwargs)
        model_class: Any = MODEL_MAPPING.get(type(config), None)
        if model_class is not None and "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
            model_kwargs["add_pooling_layer"] = False
        return _from_pretrained(AutoModel, model_name_or_path, config, model_kwargs)

    def _get_prompt_length(self, prompt: str, **kwargs: Any) -> int | None:
        # Byte-level tokenizers take a blank into the word behind it: alone at the end of the prompt it is a token that
        # isn't there before a text, whose first word would count as prompt.
        return super()._get_prompt_length(prompt.rstrip(" "), **kwargs)

    def _usable_positions(self) -> int | None:
        """Tokens that the position table can take: the RoBERTa family loses its padding index and what is below."""
        for name, module in _unwrapped(self.model).base_model.named_modules():
            if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
                return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    def _check_tokenizer(self, name: str) -> None:
        """Refuse a tokenizer without words (transformers make one where a folder has none) or with ids too high."""
        tokenizer: Any = self.tokenizer
        entries, special = len(tokenizer), len(set(tokenizer.all_special_ids))
        rows = _unwrapped(self.model).get_input_embeddings().weight.shape[0]
        if entries <= special:
            raise ValueError(
                f"MLMEncoder: {name!r} has no tokenizer with words in it ({entries} entries, all special); copy the "
                "tokenizer of its backbone into the folder."
            )
        if entries > rows > 0:
            raise ValueError(
                f"MLMEncoder: the tokenizer of {name!r} has {entries} entries, but the model embeds only {rows}; use "
                "the model's own tokenizer, or call resize_token_embeddings, save and train."
            )

    def _special_tokens_around(self) -> tuple[int, int]:
        """How many special tokens the tokenizer puts before and after a text."""
        tokenizer: Any = self.tokenizer
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer("a")["input_ids"]
        for before in range(len(whole) - len(plain) + 1):
            if whole[before : before + len(plain)] == plain:
                return before, len(whole) - before - len(plain)
        return 0, 0

    @property
    def max_seq_length(self) -> int | None:
        """Longest text in tokens. Setting it sets ``document_length`` too and lowers ``query_length`` to it, so that
        ``encode`` and ``encode_document`` keep giving the same vector; it is cut at what the positions allow."""
        tokenizer: Any = self.tokenizer
        return tokenizer.model_max_length

    @max_seq_length.setter
    def max_seq_length(self, value: int | None) -> None:
        tokenizer: Any = self.tokenizer
        lengths = [length for length in (value, self._usable_positions()) if length is not None]
        length = min(lengths) if lengths else tokenizer.model_max_length
        tokenizer.model_max_length = length
        self.document_length = length
        self.query_length = None if self.query_length is None else min(self.query_length, length)

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, processing_kwargs: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Tokenize; a lone surrogate in a text, which tokenizers refuse, becomes U+FFFD."""
        texts = [_valid_unicode(text) if isinstance(text, str) else text for text in inputs]
        return super().preprocess(texts, prompt=prompt, processing_kwargs=processing_kwargs, **kwargs)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        base = _unwrapped(self.model).base_model
        _refuse_sharded(base.get_input_embeddings().weight)
        accepted = inspect.signature(base.forward).parameters
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs: dict[str, Tensor] = {key: features[key] for key in names if key in features and key in accepted}
        if "position_ids" in accepted and not self._positions_from_ids():
            real = _real_tokens(features)
            column = torch.arange(real.shape[1], device=real.device)
            # Counted from the first real token: under left padding the tables would otherwise see shifted positions.
            inputs["position_ids"] = (column - real.int().argmax(1, keepdim=True)).clamp(min=0)  # (B, L)
        hidden = base(**inputs, return_dict=True).last_hidden_state  # (B, L, H)
        features["token_embeddings"] = hidden
        features["suffix_length"] = self.suffix_length
        if self.head:
            transform, decoder = _mlm_head(self.model)
            for step in transform:
                hidden = step(hidden)
            _refuse_sharded(decoder.weight)
            features["mlm_states"] = hidden  # (B, L, E)
            features["decoder_weight"] = decoder.weight  # (V, E)
            features["decoder_bias"] = decoder.bias  # (V)
        return features

    def _positions_from_ids(self) -> bool:
        """Whether the model numbers positions itself, from its padding index on (the RoBERTa family)."""
        return any(
            name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
            for name, module in _unwrapped(self.model).base_model.named_modules()
        )

    def vocab_size(self) -> int:
        """V: rows of the decoder, or of the word embeddings where there is no head."""
        if self.head:
            return _mlm_head(self.model)[1].weight.shape[0]
        embeddings: Any = self.model.get_input_embeddings()
        return embeddings.weight.shape[0]

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        super().save(output_path, *args, **kwargs)
        # With this file beside its weights the model loads where the package is not installed.
        Path(output_path, "st_aggretriever.py").write_bytes(Path(__file__).read_bytes())
        Path(output_path, CHECK_FILE).unlink(missing_ok=True)  # another model's
        _saving.modules = [self]


def _from_pretrained(auto_class: Any, path: str, config: Any, model_kwargs: dict[str, Any]) -> nn.Module:
    """Load a checkpoint, and refuse one whose weights would be random in part (transformers only warn)."""
    with_head = auto_class is AutoModelForMaskedLM
    instead = (
        " pooling='tokens', 'cls', 'mean' and 'mean+cls' need no MLM head and take any encoder." if with_head else ""
    )
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # Its report of weights left out or missing is said better below.
    try:
        model, info = auto_class.from_pretrained(path, config=config, output_loading_info=True, **model_kwargs)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        kind = "masked language model" if with_head else "encoder"
        raise ValueError(f"MLMEncoder: {path!r} ({config.model_type}) is not a {kind}.{instead}") from None
    except SafetensorError as error:
        raise _unreadable(path, error) from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    if any(key.startswith("tok_proj.") for key in info["unexpected_keys"]):
        instead = " It is a published Aggretriever: load it with st_aggretriever.load_aggretriever, which converts it."
    missing = sorted(info["missing_keys"] | {key for key, *_ in info["mismatched_keys"]})
    if missing:
        found = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        what = "a pretrained masked-language-model head and encoder" if with_head else "a whole encoder"
        raise ValueError(
            f"MLMEncoder: {path!r} ({config.model_type}) must hold {what}, but these weights are missing and would "
            f"be random: {found}.{instead}"
        )
    return model


def _unreadable(path: str, error: SafetensorError) -> ValueError:
    return ValueError(
        f"st_aggretriever: the weights (model.safetensors) in {path!r} can't be read: {error}. The file is cut short "
        "or a git-LFS pointer; fetch it again."
    )


def _mlm_head(model: Any) -> tuple[list[Callable[[Tensor], Tensor]], nn.Linear]:
    """The steps of a model's MLM head before the decoder, and the decoder (V rows, E columns)."""
    model = _unwrapped(model)
    kind = model.config.model_type
    if kind not in _MLM_HEADS or (kind == "deberta-v2" and not model.config.legacy):
        raise ValueError(
            f"MLMEncoder: no known MLM head for model_type {kind!r}"
            f"{' without legacy=True' if kind == 'deberta-v2' else ''}; known are {', '.join(sorted(_MLM_HEADS))}. "
            "pooling='tokens', 'cls', 'mean' and 'mean+cls' need no MLM head and take any encoder."
        )
    steps, decoder_path = _MLM_HEADS[kind]
    decoder = model.get_submodule(decoder_path)
    if not isinstance(decoder, nn.Linear):
        raise ValueError(
            f"MLMEncoder: the decoder {decoder_path!r} must be a torch.nn.Linear, got "
            f"{type(decoder).__module__}.{type(decoder).__name__}; its "
            "weight is read directly, so keep adapters and quantizers off it."
        )
    return [F.gelu if step == "gelu" else model.get_submodule(step) for step in steps], decoder


def _unwrapped(model: Any) -> Any:
    """The transformers model, also inside peft's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _refuse_sharded(weight: Tensor) -> None:
    """The base model and the decoder run outside the module that FSDP or DeepSpeed stage 3 gathers weights for."""
    if weight.dim() != 2 or weight.numel() == 0 or hasattr(weight, "ds_id") or hasattr(weight, "full_tensor"):
        raise RuntimeError(
            "MLMEncoder: the model's weights are sharded (FSDP or DeepSpeed stage 3), but encoder and decoder are read "
            "as a whole outside the sharded module; use DDP, DeepSpeed stage 1 or 2, or fully_shard each encoder layer "
            "and then the whole SentenceTransformer."
        )


def _valid_unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Which tokens take part


def _real_tokens(features: dict[str, Any]) -> Tensor:
    """(B, L) bool: tokens that are not padding."""
    if "cu_seq_lens_q" in features:
        raise ValueError("st_aggretriever: flattened batches carry no attention mask; set unpad_inputs=False.")
    mask = features.get("attention_mask")
    return torch.ones_like(features["token_embeddings"][..., 0], dtype=torch.bool) if mask is None else mask != 0


def _cls_token(features: dict[str, Any]) -> Tensor:
    """(B, H): the hidden state of the first real token, wherever the padding is."""
    hidden = features["token_embeddings"]
    first = _real_tokens(features).int().argmax(1)  # (B)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), first]  # len() would be a constant in a trace


def _token_mask(features: dict[str, Any], *, cls: bool, suffix: bool, prompt: bool) -> Tensor:
    """(B, L) bool: real tokens, without [CLS], the appended special tokens or the prompt where these are False.

    All by position: a literal "[SEP]" inside a text is text.
    """
    real = _real_tokens(features)
    column = torch.arange(real.shape[1], device=real.device)  # (L)
    first = real.int().argmax(1, keepdim=True)  # (B, 1)
    is_cls = column == first
    keep = real
    if not cls:
        keep = keep & ~is_cls
    if not suffix:
        last = real.shape[1] - 1 - real.flip(1).int().argmax(1, keepdim=True)  # (B, 1)
        keep = keep & (column <= last - features.get("suffix_length", 1))
    if not prompt and features.get("prompt_length") is not None:
        # An int, or a tensor of one entry or one for each text; it counts [CLS] and the prompt's tokens.
        length = torch.as_tensor(features["prompt_length"], device=real.device).reshape(-1, 1)
        keep = keep & ((column >= first + length) | is_cls)
    return keep


# ---------------------------------------------------------------------------------------------------------------------
# Modules after the encoder


class _HeadModule(Module):
    """Saving, loading and the float32 linear layer that the modules below share."""

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        self.save_config(output_path)
        if self.state_dict():
            self.save_torch_weights(output_path, safe_serialization=safe_serialization)
        _saving.modules.append(self)

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        init_defaults: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        where: dict[str, Any] = {
            "subfolder": subfolder,
            "token": token,
            "cache_folder": cache_folder,
            "revision": revision,
            "local_files_only": local_files_only,
        }
        config = cls.load_config(model_name_or_path, **where)
        unknown = sorted(set(config) - set(cls.config_keys))
        if unknown:
            raise ValueError(
                f"{cls.__name__}: unknown setting {', '.join(unknown)} in {model_name_or_path!r} ({subfolder}); known "
                f"are {', '.join(cls.config_keys)}. A newer st_aggretriever than {__version__} may have written it."
            )
        module = cls(**config)
        if module.state_dict():
            try:
                weights: Any = cls.load_torch_weights(model_name_or_path, **where)
            except SafetensorError as error:
                raise _unreadable(f"{model_name_or_path}/{subfolder}", error) from None
            dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
            module.load_state_dict(weights)
            return module.to(dtype=dtypes.pop()) if dtypes else module
        return module


def _float32_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """``layer(x)`` in float32 (or float64), also for half-precision weights and under autocast.

    Half precision would round scores into ties; these layers are too small for its speed to matter.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(dtype), layer.weight.to(dtype), bias)


def _choice(owner: str, name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _positive(owner: str, name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{owner}: {name} must be a whole number of at least 1, got {value!r}.")


class _LexicalPooling(_HeadModule):
    """The term weight ``w_i`` and the tokens that take part, for both ways to fill the bag of words."""

    def __init__(self, hidden_size: int, term_weight: str, excluded_tokens: str, include_prompt: bool) -> None:
        super().__init__()
        name = type(self).__name__
        _positive(name, "hidden_size", hidden_size)
        _choice(name, "term_weight", term_weight, ("abs", "identity", "none"))
        _choice(name, "excluded_tokens", excluded_tokens, ("cls", "special", "none"))
        self.hidden_size = hidden_size
        self.term_weight = term_weight
        self.excluded_tokens = excluded_tokens
        self.include_prompt = include_prompt
        if term_weight != "none":
            self.linear = nn.Linear(hidden_size, 1)
            # Near 1 at the start, so that training begins from the head's own probabilities; the published start is
            # unknown.
            nn.init.normal_(self.linear.weight, std=0.02)
            nn.init.ones_(self.linear.bias)

    def participating(self, features: dict[str, Any]) -> Tensor:
        """(B, L) bool: the tokens over which the maximum runs."""
        return _token_mask(
            features,
            cls=self.excluded_tokens == "none",
            suffix=self.excluded_tokens != "special",
            prompt=bool(self.include_prompt),
        )

    def term_weights(self, hidden: Tensor) -> Tensor:
        """``w = abs(e . W + b)`` of each token: (T, H) to (T), in float32."""
        if self.term_weight == "none":
            return hidden.new_ones(hidden.shape[:1], dtype=torch.promote_types(hidden.dtype, torch.float32))
        weights = _float32_linear(self.linear, hidden).squeeze(-1)
        return weights.abs() if self.term_weight == "abs" else weights


class MLMLexicalPooling(_LexicalPooling):
    """Max-pool each token's weighted distribution over the vocabulary into one bag of words (the paper's lexical part).

    ``p_i = softmax(decoder(transform(e_i)))``, ``w_i = |e_i . W + b|``, ``lexical_weights[t] = max_i w_i p_i[t]``.
    Logits exist for one tile of tokens at a time, in the forward and (computed again) in the backward pass. Everything
    after the decoder's product is float32. A text without a token that takes part gets zeros.

    Args:
        hidden_size: H.
        term_weight: ``"abs"`` (the paper), ``"identity"`` (the published checkpoints, trained without the absolute
            value) or ``"none"`` (w = 1, no parameters).
        activation: ``"softmax"`` (the paper) or ``"log1p_relu"``, ``log(1 + relu(logit))`` as in SPLADE heads.
        excluded_tokens: ``"cls"`` leaves out the first real token; ``"special"`` also what the tokenizer appends;
            ``"none"`` leaves out nothing, as SPLADE does.
        include_prompt: Whether the tokens of a prompt take part.
        quantize: ``"int8"`` (CPU) or ``"bf16"`` for a faster vocabulary product at inference; see
            :func:`quantised_lexical_max`. It may be changed at any time and is saved with the model; the weights stay
            as they are, and a copy in fewer bits is made at the first text.

    Features in: ``token_embeddings`` (B, L, H), ``mlm_states`` (B, L, E), ``decoder_weight`` (V, E), ``decoder_bias``
    (V) or None, ``attention_mask`` (B, L); the ``mlm_states`` and ``decoder_*`` are removed. Features out:
    ``lexical_weights`` (B, V), float32; with ``quantize`` also ``exact_weights``, for :class:`SliceMaxAgg`.
    """

    config_keys: list[str] = [
        "hidden_size",
        "term_weight",
        "activation",
        "excluded_tokens",
        "include_prompt",
        "quantize",
    ]

    def __init__(
        self,
        hidden_size: int,
        *,
        term_weight: str = "abs",
        activation: str = "softmax",
        excluded_tokens: str = "cls",
        include_prompt: bool = False,
        quantize: str = "none",
    ) -> None:
        super().__init__(hidden_size, term_weight, excluded_tokens, include_prompt)
        _choice("MLMLexicalPooling", "activation", activation, ("softmax", "log1p_relu"))
        _choice("MLMLexicalPooling", "quantize", quantize, QUANTIZE)
        self.activation = activation
        self.quantize = quantize
        self._quantised: _QuantisedDecoder | None = None

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if "mlm_states" not in features:
            raise ValueError("MLMLexicalPooling needs 'mlm_states': put it behind an MLMEncoder with head=True.")
        states, weight, bias = (features.pop(name) for name in ("mlm_states", "decoder_weight", "decoder_bias"))
        hidden = features["token_embeddings"]
        term_weights = self.term_weights(hidden.flatten(0, 1)).view(hidden.shape[:2])  # (B, L)
        keep = self.participating(features)
        if self.quantize == "none":
            features["lexical_weights"] = lexical_max(states, weight, bias, term_weights, keep, self.activation)
            return features
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (states, weight, term_weights)):
            raise ValueError(
                f"MLMLexicalPooling: a head with quantize={self.quantize!r} has no gradient. Set the module's quantize "
                "to 'none' to train, or encode under torch.no_grad()."
            )
        if self._quantised is None or not self._quantised.is_of(weight, bias, self.quantize):
            self._quantised = _QuantisedDecoder(weight, bias, self.quantize)
        features["lexical_weights"], features["exact_weights"] = quantised_lexical_max(
            states, self._quantised, term_weights, keep, self.activation
        )
        return features

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_quantised": None}  # made anew where it is needed


class TokenLexicalPooling(_LexicalPooling):
    """A bag of the text's own words, without MLM head: ``lexical_weights[t] = max w_i over tokens i with id t``.

    Ids that do not occur weigh 0. The paper's ablation without MLM head: no vocabulary product at all.

    Args:
        hidden_size: H.
        vocab_size: V.
        term_weight, excluded_tokens, include_prompt: As in :class:`MLMLexicalPooling`.

    Features in: ``input_ids``, ``attention_mask`` (B, L), ``token_embeddings`` (B, L, H). Features out:
    ``lexical_weights`` (B, V), float32.
    """

    config_keys: list[str] = ["hidden_size", "vocab_size", "term_weight", "excluded_tokens", "include_prompt"]

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        term_weight: str = "abs",
        excluded_tokens: str = "cls",
        include_prompt: bool = False,
    ) -> None:
        super().__init__(hidden_size, term_weight, excluded_tokens, include_prompt)
        _positive("TokenLexicalPooling", "vocab_size", vocab_size)
        self.vocab_size = vocab_size

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        hidden = features["token_embeddings"]
        weights = self.term_weights(hidden.flatten(0, 1)).view(hidden.shape[:2])  # (B, L)
        weights = weights.masked_fill(~self.participating(features), -torch.inf)
        absent = weights.new_full((weights.shape[0], self.vocab_size), -torch.inf)
        present = absent.scatter_reduce(1, features["input_ids"], weights, "amax")  # (B, V)
        features["lexical_weights"] = present.masked_fill(present == -torch.inf, 0.0)
        return features


class SliceMaxAgg(_HeadModule):
    """Fold a bag of words into D dimensions by slice max pooling (the paper's agg* and agg+).

    agg*, ``"signed"``: slice n has two halves; ``a`` and ``b`` are their maxima, and dimension n is ``a`` if a > b,
    else ``-b``. agg+, ``"positive"``: the maximum of the slice.

    Args:
        vocab_size: V.
        lexical_dim: D.
        aggregation: ``"signed"`` (agg*), ``"positive"`` (agg+), ``"mean"`` (mean of the slice), ``"linear"`` (a learned
            V x D matrix without bias) or ``"none"`` (all V weights).
        slicing: ``"strided"`` (the published rule): with m = 2D (agg*) or D, id t goes by ``t mod m`` to slice
            ``(t mod 2D) // 2``, half ``t mod 2``, or to slice ``t mod D``. ``"random"`` (the paper's wording): the same
            after a seeded permutation of the ids, which is stored with the model.
        remainder: ``"pad"`` keeps every id; ``"drop"`` (published) drops the first ``V mod m`` ids where these are at
            most 1,000.
        seed: Of the permutation.

    Features in: ``lexical_weights`` (B, V). Features out: ``lexical_embedding`` (B, D).

    Raises:
        ValueError: m > V, so that slices would be empty, or an argument out of its range.

    Example:
        >>> agg = SliceMaxAgg(vocab_size=4, lexical_dim=2)
        >>> agg.aggregate(torch.tensor([[3.0, 1.0, 0.0, 2.0]])).tolist()
        [[3.0, -2.0]]
    """

    config_keys: list[str] = ["vocab_size", "lexical_dim", "aggregation", "slicing", "remainder", "seed"]

    def __init__(
        self,
        vocab_size: int,
        lexical_dim: int = 640,
        *,
        aggregation: str = "signed",
        slicing: str = "strided",
        remainder: str = "pad",
        seed: int = 0,
    ) -> None:
        super().__init__()
        _positive("SliceMaxAgg", "vocab_size", vocab_size)
        _positive("SliceMaxAgg", "lexical_dim", lexical_dim)
        _choice("SliceMaxAgg", "aggregation", aggregation, ("signed", "positive", "mean", "linear", "none"))
        _choice("SliceMaxAgg", "slicing", slicing, ("strided", "random"))
        _choice("SliceMaxAgg", "remainder", remainder, ("pad", "drop"))
        self.vocab_size = vocab_size
        self.lexical_dim = vocab_size if aggregation == "none" else lexical_dim
        self.aggregation = aggregation
        self.slicing = slicing
        self.remainder = remainder
        self.seed = seed
        self._width = 2 * lexical_dim if aggregation == "signed" else lexical_dim  # m
        if aggregation in ("signed", "positive", "mean") and self._width > vocab_size:
            half = aggregation == "signed"
            raise ValueError(
                f"SliceMaxAgg: lexical_dim must be at most V{' // 2' if half else ''} = "
                f"{vocab_size // 2 if half else vocab_size}, got {lexical_dim}. Slices would be empty; choose a "
                "smaller lexical_dim."
            )
        # More than 1,000 ids are never dropped: the published rule.
        over = vocab_size % self._width
        self._dropped = over if remainder == "drop" and over <= 1000 else 0
        if aggregation == "linear":
            self.linear = nn.Linear(vocab_size, lexical_dim, bias=False)
        elif slicing == "random" and aggregation != "none":
            order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
            self.register_buffer("permutation", order)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features["lexical_embedding"] = self.aggregate(features["lexical_weights"], features.pop("exact_weights", None))
        return features

    def aggregate(self, lexical_weights: Tensor, exact: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """(B, V) to (B, D), float32.

        Args:
            exact: The weights of given ids, (B, n) to (B, n). Where the ``lexical_weights`` are approximate they then
                only choose the winner of each (half) slice, and the winner's exact weight counts.
        """
        if lexical_weights.shape[-1] != self.vocab_size:
            raise ValueError(
                f"SliceMaxAgg: lexical_weights must have V = {self.vocab_size} columns, got "
                f"{lexical_weights.shape[-1]}; build it with the width of the model's decoder."
            )
        if self.aggregation == "none":
            return lexical_weights
        if self.aggregation == "linear":
            return _float32_linear(self.linear, lexical_weights)
        if self.aggregation == "mean":
            sliced = self._slices(lexical_weights, padding=0.0)
            kept = self.vocab_size - self._dropped
            count = kept // self.lexical_dim + (
                torch.arange(self.lexical_dim, device=sliced.device) < kept % self.lexical_dim
            )
            return sliced.sum(1) / count
        best = self._slices(lexical_weights, padding=-torch.inf).max(1)  # (B, m)
        values = best.values if exact is None else exact(self._ids(best.indices))
        if self.aggregation == "positive":
            return values
        positive, negative = values.unflatten(1, (self.lexical_dim, 2)).unbind(2)
        return torch.where(positive > negative, positive, -negative)

    def _slices(self, lexical_weights: Tensor, padding: float) -> Tensor:
        """(B, V) to (B, ceil(V / m), m): column j holds the ids t with ``t mod m == j``."""
        if self.slicing == "random":
            lexical_weights = lexical_weights[:, self.permutation]
        kept = lexical_weights[:, self._dropped :]
        kept = F.pad(kept, (0, -kept.shape[1] % self._width), value=padding)
        return kept.unflatten(1, (-1, self._width))

    def _ids(self, rows: Tensor) -> Tensor:
        """Ids of the entries of :meth:`_slices` at a row of each column: (B, m) to (B, m)."""
        place = rows * self._width + torch.arange(self._width, device=rows.device) + self._dropped
        return self.permutation[place] if self.slicing == "random" else place

    def get_embedding_dimension(self) -> int:
        return self.lexical_dim


class CLSProjection(_HeadModule):
    """Project the [CLS] state to C dimensions: ``cls_embedding = e_[CLS] . W + b``.

    [CLS] is the first real token by the attention mask.

    Args:
        hidden_size: H.
        cls_dim: C.

    Features in: ``token_embeddings`` (B, L, H), ``attention_mask`` (B, L). Features out: ``cls_embedding`` (B, C),
    float32.
    """

    config_keys: list[str] = ["hidden_size", "cls_dim"]

    def __init__(self, hidden_size: int, cls_dim: int = 128) -> None:
        super().__init__()
        _positive("CLSProjection", "hidden_size", hidden_size)
        _positive("CLSProjection", "cls_dim", cls_dim)
        self.hidden_size = hidden_size
        self.cls_dim = cls_dim
        self.linear = nn.Linear(hidden_size, cls_dim)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features["cls_embedding"] = _float32_linear(self.linear, _cls_token(features))
        return features

    def get_embedding_dimension(self) -> int:
        return self.cls_dim


class MeanProjection(_HeadModule):
    """Project the mean of the token states: the paper's AVERAGE control (RepBERT).

    Args:
        hidden_size: H.
        mean_dim: Width of the projection.
        include_cls: Whether [CLS] is part of the mean.
        include_prompt: Whether the tokens of a prompt are.

    Features in: ``token_embeddings`` (B, L, H), ``attention_mask`` (B, L). Features out: ``mean_embedding``
    (B, mean_dim), float32; of a text without a token that takes part, the projection of zero.
    """

    config_keys: list[str] = ["hidden_size", "mean_dim", "include_cls", "include_prompt"]

    def __init__(
        self, hidden_size: int, mean_dim: int, *, include_cls: bool = True, include_prompt: bool = False
    ) -> None:
        super().__init__()
        _positive("MeanProjection", "hidden_size", hidden_size)
        _positive("MeanProjection", "mean_dim", mean_dim)
        self.hidden_size = hidden_size
        self.mean_dim = mean_dim
        self.include_cls = include_cls
        self.include_prompt = include_prompt
        self.linear = nn.Linear(hidden_size, mean_dim)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        hidden = features["token_embeddings"]
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        keep = _token_mask(features, cls=bool(self.include_cls), suffix=True, prompt=bool(self.include_prompt))
        total = hidden.masked_fill(~keep.unsqueeze(-1), 0.0).sum(1)  # (B, H)
        mean = total / keep.sum(1, keepdim=True).clamp(min=1)
        features["mean_embedding"] = _float32_linear(self.linear, mean)
        return features

    def get_embedding_dimension(self) -> int:
        return self.mean_dim


class Concat(_HeadModule):
    """Put the parts side by side: ``sentence_embedding = [cls_embedding ; lexical_embedding]``.

    Never normalised: the score is the dot product, the sum of the parts' scores.

    Args:
        keys: Features to join, in order.
        dims: Their widths.

    Features in: each key (B, dim). Features out: ``sentence_embedding`` (B, sum of dims), float32.
    """

    config_keys: list[str] = ["keys", "dims"]

    def __init__(self, keys: Sequence[str], dims: Sequence[int]) -> None:
        super().__init__()
        if not keys or len(keys) != len(dims):
            raise ValueError(f"Concat: one width for each of at least one key is needed, got {keys!r} and {dims!r}.")
        for dim in dims:
            _positive("Concat", "each of dims", dim)
        self.keys = list(keys)
        self.dims = list(dims)

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        super().save(output_path, *args, **kwargs)
        modules, _saving.modules = _saving.modules, []
        settings = Path(output_path).with_name("config_sentence_transformers.json")  # written before the modules
        if isinstance(modules[0], MLMEncoder) and settings.is_file():  # or it is saved by itself
            write_check(settings.parent, modules, json.loads(settings.read_text(encoding="utf-8")).get("truncate_dim"))

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        parts = [features[key] for key in self.keys]
        for key, part, dim in zip(self.keys, parts, self.dims, strict=True):
            if part.shape[-1] != dim:
                raise ValueError(f"Concat: {key} must have {dim} columns, got {part.shape[-1]}.")
        joined = torch.cat(parts, dim=-1)
        features["sentence_embedding"] = joined.to(torch.promote_types(joined.dtype, torch.float32))
        return features

    def get_embedding_dimension(self) -> int:
        return sum(self.dims)


# ---------------------------------------------------------------------------------------------------------------------
# What a saved model says of itself


class _Saving(threading.local):
    """The modules that this thread's save_pretrained has saved so far, first to last: no module knows the others."""

    def __init__(self) -> None:
        self.modules: list[Any] = []


_saving = _Saving()


def write_check(root: Path, modules: Sequence[Any], truncate_dim: int | None = None) -> None:
    """Write ``check.json``: the vectors of CHECK_TEXTS, without prompt, by which other programs can be judged."""
    encoder, last = modules[0], modules[-1]
    try:
        vectors = _check_vectors(modules)[:, :truncate_dim]
        if not bool(vectors.isfinite().all()):
            raise ValueError("a vector is not finite")
    except Exception as error:  # sharded weights, a full device: nothing of that may cost a trained model
        logging.getLogger(__name__).warning("no %s is written: %s", CHECK_FILE, error)
        return
    check = {
        "format": CHECK_FORMAT,
        "modules": [type(module).__name__ for module in modules],
        "parts": list(zip(last.keys, last.dims, strict=True)),
        "length": encoder.max_seq_length,
        "dtype": str(next(encoder.parameters()).dtype).removeprefix("torch."),
        "quantize": next((module.quantize for module in modules if hasattr(module, "quantize")), "none"),
        "texts": list(CHECK_TEXTS),
        "vectors": [[float(f"{number:.7g}") for number in vector] for vector in vectors.tolist()],
    }
    (root / CHECK_FILE).write_text(json.dumps(check) + "\n", encoding="utf-8")


def _check_vectors(modules: Sequence[Any]) -> Tensor:
    """(3, dim) float32, each text by itself; the modules are left as they were."""
    training = [(module, module.training) for whole in modules for module in whole.modules()]
    device = next(modules[0].parameters()).device
    vectors = []
    try:
        for module in modules:
            module.eval()
        with torch.no_grad():
            for text in CHECK_TEXTS:
                features = modules[0].preprocess([text])
                features = {key: value.to(device) if isinstance(value, Tensor) else value
                            for key, value in features.items()}  # fmt: skip
                for module in modules:
                    features = module(features)
                vectors.append(features["sentence_embedding"].float().cpu())
    finally:
        for module, mode in training:
            module.training = mode
    return torch.cat(vectors)


# ---------------------------------------------------------------------------------------------------------------------
# The vocabulary product, one tile of logits at a time


@torch.compiler.disable
def lexical_max(
    states: Tensor, weight: Tensor, bias: Tensor | None, term_weights: Tensor, keep: Tensor, activation: str
) -> Tensor:
    """``out[b, t] = max over tokens i of text b with keep[b, i] of w_i f(states_i . weight_t + bias_t)``.

    f is the softmax over t, or ``log(1 + relu(.))``. Only the tokens with ``keep`` are multiplied, and no array of
    B x L x V exists: memory grows with B x V and one tile. Of equal maxima the first token gets the gradient.

    Args:
        states: (B, L, E), the decoder's inputs.
        weight, bias: (V, E) and (V) or None, the decoder.
        term_weights: (B, L), float32.
        keep: (B, L) bool, the tokens that take part.
        activation: ``"softmax"`` or ``"log1p_relu"``.

    Returns:
        (B, V) in float32 (float64 for float64 inputs); zeros for a text without a token that takes part.
    """
    device = states.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = torch.promote_types(states.dtype, weight.dtype)
    counts = keep.sum(1)
    present = counts > 0
    tokens = tuple(counts[present].tolist())
    grad_enabled = torch.is_grad_enabled()  # Inside the function it never is.
    out = _LexicalMax.apply(states[keep].to(dtype), weight, bias, term_weights[keep], tokens, activation, grad_enabled)
    if len(out) < len(keep):
        out = out.new_zeros(len(keep), out.shape[1]).index_put((present,), out)
    return out


class _LexicalMax(torch.autograd.Function):
    """:func:`lexical_max` over the T tokens that take part, text after text; ``counts`` says how many each has, not 0.

    The forward pass goes through tiles of few tokens and the whole vocabulary. For the backward pass it keeps which
    token won each term of each text, and of each token its largest logit m and ``s = 1 / sum over t of exp(logit[t] -
    m)``, so that any logit can be made a probability again, ``p = s exp(logit - m)``.

    The backward pass goes through tiles of many tokens and a few terms, so that a row of the decoder's gradient is
    written once. With g the gradient of ``out``, the logit of term t of token i gets ``w_i g[t] p_i[t]`` if the token
    won the term, less ``c_i p_i[t]`` in any case; ``c_i``, the sum of ``g[t] out[t]`` over the terms that it won, needs
    no logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        term_weights: Tensor,
        counts: tuple[int, ...],
        activation: str,
        grad_enabled: bool,
    ) -> Tensor:
        training = grad_enabled and any(ctx.needs_input_grad)
        decoder, offset = weight.to(states.dtype), None if bias is None else bias.to(states.dtype)
        out = term_weights.new_full((len(counts), len(weight)), -torch.inf)  # (B, V)
        largest, scale = term_weights.new_ones(2, len(states))  # m and s, (T)
        if training:
            first = torch.tensor([0, *accumulate(counts)][:-1], dtype=torch.int32, device=states.device)
            winner = first.unsqueeze(1).repeat(1, len(weight))  # (B, V), indices of tokens
        for tokens, segments in _token_tiles(counts, len(weight), _tile_bytes(states)):
            values = _linear(states[tokens], decoder, offset).to(out.dtype)  # logits, (n, V); then everything in place
            if activation == "softmax":
                largest[tokens] = values.amax(1)
                values.sub_(largest[tokens, None]).exp_()
                scale[tokens] = 1 / values.sum(1)
            else:
                values.relu_().log1p_()
            values.mul_((term_weights[tokens] * scale[tokens]).unsqueeze(1))
            for text, begin, end in segments:
                part = values[begin - tokens.start : end - tokens.start]
                if training:
                    best, row = part.max(0)
                    winner[text] = torch.where(best > out[text], row.int() + begin, winner[text])
                else:
                    best = part.amax(0)
                torch.maximum(out[text], best, out=out[text])
        if training:
            ctx.save_for_backward(states, weight, bias, term_weights, out, winner, largest, scale)
            ctx.counts, ctx.softmax = counts, activation == "softmax"
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, term_weights, out, winner, largest, scale = ctx.saved_tensors
        decoder, offset = weight.to(states.dtype), None if bias is None else bias.to(states.dtype)
        groups = list(_text_groups(ctx.counts))
        widest = max((tokens.stop - tokens.start for _, tokens in groups), default=1)
        # Half a tile, as the products make a copy of it.
        blocks = _slices(len(weight), max(1, _tile_bytes(states) // (8 * widest)))
        taken = torch.zeros_like(term_weights)  # c, (T)
        if ctx.softmax:
            for terms in blocks:
                _add_by_token(taken, winner[:, terms], grad[:, terms] * out[:, terms])
        grad_states = torch.zeros_like(states, dtype=grad.dtype)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if bias is not None else None
        grad_terms = torch.zeros_like(term_weights)
        for terms in blocks:
            rows, row_bias = decoder[terms], None if offset is None else offset[terms]  # (v, E) and (v)
            grad_rows, grad_row_bias = torch.zeros_like(rows, dtype=grad.dtype), grad.new_zeros(len(rows))
            for texts, tokens in groups:
                values = _linear(states[tokens], rows, row_bias).to(grad.dtype)  # logits, (n, v)
                g, won_by = grad[texts, terms], winner[texts, terms]  # (b, v)
                index = won_by.long() - tokens.start
                if ctx.softmax:
                    own = g * out[texts, terms]
                    won = _softmax_gradient(values, index, own, largest[tokens], scale[tokens], taken[tokens])
                else:
                    won = _log1p_relu_gradient(values, index, g * term_weights[tokens][index])
                _add_by_token(grad_terms, won_by, g * won)
                grad_row_bias += values.sum(0)
                values = values.to(states.dtype)
                grad_states[tokens] += _linear(values, rows.T)
                if grad_weight is not None:
                    grad_rows += _linear(values.T, states[tokens].T)
            if grad_weight is not None:
                grad_weight[terms] = grad_rows
            if grad_bias is not None:
                grad_bias[terms] = grad_row_bias
        return grad_states.to(states.dtype), grad_weight, grad_bias, grad_terms, None, None, None


def _softmax_gradient(
    logits: Tensor, index: Tensor, own: Tensor, largest: Tensor, scale: Tensor, taken: Tensor
) -> Tensor:
    """Turn logits (n, v) into their gradient ``own - c p`` in place, ``own`` (b, v) at the winners of ``index`` (b, v).

    Returns the winners' p (b, v).
    """
    logits.sub_(largest.unsqueeze(1)).exp_()  # p / s
    won = logits.gather(0, index) * scale[index]
    logits.mul_(-(taken * scale).unsqueeze(1)).scatter_add_(0, index, own)
    return won


def _log1p_relu_gradient(logits: Tensor, index: Tensor, g: Tensor) -> Tensor:
    """The same for f = log(1 + relu(logit)), g (b, v) the gradient of f: ``df = 1 / (1 + logit) = exp(-f)``, or 0."""
    won = logits.gather(0, index).relu_().log1p_()
    logits.zero_().scatter_(0, index, torch.where(won > 0, g, 0.0) * torch.exp(-won))
    return won


def _add_by_token(total: Tensor, token: Tensor, values: Tensor) -> None:
    """``total[token] += values``. A block is summed before it is added: one long sum would round worse."""
    total += torch.zeros_like(total).index_add_(0, token.flatten(), values.flatten())


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, by oneDNN for float32 on a CPU."""
    if _ONEDNN_LINEAR is not None and torch.backends.mkldnn.enabled and x.is_cpu and x.dtype == torch.float32:
        return _ONEDNN_LINEAR(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _tile_bytes(states: Tensor) -> int:
    return _TILE_BYTES if states.is_cpu else _ACCELERATOR_TILE_BYTES


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _token_tiles(
    counts: Sequence[int], vocabulary: int, tile_bytes: int
) -> Iterator[tuple[slice, list[tuple[int, int, int]]]]:
    """Cut the tokens of all texts into tiles: which tokens, and the texts inside as (text, first token, end)."""
    ends = list(accumulate(counts))
    text = 0
    for tokens in _slices(sum(counts), max(_TILE_TOKENS, tile_bytes // (4 * vocabulary))):
        segments, begin = [], tokens.start
        while begin < tokens.stop:
            end = min(ends[text], tokens.stop)
            segments.append((text, begin, end))
            text += end == ends[text]
            begin = end
        yield tokens, segments


def _text_groups(counts: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Whole texts together, as many as have `_GROUP_TOKENS` tokens, but at least one: which texts, which tokens."""
    first = start = stop = 0
    for text, count in enumerate(counts):
        stop += count
        if text + 1 == len(counts) or stop + counts[text + 1] - start > _GROUP_TOKENS:
            yield slice(first, text + 1), slice(start, stop)
            first, start = text + 1, stop


# ---------------------------------------------------------------------------------------------------------------------
# The vocabulary product in fewer bits, for inference


# oneDNN's product of int8 with rows packed beforehand: half the time of torch._int_mm, which packs them at every call.
# As it serves torch's compiler on x86 only, torch._int_mm stands in for it elsewhere.
_INT8_LINEAR: Any = None
_INT8_PACK: Any = None
if "AVX512" in torch.backends.cpu.get_cpu_capability() and hasattr(torch.ops.onednn, "qlinear_pointwise"):
    _INT8_LINEAR, _INT8_PACK = torch.ops.onednn.qlinear_pointwise, torch.ops.onednn.qlinear_prepack


class _QuantisedDecoder:
    """A decoder (V, E) with a copy of it in int8 or bfloat16, and the logits by either.

    int8: symmetric, with one scale for each row of the decoder and, at each call, one for each token; the product of
    the whole numbers is exact.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, quantize: str) -> None:
        _choice("MLMLexicalPooling", "quantize", quantize, QUANTIZE)
        if quantize == "int8" and not weight.is_cpu:
            raise ValueError(
                f"MLMLexicalPooling: quantize='int8' is for the CPU, but the model is on {weight.device}; there take "
                "quantize='bf16' or 'none'."
            )
        self.weight, self.bias, self.quantize = weight, bias, quantize
        self.version = _version(weight)
        with torch.no_grad():
            if quantize == "bf16":
                self.rows = weight.bfloat16()  # (V, E)
                return
            rows, scale = _to_int8(weight)
            self.rows, self.scale = rows, scale.squeeze(1)  # (V, E), (V)
            self.packed = None if _INT8_PACK is None else _INT8_PACK(rows, None)
            self.zeros = torch.zeros(len(rows), dtype=torch.int32)
            largest = rows.new_full((1, rows.shape[1]), 127)
            if not torch.allclose(self._product(largest), 127 * rows.sum(1) * self.scale, rtol=1e-4):
                raise ValueError(
                    "MLMLexicalPooling: this CPU's int8 product overflows (it has no VNNI), so quantize='int8' would "
                    "give wrong vectors; take quantize='bf16' or 'none'."
                )

    def is_of(self, weight: Tensor, bias: Tensor | None, quantize: str) -> bool:
        """Whether this is still the copy of that decoder."""
        same = self.weight is weight and self.bias is bias and self.quantize == quantize
        return same and self.version == _version(weight)

    def _product(self, whole: Tensor) -> Tensor:
        """Products of (n, E) int8 with all rows, times the rows' scales: (n, V), float32."""
        if self.packed is None:
            return torch._int_mm(whole, self.rows.T) * self.scale
        shifted = (whole.to(torch.int16) + 128).to(torch.uint8)  # oneDNN is fast for unsigned numbers only
        plain: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")  # no bias, no rounding, nothing after it
        return _INT8_LINEAR(shifted, 1.0, 128, self.packed, self.scale, self.zeros, *plain)

    def approximate(self, states: Tensor) -> Tensor:
        """Logits of (n, E) by the copy: (n, V), float32."""
        if self.quantize == "bf16":
            logits = F.linear(states.bfloat16(), self.rows).float()
        else:
            whole, scale = _to_int8(states)
            logits = self._product(whole).mul_(scale)
        return logits if self.bias is None else logits.add_(self.bias)

    def exact(self, states: Tensor, ids: Tensor) -> Tensor:
        """Logits of (n, E) at the terms ``ids`` (K) by the decoder itself: (n, K), float32."""
        bias = None if self.bias is None else self.bias[ids].float()
        return _linear(states, self.weight.index_select(0, ids).float(), bias)

    def approximate_at(self, states: Tensor, ids: Tensor) -> Tensor:
        """What :meth:`approximate` gives at the terms ``ids`` (K): (n, K), float32."""
        rows = self.rows.index_select(0, ids)
        if self.quantize == "bf16":
            logits = F.linear(states.bfloat16(), rows).float()
        else:
            whole, scale = _to_int8(states)
            logits = torch._int_mm(whole, rows.T) * self.scale[ids] * scale
        return logits if self.bias is None else logits.add_(self.bias[ids])


def _version(tensor: Tensor) -> tuple[int, int, float]:
    """Changes when the numbers do: an optimiser's step, other weights loaded, another dtype.

    What is written through ``.data``, as averages of weights often are, isn't counted: a few numbers are looked at.
    """
    flat = tensor.detach().flatten()
    sample = flat[:: max(1, len(flat) // 256)].double()
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, float(sample.sum())


def _to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, and the scale of each row by which they are to be multiplied."""
    rows = rows.float()
    scale = rows.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny * 127) / 127
    return (rows / scale).round_().to(torch.int8), scale


@torch.compiler.disable
@torch.no_grad()
def quantised_lexical_max(
    states: Tensor, decoder: _QuantisedDecoder, term_weights: Tensor, keep: Tensor, activation: str
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """:func:`lexical_max` by logits in fewer bits, and a function that gives the weights of chosen terms.

    The approximate logits a_i choose which terms win, and give each token's log-sum-exp z_i. The logits l_i of the
    winners are then computed from the decoder as it is, and take the place of their approximations in the sum too, so
    that no probability exceeds 1: ``Z_i = 1 + sum over winners of exp(l_i - z_i) - exp(a_i - z_i)``, and a winner
    weighs ``max_i w_i exp(l_i - z_i) / Z_i``. Lost is little but the choice between nearly equal terms. That is for
    slice maxima; the other aggregations take the approximate weights.

    Args:
        states, term_weights, keep, activation: As for :func:`lexical_max`.
        decoder: The decoder with its copy.

    Returns:
        (B, V) float32, and the function from ids (B, K) to (B, K) float32.
    """
    counts = keep.sum(1).tolist()
    states, weights = states[keep].float(), term_weights[keep].float().unsqueeze(1)  # (T, E), (T, 1)
    out = weights.new_full((len(counts), len(decoder.weight)), -torch.inf)  # (B, V)
    shift = torch.zeros_like(weights)  # z, (T, 1)
    values = out[:0]
    with torch.autocast(states.device.type, enabled=False):
        for tokens, segments in _token_tiles(counts, len(decoder.weight), _tile_bytes(states)):
            values = decoder.approximate(states[tokens])  # (n, V)
            if activation == "softmax":
                top = values.amax(1, keepdim=True)
                total = values.sub_(top).exp_().sum(1, keepdim=True)
                shift[tokens] = top + total.log()
                values *= weights[tokens] / total
            else:
                values.relu_().log1p_().mul_(weights[tokens])
            for text, begin, end in segments:
                if end > begin:
                    part = values[begin - tokens.start : end - tokens.start]
                    torch.maximum(out[text], part.amax(0), out=out[text])
    out[torch.tensor(counts, device=out.device) == 0] = 0.0
    # A query's approximations are still at hand; of more than one tile they are computed again.
    kept = values.split(counts) if len(values) == len(states) else [None] * len(counts)
    parts = list(zip(states.split(counts), weights.split(counts), shift.split(counts), kept, strict=True))
    return out, partial(_exact_weights, parts, decoder, activation)


@torch.compiler.disable
@torch.no_grad()
def _exact_weights(
    parts: Sequence[tuple[Any, ...]], decoder: _QuantisedDecoder, activation: str, ids: Tensor
) -> Tensor:
    """The winners' weights of :func:`quantised_lexical_max`, (B, K) to (B, K), float32.

    Args:
        parts: Of each text the states (n, E), term weights and log-sum-exps (n, 1), and the approximate weights (n, V)
            where they are at hand.
    """
    result = torch.zeros(ids.shape, device=ids.device)
    with torch.autocast(ids.device.type, enabled=False):
        for (states, weights, z, kept), terms, best in zip(parts, ids, result, strict=True):
            if not len(states):
                continue
            exact = decoder.exact(states, terms)  # (n, K)
            if activation == "softmax":
                exact.sub_(z).exp_()
                if kept is None:
                    copied = decoder.approximate_at(states, terms).sub_(z).exp_()
                else:
                    copied = (kept.index_select(1, terms) / weights).nan_to_num_(0)  # 0 / 0 where w = 0
                # Rounding alone makes the rest of the sum negative, where the winners are nearly all of it.
                exact /= (1 - copied.sum(1, keepdim=True)).clamp_(min=0) + exact.sum(1, keepdim=True)
            else:
                exact.relu_().log1p_()
            best.copy_(exact.mul_(weights).amax(0))
    return result


# In the package the classes go by the name that a saved model's modules.json gives them, so that the same entry finds
# the bundled file where there is one and the installed package otherwise. A bundled copy keeps the name it was loaded
# under: pickling, and so multi-process encoding, looks it up there.
if __name__ == "st_aggretriever.modules":
    for _class in (
        MLMEncoder,
        MLMLexicalPooling,
        TokenLexicalPooling,
        SliceMaxAgg,
        CLSProjection,
        MeanProjection,
        Concat,
    ):
        _class.__module__ = "st_aggretriever"
