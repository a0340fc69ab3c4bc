"""Three sizes of the same experiments: data, backbones, training settings and seeds.

``smoke`` shows that everything runs and means nothing; ``mini`` is a laptop's; ``full`` is the paper's setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from arms import Model

from st_aggretriever.evaluation.beir_sets import BEIR, PUBLIC


@dataclass(frozen=True, kw_only=True)
class Collection:
    """A test collection in BEIR's layout below the data folder.

    Args:
        name: A column of the tables.
        folder: Below the data folder; collections of one folder share the encoding of its documents.
        split: Which qrels.
        metrics: What is reported; the first one is judged.
        domain: ``"zero-shot"``, or ``"in-domain"`` for held-out queries of the training data.
        documents, queries: How many there are, for the estimate.
        optional: Left out where the folder is missing.
        questions: File of questions with answers below the data folder: then ``folder`` holds ``passages.tsv`` in DPR's
            format, and a hit is a passage that has an answer.
    """

    name: str
    folder: str
    split: str = "test"
    metrics: tuple[str, ...] = ("nDCG@10",)
    domain: str = "zero-shot"
    documents: int = 0
    queries: int = 0
    optional: bool = False
    questions: str = ""


NOISE = 0.02  # about the standard error of the dev figure

DEV = Collection(name="dev", folder="dev-all", split="dev")  # made by the runner, see data.py


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Settings of one size.

    Args:
        backbones: Name -> folder (below the folder of models; ``asset:`` the package's own) or Hub id. ``main`` is the
            one of all tables but the first.
        labels: Name of a backbone -> how tables call it.
        sources: Name -> files of pairs below the data folder.
        rates, factors: The sweep, seed 0, judged on the dev split: each of ``factors`` (the loss's scale) at the first
            rate for ``sweep_share`` of the steps, then each rate at the best factor in a whole run. One of each is no
            sweep. The first one stays where no other is better by ``NOISE``.
        steps: Of a whole run, for models with the MLM head and without it; 0 goes by ``epochs``.
        evaluations: How often a whole run is judged on the dev split, the last time at its end; the best weights count.
            0 never.
        dev: Judged training queries, apart from the training pairs, for the fusion's weight.
        fractions: Shares of the training pairs in the table of small training data.
        further_steps, further_rates: Steps of further training, 0 goes by ``further_epochs``; and its rates.
    """

    name: str
    backbones: dict[str, str]
    labels: dict[str, str]
    main_backbones: tuple[str, ...]
    control_backbones: tuple[str, ...]
    sources: dict[str, tuple[str, ...]]
    collections: tuple[Collection, ...]
    dev: Collection = DEV
    seeds_main: tuple[int, ...] = (0,)
    seeds: tuple[int, ...] = (0,)
    batch_size: int = 32
    negatives: int | None = None
    epochs: float = 3.0
    steps: tuple[int, int] = (0, 0)
    evaluations: int = 3
    rates: tuple[float, ...] = (1e-4,)
    factors: tuple[float, ...] = (1.0,)
    sweep_share: float = 0.25
    train_length: int = 64
    search_length: int = 128
    fractions: tuple[float, ...] = (0.01, 0.1)
    further_batch_size: int = 16
    further_negatives: int = 3
    further_epochs: float = 2.0
    further_steps: int = 0
    further_rates: tuple[float, ...] = ()
    dev_share: float = 0.025
    test_share: float = 0.035
    latency_queries: int = 200
    analysis_texts: int = 300
    resamples: int = 10_000
    training_rows: int = 0
    settings: dict[str, object] = field(default_factory=dict)  # further ones of TrainConfig
    caveat: str = ""  # stands below every table of trained models

    def collection(self, name: str) -> Collection:
        return next(collection for collection in self.collections if collection.name == name)

    def names(self, domain: str) -> list[str]:
        return [collection.name for collection in self.collections if collection.domain == domain]


IN_DOMAIN = "held-out pairs"  # made of the training files by the runner, see data.py

SMOKE = Scale(
    name="smoke",
    backbones={"main": "random", "splade-tiny": "random"},
    labels={"main": "random", "splade-tiny": "random too"},
    main_backbones=("main", "splade-tiny"),
    control_backbones=("main",),
    sources={"one": ("one.jsonl",), "two": ("two.jsonl",)},
    collections=(
        Collection(name="first", folder="first", documents=40, queries=12),
        Collection(name="second", folder="second", documents=40, queries=12),
        Collection(name=IN_DOMAIN, folder=IN_DOMAIN, metrics=("RR@10", "nDCG@10"), domain="in-domain", queries=20),
    ),
    seeds_main=(0, 1),
    seeds=(0, 1),
    batch_size=4,
    steps=(2, 3),
    evaluations=2,
    rates=(1e-3,),
    factors=(1.0,),
    train_length=16,
    search_length=24,
    fractions=(0.5,),
    further_batch_size=2,
    further_negatives=1,
    further_steps=2,
    further_rates=(1e-3,),
    dev_share=0.1,
    test_share=0.15,
    latency_queries=5,
    analysis_texts=8,
    resamples=200,
    training_rows=160,
)

