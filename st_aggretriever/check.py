"""Hold a model against what it said of itself when it was saved: a folder, its ONNX file, or a running server.

A saved model carries ``check.json``: three texts with their vectors. Programs that serve sentence-transformers models
may leave later modules out without a word and return other vectors of a plausible shape; here they are found.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from st_aggretriever.modules import CHECK_FILE, CHECK_FORMAT

# Of a vector's largest number: float32 by another program stays far below the first, half precision doesn't.
TOLERANCE, HALF_TOLERANCE = 1e-3, 2e-2
MOST_TURNED = 0.01  # share of signs of the lexical part that rounding may turn, where two halves of a slice are equal
SECONDS = 60
OPENAI, TEI = "OpenAI-style", "TEI-style"
# Tried in this order below an address that names no route.
ROUTES = (("/v1/embeddings", OPENAI), ("/embeddings", OPENAI), ("/embed", TEI))


class Reference(NamedTuple):
    """What the vectors of the texts should be."""

    texts: list[str]
    vectors: np.ndarray  # (n, dim) float32
    parts: list[tuple[str, int]]
    length: int | None  # tokens after which a text is cut
    tolerance: float  # what rounding may change, by the precision that the model was saved in


class Verdict(NamedTuple):
    """How far vectors are from what they should be."""

    right: bool
    sentence: str
    differences: list[float]  # of each text, in parts of its vector's largest number; empty for another shape
    cosines: list[float]
    turned: int  # signs in the lexical part


def read_reference(path: str | Path) -> Reference:
    """Read ``check.json`` of a model's folder, or the file itself.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is broken, of another format, or of a part of the pipeline only.
    """
    path = Path(path)
    file = path / CHECK_FILE if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"check: there is no {path}; expected a model's folder or its {CHECK_FILE}.")
    if not file.is_file():
        raise FileNotFoundError(
            f"check: {path} has no {CHECK_FILE}. Load the model with load_aggretriever and save it again, which writes "
            "it; export onnx copies it."
        )
    try:
        check = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(check, dict) or check.get("format") != CHECK_FORMAT:
            raise ValueError(f"its format is not {CHECK_FORMAT!r}")
        texts, length = check["texts"], check.get("length")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("its texts are no list of strings")
        if length is not None and not (type(length) is int and length > 0):
            raise ValueError(f"its length is {length!r}")
        for name in ("dtype", "quantize"):  # they decide on the tolerance
            if not isinstance(check[name], str):
                raise ValueError(f"its {name} is {check[name]!r}")
        vectors = np.array(check["vectors"], np.float32)
        parts = [(str(name), int(width)) for name, width in check["parts"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"check: {file} can't be read ({error}). Save the model again.") from None
    if vectors.ndim != 2 or len(vectors) != len(texts) or not texts or not np.isfinite(vectors).all():
        raise ValueError(f"check: {file} doesn't hold one vector for each text. Save the model again.")
    _check_whole(file, check.get("modules"))
    exact = check["dtype"] == "float32" and check["quantize"] == "none"
    return Reference(texts, vectors, parts, length, TOLERANCE if exact else HALF_TOLERANCE)


def _check_tolerance(tolerance: float | None) -> None:
    if tolerance is not None and not 0 < tolerance < 1:  # at 1 zeros would be right
        raise ValueError(f"check: tolerance must be above 0 and below 1, got {tolerance}.")


def _check_whole(file: Path, modules: Any) -> None:
    """Refuse vectors that were made before the pipeline's end: our last module doesn't know what follows it."""
    entries = file.with_name("modules.json")
    if not entries.is_file():
        return
    try:
        names = [str(entry["type"]).rpartition(".")[2] for entry in json.loads(entries.read_text(encoding="utf-8"))]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"check: {entries} can't be read ({type(error).__name__}: {error}).") from None
    if not isinstance(modules, list):
        raise ValueError(f"check: {file} doesn't say of which modules it is: 'modules' is {str(modules)[:40]}.")
    if names != modules:
        raise ValueError(
            f"check: {file} is of the modules {', '.join(map(str, modules))}, but the model consists of "
            f"{', '.join(names)}; a pipeline with modules of others can't be checked."
        )


def compare(reference: Reference, found: np.ndarray, tolerance: float | None = None) -> Verdict:
    """Judge vectors: equal to ``tolerance`` of each one's largest number; 1 % of the lexical signs may have turned.

    Args:
        reference: What they should be.
        found: (n, dim) float32, of the reference's texts.
        tolerance: Above 0 and below 1; None takes 0.001, and 0.02 where the model was saved in half precision or
            quantised.

    Raises:
        ValueError: Another tolerance.
    """
    _check_tolerance(tolerance)
    expected = reference.vectors
    tolerance = reference.tolerance if tolerance is None else tolerance
    if found.shape != expected.shape:
        return Verdict(False, _other_shape(reference, found), [], [], 0)
    if not np.isfinite(found).all():
        return Verdict(False, "wrong: numbers that are not finite", [], [], 0)
    difference, turned = _difference(reference, found, tolerance)
    largest = np.maximum(abs(expected).max(1), np.finfo(np.float32).tiny)
    relative = (difference.max(1) / largest).tolist()
    cosines = [_cosine(one, other) for one, other in zip(found, expected, strict=True)]
    worst = max(relative)
    figures = f"largest difference {worst:.1e} of the largest number (allowed: {tolerance:g}), "
    figures += f"least cosine {min(cosines):.5f}"
    if worst <= tolerance and turned <= _most_turned(reference):
        also = f", {turned} signs turned where two halves may be equal" if turned else ""
        return Verdict(True, f"right: {figures}{also}", relative, cosines, turned)
    return Verdict(False, f"wrong: {figures}. {_reason(reference, found, tolerance)}", relative, cosines, turned)


def _difference(reference: Reference, found: np.ndarray, tolerance: float) -> tuple[np.ndarray, int]:
    """(n, dim) differences, of magnitudes where a sign of the lexical part turned, and how many did."""
    expected, lexical = reference.vectors, _lexical(reference)
    scale = tolerance * abs(expected).max(1, keepdims=True)
    turned = lexical & (np.signbit(found) != np.signbit(expected)) & (abs(abs(found) - abs(expected)) <= scale)
    small = turned & (abs(found - expected) <= scale)  # about 0
    difference = np.where(turned, abs(abs(found) - abs(expected)), abs(found - expected))
    return difference, int((turned & ~small).sum())


def _lexical(reference: Reference) -> np.ndarray:
    """(dim,): which columns are of the lexical part."""
    lexical = np.zeros(reference.vectors.shape[1], bool)
    start = 0
    for name, width in reference.parts:
        lexical[start : start + width] = name == "lexical_embedding"
        start += width
    return lexical


def _most_turned(reference: Reference) -> int:
    """How many signs of the lexical part may have turned, in all vectors together."""
    return math.ceil(MOST_TURNED * len(reference.vectors) * int(_lexical(reference).sum()))


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    norms = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(one @ other) / norms if norms else float(not one.any() and not other.any())


def _other_shape(reference: Reference, found: np.ndarray) -> str:
    expected = reference.vectors
    if found.ndim != 2:
        return f"wrong: an array of shape {found.shape} instead of {expected.shape}"
    if len(found) != len(expected):
        return f"wrong: {len(found)} vectors for {len(expected)} texts"
    said = f"wrong: {found.shape[1]} dimensions instead of {expected.shape[1]}."
    for what, columns in _columns(reference):
        part = expected[:, columns]
        if part.shape == found.shape and _close(found, part, HALF_TOLERANCE):
            return f"{said} The vectors are {what} alone: don't use them."
    return f"{said} Why is unknown: these are other vectors than the model's. Don't use them."


def _columns(reference: Reference) -> Iterator[tuple[str, slice]]:
    """Each part of the vectors, by its name, and their beginning."""
    start = 0
    for name, width in reference.parts:
        yield f"the model's {name}", slice(start, start + width)
        start += width
    for width in range(1, reference.vectors.shape[1]):
        yield f"the first {width} numbers of the model's", slice(width)


def _close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    """Whether each vector is as expected, signs too, to ``tolerance`` of its largest number."""
    largest = np.maximum(abs(expected).max(1, keepdims=True), np.finfo(np.float32).tiny)
    return bool((abs(found - expected) <= tolerance * largest).all())


def _reason(reference: Reference, found: np.ndarray, tolerance: float) -> str:
    """Why vectors of the right shape are wrong: what their numbers show, or that it is unknown."""
    expected = reference.vectors

    def fits(other: np.ndarray, within: float) -> bool:
        difference, turned = _difference(reference._replace(vectors=other), found, within)
        largest = np.maximum(abs(other).max(1, keepdims=True), np.finfo(np.float32).tiny)
        return bool((difference <= within * largest).all()) and turned <= _most_turned(reference)

    norms = np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    if fits(expected, HALF_TOLERANCE) and tolerance < HALF_TOLERANCE:
        small = f"if you serve the model so, say --tolerance {HALF_TOLERANCE} (now {tolerance:g})."
        if np.array_equal(found.astype(np.float16), found) or not (found.view(np.uint32) & 0xFFFF).any():
            return f"The numbers are of half precision; {small}"
        return f"Why is unknown; computing in half precision makes differences of this size: {small}"
    if fits(expected / norms, HALF_TOLERANCE):
        return (
            "The vectors are normalised to length 1, but they are made for the inner product as they are: switch "
            "normalisation off."
        )
    orders = [part for _, part in zip(reference.parts, _columns(reference), strict=False)]
    if len(orders) > 1 and fits(np.concatenate([expected[:, columns] for _, columns in orders[::-1]], 1), tolerance):
        return "The parts of the vectors come in another order than the model's."
    if fits(expected[::-1], tolerance):
        return "The vectors are the texts' in the other order: one text gets another one's vector."
    difference, turned = _difference(reference, found, tolerance)
    if (difference <= tolerance * abs(expected).max(1, keepdims=True)).all():
        return f"Turned signs of the lexical part: {turned} of {found.size} numbers; why is unknown."
    if _only_the_cut_text_differs(reference, found, tolerance):
        return (
            f"Only the text that the model cuts, at length {reference.length}, differs: compare the length at which "
            "the program cuts."
        )
    return "Why is unknown: these are other vectors than the model's. Don't use them."


def _only_the_cut_text_differs(reference: Reference, found: np.ndarray, tolerance: float) -> bool:
    # A word is a token at least, so a text of more words is surely cut; of others that can't be told from here.
    cut = np.array([len(text.split()) > (reference.length or np.inf) for text in reference.texts])
    difference, _ = _difference(reference, found, tolerance)
    wrong = (difference > tolerance * abs(reference.vectors).max(1, keepdims=True)).any(1)
    return bool(cut.any() and not cut.all() and wrong.any() and not (wrong & ~cut).any())


def model_vectors(folder: str | Path, texts: Sequence[str]) -> np.ndarray:
    """(n, dim) float32 by a model's folder, loaded by this package, without prompt, as ``encode`` takes a text."""
    from st_aggretriever.model import load_aggretriever

    model = load_aggretriever(folder, device="cpu")
    return np.asarray(model.encode(list(texts), prompt="", show_progress_bar=False), np.float32)


