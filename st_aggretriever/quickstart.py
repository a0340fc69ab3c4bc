"""The whole way in one call: train an Aggretriever and its twins, search, evaluate, and show what came out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from st_aggretriever.atomic import check_parent, check_place, replacing

if TYPE_CHECKING:
    from st_aggretriever.readers.training import TrainingData

EXAMPLES = 3  # searches shown
SHOWN = 3  # passages of each
BUNDLED = "bundled"
MARK = "quickstart.json"  # tells the folder of a run, with its settings
SAVE_STEPS = 100  # between two checkpoints, from which an interrupted training goes on


class Arm(NamedTuple):
    """One line of the table: a model of C + D dimensions."""

    name: str
    pooling: str = "mlm"
    trained: bool = True

    def options(self, cls_dim: int, lexical_dim: int) -> dict[str, Any]:
        """Of ``build_aggretriever``."""
        if self.pooling == "cls":
            cls_dim += lexical_dim
        return {"pooling": self.pooling, "cls_dim": cls_dim, "lexical_dim": lexical_dim}


ARMS = {
    "untrained": Arm("AGG, untrained", trained=False),
    "cls": Arm("CLS", "cls"),
    "mean": Arm("mean pooling", "mean"),
    "agg": Arm("AGG"),
}


def asset(name: str) -> Path:
    """Folder of a bundled asset: ``"mini"``, the small backbone, or ``"sample"``, the sample collection."""
    return Path(str(resources.files("st_aggretriever") / "assets" / name))


def quickstart(
    model: str | None = None,
    data: str | None = None,
    *,
    output: str = "quickstart",
    pairs: list[str] | None = None,
    epochs: float | None = None,
    cls_dim: int = 128,
    lexical_dim: int = 640,
    seed: int = 0,
    device: str = "auto",
) -> Iterator[str]:
    """Train CLS, mean-pooling and AGG models from one backbone, evaluate them beside BM25, and show three searches.

    Yields the lines to print, as they become known. Everything lies in ``output``: a model, its figures (JSON) and its
    run (TREC format) for each arm. What is there already is not done again.

    Args:
        model: Masked language model, folder or Hub id; None takes the bundled small one.
        data: BEIR folder with a test split, and a train split unless ``pairs`` are given; None takes the bundled
            sample collection.
        output: Folder for models and figures.
        pairs: Files of training pairs instead of the train split of ``data``.
        epochs: Passes over the pairs; None takes 20 for fewer than 1,000 pairs, else 3.
        cls_dim, lexical_dim: C and D of AGG; the twins have C + D dimensions.
        seed: Of new weights, order and dropout.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: ``output`` holds something else than a run of this kind, or one of other settings; the pairs fill
            no batch.
        ValueError, OSError: As :func:`train` and :func:`evaluate_beir`.
    """
    from st_aggretriever.config import TrainConfig, default_of
    from st_aggretriever.evaluation.bm25 import evaluate_bm25
    from st_aggretriever.model import build_aggretriever
    from st_aggretriever.readers.training import open_training_data
    from st_aggretriever.training import train

    home = Path(output)
    _check_home(home)
    backbone = model or str(asset("mini"))
    folder = data or str(asset("sample"))
    sources = pairs or [folder]
    try:
        rows = open_training_data(sources, seed=seed)  # as training will
    except ValueError as error:
        if "--negatives" not in str(error):
            raise
        raise ValueError(f"{error} That is an option of st-aggretriever train.") from None
    count = len(rows)
    settings: dict[str, Any] = {
        "pairs": sources,
        "epochs": epochs if epochs is not None else 20.0 if count < 1000 else 3.0,
        "batch_size": _batch_size(rows, default_of("batch_size"), seed),
        "seed": seed,
        "device": device,
    }
    configs = {  # all of them before anything is written
        key: TrainConfig(
            model=backbone,
            output=str(home / key),
            resume=(home / key).exists() or (home / f"{key}.partial").exists(),
            save_steps=SAVE_STEPS,
            **settings,
            **arm.options(cls_dim, lexical_dim),
        )
        for key, arm in ARMS.items()
        if arm.trained
    }
    untrained = build_aggretriever(backbone, seed=seed, **ARMS["untrained"].options(cls_dim, lexical_dim)).float()
    # The package, and what it brings, may lie elsewhere when the run goes on.
    shown = {"model": model or BUNDLED, "data": data or BUNDLED, **settings, "pairs": pairs or [data or BUNDLED]}
    shown |= {"cls_dim": cls_dim, "lexical_dim": lexical_dim}
    _claim(home, shown)
    yield f"backbone {model or 'mini (bundled)'}, collection {data or 'sample (bundled)'}, {count} training pairs"

    results = {"BM25": evaluate_bm25(folder, run=home / "bm25.trec", overwrite=True)}
    for key, arm in ARMS.items():
        if arm.trained:
            yield f"training {arm.name}, model {list(ARMS).index(key)} of {len(ARMS) - 1}"
            encoder = train(configs[key])
        else:
            encoder = untrained
        results[arm.name] = _evaluated(encoder, folder, home, key)
    yield ""
    yield from _table(results)
    yield ""
    yield from _searches(folder, home / "agg.trec")
    yield f"The model is in {home / 'agg'}. Next:"
    yield ""
    yield f"  st-aggretriever evaluate beir --model {home / 'agg'} --data FOLDER"
    yield ""
    yield "  from st_aggretriever import load_aggretriever"
    yield f"  model = load_aggretriever({str(home / 'agg')!r})"


def _batch_size(rows: TrainingData, most: int, seed: int) -> int:
    """The largest at which the pairs fill an epoch's batches, in which no query and no passage comes twice.

    Raises:
        ValueError: There is none.
    """
    from st_aggretriever.training import filled_batches

    queries = len(set(rows.query_keys.tolist()))
    size = min(most, queries)
    while size >= 2:
        batches = len(rows) // size
        if filled_batches(rows, size, seed, batches) == batches:
            return size
        size //= 2
    raise ValueError(
        f"quickstart: {len(rows)} training pairs of {queries} different queries fill no batches, in which no query and "
        "no passage may come twice. Give others, or more, by --pairs."
    )


def _check_home(home: Path) -> None:
    """Refuse a folder that can't be made, or is anybody else's."""
    if home.exists() and not home.is_dir():
        raise ValueError(f"quickstart: output {home} is a file; nothing was overwritten. Name a folder.")
    if home.is_dir() and any(home.iterdir()) and not (home / MARK).is_file():
        raise ValueError(f"quickstart: output {home} is not empty; nothing was overwritten. Name another folder.")
    if home.is_dir():  # whose own folder may be another user's
        check_parent(home / MARK)
    else:
        check_place(home)


def _claim(home: Path, settings: dict[str, Any]) -> None:
    """Make the folder of a run, or take up one's own; one of other settings stays untouched."""
    mark = home / MARK
    if mark.is_file():
        try:
            before = json.loads(mark.read_text(encoding="utf-8"))["settings"]
            changed = [
                f"{name} ({before[name]}, now {now})"
                for name, now in settings.items()
                if before.get(name, now if name == "device" else None) != now  # which runs had not noted
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"quickstart: {mark} is broken. Name another output.") from None
        if changed:
            raise ValueError(
                f"quickstart: the run in {home} had other settings: {', '.join(changed)}. Name another output."
            )
        return
    home.mkdir(parents=True, exist_ok=True)
    with replacing(mark) as file:
        file.write(json.dumps({"made_by": "st-aggretriever quickstart", "settings": settings}) + "\n")


