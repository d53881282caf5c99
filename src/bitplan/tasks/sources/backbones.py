"""Weights of pretrained backbones, from safetensors files: they hold numbers only, and nothing in them executes."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from bitplan.errors import TaskError


def read_backbone(path: Path, backbone: nn.Module) -> None:
    """Put the weights of a ResNet into `backbone`: by bitplan's own names or by torchvision's.

    A classifier's weights are passed over; everything else must fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise TaskError(f"there is no file {path}: set weights= to a safetensors file of a ResNet-18.")
    try:
        stored = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise TaskError(
            f"{path} is not a safetensors file, or is damaged: convert the weights with safetensors.torch.save_file."
        ) from error
    weights = {_own_name(name): tensor for name, tensor in stored.items() if not name.startswith("fc.")}
    wanted: dict[str, Tensor] = backbone.state_dict()
    # Older files lack the counters of batch norms, which change no number.
    lacking = [name for name in wanted if name not in weights and not name.endswith("num_batches_tracked")]
    foreign = [name for name in weights if name not in wanted]
    other = [name for name in weights if name in wanted and weights[name].shape != wanted[name].shape]
    for what, names in (("lacks", lacking), ("has in another shape", other), ("has besides", foreign)):
        if names:
            raise TaskError(f"{path} {what} {names[0]}: set weights= to a file of a ResNet-18.")
    backbone.load_state_dict(weights, strict=False)


def _own_name(name: str) -> str:
    return name.replace(".downsample.", ".shortcut.")
