"""MLMEncoder: the split head equals the model's own logits, in every architecture of the table."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import conftest
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoModelForMaskedLM, AutoTokenizer

from st_aggretriever import AggretrieverLoss, MLMEncoder, SliceMaxAgg, build_aggretriever, load_aggretriever

FAMILIES = (
    "bert",
    "distilbert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "mpnet",
    "electra",
    "albert",
    "modernbert",
    "nomic_bert",
    "deberta-v2",
    "eurobert",
)
TEXTS = ["the quick brown fox", "what is dense retrieval in a search engine ?", "", "a"]


@pytest.fixture(scope="module", params=FAMILIES)
def backbone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp(request.param)
    conftest.save_backbone(folder, request.param)
    return request.param, str(folder)


def test_split_head_equals_the_models_own_logits(backbone: tuple[str, str]) -> None:
    encoder = MLMEncoder(backbone[1]).eval()
    features = encoder.preprocess(TEXTS)
    with torch.no_grad():
        output = encoder(dict(features))
        split = F.linear(output["mlm_states"], output["decoder_weight"], output["decoder_bias"])
        own = encoder.model(input_ids=features["input_ids"], attention_mask=features["attention_mask"]).logits
    real = features["attention_mask"] != 0
    assert own[real].std() > 0.1  # A constant head would agree with anything.
    torch.testing.assert_close(split[real], own[real], rtol=0, atol=1e-5)


def test_split_head_equals_the_model_with_an_identity_decoder(backbone: tuple[str, str]) -> None:
    """Found without the table: with the decoder's product replaced by identity the model returns its input."""
    encoder = MLMEncoder(backbone[1]).eval()
    features = encoder.preprocess(TEXTS)
    with torch.no_grad():
        states = encoder(dict(features))["mlm_states"]
        decoder = encoder.model.get_output_embeddings()
        decoder.forward = lambda hidden: hidden
        own = encoder.model(input_ids=features["input_ids"], attention_mask=features["attention_mask"]).logits
    real = features["attention_mask"] != 0
    torch.testing.assert_close(states[real], own[real], rtol=0, atol=1e-6)


def test_save_and_reload_is_equal_and_keeps_the_tie(backbone: tuple[str, str], tmp_path: Path) -> None:
    kind, folder = backbone
    model = build_aggretriever(folder, lexical_dim=16, cls_dim=4)
    model.save_pretrained(str(tmp_path))
    again = load_aggretriever(tmp_path)
    assert abs(model.encode(TEXTS) - again.encode(TEXTS)).max() == 0
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    masked_lm = again[0].model
    shared = masked_lm.get_output_embeddings().weight is masked_lm.get_input_embeddings().weight
    assert shared is (kind != "eurobert")


def test_one_step_gives_every_trainable_parameter_a_gradient(backbone: tuple[str, str]) -> None:
    model = build_aggretriever(backbone[1], lexical_dim=16, cls_dim=4)
    loss = AggretrieverLoss(model)
    columns = [["what dog", "who sails"], ["the dog sleeps", "the ship sails"]]
    sum(loss([model.preprocess(texts) for texts in columns]).values()).backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []


def test_lengths_are_cut_at_what_the_positions_allow(backbone: tuple[str, str]) -> None:
    model = build_aggretriever(backbone[1], lexical_dim=16, cls_dim=4, document_length=600)
    vectors = model.encode_document(["dog " * 2000, "dog " * 700])
    assert model.max_seq_length == 512
    assert model[0].document_length == 512
    assert torch.from_numpy(vectors).isfinite().all()
    assert abs(vectors[0] - vectors[1]).max() < 1e-5  # both are cut to the same 512 tokens


def test_padding_side_does_not_change_a_vector(backbone: tuple[str, str]) -> None:
    model = build_aggretriever(backbone[1], lexical_dim=16, cls_dim=4, aggregation="positive")
    right = model.encode(TEXTS)
    model.tokenizer.padding_side = "left"
    assert abs(model.encode(TEXTS) - right).max() < 1e-5


# Cases that bite, for every family


FRESH = """
import sys, torch
from st_aggretriever import load_aggretriever
torch.set_num_threads(1)
for kind in {families!r}:
    model = load_aggretriever(sys.argv[1] + "/" + kind)
    torch.save((model.state_dict(), torch.from_numpy(model.encode({texts!r}))), sys.argv[1] + "/" + kind + ".pt")
"""


