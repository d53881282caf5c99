from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitplan.errors import TaskError
from bitplan.lab.models.resnet import imagenet_resnet
from bitplan.lab.models.retinanet import RetinaNet
from bitplan.lab.sources.pretrained import read_backbone


def stored(network: torch.nn.Module, names: str = "own") -> dict[str, torch.Tensor]:
    own = dict(network.state_dict())
    if names == "torchvision":
        own = {name.replace(".shortcut.", ".downsample."): tensor for name, tensor in own.items()}
    return own


@pytest.mark.parametrize("names", ["own", "torchvision"])
def test_a_resnet_s_weights_become_the_backbone_s(tmp_path: Path, names: str) -> None:
    network = imagenet_resnet(18, width=0.25)
    save_file(stored(network, names), tmp_path / "r18.safetensors")
    model = RetinaNet(3, width=0.25)
    read_backbone(tmp_path / "r18.safetensors", model.backbone)
    for name, tensor in model.backbone.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name])


def test_files_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    backbone, file = RetinaNet(3, width=0.25).backbone, tmp_path / "r.safetensors"
    with pytest.raises(TaskError, match=r"there is no file .*r\.safetensors: set weights= to a safetensors file"):
        read_backbone(file, backbone)
    file.write_bytes(b"PK\3\4 a pickle in a zip")
    with pytest.raises(TaskError, match="is not a safetensors file, or is damaged: convert the weights"):
        read_backbone(file, backbone)
    whole = stored(imagenet_resnet(18, width=0.25))
    for change, sentence in (
        ({name: whole[name] for name in whole if name != "conv1.weight"}, r"lacks conv1\.weight"),
        (stored(imagenet_resnet(18, width=0.5)), r"has in another shape (conv1|bn1|layer)"),
        ({**whole, "layer9.weight": torch.ones(1)}, r"has besides layer9\.weight"),
    ):
        save_file(change, file)
        with pytest.raises(TaskError, match=sentence):
            read_backbone(file, backbone)
