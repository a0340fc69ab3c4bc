"""The whole pipeline as one ONNX file: token ids and mask in, the vector out."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from st_aggretriever.atomic import check_output, partial_of
from st_aggretriever.model import load_aggretriever
from st_aggretriever.modules import write_check

OPSET = 18  # the first whose ScatterElements can take a maximum, as pooling "tokens" needs
TOLERANCE = 1e-5  # absolute, and relative to the value
# Texts and tokens of the inputs that the file is checked with; the least text is [CLS] [SEP].
SHAPES = ((1, 2), (1, 11), (3, 7), (2, 32), (8, 19))
SAMPLE = Path(__file__).parents[1] / "assets" / "sample" / "corpus.jsonl"


class Report(NamedTuple):
    """What was written, and how far it is from the model."""

    folder: Path
    difference: float  # the largest between the file's numbers and torch's, of magnitudes in the lexical part
    turned: int  # signs that differ, where the two halves of a slice are equal to within the tolerance
    int8: dict[str, float] | None  # on the bundled sample: mean cosine, least cosine, share of flipped signs


def export_onnx(model: SentenceTransformer | str | Path, output: str | Path, *, int8: bool = False) -> Report:
    """Write an Aggretriever as ``model.onnx`` in float32, with its tokenizer and a README beside it.

    Inputs ``input_ids`` and ``attention_mask`` (batch, length) int64, any batch and length that the model can take;
    where the model has prompts whose tokens don't take part also ``prompt_length`` (1) int64. Output ``vector``
    (batch, dimension) float32. The file holds logits of batch x length x V, so take small batches of long texts.

    Before anything gets its name the file is run in onnxruntime on inputs of five shapes and compared with the model:
    numbers may differ by 1e-5 (absolute, or of the value), signs only where the two maxima of a slice are that close.

    Args:
        model: An Aggretriever, its folder or Hub id. A quantised head is exported as it is without.
        output: Folder to write; it must not exist.
        int8: Also write ``model_int8.onnx``, by onnxruntime's dynamic quantisation, and measure it on real passages.

    Raises:
        FileExistsError, FileNotFoundError: The output or ``OUTPUT.partial`` exists, or its folder doesn't.
        OSError: It can't be written.
        ImportError: onnx or onnxruntime is missing.
        ValueError: The model is no Aggretriever, its architecture can't be traced, or the file's vectors differ.
    """
    _need_onnx()
    output = Path(output)
    check_output(output)
    partial = partial_of(output)
    if partial.exists():
        raise FileExistsError(
            f"export onnx: {partial} is in the way, perhaps left by an export that was killed: move it."
        )
    given = isinstance(model, SentenceTransformer)
    if not given and Path(str(model)).is_file():
        raise ValueError(f"export onnx: {model} is a file: expected the folder of an Aggretriever, or its Hub id.")
    own: Any = copy.deepcopy(model) if given else load_aggretriever(str(model), device="cpu")
    pipeline = _Pipeline(own)
    partial.mkdir()  # fails where another export has come first: what lies there is its own
    try:
        _trace(pipeline, partial / "model.onnx")
        difference, turned = _compare(pipeline, partial / "model.onnx")
        measured = _quantise(pipeline, partial) if int8 else None
        tokenizer: Any = pipeline.model.tokenizer
        tokenizer.save_pretrained(str(partial))
        write_check(partial, list(pipeline.model), pipeline.model.truncate_dim)
        (partial / "README.md").write_text(_readme(pipeline, difference, measured), encoding="utf-8")
        partial.rename(output)
    except Exception as error:
        if isinstance(error, OSError) or "No space left" in str(
            error
        ):  # safetensors, tokenizers have their own classes
            raise OSError(f"export onnx: cannot write {output}: {error}") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Report(output, difference, turned, measured)


def _need_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise ImportError(f'export onnx: {error}. Install it by: pip install "st-aggretriever[onnx]"') from None


class _Pipeline(nn.Module):
    """The model with ids and mask as arguments, on the CPU in float32.

    The modules are the model's own, but for the pooling, whose loop over tiles a trace can't follow.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        first: Any = model[0]
        _refuse(model)
        heads: list[Any] = [module for module in model if hasattr(module, "quantize")]
        for head in heads:
            head.quantize = "none"
        self.model = model.float().to("cpu")
        self.first = first
        self.slicer: Any = next((module for module in model if hasattr(module, "aggregation")), None)
        poolings = [module for module in model if hasattr(module, "include_prompt")]
        self.prompts = {name: prompt for name, prompt in model.prompts.items() if prompt}
        self.asks_prompt = bool(self.prompts) and any(not module.include_prompt for module in poolings)
        self.eval()

    def inputs(self, texts: int, length: int) -> dict[str, Tensor]:
        """Random ids of some shape, of texts of different lengths."""
        generator = torch.Generator().manual_seed(texts * 1000 + length)
        tokenizer: Any = self.model.tokenizer
        ids = torch.randint(0, len(tokenizer), (texts, length), generator=generator)
        ids[ids == tokenizer.pad_token_id] = tokenizer.cls_token_id
        mask = torch.ones_like(ids)
        for text in range(1, texts):
            mask[text, max(2, length - text) :] = 0
        ids[mask == 0] = tokenizer.pad_token_id
        values = {"input_ids": ids, "attention_mask": mask}
        return values | ({"prompt_length": torch.tensor([min(3, length)])} if self.asks_prompt else {})

    def exact(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the model itself makes of the inputs, in float32 whatever it was saved in."""
        with torch.no_grad():
            features = self.model(dict(inputs))
        return features | {"vector": features["sentence_embedding"][:, : self.model.truncate_dim]}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, prompt_length: Tensor | None = None) -> Tensor:
        features: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if prompt_length is not None:
            features["prompt_length"] = prompt_length
        for module in self.model:
            features = _plain_lexical(module, features) if hasattr(module, "activation") else module(features)
        return features["sentence_embedding"][:, : self.model.truncate_dim]


def _refuse(model: SentenceTransformer) -> None:
    """Raises ValueError for what the folder could not express."""
    first: Any = model[0]
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not hasattr(first, "head") or not any(hasattr(module, "dims") for module in model):
        reason = "it is no Aggretriever; export it with sentence-transformers' own tools"
    elif not tokenizer.is_fast:
        reason = "its tokenizer has no tokenizer.json, with which the exported folder is read"
    elif first.do_lower_case:
        reason = "do_lower_case stands outside its tokenizer; save it with a tokenizer that lowercases"
    elif hasattr(first.model, "peft_config"):
        reason = "its encoder has an adapter; merge it first: model[0].model = model[0].model.merge_and_unload()"
    else:
        return
    raise ValueError(f"export onnx: the model can't be exported: {reason}.")


def _plain_lexical(pooling: Any, features: dict[str, Any]) -> dict[str, Any]:
    """:class:`MLMLexicalPooling` without its loop: all B x L x V logits at once."""
    states, weight, bias = (features.pop(name) for name in ("mlm_states", "decoder_weight", "decoder_bias"))
    hidden = features["token_embeddings"]
    weights = pooling.term_weights(hidden.flatten(0, 1)).view(hidden.shape[:2])  # (B, L)
    keep = pooling.participating(features)
    # A product of matrices: for one of (B, L, E) the file would hold the decoder once more, transposed.
    logits = F.linear(states.flatten(0, 1), weight, bias).unflatten(0, hidden.shape[:2])  # (B, L, V)
    values = logits.softmax(-1) if pooling.activation == "softmax" else logits.relu().log1p()
    best = (values * weights.unsqueeze(2)).masked_fill(~keep.unsqueeze(2), -torch.inf).amax(1)  # (B, V)
    features["lexical_weights"] = best.masked_fill(~keep.any(1, keepdim=True), 0.0)
    return features


def _trace(pipeline: _Pipeline, path: Path) -> None:
    inputs = pipeline.inputs(3, 9)
    axes = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask")} | {"vector": {0: "batch"}}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # The exporter by tracing: the one by torch.export takes a quarter of a minute for a tiny model, and another
            # package. What a trace may get wrong is what the comparison below looks for.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                pipeline,
                tuple(inputs.values()),
                str(path),
                input_names=list(inputs),
                output_names=["vector"],
                dynamic_axes=axes,
                opset_version=OPSET,
                dynamo=False,
            )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
        kind = pipeline.first.model.config.model_type
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"export onnx: the architecture {kind!r} can't be exported: {reason}") from None


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _run(session: Any, inputs: dict[str, Tensor]) -> Tensor:
    return torch.from_numpy(session.run(None, {name: value.numpy() for name, value in inputs.items()})[0])


def _compare(pipeline: _Pipeline, path: Path) -> tuple[float, int]:
    """The largest difference on the five shapes, and how many signs turned where they may.

    Raises:
        ValueError: It is too large, or another sign turned.
    """
    session = _session(path)
    worst, turned = 0.0, 0
    for texts, length in SHAPES:
        inputs = pipeline.inputs(texts, length)
        exact, found = pipeline.exact(inputs), _run(session, inputs)
        vector = exact["vector"]
        if found.shape != vector.shape:
            raise ValueError(f"export onnx: the file gives {tuple(found.shape)} where {tuple(vector.shape)} is due.")
        meets = _halves_meet(pipeline, exact)
        flipped = (found.signbit() != vector.signbit()) & meets
        difference = torch.where(flipped, found.abs() - vector.abs(), found - vector).abs()
        allowed = TOLERANCE * (1 + vector.abs())
        if not bool((difference <= allowed).all()):
            raise ValueError(
                f"export onnx: for {texts} texts of {length} tokens the file's numbers differ from the model's by "
                f"{difference.max().item():.1e}, more than {TOLERANCE:.0e}; nothing was written."
            )
        worst, turned = max(worst, difference.max().item()), turned + int(flipped.sum())
    return worst, turned


def _halves_meet(pipeline: _Pipeline, exact: dict[str, Tensor]) -> Tensor:
    """(B, dimension) bool: lexical dimensions whose two half-slice maxima are equal to within the tolerance."""
    last: Any = next(module for module in pipeline.model if hasattr(module, "dims"))
    vector = exact["sentence_embedding"]
    meets = torch.zeros_like(vector, dtype=torch.bool)
    if pipeline.slicer is not None and pipeline.slicer.aggregation == "signed":
        start = sum(last.dims[: last.keys.index("lexical_embedding")])
        halves = pipeline.slicer._slices(exact["lexical_weights"], padding=-torch.inf).amax(1)
        first, second = halves.unflatten(1, (-1, 2)).unbind(2)  # (B, D)
        meets[:, start : start + first.shape[1]] = (first - second).abs() <= TOLERANCE * (1 + first.abs())
    return meets[:, : exact["vector"].shape[1]]


def _quantise(pipeline: _Pipeline, folder: Path) -> dict[str, float]:
    """Write the int8 file and measure it on the passages of the bundled sample, against the model."""
    import logging

    from onnxruntime.quantization import QuantType, quantize_dynamic

    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it recommends a preprocessing of the graph that the sessions do anyway
    try:
        options: dict[str, Any] = {"weight_type": QuantType.QInt8, "per_channel": True}
        quantize_dynamic(folder / "model.onnx", folder / "model_int8.onnx", **options)
    finally:
        root.setLevel(level)
    session = _session(folder / "model_int8.onnx")
    texts = [json.loads(line)["text"] for line in SAMPLE.read_text(encoding="utf-8").splitlines()[:64]]
    cosines, flips = [], []
    for start in range(0, len(texts), 8):
        features = pipeline.model.preprocess(texts[start : start + 8])
        inputs = {name: features[name] for name in ("input_ids", "attention_mask")}
        inputs |= {"prompt_length": torch.tensor([0])} if pipeline.asks_prompt else {}
        vector, found = pipeline.exact(inputs)["vector"], _run(session, inputs)
        cosines.append(torch.cosine_similarity(vector, found))
        flips.append((vector.signbit() != found.signbit()).float().mean(1))
    cosine, flipped = torch.cat(cosines), torch.cat(flips)
    return {
        "mean_cosine": cosine.mean().item(),
        "least_cosine": cosine.min().item(),
        "flipped_signs": flipped.mean().item(),
    }


README = """# {name} as ONNX

`model.onnx`: `input_ids`, `attention_mask`{also} (int64) to `vector` ({dimension}, float32), compared by dot product.
Equal to the model in torch to {difference:.0e} (signs may differ where the two halves of a slice are equal).{int8}
Queries are cut at {query} tokens, documents at {document}. {prompts}

```python
import numpy, onnxruntime, tokenizers
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
tokenizer.enable_padding(pad_id={pad_id}, pad_token={pad_token!r})
tokenizer.enable_truncation({document})  # {query} for queries
batch = tokenizer.encode_batch(["a document"])
inputs = {{"input_ids": [x.ids for x in batch], "attention_mask": [x.attention_mask for x in batch]}}{prompt}
inputs = {{name: numpy.array(value, numpy.int64) for name, value in inputs.items()}}
vectors = onnxruntime.InferenceSession("model.onnx").run(None, inputs)[0]
```
"""


def _readme(pipeline: _Pipeline, difference: float, int8: dict[str, float] | None) -> str:
    first: Any = pipeline.first
    tokenizer: Any = pipeline.model.tokenizer
    prompt = (
        '\ninputs["prompt_length"] = [0]  # with a prompt: [len(tokenizer.encode(prompt.rstrip(" ")).ids) - {suffix}]'
    )
    measured = (
        "\n`model_int8.onnx` (onnxruntime's dynamic quantisation): on 64 passages mean cosine {mean_cosine:.4f}, least "
        "{least_cosine:.4f}, {flipped_signs:.2%} of the signs differ.".format(**int8)
        if int8
        else ""
    )
    prompts = "It has no prompts."
    if pipeline.prompts:
        prompts = f"Put the prompt before the text: {json.dumps(pipeline.prompts, ensure_ascii=False)}."
    also = ", `prompt_length` (tokens of the prompt and before it, 0 without)" if pipeline.asks_prompt else ""
    return README.format(
        name=Path(str(first.model.name_or_path)).name or "An Aggretriever",
        also=also,
        dimension=pipeline.model.truncate_dim or pipeline.model.get_embedding_dimension(),
        difference=max(difference, TOLERANCE),
        int8=measured,
        query=first.query_length,
        document=first.max_seq_length,
        prompts=prompts,
        pad_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        prompt=prompt.format(suffix=min(1, first.suffix_length)) if pipeline.asks_prompt else "",
    )
