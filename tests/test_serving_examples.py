"""The examples of docs/serving.md, run as they stand, give our exact top 10; the defaults they set aside don't."""

import re
from pathlib import Path
from typing import Any

import conftest
import numpy as np
import pytest

from st_aggretriever import build_aggretriever, load_aggretriever
from st_aggretriever.check import compare, read_reference
from st_aggretriever.encoding import Encoder
from st_aggretriever.export.stores import export_vectors
from st_aggretriever.search.retrieve import search_exactly
from st_aggretriever.vectors.folder import VectorFolder, VectorWriter

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
QUERY = "who sails a ship?"
DOCUMENTS = [" ".join(np.random.default_rng(seed).choice(conftest.WORDS, 4 + seed % 9)) for seed in range(60)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples name: my-agg, my-documents."""
    home = tmp_path_factory.mktemp("serving")
    backbone, _ = conftest.save_backbone(home / "backbone")
    model = build_aggretriever(backbone, lexical_dim=12, cls_dim=4)
    model.save_pretrained(str(home / "my-agg"), create_model_card=False)
    manifest = Encoder(model, 32).manifest("document", 16, "my-agg") | {"block_size": len(DOCUMENTS)}
    writer = VectorWriter(home / "my-documents", manifest)
    writer.write(0, [f"d{number}" for number in range(len(DOCUMENTS))], model.encode_document(DOCUMENTS))
    writer.finish(1)
    return home


@pytest.fixture(scope="module")
def expected(home: Path) -> list[str]:
    queries = load_aggretriever(home / "my-agg").encode_query([QUERY])
    return list(search_exactly(VectorFolder(home / "my-documents"), queries, 10).ids[0])


@pytest.fixture(scope="module")
def milvus(home: Path) -> None:
    pytest.importorskip("milvus_lite")
    from st_aggretriever.export.milvus import Milvus

    store = Milvus(str(home / "vectors.db"), "my_documents")
    export_vectors(store, home / "my-documents")
    store.close()


def run(title: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the example below that heading leaves behind."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n### {title}\n")[1].split("\n### ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert QUERY in code
    monkeypatch.chdir(home)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.mark.usefixtures("milvus")
def test_milvus(home: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("Milvus", home, monkeypatch)["ids"] == expected


@pytest.mark.filterwarnings("ignore:Local mode")
def test_qdrant(home: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("qdrant_client")
    from st_aggretriever.export.qdrant import Qdrant

    store = Qdrant(str(home / "qdrant-folder"), "my_documents")
    export_vectors(store, home / "my-documents")
    store.close()
    assert run("Qdrant", home, monkeypatch)["ids"] == expected


@pytest.mark.usefixtures("milvus")
def test_langchain(home: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("langchain_huggingface")
    names = run("LangChain", home, monkeypatch)
    assert names["ids"] == expected
    reference = read_reference(home / "my-agg")
    embeddings = names["embeddings"]
    assert compare(reference, np.array(embeddings.embed_documents(reference.texts), np.float32)).right
    long = reference.texts[2]  # longer than a query may be
    query = load_aggretriever(home / "my-agg").encode_query(long)
    np.testing.assert_allclose(embeddings.embed_query(long), query, atol=1e-5)

    from langchain_core.vectorstores import InMemoryVectorStore

    store = InMemoryVectorStore(embeddings)
    store.add_texts(DOCUMENTS, ids=[f"d{number}" for number in range(len(DOCUMENTS))])
    assert [document.id for document in store.similarity_search(QUERY, k=10)] != expected


@pytest.mark.usefixtures("milvus")
def test_llama_index(home: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface = pytest.importorskip("llama_index.embeddings.huggingface")
    names = run("LlamaIndex", home, monkeypatch)
    assert names["ids"] == expected
    reference = read_reference(home / "my-agg")
    found = names["embedding"].get_text_embedding_batch(reference.texts)
    assert compare(reference, np.array(found, np.float32)).right
    default = huggingface.HuggingFaceEmbedding(model_name=str(home / "my-agg"), trust_remote_code=True)
    verdict = compare(reference, np.array(default.get_text_embedding_batch(reference.texts), np.float32))
    assert "normalised to length 1" in verdict.sentence


def test_without_the_flag_sentence_transformers_refuses(home: Path) -> None:
    from sentence_transformers import SentenceTransformer

    with pytest.raises(ValueError, match="trust_remote_code"):
        SentenceTransformer(str(home / "my-agg"), device="cpu")
