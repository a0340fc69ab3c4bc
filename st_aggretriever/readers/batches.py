"""Batches in which no query and no known positive comes twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sentence_transformers.base.sampler import DefaultBatchSampler

from st_aggretriever.readers.training import TrainingData

_MORE_PASSES = 2  # over the rows, where keeping them apart has left batches unfilled; as in NoDuplicatesBatchSampler


class ApartBatchSampler(DefaultBatchSampler):
    """Row numbers of batches, in a seeded order that changes with the epoch.

    A batch takes the next rows in that order, and leaves for a later one each row whose query or one of whose positives
    it has already: the rule of ``BatchSamplers.NO_DUPLICATES``, with equal batches on plain pairs, but by 64-bit keys
    in memory, so that no text is read, and without regard to negatives, which may come twice.

    Args:
        data: The rows; told the epoch too, so that they draw other negatives.
        dataset, batch_size, drop_last, valid_label_columns, generator, seed: As the Trainer gives them.
    """

    def __init__(self, data: TrainingData, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.data = data

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.data.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        if self.generator is not None:
            # By the data's epoch: a Trainer of several processes that resumes within an epoch reaches the data, not us.
            self.generator.manual_seed(self.seed + self.data.epoch)
        given = 0
        for batch in self._pass():
            yield batch
            given += 1
        for _ in range(_MORE_PASSES if given else 0):
            if given >= len(self):
                return
            for batch in self._pass():
                yield batch
                given += 1
                if given >= len(self):
                    return

    def _pass(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.data), generator=self.generator, dtype=torch.int32).tolist()
        rows = iter(order)
        waiting: list[int] = []
        more = True
        while more or waiting:
            batch: list[int] = []
            taken: set[int] = set()
            still: list[int] = []
            for place, row in enumerate(waiting):
                if len(batch) == self.batch_size:
                    still += waiting[place:]
                    break
                self._take(row, batch, taken, still)
            while more and len(batch) < self.batch_size:
                row = next(rows, -1)
                more = row >= 0
                if more:
                    self._take(row, batch, taken, still)
            waiting = still
            if len(batch) == self.batch_size or (batch and not self.drop_last):
                yield batch

    def _take(self, row: int, batch: list[int], taken: set[int], still: list[int]) -> None:
        keys = self.data.keys(row)
        if taken.isdisjoint(keys):
            batch.append(row)
            taken.update(keys)
        else:
            still.append(row)

    def __len__(self) -> int:
        full, rest = divmod(len(self.data), self.batch_size)
        return full if self.drop_last or not rest else full + 1
