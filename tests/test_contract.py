"""One test for each public way to use a SentenceTransformer: it works, or is refused in one sentence."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import join_group, run_two_processes
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator, NanoBEIREvaluator
from sentence_transformers.util import semantic_search

from st_aggretriever import AggretrieverLoss, build_aggretriever, load_aggretriever

TEXTS = ["the quick brown fox", "", "what is dense retrieval in a search engine ?", "bread needs yeast and time"]
CORPUS = {"d1": "bread flour water salt", "d2": "the ship sails over the sea", "d3": "paris is the capital of france"}
QUERIES = {"q1": "what is in bread", "q2": "ship sea"}
RELEVANT = {"q1": {"d1"}, "q2": {"d2"}}


@pytest.fixture
def model(tiny_bert: str) -> SentenceTransformer:
    return build_aggretriever(tiny_bert, lexical_dim=16, cls_dim=4)


@pytest.fixture
def vectors(model: SentenceTransformer) -> np.ndarray:
    return model.encode(TEXTS)


def test_encode_query_and_encode_document(model: SentenceTransformer) -> None:
    query, document = model.encode_query(TEXTS), model.encode_document(TEXTS)
    assert query.shape == document.shape == (4, 20)
    assert query.dtype == document.dtype == np.float32


def test_one_text_several_and_none(model: SentenceTransformer, vectors: np.ndarray) -> None:
    assert model.encode(TEXTS[0]).shape == (20,)
    np.testing.assert_allclose(model.encode(TEXTS[0]), vectors[0], atol=1e-5)
    assert model.encode(np.array(TEXTS)).shape == (4, 20)
    assert len(model.encode([])) == 0
    assert model.encode([""]).shape == (1, 20)


def test_output_value_token_embeddings_and_everything(model: SentenceTransformer) -> None:
    tokens = model.encode(TEXTS, output_value="token_embeddings")
    assert [tuple(states.shape) for states in tokens] == [(6, 16), (2, 16), (11, 16), (7, 16)]
    everything = model.encode(TEXTS, output_value=None)
    assert {"sentence_embedding", "cls_embedding", "lexical_embedding", "lexical_weights"} <= set(everything[0])
    assert not {"mlm_states", "decoder_weight", "decoder_bias"} & set(everything[0])
    assert model.encode(TEXTS, output_value="lexical_weights")[0].shape == (model[2].vocab_size,)


@pytest.mark.parametrize(
    ("precision", "dtype", "width"),
    [
        ("float32", np.float32, 20),
        ("int8", np.int8, 20),
        ("uint8", np.uint8, 20),
        ("binary", np.int8, 3),
        ("ubinary", np.uint8, 3),
    ],
)
def test_precision(model: SentenceTransformer, precision: str, dtype: type, width: int) -> None:
    vectors = model.encode(TEXTS, precision=precision)
    assert vectors.dtype == dtype
    assert vectors.shape == (4, width)


def test_convert_to_tensor_and_to_list(model: SentenceTransformer, vectors: np.ndarray) -> None:
    assert torch.equal(model.encode(TEXTS, convert_to_tensor=True), torch.from_numpy(vectors))
    listed = model.encode(TEXTS, convert_to_numpy=False)
    assert torch.equal(torch.stack(listed), torch.from_numpy(vectors))


def test_truncate_dim_keeps_the_cls_part_and_then_the_first_slices(
    model: SentenceTransformer, vectors: np.ndarray
) -> None:
    assert np.array_equal(model.encode(TEXTS, truncate_dim=10), vectors[:, :10])
    with model.truncate_embeddings(4):
        assert np.array_equal(model.encode(TEXTS), vectors[:, :4])
        assert model.get_embedding_dimension() == 4


def test_normalize_embeddings_is_the_callers_choice(model: SentenceTransformer, vectors: np.ndarray) -> None:
    lengths = np.linalg.norm(vectors, axis=1)
    assert not np.allclose(lengths, 1.0)
    normalized = model.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(normalized, vectors / lengths[:, None], rtol=1e-5, atol=1e-7)


def test_pool_of_processes(model: SentenceTransformer) -> None:
    texts = [f"{one} {two} {three}" for one in "abcde" for two in "dog cat sea sun".split() for three in "12345"] + [""]
    assert len(texts) == 101
    expected = model.encode(texts)
    pool = model.start_multi_process_pool(["cpu", "cpu"])
    try:
        found = model.encode(texts, pool=pool, chunk_size=17)
    finally:
        model.stop_multi_process_pool(pool)
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-5)
    with pytest.raises(ValueError, match="closed"):
        pool["processes"][0].is_alive()


@pytest.mark.parametrize("cast", ["half", "bfloat16"])
def test_half_and_bfloat16_give_float32_arrays(model: SentenceTransformer, vectors: np.ndarray, cast: str) -> None:
    found = getattr(model, cast)().encode(TEXTS)
    assert found.dtype == np.float32
    assert (np.sum(found * vectors, 1) / np.linalg.norm(found, axis=1) / np.linalg.norm(vectors, axis=1)).mean() > 0.99


def test_max_seq_length_shortens_both_sides(model: SentenceTransformer) -> None:
    model.max_seq_length = 6
    long, cut = "the sea and the sun and the moon", "the sea and the"
    assert np.array_equal(model.encode(long), model.encode(cut))
    assert np.array_equal(model.encode_document(long), model.encode(cut))
    assert np.array_equal(model.encode_query(long), model.encode(cut))
    model.max_seq_length = 100_000
    assert model.max_seq_length == 512, "no longer than the position table"


def test_similarity_is_the_dot_product(model: SentenceTransformer, vectors: np.ndarray) -> None:
    np.testing.assert_allclose(model.similarity(vectors, vectors), vectors @ vectors.T, rtol=1e-5)
    np.testing.assert_allclose(model.similarity_pairwise(vectors, vectors), (vectors * vectors).sum(1), rtol=1e-5)


def test_semantic_search(model: SentenceTransformer) -> None:
    queries = model.encode_query(list(QUERIES.values()), convert_to_tensor=True)
    corpus = model.encode_document(list(CORPUS.values()), convert_to_tensor=True)
    hits = semantic_search(queries, corpus, score_function=model.similarity, top_k=3)
    scores = (queries @ corpus.T).tolist()
    for row, found in zip(scores, hits, strict=True):
        assert [hit["corpus_id"] for hit in found] == sorted(range(3), key=lambda index: -row[index])
        assert [hit["score"] for hit in found] == pytest.approx(sorted(row, reverse=True))


def test_information_retrieval_evaluator_scores_by_dot_product(model: SentenceTransformer) -> None:
    evaluator = InformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT, mrr_at_k=[3], ndcg_at_k=[3], map_at_k=[3])
    result = evaluator(model)
    scores = model.encode_query(list(QUERIES.values())) @ model.encode_document(list(CORPUS.values())).T
    ranks = [1 + int((scores[row] > scores[row, row]).sum()) for row in range(2)]  # q1 wants d1, q2 wants d2
    assert result["dot_mrr@3"] == pytest.approx(np.mean([1 / rank for rank in ranks]))


def test_nano_beir_evaluator(model: SentenceTransformer, tmp_path: Path) -> None:
    """On a local data set in NanoBEIR's layout."""
    rows = {
        "corpus": [{"_id": key, "text": text} for key, text in CORPUS.items()],
        "queries": [{"_id": key, "text": text} for key, text in QUERIES.items()],
        "qrels": [{"query-id": key, "corpus-id": doc} for key, docs in RELEVANT.items() for doc in docs],
    }
    header = ["---", "configs:"]
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        header += [f"- config_name: {name}", "  data_files:", "  - split: NanoMSMARCO", f"    path: {name}.jsonl"]
    (tmp_path / "README.md").write_text("\n".join([*header, "---", ""]))
    result = NanoBEIREvaluator(["msmarco"], dataset_id=str(tmp_path))(model)
    plain = InformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT)(model)
    assert result["NanoBEIR_mean_dot_ndcg@10"] == pytest.approx(plain["dot_ndcg@10"])


