"""What a table compares, as plain data: models that are trained, and ways to look at their vectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

RECIPES = ("aggretriever", "cosine", "splade", "bm25")
WIDE = 1024  # dimensions from which on vectors are searched while they are made, and not stored


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained and encoded. Equal models are one model, whatever tables they stand in.

    Args:
        recipe: ``"aggretriever"``, this package's training; ``"cosine"``, mean pooling and sentence-transformers' usual
            loss; ``"splade"``, its SparseEncoder; ``"bm25"``, nothing to train.
        backbone: A name among the scale's backbones.
        build: Arguments of :func:`st_aggretriever.build_aggretriever`, in pairs.
        source: ``"all"`` training pairs, or those of one of the scale's sources.
        fraction: Share of them that is used; a smaller share is a part of a larger one.
        further: ``"hard"`` goes on from the plain model on negatives that it mined itself, ``"same"`` on its own pairs.
        trained: Whether it is trained at all.
        longer: How many times the usual steps it takes, by the settings that were chosen for the usual ones.
    """

    recipe: str = "aggretriever"
    backbone: str = "main"
    build: tuple[tuple[str, Any], ...] = ()
    source: str = "all"
    fraction: float = 1.0
    further: str = ""
    trained: bool = True
    longer: int = 1

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.build)

    @property
    def is_wide(self) -> bool:
        return self.recipe == "splade" or self.options.get("aggregation") == "none"

    @property
    def has_head(self) -> bool:
        """Whether a step goes through the MLM head, the larger part of a small backbone's cost."""
        return self.recipe == "splade" or (
            self.recipe == "aggretriever" and self.options.get("pooling", "mlm") == "mlm"
        )

    @property
    def start(self) -> Model:
        """The plain model from which further training goes on, and whose settings a longer one has."""
        return replace(self, further="", longer=1)

    @property
    def kind(self) -> str:
        """Names the costs of a step and of a text, which the pairs don't change."""
        settings = [f"{name}={value}" for name, value in self.build]
        settings += [f"further={self.further}"] * bool(self.further) + [f"longer={self.longer}"] * (self.longer > 1)
        return " ".join([self.recipe, self.backbone, *settings])


def agg(backbone: str = "main", **build: Any) -> Model:
    """An Aggretriever; without settings the paper's, 128 + 640."""
    return Model(backbone=backbone, build=tuple(sorted(build.items())))


def cls(backbone: str = "main", width: int = 768) -> Model:
    return agg(backbone, pooling="cls", cls_dim=width)


def distinct(models: Iterable[Model]) -> list[Model]:
    """Each model once, plain models before those that go on from them."""
    found = list(dict.fromkeys(models))
    return list(dict.fromkeys([*(model.start for model in found), *found]))


BM25 = Model(recipe="bm25", trained=False)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table: a model, and which of its figures.

    Args:
        name: As the table prints it; unique in it.
        model: Whose vectors.
        part: Columns that are compared: ``"all"``, or one of the vector's parts, ``"cls"`` or ``"lexical"``.
        fold: Width that the lexical part is folded to; None leaves it.
        fused: Whether the ranking is fused with BM25's, by a weight from the dev split.
        note: What a reader must know of it.
    """

    name: str
    model: Model
    part: str = "all"
    fold: int | None = None
    fused: bool = False
    note: str = ""

    @property
    def view(self) -> str:
        """Names the row's figures among those of its model."""
        fold = "" if self.fold is None else f", folded to {self.fold}"
        return f"{self.part}{fold}{', fused with BM25' if self.fused else ''}"


@dataclass(frozen=True, kw_only=True)
class Table:
    """One of the paper's tables at one scale.

    Args:
        name: Of its files, and among the findings.
        title: A sentence.
        rows: In order.
        seeds: Of training, and of what is random in an untrained model.
        collections: Names of the scale's test collections that it shows.
        published: Row, with its source, -> column -> a published figure.
        notes: Sentences below the table.
    """

    name: str
    title: str
    rows: list[Row]
    seeds: tuple[int, ...]
    collections: list[str]
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def rows_of(models: Mapping[str, Model]) -> list[Row]:
    """A row for each model."""
    return [Row(name=name, model=model) for name, model in models.items()]
