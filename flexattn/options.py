"""kernel_options: names, types and checks. Options choose how the result is computed, never what is computed.

A name may start with `fwd_` or `bwd_`. It then applies to that pass only and takes precedence over the plain name.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from functools import cache
from typing import Literal, TypedDict, get_args, get_origin, get_type_hints

from flexattn.errors import DtypeError, OptionError, UnsupportedError, message

Options = tuple[tuple[str, object], ...]  # validated, sorted by name: hashable


class FlexKernelOptions(TypedDict, total=False):
    """PyTorch's FlexKernelOptions, options that PyTorch accepts but does not list, `EXACT` and `BATCH_INVARIANT`."""

    # The engine. AUTO chooses by device and call. HOPPER requests the Hopper kernels, TRITON_DECODE the kernels for
    # short queries, or an error with the reason.
    BACKEND: Literal["AUTO", "TRITON", "HOPPER", "CPU", "FLASH", "TRITON_DECODE"]
    # The bits of a row's results depend only on that row and on what it attends to: docs/numerics.md.
    BATCH_INVARIANT: bool
    EXACT: bool  # tanh, exp etc. as accurate as torch's, no hardware approximations; the default for float32
    PROFILE: bool  # count the clock cycles of the forward's programs: set by flexattn.profile
    FLOAT32_PRECISION: Literal["ieee", "tf32", "tf32x3"]  # of fp32 products; default: torch's setting
    num_warps: int
    num_stages: int
    BLOCK_M: int  # forward tile, queries
    BLOCK_N: int  # forward tile, keys
    BLOCK_M1: int  # dK/dV tile, queries
    BLOCK_N1: int  # dK/dV tile, keys
    BLOCK_M2: int  # dQ tile, queries
    BLOCK_N2: int  # dQ tile, keys
    USE_TMA: bool  # False: do not load tiles through TMA
    FORCE_USE_FLEX_ATTENTION: bool  # do not use the kernels for short queries
    SPLIT_KV: int  # into how many splits the kernels for short queries divide the keys
    # PyTorch's options that follow are accepted and have no effect. They describe PyTorch's own kernels.
    PRESCALE_QK: bool  # scale q instead of the scores
    ROWS_GUARANTEED_SAFE: bool  # each row has a key
    BLOCKS_ARE_CONTIGUOUS: bool  # masks are stored as runs of blocks anyway
    WRITE_DQ: bool  # the plan chooses where captured gradients are summed
    PARTITION_SIZE: int
    SKIP_MASK_SCORE: bool
    num_consumer_groups: int
    num_buffers_warp_spec: int
    kpack: int  # ROCm only, like the next two
    matrix_instr_nonkdim: int
    waves_per_eu: int


# PyTorch's templates list these as options, but they are facts of the call. A user's value could only be wrong.
INTERNAL = frozenset({
    "OUTPUT_LOGSUMEXP", "OUTPUT_MAX", "IS_DIVISIBLE", "SAFE_M_BOUNDARY", "SAFE_N_BOUNDARY", "SAFE_HEAD_DIM", "SM_SCALE",
    "GQA_SHARED_HEADS", "HAS_FULL_BLOCKS", "SPARSE_Q_BLOCK_SIZE", "SPARSE_KV_BLOCK_SIZE", "QK_HEAD_DIM",
    "QK_HEAD_DIM_ROUNDED", "V_HEAD_DIM", "V_HEAD_DIM_ROUNDED",
})  # fmt: skip

# The backward uses the forward's lse as the sum of its own weights, so both passes must sum in the same order.
BOTH_PASSES = frozenset({"BATCH_INVARIANT"})
LARGEST_TILE = 128  # padding, and which loads need no guard, depend on it
# (smallest, largest, whether a power of two) of integer options; "" stands for all others.
_SIZES = {
    "BLOCK_": (16, LARGEST_TILE, True), "num_warps": (1, 32, True), "num_stages": (1, sys.maxsize, False),
    "": (0, sys.maxsize, False),
}  # fmt: skip
_REFUSED = "FLASH"  # PyTorch's BACKEND that is known here, so that the error can say what to write instead
_FIX_BACKEND = 'Leave BACKEND out, or write BACKEND="AUTO".'


@cache
def option_kinds() -> dict[str, object]:
    """Return the type of each option: bool, int or a Literal."""
    return get_type_hints(FlexKernelOptions)


def validate_options(kernel_options: Mapping[str, object] | None) -> Options:
    """Check names and values. Return the options in hashable form, or raise OptionError or DtypeError."""
    if kernel_options is None:
        return ()
    if not isinstance(kernel_options, Mapping):
        found = f"a {type(kernel_options).__name__}"
        raise DtypeError(message("kernel_options", found, "a dict", 'Write kernel_options={"BLOCK_M": 64}.'))
    checked = tuple(sorted((name, _checked(name, value)) for name, value in kernel_options.items()))
    _check_backend(dict(checked))
    return checked


