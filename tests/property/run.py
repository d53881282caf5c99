"""Random models under random plans, by the thousand; failing cases are shrunk and printed as source code.

python tests/property/run.py --cases 5000 --seed 0
python tests/property/run.py --case 1234 --compiled aot_eager
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from random_models import draw
from shrinking import outcome_of, report, shrink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--case", type=int, help="one case only, by its seed")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--compiled", help="also compile, by this backend: aot_eager or inductor")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [options.case] if options.case is not None else range(options.seed, options.seed + options.cases)
    counts: Counter[str] = Counter()
    start = time.monotonic()
    for seed in seeds:
        if time.monotonic() - start > options.seconds:
            break
        case = draw(seed)
        outcome, message = outcome_of(case, options.compiled)
        counts[outcome] += 1
        if outcome == "FAILED":
            smallest = case if options.no_shrink else shrink(case, options.compiled, message)
            print(report(smallest, message), flush=True)
        elif options.case is not None:
            print(report(case, f"{outcome} {message}"))
    print(dict(counts), f"{time.monotonic() - start:.0f} s")
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