MINI = Scale(
    name="mini",
    backbones={"main": "asset:mini", "splade-tiny": "splade-tiny"},
    labels={"main": "mini", "splade-tiny": "splade-tiny (favours AGG)"},
    main_backbones=("main", "splade-tiny"),
    control_backbones=("main", "splade-tiny"),
    sources={
        "squad_nqg": ("pairs/squad_nqg_dev.jsonl.gz", "pairs/squad_nqg_test.jsonl.gz"),
        "medquad": ("pairs/medquad.jsonl.gz",),
    },
    collections=(
        Collection(name="scifact", folder="scifact", documents=5183, queries=300),
        Collection(name="cranfield", folder="cranfield", documents=1400, queries=225),
        Collection(name="medline", folder="medline", documents=1033, queries=30),
        Collection(name="cacm", folder="cacm", documents=3204, queries=52),
        Collection(
            name=IN_DOMAIN,
            folder=IN_DOMAIN,
            metrics=("RR@10", "nDCG@10"),
            domain="in-domain",
            documents=1200,
            queries=600,
        ),
    ),
    seeds_main=(0, 1, 2, 3, 4),
    seeds=(0, 1, 2),
    steps=(600, 1800),
    rates=(1e-4, 4e-4),
    factors=(1.0, 5.0, 20.0),
    further_steps=400,
    further_rates=(2e-5, 1e-4),
    training_rows=36_500,
    caveat=(
        "The backbone mini has seen both sources' texts before: it was pretrained by masked language modelling on "
        "SQuAD and MedQuAD among others, questions beside the passages that answer them, 443 of the 501 judged pairs "
        "of the held-out test and 463 of the 534 of the dev split among them. Held out they are of training on pairs "
        "alone. That may favour AGG, which keeps the head of that pretraining. Of the zero-shot collections it has "
        "seen nothing."
    ),
)


def _marco(name: str, split: str, queries: int, *metrics: str) -> Collection:
    return Collection(
        name=name,
        folder="msmarco",
        split=split,
        metrics=metrics or ("nDCG@10",),
        domain="in-domain",
        documents=8_841_823,
        queries=queries,
    )


def _beir() -> Iterator[Collection]:
    """The fourteen public sets, the forums of CQADupStack one by one."""
    for name in PUBLIC:
        for folder, (documents, queries) in BEIR[name].counts.items():
            yield Collection(
                name=folder, folder=folder, split=BEIR[name].split, documents=documents, queries=queries, optional=True
            )


def _questions(name: str, questions: str) -> Collection:
    """A set of questions with answers, over DPR's passages of Wikipedia; counts are read from the files."""
    return Collection(
        name=name,
        folder="wikipedia",
        metrics=("Hits@20", "Hits@5", "Hits@100"),
        domain="questions",
        questions=questions,
        optional=True,
    )


FULL = Scale(
    name="full",
    backbones={
        "main": "distilbert-base-uncased",
        "bert": "bert-base-uncased",
        "condenser": "Luyu/condenser",
        "cocondenser": "Luyu/co-condenser-marco",
    },
    labels={"main": "DistilBERT", "bert": "BERT", "condenser": "Condenser", "cocondenser": "coCondenser"},
    main_backbones=("bert", "main", "condenser", "cocondenser"),
    control_backbones=("main",),
    sources={"msmarco": ("pairs/msmarco.jsonl",), "nq": ("pairs/nq.jsonl",), "tqa": ("pairs/tqa.jsonl",)},
    collections=(
        _marco("MARCO dev", "dev", 6_980, "RR@10", "R@1000"),
        _marco("DL19", "test", 43),
        _marco("DL20", "dl20", 53),
        *_beir(),
        *(_questions(name, f"questions/{name}.tsv") for name in ("NQ", "TQA", "WebQ", "CuratedTREC", "SQuAD")),
        _questions("EntityQuestions", "questions/EntityQuestions.tsv"),
    ),
    dev=Collection(name="dev", folder="msmarco", split="tune"),
    batch_size=8,
    negatives=7,
    rates=(5e-6,),
    further_rates=(5e-6,),
    evaluations=0,
    train_length=128,
    search_length=128,
    further_batch_size=8,
    further_negatives=7,
    latency_queries=6_980,
    training_rows=500_000,
    settings={"precision": "auto", "device": "auto"},
)


def steps_of(scale: Scale, model: Model) -> int:
    """Steps of the model's training; 0 where it goes by epochs."""
    return scale.further_steps if model.further else model.longer * scale.steps[not model.has_head]


SCALES = {scale.name: scale for scale in (SMOKE, MINI, FULL)}