def test_compile_of_the_whole_model_and_of_the_encoder(model: SentenceTransformer, vectors: np.ndarray) -> None:
    # "eager" traces and splits the graph as the default does, without generating code.
    model[0].model.base_model.compile(backend="eager", dynamic=True)
    np.testing.assert_allclose(model.encode(TEXTS), vectors, atol=1e-5)
    model.compile(backend="eager", dynamic=True)
    np.testing.assert_allclose(model.encode(TEXTS), vectors, atol=1e-5)


def test_peft_adapter_trains_and_merges(model: SentenceTransformer, vectors: np.ndarray, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    model[0].model = peft.get_peft_model(model[0].model, config)
    adapted = model.encode(TEXTS)
    assert abs(adapted - vectors).max() > 1e-3
    loss = AggretrieverLoss(model)
    sum(loss([model.preprocess(TEXTS[:1]), model.preprocess(TEXTS[2:3])]).values()).backward()
    trained = [name for name, p in model[0].named_parameters() if p.grad is not None]
    assert trained
    assert all("lora_" in name for name in trained)
    model[0].model = model[0].model.merge_and_unload()
    np.testing.assert_allclose(model.encode(TEXTS), adapted, atol=1e-5)
    model.save_pretrained(str(tmp_path))
    assert np.array_equal(load_aggretriever(tmp_path).encode(TEXTS), model.encode(TEXTS))


def test_peft_adapter_on_the_decoder_is_refused(model: SentenceTransformer) -> None:
    peft = pytest.importorskip("peft")
    model[0].model = peft.get_peft_model(model[0].model, peft.LoraConfig(r=2, target_modules=["decoder"]))
    with pytest.raises(ValueError, match="keep adapters and quantizers off it"):
        model.encode("dog")


@pytest.mark.parametrize("backend", ["onnx", "openvino"])
def test_other_backends_are_refused(model: SentenceTransformer, tmp_path: Path, backend: str) -> None:
    model.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=f"backend must be 'torch', got '{backend}'"):
        SentenceTransformer(str(tmp_path), trust_remote_code=True, backend=backend)


