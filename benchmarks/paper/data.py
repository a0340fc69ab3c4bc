"""Training pairs, dev split, held-out test queries and backbones of a scale, made once and checked for overlap.

Pairs are split by their passage's title, or in runs of neighbouring lines where a file has no titles (of an article,
then): what a dev or test query asks for is in no training pair, and neither is another passage of that title or run;
what training has seen in other words is left out.
Which part a group goes to is drawn from its text, so the split is that of every run, and a share of the training pairs
contains every smaller one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scales import IN_DOMAIN, Scale

from st_aggretriever.atomic import replacing
from st_aggretriever.quickstart import asset
from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries
from st_aggretriever.readers.text import read_lines
from st_aggretriever.trainer import publish

MOST_QUERIES = 600  # of the dev split, and of the held-out pairs
RUN = 50  # neighbouring pairs without title that stay together
SMOKE_WORDS = 24  # of a text at smoke scale


def prepare(scale: Scale, data: Path | None, work: Path) -> Path:
    """Make what training needs in ``work``; returns the folder. What is there is taken as it is."""
    prepared = work / "data"
    if (prepared / "counts.json").is_file():
        return prepared
    if scale.name == "smoke":
        data = _smoke_data(work)
    elif data is None:
        raise ValueError(f"--scale {scale.name} needs --data, the folder of collections and pairs.")
    elif scale.name == "full":
        return data
    partial = work / "data.writing"
    shutil.rmtree(partial, ignore_errors=True)
    counts: dict[str, Any] = {"train": {}, "dev": {}, "test": {}}
    everything: dict[str, list[dict[str, str]]] = {"train": [], "dev": [], "test": []}
    for source, files in scale.sources.items():
        parts: dict[str, list[dict[str, str]]] = {"train": [], "dev": [], "test": []}
        for file in files:
            for number, pair in enumerate(_read(data / file)):
                parts[_part(pair.get("title") or f"{file} {number // RUN}", scale)].append(pair)
        _write(partial, source, parts, scale)
        for name, pairs in parts.items():
            everything[name] += pairs
            counts[name][source] = len(pairs)
    _write(partial, "all", everything, scale)
    _write_collection(partial / IN_DOMAIN, "test", everything["test"], MOST_QUERIES)
    for collection in scale.collections:
        if collection.folder != IN_DOMAIN and (data / collection.folder).is_dir():
            (partial / collection.folder).symlink_to((data / collection.folder).resolve())
    counts["left out as seen"] = {
        folder: _leave_out_seen(partial, folder, split)
        for folder, split in [(IN_DOMAIN, "test"), *((f"dev-{source}", "dev") for source in ("all", *scale.sources))]
    }
    counts["seen by training"] = _overlap(partial, scale)
    with replacing(partial / "counts.json") as file:
        file.write(json.dumps(counts, indent=2) + "\n")
    publish(partial, prepared)
    return prepared


def pairs_file(prepared: Path, scale: Scale, source: str, fraction: float, work: Path) -> Path:
    """The training pairs of a source, or a share of them; the same pairs in every run."""
    if scale.name == "full":
        whole = prepared / scale.sources[source if source != "all" else next(iter(scale.sources))][0]
    else:
        whole = prepared / f"train-{source}.jsonl"
    if fraction == 1:
        return whole
    part = work / f"{whole.stem}-{fraction:g}.jsonl"
    if not part.exists():
        with whole.open(encoding="utf-8") as lines, replacing(part) as file:
            file.writelines(line for line in lines if _uniform(f"fraction {line}") < fraction)
    return part


def backbone_path(scale: Scale, name: str, models: Path | None, work: Path) -> str:
    """Folder or Hub id of a backbone."""
    where = scale.backbones[name]
    if where == "random":
        return str(_random_backbone(work / "backbones" / name, seed=list(scale.backbones).index(name)))
    if where.startswith("asset:"):
        return str(asset(where.removeprefix("asset:")))
    if scale.name == "full":
        return where
    if models is None or not (models / where).is_dir():
        raise ValueError(f"the backbone {where} is not in {models}: name its folder by --models.")
    return str(models / where)


# ---------------------------------------------------------------------------------------------------------------------
# The split


def _uniform(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _part(group: str, scale: Scale) -> str:
    drawn = _uniform(f"split {group}")
    return "dev" if drawn < scale.dev_share else "test" if drawn < scale.dev_share + scale.test_share else "train"


def _read(path: Path) -> Iterator[dict[str, str]]:
    for _, line in read_lines(path):
        yield json.loads(line)


def _write(folder: Path, source: str, parts: dict[str, list[dict[str, str]]], scale: Scale) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / f"train-{source}.jsonl") as file:
        file.writelines(json.dumps(pair, ensure_ascii=False) + "\n" for pair in parts["train"])
    _write_collection(folder / f"dev-{source}", "dev", parts["dev"], MOST_QUERIES)


def _write_collection(folder: Path, split: str, pairs: list[dict[str, str]], most: int) -> None:
    """A BEIR folder of pairs: at most ``most`` queries, drawn by their texts, and all the passages."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    documents: dict[tuple[str, str], str] = {}
    judged: dict[str, set[str]] = {}
    for pair in pairs:
        key = documents.setdefault((pair.get("title", ""), pair["passage"]), f"d{len(documents)}")
        judged.setdefault(pair["query"], set()).add(key)
    queries = sorted(judged, key=lambda query: _uniform(f"query {query}"))[:most]
    with replacing(folder / "corpus.jsonl") as file:
        for (title, text), key in documents.items():
            file.write(json.dumps({"_id": key, "title": title, "text": text}, ensure_ascii=False) + "\n")
    with replacing(folder / "queries.jsonl") as file:
        for number, query in enumerate(queries):
            file.write(json.dumps({"_id": f"q{number}", "text": query}, ensure_ascii=False) + "\n")
    with replacing(folder / "qrels" / f"{split}.tsv") as file:
        file.write("query-id\tcorpus-id\tscore\n")
        for number, query in enumerate(queries):
            file.writelines(f"q{number}\t{key}\t1\n" for key in sorted(judged[query]))


