"""Pretrain a small BERT from scratch by masked language modelling alone.

This is how `st_aggretriever/assets/mini` was made; its README has the command, the sources and the figures.

    python examples/pretrain_backbone.py TEXTS/*.gz --output OUTPUT
    python examples/pretrain_backbone.py TEXTS/*.gz --evaluate OUTPUT

A text file is `NAME.jsonl.gz` (a `passage` a line, and optionally the `query` that it answers) or `NAME.txt.gz` (a
record starts at a line without indentation; indented and blank lines continue it). NAME is the source's name, in
`--weight`, `--keep-half` and the tables. Evaluation rebuilds the split from the same files, options and seed.

Loss: cross-entropy of the tokens that `DataCollatorForLanguageModeling` masks; the head runs on those alone. Blocks
hold `[CLS] record [SEP] record ... [SEP]`, all of one source and one length, so nothing is padded.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MAX_POSITIONS = 512
OVERLAP_WORDS = 13  # a held-out passage shares no run of 13 words with a training text, GPT-3's rule against leaks
BOILERPLATE = 20  # ... except runs that more than 20 records have: set phrases, not copies
KEEP_HALF_GAP = 50  # records before the middle that are used in neither half: an article may straddle it
MIN_HELD_OUT = 20
MAY_CHANGE = ("resume", "output", "evaluate", "steps", "save_steps")  # between a run and its resumption
ALPHABET = 200  # Latin, Greek, digits, punctuation; a letter costs two entries, the rest is [UNK]
REPLACEMENTS = [  # WikiText, PTB and FOLDOC mark-up
    (re.compile(r" @([-,.])@ "), r"\1"),
    (re.compile(r"<unk>"), "[UNK]"),
    (re.compile(r"-lsb-|-lrb-"), "("),
    (re.compile(r"-rsb-|-rrb-"), ")"),
    (re.compile(r"``|''"), '"'),
    (re.compile(r" n't\b"), "n't"),
    (re.compile(r"https?://\S+|\S+@\S+|[{}]|\(\d{4}-\d\d-\d\d\)"), " "),
    (re.compile(r"\s+"), " "),
]


@dataclass
class Source:
    """The records of one file: training texts, and held-out texts that are never trained on."""

    name: str
    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------------------- texts


def clean(text: str) -> str:
    for pattern, replacement in REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text.strip()


def read_records(path: Path) -> list[str]:
    """One string a record, in the file's order; a passage comes once, after all the queries that it answers."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        if path.name.endswith(".txt.gz"):
            records: list[str] = []
            for line in lines:
                if line[:1].isspace() and records:
                    records[-1] += " " + line
                elif line.strip():
                    records.append(line)
            return [text for text in map(clean, records) if text and not text.startswith("00-database")]
        queries: dict[str, list[str]] = {}
        for number, line in enumerate(lines, 1):
            try:
                pair = json.loads(line)
                queries.setdefault(pair["passage"], []).append(pair.get("query", ""))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object with a 'passage', got {error!r}."
                ) from None
    return [clean(" ".join([*dict.fromkeys(asked), passage])) for passage, asked in queries.items()]


def word_runs(text: str) -> set[int]:
    words = re.findall(r"\w+", text.lower())
    return {hash(tuple(words[i : i + OVERLAP_WORDS])) for i in range(len(words) - OVERLAP_WORDS + 1)}


