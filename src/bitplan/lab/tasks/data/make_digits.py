"""How ``digits.npz`` was made, once, on a machine with scikit-learn (which bitplan itself does not need)."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def main() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.savez_compressed(
        Path(__file__).with_name("digits.npz"),
        images=digits.images.astype(np.uint8),  # 1797 x 8 x 8, values 0..16
        labels=digits.target.astype(np.uint8),
    )


if __name__ == "__main__":
    main()
