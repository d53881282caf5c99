"""Which tensors are gone through in parts, and that the parts are all of them. Fake tensors are on a GPU that is not."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bitplan.tensor_parts import part_size_of, parts_of, sparing_memory


@pytest.mark.parametrize("elements", [0, 1, (1 << 15) + 1, (1 << 20) + 3])
def test_the_parts_are_the_tensor(elements: int) -> None:
    x = torch.arange(elements, dtype=torch.float32)
    assert torch.equal(torch.cat([part.flatten() for part in parts_of(x)]), x)
    assert all(part.untyped_storage()._cdata == x.untyped_storage()._cdata for part in parts_of(x))


def test_what_is_not_in_the_order_of_its_memory_is_one_part() -> None:
    x = torch.zeros(1 << 10, 1 << 10)
    assert len(parts_of(x)) > 1
    assert parts_of(x.t())[0].shape == x.t().shape


def test_a_gpu_takes_parts_where_memory_is_to_be_spared_and_large_ones() -> None:
    with FakeTensorMode():
        small, large = (torch.empty(1 << bits, device="cuda") for bits in (20, 24))
        assert part_size_of(large) == large.numel()
        with sparing_memory():
            assert part_size_of(small) == small.numel()
            assert len(parts_of(large)) == 4
            with sparing_memory():
                pass
            assert len(parts_of(large)) == 4, "an inner one does not end the outer one"
        assert len(parts_of(large)) == 1


def test_another_thread_spares_nothing() -> None:
    found: list[int] = []
    with FakeTensorMode():
        large = torch.empty(1 << 24, device="cuda")

    def look() -> None:
        found.append(part_size_of(large))

    with sparing_memory():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [1 << 24]
