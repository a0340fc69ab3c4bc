"""Published Aggretriever checkpoints to modules of this package, and back.

Two layouts are published, ``castorini.py`` and ``dhr.py`` say which; they are recognised by content, not by name.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, metadata_save
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import load_file_path
from torch import nn
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoTokenizer

from st_aggretriever.atomic import check_place
from st_aggretriever.convert.castorini import is_castorini, read_castorini, write_castorini
from st_aggretriever.convert.checkpoint import (
    FILES,
    TOKENIZER_FILES,
    PublishedCheckpoint,
    local_folder,
    reading,
    weight_names,
)
from st_aggretriever.convert.dhr import is_dhr, read_dhr
from st_aggretriever.convert.licence import Licence, licence_of
from st_aggretriever.modules import (
    CLSProjection,
    Concat,
    MLMEncoder,
    MLMLexicalPooling,
    SliceMaxAgg,
    TokenLexicalPooling,
    __version__,
)

__all__ = [
    "Licence",
    "check_new_folder",
    "convert_checkpoint",
    "convert_into_cache",
    "licence_of",
    "local_folder",
    "published_layout",
    "save_castorini",
]

logger = logging.getLogger(__name__)

READERS = {"castorini": read_castorini, "dhr": read_dhr}
QUERY_LENGTH, DOCUMENT_LENGTH = 32, 128  # as trained


def published_layout(source: str | Path, **where: Any) -> str | None:
    """``"castorini"``, ``"dhr"``, or None for anything else.

    Args:
        source: Folder or Hub id.
        **where: ``token``, ``cache_folder``, ``revision``, ``local_files_only``, as for ``load_aggretriever``.
    """
    if load_file_path(str(source), "modules.json", **where) is not None:
        return None
    if is_dhr(source, **where):
        return "dhr"
    return "castorini" if is_castorini(weight_names(source, **where)) else None


def convert_checkpoint(
    source: str | Path,
    output_dir: str | Path | None = None,
    *,
    pooling: str = "mlm",
    lexical_dim: int = 640,
    **where: Any,
) -> SentenceTransformer:
    """Turn a published Aggretriever checkpoint into a model of this package, with equal vectors.

    The vector is [CLS], then lexical, whatever the order of the published one. The settings are those of the published
    encoders: term weight without absolute value, [SEP] in the maximum, ``remainder="drop"``, queries of 32 and
    documents of 128 tokens.

    Args:
        source: Folder or Hub id, for instance ``"castorini/aggretriever-distilbert"``.
        output_dir: Where to save the model; a folder that doesn't exist or is empty.
        pooling: ``"mlm"``, or ``"tokens"`` for the published variant without MLM head (``skip_mlm``).
        lexical_dim: D, which no published file records: 640 in all published models.
        **where: ``token``, ``cache_folder``, ``revision``, ``local_files_only``, as for ``load_aggretriever``.

    Returns:
        SentenceTransformer of dimension C + D. Its backbone's config names the source, ``converted_from``.

    Raises:
        ValueError: It is no published layout, is untied or damaged, or a tensor is missing, unexpected or of another
            shape.
        FileExistsError: ``output_dir`` is not empty.
        OSError: A file is missing.

    Example:
        >>> model = convert_checkpoint("castorini/aggretriever-distilbert")  # doctest: +SKIP
        >>> model.encode_query("what is dense retrieval?").shape  # doctest: +SKIP
        (768,)
    """
    if pooling not in ("mlm", "tokens"):
        raise ValueError(f"convert_checkpoint: pooling must be 'mlm' or 'tokens', got {pooling!r}.")
    if output_dir is None:
        return _convert(source, pooling, lexical_dim, where)[0]
    with _new_folder(output_dir) as folder:
        model, name, licence = _convert(source, pooling, lexical_dim, where)
        _save(model, folder, name, licence)
    return model


def convert_into_cache(source: str | Path, **where: Any) -> Path | None:
    """Convert a published checkpoint once, and find it again after; None if it is of no published layout.

    The folder lies in the Hugging Face cache (or ``cache_folder``) and is keyed by the source's content or revision,
    and by this package's version.
    """
    if published_layout(source, **where) is None:
        return None
    folder = local_folder(source, **where)
    root = Path(where.get("cache_folder") or constants.HF_HOME) / "st_aggretriever"
    target = root / f"{re.sub(r'[^A-Za-z0-9._-]+', '--', _name(source))}-{_fingerprint(folder)}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=root) as temporary:
        model, name, licence = _convert(source, "mlm", 640, where)
        _save(model, Path(temporary, "model"), name, licence)
        try:
            Path(temporary, "model").rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    logger.warning("converted %s into %s; licence: %s", source, target, licence)
    return target


def save_castorini(model: SentenceTransformer, output_dir: str | Path, licence: Licence | None = None) -> None:
    """Write a model in the castorini layout: a folder that the published encoder class reads.

    Args:
        model: An Aggretriever with the published settings.
        output_dir: A folder that doesn't exist or is empty.
        licence: To be carried along.

    Raises:
        ValueError: The published class can't express the model; the sentence says why.
        FileExistsError: ``output_dir`` is not empty.
    """
    with _new_folder(output_dir) as folder:
        folder.mkdir()
        origin = getattr(model[0].model.config, "converted_from", None)  # type: ignore[union-attr]
        write_castorini(model, folder)
        _write_card(folder, _CASTORINI_CARD, origin, licence or Licence())


def _convert(
    source: str | Path, pooling: str, lexical_dim: int, where: dict[str, Any]
) -> tuple[SentenceTransformer, str, Licence]:
    """The model, its source's name and licence."""
    layout = published_layout(source, **where)
    folder = local_folder(source, **where)
    if layout is None:
        raise ValueError(
            f"convert: {str(source)!r} is no published Aggretriever: neither encoder.*, tok_proj and cls_proj in "
            "one weight file (castorini), nor TermWeightTrans.pt and pooler.pt beside a masked language model (dhr)."
        )
    checkpoint = READERS[layout](folder)
    if not any(True for pattern in TOKENIZER_FILES for _ in folder.glob(pattern)):
        raise ValueError(f"convert: {folder} holds no tokenizer; copy that of its backbone into the folder.")
    name = _name(source)
    with tempfile.TemporaryDirectory() as temporary:
        encoder = _encoder(checkpoint, folder, Path(temporary), head=pooling == "mlm")
    config: Any = encoder.model.config
    config.converted_from = f"{name} ({layout} layout)"
    encoder.model.name_or_path = encoder.tokenizer.name_or_path = str(source)  # type: ignore[union-attr]
    return _assemble(checkpoint, encoder, lexical_dim), name, licence_of(folder)


