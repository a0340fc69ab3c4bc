"""How many judged pairs of the held-out test and of the dev split the backbone mini saw in its own pretraining.

    python benchmarks/paper/pretraining_overlap.py --data DATA --work WORK

Splits the texts once more by the command in `st_aggretriever/assets/mini/README.md`, near duplicates of its held-out
records left out and sources of a weight below 1 cut, and looks up every judged query beside its passage. Writes
`results/pretraining-overlap.json`, which the tables' caveat quotes. One minute.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import data as data_of
import scales
from transformers import AutoTokenizer

from st_aggretriever.atomic import replacing
from st_aggretriever.quickstart import asset
from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries
from st_aggretriever.readers.text import join_title

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
SPLITS = {scales.IN_DOMAIN: "test", "dev-all": "dev"}
Pair = tuple[str, str]  # query, and passage below its title


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of pairs/ and text/")
    parser.add_argument("--work", type=Path, required=True, help="the tables' working folder, with the split of mini")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    prepared = data_of.prepare(scales.MINI, args.data, args.work)
    example = pretraining()
    trained = trained_records(example, command(args.data))
    records = {
        pair: record
        for files in scales.MINI.sources.values()
        for file in files
        for pair, record in records_of(example, args.data / file).items()
    }
    found = {folder: count(prepared / folder, split, records, trained) for folder, split in SPLITS.items()}
    with replacing(args.results / "pretraining-overlap.json") as output:
        output.write(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def pretraining() -> ModuleType:
    """The example as a module."""
    sys.path.append(str(EXAMPLES))
    return importlib.import_module("pretrain_backbone")


def command(data: Path) -> list[str]:
    """The arguments by which mini was made, from its README, with the folders of ``data``."""
    text = (asset("mini") / "README.md").read_text(encoding="utf-8")
    start = text.index("python examples/pretrain_backbone.py")
    lines = text[start : text.index("\n\n", start)].replace("\\\n", " ")
    folders = {"TEXTS/": f"{data / 'text'}/", "PAIRS/": f"{data / 'pairs'}/"}
    words = shlex.split(lines)[2:]
    for name, folder in folders.items():
        words = [folder + word.removeprefix(name) if word.startswith(name) else word for word in words]
    return words


def trained_records(example: Any, words: list[str]) -> set[str]:
    """The records that were trained on: of a source of weight .7 those that start in its first 70 % of blocks."""
    args = example.parse_arguments(words)
    tokenizer = AutoTokenizer.from_pretrained(asset("mini"))
    seen: set[str] = set()
    for source in example.read_sources(args):
        weight = args.weights[source.name]
        if weight >= 1:
            seen.update(source.train)
            continue
        ids = tokenizer(source.train, add_special_tokens=False, verbose=False)["input_ids"]
        inner = args.block - 2  # a block's own tokens, as to_blocks cuts them
        total = sum(len(record) + 1 for record in ids)
        end = round(total // inner * weight) * inner
        position = 0
        for record, tokens in zip(source.train, ids, strict=True):
            if position >= end:
                break
            seen.add(record)
            position += len(tokens) + 1  # and its [SEP]
    return seen


def records_of(example: Any, path: Path) -> dict[Pair, str]:
    """Pair of a file -> the record of the pretraining that holds it."""
    pairs = list(data_of._read(path))
    passages = dict.fromkeys(pair["passage"] for pair in pairs)
    records = dict(zip(passages, example.read_records(path), strict=True))  # one a passage, in the same order
    return {
        (pair["query"], join_title(pair.get("title", ""), pair["passage"])): records[pair["passage"]] for pair in pairs
    }


def count(folder: Path, split: str, records: dict[Pair, str], trained: set[str]) -> dict[str, int]:
    """Judged queries and pairs of a collection, and how many of the pairs were trained on."""
    passages, queries = dict(read_corpus(folder)), read_queries(folder)
    judged = read_qrels(folder, split, queries)
    pairs = {(queries[query], passages[key]) for query, grades in judged.items() for key in grades}
    return {
        "queries": len(judged),
        "judged pairs": len(pairs),
        "in the pretraining": sum(records[pair] in trained for pair in pairs),
    }


if __name__ == "__main__":
    main()
