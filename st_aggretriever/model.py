"""Build an Aggretriever from a masked language model, and load one."""

from __future__ import annotations

import errno
import json
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import import_from_string, load_file_path
from torch import nn

from st_aggretriever import modules as _modules
from st_aggretriever.convert import convert_into_cache, published_layout
from st_aggretriever.graft import graft_head
from st_aggretriever.modules import (
    CLSProjection,
    Concat,
    MeanProjection,
    MLMEncoder,
    MLMLexicalPooling,
    SliceMaxAgg,
    TokenLexicalPooling,
)

# What a wrong value in a configuration leads to.
_WRONG_KINDS = (TypeError, AttributeError, KeyError, json.JSONDecodeError, StrictDataclassError)
POOLINGS = ("mlm", "tokens", "cls", "mean", "mean+cls")


def build_aggretriever(
    model_name_or_path: str | Path,
    *,
    lexical_dim: int = 640,
    cls_dim: int = 128,
    query_length: int = 32,
    document_length: int = 128,
    pooling: str = "mlm",
    aggregation: str = "signed",
    term_weight: str = "abs",
    activation: str = "softmax",
    slicing: str = "strided",
    remainder: str = "pad",
    excluded_tokens: str = "cls",
    include_prompt: bool = False,
    mlm_head_from: str | Path | None = None,
    prompts: dict[str, str] | None = None,
    seed: int = 0,
    **transformer_kwargs: Any,
) -> SentenceTransformer:
    """Turn a pretrained (masked language) model into an untrained Aggretriever.

    The result is a plain ``SentenceTransformer`` whose vectors are ``[cls_embedding ; lexical_embedding]``, float32,
    compared by dot product. The new weights (term weight, projections) are drawn from ``seed``.

    Args:
        model_name_or_path: Folder or Hub id of a transformers checkpoint, or of a SentenceTransformer or SparseEncoder
            around one. ``pooling="mlm"`` needs a pretrained MLM head; others take any encoder.
        lexical_dim: D; 0 leaves the lexical part (and the MLM head) away.
        cls_dim: C; 0 leaves the [CLS] part away.
        query_length, document_length: Longest query and document in tokens, [CLS] and [SEP] included; cut at what the
            model's positions allow. Plain ``encode`` uses the document length.
        pooling: ``"mlm"``, the paper's; ``"tokens"``, the text's own words without MLM head; ``"cls"``, a projection of
            [CLS] to ``cls_dim`` alone; ``"mean"``, of the mean of all tokens to ``cls_dim + lexical_dim`` (RepBERT);
            ``"mean+cls"``, of the mean without [CLS] to ``lexical_dim`` beside the [CLS] part.
        aggregation, slicing, remainder: See :class:`SliceMaxAgg`.
        term_weight, activation, excluded_tokens, include_prompt: See :class:`MLMLexicalPooling`. A SPLADE model becomes
            a dense one without training by ``activation="log1p_relu", term_weight="none", cls_dim=0`` and, as SPLADE
            has it, ``excluded_tokens="none"``.
        mlm_head_from: For an encoder without MLM head (most embedders): folder or Hub id of the pretrained model that
            it was made from. Its head is taken over, checked to fit in sizes and vocabulary, recorded in the backbone's
            config and saved with the model.
        prompts: Texts put before queries and documents, ``{"query": ..., "document": ...}``.
        seed: Of the new weights and of ``slicing="random"``.
        **transformer_kwargs: Passed to :class:`MLMEncoder`, for instance ``model_kwargs={"dtype": torch.bfloat16}``.

    Returns:
        SentenceTransformer of dimension C + D (with ``aggregation="none"``, C + V).

    Raises:
        ValueError: An option is out of its range, no part is left, the checkpoint lacks what ``pooling`` needs, or is
            a published Aggretriever, which is trained already.
        OSError: The checkpoint cannot be found.

    Example:
        >>> model = build_aggretriever("bert-base-uncased")  # doctest: +SKIP
        >>> model.encode_query("what is dense retrieval?").shape  # doctest: +SKIP
        (768,)
    """
    _check_options(pooling, lexical_dim, cls_dim, query_length, document_length)
    if pooling == "cls":
        lexical_dim = 0
    has_head = pooling == "mlm" and lexical_dim > 0
    if mlm_head_from is not None and not has_head:
        raise ValueError("build_aggretriever: mlm_head_from needs pooling='mlm' and a lexical_dim of at least 1.")
    path = str(model_name_or_path)
    _check_local(path)
    transformer_kwargs = _inside_sentence_transformer(path, activation if has_head else None, transformer_kwargs)
    _refuse_published(path, transformer_kwargs)
    options = {"query_length": query_length, "document_length": document_length, **transformer_kwargs}
    with naming(path, mlm_head_from):
        if mlm_head_from is None:
            encoder = MLMEncoder(path, head=has_head, **options)
        else:
            encoder = _grafted(path, str(mlm_head_from), options)
    if encoder.prefix_length != 1:
        raise ValueError(
            f"build_aggretriever: the tokenizer of {path!r} must put one special token ([CLS]) "
            f"before a text, but it puts {encoder.prefix_length}; the first token would be taken for [CLS]."
        )
    encoder.max_seq_length = document_length
    hidden_size = encoder.get_embedding_dimension()
    weighting: dict[str, Any] = {
        "term_weight": term_weight,
        "excluded_tokens": excluded_tokens,
        "include_prompt": include_prompt,
    }
    slices: dict[str, Any] = {"aggregation": aggregation, "slicing": slicing, "remainder": remainder, "seed": seed}
    heads: list[nn.Module] = []
    parts: dict[str, int] = {}
    with torch.random.fork_rng(devices=[]):
        # A wrong name is refused also where the part that reads it is left away.
        MLMLexicalPooling(1, activation=activation, **weighting)
        SliceMaxAgg(2, 1, **slices)
        torch.manual_seed(seed)
        if cls_dim and pooling != "mean":
            parts["cls_embedding"] = cls_dim
        if pooling in ("mlm", "tokens") and lexical_dim:
            vocab_size = encoder.vocab_size()
            if pooling == "mlm":
                heads.append(MLMLexicalPooling(hidden_size, activation=activation, **weighting))
            else:
                heads.append(TokenLexicalPooling(hidden_size, vocab_size, **weighting))
            aggregator = SliceMaxAgg(vocab_size, lexical_dim, **slices)
            heads.append(aggregator)
            parts["lexical_embedding"] = aggregator.lexical_dim
        elif pooling == "mean":
            parts["mean_embedding"] = cls_dim + lexical_dim
            heads.append(MeanProjection(hidden_size, cls_dim + lexical_dim, include_prompt=include_prompt))
        elif pooling == "mean+cls" and lexical_dim:
            parts["mean_embedding"] = lexical_dim
            heads.append(MeanProjection(hidden_size, lexical_dim, include_cls=False, include_prompt=include_prompt))
        if "cls_embedding" in parts:
            heads.append(CLSProjection(hidden_size, cls_dim))
        heads.append(Concat(list(parts), list(parts.values())))
    return SentenceTransformer(modules=[encoder, *heads], prompts=prompts, similarity_fn_name="dot")


