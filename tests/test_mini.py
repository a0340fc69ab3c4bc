"""The bundled backbone: a real masked language model, small, whole, and fit to train from."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from st_aggretriever import build_aggretriever
from st_aggretriever.quickstart import asset

MINI = asset("mini")


def test_it_is_at_most_eight_megabytes_in_fp16_with_one_vocabulary_matrix() -> None:
    assert sum(path.stat().st_size for path in MINI.iterdir()) < 8e6
    weights = load_file(MINI / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert [tuple(t.shape) for t in weights.values() if t.shape[0] == 8192 and t.dim() == 2] == [(8192, 192)]


@pytest.mark.parametrize(
    ("sentence", "word"),
    [
        ("he was born in new [MASK] .", "york"),
        ("what are the [MASK] of diabetes ?", "symptoms"),
        ("in the first half [MASK] the season , the team won ten games .", "of"),
        ("she is one of the most popular singers in the united [MASK] .", "states"),
        ("many people believe [MASK] the earth is round .", "that"),
    ],
)
def test_it_fills_in_the_word(sentence: str, word: str) -> None:
    model, info = AutoModelForMaskedLM.from_pretrained(MINI, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    batch = tokenizer(sentence, return_tensors="pt")
    place = batch["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    with torch.no_grad():
        best = model(**batch).logits[0, place].argmax()
    assert tokenizer.convert_ids_to_tokens(int(best)) == word


def test_lexical_weights_hold_the_words_of_the_text_and_related_ones() -> None:
    """What the head says of a text's tokens: mostly the tokens themselves, before any training."""
    model = build_aggretriever(MINI, term_weight="none").float()
    text = "the doctor treats patients in the hospital"
    weights = model.encode(text, output_value=None)["lexical_weights"]
    own = set(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    top = set(weights.topk(len(own)).indices.tolist())
    assert len(own & top) >= len(own) / 2


def test_vectors_are_invariant_in_its_stored_half_precision_too(tmp_path: Path) -> None:
    texts = ["ships cross the sea", "", "a " * 60, "bread and butter"]
    for model in (build_aggretriever(MINI), build_aggretriever(MINI).float()):
        together, alone = model.encode(texts), np.stack([model.encode(text) for text in texts])
        tolerance = 1e-5 if model[0].model.dtype == torch.float32 else 2e-3
        np.testing.assert_allclose(np.abs(together), np.abs(alone), atol=tolerance)
