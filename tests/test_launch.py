"""What launches are made of, without a GPU."""

from __future__ import annotations

import pytest
import torch

from flexattn.runtime.launch import descriptor_maker


def test_a_descriptor_that_is_not_checked_again_says_the_same() -> None:
    tools = pytest.importorskip("triton.tools.tensor_descriptor")
    make = descriptor_maker((1, 1, 64, 64))
    first, second = (torch.empty(1, 3, 100, 64, dtype=torch.bfloat16) for _ in range(2))
    found = [make(x) for x in (first, second, first)]
    assert [id(x.base) for x in found] == [id(first), id(second), id(first)]
    for x in found:
        assert isinstance(x, tools.TensorDescriptor)
        assert (x.shape, x.strides, x.block_shape, x.padding) == (
            [1, 3, 100, 64], [64, 6400, 64, 1], [1, 1, 64, 64], "zero",
        )  # fmt: skip


@pytest.mark.parametrize("D", [1, 64, 130])
def test_a_dim_of_one_element_has_a_stride_that_tma_takes(D: int) -> None:
    pytest.importorskip("triton.tools.tensor_descriptor")
    window = torch.empty(2, 1, 50, 144, dtype=torch.float16)[:1, :, :40, :D]  # rows on the grid of 16 bytes
    found = descriptor_maker((1, 1, 64, 16))(window)
    assert found.shape == [1, 1, 40, D] and found.strides[2:] == [144, 1]
    assert all(stride % 8 == 0 and stride >= D for stride in found.strides[:2])
