"""Teacher scores: the teacher's own, computed once for what the rows will give, kept by its content."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import make_config, make_tokenizer, save_backbone
from sentence_transformers import SentenceTransformer, SparseEncoder

from st_aggretriever import build_aggretriever, teacher
from st_aggretriever.readers.training import TrainingData, open_training_data
from st_aggretriever.search.bm25 import search_bm25
from st_aggretriever.teacher import load_teacher, score_rows


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def data(tmp_path: Path) -> TrainingData:
    """Three rows with six negatives each, of which two are drawn."""
    words = "dog cat fox bird fish bread flour water salt oven yeast heat cold rain sun wind moon star".split()
    rows = [
        {
            "query": f"who {words[n]} {words[n + 3]}",
            "passage": f"the {words[n]} of paris",
            "negatives": words[6 * n :][:6],
        }
        for n in range(3)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_training_data([str(path)], negatives=2)


def save_cross_encoder(folder: Path, labels: int = 1, seed: int = 0) -> str:
    torch.manual_seed(seed)
    model = transformers.BertForSequenceClassification(make_config("bert", num_labels=labels, initializer_range=0.5))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def rows_of(data: TrainingData, epochs: range) -> list[dict[str, Any]]:
    rows = []
    for epoch in epochs:
        data.set_epoch(epoch)
        rows += [data.row(row) for row in range(len(data))]
    return rows


def passages(row: dict[str, Any]) -> list[str]:
    return [row["positive"], row["negative_1"], row["negative_2"]]


def test_cross_encoder_teaches_by_its_logits(data: TrainingData, tmp_path: Path) -> None:
    name = save_cross_encoder(tmp_path / "cross")
    scores = score_rows(data, load_teacher(name, device="cpu", batch_size=4), epochs=range(3))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(name).eval()
    tokenizer = make_tokenizer()
    taught = data.with_teacher(scores)
    assert (taught.columns[-1], "scores" in data.columns) == ("scores", False)
    for row in rows_of(taught, range(3)):
        for text, score in zip(passages(row), row["scores"], strict=True):
            with torch.inference_mode():
                logit = model(**tokenizer(row["query"], text, return_tensors="pt")).logits[0, 0]
            assert score == pytest.approx(float(logit), abs=1e-5)
    assert len({score for row in rows_of(taught, range(3)) for score in row["scores"]}) > 6
    assert scores.describe() == {"name": name, "kind": "cross-encoder", "hash": scores.folder.name}


@pytest.mark.parametrize("kind", ["bi-encoder", "splade", "sparse encoder"])
def test_encoders_teach_by_their_inner_products(data: TrainingData, tmp_path: Path, kind: str) -> None:
    name = str(tmp_path / "model")
    model: Any
    if kind == "bi-encoder":
        model = build_aggretriever(
            save_backbone(tmp_path / "bert")[0], lexical_dim=16, cls_dim=8, prompts={"query": "who "}
        )
        model.save_pretrained(name)
    else:
        save_backbone(Path(name))
        model = SparseEncoder(name, device="cpu")
        if kind == "sparse encoder":
            name = str(tmp_path / "saved")
            model.save_pretrained(name)
    teacher = load_teacher(name, device="cpu", batch_size=2)
    assert teacher.kind == kind
    taught = data.with_teacher(score_rows(data, teacher, epochs=[1]))
    for row in rows_of(taught, range(1, 2)):
        vectors = (
            model.encode_query([row["query"]], convert_to_tensor=True),
            model.encode_document(passages(row), convert_to_tensor=True),
        )
        query, documents = (vector.to_dense() if vector.is_sparse else vector for vector in vectors)
        assert row["scores"] == pytest.approx((query @ documents.T)[0].tolist(), rel=1e-4)


def test_bm25_teaches_from_all_passages_of_the_data(data: TrainingData) -> None:
    taught = data.with_teacher(score_rows(data, load_teacher("bm25"), epochs=[0]))
    corpus = {text: text for _, text, _, _ in data.corpus()}
    assert len(corpus) == 21
    for row in rows_of(taught, range(1)):
        hits = search_bm25({"q": row["query"]}, corpus.items(), 21)
        by_text = dict(zip(hits.ids[0].tolist(), hits.scores[0].tolist(), strict=True))
        assert row["scores"] == pytest.approx([by_text.get(text, 0.0) for text in passages(row)])
        assert row["scores"][0] > 0


class Counting:
    """Scores by the lengths of the texts, and remembers what it was asked."""

    name, kind = "counting", "test"

    def __init__(self, stop_after: int | None = None, value: float | None = None) -> None:
        self.asked: list[tuple[str, str]] = []
        self.stop_after, self.value = stop_after, value

    def hash(self, data: TrainingData) -> str:
        return "0123"

    def score(self, pairs: Sequence[tuple[str, str]], data: TrainingData) -> np.ndarray:
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += pairs
        return np.array([self.value or len(query) + len(text) / 100 for query, text in pairs], np.float32)


def test_each_pair_is_scored_once_and_found_again(data: TrainingData) -> None:
    data.set_epoch(7)
    first = Counting()
    scores = score_rows(data, first, epochs=range(4))
    wanted = {(row["query"], text) for row in rows_of(data, range(4)) for text in passages(row)}
    assert (len(first.asked), set(first.asked)) == (len(wanted), wanted)
    query, text = first.asked[3]
    assert scores(query, [text]) == pytest.approx([len(query) + len(text) / 100])
    again = Counting()
    score_rows(data, again, epochs=range(4))
    assert again.asked == []
    more = Counting()
    score_rows(data, more, epochs=range(40))
    assert not set(more.asked) & wanted
    assert len(more.asked) + len(wanted) == 3 * 7, "by then every candidate has been drawn"


def test_the_epoch_of_the_data_stays(data: TrainingData) -> None:
    data.set_epoch(7)
    score_rows(data, Counting(), epochs=range(2))
    assert data.epoch == 7


def test_interrupted_scoring_goes_on(data: TrainingData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "PAIRS_AT_ONCE", 2)
    monkeypatch.setattr(teacher, "PAIRS_A_FILE", 4)
    stopped = Counting(stop_after=10)  # two more than a file's
    with pytest.raises(KeyboardInterrupt, match="the teacher's scores so far stay in"):
        score_rows(data, stopped, epochs=range(40))
    rest = Counting()
    scores = score_rows(data, rest, epochs=range(40))
    assert (len(stopped.asked), len(rest.asked)) == (10, 21 - 10)
    for query, text in [*stopped.asked, *rest.asked]:
        assert scores(query, [text]) == pytest.approx([len(query) + len(text) / 100])


def test_other_weights_are_another_teacher(data: TrainingData, tmp_path: Path) -> None:
    same, other = (
        load_teacher(save_cross_encoder(tmp_path / name, seed=seed), device="cpu")
        for name, seed in (("a", 0), ("b", 1))
    )
    assert same.hash(data) != other.hash(data)
    assert same.hash(data) == load_teacher(save_cross_encoder(tmp_path / "c"), device="cpu").hash(data)


def test_another_similarity_is_another_teacher(data: TrainingData, tmp_path: Path) -> None:
    name = str(tmp_path / "model")
    build_aggretriever(save_backbone(tmp_path / "bert")[0], lexical_dim=16, cls_dim=8).save_pretrained(name)
    dot = load_teacher(name, device="cpu")
    settings = json.loads((tmp_path / "model" / "config_sentence_transformers.json").read_text())
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(
        json.dumps(settings | {"similarity_fn_name": "cosine"})
    )
    assert load_teacher(name, device="cpu").hash(data) != dot.hash(data)


@pytest.mark.parametrize("content", ["[]", "{"])
@pytest.mark.parametrize("name", ["config.json", "config_sentence_transformers.json"])
def test_a_damaged_configuration_of_a_teacher_is_named(tmp_path: Path, name: str, content: str) -> None:
    folder = save_cross_encoder(tmp_path / "teacher")
    Path(folder, "config_sentence_transformers.json").unlink(missing_ok=True)
    Path(folder, name).write_text(content)
    with pytest.raises(ValueError, match=rf"teacher: .*/{name} (is broken|must hold an object)"):
        load_teacher(folder, device="cpu")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind of teacher."""
    folder = tmp_path_factory.mktemp("teachers")
    save_cross_encoder(folder / "cross-encoder")
    backbone = save_backbone(folder / "splade")[0]
    build_aggretriever(backbone, lexical_dim=16, cls_dim=8).save_pretrained(str(folder / "aggretriever"))
    SparseEncoder(backbone, device="cpu").save_pretrained(str(folder / "sparse encoder"))
    SentenceTransformer(backbone, device="cpu").save_pretrained(str(folder / "bi-encoder"))
    return folder