def _encoder(checkpoint: PublishedCheckpoint, source: Path, temporary: Path, *, head: bool) -> MLMEncoder:
    """The checkpoint's backbone, by way of an ordinary folder, so that it is loaded and checked as any other."""
    config = checkpoint.config
    config.output_hidden_states = False  # The published classes need them all; ours reads the last.
    config.architectures = None
    config.save_pretrained(temporary)
    whole: Any = MODEL_FOR_MASKED_LM_MAPPING[type(config)]
    prefix = "" if head else whole.base_model_prefix + "."
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.masked_lm.items() if name.startswith(prefix)}
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    with reading(source / "tokenizer.json" if (source / "tokenizer.json").is_file() else source):
        AutoTokenizer.from_pretrained(source).save_pretrained(temporary)
    encoder = MLMEncoder(str(temporary), head=head, query_length=QUERY_LENGTH, document_length=DOCUMENT_LENGTH)
    if encoder.prefix_length != 1:
        raise ValueError(f"convert: the tokenizer in {source} must put [CLS] before a text, and doesn't.")
    encoder.max_seq_length = DOCUMENT_LENGTH
    return encoder


def _assemble(checkpoint: PublishedCheckpoint, encoder: MLMEncoder, lexical_dim: int) -> SentenceTransformer:
    hidden_size = checkpoint.config.hidden_size
    cls_dim = len(checkpoint.cls["weight"])
    weighting: dict[str, Any] = {"term_weight": "identity", "excluded_tokens": "cls"}
    pooling: Any
    if encoder.head:
        pooling = MLMLexicalPooling(hidden_size, **weighting)
    else:
        pooling = TokenLexicalPooling(hidden_size, encoder.vocab_size(), **weighting)
    projection = CLSProjection(hidden_size, cls_dim)
    pooling.linear.load_state_dict(checkpoint.term_weight)
    projection.linear.load_state_dict(checkpoint.cls)
    modules: list[nn.Module] = [
        encoder,
        pooling,
        SliceMaxAgg(encoder.vocab_size(), lexical_dim, remainder="drop"),
        projection,
        Concat(["cls_embedding", "lexical_embedding"], [cls_dim, lexical_dim]),
    ]
    return SentenceTransformer(modules=modules, similarity_fn_name="dot").eval()