def _check_options(pooling: str, lexical_dim: int, cls_dim: int, query_length: int, document_length: int) -> None:
    if pooling not in POOLINGS:
        raise ValueError(f"build_aggretriever: pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}.")
    for name, value, least in (
        ("lexical_dim", lexical_dim, 0),
        ("cls_dim", cls_dim, 0),
        ("query_length", query_length, 3),
        ("document_length", document_length, 3),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"build_aggretriever: {name} must be a whole number of at least {least}, got {value!r}.")
    if cls_dim + (0 if pooling == "cls" else lexical_dim) == 0:
        raise ValueError(
            "build_aggretriever: the vector has no part left; give cls_dim"
            + (" at least 1." if pooling == "cls" else " or lexical_dim at least 1.")
        )


def _inside_sentence_transformer(
    path: str, activation: str | None, transformer_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """``transformer_kwargs`` that also find the checkpoint inside a SentenceTransformer's or SparseEncoder's folder.

    Args:
        activation: What is about to become of the MLM head, None without one.
    """
    where = _where(transformer_kwargs)
    modules_file = load_file_path(path, "modules.json", **where)
    if modules_file is None:
        return transformer_kwargs
    entries = _read_json(modules_file)
    names = [str(entry["type"]).rpartition(".")[2] for entry in entries]
    if "Router" in names or "Asym" in names:
        raise ValueError(
            f"build_aggretriever: {path!r} has a {names[0]}, with one encoder for queries and another for documents; "
            "an Aggretriever has one for both."
        )
    if activation == "log1p_relu":
        for entry, name in zip(entries, names, strict=True):
            if name == "SpladePooling":
                _check_splade(path, str(entry["path"]), where)
    subfolder = entries[0]["path"]
    if not subfolder:
        return transformer_kwargs
    inside = ("model_kwargs", "processor_kwargs", "config_kwargs")
    return transformer_kwargs | {
        name: {"subfolder": subfolder, **(transformer_kwargs.get(name) or {})} for name in inside
    }


def _check_splade(path: str, subfolder: str, where: dict[str, Any]) -> None:
    """Refuse the two kinds of SPLADE that take no maximum of ``log(1 + relu(logit))``."""
    file = load_file_path(path, "config.json", subfolder=subfolder, **where)
    config = _read_json(file) if file else {}
    for option, expressible in (("pooling_strategy", "max"), ("activation_function", "relu")):
        value = config.get(option, expressible)
        if value != expressible:
            raise ValueError(
                f"build_aggretriever: activation='log1p_relu' takes SPLADE models with {option}={expressible!r}, but "
                f"{path!r} has {value!r}; its vectors would not be that model's."
            )


def _where(transformer_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Where and how to fetch from the Hub, as given for the model."""
    given = transformer_kwargs.get("model_kwargs") or {}
    names = {"cache_dir": "cache_folder"} | {name: name for name in ("token", "revision", "local_files_only")}
    return {ours: given[theirs] for theirs, ours in names.items() if theirs in given}


def _refuse_published(path: str, transformer_kwargs: dict[str, Any]) -> None:
    layout = published_layout(path, **_where(transformer_kwargs))
    if layout is not None:
        raise ValueError(
            f"build_aggretriever: {path!r} is a published Aggretriever ({layout} layout), trained already; its term "
            "weight and projection would be lost. Load it with load_aggretriever, or convert it once: st-aggretriever "
            "convert SOURCE OUTPUT."
        )


@contextmanager
def naming(*names: str | Path | None, owner: str = "build_aggretriever") -> Iterator[None]:
    """Name what can't be had from the Hub, or is damaged, which the libraries' sentences don't.

    Args:
        *names: What is loaded meanwhile.
        owner: Whose sentence it is.

    Raises:
        ValueError: It is damaged.
        OSError: It isn't found.
    """
    given = " or ".join(repr(str(name)) for name in names if name is not None)
    try:
        yield
    except _WRONG_KINDS as error:
        if "unexpected keyword" in str(error):  # a wrong argument of the caller's
            raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{owner}: the config.json of {given} holds a value of a wrong kind ({reason}). Fetch it again."
        ) from error
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        sentence = _about_weights(error, given)
        if sentence is None:
            raise
        raise ValueError(f"{owner}: {sentence} Fetch the model again.") from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # torch at the end of a file that was cut short
            raise ValueError(f"{owner}: the weights in {given} can't be read. Fetch them again.") from None
        away = [repr(str(name)) for name in names if name is not None and not Path(name).exists()]
        if not away or isinstance(error, FileNotFoundError):
            raise
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise OSError(
            f"{owner}: there is no folder {' or '.join(away)}, and no such model on the Hub in reach ({reason})."
        ) from None


def _grafted(path: str, mlm_head_from: str, options: dict[str, Any]) -> MLMEncoder:
    """The encoder of ``path`` with the MLM head of another checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        source = graft_head(path, mlm_head_from, folder, options)
        kept = ("dtype", "torch_dtype", "attn_implementation")
        model_kwargs = {key: value for key, value in (options.get("model_kwargs") or {}).items() if key in kept}
        plain = {key: value for key, value in options.items() if not key.endswith("_kwargs")}
        encoder = MLMEncoder(folder, head=True, model_kwargs=model_kwargs, **plain)
    model: Any = encoder.model
    model.config.mlm_head_from = source
    model.name_or_path = encoder.tokenizer.name_or_path = path  # type: ignore[union-attr]
    return encoder


def load_aggretriever(
    path_or_hub_id: str | Path,
    *,
    token: bool | str | None = None,
    cache_folder: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    model_kwargs: dict[str, Any] | None = None,
    processor_kwargs: dict[str, Any] | None = None,
    config_kwargs: dict[str, Any] | None = None,
    quantize: str | None = None,
    **kwargs: Any,
) -> SentenceTransformer:
    """Load a saved Aggretriever with this package's own classes; no ``trust_remote_code`` is needed.

    Code that lies in the folder is not run. A published checkpoint (``castorini/aggretriever-*``,
    ``jacklin/DistilBERT-AGG``) is converted on the way, once: see :func:`st_aggretriever.convert_checkpoint`. The
    result lies in the Hugging Face cache.

    Args:
        path_or_hub_id: A folder, a trainer's checkpoint, or a Hub id.
        token, cache_folder, revision, local_files_only: Where and how to fetch from the Hub.
        model_kwargs, processor_kwargs, config_kwargs: As for ``SentenceTransformer``, for instance
            ``model_kwargs={"dtype": torch.bfloat16}``.
        quantize: ``"int8"`` or ``"bf16"`` computes the vocabulary product in fewer bits, ``"none"`` as the model is;
            None as it was saved. ``save_pretrained`` keeps the setting (see :class:`MLMLexicalPooling`).
        **kwargs: Passed to ``SentenceTransformer``, for instance ``device`` or ``truncate_dim``; they take precedence
            over what was saved.

    Raises:
        FileNotFoundError: There is no such folder or model.
        ValueError: It is not an Aggretriever, or it needs other modules than these.
    """
    path = str(path_or_hub_id)
    where: dict[str, Any] = {
        "token": token,
        "cache_folder": cache_folder,
        "revision": revision,
        "local_files_only": local_files_only,
    }
    modules_file = load_file_path(path, "modules.json", **where)
    if modules_file is None:
        if not Path(path).is_dir() and (Path(path).is_absolute() or path.count("/") != 1 or path.startswith(".")):
            raise FileNotFoundError(f"load_aggretriever: there is no folder {path!r}.")
        converted = convert_into_cache(path, **where)
        if converted is not None:
            kwargs |= {"model_kwargs": model_kwargs, "processor_kwargs": processor_kwargs}
            return load_aggretriever(converted, config_kwargs=config_kwargs, quantize=quantize, **kwargs)
        raise ValueError(
            f"load_aggretriever: {path!r} has no modules.json, or cannot be reached; to make an Aggretriever of a "
            "masked language model call build_aggretriever."
        )
    entries = _read_json(modules_file)
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("type"), str) and isinstance(entry.get("path"), str)
        for entry in entries
    ):
        raise ValueError(
            f"load_aggretriever: {modules_file} holds no list of modules with 'type' and 'path'. Fetch the file again."
        )
    loaded: list[nn.Module] = []
    for entry in entries:
        kind = _module_class(entry["type"], path)
        try:
            loaded.append(
                kind.load(
                    path,
                    subfolder=entry["path"],
                    **where,
                    trust_remote_code=False,
                    model_kwargs=model_kwargs,
                    processor_kwargs=processor_kwargs,
                    config_kwargs=config_kwargs,
                    backend="torch",
                )
            )
        except _WRONG_KINDS as error:
            name = f"{path}/{entry['path']}/config.json" if entry["path"] else f"the encoder's configuration in {path}"
            reason = " ".join(str(error).split())
            raise ValueError(
                f"load_aggretriever: {name} holds a value of a wrong kind ({reason}). Fetch the model again."
            ) from error
        except (RuntimeError, ValueError) as error:
            sentence = _about_weights(error, f"{path}/{entry['path']}".rstrip("/"))
            if sentence is None:
                raise
            raise ValueError(f"load_aggretriever: {sentence} Fetch the model again.") from None
    ours = {type(module).__name__ for module in loaded if type(module).__module__ == _modules.Concat.__module__}
    if ours and "Concat" not in ours:
        raise ValueError(
            f"load_aggretriever: {modules_file} has no Concat, which makes one vector of all parts. Fetch it again."
        )
    if quantize is not None:
        _set_quantize(loaded, quantize, path)
    config_file = load_file_path(path, "config_sentence_transformers.json", **where)
    saved = _read_json(config_file) if config_file else {}
    prompts = (saved.get("prompts") or {}) if isinstance(saved, dict) else None
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise ValueError(
            f"load_aggretriever: {config_file} must hold an object of settings, with texts as prompts. Fetch it again."
        )
    for key in ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim"):
        if saved.get(key) is not None:
            kwargs.setdefault(key, saved[key])
    return SentenceTransformer(modules=loaded, **kwargs)


