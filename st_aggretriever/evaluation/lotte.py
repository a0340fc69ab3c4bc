"""LoTTE: the share of questions with a right passage among the first five (Santhanam et al., NAACL 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from st_aggretriever.atomic import check_outputs
from st_aggretriever.evaluation.beir import check_before, find_hits
from st_aggretriever.evaluation.bm25 import find_hits_bm25
from st_aggretriever.evaluation.metrics import rank
from st_aggretriever.evaluation.result import make_result, write_result
from st_aggretriever.readers.msmarco import read_tsv
from st_aggretriever.readers.text import checksum, find_text, id_of, read_jsonl
from st_aggretriever.search.retrieve import rankings_of

KINDS = ("search", "forum")
CUT = 5


def evaluate_lotte(
    model: Any,
    data: str | Path,
    *,
    kinds: Sequence[str] = KINDS,
    top_k: int = 100,
    batch_size: int = 32,
    block_size: int = 50_000,
    run: str | Path | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    backend: str = "auto",
    model_name: str | None = None,
) -> dict[str, Any]:
    """Evaluate on one topic and split of LoTTE; both kinds of questions in one pass over the passages.

    Args:
        model: As for :func:`st_aggretriever.evaluation.beir.evaluate_beir`; None is BM25.
        data: Folder such as ``lotte/writing/test``: ``collection.tsv``, and for each kind ``questions.KIND.tsv`` and
            ``qas.KIND.jsonl``.
        kinds: ``"search"``, ``"forum"``, or both.
        top_k: Depth of the run, at least 5.
        batch_size, block_size, output, overwrite, backend, model_name: As for ``evaluate_beir``.
        run: File for the run, whose query ids are ``KIND-QID``, as each kind numbers its questions from 0.

    Returns:
        A result as ``evaluate_beir`` gives, with ``Success@5 KIND`` as ``figures``.

    Raises:
        ValueError: An unknown kind, top_k below 5, a bad line, an answer without question.
        OSError: A file is missing.
    """
    kinds = tuple(dict.fromkeys(kinds))
    if not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(f"evaluate_lotte: kinds must be of {', '.join(KINDS)}, got {', '.join(kinds) or 'none'}.")
    if top_k < CUT:
        raise ValueError(f"evaluate_lotte: top_k must be at least {CUT}, got {top_k}.")
    if model is None:
        check_outputs(run, output, overwrite)
    else:
        check_before(model, run, output, overwrite, batch_size=batch_size, block_size=block_size)
    questions, answers = _read_questions(Path(data), kinds)
    collection = find_text(data, "collection.tsv")
    total, unknown = 0, {key for ids in answers.values() for key in ids}
    for key, _ in read_tsv(collection):  # and a bad line is found before the work
        total += 1
        unknown.discard(key)
    if model is None:
        hits, how = find_hits_bm25(questions, read_tsv(collection), top_k)
    else:
        options: dict[str, Any] = {"batch_size": batch_size, "block_size": block_size, "backend": backend}
        hits, how = find_hits(model, questions, (read_tsv(collection), total), top_k, model_name=model_name, **options)
    rankings = {query: rank(found, top_k) for query, found in rankings_of(list(questions), hits).items()}
    files = [collection, *(find_text(data, name) for kind in kinds for name in _files(kind))]
    result = make_result(
        how,
        benchmark="lotte",
        data=data,
        split=" and ".join(kinds),
        checksums={path.name: checksum(path) for path in files},
        figures={
            f"Success@{CUT} {kind}": success(rankings, {key: answers[key] for key in answers if _kind(key) == kind})
            for kind in kinds
        },
        counts={
            "queries": len(questions),
            "documents": total,
            "unknown_answers": len(unknown),
        },
        rules=[
            f"a question counts if one of its answer_pids is among the first {CUT} passages; the mean is over the"
            " questions of qas.KIND.jsonl",
            "equal scores are ordered by passage id, descending, ids compared as strings",
        ],
        top_k=top_k,
    )
    write_result(result, rankings, run, output)
    return result


def success(rankings: Mapping[str, Mapping[str, float]], answers: Mapping[str, Sequence[str]], cut: int = CUT) -> float:
    """Share of questions that have one of their answers within the first ``cut`` hits.

    Args:
        rankings: Hits that stand best first; a question without any has no success.
        answers: Right ids of every question that counts.

    >>> success({"a": {"7": 2.0, "8": 1.0}}, {"a": ["8"], "b": ["7"]}, cut=2)
    0.5
    """
    return sum(bool(set(list(rankings.get(key, {}))[:cut]) & set(ids)) for key, ids in answers.items()) / len(answers)


def _read_questions(data: Path, kinds: Sequence[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Texts and right passages of every question, by ``KIND-QID``."""
    questions: dict[str, str] = {}
    answers: dict[str, list[str]] = {}
    for kind in kinds:
        tsv, jsonl = (find_text(data, name) for name in _files(kind))
        texts = dict(read_tsv(tsv))
        for key, ids in read_jsonl(jsonl, _answers):
            if key not in texts:
                raise ValueError(f"{jsonl}: question {key!r} is not in {tsv.name}.")
            if f"{kind}-{key}" in answers:
                raise ValueError(f"{jsonl}: question {key!r} occurs a second time.")
            questions[f"{kind}-{key}"], answers[f"{kind}-{key}"] = texts[key], ids
    return questions, answers


def _answers(record: dict[str, Any]) -> tuple[str, list[str]]:
    ids = record.get("answer_pids")
    if not isinstance(ids, list) or not ids:
        raise ValueError("expected a list with at least one id in 'answer_pids'.")
    return id_of(record, "qid"), [id_of({"pid": key}, "pid") for key in ids]


def _files(kind: str) -> tuple[str, str]:
    return f"questions.{kind}.tsv", f"qas.{kind}.jsonl"


def _kind(key: str) -> str:
    return key.partition("-")[0]