def _leave_out_seen(folder: Path, name: str, split: str) -> int:
    """Take the queries out of a held-out collection whose text, or whose passage in other words, was trained on.

    Returns how many; leaflets share whole paragraphs under different titles.
    """
    from st_aggretriever.evaluation.overlap import find_overlap

    seen = set(find_overlap([folder / "train-all.jsonl"], folder / name, split=split)["affected_queries"])
    path = folder / name / "qrels" / f"{split}.tsv"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    with replacing(path) as file:
        file.writelines(line for line in lines if line.split("\t")[0] not in seen)
    return len(seen)


def _overlap(folder: Path, scale: Scale) -> dict[str, dict[str, int]]:
    """Test collection -> what of it lies in the training pairs."""
    from st_aggretriever.evaluation.overlap import find_overlap

    found = {}
    for collection in scale.collections:
        if collection.folder != IN_DOMAIN and (folder / collection.folder).is_dir():
            seen = find_overlap([folder / "train-all.jsonl"], folder / collection.folder, split=collection.split)
            found[collection.name] = {key: len(seen[key]) for key in ("queries", "documents", "affected_queries")}
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Smoke scale: pieces of the package's sample collection, and random weights


def _smoke_data(work: Path) -> Path:
    folder = work / "smoke"
    if folder.exists():
        return folder
    partial = work / "smoke.writing"
    sample = asset("sample")
    texts, queries = dict(read_corpus(sample)), read_queries(sample)
    short = {key: " ".join(text.split()[:SMOKE_WORDS]) for key, text in texts.items()}
    train = [
        {"query": queries[query], "passage": short[key], "title": key}
        for query, grades in read_qrels(sample, "train", queries).items()
        for key in grades
    ]
    test = [
        {"query": queries[query], "passage": short[key]}
        for query, grades in read_qrels(sample, "test", queries).items()
        for key in grades
    ]
    partial.mkdir(parents=True, exist_ok=True)
    for name, pairs in {"one": train[::2], "two": train[1::2]}.items():
        (partial / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    for number, name in enumerate(("first", "second")):
        _write_collection(partial / name, "test", test[number::2][:40], 12)
    publish(partial, folder)
    return folder


def _random_backbone(folder: Path, seed: int) -> Path:
    """A BERT of one layer with the bundled tokenizer and random weights: it runs fast and knows nothing."""
    import torch
    import transformers

    if folder.exists():
        return folder
    partial = folder.with_name(folder.name + ".writing")
    partial.mkdir(parents=True, exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(asset("mini")))
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.BertForMaskedLM(config).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    publish(partial, folder)
    return folder
