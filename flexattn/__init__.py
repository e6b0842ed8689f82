"""flexattn compiles attention: score_mod and mask_mod in plain Python become fused, block-sparse kernels.

    mods  ->  trace  ->  differentiate  ->  plan  ->  render (lower)  ->  build  ->  launch

The names of torch.nn.attention.flex_attention are available with the same meaning. `explain` shows each stage of a
call, and `tune` measures the tiles of its kernels.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flexattn.process.collector import paused

with paused():
    from flexattn import layout as layout
    from flexattn import mods as mods
    from flexattn.api import AuxOutput as AuxOutput
    from flexattn.api import AuxRequest as AuxRequest
    from flexattn.api import flex_attention as flex_attention
    from flexattn.block_mask import BlockMask as BlockMask
    from flexattn.call.dropout import dropout_mask as dropout_mask
    from flexattn.counters import Counters as Counters
    from flexattn.counters import counters as counters
    from flexattn.errors import FlexAttentionError as FlexAttentionError
    from flexattn.mask_build.create import create_block_mask as create_block_mask
    from flexattn.mask_build.create import create_mask as create_mask
    from flexattn.mods import and_masks as and_masks
    from flexattn.mods import noop_mask as noop_mask
    from flexattn.mods import or_masks as or_masks
    from flexattn.options import FlexKernelOptions as FlexKernelOptions
    from flexattn.runtime.redone import tiles_redone as tiles_redone
    from flexattn.trace.registered import register_operator as register_operator

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import _DEFAULT_SPARSE_BLOCK_SIZE as _DEFAULT_SPARSE_BLOCK_SIZE
    from torch.nn.attention.flex_attention import _mask_mod_signature as _mask_mod_signature
    from torch.nn.attention.flex_attention import _score_mod_signature as _score_mod_signature

    from flexattn import distributed as distributed
    from flexattn import reference as reference
    from flexattn import sdpa as sdpa
    from flexattn.debugging import DebugTable as DebugTable
    from flexattn.debugging import debug as debug
    from flexattn.explanation import Explanation as Explanation
    from flexattn.explanation import explain as explain
    from flexattn.heat_maps import show as show
    from flexattn.integrations.torch_flex import install_as_torch_flex as install_as_torch_flex
    from flexattn.kv_cache import PagedKVCache as PagedKVCache
    from flexattn.merge import merge_attention as merge_attention
    from flexattn.precompiling import Precompiled as Precompiled
    from flexattn.precompiling import precompile as precompile
    from flexattn.profiling import Profile as Profile
    from flexattn.profiling import profile as profile
    from flexattn.tuning.report import Tuning as Tuning
    from flexattn.tuning.tune import tune as tune
    from flexattn.varlen import varlen_attn as varlen_attn
    from flexattn.varlen import varlen_attn_out as varlen_attn_out
    from flexattn.verification import Verification as Verification
    from flexattn.verification import verify as verify
    from flexattn.weight_statistics import Statistics as Statistics
    from flexattn.weight_statistics import statistics as statistics

__version__ = "0.1.0"

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "Counters",
    "DebugTable",
    "Explanation",
    "FlexAttentionError",
    "FlexKernelOptions",
    "PagedKVCache",
    "Precompiled",
    "Profile",
    "Statistics",
    "Tuning",
    "Verification",
    "and_masks",
    "counters",
    "create_block_mask",
    "create_mask",
    "debug",
    "distributed",
    "dropout_mask",
    "explain",
    "flex_attention",
    "install_as_torch_flex",
    "layout",
    "merge_attention",
    "mods",
    "noop_mask",
    "or_masks",
    "precompile",
    "profile",
    "reference",
    "register_operator",
    "sdpa",
    "show",
    "statistics",
    "tiles_redone",
    "tune",
    "varlen_attn",
    "varlen_attn_out",
    "verify",
]

# Names that no call of flex_attention needs. The module of each is imported when the name is first used. No module of
# this package is called like one of them, except `distributed`, `reference` and `sdpa`, which are modules.
_ON_FIRST_USE = {
    "DebugTable": "flexattn.debugging",
    "Explanation": "flexattn.explanation",
    "PagedKVCache": "flexattn.kv_cache",
    "Precompiled": "flexattn.precompiling",
    "Profile": "flexattn.profiling",
    "Statistics": "flexattn.weight_statistics",
    "Tuning": "flexattn.tuning.report",
    "Verification": "flexattn.verification",
    "debug": "flexattn.debugging",
    "distributed": "flexattn.distributed",
    "explain": "flexattn.explanation",
    "install_as_torch_flex": "flexattn.integrations.torch_flex",
    "merge_attention": "flexattn.merge",
    "precompile": "flexattn.precompiling",
    "profile": "flexattn.profiling",
    "reference": "flexattn.reference",
    "sdpa": "flexattn.sdpa",
    "show": "flexattn.heat_maps",
    "statistics": "flexattn.weight_statistics",
    "tune": "flexattn.tuning.tune",
    "varlen_attn": "flexattn.varlen",
    "varlen_attn_out": "flexattn.varlen",
    "verify": "flexattn.verification",
}

# Types of mods and a number that programs import from PyTorch, although they are private there.
_OF_TORCH = ("_DEFAULT_SPARSE_BLOCK_SIZE", "_mask_mod_signature", "_score_mod_signature")


def __getattr__(name: str) -> Any:
    if name in _OF_TORCH:
        return getattr(import_module("torch.nn.attention.flex_attention"), name)
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_ON_FIRST_USE[name])
    found = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = found
    return found


__dir__ = [*__all__, "__version__"].copy
