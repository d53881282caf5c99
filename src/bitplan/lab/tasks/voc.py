"""Object detection on your own images, or on a public set, with boxes in VOC's layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bitplan.errors import TaskError
from bitplan.lab.sources.voc import read_voc
from bitplan.lab.tasks.detection import Detection, DetectionSettings
from bitplan.lab.tasks.scenes import SceneData


@dataclass(frozen=True)
class VocSettings(DetectionSettings):
    """Settings of the location of the images, and of the held-out ones."""

    #: A folder, or a .tar, with JPEGImages and Annotations.
    data: str = ""
    #: The training list and the held-out list in ImageSets/Main.
    training: str = ""
    held_out: str = ""


class Voc(Detection):
    """Objects in images, in VOC's layout."""

    name = "voc"
    summary = "objects in images, in VOC's layout"
    settings_class = VocSettings
    settings: VocSettings

    def load(self) -> SceneData:
        recipe = self.settings
        if not recipe.data:
            raise TaskError("the task voc has no images of its own: set data= to a folder or a .tar in VOC's layout.")
        return read_voc(Path(recipe.data).expanduser(), recipe.size, recipe.training, recipe.held_out)
