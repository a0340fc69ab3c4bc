"""Zero-shot evaluation of an Aggretriever on sets of BEIR by name, or folders in BEIR's layout, beside BM25.

    python examples/evaluate_beir.py --model my-agg --data scifact nfcorpus my/folder --output figures

A name that is no folder is one of BEIR's sets and is downloaded into --data-dir, after its licence is printed. Writes
one JSON file and one run a set and model into OUTPUT; what is there is not evaluated again. Then prints nDCG@10 and
R@100 of each set and their means, and compares the two systems query by query.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from st_aggretriever import load_aggretriever
from st_aggretriever.evaluation.beir import evaluate_beir
from st_aggretriever.evaluation.bm25 import evaluate_bm25
from st_aggretriever.evaluation.compare import compare_runs
from st_aggretriever.evaluation.download import fetch
from st_aggretriever.evaluation.lengths import set_lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--data", nargs="+", required=True, help="names of BEIR's sets, or folders in its layout")
    parser.add_argument("--data-dir", default="beir-data", help="holds or gets the sets by name")
    parser.add_argument("--output", required=True, help="folder for figures and runs")
    parser.add_argument("--split", default="test")
    parser.add_argument("--query-length", type=int, help="tokens (default: the model's, 32 as built)")
    parser.add_argument("--document-length", type=int, help="tokens (default: the model's, 128 as built)")
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    model = load_aggretriever(args.model)
    set_lengths(model, args.query_length, args.document_length)
    folders = [
        path for name in args.data for path in ([Path(name)] if Path(name).is_dir() else fetch(name, args.data_dir))
    ]

    rows: dict[str, dict[str, dict[str, float]]] = {"bm25": {}, "model": {}}
    for folder in folders:
        for system in rows:
            figures = output / f"{folder.name}.{system}.json"
            if not figures.exists():
                options: dict[str, Any] = {"split": args.split, "output": figures, "overwrite": True}
                options["run"] = output / f"{folder.name}.{system}.trec"
                if system == "bm25":
                    evaluate_bm25(folder, **options)
                else:
                    evaluate_beir(model, folder, batch_size=args.batch_size, model_name=args.model, **options)
            rows[system][folder.name] = json.loads(figures.read_text(encoding="utf-8"))["figures"]

    print(f"{'':24}" + "".join(f"{f'{system} {metric}':>16}" for system in rows for metric in ("nDCG@10", "R@100")))
    for name in (*rows["bm25"], "mean"):
        sets = list(rows["bm25"]) if name == "mean" else [name]
        cells = [
            sum(rows[system][one][metric] for one in sets) / len(sets)
            for system in rows
            for metric in ("nDCG@10", "R@100")
        ]
        print(f"{name:24}" + "".join(f"{cell:16.4f}" for cell in cells))
    for folder in folders:
        runs = [output / f"{folder.name}.{system}.trec" for system in rows]
        (pair,) = compare_runs(runs, folder, split=args.split)["pairs"]
        print(f"{folder.name}: model - bm25 {pair['difference']:+.4f}, randomisation p {pair['p_randomisation']:.4g}")


if __name__ == "__main__":
    main()
