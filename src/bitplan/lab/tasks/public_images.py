"""Image classification on public sets, from a local folder or downloaded by torchvision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from bitplan.errors import TaskError
from bitplan.lab.sources.files import read_set, with_torchvision
from bitplan.lab.sources.images import (
    CIFAR10,
    CIFAR100,
    DEBIAN,
    SOUGHT,
    CifarFiles,
    read_cifar,
    read_fashion_mnist,
    read_folder,
    sought,
)
from bitplan.lab.sources.images import CLASSES as FASHION
from bitplan.lab.tasks.images import ImageClassification, ImageSettings, PictureData


@dataclass(frozen=True)
class PublicImageSettings(ImageSettings):
    """Settings of the location of the files."""

    #: The folder with the set's own files.
    data: str = ""
    #: Download them with torchvision.
    download: bool = False


class PublicImages(ImageClassification):
    """A set whose shapes are known without its files, so that sites, plans and costs need no download."""

    settings_class: ClassVar[type[PublicImageSettings]] = PublicImageSettings
    settings: PublicImageSettings
    known_classes: ClassVar[int]
    known_size: ClassVar[int]

    @property
    def classes(self) -> int:
        return self.known_classes

    def example(self) -> tuple[Tensor, Tensor]:
        count, size = self.settings.batch, self.known_size
        return torch.zeros(count, 3, size, size), torch.zeros(count, dtype=torch.long)

    def _downloader(self, name: str) -> Callable[[Path], None] | None:
        return partial(with_torchvision, name) if self.settings.download else None


class Cifar10(PublicImages):
    """CIFAR-10: 50,000 and 10,000 photographs of 32x32 pixels."""

    name = "cifar10"
    summary = "CIFAR-10 photographs"
    files: ClassVar[CifarFiles] = CIFAR10
    known_classes = 10
    known_size = 32

    def load(self) -> PictureData:
        fetch = self._downloader(self.files.name.replace("-", ""))
        return read_set(sought(self.files), partial(read_cifar, self.files), self.settings.data, download=fetch)


class Cifar100(Cifar10):
    """CIFAR-100: the same sizes, a hundred classes."""

    name = "cifar100"
    summary = "CIFAR-100 photographs"
    files = CIFAR100
    known_classes = 100


@dataclass(frozen=True)
class FashionSettings(PublicImageSettings):
    """A short recipe for grey images that are easier than CIFAR's."""

    steps: int = 8000
    evaluate_every: int = 500
    decay: str = "cosine"
    weight_decay: float = 5e-4
    pad: int = 2


class FashionMnist(PublicImages):
    """Fashion-MNIST: 60,000 and 10,000 grey pictures of clothes."""

    name = "fashion-mnist"
    summary = "Fashion-MNIST clothes"
    settings_class = FashionSettings
    known_classes = len(FASHION)
    known_size = 28

    def load(self) -> PictureData:
        fetch = self._downloader("FashionMNIST")
        return read_set(SOUGHT, read_fashion_mnist, self.settings.data, usual=(DEBIAN,), download=fetch)


@dataclass(frozen=True)
class FolderSettings(ImageSettings):
    """Settings of the images' folder and size."""

    #: A folder with a folder of images for each class, or with train and val folders that have these.
    data: str = ""
    #: Side in pixels: the central square of every image is resized to this.
    size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 8:
            raise TaskError(f"size is {self.size}; it must be at least 8 pixels.")


class ImageFolder(ImageClassification):
    """Your own images, in one folder per class."""

    name = "images"
    summary = "images of your own"
    settings_class = FolderSettings
    settings: FolderSettings

    def load(self) -> PictureData:
        if not self.settings.data:
            raise TaskError("the task images has no images of its own: set data= to a folder of class folders.")
        return read_folder(Path(self.settings.data).expanduser(), self.settings.size)
