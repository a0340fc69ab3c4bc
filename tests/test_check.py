"""check: right vectors pass, and each way in which a program gives other ones is found and named."""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import conftest
import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize

from st_aggretriever import build_aggretriever, check, load_aggretriever
from st_aggretriever.cli import main

Embed = Callable[[list[str]], np.ndarray]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 16 dimensions, as wide as its encoder: a wrong pooling has the right shape."""
    home = tmp_path_factory.mktemp("check")
    backbone, _ = conftest.save_backbone(home / "backbone")
    model = build_aggretriever(backbone, lexical_dim=12, cls_dim=4, prompts={"query": "what is "}).train()
    model.save_pretrained(str(home / "model"), create_model_card=False)
    assert model.training
    assert model[0].training
    return home / "model"


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a stand-in server around a function from texts to vectors, and gives its address."""
    servers = []

    def start(embed: Embed | None, style: str = "tei", asked: list[Any] | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def answer(self, code: int, content: Any) -> None:
                body = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": "served"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                route = {"tei": "/embed", "openai": "/v1/embeddings"}[style]
                if self.path != route:
                    return self.answer(404, {"error": "no such route"})
                if asked is not None:
                    asked.append((body, self.headers.get("Authorization")))
                if embed is None:
                    return self.answer(424, {"error": "unsupported model"})
                if style == "tei":
                    return self.answer(200, embed(body["inputs"]).tolist())
                rows = [{"index": n, "embedding": v} for n, v in enumerate(embed(body["input"]).tolist())]
                return self.answer(200, {"data": rows[::-1]})

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def mean_of_the_root(folder: Path) -> Embed:
    """What a server does that reads the encoder alone: the mean of its last hidden states."""
    encoder = transformers.AutoModel.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def embed(texts: list[str]) -> np.ndarray:
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            hidden = encoder(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(2)
        return ((hidden * mask).sum(1) / mask.sum(1)).numpy()

    return embed


def run(*args: Any) -> int:
    return main(["check", *map(str, args)])


def test_a_saved_model_carries_its_own_vectors(saved: Path) -> None:
    written = json.loads((saved / "check.json").read_text(encoding="utf-8"))
    assert len(written["texts"]) == 3
    model = load_aggretriever(saved)
    assert len(model.tokenizer(written["texts"][2])["input_ids"]) > model.max_seq_length
    np.testing.assert_allclose(written["vectors"], model.encode(written["texts"]), atol=1e-6)


def test_every_way_of_saving_writes_it_and_none_keeps_another_models(saved: Path, tmp_path: Path) -> None:
    """By the bundled code too, cut by truncate_dim, after a change of the weights."""
    first: Any = SentenceTransformer(str(saved), trust_remote_code=True, device="cpu", truncate_dim=7)
    first.save_pretrained(str(tmp_path / "cut"))
    reference = check.read_reference(tmp_path / "cut")
    assert reference.vectors.shape == (3, 7)
    model: Any = load_aggretriever(tmp_path / "cut")
    assert check.check(str(tmp_path / "cut"))[0].right
    torch.nn.init.zeros_(model[3].linear.weight)
    model.save_pretrained(str(tmp_path / "cut"))
    assert check.check(str(tmp_path / "cut"))[0].right
    assert abs(check.read_reference(tmp_path / "cut").vectors[:, :4] - reference.vectors[:, :4]).max() > 1e-3
    model[0].model.bert.embeddings.word_embeddings.weight.data.fill_(float("nan"))
    model.save_pretrained(str(tmp_path / "cut"))  # a save never fails for it
    with pytest.raises(FileNotFoundError, match="has no check"):
        check.check(str(tmp_path / "cut"))


def test_a_folder_is_right_until_its_weights_change(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(saved) == 0
    assert re.search(
        r"right: largest difference \S+ of the largest number \(allowed: 0\.001\)", capsys.readouterr().out
    )
    assert run(saved, "--tolerance", "0.5") == 0
    assert "(allowed: 0.5)" in capsys.readouterr().out
    shutil.copytree(saved, tmp_path / "model")
    other = load_aggretriever(saved)
    other[3].linear.weight.data *= 1.01  # type: ignore[union-attr, operator]
    other.save_pretrained(str(tmp_path / "other"))
    shutil.copytree(tmp_path / "other" / "3_CLSProjection", tmp_path / "model" / "3_CLSProjection", dirs_exist_ok=True)
    assert run(tmp_path / "model") == 2
    assert "wrong: largest difference" in capsys.readouterr().err
    assert run(tmp_path / "other", "--model", saved) == 2


@pytest.mark.parametrize("style", ["tei", "openai"])
def test_a_server_with_the_models_vectors_is_right(
    saved: Path,
    serve: Callable[..., str],
    style: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []
    model = load_aggretriever(saved)
    url = serve(lambda texts: model.encode(texts), style, asked)
    assert run(url, "--model", saved) == 0
    assert f"({'TEI' if style == 'tei' else 'OpenAI'}-style): right" in capsys.readouterr().out
    monkeypatch.setenv("KEY", "secret")
    assert run(f"{url}/{'embed' if style == 'tei' else 'v1/embeddings'}", "--model", saved, "--api-key-env", "KEY") == 0
    body, key = asked[1]
    assert key == "Bearer secret"
    assert body.get("normalize") is False if style == "tei" else body["model"] == "served"


def test_a_server_that_pools_the_root_model_by_mean_is_caught(
    saved: Path, serve: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    embed = mean_of_the_root(saved)
    assert embed(["a"]).shape == (1, 16)
    assert run(serve(embed), "--model", saved) == 2
    captured = capsys.readouterr()
    assert "wrong: largest difference" in captured.err
    assert "Why is unknown: these are other vectors than the model's. Don't use them." in captured.err
    assert captured.out.count("cosine") == 3
    backbone, _ = conftest.save_backbone(saved.parent / "wide", hidden_size=24)
    assert run(serve(mean_of_the_root(Path(backbone))), "--model", saved) == 2
    assert "24 dimensions instead of 16" in capsys.readouterr().err


def test_what_is_wrong_is_named(saved: Path) -> None:
    reference = check.read_reference(saved)
    right = reference.vectors
    norms = np.linalg.norm(right, axis=1, keepdims=True)
    longest = right.copy()
    longest[2] *= 1.5
    nan = right.copy()
    nan[1, 3] = np.nan
    assert len(reference.texts[2].split()) > (reference.length or 0)  # so that it is cut
    shortest, signs = right.copy(), right.copy()
    shortest[0] *= 1.5
    signs[:, 4:] *= -1
    for vectors, words in (
        (right / norms, "normalised to length 1"),
        ((right * np.float32(1.01)).astype(np.float16).astype(np.float32), "The numbers are of half precision"),
        (right * np.float32(1.01), "Why is unknown; computing in half precision makes differences of this size"),
        (right * np.float32(1.5), "Why is unknown: these are other vectors"),
        (longest, f"Only the text that the model cuts, at length {reference.length}"),
        (shortest, "Why is unknown: these are other vectors"),
        (signs, "Turned signs of the lexical part: 36 of 48 numbers; why is unknown"),
        (right[::-1], "in the other order"),
        (np.roll(right, 12, axis=1), "The parts of the vectors come in another order"),
        (np.roll(right, 3, axis=1), "other vectors"),
        (right[:2], "2 vectors for 3 texts"),
        (right[:, :4], "4 dimensions instead of 16. The vectors are the model's cls_embedding alone"),
        (right[:, 4:], "12 dimensions instead of 16. The vectors are the model's lexical_embedding alone"),
        (right[:, :7], "7 dimensions instead of 16. The vectors are the first 7 numbers of the model's alone"),
        (right[:, 1:8], "7 dimensions instead of 16. Why is unknown"),
        (nan, "not finite"),
    ):
        verdict = check.compare(reference, np.ascontiguousarray(vectors))
        assert not verdict.right
        assert words in verdict.sentence
    whole = reference._replace(length=500)  # nothing was cut: the length can't be what is wrong
    assert "Why is unknown" in check.compare(whole, longest).sentence
    assert check.compare(reference, right * 1.01, 0.02).right
    for tolerance in (0, -1, 1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="tolerance must be above 0 and below 1"):
            check.compare(reference, right, tolerance)


def test_a_sign_may_turn_in_the_lexical_part_alone_and_seldom(saved: Path) -> None:
    reference = check.read_reference(saved)
    one, cls, many = (reference.vectors.copy() for _ in range(3))
    one[0, 5] *= -1  # of 48 numbers one hundredth, rounded up
    cls[0, 2] *= -1
    many[0, 5:7] *= -1
    assert [check.compare(reference, found).right for found in (one, cls, many)] == [True, False, False]
    assert check.compare(reference, one).turned == 1


@pytest.mark.parametrize(("turned", "right"), [(3, True), (4, False)])
def test_the_share_of_turned_signs_is_that_of_the_lexical_part(turned: int, right: bool) -> None:
    vectors = np.ones((3, 1000), np.float32)
    reference = check.Reference(["a"] * 3, vectors, [("cls_embedding", 900), ("lexical_embedding", 100)], None, 1e-3)
    found = vectors.copy()
    found[0, -turned:] *= -1  # one hundredth of 300
    assert check.compare(reference, found).right is right


def test_a_model_in_half_precision_is_judged_as_one(saved: Path, tmp_path: Path) -> None:
    load_aggretriever(saved).bfloat16().save_pretrained(str(tmp_path / "half"))
    assert check.read_reference(tmp_path / "half").tolerance == 0.02
    assert check.check(str(tmp_path / "half"))[0].right


def test_a_pipeline_that_goes_on_is_not_judged_by_a_part_of_it(saved: Path, tmp_path: Path) -> None:
    longer = SentenceTransformer(modules=[*load_aggretriever(saved), Normalize()], similarity_fn_name="dot")
    longer.save_pretrained(str(tmp_path / "longer"))
    with pytest.raises(ValueError, match=r"consists of .*Concat, Normalize"):
        check.read_reference(tmp_path / "longer")


def test_the_onnx_file_is_held_too(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    assert main(["export", "onnx", str(saved), str(tmp_path / "onnx")]) == 0
    for target in (tmp_path / "onnx", tmp_path / "onnx" / "model.onnx"):
        assert run(target) == 0
        assert "model.onnx (onnxruntime): right" in capsys.readouterr().out
    assert run(tmp_path / "onnx", "--model", saved) == 0
    tokenizer = tmp_path / "onnx" / "tokenizer.json"
    content = tokenizer.read_text(encoding="utf-8")
    for broken in (content[:-9], "{}", ""):
        tokenizer.write_text(broken)
        capsys.readouterr()
        assert run(tmp_path / "onnx") == 2
        error = capsys.readouterr().err
        assert f"check: {tokenizer} can't be read as a tokenizer" in error
        assert error.count("\n") == 1
    larger = json.loads(content)
    larger["model"]["vocab"] = {key: number + 1000 for key, number in larger["model"]["vocab"].items()}
    tokenizer.write_text(json.dumps(larger))
    assert run(tmp_path / "onnx") == 2
    assert "can't be run" in capsys.readouterr().err
    tokenizer.write_text(content)
    half = build_aggretriever(str(saved.parent / "backbone"), lexical_dim=12, cls_dim=4, seed=1)
    half.save_pretrained(str(tmp_path / "other"))
    assert run(tmp_path / "onnx", "--model", tmp_path / "other") == 2


def test_a_refusal_is_one_sentence(
    saved: Path,
    serve: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TWO_LINES", "secret\nkey")
    shutil.copytree(saved, tmp_path / "broken")
    (tmp_path / "broken" / "check.json").write_text('{"format": "another"}')
    (tmp_path / "empty").mkdir()
    for name, changes in (("length", {"length": "x"}), ("texts", {"texts": [1, 2, 3]}), ("parts", {"parts": 7}),
                          ("dtype", {"dtype": 5}), ("quantize", {"quantize": None})):  # fmt: skip
        shutil.copytree(saved, tmp_path / name)
        path = tmp_path / name / "check.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    shutil.copytree(saved, tmp_path / "modules")
    (tmp_path / "modules" / "modules.json").write_text("[{}]")
    shutil.copytree(saved, tmp_path / "number")
    path = tmp_path / "number" / "check.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"modules": 5}))
    gone = serve(None)
    for args, words in (
        ((serve(None), "--model", saved), "refused with 424"),
        ((saved, "--model", tmp_path / "nowhere"), "there is no "),
        ((serve(None) + "/v2/embed", "--model", saved), "refused with 404"),
        ((serve(lambda texts: np.array("no vectors")), "--model", saved), "something else than vectors"),
        ((gone.rpartition(":")[0] + ":1", "--model", saved), "can't be reached"),
        (("http://127.0.0.1:abc", "--model", saved), "can't be reached"),
        *(
            ((address, "--model", saved), f"{address.rstrip('/')} is no address of a server")
            for address in ("http://", "http://[::1", "https:///embed")
        ),
        ((gone, "--model", saved, "--api-key-env", "TWO_LINES"), "printable ASCII"),
        ((gone,), "--model"),
        ((tmp_path / "nothing",), "there is no"),
        ((tmp_path / "empty",), "has no check.json"),
        ((tmp_path / "broken",), "its format is not"),
        *(
            ((tmp_path / name,), f"{name}/check.json can't be read")
            for name in ("length", "texts", "parts", "dtype", "quantize")
        ),
        ((tmp_path / "modules",), "modules.json can't be read"),
        ((tmp_path / "number",), "'modules' is 5"),
        ((serve(lambda texts: np.array([[10**400]], object)), "--model", saved), "something else than vectors"),
        *(((gone, "--model", saved, f"--tolerance={x}"), "above 0") for x in ("0", "inf", "nan", "-1", "-inf", "1")),
        ((gone, "--model", saved, "--api-key-env", "NO_SUCH_KEY"), "no such environment variable"),
    ):
        assert run(*args) == 2
        error = capsys.readouterr().err
        assert words in error
        assert "secret" not in error
        assert error.count("\n") == 1
