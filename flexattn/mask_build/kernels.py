"""kernels: the kernels of a mask's build on a GPU, as KernelSources: range tables, classification, run lists, bits.

Few kernels are specific to a mask (to its graph and captures, not to lengths, block sizes or numbers). The other
kernels are the same for all masks.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from flexattn.block_mask.bits import BITS_BLOCK, COUNTED, ROW_WORDS
from flexattn.compile.kernel_source import KernelSource, kernel_name
from flexattn.compile.lower import Dialect, lower
from flexattn.compile.lower_bounds import BoundsText, TableSpec, lower_bounds, table_dtype
from flexattn.compile.mod_plan import TRITON_DTYPE, TRITON_POINTER, CaptureLayout, ModPlan
from flexattn.compile.plan import number_type
from flexattn.compile.templates import environment
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.equal_runs import captures_compared
from flexattn.graph.mod_graph import ModGraph
from flexattn.machine.target import Target
from flexattn.process.forks import cached_property
from flexattn.process.frozen_class import frozen

Signature = tuple[tuple[str, str], ...]

# Operations with bitwise equal results in Triton and torch; those in _SAME_WHOLE only on integers.
_SAME = {
    "input", "number", "const", "load", "cast", "detach", "add", "sub", "mul", "div", "neg", "abs", "maximum",
    "minimum", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "where", "isnan", "isinf", "bitand",
    "bitor", "bitxor", "bitnot", "shl", "shr", "floor", "ceil", "trunc", "round",
}  # fmt: skip
_SAME_WHOLE = {"floordiv", "mod", "fmod"}
_SAME_FLOAT32 = {"sqrt", *_SAME_WHOLE}  # remainders are exact if the quotient is below 2**24

_BITMAPS = tuple((f"{n}_ptr", "*i32") for n in ("full", "partial", "full_by_key", "partial_by_key", "unknown"))
_GEOMETRY = tuple((n, "i32") for n in ("Q", "KV", "BLOCK_Q", "BLOCK_KV", "q_blocks", "kv_blocks", "H", "separate"))
_ROWS = tuple((n, "i32") for n in ("rows_q", "rows_kv", "q_blocks", "kv_blocks"))
_BITS = tuple((f"{n}_ptr", "*i32") for n in ("full", "partial", "full_by_key", "partial_by_key"))

SAMPLES = 9 + 96  # positions of a block that are sampled before it is evaluated
TILE = (32, 64)  # tile of the evaluation kernel
WARPS = {"classify": 8, "evaluate": 4, "pair_bits": 4}
BITS_PROGRAMS = 8  # that evaluate the partial blocks of a row of query blocks


@frozen(eq=False)
class MaskPlan:
    """A mask, with everything that determines the kernels that classify its blocks."""

    mod: ModPlan
    interpreter: bool

    @cached_property
    def bounds(self) -> BoundsText:
        return lower_bounds(self.mod, self._dialect)

    @cached_property
    def compared(self) -> tuple[int, ...]:
        """Positions of the captures whose runs of equal elements the attention kernels can use."""
        return captures_compared(self.mod.graph)

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        return self.bounds.tables

    @property
    def _dialect(self) -> Dialect:
        return Dialect(exact=True, float_index=False, checked=True)

    @property
    def table_arguments(self) -> Signature:
        return self.bounds.arguments(self.mod.graph)

    @cached_property
    def classify(self) -> KernelSource:
        """The kernel that bounds and samples blocks."""
        signature = (*_BITMAPS, ("status_ptr", "*i32"), *_GEOMETRY, *self.table_arguments, *self.mod.signature())
        names = {
            "functions": [self._mask_mod, self.bounds.text],
            "bounds_arguments": (*self.mod.argument_names(), *_names(self.table_arguments)),
            "mask_arguments": self.mod.argument_names(), "SAMPLES": SAMPLES,
        }  # fmt: skip
        return self._source("classify", signature, names)

    @cached_property
    def evaluate(self) -> KernelSource:
        """The kernel that evaluates the undecided blocks."""
        bitmaps = tuple((n, "*u8" if n == "unknown_ptr" else t) for n, t in _BITMAPS)
        own = (*bitmaps, ("status_ptr", "*i32"), *_GEOMETRY, ("total_bytes", "i32"))
        names = {
            "functions": [self._mask_mod], "mask_arguments": self.mod.argument_names(), "TILE_Q": TILE[0],
            "TILE_KV": TILE[1],
        }  # fmt: skip
        return self._source("evaluate", (*own, *self.mod.signature()), names)

    @cached_property
    def pair_bits(self) -> KernelSource:
        """The kernel for the bits of partial blocks."""
        own = (("row_ptr_ptr", "*i32"), ("runs_ptr", "*i32"), ("words_ptr", "*i16"), ("halves_ptr", "*i32"), *_ROWS)
        sizes = tuple((n, "i32") for n in ("H", "Q", "KV"))
        names = {
            "functions": [self._mask_mod], "mask_arguments": self.mod.argument_names(), "PROGRAMS": BITS_PROGRAMS,
            "COUNTED": COUNTED, "BLOCK": BITS_BLOCK, "WORDS": ROW_WORDS, "STEP": 2, "RUNS": 32,
        }  # fmt: skip
        return self._source("pair_bits", (*own, *sizes, *self.mod.signature()), names)

    @property
    def _mask_mod(self) -> str:
        return lower(self.mod, "mask_mod", self._dialect)

    def _source(self, kind: str, signature: Signature, names: dict[str, object]) -> KernelSource:
        graph = self.mod.graph
        header = (f"mask {graph.name} {graph.location}".rstrip(), *repr(graph).splitlines())
        # Pointers come first and the numbers of the mask last, so a launch only appends them to prepared arguments.
        signature = tuple(sorted(signature, key=lambda argument: not argument[1].startswith("*")))
        return _source(
            f"mask_{kind}", signature, {**names, "arguments": _names(signature), "scatter_arguments": ()}, header,
            WARPS[kind], kernel_name(f"mask_{kind}", graph.name),
        )  # fmt: skip


def plan_mask(bound: BoundMod, target: Target) -> MaskPlan | None:
    """Plan the kernels that classify the blocks of a mask; None if Triton would compute it differently from torch."""
    layouts = tuple([_memory_form(t) for t in bound.captures])
    return _planned(bound.graph, layouts, tuple([number_type(n) for n in bound.numbers]), target.backend)


@lru_cache(512)
def _planned(
    graph: ModGraph, layouts: tuple[CaptureLayout, ...], numbers: tuple[str, ...], backend: str
) -> MaskPlan | None:
    """Return the cached plan, which caches its sources."""
    if backend == "hip" or not _same_as_torch(graph, {"sqrt"} if backend == "interpreter" else _SAME_FLOAT32):
        return None
    return MaskPlan(ModPlan(graph, "mask", layouts, numbers), backend == "interpreter")


def _same_as_torch(graph: ModGraph, of_float32: set[str]) -> bool:
    """Return whether the kernels can read all captures of a mask, and compute it bitwise like torch.

    `of_float32`: operations that are equal only in float32. (Remainders use fma, which the interpreter rounds twice.)
    """
    for node in graph.nodes:
        same = of_float32 if node.dtype == torch.float32 else _SAME_WHOLE if not node.dtype.is_floating_point else ()
        if node.op not in _SAME and node.op not in same:
            return False
        if node.dtype == torch.float64 and node.op not in ("number", "const"):
            return False
    return len(graph.captures) <= 31 and all(c.dtype in TRITON_POINTER for c in graph.captures)


def _memory_form(tensor: torch.Tensor) -> CaptureLayout:
    if tensor.is_contiguous():
        return _CONTIGUOUS[tensor.numel() >= 1 << 31]
    reach = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return CaptureLayout(dense=tensor.stride(-1) == 1, aligned=False, wide=reach >= 1 << 31)


_CONTIGUOUS = tuple(CaptureLayout(dense=True, aligned=False, wide=wide) for wide in (False, True))


@lru_cache(64)
def table_source(dtype: torch.dtype, chunk: int) -> KernelSource:
    """Return the kernel for the first level of a table of a tensor of `dtype`, `chunk` elements at a time."""
    of = table_dtype(dtype)
    signature = (
        ("src_ptr", "*u8" if dtype == torch.bool else TRITON_POINTER[dtype]), ("table_ptr", TRITON_POINTER[of]),
        ("n", "i64"), ("granule", "i32"), ("rows", "i32"), ("entries", "i32"), ("levels", "i32"),
        ("stride_row", "i64"), ("stride_n", "i64"),
    )  # fmt: skip
    names = {
        "ENTRIES": table_entries(chunk), "CHUNK": chunk, "dtype": f"tl.{TRITON_DTYPE[of]}",
        "is_float": of.is_floating_point,
    }  # fmt: skip
    return _source("mask_table", signature, names)


def table_entries(chunk: int) -> int:
    """Return the number of table entries that one program computes."""
    return max(1, 1024 // chunk)


PLACES = 64  # entries of a level that one program computes
RUN_PLACES = 256  # elements of a tensor in which one program finds runs


@lru_cache(64)
def runs_source(dtype: torch.dtype) -> KernelSource:
    """Return the kernel that finds the runs of equal elements in the rows of a tensor."""
    outputs = tuple((f"{n}_ptr", "*i32") for n in ("starts", "ends", "status"))
    signature = (("src_ptr", TRITON_POINTER[dtype]), *outputs, ("n", "i32"), ("steps", "i32"))
    return _source("mask_runs", signature, {"PLACES": RUN_PLACES})


@lru_cache(64)
def levels_source(dtype: torch.dtype) -> KernelSource:
    """Return the kernel for the further levels of a table."""
    signature = (("table_ptr", TRITON_POINTER[dtype]), *((n, "i32") for n in ("level", "rows", "entries", "levels")))
    return _source("mask_levels", signature, {"PLACES": PLACES, "is_float": dtype.is_floating_point})


SCAN_PROGRAMS = 7  # that add up the counts: six kinds of them, and blocks that are not known


@lru_cache(1)
def list_sources() -> tuple[KernelSource, KernelSource, KernelSource]:
    """Return the kernels that count, scan and fill the runs."""
    counts = ("counts_ptr", "*i32")
    count = _source("mask_count", (*_BITS, ("unknown_ptr", "*i32"), counts, *_ROWS), {"WORDS": 128})
    scan_signature = (counts, ("row_ptr_ptr", "*i32"), ("status_ptr", "*i32"), *_ROWS[:2])
    scan = _source("mask_scan", scan_signature, {"CHUNK": 4096}, num_warps=8)
    outputs = tuple((f"{n}_ptr", "*i32") for n in ("status", "row_ptr", "order", "runs"))
    fill = _source("mask_fill", (*_BITS, counts, *outputs, *_ROWS), {"WORDS": 32, "ROWS": 1024})
    return count, scan, fill


SMALL_LISTS = (128, 4)  # maximum rows of blocks, and words per row, of a mask whose lists one launch builds
SMALL_PROGRAMS = 6  # that write these lists: four kinds of runs, and two orders


@lru_cache(64)
def small_lists_source(dtype: torch.dtype | None) -> KernelSource:
    """Return the kernel that builds all lists of a small mask, and finds the runs in a tensor of `dtype`, if any."""
    outputs = tuple((f"{n}_ptr", "*i32") for n in ("status", "row_ptr", "order", "runs"))
    of_runs = (
        () if dtype is None else (("src_ptr", TRITON_POINTER[dtype]), ("starts_ptr", "*i32"), ("ends_ptr", "*i32"))
    )
    of_places = () if dtype is None else (("n", "i32"), ("steps", "i32"))
    signature = (*_BITS, ("unknown_ptr", "*i32"), *outputs, *of_runs, *_ROWS, *of_places)
    rows, words = SMALL_LISTS
    places = RUN_PLACES if dtype is not None else 0
    names: dict[str, object] = {"ROWS": rows, "WORDS": words, "PLACES": places, "LISTS": SMALL_PROGRAMS}
    return _source("mask_lists", signature, names, num_warps=8)


def _source(
    template: str, signature: Signature, names: dict[str, object], header: tuple[str, ...] = (), num_warps: int = 4,
    kernel: str = "",
) -> KernelSource:  # fmt: skip
    name = kernel or template
    filled = {**names, "name": name, "names": lambda found: "".join(f"{n}, " for n in found)}
    text = environment().get_template(f"{template}.py.jinja").render(filled)
    # With FMA, a * b + c is rounded once and may differ from torch's result.
    return KernelSource(name, text, header, signature, (), num_warps, num_stages=1, fp_fusion=False)


def _names(signature: Signature) -> tuple[str, ...]:
    return tuple(n for n, _ in signature)
