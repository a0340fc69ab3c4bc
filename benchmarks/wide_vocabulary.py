"""Peak memory at V = 250,002: build, encode 32 texts of 128 tokens, one training step; each in a process of its own.

    python benchmarks/wide_vocabulary.py

A random XLM-RoBERTa of hidden size 16, a decoder of V rows. "Beyond imports" is the peak less what the imports alone
take. The logits of 32 x 128 tokens would be 4.1 GB in float32, in each pass.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

STAGES = ("imports", "build", "encode", "training step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocab-size", type=int, default=250_002)
    parser.add_argument("--hidden-size", type=int, default=16)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        stage(args)
        return
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        write_backbone(folder, args)
        for name in STAGES:
            command = [sys.executable, __file__, *sys.argv[1:], "--stage", name, "--folder", folder]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows[name] = json.loads(done.stdout.splitlines()[-1])
    print(f"V = {args.vocab_size:,}, {args.texts} texts of {args.tokens} tokens, H = {args.hidden_size}")
    print(f"{'':16}{'peak MB':>10}{'beyond imports':>16}{'seconds':>10}")
    for name, row in rows.items():
        beyond = row["peak_bytes"] - rows["imports"]["peak_bytes"]
        print(f"{name:16}{row['peak_bytes'] / 1e6:10.0f}{beyond / 1e6:16.0f}{row['seconds']:10.1f}")
    packages = ("st-aggretriever", "torch", "transformers", "sentence-transformers")
    result = {"benchmark": "wide_vocabulary", **vars(args), "stages": rows}
    del result["stage"], result["folder"]
    print(
        json.dumps(
            {**result, "versions": {name: version(name) for name in packages}, "python": platform.python_version()}
        )
    )


def write_backbone(folder: str, args: argparse.Namespace) -> None:
    """A random masked language model with a tokenizer of a few words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    config = transformers.XLMRobertaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * args.hidden_size,
        max_position_embeddings=514,
        pad_token_id=1,
    )
    transformers.XLMRobertaForMaskedLM(config).save_pretrained(folder)
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = {name: index for index, name in enumerate([*names, *(f"w{index}" for index in range(1000))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        sep_token="</s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
    ).save_pretrained(folder)


def stage(args: argparse.Namespace) -> None:
    """Run up to one stage and print this process's peak."""
    import resource

    import torch

    from st_aggretriever import AggretrieverLoss, build_aggretriever

    torch.set_num_threads(1)
    started = time.perf_counter()
    until = STAGES.index(args.stage)
    if until >= 1:
        model = build_aggretriever(args.folder)
        texts = [" ".join(f"w{(row + i) % 1000}" for i in range(args.tokens - 2)) for row in range(args.texts)]
        assert model.preprocess(texts)["input_ids"].shape == (args.texts, args.tokens)
    if until == 2:
        assert model.encode(texts, batch_size=args.texts).shape == (args.texts, 768)
    if until == 3:
        loss = AggretrieverLoss(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        queries = [" ".join(text.split()[:30]) for text in texts]
        sum(loss([model.preprocess(queries), model.preprocess(texts)]).values()).backward()
        optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_bytes": peak, "seconds": round(time.perf_counter() - started, 2)}))


if __name__ == "__main__":
    main()
