"""Vector stores give our exact top 10; with their defaults they wouldn't. A second export adds nothing."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from st_aggretriever.cli import main
from st_aggretriever.export import stores
from st_aggretriever.export.milvus import EMBEDDED, Milvus
from st_aggretriever.export.qdrant import Qdrant
from st_aggretriever.search.retrieve import search_exactly
from st_aggretriever.vectors.folder import VectorFolder, VectorWriter

DIMENSION, ROWS, BLOCK = 8, 60, 25
MANIFEST = {"side": "document", "model": "m", "model_hash": "0", "dimension": DIMENSION, "block_size": BLOCK,
            "parts": [["cls_embedding", DIMENSION]], "similarity": "dot", "length": None, "prompt": ""}  # fmt: skip
QUERIES = np.random.default_rng(1).standard_normal((5, DIMENSION)).astype(np.float32)


def write(folder: Path, *, rows: int = ROWS, dtype: str = "float32", seed: int = 0, **changes: Any) -> VectorFolder:
    """Vectors of very different lengths, under ids that look like paths and numbers."""
    rng = np.random.default_rng(seed)
    vectors = (rng.standard_normal((rows, DIMENSION)) * rng.uniform(0.2, 5, (rows, 1))).astype(np.float32)
    writer = VectorWriter(folder, MANIFEST | changes, dtype=dtype)
    for number, start in enumerate(range(0, rows, BLOCK)):
        part = vectors[start : start + BLOCK]
        writer.write(number, [f"docs/{start + row} 'ü\"\\" for row in range(len(part))], part)
    writer.finish(number + 1)
    return VectorFolder(folder)


def ours(index: VectorFolder) -> list[list[str]]:
    return search_exactly(index, QUERIES, 10).ids.tolist()


@pytest.fixture(params=["milvus", "qdrant"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Any]:
    """A store by name; the same client each time it is called with the same collection."""
    if request.param == "milvus":
        pytest.importorskip("pymilvus")
        pytest.importorskip("milvus_lite")
        return lambda collection: Milvus(str(tmp_path / "store.db"), collection)
    pytest.importorskip("qdrant_client")
    first = Qdrant(":memory:", "first")  # a folder's local mode writes each point by itself, for seconds

    def qdrant(collection: str) -> Qdrant:
        store = Qdrant(":memory:", collection)
        store.client = first.client
        return store

    return qdrant


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_store_gives_our_top_10_and_a_second_export_adds_nothing(
    connect: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(stores, "BATCH", 7)
    index = write(tmp_path / "vectors", dtype=dtype)
    store = connect("papers")
    assert stores.export_vectors(store, tmp_path / "vectors") == ("papers", ROWS, ROWS, ROWS)
    assert store.search(QUERIES, 10) == ours(index)
    again = connect("papers")
    assert stores.export_vectors(again, index) == ("papers", ROWS, 0, ROWS)
    assert again.search(QUERIES, 10) == ours(index)


def test_an_export_goes_on_where_it_was_stopped(
    connect: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = write(tmp_path / "vectors")
    monkeypatch.setattr(stores, "BATCH", 10)
    store = connect("papers")
    add, calls = store.add, []

    def dies(ids: Any, vectors: Any) -> None:
        calls.append(ids)
        if len(calls) == 3:
            raise KeyboardInterrupt
        add(ids, vectors)

    monkeypatch.setattr(store, "add", dies)
    with pytest.raises(KeyboardInterrupt):
        stores.export_vectors(store, index)
    monkeypatch.undo()
    assert stores.export_vectors(store, index) == ("papers", ROWS, ROWS - 20, ROWS)
    assert store.search(QUERIES, 10) == ours(index)


def test_another_collection_is_not_touched(connect: Callable[[str], Any], tmp_path: Path) -> None:
    store = connect("papers")
    stores.export_vectors(store, write(tmp_path / "vectors"))
    with pytest.raises(ValueError, match=r"holds another vector under the id .docs/0"):
        stores.export_vectors(store, write(tmp_path / "others", seed=1))
    with pytest.raises(ValueError, match="has the dimension 8, the vectors need 9"):
        store.create(9)
    assert store.count() == ROWS
    with pytest.raises(ValueError, match="side 'query', not documents"):
        stores.export_vectors(store, write(tmp_path / "queries", side="query"))


@pytest.mark.parametrize("index", EMBEDDED)
def test_every_index_that_is_taken_can_be_built(tmp_path: Path, index: str) -> None:
    pytest.importorskip("milvus_lite")
    store = Milvus(str(tmp_path / "store.db"), "papers", index=index)
    assert stores.export_vectors(store, write(tmp_path / "vectors")).held == ROWS
    assert len(store.search(QUERIES, 10)[0]) == 10
    store.close()


def test_what_qdrant_refuses_is_one_sentence(tmp_path: Path) -> None:
    models = pytest.importorskip("qdrant_client").models
    with pytest.raises(ValueError, match="a collection's name must have"):
        Qdrant(":memory:", "a/b")
    store = Qdrant(":memory:", "named")
    settings = {"one": models.VectorParams(size=DIMENSION, distance=models.Distance.DOT)}
    store.client.create_collection("named", vectors_config=settings)
    with pytest.raises(ValueError, match="has the vectors dict, the vectors need VectorParams"):
        store.create(DIMENSION)
    store.collection = "none"
    for call in (store.count, lambda: store.get(["a"]), lambda: store.add(["a"], QUERIES[:1])):
        with pytest.raises(OSError, match=r"export qdrant: .*none"):
            call()


def test_the_defaults_of_milvus_rank_otherwise(tmp_path: Path) -> None:
    """Its short way of making a collection compares by cosine; L2 is Milvus's older default."""
    pytest.importorskip("milvus_lite")
    index = write(tmp_path / "vectors")
    store = Milvus(str(tmp_path / "store.db"), "right")
    stores.export_vectors(store, index)
    ids, vectors = index.load()
    rows = [{"id": key, "vector": vector} for key, vector in zip(ids, vectors, strict=True)]
    options: dict[str, Any] = {"id_type": "string", "max_length": 100, "dimension": DIMENSION}
    store.client.create_collection("default", **options)
    store.client.create_collection("distance", metric_type="L2", **options)
    for name in ("default", "distance"):
        store.client.insert(name, rows)
        hits = store.client.search(name, list(QUERIES), limit=10)
        assert [[hit["id"] for hit in row] for row in hits] != ours(index)
        with pytest.raises(ValueError, match=r"has the metric (COSINE|L2), the vectors need IP"):
            stores.export_vectors(_of(store, name), index)
    assert store.search(QUERIES, 10) == ours(index)


