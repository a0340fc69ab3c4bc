"""What a loss needs to know of positives that stand in no row of its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from st_aggretriever.readers.store import key_of
from st_aggretriever.readers.training import TrainingData

_BITS = 2**63 - 1  # of a key, so that it is no negative number, which stands for none


class KnownPositivesCollator:
    """A collator that also tells, of each query of a batch, which passages are its positives in any row of the data.

    To each passage column it adds ``COLUMN_text_id`` (B,) and to the query's ``query_known_positives`` (B, K), int64,
    padded with -1: equal texts have equal numbers. With them no known positive is punished as another row's negative.
    Where every query has one positive, which is in its own row, nothing is added.

    Args:
        collate: The Trainer's own collator; its attributes are this one's too.
        data: The rows.
    """

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, Any]], data: TrainingData) -> None:
        self.collate, self.data = collate, data

    def __getattr__(self, name: str) -> Any:
        if name == "collate":  # before __init__, when it is unpickled
            raise AttributeError(name)
        return getattr(self.collate, name)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collate(rows)
        if not self.data.has_several_positives:
            return batch
        for column in self.data.columns:
            if column not in ("query", "scores"):
                batch[f"{column}_text_id"] = torch.tensor([key_of(row[column]) & _BITS for row in rows])
        known = [sorted(key & _BITS for key in self.data.known_keys(row["query"])) for row in rows]
        most = max(map(len, known))
        batch["query_known_positives"] = torch.tensor([keys + [-1] * (most - len(keys)) for keys in known])
        return batch
