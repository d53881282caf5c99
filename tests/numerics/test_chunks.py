"""Which tensors are gone through in parts, and that the parts are all of them; fake tensors stand in for a GPU's."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bitplan.numerics.chunks import chunk_size_of, chunked_on_gpu, chunks_of


@pytest.mark.parametrize("elements", [0, 1, (1 << 15) + 1, (1 << 20) + 3])
def test_the_parts_are_the_tensor(elements: int) -> None:
    x = torch.arange(elements, dtype=torch.float32)
    assert torch.equal(torch.cat([part.flatten() for part in chunks_of(x)]), x)
    assert all(part.untyped_storage()._cdata == x.untyped_storage()._cdata for part in chunks_of(x))


def test_parts_lie_in_memory_one_after_the_other_and_what_has_gaps_is_one_part() -> None:
    x = torch.arange(1 << 20, dtype=torch.float32).view(4, 16, 128, 128)
    for turned in (x, x.permute(0, 3, 1, 2), x.permute(3, 2, 1, 0)):
        assert len(chunks_of(turned)) == 4
        assert torch.equal(torch.cat(chunks_of(turned)), x.flatten())
    assert chunks_of(x[:, ::2])[0].shape == (4, 8, 128, 128)


def test_a_gpu_takes_parts_where_memory_is_to_be_spared_and_large_ones() -> None:
    with FakeTensorMode():
        small, large = (torch.empty(1 << bits, device="cuda") for bits in (20, 24))
        assert chunk_size_of(large) == large.numel()
        with chunked_on_gpu():
            assert chunk_size_of(small) == small.numel()
            assert len(chunks_of(large)) == 4
            with chunked_on_gpu():
                pass
            assert len(chunks_of(large)) == 4, "an inner one does not end the outer one"
        assert len(chunks_of(large)) == 1


def test_another_thread_spares_nothing() -> None:
    result: list[int] = []
    with FakeTensorMode():
        large = torch.empty(1 << 24, device="cuda")

    def look() -> None:
        result.append(chunk_size_of(large))

    with chunked_on_gpu():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert result == [1 << 24]