def _of(store: Milvus, collection: str) -> Milvus:
    other = object.__new__(Milvus)
    other.__dict__.update(store.__dict__, collection=collection)
    return other


@pytest.mark.parametrize("distance", ["COSINE", "EUCLID"])
def test_other_distances_of_qdrant_rank_otherwise(tmp_path: Path, distance: str) -> None:
    models = pytest.importorskip("qdrant_client").models
    index = write(tmp_path / "vectors")
    ids, vectors = index.load()
    store = Qdrant(":memory:", "papers")
    settings = models.VectorParams(size=DIMENSION, distance=models.Distance[distance])
    store.client.create_collection("papers", vectors_config=settings)
    store.add(ids, vectors)
    assert store.search(QUERIES, 10) != ours(index)
    with pytest.raises(ValueError, match="the vectors need Dot"):
        stores.export_vectors(store, index)


def test_the_command_names_the_collection_after_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("milvus_lite")
    write(tmp_path / "my-vectors.v2", rows=30)
    command = ["export", "milvus", "--vectors", str(tmp_path / "my-vectors.v2"), "--uri", str(tmp_path / "a.db")]
    for counts in ("30 of 30 vectors added, 0 there before; it holds 30", "0 of 30 vectors added, 30 there before"):
        assert main(command) == 0
        assert f"collection my_vectors_v2: {counts}" in capsys.readouterr().out
    assert stores.collection_name("2024 docs") == "_2024_docs"


def test_refusals_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "vectors", rows=3)
    vectors = ["--vectors", str(tmp_path / "vectors")]
    cases: list[tuple[list[str], str]] = [
        (["milvus", "--vectors", str(tmp_path / "none"), "--uri", "a.db"], "no manifest.json"),
        (["qdrant", *vectors, "--uri", "x", "--token-env", "NO_SUCH_TOKEN"], "no such environment variable"),
    ]
    for store in ("milvus", "qdrant"):
        monkeypatch.setitem(sys.modules, {"milvus": "pymilvus", "qdrant": "qdrant_client"}[store], None)
        cases.append(([store, *vectors, "--uri", str(tmp_path / "a.db")], f'pip install "st-aggretriever[{store}]"'))
    file = ["--uri", str(tmp_path / "a.db")]
    server = ["--uri", "http://127.0.0.1:1"]
    cases += [  # before the client is imported, and so before anything is asked
        (["milvus", *vectors, *file, "--index", "FOO"], "of an embedded file must be one of FLAT, AUTOINDEX, HNSW"),
        (["milvus", *vectors, *file, "--index", "hnsw"], "got 'hnsw'"),
        (["milvus", *vectors, *file, "--index", "DISKANN"], "of an embedded file must be one of"),
        (["milvus", *vectors, *server, "--index", "FOO"], "of a server must be one of"),
        (["milvus", *vectors, *file, "--collection", "a b"], "a collection's name must be"),
        (["milvus", *vectors, *file, "--collection", "1a"], "a collection's name must be"),
    ]
    for arguments, words in cases:
        assert main(["export", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
