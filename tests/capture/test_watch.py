from __future__ import annotations

import torch
from torch.nn import functional as F

from bitplan.capture.recording import ProductWatch


def test_products_are_noticed_under_whatever_name_they_were_called() -> None:
    x = torch.randn(2, 3, 4)
    with ProductWatch() as watch:
        F.linear(x, torch.randn(5, 4))
        torch.einsum("bij,bkj->bik", x, x)
        F.conv1d(x, torch.randn(2, 3, 1))
    assert watch.seen == ["addmm" if "addmm" in watch.seen else "mm", "bmm", "convolution"]


def test_what_is_no_product_is_not_noticed_and_results_are_the_same() -> None:
    x = torch.randn(3, 4)
    with ProductWatch() as watch:
        inside = torch.softmax(x * 2, -1)
    assert watch.seen == []
    assert torch.equal(inside, torch.softmax(x * 2, -1))
