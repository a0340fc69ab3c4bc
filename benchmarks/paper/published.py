"""Published figures, each with its source; what isn't known is left out. Nothing here was measured by this project.

``paper``: Lin, Li, Lin, TACL 2023. ``Pyserini``: its reproductions of published checkpoints and indexes.
"""

from __future__ import annotations

SOURCES = {
    "DistilBERT: AGG": "Pyserini's reproduction of castorini/aggretriever-distilbert",
    "coCondenser: AGG": "Pyserini's reproduction of castorini/aggretriever-cocondenser",
    "BM25": "Pyserini: default on MARCO dev, DL19 and DL20; flat on BEIR",
    "uniCOIL, no expansion": "Pyserini",
    "AVERAGE": "the paper, with DistilBERT",
}
_BM25 = {"MARCO dev RR@10": 0.1840, "MARCO dev R@1000": 0.8526, "DL19 nDCG@10": 0.5058, "DL20 nDCG@10": 0.4796}
_BM25_BEIR = {
    "nfcorpus nDCG@10": 0.3218,
    "fiqa nDCG@10": 0.2361,
    "arguana nDCG@10": 0.3970,
    "scidocs nDCG@10": 0.1490,
    "scifact nDCG@10": 0.6789,
}
_DISTILBERT = {"MARCO dev RR@10": 0.3412, "MARCO dev R@1000": 0.9604, "DL19 nDCG@10": 0.6816, "DL20 nDCG@10": 0.6726}
_COCONDENSER = {"MARCO dev RR@10": 0.3619, "MARCO dev R@1000": 0.9735, "DL19 nDCG@10": 0.6837, "DL20 nDCG@10": 0.6972}
_UNICOIL = {"MARCO dev RR@10": 0.3153, "MARCO dev R@1000": 0.9239, "DL19 nDCG@10": 0.6433, "DL20 nDCG@10": 0.6523}

MAIN = {"BM25": _BM25, "DistilBERT: AGG": _DISTILBERT, "coCondenser: AGG": _COCONDENSER}
ZERO_SHOT = {"BM25": _BM25_BEIR}
ABLATION = {"AGG (agg*)": _DISTILBERT, "AVERAGE": {"MARCO dev RR@10": 0.306}}
SPARSE = {"BM25": _BM25, "AGG": _DISTILBERT, "uniCOIL, no expansion": _UNICOIL}
HARD_NEGATIVES = {"AGG": _DISTILBERT}
BALANCE = {"128 + 640": _DISTILBERT}
NOTES = (
    "Published columns are of MS MARCO and the paper's backbones at full size: they are what the full scale should "
    "reach, never to be compared with a miniature's. A blank is a figure that is not known here.",
    "Sources: " + "; ".join(f"{row}: {source}" for row, source in SOURCES.items()) + ".",
)
