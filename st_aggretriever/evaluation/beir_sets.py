"""The test sets of BEIR and NanoBEIR by name: where they are, their checksums, sizes and licences, and which belong
together.

Names, MD5 sums, queries and documents are those of BEIR's own tables and of ir_datasets, which agree; licences are as
mteb's metadata states them. Touché-2020 is the second version, with the corrected judgements, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class BeirSet(NamedTuple):
    """A zip file of BEIR's server: folders in BEIR's layout."""

    name: str
    md5: str
    size: int  # bytes of the zip
    counts: dict[str, tuple[int, int]]  # folder in the zip -> documents, judged queries
    licence: str
    split: str = "test"


class NanoSet(NamedTuple):
    """A repository of the Hugging Face Hub with configurations corpus, queries and qrels."""

    name: str
    repository: str
    revision: str
    documents: int
    queries: int


def _zip(name: str, md5: str, size: int, counts: tuple[int, int], licence: str, split: str = "test") -> BeirSet:
    return BeirSet(name, md5, size, {name: counts}, licence, split)


_UNSTATED = "not stated"
_FORUMS = {
    "android": (22_998, 699), "english": (40_221, 1_570), "gaming": (45_301, 1_595), "gis": (37_637, 885),
    "mathematica": (16_705, 804), "physics": (38_316, 1_039), "programmers": (32_176, 876), "stats": (42_269, 652),
    "tex": (68_184, 2_906), "unix": (47_382, 1_072), "webmasters": (17_405, 506), "wordpress": (48_605, 541),
}  # fmt: skip
# MS MARCO, which most retrievers are trained on, isn't one of the eighteen: it is there by name, in no mean.
BEIR: dict[str, BeirSet] = {
    one.name: one
    for one in (
        _zip("msmarco", "444067daf65d982533ea17ebd59501e4", 1_082_258_632, (8_841_823, 6_980), "msr-la-nc", "dev"),
        _zip("trec-covid", "ce62140cb23feb9becf6270d0d1fe6d1", 73_876_720, (171_332, 50), _UNSTATED),
        _zip("nfcorpus", "a89dba18a62ef92f7d323ec890a0d38d", 2_448_432, (3_633, 323), _UNSTATED),
        _zip("nq", "d4d3d2e48787a744b6f6e691ff534307", 498_307_926, (2_681_468, 3_452), "cc-by-nc-sa-3.0"),
        _zip("hotpotqa", "f412724f78b0d91183a0e86805e16114", 654_025_350, (5_233_329, 7_405), "cc-by-sa-4.0"),
        _zip("fiqa", "17918ed23cd04fb15047f73e6c3bd9d9", 17_948_027, (57_638, 648), _UNSTATED),
        _zip("arguana", "8ad3e3c2a5867cdced806d6503f29b99", 3_773_617, (8_674, 1_406), "cc-by-sa-4.0"),
        _zip("webis-touche2020", "46f650ba5a527fc69e0a6521c5a23563", 227_132_363, (382_545, 49), "cc-by-sa-4.0"),
        BeirSet("cqadupstack", "4e41456d7df8ee7760a7f866133bda78", 5_343_728_040,
                {f"cqadupstack/{forum}": counts for forum, counts in _FORUMS.items()}, "apache-2.0"),
        _zip("quora", "18fb154900ba42a600f84b839c173167", 15_853_968, (522_931, 10_000), _UNSTATED),
        _zip("dbpedia-entity", "c2a39eb420a3164af735795df012ac2c", 639_285_131, (4_635_922, 400), "mit"),
        _zip("scidocs", "38121350fc3a4d2f48850f6aff52e4a9", 142_471_588, (25_657, 1_000), "cc-by-sa-4.0"),
        _zip("fever", "5a818580227bfb4b35bb6fa46d9b6c03", 1_236_988_269, (5_416_568, 6_666), "cc-by-nc-sa-3.0"),
        _zip("climate-fever", "8b66f0a9126c521bae2bde127b4dc99d", 1_228_666_652, (5_416_593, 1_535), "cc-by-sa-4.0"),
        _zip("scifact", "5f7d1de60b170fc8027bb7898e2efca1", 2_816_079, (5_183, 300), "cc-by-nc-4.0"),
    )
}  # fmt: skip
PUBLIC = tuple(name for name in BEIR if name != "msmarco")
# The paper's "BEIR small".
SMALL = ("nfcorpus", "fiqa", "arguana", "scidocs", "scifact")
# These four can't be downloaded: who grants access, and how BEIR makes its folder of what one gets.
LICENSED = {
    "bioasq": "register at http://www.bioasq.org and take the documents of task 9a and the questions of 8B",
    "signal1m": "sign up at https://research.signal-ai.com/datasets/signal1m-tweetir.html and fetch the tweets by id",
    "trec-news": "apply for the Washington Post corpus at https://trec.nist.gov/data/wapost; topics and judgements are"
    " the News Track's of 2019",
    "robust04": "apply for TREC disks 4 and 5 at https://trec.nist.gov/data/cd45; topics and judgements are"
    " trec-robust04 of ir_datasets",
}
LICENSED_RECIPES = "https://github.com/beir-cellar/beir/tree/main/examples/dataset"

NANO: dict[str, NanoSet] = {
    f"nano-{name}": NanoSet(f"nano-{name}", f"mteb/Nano{repository}", revision, documents, queries)
    for name, repository, revision, documents, queries in (
        ("arguana", "ArguAnaRetrieval", "63ac9f026e8f6b85dc0622f3d630ed7a1758e9ec", 3635, 50),
        ("climate-fever", "ClimateFeverRetrieval", "ccb5552bc17e87afe0f9479fb4346898213a71db", 3408, 50),
        ("dbpedia-entity", "DBPediaRetrieval", "2d088f80d7a640eac0be5c66408d68c3f782baa1", 6045, 50),
        ("fever", "FEVERRetrieval", "a6490dfeed0f13c2a052e39c6ddaeb6086afd4a8", 4996, 50),
        ("fiqa", "FiQA2018Retrieval", "ede84da4793cd2d4e61bba0dd08fc58de90f3681", 4598, 50),
        ("hotpotqa", "HotpotQARetrieval", "a38a2615f29adba8b47a42905031aa9c137d8fae", 5090, 50),
        ("msmarco", "MSMARCORetrieval", "5a5aa0c3df65d6883d85c8f5cdc88e679633595e", 5043, 50),
        ("nfcorpus", "NFCorpusRetrieval", "2eec9d63140fb9af7c75ad0fdbf6350aaf20e94e", 2953, 50),
        ("nq", "NQRetrieval", "e3973b405feb9e94d07fd971d690d24d7f45264a", 5035, 50),
        ("quora", "QuoraRetrieval", "3ee153e5710da83a7f35df0cb1db4a0ad036072a", 5046, 50),
        ("scidocs", "SCIDOCSRetrieval", "cf39b8741a6f2e984d0b8f4796b2dd5bb65390f9", 2210, 50),
        ("scifact", "SciFactRetrieval", "8c5f7bbe90bb865f46c67710221afa7d9096251b", 2919, 50),
        ("webis-touche2020", "Touche2020Retrieval", "ff81c0caff8b6febe1495eae9f2ca3eddad074b8", 5745, 49),
    )
}
NANO_LICENCE = "cc-by-4.0"
NUMBERED_APART = ("msmarco", "nano-msmarco")  # an id that a query and a document share says nothing

SUBSETS: dict[str, tuple[str, ...]] = {
    "small": SMALL,
    "nano": tuple(NANO),
    "public": PUBLIC,
    "all": (*PUBLIC, *LICENSED),
}


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each once, if every one is a set's and full and Nano sets don't mix.

    Raises:
        ValueError: No name, an unknown one, or NanoBEIR beside BEIR, whose figures can't be compared.

    >>> check_names(["scifact", "fiqa", "scifact"])
    ('scifact', 'fiqa')
    """
    names = tuple(dict.fromkeys(names))
    known = {**BEIR, **LICENSED, **NANO}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(
            f"evaluate beir: expected names of sets, got {', '.join(unknown) or 'none'}. BEIR has {', '.join(BEIR)};"
            f" with a licence {', '.join(LICENSED)}; NanoBEIR has {', '.join(NANO)}."
        )
    nano = [name for name in names if name in NANO]
    if nano and len(nano) < len(names):
        raise ValueError(
            "evaluate beir: NanoBEIR's figures can't stand beside BEIR's (a few thousand documents instead of up to"
            " millions make every set easier). Evaluate the two apart."
        )
    return names


def folders_of(name: str) -> dict[str, tuple[int, int] | None]:
    """The folders that make up a set, with their documents and judged queries where these are known.

    >>> list(folders_of("cqadupstack"))[0], folders_of("scifact"), folders_of("robust04")
    ('cqadupstack/android', {'scifact': (5183, 300)}, {'robust04': None})
    """
    if name in BEIR:
        return dict(BEIR[name].counts)
    if name in NANO:
        return {name: (NANO[name].documents, NANO[name].queries)}
    return {name: None}


def split_of(name: str) -> str:
    """Which qrels of a set are its test set."""
    return BEIR[name].split if name in BEIR else "test"
