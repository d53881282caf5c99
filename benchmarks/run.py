"""Speed and memory of bitplan beside every installed peer, measured on this machine.

python benchmarks/run.py --help
python benchmarks/run.py memory --model resnet50 --device cuda -o memory.json
"""

from __future__ import annotations

import sys
from pathlib import Path

# The checkout, so that the package ``benchmarks`` is found when this file is started as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.commands import main

if __name__ == "__main__":
    main()
