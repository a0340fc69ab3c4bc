"""Fetch BEIR's zip files and NanoBEIR from the Hub into folders in BEIR's layout: resumable, by checksum, whole or
absent.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from st_aggretriever.atomic import lock_file, replacing
from st_aggretriever.evaluation.beir_sets import (
    BEIR,
    LICENSED,
    LICENSED_RECIPES,
    NANO,
    NANO_LICENCE,
    BeirSet,
    check_names,
    folders_of,
)
from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries
from st_aggretriever.readers.text import checksum

# BEIR's own server; a mirror (also file:///...) can be named instead.
BEIR_URL = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"
URL_VARIABLE = "ST_AGGRETRIEVER_BEIR_URL"
TRIES = 5  # in a row that bring nothing new
WAIT = 2.0  # seconds before the second try, doubled with each
TIMEOUT = 60.0  # seconds without a byte
_CHUNK = 2**20


def fetch(
    name: str, folder: str | Path, *, base_url: str | None = None, hub: str = "", say: Callable[[str], None] = print
) -> list[Path]:
    """The folders of a set by its name, downloaded into ``folder`` where they aren't yet.

    Source, size and licence are said before the first byte. A folder gets its name once its files are whole, its zip
    has the published MD5 and it holds as many documents and judged queries as published; ``source.json`` in it keeps
    where it came from, with MD5 and SHA-256. An interrupted download goes on where it stopped.

    Args:
        name: Of a set, see :mod:`st_aggretriever.evaluation.beir_sets`.
        folder: Holds one folder a set. One that is there already is used as it is.
        base_url: Where the zip files are; None takes ``ST_AGGRETRIEVER_BEIR_URL`` of the environment, or BEIR's server.
        hub: What comes before NanoBEIR's repositories, for instance ``"/mirror/"`` for local copies.
        say: Takes what is to be printed.

    Raises:
        ValueError: An unknown name, a wrong checksum or count, or a set that needs a licence.
        OSError: It can't be downloaded or written.
    """
    check_names([name])
    folder = Path(folder)
    paths = [folder / part for part in folders_of(name)]
    if all(path.is_dir() for path in paths):
        return paths
    if name in LICENSED:
        raise ValueError(
            f"{name} needs a licence and can't be downloaded: {LICENSED[name]}. Make {folder / name} of it in BEIR's"
            f" layout ({LICENSED_RECIPES} says how), or leave {name} out."
        )
    if (folder / name).exists():
        raise OSError(f"{folder / name} is in the way: it lacks {paths[0].name}. Move it, or complete it.")
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(name, folder, say):
        if all(path.is_dir() for path in paths):
            pass  # another process has fetched it meanwhile
        elif name in NANO:
            _fetch_nano(name, folder, hub, say)
        else:
            _fetch_zip(BEIR[name], folder, base_url or os.environ.get(URL_VARIABLE) or BEIR_URL, say)
    return paths


@contextmanager
def _alone(name: str, folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process fetches the set into this folder, and keep others waiting meanwhile."""
    path, said = folder / f".{name}.lock", False
    while True:
        try:
            lock = lock_file(path, f"another process is fetching {name} into {folder}")
            break
        except BlockingIOError:
            if not said:
                say(f"{name}: another process is fetching it into {folder}, waiting for it")
            said = True
            time.sleep(WAIT)
    with lock:
        try:
            yield
        finally:
            with suppress(PermissionError):  # another user's, in a folder where only the owner removes files
                path.unlink(missing_ok=True)


def _fetch_zip(one: BeirSet, folder: Path, base_url: str, say: Callable[[str], None]) -> None:
    if "://" not in base_url:
        raise ValueError(
            f"{base_url!r} is no address of BEIR's zip files, https://... or file:///...; {URL_VARIABLE} may name one."
        )
    url = f"{base_url.rstrip('/')}/{one.name}.zip"
    path = folder / f"{one.name}.zip"
    say(
        f"{one.name}: {one.size / 1e6:,.1f} MB from {url}; licence: {one.licence} (as mteb's metadata states it; BEIR"
        " leaves it to you to see that you may use the data)"
    )
    free = shutil.disk_usage(folder).free
    if free < one.size:
        raise OSError(f"{folder} has {free / 1e9:,.1f} GB free, {one.name} takes {one.size / 1e9:,.1f} and its texts.")
    download(url, path, md5=one.md5)
    partial = folder / f"{one.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # what an interruption has left: made again in less time than checked
    try:
        _unzip(path, one, partial)
        for part, counts in one.counts.items():
            _check_counts(partial / part.removeprefix(one.name).lstrip("/"), counts, one.split)
        source = {"url": url, "md5": one.md5, "sha256": checksum(path), "licence": one.licence}
        _complete(partial, folder / one.name, source)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    path.unlink()


def download(url: str, path: Path, *, md5: str) -> None:
    """Fetch ``url`` to ``path`` if its MD5 is right; what has come so far lies in ``path`` with ``.part`` behind.

    Raises:
        OSError: The server can't be reached, has no such file, or breaks off again and again.
        ValueError: The file has another MD5; it is removed.
        KeyboardInterrupt: Interrupted; the message says what is kept.
    """
    if not path.exists():
        part = path.with_name(f"{path.name}.part")
        try:
            _receive(url, part)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; {part} is kept, the same command goes on from there") from None
        part.replace(path)
    found = _md5(path)
    if found != md5:
        path.unlink()
        raise ValueError(
            f"{url}: the file's MD5 is {found}, expected {md5}; it was removed. Run the same command again; if that"
            " doesn't help, the server's file has changed: name your own copy with --data."
        )


