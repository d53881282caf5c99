"""A LightningModule whose products run in 8 bits, with checkpoints that resume bit for bit.

    python examples/lightning_module.py

Two lines differ from the plain script: the import and the callback. It trains on the 1,797 handwritten digits that come
with bitplan. It needs the package lightning.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bitplan.integrations.lightning import BitplanCallback
from bitplan.lab.tasks.images import digits


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Any:
        return self.net(images)

    def training_step(self, batch: Any, index: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: Any, index: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("loss", nn.functional.cross_entropy(logits, labels))
        self.log("accuracy", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def loader(held_out: bool) -> DataLoader[Any]:
    """Grey pixels between 0 and 1, and the digits."""
    data = digits()
    part = data.held_out if held_out else data.training
    images = part.take(torch.arange(len(part)))[:, :1]
    rows = TensorDataset(images.flatten(1).float() / images.max(), part.labels)
    return DataLoader(rows, batch_size=128, shuffle=not held_out)


def main() -> None:
    seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=20,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[BitplanCallback("int8-linear")],
        )
        trainer.fit(Digits(), loader(held_out=False), loader(held_out=True))
    metrics = trainer.callback_metrics
    print(f"held out: loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
