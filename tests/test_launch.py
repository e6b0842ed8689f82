"""What launches are made of, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flexattn.machine import triton_versions
from flexattn.machine.triton_versions import FlatLaunch
from flexattn.runtime.known import KnownKernels, Step, empty_of
from flexattn.runtime.launch import DescriptorLayout

pytest.importorskip("triton")


class Recording:
    """A kernel that keeps what it is launched with."""

    def __init__(self) -> None:
        self.expanded: list[tuple[int, Any]] = []
        self.launched: list[Any] = []

    def flat(self) -> FlatLaunch:
        def expand(n: int, descriptor: Any) -> list[Any]:
            self.expanded.append((n, descriptor))
            return [f"map {n} of {descriptor.base.data_ptr()}", *descriptor.shape]

        return FlatLaunch(self._launch_flat, lambda *launch: launch, expand)

    def _launch_flat(self, programs: int, stream: int, arguments: Sequence[Any]) -> None:
        self.launched.append((programs, list(arguments)))

    def launch(self, programs: int, arguments: tuple[Any, ...]) -> None:
        self.launched.append((programs, arguments))


def kernels_of(kernel: Any) -> KnownKernels:
    form = DescriptorLayout(torch.float32, (100, 64), (64, 1))
    described = ((1, 0, form, (64, 64)), (3, 1, form, (32, 64)))
    return KnownKernels(
        (Step(kernel, 7, ("a", None, 5, None, None, "z"), ((4, 2),), described),), (), torch.Tensor.data_ptr,
        empty_of(torch.device("cpu")), on_gpu=False,
    )  # fmt: skip


def test_a_descriptor_is_expanded_once_for_each_address() -> None:
    kernel = Recording()
    known = kernels_of(kernel)
    for pointers in ([64, 128, 256], [64, 128, 512], [64, 192, 256]):
        known.run(pointers, -1)
    found = [(n, d.base.data_ptr(), d.shape, d.strides, d.block_shape) for n, d in kernel.expanded]
    assert found == [
        (0, 64, [100, 64], [64, 1], [64, 64]), (1, 128, [100, 64], [64, 1], [32, 64]),
        (1, 192, [100, 64], [64, 1], [32, 64]),
    ]  # fmt: skip
    first, last = ["map 0 of 64", 100, 64], ["map 1 of 128", 100, 64]
    assert kernel.launched[:2] == [(7, ["a", *first, 5, *last, pointer, "z"]) for pointer in (256, 512)]
    assert kernel.launched[2] == (7, ["a", *first, 5, "map 1 of 192", 100, 64, 256, "z"])


def test_descriptors_of_many_addresses_are_dropped() -> None:
    kernel = Recording()
    known = kernels_of(kernel)
    for address in (*range(64, 64 * 200, 64), 64):
        known.run([address, 64, 64], -1)
    assert [d.base.data_ptr() for n, d in kernel.expanded if n == 0].count(64) == 2


def test_a_profiler_of_kernels_sees_whole_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    kernel = Recording()
    kernels_of(kernel).run([64, 128, 256], -1)
    ((programs, arguments),) = kernel.launched
    assert programs == 7 and arguments[4] == 256 and not kernel.expanded
    assert [arguments[i].base.data_ptr() for i in (1, 3)] == [64, 128]


@pytest.mark.parametrize("D", [1, 64, 130])
def test_a_dim_of_one_element_has_a_stride_that_tma_takes(D: int) -> None:
    window = torch.empty(2, 1, 50, 144, dtype=torch.float16)[:1, :, :40, :D]  # rows on the grid of 16 bytes
    form = DescriptorLayout.of(window)
    assert form.shape == (1, 1, 40, D) and form.strides[2:] == (144, 1)
    assert all(stride % 8 == 0 and stride >= D for stride in form.strides[:2])
    found = form.descriptor(window.data_ptr(), (1, 1, 64, 16))
    assert found.base.data_ptr() == window.data_ptr() and found.base.dtype == torch.float16


def test_a_flat_launch_passes_what_triton_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    made: list[int] = []

    def expand(descriptor: Any, meta: Any) -> list[Any]:
        made.append(meta["of"])
        return [f"map {descriptor.base.data_ptr()} {meta['of']}", *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", expand)
    tile = "tensordesc<fp32[64, 64],#nvmma>"
    signature = {"a": "*fp32", "x": tile, "n": "i32", "y": tile, "m": "i32"}
    inner = driver.wrap_handle_tensordesc(lambda *arguments: arguments, signature, [{"of": 7}, {"of": 8}])
    x = torch.empty(64, 64)
    one = DescriptorLayout.of(x).descriptor(x.data_ptr(), (64, 64))
    raw, expanded = triton_versions.descriptor_launcher(inner)
    flat = [1, *expanded(0, one), 2, *expanded(1, one), 3]
    assert made == [7, 8]
    arguments = (1, one, 2, one, 3)
    if hasattr(driver, "_BASE_ARGS_FORMAT_LEN"):  # Triton 3.6: the arguments of the kernel are those of the launcher
        base = range(driver._BASE_ARGS_FORMAT_LEN)
        assert raw(*base, *flat) == inner(*base, *arguments)
    else:
        assert raw("base", flat) == inner("base", arguments)


def test_a_launcher_without_descriptors_is_called_as_it_is() -> None:
    launch = lambda *arguments: arguments  # noqa: E731
    assert triton_versions.descriptor_launcher(launch)[0] is launch
