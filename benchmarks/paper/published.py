"""Published figures, each row with its source; what isn't known is left out. Nothing here was measured by this project.

"The paper" is Lin, Li, Lin, TACL 2023; "Pyserini" its reproductions of published checkpoints and indexes.
"""

from __future__ import annotations

_COLUMNS = ("MARCO dev RR@10", "MARCO dev R@1000", "DL19 nDCG@10", "DL20 nDCG@10")


def _marco(*figures: float) -> dict[str, float]:
    return dict(zip(_COLUMNS, figures, strict=False))


_AGG = {
    "DistilBERT: AGG (castorini/aggretriever-distilbert, Pyserini)": _marco(0.3412, 0.9604, 0.6816, 0.6726),
    "coCondenser: AGG (castorini/aggretriever-cocondenser, Pyserini)": _marco(0.3619, 0.9735, 0.6837, 0.6972),
}
_BM25 = {"BM25 (Pyserini, default)": _marco(0.1840, 0.8526, 0.5058, 0.4796)}
_DISTILBERT = dict(list(_AGG.items())[:1])

MAIN = _BM25 | {"BM25 (Pyserini, tuned)": _marco(0.1875, 0.8573, 0.4973, 0.4876)} | _AGG
ZERO_SHOT = {
    "BM25 (Pyserini, flat)": {
        "nfcorpus nDCG@10": 0.3218,
        "fiqa nDCG@10": 0.2361,
        "arguana nDCG@10": 0.3970,
        "scidocs nDCG@10": 0.1490,
        "scifact nDCG@10": 0.6789,
    },
    "DistilBERT: AGG (its authors' page)": {"BEIR, 13 sets nDCG@10": 0.460},
    "DistilBERT: AVERAGE (the paper)": {"BEIR small nDCG@10": 0.264},
}
HARD_NEGATIVES = _DISTILBERT | {
    "TCT-ColBERT-V2 (Pyserini)": _marco(0.3440, 0.9670),
    "TCT-ColBERT-V2 HN (Pyserini)": _marco(0.3543, 0.9708),
    "TCT-ColBERT-V2 HN+ (Pyserini)": _marco(0.3584, 0.9695, 0.7204, 0.6882),
}
BALANCE = _DISTILBERT
ABLATION = _DISTILBERT | {"DistilBERT: AVERAGE (the paper)": _marco(0.306)}
SPARSE = (
    _BM25
    | _DISTILBERT
    | {
        "uniCOIL, no expansion (Pyserini)": _marco(0.3153, 0.9239, 0.6433, 0.6523),
        "SPLADE++ ED (Pyserini)": _marco(0.3828, 0.9831, 0.7308, 0.7197),
    }
)
LATENCY = {
    "768 dimensions, flat (the paper)": {
        "MS MARCO float32 GB": 26.0,
        "MS MARCO float16 GB": 13.0,
        "search on one V100, ms a query": 100.0,
    }
}
TITLE = (
    "Published figures, at full size and not measured here: what the full scale should come to, not to be compared "
    "with a miniature's. Blank where no figure is known here."
)
