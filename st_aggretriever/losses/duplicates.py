"""Which passages of a batch are known to answer which query, so that they are not punished as negatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers.util import all_gather, get_rank
from torch import Tensor


class KnownPositives:
    """The passages of a batch that are known positives of its queries, by text and by id.

    By text: a positive of any row is a positive of every query with the same text, and so is every other passage with
    the positive's text, be it another query's positive or a hard negative. Texts are the same if their real tokens
    are: after truncation, with the prompt, wherever the padding is. That is exact for the model, which gives such texts
    the same vector, and needs no column beside the texts.

    By id, for positives that are known but stand in no row of the batch with that query: the passage columns may carry
    ``text_id`` (B,) and the query column ``known_positives`` (B, K), integers, padded with -1.

    Args:
        features: The tokenised columns (query, positive, negative 1, ..., negative n), before the model has seen (and
            changed) them: ``input_ids`` and ``attention_mask`` (B, L) each.
        gather_across_devices: Look at the passages of all processes, in the order of ``all_gather``.

    Raises:
        ValueError: The processes have batches of other sizes.
    """

    def __init__(self, features: Sequence[dict[str, Any]], *, gather_across_devices: bool = False) -> None:
        query, *passages = features
        rows = [_left_aligned(column) for column in features]
        device, self.batch = rows[0].device, len(rows[0])
        self.columns = len(passages)
        widths = [rows[0].shape[1], max(row.shape[1] for row in rows[1:])]
        has_ids = "known_positives" in query and all("text_id" in column for column in passages)
        shape = torch.tensor([[self.batch, self.columns, has_ids, *widths]], device=device)
        rank = 0
        if gather_across_devices:
            shape, rank = all_gather(shape), get_rank()  # (W, 5)
            if (shape[:, :3] != shape[0, :3]).any():
                found = ", ".join(f"{queries} x {columns}" for queries, columns, *_ in shape.tolist())
                raise ValueError(
                    "gather_across_devices: all processes must have as many queries with as many passages in a batch "
                    f"(and ids, or none), got {found}. Set dataloader_drop_last=True and use the same columns."
                )
            widths = shape[:, 3:].amax(0).tolist()

        def everywhere(columns: Sequence[Tensor]) -> Tensor:
            local = torch.cat(list(columns))
            return all_gather(local) if gather_across_devices else local

        queries = _groups(everywhere([_padded(rows[0], widths[0])]))  # (W B)
        self.passages = _groups(everywhere([_padded(row, widths[1]) for row in rows[1:]]))  # (W (1 + n) B)
        self.queries = queries[rank * self.batch : (rank + 1) * self.batch]  # (B)
        self.first = rank * self.columns * self.batch  # where this process's passages begin
        # A pair of query and text as one number.
        self.texts = len(self.passages)
        positives = self.passages.view(-1, self.columns, self.batch)[:, 0].flatten()  # (W B), in the order of queries
        self.pairs = torch.unique(queries * self.texts + positives)
        self.id_texts: Tensor | None = None
        self.id_pairs: Tensor | None = None
        if has_ids:
            # Of a query's K known positives few are in the batch: pairs again, of those that are.
            ids, text_ids = query["known_positives"], everywhere([column["text_id"] for column in passages])
            row, place = (torch.isin(ids, text_ids) & (ids >= 0)).nonzero(as_tuple=True)
            numbers = torch.unique(torch.cat([text_ids, ids[row, place]]), return_inverse=True)[1]
            self.id_texts = numbers[: self.texts]
            self.id_pairs = row * self.texts + numbers[self.texts :]

    def mask(self, begin: int, end: int) -> Tensor:
        """(end - begin, P) bool: the passages to leave out for queries ``begin`` to ``end``; never a query's own."""
        known = torch.isin(self.queries[begin:end, None] * self.texts + self.passages, self.pairs)
        row = torch.arange(begin, begin + len(known), device=known.device)
        if self.id_texts is not None and self.id_pairs is not None:
            known |= torch.isin(row[:, None] * self.texts + self.id_texts, self.id_pairs)
        known[row - begin, self.first + row] = False
        return known


def _left_aligned(features: dict[str, Any]) -> Tensor:
    """(B, L): the ids of the real tokens in their order, then -1."""
    ids: Tensor = features["input_ids"]
    mask = features.get("attention_mask")
    if mask is None:
        return ids
    real = mask != 0
    order = (~real).int().argsort(dim=1, stable=True)
    return ids.masked_fill(~real, -1).gather(1, order)


def _padded(rows: Tensor, width: int) -> Tensor:
    return F.pad(rows, (0, width - rows.shape[1]), value=-1)


def _groups(rows: Tensor) -> Tensor:
    """(N, L) to (N): a number for each row, the same for equal rows."""
    return torch.unique(rows, dim=0, return_inverse=True)[1]