def test_a_fresh_process_gives_equal_tensors_and_vectors(tmp_path: Path) -> None:
    """All families in one process, which has nothing of this one's memory."""
    expected = {}
    for kind in FAMILIES:
        folder, _ = conftest.save_backbone(tmp_path / f"{kind}-backbone", kind)
        model = build_aggretriever(folder, lexical_dim=16, cls_dim=4)
        model.save_pretrained(str(tmp_path / kind))
        expected[kind] = (model.state_dict(), model.encode(TEXTS))
    script = tmp_path / "script.py"
    script.write_text(FRESH.format(families=FAMILIES, texts=TEXTS))
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for kind, (tensors, vectors) in expected.items():
        again, same_vectors = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        assert set(again) == set(tensors), kind
        assert [name for name in tensors if not torch.equal(tensors[name], again[name])] == [], kind
        assert abs(same_vectors.numpy() - vectors).max() == 0, kind


def test_the_vocabulary_matrix_is_on_disk_once_and_an_untied_one_twice(
    backbone: tuple[str, str], tmp_path: Path
) -> None:
    kind, folder = backbone
    untied, _ = conftest.save_backbone(tmp_path / "backbone", kind, tie_word_embeddings=False)
    for name, source, copies in (("tied", folder, 1), ("untied", untied, 2)):
        model = build_aggretriever(source, lexical_dim=16, cls_dim=4)
        model.save_pretrained(str(tmp_path / name))
        stored = load_file(tmp_path / name / "model.safetensors")
        wide = [key for key, tensor in stored.items() if tensor.dim() == 2 and len(tensor) == conftest.VOCAB_SIZE]
        assert len(wide) == (2 if kind == "eurobert" else copies), wide
        masked_lm = load_aggretriever(tmp_path / name)[0].model
        decoder, embeddings = masked_lm.get_output_embeddings().weight, masked_lm.get_input_embeddings().weight
        assert (decoder is embeddings) is (len(wide) == 1)
        assert torch.equal(decoder, embeddings) is (len(wide) == 1)


def test_token_type_ids_change_nothing_where_they_are_zeros(backbone: tuple[str, str]) -> None:
    model = build_aggretriever(backbone[1], lexical_dim=16, cls_dim=4)
    expected = model.encode(TEXTS)
    model.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert "token_type_ids" in model.preprocess(TEXTS)
    assert abs(model.encode(TEXTS) - expected).max() < 1e-6


