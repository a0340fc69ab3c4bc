"""Encoding to disk: a collection block by block into a folder of vectors, in one process, several, or as a shard."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from st_aggretriever.atomic import check_output
from st_aggretriever.encoding import PROMPT_NAMES, Encoder
from st_aggretriever.search.exact import check_vectors
from st_aggretriever.vectors.blocks import check_dtype
from st_aggretriever.vectors.folder import VectorFolder, VectorWriter, is_finished
from st_aggretriever.vectors.manifest import counted, size_of, texts_of
from st_aggretriever.vectors.shards import Shard, shard_folder

logger = logging.getLogger(__name__)

REPORT_SECONDS = 30.0  # between two lines on how far it is


class TextBlock(Protocol):
    """The texts of a block."""

    @property
    def rows(self) -> list[tuple[str, str]]:
        """``[(id, text), ...]``, in the collection's order."""

    @property
    def bad(self) -> list[str]:
        """A sentence on each row that was left out."""


class _Block(NamedTuple):
    rows: list[tuple[str, str]]
    bad: list[str]


class Texts(Protocol):
    """A collection that is cut into blocks: :class:`Source`, or ``readers.corpus.Corpus``."""

    name: str

    def scan(self, block_size: int, wanted: Callable[[int], bool] = ...) -> tuple[int, str]: ...

    def read(self, number: int) -> TextBlock: ...


