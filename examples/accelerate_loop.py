"""A training loop of Accelerate, with gradient accumulation and every linear layer in 8 bits.

    python examples/accelerate_loop.py

Three lines differ from the plain script: the import, prepare() in the place of accelerator.prepare(), and detach() at
the end. It trains on the 1,797 handwritten digits that come with bitplan. It needs the package accelerate.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bitplan.integrations.accelerate import prepare
from bitplan.lab.tasks.images import digits


def images_and_labels(held_out: bool) -> tuple[Tensor, Tensor]:
    """Grey pixels between 0 and 1, and the digits."""
    data = digits()
    part = data.held_out if held_out else data.training
    images = part.take(torch.arange(len(part)))[:, :1]
    return images.flatten(1).float() / images.max(), part.labels


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(*images_and_labels(held_out=False)), batch_size=64, shuffle=True)
    model, optimizer, loader, run = prepare(accelerator, model, optimizer, "int8-linear", loader)
    for _ in range(20):
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
    run.detach()
    images, labels = images_and_labels(held_out=True)
    with torch.no_grad():
        logits = model(images)
    loss, accuracy = nn.functional.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()
    print(f"held out: loss {loss:.4f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
