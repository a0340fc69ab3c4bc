"""Encoding and exact search on Ray: an actor pool here or on a cluster (RAY_ADDRESS), our folders of vectors out.

Ray Data moves the numbers of blocks only: each actor reads the texts of a block from the collection's files, encodes
and writes it. So the model, the collection and the output must have the same path on every machine, and a block that
is done twice, after an actor has died, is the same block.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from st_aggretriever.bulk import BlockEncoder, Progress, Texts, finish, logger, plan, prepare_output
from st_aggretriever.search.exact import Hits, check_vectors
from st_aggretriever.search.shards import merge_all, search_folder
from st_aggretriever.vectors.blocks import write_block
from st_aggretriever.vectors.folder import VectorFolder, VectorWriter, is_finished
from st_aggretriever.vectors.manifest import read_record
from st_aggretriever.vectors.shards import Shard

# Of the machine's cores, for all actors of a pool on CPUs together: what is left runs Ray's other tasks, which would
# wait for ever if actors held every core.
CPU_SHARE = 0.8
TASKS = 1000  # at most, so that a collection of many blocks doesn't drown Ray in tasks


def encode_by_ray(
    load: Callable[[str | None], Any],
    source: Texts,
    output: str | Path,
    *,
    workers: int = 1,
    device: str | None = None,
    side: str = "document",
    dtype: str = "float32",
    batch_size: int = 32,
    block_size: int = 20_000,
    model_name: str = "unnamed",
    shard: Shard | None = None,
    skip_bad: bool = False,
    files: str = "npy",
    report: Callable[[str], Any] = logger.info,
) -> VectorFolder:
    """As :func:`st_aggretriever.bulk.encode_to_disk`, by a pool of Ray actors.

    Args:
        load: Gives the model, for a device; it is called here, for the manifest, and in every actor.
        workers: Actors. Each has a GPU where the cluster has any, unless ``device`` is ``"cpu"``.
        device: ``"cpu"``, or None.
        source, output, side, dtype, batch_size, block_size, model_name, shard, skip_bad, files, report: See there.

    Raises:
        As there, and ImportError without Ray.
    """
    if workers < 1:
        raise ValueError(f"encode_by_ray: workers must be at least 1, got {workers}.")
    options = {"batch_size": batch_size, "dtype": dtype, "skip_bad": skip_bad}
    folder = prepare_output(output, shard)
    encoder = BlockEncoder(load("cpu"), side, **options)  # type: ignore[arg-type]
    todo = plan(encoder, source, block_size=block_size, model_name=model_name, shard=shard)
    del encoder  # the actors have models of their own
    if is_finished(folder, todo.manifest, dtype=dtype, files=files):
        report(f"{folder} is complete already")
        return VectorFolder(folder)
    with _ray() as ray, VectorWriter(folder, todo.manifest, dtype=dtype, files=files) as writer:
        progress = Progress(todo, dtype, report)
        rows = []
        for local, number in enumerate(todo.blocks):
            if writer.has(local):
                progress.skip(number)
            else:
                rows.append({"local": local, "number": number})
        if rows:
            gpu = device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
            blocks = ray.data.from_items(rows, override_num_blocks=min(len(rows), TASKS)).map_batches(
                _Encoder,
                fn_constructor_args=(load, source, writer.partial.absolute(), files, {"side": side, **options}, gpu),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=workers),
                **_share(ray, workers, gpu),
            )
            for row in blocks.iter_rows():
                if row["error"]:
                    raise ValueError(row["error"])
                number = int(row["number"])
                counts = {"tokens": None if row["tokens"] < 0 else int(row["tokens"])}
                progress.bar.update(progress.texts(number))
                progress.add(number, counts, [line for line in str(row["left_out"]).split("\n") if line])
        progress.close()
        finish(writer, todo)
    return VectorFolder(folder)


class _Encoder:
    """What an actor does: one model, block after block."""

    def __init__(
        self,
        load: Callable[[str | None], Any],
        source: Texts,
        partial: Path,
        files: str,
        options: dict[str, Any],
        gpu: bool,
    ) -> None:
        self.encoder = BlockEncoder(load("cuda" if gpu else "cpu"), **options)
        self.source, self.partial, self.files = source, partial, files

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        local, number = int(batch["local"][0]), int(batch["number"][0])
        result: dict[str, Any] = {"number": number, "tokens": -1, "error": "", "left_out": ""}
        try:
            tokens = self._encode(local, number, result)
        except (ValueError, OSError, ImportError) as error:  # about the data or the disk: trying again won't help
            result["error"] = " ".join(str(error).split())
        else:
            result["tokens"] = -1 if tokens is None else tokens
        return {name: [value] for name, value in result.items()}

    def _encode(self, local: int, number: int, result: dict[str, Any]) -> int | None:
        try:
            tokens: int | None = read_record(self.partial, local).get("tokens")
            return tokens  # written before an actor died, and tried again
        except (ValueError, OSError):
            pass
        made = self.encoder.encode(self.source.read(number))
        form = {"dtype": self.encoder.dtype, "files": self.files}
        write_block(self.partial, local, made.ids, made.vectors, **form, **made.counts)  # type: ignore[arg-type]
        result["left_out"] = "\n".join(" ".join(sentence.split()) for sentence in made.left_out)
        return made.counts["tokens"]


def search_by_ray(folders: Sequence[VectorFolder], query_vectors: np.ndarray, top_k: int, **options: Any) -> Hits:
    """As :meth:`st_aggretriever.search.shards.ShardSearch.search`, by an actor for each folder.

    Args:
        folders: At the same paths on every machine.
        options: ``dtype``, ``backend``, ``device`` of :func:`st_aggretriever.search.retrieve.search_exactly`.

    Raises:
        As there, and ImportError without Ray.
    """
    queries = check_vectors(range(len(query_vectors)), query_vectors, "query")
    for folder in folders:
        folder.folder = folder.folder.absolute()
    with _ray() as ray:
        gpu = str(options.get("device") or "").startswith("cuda")
        actor = ray.remote(**_share(ray, len(folders), gpu))(_Searcher)
        shared = ray.put(queries)
        actors = [actor.remote(folder, options) for folder in folders]
        found = []
        for folder, job in zip(folders, [one.search.remote(shared, top_k) for one in actors], strict=True):
            try:
                hits, ambiguous = ray.get(job)
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, (ValueError, OSError)) else error from None
            folder.ambiguous |= ambiguous
            found.append(hits)
        return merge_all(found, len(queries), top_k)


class _Searcher:
    """An actor that holds one folder."""

    def __init__(self, folder: VectorFolder, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options

    def search(self, queries: np.ndarray, top_k: int) -> tuple[Hits, dict[int, int]]:
        return search_folder(self.folder, queries, top_k, self.options)


def _share(ray: Any, actors: int, gpu: bool) -> dict[str, float]:
    """What an actor reserves: a GPU, or its part of the cores, less than one where there are more actors than cores."""
    if gpu:
        return {"num_gpus": 1, "num_cpus": 0.1}
    cores = ray.cluster_resources().get("CPU", 1)
    return {"num_cpus": max(0.01, round(min(1.0, CPU_SHARE * cores / actors), 2))}


@contextlib.contextmanager
def _ray() -> Iterator[Any]:
    """Ray: the cluster at RAY_ADDRESS, one the caller has joined, or one of this machine that ends with the work.

    Raises:
        ImportError: It isn't installed.
        ConnectionError: No cluster answers at RAY_ADDRESS.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError(f'--engine ray needs Ray: pip install "st-aggretriever[ray]" ({error}).') from None
    mine = not ray.is_initialized()
    if mine:
        local: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **local)
    context = ray.data.DataContext.get_current()
    before = context.enable_progress_bars, context.print_on_execution_start
    context.enable_progress_bars = context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield ray
    finally:
        context.enable_progress_bars, context.print_on_execution_start = before
        if mine:
            ray.shutdown()