def read_sources(args: argparse.Namespace) -> list[Source]:
    """Split every file into training and held-out records, then drop training records that repeat held-out ones."""
    sources = []
    for path in args.texts:
        source = Source(path.name.split(".")[0])
        records = read_records(path)
        if source.name in args.keep_half:
            middle = len(records) // 2
            source.train, source.held_out = records[: max(middle - KEEP_HALF_GAP, 1)], records[middle:]
        else:
            order = sorted(records, key=lambda text: hashlib.sha256(f"{args.seed}:{text}".encode()).digest())
            count = min(max(round(args.held_out * len(order)), MIN_HELD_OUT), len(order) // 2)
            source.train, source.held_out = order[count:], order[:count]
        if not source.train or not source.held_out:
            raise ValueError(f"{path}: too few records ({len(records)}) to train on some and keep some out.")
        sources.append(source)

    held_out = set().union(*(word_runs(text) for source in sources for text in source.held_out))
    seen: Counter[int] = Counter()
    for source in sources:
        for text in source.train:
            seen.update(word_runs(text) & held_out)
    leaks = {run for run, count in seen.items() if count <= BOILERPLATE}
    for source in sources:
        kept = [text for text in source.train if leaks.isdisjoint(word_runs(text))]
        dropped, source.train = len(source.train) - len(kept), kept
        print(f"{source.name}: {len(kept)} records to train on, {len(source.held_out)} held out, {dropped} left out")
    return sources


def weighted(items: list, weight: float) -> Iterator:
    """Every item `int(weight)` times, and the first part of the list once more for the fraction."""
    for _ in range(int(weight)):
        yield from items
    yield from items[: round(len(items) * (weight % 1))]


def train_vocabulary(sources: list[Source], args: argparse.Namespace) -> dict[str, int]:
    """Lower-cased word pieces and their ids from the training texts, each source counted by its weight."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    texts = [text.replace("[UNK]", " ") for one in sources for text in weighted(one.train, args.weights[one.name])]
    letters: Counter[str] = Counter()
    for text in texts:
        letters.update(tokenizer.normalizer.normalize_str(text))
    del letters[" "]
    alphabet = [letter for letter, _ in sorted(letters.items(), key=lambda item: (-item[1], item[0]))[:ALPHABET]]
    trainer = trainers.WordPieceTrainer(
        vocab_size=args.vocab_size,
        # Word-inner letters, too, come first: else the trainer numbers them in its hash order, which breaks ties
        # between merges, and two runs give two vocabularies.
        special_tokens=[*SPECIAL_TOKENS, *(f"##{letter}" for letter in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()


def to_blocks(texts: list[str], tokenizer: BertTokenizerFast, length: int) -> np.ndarray:
    """(N, length) token ids: `[CLS]`, then records with a `[SEP]` after each, cut where the block is full."""
    stream: list[int] = []
    for start in range(0, len(texts), 4096):
        for ids in tokenizer(texts[start : start + 4096], add_special_tokens=False, verbose=False)["input_ids"]:
            stream += [*ids, tokenizer.sep_token_id]
    inner = length - 2
    body = np.array(stream[: len(stream) // inner * inner], dtype=np.uint16).reshape(-1, inner)
    edges = np.ones((len(body), 1), dtype=np.uint16)
    return np.hstack([edges * tokenizer.cls_token_id, body, edges * tokenizer.sep_token_id])


def training_blocks(sources: list[Source], tokenizer: BertTokenizerFast, args: argparse.Namespace) -> np.ndarray:
    """(N, block) token ids of one pass: every source's blocks, as often as its weight says."""
    blocks = []
    for source in sources:
        own = list(weighted(list(to_blocks(source.train, tokenizer, args.block)), args.weights[source.name]))
        print(f"{source.name}: {len(own)} blocks of {args.block} tokens at weight {args.weights[source.name]:g}")
        blocks += own
    if len(blocks) < args.batch_size:
        raise ValueError(f"the texts fill {len(blocks)} blocks of {args.block} tokens, fewer than --batch-size.")
    return np.stack(blocks)


class Blocks(torch.utils.data.Dataset):
    def __init__(self, ids: np.ndarray):
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(self.ids[index].astype(np.int64))}


# ------------------------------------------------------------------------------------------------------------- training


