"""Zero-shot evaluation of an Aggretriever on folders in BEIR's layout, beside BM25 and compared with it query by query.

    python examples/evaluate_beir.py --model my-agg --data scifact my/folder --output figures

Writes figures and run of each folder and system into OUTPUT. What is there for the same files and the same model, by
its hash, is not evaluated again. Sets by name, with their rules: st-aggretriever evaluate beir --sets.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from st_aggretriever import load_aggretriever
from st_aggretriever.encoding import model_hash
from st_aggretriever.evaluation.beir import data_checksums, evaluate_beir
from st_aggretriever.evaluation.bm25 import evaluate_bm25
from st_aggretriever.evaluation.compare import compare_runs
from st_aggretriever.evaluation.lengths import set_lengths
from st_aggretriever.readers.text import short_names

METRICS = ("nDCG@10", "R@100")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--data", nargs="+", required=True, metavar="FOLDER", help="folders in BEIR's layout")
    parser.add_argument("--output", required=True, type=Path, help="folder for figures and runs")
    parser.add_argument("--split", default="test", help="which qrels (default: %(default)s)")
    parser.add_argument("--query-length", type=int, help="tokens (default: the model's, 32 as built)")
    parser.add_argument("--document-length", type=int, help="tokens (default: the model's, 128 as built)")
    parser.add_argument("--batch-size", type=int, default=32, help="texts a batch (default: %(default)s)")
    args = parser.parse_args()
    try:
        evaluate(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"evaluate_beir: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        print(f"evaluate_beir: interrupted; the same command goes on from {args.output}", file=sys.stderr)
        raise SystemExit(130) from None


def evaluate(args: argparse.Namespace) -> None:
    folders = list(dict.fromkeys(str(Path(folder).resolve()) for folder in args.data))
    sums = {folder: data_checksums(folder, args.split) for folder in folders}  # before the model loads
    names = {folder: name.replace("/", "-") for folder, name in short_names(folders).items()}
    twice = [name for name in names.values() if list(names.values()).count(name) > 1]
    if twice:
        raise ValueError(f"two of the folders would both be called {twice[0]}. Rename one.")
    args.output.mkdir(parents=True, exist_ok=True)
    model: Any = load_aggretriever(args.model)
    set_lengths(model, args.query_length, args.document_length)
    made_by = {"bm25": "bm25", "model": f"model-{model_hash(model)[:12]}"}

    rows: dict[str, dict[str, dict[str, float]]] = {"bm25": {}, "model": {}}
    runs: dict[str, list[Path]] = {folder: [] for folder in folders}
    for folder in folders:
        for system, made in made_by.items():
            stem = args.output / f"{names[folder]}.{args.split}.{made}"
            figures, run = stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.trec")
            result = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() and run.exists() else {}
            if result.get("checksums") != sums[folder]:
                options: dict[str, Any] = {"split": args.split, "output": figures, "run": run, "overwrite": True}
                if system == "bm25":
                    result = evaluate_bm25(folder, **options)
                else:
                    options |= {"batch_size": args.batch_size, "model_name": args.model}
                    result = evaluate_beir(model, folder, **options)
            rows[system][folder] = result["figures"]
            runs[folder].append(run)

    print(f"{'':24}" + "".join(f"{f'{system} {metric}':>16}" for system in rows for metric in METRICS))
    for folder in (*folders, "mean"):
        which = folders if folder == "mean" else [folder]
        cells = [sum(rows[system][one][metric] for one in which) / len(which) for system in rows for metric in METRICS]
        print(f"{names.get(folder, folder):24}" + "".join(f"{cell:16.4f}" for cell in cells))
    for folder in folders:
        (pair,) = compare_runs(runs[folder], folder, split=args.split)["pairs"]
        print(f"{names[folder]}: model - bm25 {pair['difference']:+.4f}, randomisation p {pair['p_randomisation']:.4g}")


if __name__ == "__main__":
    main()