def _about_weights(error: Exception, place: str) -> str | None:
    """A sentence on weights that are missing or don't fit, from what the libraries raise for them."""
    said = " ".join(str(error).split())
    if said.startswith("Could not find 'model.safetensors'"):
        return f"{place} has no weights (model.safetensors)."
    if isinstance(error, EOFError | pickle.UnpicklingError | SafetensorError) or "failed reading zip archive" in said:
        return f"the weights in {place} can't be read: cut short, or a git-LFS pointer."
    if "loading state_dict" in said:
        first = said.partition(": ")[2].partition(". size mismatch")[0].rstrip(".")
        return f"the weights in {place} don't fit its config.json ({first})."
    if "ignore_mismatched_sizes" in said:
        return f"the weights in {place} don't fit its config.json (another size)."
    return None


def _set_quantize(modules: list[nn.Module], quantize: str, path: str) -> None:
    heads: list[Any] = [module for module in modules if isinstance(module, MLMLexicalPooling)]
    if quantize not in _modules.QUANTIZE:
        known = ", ".join(map(repr, _modules.QUANTIZE))
        raise ValueError(f"load_aggretriever: quantize must be one of {known}, got {quantize!r}.")
    if not heads and quantize != "none":
        raise ValueError(
            f"load_aggretriever: {path!r} has no vocabulary product that quantize={quantize!r} could make faster; "
            "leave quantize out."
        )
    for head in heads:
        head.quantize = quantize


