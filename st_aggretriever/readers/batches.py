"""Batches in which no query and no known positive comes twice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch
from sentence_transformers.base.sampler import DefaultBatchSampler

from st_aggretriever.readers.training import TrainingData

logger = logging.getLogger(__name__)

_FEWEST = 0.01  # of an epoch's batches that a first pass over the rows must give, or filling it would take too many


class ApartBatchSampler(DefaultBatchSampler):
    """Row numbers of batches, in a seeded order that changes with the epoch.

    A batch takes the next rows in that order, and leaves for a later one each row whose query or one of whose positives
    it has already: the rule of ``BatchSamplers.NO_DUPLICATES``, with equal batches on plain pairs, but by 64-bit keys
    in memory, so that no text is read, and without regard to negatives, which may come twice.

    With ``drop_last`` an epoch has ``len(self)`` batches, which a resumed run counts on: where keeping rows apart has
    left some unfilled, another pass over the rows fills them. Only data whose first epoch gives none, or less than one
    in a hundred in its first pass, have fewer.

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
        # By the data's epoch: a Trainer of several processes that resumes within an epoch reaches the data, not us.
        self._shuffle_as(self.data.epoch)
        shown = np.zeros(len(self.data), bool)
        given, before, unlucky = 0, 0, False
        while True:
            for batch in self._pass():
                given += 1
                shown[batch] = True
                if given == len(self):
                    self._say_left_out(shown)  # now: whoever counts batches doesn't ask for one more
                yield batch
                if given == len(self) and self.drop_last:
                    return
            found = given - before
            if given >= len(self) or (self.data.epoch == before == 0 and found < _FEWEST * len(self)):
                return
            if not found:
                if unlucky:
                    return
                self._shuffle_as(0)  # the first epoch has given a batch, or this one wouldn't be there
            before, unlucky = given, not found

    def _shuffle_as(self, epoch: int) -> None:
        if self.generator is not None:
            self.generator.manual_seed(self.seed + epoch)

    def _pass(self) -> Iterator[list[int]]:
        """Batches of rows that come once each.

        A row that a batch can't take waits under the key that it shares with it. As long as a batch has that key, none
        of the rows under it is looked at: many rows of one query cost no more than others.
        """
        order = torch.randperm(len(self.data), generator=self.generator, dtype=torch.int32).numpy()
        place = 0
        waiting: dict[int, list[int]] = {}  # places in the order, a heap for each key
        heads: list[tuple[int, int]] = []  # a heap: the first place of each key, and places that were it once
        while heads or place < len(order):
            batch: list[int] = []
            taken: set[int] = set()
            later: set[tuple[int, int]] = set()  # heads, for the next batch
            while len(batch) < self.batch_size and (heads or place < len(order)):
                if heads:
                    at, key = heappop(heads)
                    queue = waiting.get(key, [])
                    if not queue or queue[0] != at:
                        continue
                    if key in taken:
                        later.add((at, key))
                        continue
                    heappop(queue)
                    if queue:
                        heappush(heads, (queue[0], key))
                    else:
                        del waiting[key]
                else:
                    at, place = place, place + 1
                row = int(order[at])
                keys = self.data.keys(row)
                shared = next(filter(taken.__contains__, keys), None)
                if shared is None:
                    batch.append(row)
                    taken.update(keys)
                    continue
                queue = waiting.setdefault(shared, [])
                heappush(queue, at)
                if queue[0] == at:
                    later.add((at, shared))
            for head in later:
                heappush(heads, head)
            if len(batch) == self.batch_size or (batch and not self.drop_last):
                yield batch

    def _say_left_out(self, shown: np.ndarray) -> None:
        """Once for the data: a Trainer makes more than one sampler."""
        left = len(shown) - int(shown.sum())
        # As few as fill no batch are left out of any data.
        if self.drop_last and self.data.left_out is None and left > max(self.batch_size, len(shown) // 100):
            self.data.left_out = left
            logger.warning(
                "%d of %d rows are in no batch of an epoch, and others come again in their place: rows with one query "
                "or positive don't meet in a batch of %d. A smaller batch size takes in more of them.",
                left,
                len(shown),
                self.batch_size,
            )

    def __len__(self) -> int:
        full, rest = divmod(len(self.data), self.batch_size)
        return full if self.drop_last or not rest else full + 1