def masked_logits(model: BertForMaskedLM, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (M, V) and labels (M,) of the M masked positions: the head runs on these, not on all B x L."""
    masked = batch["labels"] != -100
    states = model.base_model(input_ids=batch["input_ids"]).last_hidden_state  # (B, L, H)
    return model.cls(states[masked]).float(), batch["labels"][masked]


class RepeatableMasks(DataCollatorForLanguageModeling):
    """Draws the masks from the batch itself: another pass, another batch, other masks; a resumed run, the same ones.

    The global generator won't do: data loaders read one batch ahead, so the state in a checkpoint is a batch too late.
    """

    def torch_call(self, examples):
        self.seed = zlib.crc32(torch.stack([example["input_ids"] for example in examples]).numpy().tobytes())
        self.create_rng("pt")
        return super().torch_call(examples)


class MaskedPositionsTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        with self.accelerator.autocast():  # accelerate puts it around model.forward, which isn't called here
            logits, labels = masked_logits(model, inputs)
        loss = cross_entropy(logits, labels)
        return (loss, {"logits": logits}) if return_outputs else loss


def new_model(counts: np.ndarray, args: argparse.Namespace) -> BertForMaskedLM:
    """Random weights, but for the first layer's view of the neighbours and the output bias: log frequencies."""
    config = BertConfig(
        vocab_size=len(counts),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.05,  # BERT's 0.02 suits H = 768
        hidden_dropout_prob=0.0,  # so few passes over the texts that there is nothing to regularise
        attention_probs_dropout_prob=0.0,
        pad_token_id=SPECIAL_TOKENS.index("[PAD]"),
    )
    model = BertForMaskedLM(config)
    with torch.no_grad():
        look_at_neighbours(model)
        model.cls.predictions.bias.copy_(torch.from_numpy(np.log((counts + 1) / counts.sum())))
    return model


def sinusoidal_positions(hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Speeds (H / 2,) in radians a token, and their sines, then cosines, at every position (512, H)."""
    speeds = 2.5 * 1000 ** -torch.linspace(0, 1, hidden_size // 2)
    angles = torch.arange(MAX_POSITIONS)[:, None] * speeds
    return speeds, torch.cat([angles.sin(), angles.cos()], dim=1)


def look_at_neighbours(model: BertForMaskedLM) -> None:
    """Start head n of the first layer at the token `offset` n away: -1, 1, -2, 2, ...

    Random heads average over the block, and finding the neighbours takes thousands of steps. With sinusoidal positions
    a query turned by the angle of `offset` meets the key there: q_i . k_j ~ sum over f of cos(w_f (i + offset - j)).
    All of this is trained like the rest.
    """
    embeddings, attention = model.base_model.embeddings, model.base_model.encoder.layer[0].attention.self
    half, width = model.config.hidden_size // 2, attention.attention_head_size  # of all states; of a head
    speeds, sinusoids = sinusoidal_positions(model.config.hidden_size)
    embeddings.position_embeddings.weight.copy_(0.1 * sinusoids)
    embeddings.token_type_embeddings.weight.zero_()
    sine = torch.arange(width // 2)  # a head reads the fastest pairs: the slow ones don't tell neighbours apart
    cosine, turned = sine + half, sine + width // 2  # where the states have the cosines, and the head its second half
    for head in range(model.config.num_attention_heads):
        offset = (head // 2 + 1) * (-1) ** (head + 1)
        query, key = torch.zeros(2, width, 2 * half)
        key[sine, sine] = key[turned, cosine] = query[sine, sine] = query[turned, cosine] = 2.5  # sharp, not one-hot
        query[sine, sine] *= torch.cos(offset * speeds[sine])
        query[turned, cosine] *= torch.cos(offset * speeds[sine])
        query[sine, cosine] = 2.5 * torch.sin(offset * speeds[sine])
        query[turned, sine] = -2.5 * torch.sin(offset * speeds[sine])
        rows = slice(head * width, (head + 1) * width)
        attention.query.weight[rows], attention.key.weight[rows] = query, key


def extend_positions(model: BertForMaskedLM, trained: int) -> None:
    """Continue the trained positions past the block, dimension by dimension, by their least-squares fit with sinusoids.

    Training changes the sinusoids' phase and size, so the original ones don't fit on, and copies of the trained
    positions would have every token see several left neighbours. Dimensions that make less than two turns in a block
    don't tell how they go on, and get their mean. Position 0, [CLS]'s own, has no part in it.
    """
    positions = model.base_model.embeddings.position_embeddings.weight
    half = positions.shape[1] // 2
    speeds, sinusoids = sinusoidal_positions(2 * half)
    with torch.no_grad():
        known = positions[1:trained].float()
        positions[trained:] = known.mean(0)
        for pair in torch.nonzero(speeds * trained >= 4 * torch.pi).flatten().tolist():
            own = [pair, pair + half]
            basis = torch.cat([sinusoids[:, own], torch.ones(MAX_POSITIONS, 1)], dim=1)  # (512, 3)
            fit = torch.linalg.lstsq(basis[1:trained], known[:, own]).solution  # (3, 2)
            positions[trained:, own] = basis[trained:] @ fit


def write_asset(model: BertForMaskedLM, tokenizer: BertTokenizerFast, output: Path) -> None:
    """fp16 weights and tokenizer, under a temporary name until complete."""
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.float16).save_pretrained(partial)  # the tied decoder is stored once
    tokenizer.save_pretrained(partial)
    os.replace(partial, output)


def last_complete_checkpoint(work: Path) -> str | None:
    """The newest checkpoint whose trainer_state.json, which the Trainer writes last, is there."""
    done = [path.parent for path in work.glob("checkpoint-*/trainer_state.json")]
    return str(max(done, key=lambda path: int(path.name.split("-")[1]))) if done else None


def check_run(args: argparse.Namespace, work: Path, settings: dict[str, str]) -> None:
    """Refuse to overwrite anything, and to resume a run with other settings than its own."""
    if args.output.exists():
        raise FileExistsError(f"{args.output} exists already: remove it or choose another --output.")
    if not args.resume:
        if work.exists():
            raise FileExistsError(f"{work} holds an unfinished run: add --resume to go on with it, or remove it.")
        return
    record = work / "settings.json"
    if not record.exists():
        raise FileNotFoundError(f"--resume: {work} holds no run to go on with; start without --resume.")
    before = json.loads(record.read_text())
    changed = sorted(key for key in settings if settings[key] != before.get(key))
    if changed:
        raise ValueError(f"--resume: the run in {work} had other settings for {', '.join(changed)}.")


def training_arguments(args: argparse.Namespace, work: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(work),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        dataloader_drop_last=True,
        learning_rate=args.learning_rate,
        # Constant until the last part: until then nothing depends on --steps, so a resumed run may end sooner or later.
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": round(args.decay * args.steps), "decay_type": "1-sqrt"},
        warmup_steps=args.warmup_steps,
        weight_decay=0.01,
        adam_beta2=0.98,  # as RoBERTa, for a short run
        bf16=args.bf16,
        use_cpu=not torch.cuda.is_available(),
        save_steps=args.save_steps,
        save_total_limit=2,
        logging_steps=min(100, args.save_steps),
        disable_tqdm=not sys.stderr.isatty(),
        report_to=[],
        seed=args.seed,
    )


def pretrain(args: argparse.Namespace) -> None:
    work = args.output.with_name(args.output.name + ".work")
    settings = {key: str(value) for key, value in vars(args).items() if key not in MAY_CHANGE}
    check_run(args, work, settings)
    set_seed(args.seed)
    sources = read_sources(args)
    work.mkdir(parents=True, exist_ok=True)
    (work / "settings.json").write_text(json.dumps(settings, indent=1))
    vocabulary = work / "vocabulary.json"
    if not vocabulary.exists():
        partial = vocabulary.with_suffix(".partial")
        partial.write_text(json.dumps(train_vocabulary(sources, args)))
        os.replace(partial, vocabulary)
    tokenizer = BertTokenizerFast(vocab=json.loads(vocabulary.read_text()), model_max_length=MAX_POSITIONS)
    ids = training_blocks(sources, tokenizer, args)
    model = new_model(np.bincount(ids.ravel(), minlength=len(tokenizer)), args)
    passes = args.steps * args.batch_size / len(ids)
    print(f"{model.num_parameters():,} parameters; {args.steps} steps are {passes:.2f} passes", flush=True)
    trainer = MaskedPositionsTrainer(
        model=model,
        args=training_arguments(args, work),
        train_dataset=Blocks(ids),
        data_collator=RepeatableMasks(tokenizer, mlm_probability=args.mask),
    )
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(work))
    extend_positions(model, args.block)
    write_asset(model, tokenizer, args.output)
    shutil.rmtree(work)
    print(f"wrote {args.output}")


# ----------------------------------------------------------------------------------------------------------- evaluation


@torch.inference_mode()
def accuracy(
    model: BertForMaskedLM, blocks: np.ndarray, collator: DataCollatorForLanguageModeling
) -> tuple[int, float, Counter]:
    """Number of masked tokens, share predicted first, and how often each masked token comes (same seed, same masks)."""
    torch.manual_seed(0)
    right, tokens = 0, Counter()
    data = torch.utils.data.DataLoader(Blocks(blocks), batch_size=32, collate_fn=collator)
    for batch in tqdm(data, disable=not sys.stderr.isatty(), leave=False):
        logits, labels = masked_logits(model, batch)
        right += int((logits.argmax(-1) == labels).sum())
        tokens.update(labels.tolist())
    total = tokens.total()
    return total, right / max(total, 1), tokens


def evaluate(args: argparse.Namespace) -> None:
    """Top-1 accuracy on the held-out texts, 15 % masked, seed 0, beside always naming the most frequent token.

    `accuracy` shows every chosen token as [MASK]; `80/10/10` as BERT's training does: 80 % [MASK], 10 % another
    token, 10 % the token itself.
    """
    if not (args.evaluate / "config.json").exists():
        raise FileNotFoundError(f"--evaluate: {args.evaluate} holds no model (config.json is missing).")
    model = AutoModelForMaskedLM.from_pretrained(args.evaluate, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.evaluate)
    sources = read_sources(args)
    counts: Counter[int] = Counter()
    for source in sources:
        ids, number = np.unique(to_blocks(source.train, tokenizer, args.block), return_counts=True)
        for token, times in zip(ids.tolist(), number.tolist(), strict=True):
            counts[token] += times * args.weights[source.name]
    for token in tokenizer.all_special_ids:
        counts.pop(token, None)  # never masked, so never an answer
    frequent = counts.most_common(1)[0][0]

    masks = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.15, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    bert = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    rows = []
    for source in sources:
        blocks = to_blocks(source.held_out, tokenizer, args.block)
        total, share, tokens = accuracy(model, blocks, masks)
        _, share_bert, _ = accuracy(model, blocks, bert)
        unigram = tokens[frequent] / max(total, 1)
        rows.append(
            {"source": source.name, "masked": total, "accuracy": share, "80/10/10": share_bert, "unigram": unigram}
        )
    print(f"unigram baseline: always {tokenizer.convert_ids_to_tokens(frequent)!r}")
    print(f"{'source':24}{'masked':>9}{'accuracy':>10}{'80/10/10':>10}{'unigram':>10}")
    for row in rows:
        print(
            f"{row['source']:24}{row['masked']:9d}{row['accuracy']:10.3f}{row['80/10/10']:10.3f}{row['unigram']:10.3f}"
        )
    print(json.dumps({"rows": rows, "block": args.block, "torch": torch.__version__}))


# --------------------------------------------------------------------------------------------------------- command line


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="NAME.jsonl.gz or NAME.txt.gz files")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--output", type=Path, help="folder to write; checkpoints go to OUTPUT.work until it is complete")
    goal.add_argument(
        "--evaluate", type=Path, metavar="FOLDER", help="measure this model on the held-out texts instead"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last complete checkpoint of OUTPUT.work")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--weight", action="append", default=[], metavar="NAME=X", help="see a source X times a pass (default 1)"
    )
    parser.add_argument(
        "--keep-half", action="append", default=[], metavar="NAME", help="keep a source's second half out of training"
    )
    parser.add_argument("--held-out", type=float, default=0.02, help="share of every other source's records kept out")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--block", type=int, default=128, help="tokens a block")
    parser.add_argument("--batch-size", type=int, default=16, help="blocks a step")
    parser.add_argument("--steps", type=int, default=5000, help="may change with --resume")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warmup-steps", type=int, default=200)
    parser.add_argument("--decay", type=float, default=0.35, help="share of the steps in which the rate falls to zero")
    parser.add_argument("--mask", type=float, default=0.2, help="share of the tokens masked in training")
    parser.add_argument(
        "--bf16", action="store_true", help="bfloat16 autocast: twice as fast where the processor has it"
    )
    parser.add_argument("--save-steps", type=int, default=500)
    args = parser.parse_args(argv)
    names = [path.name.split(".")[0] for path in args.texts]
    for path in args.texts:
        if not path.name.endswith((".jsonl.gz", ".txt.gz")):
            parser.error(f"{path}: expected a file named NAME.jsonl.gz or NAME.txt.gz.")
        if not path.is_file():
            parser.error(f"{path}: no such file.")
    if len(set(names)) < len(names):
        parser.error(f"two text files have the same name: {', '.join(names)}.")
    args.weights = dict.fromkeys(names, 1.0)
    for item in args.weight:
        name, _, value = item.partition("=")
        try:
            args.weights[name] = float(value)
        except ValueError:
            parser.error(f"--weight: expected NAME=X with a number X, got {item!r}.")
    unknown = sorted({*args.weights, *args.keep_half} - set(names))
    if unknown:
        parser.error(
            f"--weight, --keep-half: no text file is named {', '.join(unknown)}; there are {', '.join(names)}."
        )
    if args.hidden_size % (2 * args.heads):
        parser.error(f"--hidden-size must be a multiple of twice --heads {args.heads}, got {args.hidden_size}.")
    if not 8 <= args.block <= MAX_POSITIONS:
        parser.error(f"--block must lie between 8 and {MAX_POSITIONS}, got {args.block}.")
    if args.vocab_size > 65536:
        parser.error(f"--vocab-size must be at most 65536 (ids are held in 16 bits), got {args.vocab_size}.")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        if args.evaluate:
            evaluate(args)
        else:
            pretrain(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