def is_aggretriever(path_or_hub_id: str | Path, **where: Any) -> bool:
    """Whether a folder or Hub id holds a saved Aggretriever, by its modules.json."""
    modules_file = load_file_path(str(path_or_hub_id), "modules.json", **where)
    if modules_file is None:
        return False
    entries = _read_json(modules_file)
    return any(str(entry.get("type", "")).startswith("st_aggretriever.") for entry in entries)


def _read_json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"load_aggretriever: {path} is not JSON ({error}). Fetch the file again.") from None


def _check_local(path: str) -> None:
    """Say of a path on this machine what is wrong with it; anything else may be a Hub id."""
    local = Path(path)
    if not local.exists() and (local.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1):
        raise FileNotFoundError(f"build_aggretriever: there is no folder {path!r}.")
    names = ("config.json", "modules.json", "adapter_config.json")
    if local.is_file() or (local.is_dir() and not any((local / name).exists() for name in names)):
        raise ValueError(f"build_aggretriever: {path!r} is no transformers checkpoint: it has no config.json.")


def _module_class(type_name: str, path: str) -> Any:
    """The class behind an entry of modules.json: ours, or one of sentence-transformers'."""
    package, _, name = type_name.rpartition(".")
    if package == "st_aggretriever" and hasattr(_modules, name):
        return getattr(_modules, name)
    if package.startswith("sentence_transformers."):
        return import_from_string(type_name)
    raise ValueError(
        f"load_aggretriever: {path!r} is built of {type_name!r}, which is neither a module of st_aggretriever "
        f"{_modules.__version__} nor of sentence-transformers; load it with SentenceTransformer and "
        "trust_remote_code=True if you trust it."
    )
