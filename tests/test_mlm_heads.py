"""MLMEncoder: the split head equals the model's own logits, in every architecture of the table."""

from pathlib import Path

import conftest
import pytest
import torch
import torch.nn.functional as F

from st_aggretriever import AggretrieverLoss, MLMEncoder, build_aggretriever, load_aggretriever

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