class Source:
    """Texts that can be streamed more than once, as blocks.

    Args:
        name: For the manifest.
        stream: Gives ``(id, text)``, ids unique.
    """

    def __init__(self, name: str, stream: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self.name, self.stream = name, stream
        self.block_size = 0
        self._next: tuple[int, Iterator[tuple[str, str]]] | None = None

    def scan(self, block_size: int, wanted: Callable[[int], bool] = lambda number: True) -> tuple[int, str]:
        """How many texts there are, and the SHA-256 of all ids and texts."""
        self.block_size, self._next = block_size, None
        digest = hashlib.sha256()
        count = 0
        for record in self.stream():
            digest.update(json.dumps(record).encode())
            count += 1
        if not count:
            raise ValueError(f"{self.name} holds no text.")
        return count, digest.hexdigest()

    def read(self, number: int) -> TextBlock:
        """The texts of a block; after :meth:`scan`, and fastest one after the other."""
        if self._next is None or self._next[0] > number:
            self._next = 0, iter(self.stream())
        at, texts = self._next
        ahead = (number - at) * self.block_size
        next(islice(texts, ahead, ahead), None)
        self._next = number + 1, texts
        return _Block(list(islice(texts, self.block_size)), [])


class Made(NamedTuple):
    """An encoded block."""

    ids: list[str]
    vectors: np.ndarray  # (n, dim) float32
    counts: dict[str, int | None]  # as vectors.write_block takes them
    left_out: list[str]  # a sentence on each


class BlockEncoder:
    """Blocks of texts to vectors, the same for the same block wherever it is encoded.

    Args:
        model: As for :class:`st_aggretriever.encoding.Encoder`.
        side: ``"document"`` or ``"query"``.
        batch_size: Texts a batch.
        dtype: That the vectors will be stored in.
        skip_bad: Leave out what can't be encoded to finite numbers of that dtype, instead of raising.

    Raises:
        ValueError: A bad side, batch size or dtype, or a model that :class:`Encoder` refuses.
    """

    def __init__(
        self, model: Any, side: str, *, batch_size: int = 32, dtype: str = "float32", skip_bad: bool = False
    ) -> None:
        if side not in PROMPT_NAMES:
            raise ValueError(f"encode_to_disk: side must be one of {', '.join(PROMPT_NAMES)}, got {side!r}.")
        check_dtype(dtype)
        self.encoder = Encoder(model, batch_size)
        self.side, self.dtype, self.skip_bad = side, dtype, skip_bad
        self._processes: Sequence[Any] = ()

    def encode(self, block: TextBlock, bar: Any = None) -> Made:
        """Encode what :meth:`Texts.read` gives; ``bar`` is a progress bar to move.

        Raises:
            ValueError: A text that the model can't encode, or whose vector isn't finite; named by its id.
        """
        # A block all of whose texts were left out has the others' width; asked before the counts begin.
        nothing = None if block.rows else self.encoder.encode(["dimension"], self.side)[:0]
        before = self._counts()
        ids = [key for key, _ in block.rows]
        vectors, reasons = self._vectors(block.rows, bar) if nothing is None else (nothing, {})
        if self.skip_bad:
            # Only here, as the check below would raise: infinity and NaN aren't at most the largest number either.
            good = (np.abs(vectors) <= np.finfo(self.dtype).max).all(axis=1)
            for place in np.flatnonzero(~good).tolist():
                reasons.setdefault(place, f"its vector holds numbers that {self.dtype} can't")
            ids, vectors = [key for key, kept in zip(ids, good, strict=True) if kept], vectors[good]
        check_vectors(ids, vectors, self.side)
        counts = {name: _since(before[name], after) for name, after in self._counts().items()}
        left_out = [*block.bad, *(f"{block.rows[place][0]!r}: {reason}" for place, reason in sorted(reasons.items()))]
        return Made(ids, vectors, {**counts, "skipped": len(left_out)}, left_out)

    def _vectors(self, rows: Sequence[tuple[str, str]], bar: Any) -> tuple[np.ndarray, dict[int, str]]:
        """(n, dim) in the order of ``rows``, encoded by length, and why some, then NaN, couldn't be encoded."""
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place][1]))  # stable: the same every time
        reasons: dict[int, str] = {}
        vectors = np.empty((0, 0), np.float32)
        step = self.encoder.texts_at_once
        for start in range(0, len(order), step):
            places = order[start : start + step]
            try:
                part = self.encoder.encode([rows[place][1] for place in places], self.side)
            except Exception as error:  # whatever a model raises
                part = self._one_by_one(rows, places, error, reasons)
            if not len(vectors):
                vectors = np.empty((len(rows), part.shape[1]), np.float32)
            vectors[places] = part
            if bar is not None:
                bar.update(len(places))
        return vectors, reasons

    def _one_by_one(
        self, rows: Sequence[tuple[str, str]], places: Sequence[int], error: Exception, reasons: dict[int, str]
    ) -> np.ndarray:
        """Find the texts that the model can't take; ``error`` is what it raised for all of them together."""
        parts: dict[int, np.ndarray] = {}
        for place in places:
            if any(not process.is_alive() for process in self._processes):
                raise OSError(
                    f"a process that encodes has died, perhaps for want of memory ({_short(error)}). Finished blocks"
                    " are kept: run the same command again, with fewer --workers or a smaller --batch-size."
                ) from error
            try:
                parts[place] = self.encoder.encode([rows[place][1]], self.side)[0]
            except Exception as alone:
                reasons[place] = f"the model can't encode it ({_short(alone)})"
                if not self.skip_bad:
                    raise ValueError(f"{self.side} {rows[place][0]!r}: {reasons[place]}.") from alone
        if len(parts) == len(places):
            raise error  # nothing that one text did
        width = len(next(iter(parts.values()))) if parts else self._width(error)
        return np.stack([parts.get(place, np.full(width, np.nan, np.float32)) for place in places])

    def _width(self, error: Exception) -> int:
        """Of the vectors, by a model that still takes a text; else raises ``error``."""
        try:
            return Encoder(self.encoder.model, 1).encode(["dimension"], self.side).shape[1]  # whose counts don't count
        except Exception:  # whatever a model raises: it is the model's fault then, and the first error says more
            raise error from None

    def _counts(self) -> dict[str, int | None]:
        encoder = self.encoder
        return {
            "truncated": encoder.truncated[self.side],
            "tokens": encoder.tokens[self.side],
            "unfoldable": encoder.unfoldable,
        }

    @contextmanager
    def on(self, devices: Sequence[str]) -> Iterator[None]:
        """Encode in a process for each device meanwhile (sentence-transformers' pool); in this one where there is none.

        Raises:
            ValueError: The model reads documents in windows, which it does here only.
        """
        if not devices:
            yield
            return
        encoder, model = self.encoder, self.encoder.model
        if getattr(model, "windows", None):
            raise ValueError(
                "--windows: documents are read in windows by one process. Leave --workers out, use shards."
            )
        chunk = encoder.texts_at_once
        pool = model.start_multi_process_pool(list(devices))
        self._processes = pool["processes"]
        # The same texts in each batch as in one process.
        encoder.options |= {"pool": pool, "chunk_size": chunk}
        encoder.texts_at_once = chunk * len(devices)
        try:
            yield
        finally:
            self._processes = ()
            del encoder.options["pool"], encoder.options["chunk_size"]
            encoder.texts_at_once = chunk
            model.stop_multi_process_pool(pool)


