"""Where one reader cancels a tensor's saving: what is said of it, held against the bytes that are really kept."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan
from bitplan.analysis.explain import explain
from bitplan.executions.packed.saved_tensors import UnpackedRef
from bitplan.plans import Plan

ROWS, WIDTH = 64, 32
BATCH = torch.randn(ROWS, 8)


class TwoReaders(nn.Module):
    """fc1's result is read by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        return torch.cat([self.fc2(y), self.fc3(y)], dim=1)


def plan_of(*rules: dict[str, Any]) -> Plan:
    return Plan.from_dict({"version": 1, "rules": list(rules)})


def warnings_of(plan: Plan, model: nn.Module, batch: Tensor = BATCH) -> dict[str, str]:
    return {item.site.name: item.warning for item in explain(model, plan, batch) if item.warning is not None}


def bits_kept(plan: Plan, model: nn.Module) -> float:
    """Bits kept of each value of fc1's result, by hooks: all that is saved, but for weights and the batch."""
    mine = {p.untyped_storage()._cdata for p in (*model.parameters(), BATCH)}
    with bitplan.attach(model, plan, example=BATCH, execution="packed") as run:
        held = getattr(run._execution, "packer", None)
        assert held is not None
        plain: dict[int, int] = {}
        pack = held.pack

        def counting(tensor: Tensor) -> Any:
            kept = pack(tensor)
            storage = tensor.untyped_storage()
            if isinstance(kept, UnpackedRef) and storage._cdata not in mine:
                plain[storage._cdata] = storage.nbytes()
            return kept

        held.pack = counting  # type: ignore[method-assign]
        output = model(BATCH)
        total = held.packed_bytes + sum(plain.values())
        output.sum().backward()
    return total * 8 / (ROWS * WIDTH)


ACTIVATION = {"match": "fc1", "activation": "e4m3"}
CASES = {
    "one copy of 8 bits": ([ACTIVATION], 8, None),
    "the same grid is the same copy": ([ACTIVATION, {"match": "fc2", "wgrad.x": "e4m3"}], 8, None),
    "a bf16 copy beside it": (
        [ACTIVATION, {"match": "fc2", "wgrad.x": "bf16"}],
        24,
        "packed execution keeps 24 bits of each value, not 8: 16 as wgrad.x of fc2/linear.0 (bf16) and 8 as it is, "
        "for fc3/linear.0; give wgrad.x of fc2/linear.0 8 bits, too.",
    ),
    "bf16 copies alone": (
        [ACTIVATION, {"match": ["fc2", "fc3"], "wgrad.x": "bf16"}],
        32,
        "packed execution keeps 32 bits of each value, not 8: 16 as wgrad.x of fc2/linear.0 (bf16) and 16 as wgrad.x "
        "of fc3/linear.0 (bf16); give wgrad.x of fc2/linear.0 8 bits, too.",
    ),
    "a slot that is left alone": (
        [{"match": "fc2", "fprop.x": "e4m3"}],
        32,
        "packed execution keeps 32 bits of each value, not 8: 32 as it is, for fc2/linear.0, fc3/linear.0; round the "
        "activation to 8 bits, or wgrad.x of its readers.",
    ),
    "one of two readers rounds": (
        [{"match": "fc2", "x": "e4m3"}],
        40,
        "packed execution keeps 40 bits of each value, not 8: 8 as fprop.x of fc2/linear.0 (e4m3) and 32 as it is, for "
        "fc3/linear.0; round the activation to 8 bits, or wgrad.x of its readers.",
    ),
    "a copy of 8 bits for each is half of 32": ([{"match": ["fc2", "fc3"], "x": "e4m3"}], 16, None),
    "16 bits and never fewer": ([{"match": "fc1", "activation": "bf16"}], 16, None),
    "nothing": ([{"match": "*", "grad_activation": "e5m2"}], 32, None),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_is_what_is_kept(case: str) -> None:
    rules, bits, sentence = CASES[case]
    plan = plan_of(*rules)
    expected = {} if sentence is None else {"fc1/linear.0:activation": sentence}
    assert warnings_of(plan, TwoReaders()) == expected
    assert bits_kept(plan, TwoReaders()) == bits


def test_copies_that_add_up_to_the_tensors_own_type_are_told() -> None:
    plan = plan_of({"match": ["fc2", "fc3"], "x": "e4m3"})
    result = warnings_of(plan, TwoReaders().bfloat16(), BATCH.bfloat16())
    (sentence,) = result.values()
    assert sentence.startswith("packed execution keeps 16 bits of each value, not 8: 8 as fprop.x of fc2/linear.0")
    assert sentence.endswith("round the activation instead of each operand, and one copy serves all.")


def test_a_reader_that_is_no_product_shares_the_rounded_copy() -> None:
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2))
    assert not warnings_of(plan_of({"match": "*", "activation": "e4m3"}), model)
    result = warnings_of(plan_of({"match": "*", "activation": "e4m3"}, {"match": "2", "wgrad.x": "bf16"}), model)
    assert list(result) == ["1/gelu.0:activation"]
    assert (
        "keeps 16 bits of each value, not 8: 16 as wgrad.x of 2/linear.0 (bf16); give" in result["1/gelu.0:activation"]
    )


def test_data_live_anyway() -> None:
    assert not warnings_of(plan_of({"match": "0", "fprop.x": "e4m3"}), nn.Sequential(nn.Linear(8, 4), nn.ReLU()))
