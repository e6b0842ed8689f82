"""tune: the function that users call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask
from flexattn.call.call import Call, Mod
from flexattn.call.pose import pose
from flexattn.engines import triton
from flexattn.engines.choice import engine_of
from flexattn.errors import ArgumentError, OptionError, UnsupportedError, message
from flexattn.options import tile_options
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.uncompiled import uncompiled
from flexattn.tuning.report import Tuning
from flexattn.tuning.search import TUNED, Effort, tune_problem


@uncompiled
@undisturbed("tune")
def tune(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    kernels: Sequence[str] = TUNED,
    seconds: float = 120.0,
    processes: int | None = None,
    rounds: int = 10,
    remember: bool = True,
) -> Tuning:
    """Find the fastest tiles for the Triton kernels of this call on this GPU, and save them.

    Later calls, in this and other processes, use a saved tile if architecture, kernel, dtype, head dims, kind of
    score_mod and presence of a mask are the same. `explain` prints where a tile comes from. The backward is measured
    too if a tensor requires a gradient. Calling tune again continues from the best tiles. Hopper kernels and the
    one-kernel backward of small problems have one tile each and are not tuned.

    Args:
        query, key, value, score_mod, block_mask, scale, enable_gqa: as in flex_attention. They are not changed.
        kernel_options: as in flex_attention, except options that choose a tile. {"BACKEND": "TRITON"} tunes the kernels
            that Hopper kernels would replace.
        kernels: which to tune, of forward, backward_dq and backward_dkdv.
        seconds: time limit for compiling candidates. Those that are not ready in time are skipped.
        processes: number of compile processes. If None, one per core, at most 8.
        rounds: how often each candidate is timed. Medians are compared.
        remember: save the best tiles in tiles.json in the kernel cache folder. Delete the file to forget them.

    Raises:
        What flex_attention raises, UnsupportedError if no Triton kernel runs, OptionError for an option that chooses a
        tile, and ArgumentError for other kernels or if tiles.json cannot be read.

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(1, 2, 64, 32, device="cuda", requires_grad=True)  # doctest: +SKIP
        >>> print(tune(q, k, v))  # doctest: +SKIP
    """
    if unknown := set(kernels) - set(TUNED):
        raise ArgumentError(message("kernels", sorted(unknown), f"names of {', '.join(TUNED)}", "Leave them out."))
    problem = pose(Call(query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options))
    if engine_of(problem) is not triton:
        found = f"{str(query.dtype).removeprefix('torch.')} {tuple(query.shape)} on {query.device}"
        fix = "Pass tensors of float32 or less on a GPU."
        raise UnsupportedError(message("query", found, "one that a Triton kernel supports", fix))
    if names := tile_options(problem.options):
        fix = "Leave it out. tune finds the tile."
        raise OptionError(message("kernel_options", ", ".join(names), "no option that chooses a tile", fix))
    effort = Effort(tuple(kernels), seconds, processes or min(8, os.cpu_count() or 1), rounds)
    return tune_problem(problem, effort, remember)