def _save(model: SentenceTransformer, folder: Path, name: str, licence: Licence) -> None:
    model.save_pretrained(str(folder), create_model_card=False)
    _write_card(folder, _CARD, name, licence)


_CARD = """# Aggretriever

{origin}
```python
from st_aggretriever import load_aggretriever  # pip install st-aggretriever

model = load_aggretriever("path/to/this/folder")
# without the package: SentenceTransformer("path/to/this/folder", trust_remote_code=True)
queries = model.encode_query(["what is dense retrieval?"])
documents = model.encode_document(["Dense retrieval compares vectors."])
print(model.similarity(queries, documents))  # dot product
```

Licence: {licence}.
"""
_CASTORINI_CARD = """# Aggretriever, in the layout of castorini/aggretriever-*

{origin}
`pytorch_model.bin` holds the names of the published encoder class (`encoder.*`, `tok_proj.*`, `cls_proj.*`).

Licence: {licence}.
"""


def _write_card(folder: Path, card: str, origin: str | None, licence: Licence) -> None:
    path = folder / "README.md"
    origin = f"Converted from {origin}.\n" if origin else ""
    path.write_text(card.format(origin=origin, licence=licence), encoding="utf-8")
    tags = ["aggretriever", "sentence-transformers", "sentence-similarity"]
    metadata_save(path, {**licence.fields, "library_name": "sentence-transformers", "tags": tags})
    licence.copy_to(folder)


def _name(source: str | Path) -> str:
    """How a model names its source: a Hub id, or a folder without the way to it."""
    return Path(source).resolve().name if Path(source).is_dir() else str(source)


def _fingerprint(folder: Path) -> str:
    """Of what a conversion would give: the revision or the content of its source, and this package's version."""
    digest = hashlib.sha256(__version__.encode())
    if folder.parent.name == "snapshots":  # a Hub repository's copy: the folder is named by the commit
        digest.update(folder.name.encode())
        return digest.hexdigest()[:16]
    for path in sorted({path for pattern in FILES for path in folder.glob(pattern) if path.is_file()}):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()[:16]


def check_new_folder(output_dir: str | Path) -> Path:
    """Where a folder can be written: where a link leads, if it is one.

    Raises:
        FileExistsError: There is something already.
        OSError: None can be made there.
    """
    output = Path(output_dir).resolve()
    if output.is_dir():
        if any(output.iterdir()):
            raise FileExistsError(f"convert: the folder {output} is not empty; name another, or empty it.")
    elif output.exists():
        raise FileExistsError(f"convert: {output} exists and is no folder; name another.")
    check_place(output)
    return output


@contextmanager
def _new_folder(output_dir: str | Path) -> Iterator[Path]:
    """A path to write a folder to, which takes its final name when all is done.

    Raises:
        As :func:`check_new_folder`.
    """
    output = check_new_folder(output_dir)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        yield partial
        if output.is_dir():
            output.rmdir()
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