def _receive(url: str, part: Path) -> None:
    """Fetch all of ``url`` into ``part``, on from what is there; tries again as long as anything new comes."""
    failures, came = 0, False
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _receive_once(url, part, before):
                return
            reason: Any = "the connection was closed too early"
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:
                return  # nothing comes after what is there: the checksum tells whether it is the file
            if error.code < 500:  # the server means it
                raise OSError(f"{url}: the server says {error.code} {error.reason}.") from None
            reason = f"{error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
        now = part.stat().st_size if part.exists() else 0
        came = came or now > before
        failures = 0 if now > before else failures + 1
        if failures >= TRIES or not came:  # a server that gave nothing yet won't soon
            kept = f"{now / 1e6:,.1f} MB are kept in {part}; run the same command again to go on. " if now else ""
            said = " ".join(str(reason).split())
            raise OSError(f"{url} can't be downloaded ({said}). {kept}A copy of your own goes in by --data FOLDER.")
        time.sleep(WAIT * 2 ** max(0, failures - 1))


def _receive_once(url: str, part: Path, before: int) -> bool:
    """One request; whether the file is complete by what the server says of its size."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={before}-"} if before else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        resumed = response.headers.get("Content-Range", "").startswith(f"bytes {before}-")
        start = before if resumed else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        bar = tqdm(total=total, initial=start, desc=part.stem, unit="B", unit_scale=True, disable=None)
        with part.open("ab" if resumed else "wb") as file, bar:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
    return total is None or part.stat().st_size >= total


def _unzip(path: Path, one: BeirSet, target: Path) -> None:
    """The texts and qrels of a zip file, nothing else of it."""
    wanted = re.compile(rf"{one.name}/((?:\w+/)?(?:corpus\.jsonl|queries\.jsonl|qrels/\w+\.tsv))")
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                match = wanted.fullmatch(member)
                if match is None:
                    continue
                out = target / match[1]
                out.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, out.open("wb") as file:
                    if out.suffix == ".tsv":  # some have empty lines
                        file.writelines(line for line in source if line.strip())
                    else:
                        shutil.copyfileobj(source, file, _CHUNK)
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is no zip file ({error}). Remove it and run the same command again.") from None


def _fetch_nano(name: str, folder: Path, hub: str, say: Callable[[str], None]) -> None:
    one = NANO[name]
    where = f"{hub}{one.repository}"
    say(f"{name} (NanoBEIR): {where} at {one.revision[:12]} on the Hugging Face Hub; licence: {NANO_LICENCE}")
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"NanoBEIR needs datasets ({error}). pip install st-aggretriever[train]") from error
    options: dict[str, Any] = {} if hub else {"revision": one.revision}
    try:
        there = datasets.get_dataset_config_names(where, **options)
        configurations = {"corpus": "corpus", "queries": "queries", "qrels": "qrels" if "qrels" in there else "default"}
        parts: dict[str, list[Mapping[str, Any]]] = {
            part: [row for split in datasets.load_dataset(where, configuration, **options).values() for row in split]
            for part, configuration in configurations.items()
        }
    except Exception as error:  # datasets and huggingface_hub each have their own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OSError(
            f"{where} can't be had from the Hugging Face Hub: {reason.rstrip('.')}. Fetched elsewhere (st-aggretriever"
            f" evaluate beir does it), its folder {name} may be copied to {folder}."
        ) from None
    partial = folder / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "qrels").mkdir(parents=True)
        _write_jsonl(partial / "corpus.jsonl", parts["corpus"])
        _write_jsonl(partial / "queries.jsonl", parts["queries"])
        lines = (f"{row['query-id']}\t{row['corpus-id']}\t{int(row.get('score', 1))}\n" for row in parts["qrels"])
        with (partial / "qrels" / "test.tsv").open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(["query-id\tcorpus-id\tscore\n", *lines])
        _check_counts(partial, (one.documents, one.queries), "test")
        _complete(partial, folder / name, {"repository": where, "revision": one.revision, "licence": NANO_LICENCE})
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            record = {"_id": str(row["_id"]), "title": row.get("title") or "", "text": row["text"]}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _check_counts(folder: Path, counts: tuple[int, int], split: str) -> None:
    """Refuse a folder that hasn't as many documents and judged queries as published."""
    found = sum(1 for _ in read_corpus(folder)), len(read_qrels(folder, split, read_queries(folder)))
    if found != counts:
        raise ValueError(
            f"{folder.name}: expected {counts[0]:,} documents and {counts[1]:,} judged queries, got {found[0]:,} and"
            f" {found[1]:,}. The source has changed: name your own copy with --data."
        )


def _complete(partial: Path, final: Path, source: Mapping[str, Any]) -> None:
    with replacing(partial / "source.json") as file:
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        file.write(json.dumps({"name": final.name, **source, "downloaded": date}, indent=2) + "\n")
    partial.rename(final)


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()