@pytest.mark.parametrize("pooling", ["mlm", "tokens"])
def test_a_resized_vocabulary_gives_its_width_and_every_id_one_slice(
    backbone: tuple[str, str], tmp_path: Path, pooling: str
) -> None:
    """22 tokens are added to 147; the decoder decides, and 169 ids fill the slices of D = 8 and of D = 84."""
    folder = backbone[1]
    masked_lm = AutoModelForMaskedLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"[new{i}]" for i in range(22)])
    masked_lm.resize_token_embeddings(len(tokenizer))
    masked_lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    size = conftest.VOCAB_SIZE + 22
    for dim in (8, size // 2):
        model = build_aggretriever(str(tmp_path), lexical_dim=dim, cls_dim=4, pooling=pooling)
        assert model[2].vocab_size == size
        assert np.isfinite(model.encode("dog [new21] [new0]")).all()
        folded = model[2].aggregate(torch.eye(size)).abs().bool()
        assert (folded.sum(1) == 1).all(), "each id moves one dimension"
    if pooling == "tokens":
        weights = model.encode("[new21]", output_value=None)["lexical_weights"]
        assert weights[size - 1] > 0, "the last id has a place of its own"
    with pytest.raises(ValueError, match=f"lexical_dim must be at most V // 2 = {size // 2}, got {size}"):
        build_aggretriever(str(tmp_path), lexical_dim=size, pooling=pooling)


def test_empty_texts_and_no_texts_have_vectors(backbone: tuple[str, str]) -> None:
    model = build_aggretriever(backbone[1], lexical_dim=16, cls_dim=4)
    assert model.encode([]).shape[0] == 0
    for texts in ([""], ["", "   ", "dog", ""]):
        for encode in (model.encode, model.encode_query, model.encode_document):
            vectors = encode(texts)
            assert vectors.shape == (len(texts), 20)
            assert np.isfinite(vectors).all()


# Encoders without a head


def test_an_encoder_without_head_is_refused_and_the_poolings_without_head_take_it(
    backbone: tuple[str, str], tmp_path: Path
) -> None:
    kind, _ = backbone
    conftest.save_backbone(tmp_path, kind, head=False)
    with pytest.raises(ValueError, match=rf"\({kind}\) must hold a pretrained masked-language-model head.*'tokens'"):
        build_aggretriever(tmp_path, lexical_dim=16, cls_dim=4)
    for pooling in ("tokens", "cls", "mean", "mean+cls"):
        model = build_aggretriever(tmp_path, lexical_dim=16, cls_dim=4, pooling=pooling)
        assert np.isfinite(model.encode(TEXTS)).all()


def test_a_grafted_head_is_the_originals_on_the_encoders_own_states(backbone: tuple[str, str], tmp_path: Path) -> None:
    """An embedder made from the backbone: same vocabulary and sizes, other weights, no head."""
    kind, original = backbone
    _, embedder = conftest.save_backbone(tmp_path / "embedder", kind, head=False, seed=5)
    model = build_aggretriever(tmp_path / "embedder", lexical_dim=16, cls_dim=4, mlm_head_from=original)
    assert model[0].model.config.mlm_head_from == Path(original).name
    masked_lm = AutoModelForMaskedLM.from_pretrained(original)
    prefix = f"{masked_lm.base_model_prefix}."
    tied = kind != "eurobert"
    decoder = masked_lm.get_output_embeddings().weight
    for name, tensor in model[0].model.state_dict().items():
        if name.startswith(prefix):
            assert torch.equal(tensor, embedder.state_dict()[name.removeprefix(prefix)]), name
        elif tied and tensor.shape == decoder.shape:
            assert torch.equal(tensor, embedder.get_input_embeddings().weight), name
        else:
            assert torch.equal(tensor, masked_lm.state_dict()[name]), name
    model.save_pretrained(str(tmp_path / "saved"))
    again = load_aggretriever(tmp_path / "saved")
    assert np.array_equal(again.encode(TEXTS), model.encode(TEXTS))
    assert again[0].model.config.mlm_head_from == Path(original).name
    without = build_aggretriever(tmp_path / "embedder", pooling="cls", cls_dim=4)
    states = [m.encode(TEXTS, output_value=None)[1]["token_embeddings"] for m in (model, without)]
    torch.testing.assert_close(*states)


EMBEDDERS = {"MiniLM-like": "bert", "multilingual-e5-like": "xlm-roberta", "old-mpnet-like": "mpnet"}


@pytest.fixture(scope="module", params=EMBEDDERS)
def embedder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of an embedder as sentence-transformers save it, with pooler weights, and of the model it comes from."""
    kind, folder = EMBEDDERS[request.param], tmp_path_factory.mktemp("embedder")
    original = tmp_path_factory.mktemp("original")
    conftest.save_backbone(original, kind)
    conftest.save_backbone(folder / "plain", kind, head=False, seed=5)
    transformer = Transformer(str(folder / "plain"), max_seq_length=64)
    pooling = Pooling(16, pooling_mode="mean")
    SentenceTransformer(modules=[transformer, pooling, Normalize()]).save_pretrained(str(folder / "saved"))
    stored = load_file(folder / "saved" / "model.safetensors")
    assert "pooler.dense.weight" in stored
    if request.param.startswith("old"):  # the encoder in a folder of its own
        parts = {path for path in (folder / "saved").iterdir() if path.is_file() and path.name != "modules.json"}
        (folder / "saved" / "0_Transformer").mkdir()
        for path in parts:
            shutil.move(path, folder / "saved" / "0_Transformer" / path.name)
        entries = json.loads((folder / "saved" / "modules.json").read_text())
        entries[0]["path"] = "0_Transformer"
        (folder / "saved" / "modules.json").write_text(json.dumps(entries))
    return folder / "saved", original


@pytest.mark.parametrize("how", ["tokens", "cls", "mean", "grafted head"])
def test_an_embedder_becomes_an_aggretriever(embedder: tuple[Path, Path], tmp_path: Path, how: str) -> None:
    folder, original = embedder
    with pytest.raises(ValueError, match="must hold a pretrained masked-language-model head"):
        build_aggretriever(folder, lexical_dim=16, cls_dim=4)
    options: dict[str, Any] = {"mlm_head_from": original} if how == "grafted head" else {"pooling": how}
    model = build_aggretriever(folder, lexical_dim=16, cls_dim=4, **options)
    embedded = SentenceTransformer(str(folder)).encode(TEXTS, output_value="token_embeddings")
    states = model.encode(TEXTS, output_value="token_embeddings")
    for ours, theirs in zip(states, embedded, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    model.save_pretrained(str(tmp_path))
    assert np.array_equal(load_aggretriever(tmp_path).encode(TEXTS), model.encode(TEXTS))
    loss = AggretrieverLoss(model)
    sum(loss([model.preprocess(TEXTS[:2]), model.preprocess(TEXTS[2:])]).values()).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "distilbert"}, "must have the same model_type .* got distilbert and bert"),
        ({"hidden_size": 32}, "same hidden size .* got 32 and 16"),
        ({"vocab_size": 160}, "same vocabulary size .* got 160 and 147"),
        ({"hidden_act": "relu"}, "same activation .* got relu and gelu"),
        ({"head": False}, "must hold a pretrained masked-language-model head"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    headless_bert: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    changes = dict(changes)
    conftest.save_backbone(tmp_path, changes.pop("kind", "bert"), **changes)
    with pytest.raises(ValueError, match=message):
        build_aggretriever(headless_bert, lexical_dim=16, mlm_head_from=tmp_path)


def test_a_head_for_another_vocabulary_is_refused(headless_bert: str, tiny_bert: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"dog":', '"god":'))
    with pytest.raises(ValueError, match="differ in 2 entries, the first being 'dog' with id"):
        build_aggretriever(headless_bert, lexical_dim=16, mlm_head_from=tmp_path)
    for options in ({"pooling": "tokens"}, {"lexical_dim": 0}):
        with pytest.raises(ValueError, match="mlm_head_from needs pooling='mlm'"):
            build_aggretriever(headless_bert, **{"lexical_dim": 16, **options}, mlm_head_from=tiny_bert)


def test_a_graft_takes_dtype_and_fewer_layers(tiny_bert: str, tmp_path: Path) -> None:
    """An embedder may have been cut to fewer layers than the model it was made from."""
    conftest.save_backbone(tmp_path, head=False, num_hidden_layers=1)
    model = build_aggretriever(
        tmp_path, lexical_dim=16, mlm_head_from=tiny_bert, model_kwargs={"dtype": torch.bfloat16}
    )
    assert model[0].model.dtype == torch.bfloat16
    assert model[0].model.config.num_hidden_layers == 1
    assert np.isfinite(model.encode(TEXTS)).all()


# Long texts, big vocabularies


def test_a_text_of_4096_tokens_is_read_to_its_end(tmp_path: Path) -> None:
    """A ModernBERT-like configuration: rotary positions, local and global attention."""
    folder, _ = conftest.save_backbone(
        tmp_path, "modernbert", max_position_embeddings=8192, num_hidden_layers=4, global_attn_every_n_layers=3
    )
    model = build_aggretriever(folder, lexical_dim=16, cls_dim=4, document_length=4096)
    text = "dog " * 4093 + "ship"  # with [CLS] and [SEP] 4,096 tokens
    assert model.preprocess([text])["input_ids"].shape == (1, 4096)
    vectors = model.encode_document([text, "a"], batch_size=2)
    assert np.isfinite(vectors).all()
    assert abs(vectors[0] - model.encode_document(text)).max() < 1e-5
    assert abs(vectors[0] - model.encode_document(text[:-4] + "fish")).max() > 1e-4, "its last word counts"


@pytest.mark.parametrize("vocab_size", [57, 28996, 30522, 30544, 50265, 50368, 250002])
@pytest.mark.parametrize("dim", [8, 128, 640])
def test_every_id_falls_into_one_slice(vocab_size: int, dim: int) -> None:
    if 2 * dim > vocab_size:
        with pytest.raises(ValueError, match=f"at most V // 2 = {vocab_size // 2}, got {dim}"):
            SliceMaxAgg(vocab_size, dim)
        return
    fold = SliceMaxAgg(vocab_size, dim)
    ids = {0, 1, vocab_size // 2, vocab_size - 2, vocab_size - 1}
    weights = torch.zeros(len(ids), vocab_size)
    for row, index in enumerate(sorted(ids)):
        weights[row, index] = 1.0
    folded = fold.aggregate(weights)
    for row, index in enumerate(sorted(ids)):
        slice_, half = index % (2 * dim) // 2, index % 2
        assert folded[row].nonzero().flatten().tolist() == [slice_]
        assert folded[row, slice_] == (-1.0 if half else 1.0)


MEASURE = """
import sys
import torch
from st_aggretriever import AggretrieverLoss, build_aggretriever
torch.set_num_threads(1)
queries, documents, tokens = map(int, sys.argv[2:5])
model = build_aggretriever(sys.argv[1])
texts = ["dog " * (tokens - 2)] * documents
assert model.preprocess(texts[:1])["input_ids"].shape == (1, tokens)
assert model.encode(texts, batch_size=documents).shape == (documents, 768)
loss = AggretrieverLoss(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
columns = [model.preprocess(column) for column in (["what dog"] * queries, texts[:queries])]
sum(loss(columns).values()).backward()
optimizer.step()
with open("/proc/self/status") as status:  # ru_maxrss would begin at the size of the process that started this one
    print([int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")][0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_a_vocabulary_of_250002_needs_no_array_over_all_tokens(tmp_path: Path) -> None:
    """4 texts of 128 tokens, encoding and a training step: the logits alone would be 0.5 GB, and as much again in each
    of softmax and its gradient. benchmarks/wide_vocabulary.py measures more."""
    folder, _ = conftest.save_backbone(tmp_path, "xlm-roberta", vocab_size=250002, hidden_size=8)
    command = [sys.executable, "-c", MEASURE, folder, "2", "4", "128"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) < 1.0e9
