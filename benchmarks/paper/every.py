"""All nine tables, one after the other; with --dry-run what they cost together, shared models once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ablation
import balance
import dimensions
import estimate
import hard_negatives
import latency
import main
import small_data
import sparse
import table
import zero_shot
from runner import Runner
from scales import SCALES

TABLES: dict[ModuleType, Any] = {
    main: None,
    zero_shot: None,
    small_data: None,
    hard_negatives: None,
    balance: None,
    ablation: None,
    dimensions: dimensions.analysis,
    latency: latency.measured,
    sparse: None,
}


def run(argv: list[str] | None = None) -> None:
    args = table.parse(argv)
    scale = SCALES[args.scale]
    made = [module.make(scale) for module in TABLES]
    print("\n".join(estimate.dry_run(scale, made, args.results, details=args.dry_run)))
    if args.dry_run:
        return
    if args.measure:
        runner = Runner(scale, args.data, args.models, args.work, args.results)
        for made_table in made:
            estimate.measure(runner, made_table, args.results)
        return
    for module, more in TABLES.items():
        table.main(module.make, more, argv)


if __name__ == "__main__":
    run()
