"""The quickstart's arms over several seeds: mean and spread on the sample collection, and zero-shot on other folders.

    python benchmarks/quickstart_seeds.py --output DIR [--seeds 5] [--data FOLDER...]

The models are the quickstart's own, trained on the sample collection's train split. What is in DIR is not done again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from st_aggretriever import build_aggretriever, load_aggretriever
from st_aggretriever.evaluation.beir import evaluate_beir
from st_aggretriever.evaluation.bm25 import evaluate_bm25
from st_aggretriever.quickstart import ARMS, asset, quickstart
from st_aggretriever.versions import versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", nargs="*", default=[])
    args = parser.parse_args()

    figures: dict[str, dict[str, list[float]]] = {}  # collection -> arm -> nDCG@10 of each seed
    for seed in range(args.seeds):
        home = args.output / str(seed)
        for line in quickstart(output=str(home), seed=seed):
            print(line, flush=True)
        for key, arm in ARMS.items():
            found = json.loads((home / f"{key}.json").read_text())["figures"]
            figures.setdefault("sample", {}).setdefault(arm.name, []).append(found["nDCG@10"])
            for data in args.data:
                value = zero_shot(home, key, data, seed)
                figures.setdefault(Path(data).name, {}).setdefault(arm.name, []).append(value)
    bm25 = {Path(data).name: evaluate_bm25(data)["figures"]["nDCG@10"] for data in args.data}
    bm25["sample"] = evaluate_bm25(asset("sample"))["figures"]["nDCG@10"]
    for collection, arms in figures.items():
        print(f"\n{collection}, nDCG@10 over {args.seeds} seeds\n{'BM25':16}{bm25[collection]:8.3f}")
        for name, values in arms.items():
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"{name:16}{statistics.fmean(values):8.3f} +- {spread:.3f}   {min(values):.3f} to {max(values):.3f}")
    print(json.dumps({"nDCG@10": figures, "bm25": bm25, "versions": versions()}))


def zero_shot(home: Path, key: str, data: str, seed: int) -> float:
    """nDCG@10 of an arm on a collection that it was not trained for."""
    path = home / f"{key}-{Path(data).name}.json"
    if not path.exists():
        trained = ARMS[key].trained
        model = load_aggretriever(home / key) if trained else build_aggretriever(asset("mini"), seed=seed).float()
        evaluate_beir(model, data, output=path)
    return json.loads(path.read_text())["figures"]["nDCG@10"]


if __name__ == "__main__":
    main()