def option(options: Options, name: str, phase: Literal["fwd", "bwd"] | None = None) -> object:
    """Return the value of `name` for that pass, or None if it is not set."""
    if not options:
        return None
    given = dict(options)
    return given.get(f"{phase}_{name}", given.get(name))


def tile_options(options: Options) -> tuple[str, ...]:
    """Return the names of the given options that select a tile."""
    plain = {name: name.removeprefix("fwd_").removeprefix("bwd_") for name, _ in options}
    return tuple(name for name, its in plain.items() if its.startswith("BLOCK_") or its in ("num_warps", "num_stages"))


def selects_portable_kernels(kernel_options: Mapping[str, object] | None) -> bool:
    """Return whether unchecked options ask for kernels that a user tunes, or for another engine than Hopper's."""
    for name, value in (kernel_options or {}).items():
        plain = str(name).removeprefix("fwd_").removeprefix("bwd_")
        if plain.startswith("BLOCK_") or plain in ("num_warps", "num_stages"):
            return True
        if plain == "BACKEND" and value in ("TRITON", "TRITON_DECODE"):
            return True
    return False


def _checked(name: str, value: object) -> object:
    """Return the validated value of one option, in flexattn's form."""
    argument = f"kernel_options[{name!r}]"
    plain = str(name).removeprefix("fwd_").removeprefix("bwd_")
    kind = option_kinds().get(plain)
    if plain in INTERNAL:
        fix = "flexattn derives this from the call: leave it out."
        raise OptionError(message(argument, repr(value), "an option for users", fix))
    if kind is None:
        raise OptionError(_unknown(str(name)))
    if plain in BOTH_PASSES and plain != name:
        raise OptionError(message(argument, repr(value), "an option of both passes", f"Write {plain!r}."))
    if get_origin(kind) is Literal:
        return _choice(argument, value, get_args(kind))
    if kind is bool:
        if not isinstance(value, bool):
            raise DtypeError(message(argument, f"{value!r} ({type(value).__name__})", "a bool", "Write True or False."))
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise DtypeError(message(argument, f"{value!r} ({type(value).__name__})", "an int", "Write a whole number."))
    return _size(argument, plain, value)


def _unknown(name: str) -> str:
    names = tuple(option_kinds())
    prefixed = (*names, *(f"{phase}_{n}" for phase in ("fwd", "bwd") for n in names))
    near = difflib.get_close_matches(name, prefixed, n=1) or difflib.get_close_matches(name.upper(), prefixed, n=1)
    fix = f"Did you mean {near[0]!r}?" if near else "Leave it out."
    return message("kernel_options", f"the unknown name {name!r}", f"names among {', '.join(names)}", fix)


def _choice(argument: str, value: object, choices: tuple[str, ...]) -> object:
    # PyTorch inserts FLOAT32_PRECISION into its template as text, so its value carries its own quotes.
    plain = value.strip("'") if isinstance(value, str) else value
    if plain not in choices:
        accepted = [choice for choice in choices if choice != _REFUSED]
        near = difflib.get_close_matches(str(plain).upper(), accepted, n=1)
        near = near or difflib.get_close_matches(str(plain).lower(), accepted, n=1)
        fix = f"Did you mean {near[0]!r}?" if near else f"Write {accepted[0]!r}."
        raise OptionError(message(argument, repr(value), f"one of {', '.join(accepted)}", fix))
    return plain


def _size(argument: str, plain: str, value: int) -> int:
    smallest, largest, power = _SIZES["BLOCK_" if plain.startswith("BLOCK_") else plain if plain in _SIZES else ""]
    if not smallest <= value <= largest or (power and value & (value - 1)):
        to = f"to {largest}" if largest < sys.maxsize else "on"
        expected = f"{'a power of two' if power else 'a number'} from {smallest} {to}"
        nearest = min(max(value, smallest), largest)
        fix = f"Write {1 << nearest.bit_length() - 1 if power else nearest}."
        raise OptionError(message(argument, value, expected, fix))
    return value


def _check_backend(given: dict[str, object]) -> None:
    backend = given.get("BACKEND", "AUTO")
    if backend == _REFUSED:
        expected = "AUTO, TRITON, TRITON_DECODE, HOPPER or CPU"
        raise UnsupportedError(message("kernel_options", f"BACKEND={backend!r}", expected, _FIX_BACKEND))
    if backend != "AUTO" and given.get("FORCE_USE_FLEX_ATTENTION"):
        found = f"FORCE_USE_FLEX_ATTENTION together with BACKEND={backend!r}"
        raise OptionError(message("kernel_options", found, "one of the two", _FIX_BACKEND))
