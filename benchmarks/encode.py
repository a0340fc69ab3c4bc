"""What the vocabulary head costs: arms over one random backbone, interleaved in one run.

    python benchmarks/encode.py                                  # 32 x 128 tokens and single queries, one thread
    python benchmarks/encode.py --lengths 128 10-128             # a full batch and a mixed one
    python benchmarks/encode.py --training                       # forward and backward: seconds, and memory
    python benchmarks/encode.py --training --vocab-size 250002 --batch-size 64 --memory-only

DistilBERT's size unless told otherwise. The arms:

    cls             the encoder and a projection of [CLS]: what a plain dense retriever computes
    published       all logits (B, L, V), softmax, term weight, padding masked, maximum, as in the published code
    ours            this package's model
    floor           the encoder, and the decoder times all real tokens in one product, and nothing else
    floor (oneDNN)  the same with the faster library, where torch has it
    int8 head       ours with ``quantize="int8"`` (CPU); bf16 head: with ``quantize="bf16"``
    tokens          the text's own words, no vocabulary product (``pooling="tokens"``)
    onnx, onnx int8 the exported files in onnxruntime (CPU); not by default

To add an arm write a function that takes the model and returns a function from features (``input_ids`` and
``attention_mask``) to vectors (B, C + D), and enter it in ``ARMS``; ``--arms`` chooses. The model is shared between
arms: copy what an arm changes.

Seconds are medians with the quartiles' distance beside them. Latency is that of one query after the other, in
percentiles over queries, as in the paper's Table 9. Memory is the peak resident size of a process that does nothing but
the training step (on a GPU: the allocator's), less the same with ``cls``. Set no OPENBLAS_* or MKL_* variables.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import Tensor

Features = dict[str, Tensor]
Arm = Callable[[Features], Tensor]


def cls(model: SentenceTransformer) -> Arm:
    encoder = model[0].model.base_model
    hidden = encoder.config.hidden_size
    projection = torch.nn.Linear(hidden, hidden).to(encoder.device, encoder.dtype)
    return lambda features: projection(encoder(**features).last_hidden_state[:, 0]).float()


def published(model: SentenceTransformer) -> Arm:
    encoder, pooling, *rest = model

    def arm(features: Features) -> Tensor:
        output = encoder(dict(features))
        logits = F.linear(output.pop("mlm_states"), output.pop("decoder_weight"), output.pop("decoder_bias"))
        weights = pooling.linear(output["token_embeddings"]).abs()  # (B, L, 1)
        weighted = weights * logits.softmax(-1) * features["attention_mask"].unsqueeze(-1)
        output["lexical_weights"] = weighted[:, 1:].max(1).values.float()  # (B, V), without [CLS]
        for module in rest:
            output = module(output)
        return output["sentence_embedding"]

    return arm


def ours(model: SentenceTransformer) -> Arm:
    return lambda features: model(dict(features))["sentence_embedding"]


def floor(model: SentenceTransformer) -> Arm:
    return _floor(model, lambda states, weight: weight @ states.T)


def floor_onednn(model: SentenceTransformer) -> Arm:
    product = torch.ops.mkldnn._linear_pointwise
    return _floor(model, lambda states, weight: product(weight, states, None, "none", [], ""))


def _floor(model: SentenceTransformer, product: Callable[[Tensor, Tensor], Tensor]) -> Arm:
    encoder, decoder = model[0].model.base_model, model[0].model.get_output_embeddings()

    def arm(features: Features) -> Tensor:
        hidden = encoder(**features).last_hidden_state
        return product(hidden[features["attention_mask"] != 0], decoder.weight)  # (V, T)

    return arm


def int8_head(model: SentenceTransformer) -> Arm:
    return _quantised(model, "int8")


def bf16_head(model: SentenceTransformer) -> Arm:
    return _quantised(model, "bf16")


def _quantised(model: SentenceTransformer, quantize: str) -> Arm:
    encoder, pooling, *rest = model
    pooling = copy.copy(pooling)  # the same weights under another setting
    pooling.quantize = quantize

    def arm(features: Features) -> Tensor:
        output = encoder(dict(features))
        for module in (pooling, *rest):
            output = module(output)
        return output["sentence_embedding"]

    return arm


def tokens(model: SentenceTransformer) -> Arm:
    from st_aggretriever import TokenLexicalPooling

    encoder, _, *rest = model
    base = encoder.model.base_model
    pooling = TokenLexicalPooling(base.config.hidden_size, encoder.vocab_size()).to(base.device, base.dtype)

    def arm(features: Features) -> Tensor:
        output = {**features, "token_embeddings": base(**features).last_hidden_state}
        for module in (pooling, *rest):
            output = module(output)
        return output["sentence_embedding"]

    return arm


def onnx(model: SentenceTransformer) -> Arm:
    return _onnx(model, "model.onnx")


def onnx_int8(model: SentenceTransformer) -> Arm:
    return _onnx(model, "model_int8.onnx")


def _onnx(model: SentenceTransformer, name: str) -> Arm:
    import onnxruntime

    from st_aggretriever.export.onnx import export_onnx

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(model, Path(folder, "onnx"), int8="int8" in name)
        session = onnxruntime.InferenceSession(str(Path(folder, "onnx", name)), options)
    return lambda features: torch.from_numpy(session.run(None, {key: x.numpy() for key, x in features.items()})[0])


ARMS: dict[str, Callable[[SentenceTransformer], Arm]] = {
    "cls": cls,
    "published": published,
    "ours": ours,
    "floor": floor,
    "floor (oneDNN)": floor_onednn,
    "int8 head": int8_head,
    "bf16 head": bf16_head,
    "tokens": tokens,
    "onnx": onnx,
    "onnx int8": onnx_int8,
}
NO_GRADIENT = {"floor", "floor (oneDNN)", "int8 head", "bf16 head", "onnx", "onnx int8"}
CPU_ONLY = {"floor (oneDNN)", "int8 head", "onnx", "onnx int8"}


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    if args.step:
        print(json.dumps({"peak_bytes": peak_of_training_step(args)}))
        return
    result: dict[str, Any] = {"benchmark": "encode", **vars(args)}
    del result["step"]
    sizes = f"{args.layers} layers, H = {args.hidden_size}, V = {args.vocab_size:,}"
    print(f"{sizes}, {args.dtype}, {args.device}, {args.threads} thread(s)")
    if not args.memory_only:
        model = build(args)
        arms = {name: ARMS[name](model) for name in args.arms}
        result["batches"] = [time_batch(args, arms, length) for length in args.lengths]
        if args.queries:
            result["latency"] = time_queries(args, arms)
        if args.training:
            trained = {name: arm for name, arm in arms.items() if name not in NO_GRADIENT}
            result["training"] = [time_training(args, trained, length) for length in args.lengths]
    if (args.training and not args.no_memory) or args.memory_only:
        result["memory"] = memory_of_training(args, sys.argv[1:] if argv is None else argv)
    packages = ("st-aggretriever", "torch", "transformers", "sentence-transformers")
    result["versions"] = {name: version(name) for name in packages} | {"python": platform.python_version()}
    print(json.dumps(result))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lengths", nargs="+", default=["128"], help="tokens of a passage, or LOW-HIGH for mixed ones")
    parser.add_argument("--queries", type=int, default=200, help="single queries to time; 0 for none")
    parser.add_argument("--query-length", default="8-32")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[arm for arm in ARMS if "onnx" not in arm])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=30_522)
    parser.add_argument("--lexical-dim", type=int, default=640)
    parser.add_argument("--training", action="store_true", help="also time and weigh a training step")
    parser.add_argument("--memory-only", action="store_true", help="only weigh a training step")
    parser.add_argument("--no-memory", action="store_true", help="time a training step, but don't weigh it")
    parser.add_argument("--step", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device != "cpu":
        args.arms = [arm for arm in args.arms if arm not in CPU_ONLY]
    if args.dtype != "float32":
        args.arms = [arm for arm in args.arms if arm != "floor (oneDNN)"]
    return args


def build(args: argparse.Namespace) -> SentenceTransformer:
    """An Aggretriever on a random DistilBERT of the given size, in evaluation mode."""
    import transformers
    from tokenizers import Tokenizer, models, processors

    from st_aggretriever import build_aggretriever

    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        vocab_size=args.vocab_size,
        dim=args.hidden_size,
        hidden_dim=4 * args.hidden_size,
        n_layers=args.layers,
        n_heads=max(1, args.hidden_size // 64),
    )
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        transformers.DistilBertForMaskedLM(config).save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
        ).save_pretrained(folder)
        model = build_aggretriever(folder, lexical_dim=args.lexical_dim)
    return model.to(args.device, getattr(torch, args.dtype)).eval()


def batch(args: argparse.Namespace, lengths: list[int]) -> Features:
    """Random token ids, padded on the right to the longest."""
    width = torch.arange(max(lengths))
    mask = (width < torch.tensor(lengths).unsqueeze(1)).long()
    ids = torch.randint(5, args.vocab_size, mask.shape) * mask
    return {"input_ids": ids.to(args.device), "attention_mask": mask.to(args.device)}


def draw(length: str, count: int) -> list[int]:
    """Lengths of ``count`` texts: all the same, or spread evenly from LOW to HIGH."""
    low, _, high = length.partition("-")
    return torch.linspace(int(low), int(high or low), count).round().int().tolist()


def time_batch(args: argparse.Namespace, arms: dict[str, Arm], length: str) -> dict[str, Any]:
    """Seconds of encoding one batch, an arm after the other, again and again."""
    features = batch(args, draw(length, args.batch_size))
    real = int(features["attention_mask"].sum())
    with torch.no_grad():
        seconds = interleaved(args, arms, lambda arm: arm(features))
    rows = table(f"{args.batch_size} passages of {length} tokens", seconds, real)
    return {"length": length, "real_tokens": real, "padded_tokens": features["input_ids"].numel(), "arms": rows}


def time_training(args: argparse.Namespace, arms: dict[str, Arm], length: str) -> dict[str, Any]:
    """Seconds of a forward and backward pass."""
    features = batch(args, draw(length, args.batch_size))
    seconds = interleaved(args, arms, lambda arm: training_step(arm, features))
    title = f"forward and backward, {args.batch_size} passages of {length} tokens"
    return {"length": length, "arms": table(title, seconds, int(features["attention_mask"].sum()))}


def training_step(arm: Arm, features: Features) -> None:
    """The first half of the batch as queries, the other half as their passages; dropout is off.

    Gradients add up from step to step, as in gradient accumulation.
    """
    queries, passages = arm(features).chunk(2)
    F.cross_entropy(queries @ passages.T, torch.arange(len(queries), device=queries.device)).backward()


def time_queries(args: argparse.Namespace, arms: dict[str, Arm]) -> dict[str, Any]:
    """Milliseconds of single queries: percentiles 1, 50 and 99 over all of them."""
    queries = [batch(args, [length]) for length in draw(args.query_length, args.queries)]
    milliseconds: dict[str, list[float]] = {name: [] for name in arms}
    with torch.no_grad():
        for arm in arms.values():
            arm(queries[0])
        for query in queries:
            for name, arm in arms.items():
                milliseconds[name].append(1000 * clock(args, lambda arm=arm, query=query: arm(query)))
    print(f"\none query of {args.query_length} tokens at a time, ms")
    print(f"{'':18}{'p1':>9}{'p50':>9}{'p99':>9}{'p50 / cls':>11}")
    rows = {}
    for name, values in milliseconds.items():
        percentiles = torch.tensor(values).quantile(torch.tensor([0.01, 0.5, 0.99])).tolist()
        rows[name] = {"p1": percentiles[0], "p50": percentiles[1], "p99": percentiles[2]}
        ratio = f"{rows[name]['p50'] / rows['cls']['p50']:11.2f}" if "cls" in rows else ""
        print(f"{name:18}" + "".join(f"{value:9.2f}" for value in percentiles) + ratio)
    return {"length": args.query_length, "queries": args.queries, "arms": rows}


def memory_of_training(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Peak bytes of a training step, each arm in a process of its own."""
    rows: dict[str, Any] = {}
    for name in (name for name in args.arms if name not in NO_GRADIENT):
        command = [sys.executable, __file__, *argv, "--step", name]
        done = subprocess.run(command, capture_output=True, text=True)
        # A process that dies here has met the limit of the machine's memory.
        rows[name] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"peak_bytes": None}
    print(f"\na training step of {args.batch_size} passages of {args.lengths[0]} tokens, MB")
    print(f"{'':18}{'peak':>9}{'beyond cls':>12}")
    for name, row in rows.items():
        peak, base = row["peak_bytes"], rows.get("cls", row)["peak_bytes"]
        if peak is None or base is None:
            print(f"{name:18}{'failed':>9}")
            continue
        row["extra_bytes"] = peak - base
        print(f"{name:18}{peak / 1e6:9.0f}{row['extra_bytes'] / 1e6:12.0f}")
    return rows


