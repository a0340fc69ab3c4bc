"""Equal to the published encoders, number by number: small random checkpoints in both layouts, and their outputs.

    python benchmarks/parity.py GOLDEN

GOLDEN holds ``castorini-KIND`` and ``dhr-KIND`` (KIND bert, distilbert), ``expected-KIND.safetensors`` with the outputs
of the published encoder classes (each text alone), and ``inputs.json``. Each checkpoint goes through ``st-aggretriever
convert`` and ``SentenceTransformer(..., trust_remote_code=True)``: the code that runs is what the saved model carries.

Largest differences are printed. Where the two halves of a slice are equal but for rounding, a sign may turn in a padded
batch; such places would be counted (``signs``) and compared by magnitude.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from st_aggretriever import SliceMaxAgg

DIMS = (128, 256, 640, 768)
ALONE, PADDED = 1e-6, 1e-5
CLS_DIM = 128  # comes first in expected-*.safetensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("golden", type=Path)
    golden = parser.parse_args().golden
    texts = json.loads((golden / "inputs.json").read_text(encoding="utf-8"))["texts"]
    expected = {kind: load_file(golden / f"expected-{kind}.safetensors") for kind in ("bert", "distilbert")}

    print(f"{'slice rule on lexical weights':32}" + "".join(f"{f'D = {dim}':>12}" for dim in DIMS))
    slices = {}
    for kind, tensors in expected.items():
        for name, aggregation in (("agg_full", "signed"), ("agg_semi", "positive")):
            row = {dim: fold_difference(tensors, name, aggregation, dim) for dim in DIMS}
            slices[f"{kind} {name}"] = row
            print(f"{kind + ', ' + name:32}" + "".join(f"{row[dim]:12.1e}" for dim in DIMS))

    print(f"\n{'':38}largest difference      signs  lexical part:")
    print(f"{'vectors':20}{'pooling':>9}{'texts':>9}{'alone':>11}{'padded':>11}{'':7}{'difference':>12}{'of':>11}")
    vectors = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, tensors in expected.items():
            for layout in ("castorini", "dhr"):
                for pooling, suffix in (("mlm", ""), ("tokens", "_skip_mlm")):
                    name = f"{layout}-{kind}"
                    model = converted(golden / name, Path(folder, name + suffix), pooling)
                    for side in ("query", "passage"):
                        row = compare(model, side, texts, tensors[side + suffix].numpy())
                        vectors.append({"checkpoint": name, "pooling": pooling, "texts": side, **row})
                        print(
                            f"{name:20}{pooling:>9}{side:>9}{row['alone']:11.1e}{row['padded']:11.1e}{row['signs']:7d}"
                            f"{row['lexical']:12.1e}{row['lexical_size']:11.1e}"
                        )
        trips = {
            name: round_trip(golden / name, Path(folder, name), Path(folder, f"back-{name}"))
            for name in ("castorini-bert", "castorini-distilbert")
        }
    for name, (equal, count) in trips.items():
        print(f"round trip of {name}: {equal} of {count} tensors equal")

    passed = (
        all(value == 0 for row in slices.values() for value in row.values())
        and all(row["alone"] <= ALONE and row["padded"] <= PADDED for row in vectors)
        and all(equal == count for equal, count in trips.values())
    )
    packages = ("st-aggretriever", "torch", "transformers", "sentence-transformers")
    result = {
        "benchmark": "parity",
        "passed": passed,
        "slices": slices,
        "vectors": vectors,
        "round_trips": trips,
        "versions": {name: version(name) for name in packages},
        "python": platform.python_version(),
    }
    print(json.dumps(result))
    sys.exit(0 if passed else 1)


def fold_difference(tensors: dict[str, torch.Tensor], name: str, aggregation: str, dim: int) -> float:
    lexical = tensors["lex"]
    fold = SliceMaxAgg(lexical.shape[1], dim, aggregation=aggregation, remainder="drop")
    return (fold.aggregate(lexical) - tensors[f"{name}_{dim}"]).abs().max().item()


def command(*arguments: str | Path) -> None:
    """Run the command line, quietly."""
    code = "import sys; from st_aggretriever.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL, env=environment
    )


def converted(source: Path, folder: Path, pooling: str) -> SentenceTransformer:
    command("convert", source, folder, "--pooling", pooling)
    return SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")


def compare(model: SentenceTransformer, side: str, texts: list[str], expected: np.ndarray) -> dict[str, Any]:
    encode = model.encode_query if side == "query" else model.encode_document
    alone = np.stack([encode(text, show_progress_bar=False) for text in texts])
    padded = encode(texts, batch_size=len(texts), show_progress_bar=False)
    turned = (np.sign(padded) != np.sign(expected)) & (abs(abs(padded) - abs(expected)) <= PADDED)
    difference = np.where(turned, abs(abs(padded) - abs(expected)), abs(padded - expected))
    return {
        "alone": float(abs(alone - expected).max()),
        "padded": float(difference.max()),
        "signs": int((turned & (expected != 0)).sum()),
        "lexical": float(abs(alone - expected)[:, CLS_DIM:].max()),
        "lexical_size": float(abs(expected[:, CLS_DIM:]).max()),
    }


def round_trip(source: Path, ours: Path, back: Path) -> tuple[int, int]:
    """Tensors that are equal after castorini -> ours -> castorini, and tensors in all."""
    command("convert", ours, back, "--to", "castorini")
    before, after = (torch.load(path / "pytorch_model.bin", weights_only=True) for path in (source, back))
    equal = sum(name in after and torch.equal(tensor, after[name]) for name, tensor in before.items())
    return equal, len({*before, *after})


if __name__ == "__main__":
    main()