def onnx_vectors(file: str | Path, texts: Sequence[str], length: int | None) -> np.ndarray:
    """(n, dim) float32 by a file of :func:`st_aggretriever.export.onnx.export_onnx` and the tokenizer beside it.

    Raises:
        ImportError: onnxruntime is missing.
        FileNotFoundError: There is no such file, or no tokenizer.json beside it.
        ValueError: It is another program's ONNX file.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(f'check: {error}. Install it by: pip install "st-aggretriever[onnx]"') from None
    from tokenizers import Tokenizer

    file = Path(file)
    beside = file.with_name("tokenizer.json")
    if not file.is_file() or not beside.is_file():
        raise FileNotFoundError(f"check: {file} or the tokenizer.json beside it is missing.")
    try:
        tokenizer = Tokenizer.from_file(str(beside))
    except Exception as error:  # a bare one, whatever is wrong
        raise ValueError(f"check: {beside} can't be read as a tokenizer ({' '.join(str(error).split())}).") from None
    tokenizer.no_padding()
    if length is not None:
        tokenizer.enable_truncation(length)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own, of which there is one for each kind of failure
        raise ValueError(f"check: onnxruntime refuses {file}: {str(error).splitlines()[0]}") from None
    names = {node.name for node in session.get_inputs()}
    if not {"input_ids", "attention_mask"} <= names <= {"input_ids", "attention_mask", "prompt_length"}:
        raise ValueError(f"check: {file} takes {', '.join(sorted(names))}; it is not of `st-aggretriever export onnx`.")
    vectors = []
    for text in texts:
        ids = np.array([tokenizer.encode(text).ids], np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "prompt_length": np.zeros(1, np.int64)}
        try:
            vectors.append(session.run(None, {name: inputs[name] for name in names})[0])
        except Exception as error:  # for instance ids beyond the file's vocabulary
            reason = str(error).splitlines()[0]
            raise ValueError(f"check: {file} with the tokenizer.json beside it can't be run: {reason}") from None
    return np.concatenate(vectors).astype(np.float32)


def endpoint_vectors(
    url: str, texts: Sequence[str], *, name: str | None = None, api_key: str | None = None
) -> tuple[np.ndarray, str]:
    """Vectors by a running server, all texts in one request, and the route that answered.

    Args:
        url: With its route (``.../v1/embeddings`` as OpenAI's, ``.../embed`` as TEI's), or without:
            then the usual routes are tried.
        texts: What to send.
        name: The model's name for an OpenAI-style server; None asks it by ``/v1/models``.
        api_key: Sent as a bearer token.

    Raises:
        OSError: The server can't be reached, or refuses.
        ValueError: Its answer is not a list of vectors, the key can't be sent, or the address names no host.
    """
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("check: the API key must be printable ASCII on one line; it has other characters in it.")
    url = url.rstrip("/")
    try:
        host = urllib.parse.urlsplit(url).hostname
    except ValueError:  # an unclosed bracket
        host = None
    if not host:
        raise ValueError(f"check: {url} is no address of a server: expected http://HOST:PORT, with or without a route.")
    routes = [(route, style) for route, style in ROUTES if url.endswith(route)]
    tried = [(url, routes[0][1])] if routes else [(url + route, style) for route, style in ROUTES]
    for address, style in tried:
        body: dict[str, Any]
        if style == TEI:
            body = {"inputs": list(texts), "normalize": False, "truncate": True}
        else:
            served = name or _served_name(address, api_key)
            body = {"input": list(texts), "model": served, "encoding_format": "float"}
        try:
            answer = _ask(address, api_key, body)
        except urllib.error.HTTPError as error:
            if error.code in (404, 405) and address != tried[-1][0]:
                continue
            said = error.read(2000).decode("utf-8", "replace").strip()
            raise OSError(f"check: {address} refused with {error.code} {error.reason}: {said}") from None
        except (OSError, http.client.HTTPException) as error:  # URLError and TimeoutError are OSErrors
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise OSError(f"check: {address} can't be reached: {reason}") from None
        except ValueError as error:
            raise ValueError(f"check: {address} answered something else than JSON ({error}).") from None
        return _vectors_of(answer, address), f"{address} ({style})"
    raise AssertionError


def _served_name(address: str, api_key: str | None) -> str:
    """The first model that an OpenAI-style server lists; some ask for a name and some don't care."""
    try:
        listed = _ask(address.removesuffix("/embeddings") + "/models", api_key)
        return str(listed["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError):
        return "model"


def _ask(address: str, api_key: str | None, body: Mapping[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(address, data, headers), timeout=SECONDS) as response:
        try:
            return json.loads(response.read())
        except RecursionError:
            raise ValueError("nested too deeply") from None


def _vectors_of(answer: Any, address: str) -> np.ndarray:
    """The vectors of an OpenAI-style object or a TEI-style list, in the order of the texts."""
    try:
        if isinstance(answer, dict):
            rows = sorted(answer["data"], key=lambda row: row["index"])
            answer = [row["embedding"] for row in rows]
        return np.array(answer, np.float32)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        missing = f", without {error}" if isinstance(error, KeyError) else ""
        raise ValueError(
            f"check: {address} answered something else than vectors{missing}: {str(answer)[:200]}"
        ) from None


def check(
    target: str,
    *,
    model: str | Path | None = None,
    tolerance: float | None = None,
    name: str | None = None,
    api_key: str | None = None,
) -> tuple[Verdict, str]:
    """Hold a folder, an ONNX file or a server against ``check.json``; returns the verdict and what was held.

    Args:
        target: Folder of a model; folder or file of an exported ONNX; or ``http://...``, ``https://...``.
        model: Folder or file with the ``check.json``; None takes the target's own. A server needs it.
        tolerance, name, api_key: See :func:`compare` and :func:`endpoint_vectors`.

    Raises:
        OSError, ValueError, ImportError: What should be held can't be had; the sentence says why.
    """
    _check_tolerance(tolerance)  # before a model loads
    if target.startswith(("http://", "https://")):
        if model is None:
            raise ValueError("check: a server is held against a model: name its folder by --model.")
        reference = read_reference(model)
        found, what = endpoint_vectors(target, reference.texts, name=name, api_key=api_key)
        return compare(reference, found, tolerance), what
    path = Path(target)
    if not path.exists():
        raise FileNotFoundError(f"check: there is no {target}.")
    if path.suffix == ".onnx" or (path / "model.onnx").is_file():
        file = path if path.suffix == ".onnx" else path / "model.onnx"
        reference = read_reference(file.parent if model is None else model)
        return compare(
            reference, onnx_vectors(file, reference.texts, reference.length), tolerance
        ), f"{file} (onnxruntime)"
    reference = read_reference(path if model is None else model)
    return compare(reference, model_vectors(path, reference.texts), tolerance), f"{path} (load_aggretriever)"


def api_key_from(variable: str | None) -> str | None:
    """The key in an environment variable.

    Raises:
        ValueError: The variable is not set.
    """
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ValueError(f"check: --api-key-env {variable}: there is no such environment variable.")
    return os.environ[variable]