def peak_of_training_step(args: argparse.Namespace) -> int:
    model = build(args)
    arm = ARMS[args.step](model)
    features = batch(args, draw(args.lengths[0], args.batch_size))
    training_step(arm, batch(args, [2, 2]))  # What libraries set up once is not the step's.
    model.zero_grad()
    if args.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        training_step(arm, features)
        return torch.cuda.max_memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # From here on VmHWM is the peak of what follows.
    training_step(arm, features)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def interleaved(args: argparse.Namespace, arms: dict[str, Arm], work: Callable[[Arm], Any]) -> dict[str, list[float]]:
    """Seconds of each arm in turn, again and again, after a round that doesn't count."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for measured in [False] + [True] * args.repeats:
        for name, arm in arms.items():
            taken = clock(args, lambda arm=arm: work(arm))
            if measured:
                seconds[name].append(taken)
    return seconds


def clock(args: argparse.Namespace, work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    if args.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def table(title: str, seconds: dict[str, list[float]], real_tokens: int) -> dict[str, Any]:
    """Print and return median, spread and ratios; the head's time is what an arm takes beyond ``cls``."""
    rows: dict[str, Any] = {}
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
        rows[name] = {"seconds": middle, "spread": high - low}
    print(f"\n{title} ({real_tokens:,} real)")
    print(f"{'':18}{'seconds':>9}{'spread':>9}{'/ cls':>8}{'/ floor':>9}{'head, us a token':>18}")
    for name, row in rows.items():
        line = f"{name:18}{row['seconds']:9.3f}{row['spread']:9.3f}"
        for other, width in (("cls", 8), ("floor", 9)):
            if other in rows:
                row[f"to_{other}"] = row["seconds"] / rows[other]["seconds"]
            line += f"{row[f'to_{other}']:{width}.2f}" if other in rows else " " * width
        if "cls" in rows:
            row["head_us_per_token"] = 1e6 * (row["seconds"] - rows["cls"]["seconds"]) / real_tokens
            line += f"{row['head_us_per_token']:18.1f}"
        print(line)
    return rows


if __name__ == "__main__":
    main()
