"""Neighborhood attention (Hassani et al., 2023): each pixel attends to the pixels around it."""

from __future__ import annotations

from torch import Tensor

from flexattn.errors import ArgumentError, message
from flexattn.mods.arguments import checked_int
from flexattn.mods.kinds import MaskMod, named


def natten_2d(height: int, width: int, kernel: int | tuple[int, int]) -> MaskMod:
    """Attend to a window of `kernel` (height, width; odd, at most the image's) of an image stored row by row.

    >>> import torch
    >>> i = torch.arange(9)
    >>> natten_2d(3, 3, (1, 3))(i, i, i[:1, None], i).int().tolist()  # the first pixel sees its row
    [[1, 1, 1, 0, 0, 0, 0, 0, 0]]
    """
    height, width = _checked_sizes(height=height, width=width)
    window = _checked_kernel("natten_2d", kernel, (height, width))
    reach_y, reach_x = (size // 2 for size in window)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near_y = _near(q_idx // width, kv_idx // width, height, reach_y)
        return near_y & _near(q_idx % width, kv_idx % width, width, reach_x)

    return named(mask, "natten_2d", *window, between="x")


def natten_3d(depth: int, height: int, width: int, kernel: int | tuple[int, int, int]) -> MaskMod:
    """Attend to a window of `kernel` (depth, height, width) of a volume stored slice by slice.

    >>> import torch
    >>> i = torch.arange(8)
    >>> natten_3d(2, 2, 2, 1)(i, i, i[:1, None], i).int().tolist()
    [[1, 0, 0, 0, 0, 0, 0, 0]]
    """
    depth, height, width = _checked_sizes(depth=depth, height=height, width=width)
    window = _checked_kernel("natten_3d", kernel, (depth, height, width))
    reach_z, reach_y, reach_x = (size // 2 for size in window)
    area = height * width

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near_z = _near(q_idx // area, kv_idx // area, depth, reach_z)
        near_y = _near(q_idx // width % height, kv_idx // width % height, height, reach_y)
        return near_z & near_y & _near(q_idx % width, kv_idx % width, width, reach_x)

    return named(mask, "natten_3d", *window, between="x")


def _near(q: Tensor, kv: Tensor, size: int, reach: int) -> Tensor:
    """Return whether kv is in the window of q, which is centered on q, or shifted to stay inside the border."""
    return (q.clamp(reach, size - 1 - reach) - kv).abs() <= reach


def _checked_sizes(**sizes: int) -> tuple[int, ...]:
    return tuple(checked_int(name, size, 1, "It is a size of the grid.") for name, size in sizes.items())


def _checked_kernel(name: str, kernel: int | tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return one size for each dim."""
    argument, fix = f"{name}, kernel", "Use odd sizes."
    given = kernel if isinstance(kernel, (tuple, list)) else (kernel,) * len(sizes)
    window = tuple(checked_int(argument, size, 1, fix) for size in given)
    if len(window) != len(sizes) or any(k % 2 == 0 or k > size for k, size in zip(window, sizes, strict=True)):
        raise ArgumentError(message(argument, window, f"odd sizes of at most {sizes}", fix))
    return window
