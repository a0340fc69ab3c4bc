"""Our measures against pytrec_eval's and ir_measures', query by query, on BM25's runs and on a run full of ties.

    pip install ir_measures; python benchmarks/metric_parity.py --data FOLDER...

RR@10 is compared with ir_measures alone, which orders ties otherwise than trec_eval: a difference there is that rule's.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

import ir_measures
import pytrec_eval
from ir_measures import AP, RR, R, nDCG

from st_aggretriever.evaluation.bm25 import evaluate_bm25
from st_aggretriever.evaluation.metrics import evaluate_run
from st_aggretriever.evaluation.runs import read_run
from st_aggretriever.readers.beir import read_qrels, read_queries
from st_aggretriever.versions import versions

TREC_EVAL = {"nDCG@10": "ndcg_cut_10", "R@100": "recall_100", "R@1000": "recall_1000", "MAP": "map"}
IR_MEASURES = {"nDCG@10": nDCG @ 10, "R@100": R @ 100, "R@1000": R @ 1000, "MAP": AP, "RR@10": RR @ 10}

Qrels = dict[str, dict[str, int]]
Run = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", nargs="+", required=True, type=Path, help="BEIR folders")
    args = parser.parse_args()
    rows = {"ties": differences(*ties())}
    for folder in args.data:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch, "run.trec")
            evaluate_bm25(folder, run=file, drop_identical_ids=False)
            rows[folder.name] = differences(read_qrels(folder, "test", read_queries(folder)), read_run(file))
    for name, row in rows.items():
        print(f"{name:14}" + "  ".join(f"{measure} {value:.1e}" for measure, value in row.items()))
    print(json.dumps({"benchmark": "metric_parity", "largest_difference": rows, "versions": versions()}))


def differences(qrels: Qrels, run: Run) -> dict[str, float]:
    """The largest difference over all judged queries, by library and measure; a query without hits counts as 0."""
    ours = evaluate_run(qrels, run, drop_identical_ids=False)
    measures = {"ndcg_cut.10", "recall.100,1000", "map"}
    trec = pytrec_eval.RelevanceEvaluator(qrels, measures).evaluate(
        {query: hits for query, hits in run.items() if hits}
    )
    found = {
        f"pytrec_eval {name}": max(abs(ours[query][name] - trec.get(query, {}).get(key, 0.0)) for query in qrels)
        for name, key in TREC_EVAL.items()
    }
    values = {(one.query_id, one.measure): one.value
              for one in ir_measures.iter_calc(list(IR_MEASURES.values()), qrels, run)}  # fmt: skip
    return found | {
        f"ir_measures {name}": max(abs(ours[query][name] - values.get((query, measure), 0.0)) for query in qrels)
        for name, measure in IR_MEASURES.items()
    }


def ties() -> tuple[Qrels, Run]:
    """Four scores for 250 documents a query: the order within a score decides the figures."""
    rng = random.Random(0)
    queries = [f"q{number}" for number in range(60)]
    qrels = {query: {str(rng.randrange(300)): rng.choice([0, 1, 1, 2, 3]) for _ in range(20)} for query in queries}
    run = {query: {str(key): float(rng.randrange(4)) for key in rng.sample(range(300), 250)} for query in queries}
    return qrels, run


if __name__ == "__main__":
    main()