class Plan(NamedTuple):
    """What is to be encoded: the manifest, and the numbers of the collection's blocks that are this run's."""

    manifest: dict[str, Any]
    blocks: range

    @property
    def texts(self) -> int:
        return texts_of(self.manifest["texts"], self.manifest["block_size"], self.blocks)


def plan(
    encoder: BlockEncoder,
    source: Texts,
    *,
    block_size: int = 20_000,
    model_name: str = "unnamed",
    shard: Shard | None = None,
) -> Plan:
    """Read the collection once and say what its vectors will be.

    Raises:
        ValueError: No text, or a bad one.
    """
    if block_size < 1:
        raise ValueError(f"encode_to_disk: block_size must be at least 1, got {block_size}.")
    number, count = shard or (0, 1)
    texts, sha256 = source.scan(block_size, lambda block: block % count == number)
    dimension = encoder.encoder.encode(["dimension"], encoder.side).shape[1]
    manifest = {
        **encoder.encoder.manifest(encoder.side, dimension, model_name),
        "block_size": block_size,
        "source": source.name,
        "source_sha256": sha256,
        "texts": texts,
    }
    if shard is not None:
        manifest["shard"] = list(shard)
    return Plan(manifest, range(number, -(-texts // block_size), count))


def prepare_output(output: str | Path, shard: Shard | None) -> Path:
    """The folder to write: ``output``, or the shard's in it, which may be complete.

    Raises:
        FileExistsError: It exists, or its place is taken by something that is no shard.
        FileNotFoundError: The folder that shall hold it doesn't.
    """
    if shard is None:
        check_output(output)
        return Path(output)
    folder = shard_folder(output, shard)
    if not folder.parent.is_dir():
        if folder.parent.exists() or not folder.parent.absolute().parent.is_dir():
            check_output(folder.parent)
        folder.parent.mkdir(exist_ok=True)  # another shard may just have made it
    if (folder.parent / "manifest.json").exists():
        raise FileExistsError(f"{folder.parent} holds vectors already. Name another output.")
    if not (folder / "manifest.json").is_file():
        check_output(folder)
    return folder


class Progress:
    """Says how far an encoding is: a bar on a terminal, and a line every half minute and at the end.

    Args:
        plan: What is to be done.
        dtype: Of the numbers on disk.
        report: Called with each line.
    """

    def __init__(self, plan: Plan, dtype: str, report: Callable[[str], Any]) -> None:
        manifest = plan.manifest
        self.total, self.report = plan.texts, report
        self.bytes_each = manifest["dimension"] * np.dtype(dtype).itemsize
        self.plan = plan
        self.done = self.made = self.tokens = 0
        self.unknown_tokens = False
        self.started = self.reported = time.perf_counter()
        self.bar = tqdm(total=self.total, desc="texts", unit="text", disable=None)
        which = " of shard {} of {}".format(*manifest["shard"]) if "shard" in manifest else ""
        report(
            f"{counted(self.total, manifest['side'])}{which} in {counted(len(plan.blocks), 'block')}, "
            f"{counted(manifest['dimension'], 'dimension')}: {size_of(self.total * self.bytes_each)} as {dtype}"
        )

    def skip(self, number: int) -> None:
        """A block that was there already."""
        texts = self.texts(number)
        self.done += texts
        self.bar.update(texts)

    def add(self, number: int, counts: Mapping[str, int | None], left_out: Sequence[str] = ()) -> None:
        """A block that was encoded; the bar was moved already."""
        for sentence in left_out:
            logger.warning("left out: %s", sentence)
        texts = self.texts(number)
        self.done += texts
        self.made += texts
        self.tokens += counts["tokens"] or 0
        self.unknown_tokens |= counts["tokens"] is None
        now = time.perf_counter()
        if now - self.reported >= REPORT_SECONDS:
            self.reported = now
            left = (self.total - self.done) * (now - self.started) / self.made
            self.report(f"{self._line(now)}, {duration(left)} left")

    def close(self) -> None:
        self.bar.close()
        self.report(self._line(time.perf_counter()))

    def texts(self, number: int) -> int:
        """How many texts a block holds."""
        manifest = self.plan.manifest
        return texts_of(manifest["texts"], manifest["block_size"], range(number, number + 1))

    def _line(self, now: float) -> str:
        seconds = max(now - self.started, 1e-9)
        tokens = "" if self.unknown_tokens else f"{counted(self.tokens, 'token')}, "
        earlier = f" ({self.done - self.made:,} by an earlier run)" if self.done > self.made else ""
        return (
            f"{self.done:,} of {counted(self.total, self.plan.manifest['side'])}{earlier}, {tokens}"
            f"{size_of(self.done * self.bytes_each)}, {self.made / seconds:,.1f} a second"
        )


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(42), duration(3900), duration(200000)
    ('42 s', '65 min', '55.6 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def encode_to_disk(
    model: Any,
    source: Texts,
    output: str | Path,
    *,
    side: str = "document",
    dtype: str = "float32",
    batch_size: int = 32,
    block_size: int = 20_000,
    model_name: str = "unnamed",
    shard: Shard | None = None,
    devices: Sequence[str] = (),
    skip_bad: bool = False,
    files: str = "npy",
    report: Callable[[str], Any] = logger.info,
) -> VectorFolder:
    """Encode texts into a folder of vectors; called again after an interruption, it goes on with the next block.

    All texts are read once before the first is encoded, so that a bad line is found and the collection is known by its
    checksum. Within a block the texts go to the model by length, the longest first, and no batch holds texts of two
    blocks: a block's vectors depend on its texts alone. On disk they stand in the collection's order. Memory holds one
    block, and 8 bytes a text.

    Args:
        model: As for :class:`st_aggretriever.encoding.Encoder`.
        source: The texts.
        output: Folder to write; until it is complete it is called ``OUTPUT.partial``.
        side: ``"document"`` or ``"query"``.
        dtype: ``"float32"`` or ``"float16"``, of the numbers on disk.
        batch_size: Texts a batch.
        block_size: Texts a block; what an interruption can lose.
        model_name: How the manifest names the model.
        shard: ``(i, n)`` encodes the blocks i, i + n, i + 2n, ... into ``OUTPUT/shard-i-of-n``.
        devices: A process for each, for instance ``["cuda:0", "cuda:1"]`` (sentence-transformers' pool); none: here.
        skip_bad: Leave out, with a warning, what can't be encoded to finite numbers, instead of raising.
        files: ``"npy"`` or ``"parquet"``, the form of a block.
        report: Called with a line on documents, tokens, bytes, rate and time left, every half minute and at the end.

    Raises:
        FileExistsError: The folder exists. (A shard that is complete, of the same texts by the same model and settings,
            is taken as it is: a job that is submitted again does nothing twice.)
        BlockingIOError: Another process is writing it.
        ValueError: A bad option or line, no text, a vector that isn't finite or beyond float16 (named by its id), or
            what lies in ``OUTPUT.partial`` was begun with another model, setting or source.
        OSError: A file can't be read or written.
    """
    encoder = BlockEncoder(model, side, batch_size=batch_size, dtype=dtype, skip_bad=skip_bad)
    folder = prepare_output(output, shard)
    todo = plan(encoder, source, block_size=block_size, model_name=model_name, shard=shard)
    if is_finished(folder, todo.manifest, dtype=dtype, files=files):
        report(f"{folder} is complete already")
        return VectorFolder(folder)
    with VectorWriter(folder, todo.manifest, dtype=dtype, files=files) as writer, encoder.on(devices):
        progress = Progress(todo, dtype, report)
        for local, number in enumerate(todo.blocks):
            if writer.has(local):
                progress.skip(number)
            else:
                made = encoder.encode(source.read(number), progress.bar)
                writer.write(local, made.ids, made.vectors, **made.counts)
                progress.add(number, made.counts, made.left_out)
        progress.close()
        finish(writer, todo)
    return VectorFolder(folder)


def finish(writer: VectorWriter, todo: Plan) -> None:
    """Complete the folder.

    Raises:
        ValueError: All texts were left out: a wrong file or model. One shard of many may be empty.
    """
    if "shard" not in todo.manifest and not any(writer.ids(local) for local in range(len(todo.blocks))):
        raise ValueError(f"encode_to_disk: every one of the {todo.texts:,} texts was left out, so nothing is written.")
    writer.finish(len(todo.blocks))


def _since(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _short(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")
