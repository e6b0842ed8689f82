"""What launches are made of, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn.machine import triton_versions
from flexattn.runtime.launch import descriptor_maker


def test_a_descriptor_that_is_not_checked_again_says_the_same() -> None:
    tools = pytest.importorskip("triton.tools.tensor_descriptor")
    make = descriptor_maker((1, 1, 64, 64))
    first, second = (torch.empty(1, 3, 100, 64, dtype=torch.bfloat16) for _ in range(2))
    found = [make(x) for x in (first, second, first)]
    assert [x.base.data_ptr() for x in found] == [x.data_ptr() for x in (first, second, first)]
    assert found[0] is found[2] and found[0] is not found[1]
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


def test_descriptors_of_many_addresses_are_dropped() -> None:
    pytest.importorskip("triton.tools.tensor_descriptor")
    make, storage = descriptor_maker((64, 64)), torch.empty(1000, 64)
    first = make(storage[:64])
    for row in range(1, 200):
        make(storage[row : row + 64])
    assert make(storage[:64]) is not first


def test_a_descriptor_is_expanded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our expansion passes the launcher what Triton's does."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    made: list[int] = []

    def expand(descriptor: Any, meta: Any) -> list[Any]:
        made.append(meta)
        return [f"map {descriptor.base.data_ptr()} {meta}", *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", expand)
    signature = {"a": "*fp32", "x": "tensordesc<fp32[64, 64]>", "n": "i32", "y": "tensordesc<fp32[64, 64]>", "m": "i32"}
    inner = driver.wrap_handle_tensordesc(lambda *arguments: arguments, signature, [7, 8])
    makers, x = [descriptor_maker((64, 64)) for _ in range(2)], torch.empty(64, 64)
    raw, expanded = triton_versions.descriptor_launcher(inner)
    for _ in range(3):
        arguments = (1, makers[0](x), 2, makers[1](x), 3)
        found = expanded(arguments)
    assert made == [7, 8], "once per descriptor"
    if hasattr(driver, "_BASE_ARGS_FORMAT_LEN"):  # Triton 3.6: the arguments of the kernel are those of the launcher
        base = range(driver._BASE_ARGS_FORMAT_LEN)
        assert raw(*base, *found) == inner(*base, *arguments)
    else:
        assert raw("base", found) == inner("base", arguments)


def test_a_launcher_without_descriptors_is_called_as_it_is() -> None:
    launch = lambda *arguments: arguments  # noqa: E731
    assert triton_versions.descriptor_launcher(launch) == (launch, None)