def _evaluated(encoder: Any, folder: str, home: Path, key: str) -> dict[str, Any]:
    from st_aggretriever.evaluation.beir import evaluate_beir

    return evaluate_beir(
        encoder, folder, model_name=key, overwrite=True, run=home / f"{key}.trec", output=home / f"{key}.json"
    )


def _table(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield f"{'':16}{'nDCG@10':>9}{'R@100':>9}{'encode s':>10}{'search s':>10}{'index MB':>10}"
    for name, result in rows.items():
        figures, seconds = result["figures"], result["seconds"]
        dimension = result["encoding"].get("dimension")
        encode = f"{seconds['encode_queries'] + seconds['encode_documents']:.2f}" if dimension else "-"
        size = f"{result['counts']['documents'] * dimension * 4 / 1e6:.1f}" if dimension else "-"
        yield (
            f"{name:16}{figures['nDCG@10']:9.3f}{figures['R@100']:9.3f}{encode:>10}{seconds['search']:10.2f}{size:>10}"
        )


def _searches(folder: str, run: Path) -> Iterator[str]:
    """A few queries of the test split with their first passages; a relevant one has a star."""
    from st_aggretriever.readers.beir import read_corpus, read_qrels, read_queries

    found: dict[str, list[str]] = {}
    for line in run.read_text(encoding="utf-8").splitlines():
        query, _, document, *_ = line.split(" ")
        found.setdefault(query, []).append(document)
    texts = read_queries(folder)
    qrels = read_qrels(folder, "test", texts)
    corpus = dict(read_corpus(folder))
    step = max(1, len(found) // EXAMPLES)
    for query in list(found)[::step][:EXAMPLES]:
        yield f"? {texts[query]}"
        for place, document in enumerate(found[query][:SHOWN], start=1):
            mark = "*" if qrels[query].get(document, 0) > 0 else " "
            text = corpus[document]
            yield f"  {mark} {place}. {text if len(text) <= 100 else text[:97] + '...'}"
        yield ""