@pytest.mark.parametrize("kind", ["cross-encoder", "splade", "sparse encoder", "bi-encoder", "aggretriever"])
@pytest.mark.parametrize(
    "damage", ["empty", "cut", "one byte less", "a pointer", "other sizes", "a wrong kind", "tokenizer"]
)
def test_a_damaged_teacher_of_any_kind_is_one_sentence(teachers: Path, tmp_path: Path, kind: str, damage: str) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(teachers / kind, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    files: dict[str, tuple[Path, bytes]] = {
        "empty": (weights, b""),
        "cut": (weights, whole[:2000]),
        "one byte less": (weights, whole[:-1]),
        "a pointer": (weights, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "other sizes": (config, config.read_bytes().replace(b'"intermediate_size": 24', b'"intermediate_size": 32')),
        "a wrong kind": (config, config.read_bytes().replace(b'"intermediate_size": 24', b'"intermediate_size": "x"')),
        "tokenizer": (folder / "tokenizer.json", (folder / "tokenizer.json").read_bytes()[:100]),
    }
    path, content = files[damage]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{folder}.*[Ff]etch (the model|the file|it|them) again") as caught:
        load_teacher(str(folder), device="cpu")
    assert len(str(caught.value).splitlines()) == 1


def test_what_cannot_teach_is_refused(data: TrainingData, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 3 classes: expected a cross-encoder with one score"):
        load_teacher(save_cross_encoder(tmp_path / "classes", labels=3), device="cpu")
    with pytest.raises(ValueError, match=r"is a BertModel: expected a cross-encoder"):
        load_teacher(save_backbone(tmp_path / "headless", head=False)[0])
    with pytest.raises(OSError, match="is no model folder here"):
        load_teacher(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="the teacher counting gives nan for 'who dog"):
        score_rows(data, Counting(value=float("nan")), epochs=[0])
    scores = score_rows(data, Counting(), epochs=[0])
    with pytest.raises(ValueError, match="the teacher counting has no score for a passage of the query"):
        rows_of(data.with_teacher(scores), range(1, 9))


def test_broken_file_of_scores_is_named(data: TrainingData) -> None:
    scores = score_rows(data, Counting(), epochs=[0])
    path = next(scores.folder.glob("*.npy"))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"\.npy is broken .* Delete it"):
        score_rows(data, Counting(), epochs=[0])
