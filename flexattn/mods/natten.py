"""Neighborhood attention (Hassani et al., 2023): each pixel attends to the pixels around it."""

from __future__ import annotations

from torch import Tensor

from flexattn.errors import ArgumentError, message
from flexattn.mods.kinds import MaskMod, named


def natten_2d(height: int, width: int, kernel: int | tuple[int, int]) -> MaskMod:
    """Attend to a window of `kernel` (height, width; odd, at most the image's) of an image stored row by row.

    >>> import torch
    >>> i = torch.arange(9)
    >>> natten_2d(3, 3, (1, 3))(i, i, i[:1, None], i).int().tolist()  # the first pixel sees its row
    [[1, 1, 1, 0, 0, 0, 0, 0, 0]]
    """
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    _check("natten_2d", (height, width), kernel)
    reach_y, reach_x = (size // 2 for size in kernel)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near_y = _near(q_idx // width, kv_idx // width, height, reach_y)
        return near_y & _near(q_idx % width, kv_idx % width, width, reach_x)

    return named(mask, f"natten_2d_{kernel[0]}x{kernel[1]}")


def natten_3d(depth: int, height: int, width: int, kernel: int | tuple[int, int, int]) -> MaskMod:
    """Attend to a window of `kernel` (depth, height, width) of a volume stored slice by slice.

    >>> import torch
    >>> i = torch.arange(8)
    >>> natten_3d(2, 2, 2, 1)(i, i, i[:1, None], i).int().tolist()
    [[1, 0, 0, 0, 0, 0, 0, 0]]
    """
    kernel = (kernel, kernel, kernel) if isinstance(kernel, int) else kernel
    _check("natten_3d", (depth, height, width), kernel)
    reach_z, reach_y, reach_x = (size // 2 for size in kernel)
    area = height * width

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near_z = _near(q_idx // area, kv_idx // area, depth, reach_z)
        near_y = _near(q_idx // width % height, kv_idx // width % height, height, reach_y)
        return near_z & near_y & _near(q_idx % width, kv_idx % width, width, reach_x)

    return named(mask, f"natten_3d_{kernel[0]}x{kernel[1]}x{kernel[2]}")


def _near(q: Tensor, kv: Tensor, size: int, reach: int) -> Tensor:
    """Return whether kv is in the window of q, which is centered on q, or shifted to stay inside the border."""
    return (q.clamp(reach, size - 1 - reach) - kv).abs() <= reach


def _check(name: str, sizes: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    if len(kernel) != len(sizes) or any(k < 1 or k % 2 == 0 or k > size for k, size in zip(kernel, sizes, strict=True)):
        raise ArgumentError(message(f"{name}, kernel", kernel, f"odd sizes of at most {sizes}", "Use odd sizes."))