def test_gradient_checkpointing_keeps_the_gradients(model: SentenceTransformer) -> None:
    gradients = []
    for checkpointing in (False, True):
        model.eval()  # without dropout, so that both passes compute the same
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            model[0].model.config.attention_probs_dropout_prob = 0.0
        model.zero_grad()
        loss = AggretrieverLoss(model)
        sum(loss([model.preprocess(TEXTS[:1]), model.preprocess(TEXTS[2:3])]).values()).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-5, atol=1e-6)


def fsdp_worker(rank: int, rendezvous: str, backbone: str) -> None:
    """One of two processes: layers and then the whole model sharded; gradients against one process with both halves."""
    from torch.distributed.fsdp import fully_shard

    join_group(rank, rendezvous)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    batches = [
        [["what dog", "who sails"], ["the dog sleeps", "the ship sails"]],
        [["a cat", "the sea"], ["quick fox", "bread salt"]],
    ]
    single, sharded, wrong = (build_aggretriever(backbone, lexical_dim=16, cls_dim=4).eval() for _ in range(3))
    for batch in batches:
        (sum(AggretrieverLoss(single)([single.preprocess(texts) for texts in batch]).values()) / 2).backward()
    for layer in sharded[0].model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sum(AggretrieverLoss(sharded)([sharded.preprocess(texts) for texts in batches[rank]]).values()).backward()
    for (name, expected), found in zip(single.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, msg=name)
    fully_shard(wrong[0].model, mesh=mesh)
    with pytest.raises(RuntimeError, match="weights are sharded"):
        wrong.encode("dog")


def test_fsdp_on_layers_and_model_trains_on_the_transformers_model_alone_is_refused(
    tiny_bert: str, tmp_path: Path
) -> None:
    run_two_processes(fsdp_worker, tmp_path, tiny_bert)


def test_deepspeed_stage_3_is_refused(model: SentenceTransformer) -> None:
    model[0].model.get_input_embeddings().weight.ds_id = 7  # as DeepSpeed marks a partitioned parameter
    with pytest.raises(RuntimeError, match="DeepSpeed stage 3"):
        model.encode("dog")
