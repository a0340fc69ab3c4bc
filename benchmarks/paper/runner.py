"""Trains, encodes and evaluates the arms of a table; what a file in the results or the working folder holds is not done
again, for whichever table it was made.

    results/runs-SCALE/HASH.json     of each trained model and seed: settings, dev curve, figures of each query
    results/runs-SCALE/sweep-HASH.json   of each model: the rates and factors tried, and the one chosen
    results/setting-SCALE.json       what no hash holds (``FIXED``), and counts of the prepared data
    work/models, work/vectors        what can be made again; vectors of all views are one encoding

The hash is of the model's settings, the scale's, and the content of pairs and backbone. Several processes may work on
the same folders: what one is making the others leave to it, by locks in work/locks that end with their process.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any

import data as data_of
import numpy as np
from arms import BM25, Model, Row
from fit import CONSTANTS, DEV_METRIC, RAMP, Fit, fit, load, set_length, untrained
from judge import FINDINGS
from scales import NOISE, Collection, Scale, steps_of

from st_aggretriever.atomic import lock_folder, replacing
from st_aggretriever.bulk import Source, encode_to_disk
from st_aggretriever.encoding import Encoder
from st_aggretriever.evaluation.fuse import fuse_convex, tune_weight
from st_aggretriever.evaluation.metrics import Run, evaluate_run
from st_aggretriever.evaluation.qa import has_answer, hit_accuracy
from st_aggretriever.mining import MiningSettings, mine
from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries
from st_aggretriever.readers.dpr import read_passages, read_questions
from st_aggretriever.readers.text import checksum
from st_aggretriever.readers.training import open_training_data
from st_aggretriever.search.bm25 import RULE, search_bm25
from st_aggretriever.search.exact import search
from st_aggretriever.search.retrieve import rankings_of
from st_aggretriever.training import DivergedError
from st_aggretriever.vectors.folder import VectorFolder

DEPTH = 1000
BATCH = 64
BLOCK = 20_000
WIDE_BLOCK = 2_000
MINING_DEPTH = 200  # the paper's
# What figures depend on beside the scale's settings; in no hash, since it is one for all of a folder's results.
FIXED = {"dev_metric": DEV_METRIC, "noise": NOISE, "sparse_ramp": RAMP, "mining_depth": MINING_DEPTH, "depth": DEPTH,
         "bm25": RULE}  # fmt: skip
WAIT = 2.0  # seconds between two looks at what another process is making
Figures = dict[str, dict[str, list[float]]]  # collection -> metric -> one figure a query


class Runner:
    """Makes the figures of rows.

    Args:
        scale: Settings.
        data: Folder of collections and pairs; smoke scale makes its own.
        models: Folder of backbones that are neither the package's nor on the Hub.
        work: Folder for what can be made again.
        results: Folder for what is kept.

    Attributes:
        done: What this runner has really done, ``"sweep"``, ``"train"``, ``"mine"``, ``"encode"`` -> how often.
    """

    def __init__(self, scale: Scale, data: Path | None, models: Path | None, work: Path, results: Path) -> None:
        self.scale = scale
        self.work = work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.models = models
        self.runs = results / f"runs-{scale.name}"
        self.runs.mkdir(parents=True, exist_ok=True)
        with closing(self.alone("data", wait=True)):
            self.prepared = data_of.prepare(scale, data, self.work)
            self._check_fixed(results / f"setting-{scale.name}.json")
        self.done = {"sweep": 0, "train": 0, "mine": 0, "encode": 0}

    def _check_fixed(self, path: Path) -> None:
        """Keep what the hash leaves out, beside what the data's preparation counted; refuse to mix it with another.

        Raises:
            ValueError: It was another when the first of these results was made.
        """
        counts = self.prepared / "counts.json"
        fixed = json.loads(json.dumps(FIXED))
        if not path.exists():
            counted = json.loads(counts.read_text(encoding="utf-8")) if counts.exists() else None
            with replacing(path) as file:
                file.write(json.dumps({"fixed": fixed, "counts": counted}, indent=1) + "\n")
        before = json.loads(path.read_text(encoding="utf-8"))["fixed"]
        for name in {**fixed, **before}:
            if before.get(name) != fixed.get(name):
                raise ValueError(
                    f"{path.parent} was made with {name} {before.get(name)!r}, now it is {fixed.get(name)!r}. Name "
                    "another folder by --results."
                )

    @cached_property
    def collections(self) -> dict[str, Collection]:
        """Those whose folders are there; a missing one that isn't optional is an error."""
        found = {}
        for collection in self.scale.collections:
            if (self.prepared / collection.folder).is_dir():
                found[collection.name] = collection
            elif not collection.optional:
                raise FileNotFoundError(f"the collection {collection.folder} is not in {self.prepared}.")
        return found

    # -----------------------------------------------------------------------------------------------------------------
    # What a run is known by

    def identity(self, model: Model) -> dict[str, Any]:
        """All that the weights of a model depend on but the seed."""
        names = ("batch_size", "negatives", "epochs", "steps", "evaluations", "rates", "factors", "sweep_share")
        names += ("train_length", "settings", "dev_share", "test_share")
        if model.further:
            names += tuple(field.name for field in fields(self.scale) if field.name.startswith("further_"))
        settings = {name: getattr(self.scale, name) for name in names} | CONSTANTS if model.trained else {}
        return {
            "model": asdict(model) | {"build": model.options},
            "training": settings,
            "search_length": self.scale.search_length,
            "backbone": self._backbone_hash(model.backbone) if model.recipe != "bm25" else None,
            "pairs": self._pairs_hash(model.source, model.fraction) if model.trained else None,
            "dev": self._files_hash(f"dev-{model.source}") if model.trained and self.scale.evaluations else None,
        }

    def run_id(self, model: Model, seed: int) -> str:
        return _hash({**self.identity(model), "seed": seed})

    @cache  # noqa: B019
    def _backbone_hash(self, name: str) -> str:
        folder = Path(self.backbone(name))
        weights = next(iter(sorted(folder.glob("*.safetensors"))), None)
        return folder.name if weights is None else checksum(weights)

    @cache  # noqa: B019
    def _files_hash(self, folder: str) -> str:
        """Of a collection's texts and judgements."""
        place = self.prepared / folder
        names = sorted(path for path in place.rglob("*") if path.is_file())
        return _hash({str(path.relative_to(place)): checksum(path) for path in names})

    @cache  # noqa: B019
    def _pairs_hash(self, source: str, fraction: float) -> str:
        return checksum(self.pairs(source, fraction))

    def backbone(self, name: str) -> str:
        with closing(self.alone("data", wait=True)):
            return data_of.backbone_path(self.scale, name, self.models, self.work)

    def pairs(self, source: str, fraction: float) -> Path:
        with closing(self.alone("data", wait=True)):
            return data_of.pairs_file(self.prepared, self.scale, source, fraction, self.work)

    # -----------------------------------------------------------------------------------------------------------------
    # Training

    def choose(self, model: Model) -> dict[str, Any]:
        """The factor and rate of the best dev figures, seed 0; without a choice the only ones.

        First short runs of each factor at the first rate, then whole runs of each rate at the best factor; the better
        one of these is the model of seed 0. Further training keeps the plain model's factor. What is better by less
        than noise isn't: then the first one is taken.
        """
        if model.longer > 1:
            return self.choose(model.start)
        rates = self.scale.further_rates if model.further else self.scale.rates
        factors = (self.choose(model.start)["factor"],) if model.further else self.scale.factors
        if len(factors) == len(rates) == 1:
            return {"rate": rates[0], "factor": factors[0]}
        path = self.runs / f"sweep-{_hash(self.identity(model))}.json"
        if not path.exists():
            with closing(self.alone(path.stem)):
                if not path.exists():  # or another process has finished it just now
                    _write(path, self._chosen(model, factors, rates))
        return json.loads(path.read_text(encoding="utf-8"))

    def _chosen(self, model: Model, factors: tuple[float, ...], rates: tuple[float, ...]) -> dict[str, Any]:
        """Run the sweep."""
        tried = [self._sweep_run(model, rates[0], factor) for factor in factors] if len(factors) > 1 else []
        factor = _best(tried)["factor"] if tried else factors[0]
        whole = [self._sweep_run(model, rate, factor, whole=True) for rate in rates]
        kept = ("rate", "factor", "steps", "dev_curve", "seconds", "flat")
        return {
            "model": self.identity(model)["model"],
            "factor": factor,
            "rate": _best(whole)["rate"],
            "tried": [{name: run.get(name) for name in kept} for run in (*tried, *whole)],
        }

    def _sweep_folder(self, model: Model, rate: float, factor: float, *, whole: bool = False) -> Path:
        name = f"{'whole-' * whole}{rate:g}-{factor:g}"
        return self.work / "sweeps" / f"sweep-{_hash(self.identity(model))}" / name

    def _sweep_run(self, model: Model, rate: float, factor: float, *, whole: bool = False) -> dict[str, Any]:
        folder = self._sweep_folder(model, rate, factor, whole=whole)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.done["sweep"] += not (folder / "fit.json").exists()
        steps = steps_of(self.scale, model)
        steps = steps if whole else max(1, int(self.scale.sweep_share * steps))
        run = self._fit(model, 0, rate, factor, steps)
        self.say(f"sweep: {'whole run, ' * whole}rate {rate:g}, factor {factor:g}: {model.kind}")
        try:
            return fit(self._once(model.further or not whole), run, folder)
        except DivergedError:
            return {"rate": rate, "factor": factor, "steps": None, "dev_curve": [[steps, 0.0]]}

    def _once(self, once: object) -> Scale:
        """The scale, for short runs and further training with a single evaluation, at the end."""
        return replace(self.scale, evaluations=min(1, self.scale.evaluations)) if once else self.scale

    def _fit(self, model: Model, seed: int, rate: float, factor: float, steps: int) -> Fit:
        path, pairs = self.backbone(model.backbone), self.pairs(model.source, model.fraction)
        if model.further:
            path = str(self.trained(model.start, seed))
            pairs = self.mined(model.start, seed) if model.further == "hard" else pairs
        dev = self.prepared / f"dev-{model.source}" if self.scale.evaluations else None
        return Fit(model=model, path=path, pairs=pairs, dev=dev, rate=rate, factor=factor, seed=seed, steps=steps)

    def trained(self, model: Model, seed: int) -> Path:
        """The folder of the trained model."""
        folder = self.work / "models" / self.run_id(model, seed)
        kept = self.record(model, seed).get("training", {})
        if (folder / "fit.json").exists() and "dev_curve" in kept:
            return folder
        chosen = self.choose(model)
        if (
            kept.get("rate", chosen["rate"]) != chosen["rate"]
            or kept.get("factor", chosen["factor"]) != chosen["factor"]
        ):
            raise ValueError(f"{self.runs / folder.name}.json has another rate or factor than its sweep. Delete it.")
        folder.parent.mkdir(exist_ok=True)
        with closing(self.alone(f"train-{folder.name}")):
            swept = self._sweep_folder(model, chosen["rate"], chosen["factor"], whole=True)
            if seed == 0 and swept.exists() and not folder.exists():
                swept.rename(folder)
            steps = steps_of(self.scale, model)
            run = self._fit(model, seed, chosen["rate"], chosen["factor"], steps)
            if not (folder / "fit.json").exists():
                self.say(f"train: seed {seed}: {model.kind}, {model.source} x {model.fraction:g}")
                self.done["train"] += 1
            record = fit(self._once(model.further), run, folder)
            self._keep(model, seed, {"training": record})
            if seed == 0:
                shutil.rmtree(swept.parent, ignore_errors=True)
        return folder

    def mined(self, model: Model, seed: int) -> Path:
        """Pairs with the negatives that a trained model ranks highest among the passages of all pairs."""
        path = self.work / "mined" / f"{self.run_id(model, seed)}.jsonl"
        if path.exists():
            return path
        path.parent.mkdir(exist_ok=True)
        loaded = load(model, self.trained(model, seed))
        with closing(self.alone(f"mine-{path.stem}")):
            if path.exists():  # another process has finished it just now
                return path
            self.done["mine"] += 1
            pairs = open_training_data([str(self.pairs(model.source, model.fraction))])
            settings = MiningSettings(depth=MINING_DEPTH, negatives=self.scale.further_negatives, drop_short=True)
            mine(loaded, pairs, path, settings=settings, model_name="plain", batch_size=BATCH)
        return path

    def alone(self, key: str, *, wait: bool = False) -> IO[Any]:
        """The lock of a piece of work, until it is closed.

        Raises:
            BlockingIOError: Another process is at it, and this one shall not wait.
        """
        folder = self.work / "locks" / key
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                return lock_folder(folder)
            except BlockingIOError:
                if not wait:
                    raise
                time.sleep(WAIT)

    # -----------------------------------------------------------------------------------------------------------------
    # Figures

    def figures(self, row: Row, seed: int, names: list[str]) -> Figures:
        """One figure a query, by collection and metric, of the named collections that are there.

        Raises:
            BlockingIOError: Another process is making some of them.
        """
        seed = seed if row.model.recipe != "bm25" else 0
        with closing(self.alone(self.run_id(row.model, seed))):
            return self._figures(row, seed, names)

    def _figures(self, row: Row, seed: int, names: list[str]) -> Figures:
        record = self.record(row.model, seed)
        found = record.get("figures", {}).get(row.view, {})
        for name, known in record.get("collections", {}).items():
            if name in self.collections and known != self._files_hash(self.collections[name].folder):
                path = self.runs / f"{self.run_id(row.model, seed)}.json"
                raise ValueError(
                    f"{path} has figures of other files of {name} than those of --data. Delete one of them."
                )
        weight = record.get("weights", {}).get(row.view)
        for name in names:
            collection = self.collections.get(name)
            if collection is None or name in found:
                continue
            if row.fused and weight is None:
                weight = self._fusion_weight(row, seed)
                self._keep(row.model, seed, {"weights": {row.view: weight}})
            ranked = self._ranked(row, seed, collection)
            if row.fused:
                assert weight is not None
                ranked = fuse_convex([ranked, self._bm25(collection)], weight, top_k=DEPTH)
            found[name] = self._scores(collection, ranked)
            made_of = {name: self._files_hash(collection.folder)}
            self._keep(row.model, seed, {"figures": {row.view: {name: found[name]}}, "collections": made_of})
        return {name: found[name] for name in names if name in found}

    def record(self, model: Model, seed: int) -> dict[str, Any]:
        """What is kept of a run, empty before its first figure."""
        path = self.runs / f"{self.run_id(model, seed)}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _keep(self, model: Model, seed: int, new: dict[str, Any]) -> None:
        path = self.runs / f"{self.run_id(model, seed)}.json"
        before = self.record(model, seed) or {
            "seed": seed,
            **self.identity(model),
            "findings_sha256": checksum(FINDINGS),
        }
        _write(path, _merged(before, new))

    def _scores(self, collection: Collection, ranked: Run) -> dict[str, list[float]]:
        if collection.questions:
            return self._hits(collection, ranked)
        qrels = self._judged(collection)[1]
        # Queries and documents are numbered apart in these collections, so that equal ids mean nothing.
        per_query = evaluate_run(qrels, ranked, top_k=DEPTH, drop_identical_ids=False)
        return {metric: [round(row[metric], 5) for row in per_query.values()] for metric in collection.metrics}

    def _hits(self, collection: Collection, ranked: Run) -> dict[str, list[float]]:
        questions = self._questions(collection)
        wanted = {key for hits in ranked.values() for key in list(hits)[:100]}
        passages = read_passages(self.prepared / collection.folder / "passages.tsv")
        texts = {passage.id: passage.text for passage in passages if passage.id in wanted}
        match = "regex" if collection.name == "CuratedTREC" else "string"
        found: dict[str, list[float]] = {metric: [] for metric in collection.metrics}
        for key, question in questions.items():
            places = enumerate(list(ranked.get(key, {}))[:100], start=1)
            place = next((n for n, hit in places if has_answer(texts[hit], question.answers, match)), None)
            for metric, value in hit_accuracy([place]).items():
                found[metric].append(value)
        return found

    def _fusion_weight(self, row: Row, seed: int) -> float:
        dev = self.scale.dev
        ranked = [self._ranked(row, seed, dev), self._bm25(dev)]
        return tune_weight(ranked, self._judged(dev)[1], drop_identical_ids=False)[0]

    # -----------------------------------------------------------------------------------------------------------------
    # Rankings

    @cache  # noqa: B019
    def _judged(self, collection: Collection) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        """Texts and judgements of the judged queries."""
        folder = self.prepared / collection.folder
        if collection.questions:
            return {key: question.text for key, question in self._questions(collection).items()}, {}
        texts = read_queries(folder)
        qrels = read_qrels(folder, collection.split, texts)
        return {key: texts[key] for key in qrels}, qrels

    @cache  # noqa: B019
    def _questions(self, collection: Collection) -> dict[str, Any]:
        return read_questions(self.prepared / collection.questions)

    def _corpus(self, collection: Collection) -> Callable[[], Iterator[tuple[str, str]]]:
        folder = self.prepared / collection.folder
        if collection.questions:
            return lambda: ((passage.id, passage.document) for passage in read_passages(folder / "passages.tsv"))
        return lambda: read_corpus(folder)

    @cache  # noqa: B019
    def _bm25(self, collection: Collection) -> Run:
        queries = self._judged(collection)[0]
        return rankings_of(list(queries), search_bm25(queries, self._corpus(collection)(), DEPTH))

    def _ranked(self, row: Row, seed: int, collection: Collection) -> Run:
        if row.model.recipe == BM25.recipe:
            return self._bm25(collection)
        queries = self._judged(collection)[0]
        if row.model.is_wide:
            return self._ranked_while_encoded(row.model, seed, collection, queries)
        texts = self._vectors(row.model, seed, collection, "query", row.fold)
        documents = self._vectors(row.model, seed, collection, "document", row.fold)
        columns = _columns(documents, row.part)
        ids, vectors = texts.load()
        blocks = ((keys, np.ascontiguousarray(block[:, columns])) for keys, block in documents.blocks())
        hits = search(np.ascontiguousarray(vectors[:, columns]), blocks, DEPTH)
        return rankings_of(ids, hits)

    def _ranked_while_encoded(self, model: Model, seed: int, collection: Collection, queries: dict[str, str]) -> Run:
        """For vectors as wide as the vocabulary: exact search of each block when it is made, and nothing stored."""
        self.done["encode"] += 1
        encoder = Encoder(self._model(model, seed), BATCH)
        vectors = encoder.queries(queries)
        corpus = list(self._corpus(collection)()) if self.scale.name != "full" else self._corpus(collection)()
        counts = [0, 0]  # documents, numbers that are not zero

        def blocks() -> Iterator[tuple[list[str], np.ndarray]]:
            for keys, block in encoder.blocks(corpus, collection.documents, WIDE_BLOCK):
                counts[0] += len(keys)
                counts[1] += int(np.count_nonzero(block))
                yield keys, block

        hits = search(vectors, blocks(), DEPTH)
        self._keep(model, seed, {"non_zeros": {collection.name: round(counts[1] / counts[0], 1)}})
        return rankings_of(list(queries), hits)

    def _vectors(
        self, model: Model, seed: int, collection: Collection, side: str, fold: int | None = None
    ) -> VectorFolder:
        """Encoded once, whatever is folded or cut of it; documents once for all splits of a folder."""
        place = collection.folder.replace("/", "-").replace(" ", "-")
        if side == "query":
            place += f"-{collection.name.replace('/', '-').replace(' ', '-')}-queries"
        folder = self.work / "vectors" / self.run_id(model, seed) / place
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            self.done["encode"] += 1
            stream = self._corpus(collection) if side == "document" else self._judged(collection)[0].items
            encode_to_disk(
                self._model(model, seed),
                Source(collection.folder, stream),
                folder,
                side=side,
                batch_size=BATCH,
                block_size=BLOCK,
                model_name=self.run_id(model, seed),
            )
        return VectorFolder(folder, lexical_dim=fold)

    def _model(self, model: Model, seed: int) -> Any:
        """The model as it encodes; one at a time stays in memory."""
        key = self.run_id(model, seed)
        if getattr(self, "_loaded", ("", None))[0] != key:
            if model.trained:
                loaded = load(model, self.trained(model, seed))
            else:
                loaded = untrained(model, self.backbone(model.backbone), self.scale, seed)
            set_length(loaded, self.scale.search_length)
            self._loaded = (key, loaded)
        return self._loaded[1]

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _columns(folder: VectorFolder, part: str) -> slice:
    """The columns of a part of the vectors."""
    start = 0
    for name, width in folder.manifest["parts"]:
        if name == f"{part}_embedding":
            return slice(start, start + width)
        start += width
    if part != "all":
        names = ", ".join(name for name, _ in folder.manifest["parts"])
        raise ValueError(f"{folder.folder} has no part {part!r}, only {names}.")
    return slice(0, start)


def _hash(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The first run, or the best one where that is more than noise better."""
    figures = [max(figure for _, figure in run["dev_curve"]) for run in runs]
    best = max(range(len(runs)), key=figures.__getitem__)
    return runs[best if figures[best] - figures[0] >= NOISE else 0]


def _merged(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``before`` with what ``new`` adds at any depth."""
    result = dict(before)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def _write(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(content) + "\n")
