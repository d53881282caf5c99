"""Earlier results that an experiment continues: their runs are not repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitplan.errors import BitplanError

#: The formats in which products other than convolutions are computed in float32. A result without it has the former.
FLOAT32, TF32 = "float32", "TF32"
#: Experiments with convolutions only (besides a classifier), which torch computes in TF32 by default.
_CONVOLUTIONS = ("cifar", "detection")


class Earlier:
    """A result of the same experiment, on the same kind of device and with the same torch; or none."""

    def __init__(
        self,
        file: Path | None,
        name: str,
        machine: Mapping[str, Any],
        versions: Mapping[str, Any],
        products: str = FLOAT32,
    ) -> None:
        self.content: dict[str, Any] = {}
        if file is None:
            return
        if not file.is_file():
            raise BitplanError(f"there is no result {file}: leave out --go-on-from, and run all of it.")
        self.content = json.loads(file.read_text(encoding="utf-8"))
        was = (self.content["experiment"], _device(self.content["machine"]), self.content["versions"]["torch"])
        if was != (name, _device(machine), versions["torch"]):
            raise BitplanError(
                f"{file} is a result of {was[0]} on {was[1]} with torch {was[2]}: leave out --go-on-from here."
            )
        before = self.content.get("float32_products", FLOAT32)
        if before != products and name not in _CONVOLUTIONS:
            raise BitplanError(
                f"{file} has products in {before}, and here they are in {products}: leave out --go-on-from here."
            )

    def plans(self, folder: str, settings: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The records of plans that were run with these settings, possibly with fewer seeds than needed."""
        study = self._study(folder)
        recorded_settings = [setting for setting in settings if not setting.startswith(("data=", "pretrained="))]
        if study.get("settings") != recorded_settings:
            return {}
        records = {}
        for plan in study["plans"]:
            by_seed = {key: {int(seed): value for seed, value in plan[key].items()} for key in ("values", "metrics")}
            records[plan["plan"]] = {**plan, **by_seed}
        return records

    def curves(self, folder: str) -> dict[str, dict[int, list[list[float]]]]:
        """Plan -> seed -> pairs of a step and the metric there."""
        curves = self._study(folder).get("curves", {})
        return {label: {int(seed): curve for seed, curve in by_seed.items()} for label, by_seed in curves.items()}

    def record(self) -> dict[str, str]:
        """Its entry in a result."""
        return {"goes_on_from": self.content["command"]} if self.content else {}

    def _study(self, folder: str) -> dict[str, Any]:
        named = {study["study"].replace(",", "").replace(" ", "-"): study for study in self.content.get("studies", ())}
        return named.get(folder, {})


def _device(machine: Mapping[str, Any]) -> str:
    return str(machine.get("gpu") or machine["cpu"])
