"""Tiny random backbones with real tokenizers, made offline; every test runs on the CPU."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

torch.set_num_threads(1)  # The models are tiny: threads would wait for each other longer than they work.

# Every word the tests use, and letters, so that any ASCII text has tokens of its own.
WORDS = (
    "the a of and is in to what who when how dog cat fox bird fish paris france capital city river quick brown lazy "
    "jumps over sleeps hello world information retrieval dense vector query document passage search engine word "
    "bread flour water salt oven yeast rises slowly needs time heat cold rain sun wind moon star sea ship sails"
).split()
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!:-"


def make_tokenizer(style: str = "bert") -> transformers.PreTrainedTokenizerFast:
    """A WordPiece tokenizer, [CLS] text [SEP], or with RoBERTa's names and ids (<s> 0, <pad> 1, </s> 2)."""
    names = {
        "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        "roberta": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
    }
    if style == "bert":
        pad, unk, cls, sep, mask = names[style]
    else:
        cls, pad, sep, unk, mask = names[style]
    pieces = [*names[style], *dict.fromkeys([*WORDS, *LETTERS, *(f"##{c}" for c in LETTERS)])]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unk, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B {sep}", special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unk,
        cls_token=cls,
        sep_token=sep,
        mask_token=mask,
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
    )


def make_bytelevel_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE, as ModernBERT's: every word is one token, with the blank before it or without."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [*WORDS, *(f" {word}" for word in WORDS), *LETTERS]
    tokenizer.train_from_iterator(texts * 2, trainers.BpeTrainer(special_tokens=special, show_progress=False))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names)


VOCAB_SIZE = len(make_tokenizer())  # 147: odd, so every slice rule meets a remainder
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
}


def make_config(kind: str, **changes: Any) -> transformers.PretrainedConfig:
    """A tiny configuration of an architecture, by its model_type."""
    sizes = {"vocab_size": VOCAB_SIZE, **SIZES, **changes}
    if kind == "distilbert":
        renamed = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        sizes = {renamed.get(key, key): value for key, value in sizes.items()}
        sizes["hidden_dim"] = sizes.pop("intermediate_size")
    if kind in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        sizes = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, **sizes}
        sizes["max_position_embeddings"] += 2
    if kind in ("electra", "albert"):
        sizes.setdefault("embedding_size", 12)
    if kind == "modernbert":
        sizes |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    if kind == "deberta-v2":
        sizes.setdefault("legacy", True)
    if kind == "eurobert":
        sizes |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "mask_token_id": 4}
    return transformers.AutoConfig.for_model(kind, **sizes)


def save_backbone(
    folder: Path, kind: str = "bert", *, head: bool = True, seed: int = 0, **changes: Any
) -> tuple[str, torch.nn.Module]:
    """Write a random backbone with its tokenizer; returns the folder and the transformers model."""
    torch.manual_seed(seed)
    auto_class = transformers.AutoModelForMaskedLM if head else transformers.AutoModel
    model = auto_class.from_config(make_config(kind, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Random initialisation is nearly uniform over the vocabulary, and its biases are zeros, which would hide a
            # bias that is lost: make both matter.
            if parameter.dim() == 2:
                parameter.mul_(8.0)
            elif name.endswith("bias"):
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    style = "roberta" if kind in ("roberta", "xlm-roberta", "camembert", "mpnet") else "bert"
    make_tokenizer(style).save_pretrained(folder)
    return str(folder), model


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random BERT masked language model: 2 layers, H = 16, V = 147."""
    return save_backbone(tmp_path_factory.mktemp("tiny-bert"))[0]


@pytest.fixture(scope="session")
def tiny_distilbert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_backbone(tmp_path_factory.mktemp("tiny-distilbert"), "distilbert")[0]


@pytest.fixture(scope="session")
def tiny_bytelevel(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT whose tokenizer has the blank before a word in the word's token."""
    tokenizer = make_bytelevel_tokenizer()
    folder, _ = save_backbone(tmp_path_factory.mktemp("tiny-bytelevel"), vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_roberta(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_backbone(tmp_path_factory.mktemp("tiny-roberta"), "roberta")[0]


@pytest.fixture(scope="session")
def headless_bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same sizes without masked-language-model head."""
    return save_backbone(tmp_path_factory.mktemp("headless-bert"), head=False)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Training runs


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """24 pairs: three steps of eight in an epoch."""
    from training_runs import make_rows, write_rows

    return write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", make_rows(24))


@pytest.fixture
def settings(tiny_bert: str, pairs: str, tmp_path: Path) -> dict[str, Any]:
    """Of a run of six steps, without checkpoints."""
    return {
        "model": tiny_bert,
        "pairs": [pairs],
        "output": str(tmp_path / "out"),
        "lexical_dim": 16,
        "cls_dim": 8,
        "batch_size": 8,
        "epochs": 2,
        "learning_rate": 1e-2,
        "save_steps": 0,
        "logging_steps": 1,
        "device": "cpu",
        "report": False,
    }
