"""The cache key of a launch: equal keys mean equal launches, and each part of the key is needed for that.

CALLS differ from each other in one thing each. Each is planned on a card that is not here, and nothing is compiled. Two
launches with one key must have the same plan, arguments and programs. Then the same is tried with keys that lack one
element: it must fail, or the element is either superfluous or without a call here that shows its use.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mask_bits import with_bits
from torch import Tensor

from flexattn import create_block_mask, mods
from flexattn.block_mask import BlockMask, InTiles
from flexattn.call import call as arguments_of
from flexattn.call.dropout import Dropout, drop_below
from flexattn.call.layout import Layout, LayoutArguments
from flexattn.call.pose import pose
from flexattn.call.problem import Problem
from flexattn.compile import scalars, small_backward
from flexattn.compile.arguments import DescriptorOf
from flexattn.compile.kernel_plan import KernelPlan, KernelSpec
from flexattn.compile.kernels import DELTA, FORWARD, KERNELS
from flexattn.compile.schedule import backward_kernels, plan_best_form, prepared_arrays
from flexattn.compile.shared_memory import fit
from flexattn.engines import call_kind, repeated_calls, triton
from flexattn.graph.bound_mod import BoundMod
from flexattn.layout import TiledGrid
from flexattn.machine.target import Target
from flexattn.runtime import launch
from flexattn.runtime.known import known_key
from flexattn.runtime.load import LoadedKernel

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

Key = Callable[[KernelSpec, Problem, Mapping[str, Tensor], Mapping[str, Tensor]], tuple[object, ...]]
SM90 = Target("cuda", 90, 32)


@dataclass(frozen=True)
class Call:
    """A call of flex_attention. `stored` is the shape that a tensor is a corner of, `first` where that begins."""

    B: int = 2
    Hq: int = 4
    Hkv: int = 2
    Bkv: int = 2
    M: int = 256
    N: int = 256
    D: int = 64
    Dv: int = 64
    dtype: torch.dtype = torch.bfloat16
    scale: float = 0.5
    negative_zero: bool = False  # a scale of -0.0
    stored: tuple[int, int, int, int] = (3, 8, 512, 128)
    first: tuple[tuple[str, int], ...] = ()
    widths: tuple[tuple[str, int], ...] = ()  # other row lengths in memory, by tensor
    options: tuple[tuple[str, object], ...] = ()
    score: str = "none"
    bias: float = 0.5
    table: tuple[int, ...] = (4, 600)
    table_stored: tuple[int, ...] = (4, 1024)
    table_first: int = 0
    table_learns: bool = True
    mask: str = "none"
    window: int = 9
    mask_batches: int | None = None
    mask_heads: int | None = None
    block: int | tuple[int, int] = 128
    separate: bool = True
    by_hand: bool = False  # the lists are the user's
    overhangs: bool = False  # full blocks reach past the lengths
    ids: int = 256
    sink: str = "none"
    sink_step: int = 1
    dropout: float = 0.0
    drop_at: int = 0  # the first query of a part of a larger call
    max_scores: bool = False
    d_lse: bool = False
    needs: tuple[bool, bool, bool] = (True, True, True)
    learns: bool = True
    k_learns: bool = False
    v_learns: bool = False
    tf32: bool = False
    deterministic: bool = False
    used: bool = False  # seqused_k
    offsets: bool = False  # q_offsets
    page: int = 0  # tokens of a page
    pages: int = 16  # of each sequence
    float8: str = ""  # of key and value: descales by head or by page
    latent: bool = False  # value is the first columns of key
    rows: int = 0  # queries that the mask is built for, if more than M
    capacity: int = 0  # keys that the mask is built for, if more than N
    tile: tuple[int, int] | None = None  # of the order of tiles that the mask has
    in_tiles: bool = False

    def tensor(self, name: str, *shape: int) -> Tensor:
        B, H, rows, width = self.stored
        strides = (H * rows * width, rows * width, dict(self.widths).get(name, width), 1)
        dtype = torch.float8_e4m3fn if self.float8 and name != "q" else self.dtype
        storage = torch.zeros(B * H * rows * 2 * width, dtype=dtype)
        return storage.as_strided(shape, strides, dict(self.first).get(name, 0))

    def score_mod(self) -> Any:
        table = torch.zeros(self.table_stored)[tuple(slice(n) for n in self.table)]
        if self.table_first:
            table = torch.zeros(5000).as_strided(table.shape, table.stride(), self.table_first)
        table.requires_grad_(self.table_learns)
        bias, other = self.bias, torch.zeros(512)
        return {
            "none": None,
            "bias": lambda s, b, h, q_idx, kv_idx: s + bias,
            "table": lambda s, b, h, q_idx, kv_idx: s * bias + table[h, q_idx] + other[kv_idx],
            "pairs": lambda s, b, h, q_idx, kv_idx: s + table[h, (q_idx * 7 + kv_idx) % 256],
            "gate": lambda s, b, h, q_idx, kv_idx: s * table[h, 0],
            "cap": mods.softcap(20.0),
        }[self.score]

    def block_mask(self) -> Any:
        window, ids = self.window, torch.zeros(512, dtype=torch.int32)[: self.ids]
        mod = {
            "none": None,
            "causal": mods.causal,
            "documents": mods.document_causal(torch.arange(512) // 100),
            "anticausal": lambda b, h, q_idx, kv_idx: q_idx <= kv_idx,
            "window": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < window) & (ids[q_idx] == ids[kv_idx % 200]),
            "grid": mods.natten_2d(16, 16, 5),
        }[self.mask]
        if mod is None:
            return None
        N = max(self.pages * self.page if self.page else self.N, self.capacity)
        sizes = (self.mask_batches, self.mask_heads, max(self.M, self.rows), N)
        mask = create_block_mask(
            mod, *sizes, device="cpu", BLOCK_SIZE=self.block, separate_full_blocks=self.separate
        )  # fmt: skip
        mask.full_overhangs = self.overhangs
        if self.by_hand:
            mask.mask_mod = mod
        if self.mask == "grid":
            with_bits(mask)
        if self.tile is not None:
            grid = TiledGrid((16, 16), self.tile)
            other = create_block_mask(grid.mod(mod), *sizes, device="cpu")
            mask._in_tiles = InTiles(grid, with_bits(other, skips_halves=True))
        return mask

    def problem(self) -> Problem:
        problem = pose(self.arguments(), on_gpu=True)
        return problem.with_fields(in_tiles=True) if self.in_tiles else problem

    def arguments(self) -> arguments_of.Call:
        q = self.tensor("q", self.B, self.Hq, self.M, self.D)
        batches, N = (self.Bkv, self.N) if not self.page else (3, self.page)
        k = self.tensor("k", batches, self.Hkv, N, self.D)
        v = self.tensor("v", batches, self.Hkv, N, self.Dv)
        if self.latent:
            v = k.detach()[..., : self.Dv]
        rows = torch.zeros(self.B, self.Hq * self.sink_step)[:, :: self.sink_step]
        sinks = {"none": None, "number": 0.5, "heads": rows[0], "rows": rows}
        scale = -0.0 if self.negative_zero else self.scale
        return arguments_of.Call(
            q.requires_grad_(self.learns and not self.float8), k.requires_grad_(self.k_learns),
            v.requires_grad_(self.v_learns),
            self.score_mod(), self.block_mask(), scale, True, dict(self.options), sinks[self.sink], self.dropout_p(),
            self.max_scores, self.layout(),
        )  # fmt: skip

    def dropout_p(self) -> Any:
        below = drop_below(self.dropout) if self.drop_at else None
        seed = torch.zeros(1, dtype=torch.int64)
        return self.dropout if below is None else Dropout(below, seed, q_offset=self.drop_at)

    def layout(self) -> LayoutArguments | None:
        zeros = torch.zeros(self.B, dtype=torch.int32)
        table = torch.zeros(self.B, self.pages, dtype=torch.int32) if self.page else None
        scales = torch.ones((self.Hkv,) if self.float8 == "heads" else (3, self.Hkv)) if self.float8 else None
        given = LayoutArguments(
            zeros if self.used else None, zeros if self.offsets else None, None, table,
            "HND" if self.page else "NHD", scales,
            scales,
        )  # fmt: skip
        return None if given.is_empty else given


PLAIN = Call()
TABLE = Call(score="table", mask="window", sink="rows")
CAPTURED = replace(TABLE, needs=(False, True, True))
EXACT = Call(dtype=torch.float32, score="bias", mask="causal")
DROPPED = Call(dropout=0.1, score="bias")
PAIRS = Call(score="pairs")
GATE = Call(score="gate", deterministic=True)
SHORT = Call(M=1, N=2048, stored=(3, 8, 2048, 128))
MASKED = replace(SHORT, mask="causal")
CACHE = Call(M=1, offsets=True, rows=512, mask="causal")
NARROW = Call(M=1, N=1024, D=96, stored=(3, 4, 1024, 128))
LATENT = Call(M=1, N=1024, D=576, Dv=512, stored=(3, 2, 1024, 640), latent=True)
STRIPED = Call(B=66, Bkv=66, Hq=2, stored=(66, 2, 256, 64))  # 132 programs of short sequences
WIDE = Call(D=256, Dv=256, stored=(3, 8, 512, 256))
TILED = Call(mask="grid", tile=(16, 8))


def variants(call: Call) -> Iterator[Call]:
    """Yield the call and those that differ from it in one thing each."""
    yield call
    changes: list[dict[str, object]] = [
        {"B": 1, "Bkv": 1}, {"B": 1, "Bkv": 1, "stored": (3, 16, 256, 128)}, {"Bkv": 1}, {"Hq": 2}, {"Hkv": 4},
        {"Hkv": 1}, {"M": 200}, {"M": 1}, {"N": 200}, {"D": 32}, {"Dv": 32}, {"dtype": torch.float16},
        {"dtype": torch.float32}, {"scale": 0.25}, {"scale": -0.5}, {"scale": 0.0}, {"negative_zero": True},
        {"stored": (3, 8, 600, 128)}, {"stored": (3, 9, 512, 128)}, {"options": (("EXACT", True),)},
        {"options": (("BACKEND", "TRITON"),)}, {"options": (("BATCH_INVARIANT", True),)},
        {"options": (("BLOCK_M", 32), ("BACKEND", "TRITON"))}, {"options": (("num_warps", 2), ("BACKEND", "TRITON"))},
        {"options": (("USE_TMA", False), ("BACKEND", "TRITON"))}, {"options": (("FLOAT32_PRECISION", "tf32"),)},
        {"latent": True},
        {"score": "cap"}, {"score": "bias"}, {"score": "none"}, {"bias": 0.75}, {"mask": "causal"}, {"mask": "none"},
        {"mask": "anticausal"}, {"mask": "documents"},
        {"window": 40}, {"mask_batches": 2}, {"mask_heads": 4}, {"mask_batches": 2, "mask_heads": 4}, {"block": 64},
        {"block": (128, 64)}, {"overhangs": True}, {"ids": 300}, {"sink": "none"}, {"sink": "heads"},
        {"sink": "number"}, {"sink_step": 2}, {"dropout": 0.5}, {"dropout": 0.0}, {"drop_at": 32},
        {"max_scores": True}, {"d_lse": True},
        {"needs": (True, False, False)}, {"needs": (False, True, True)}, {"table": (4, 400)}, {"table": (4, 256)},
        {"table_stored": (4, 2048)}, {"table_stored": (4, 1023)}, {"table_first": 1}, {"table_learns": False},
        {"tf32": True}, {"deterministic": True}, {"used": True}, {"offsets": True},
        {"used": True, "offsets": True}, {"page": 16}, {"page": 32}, {"page": 32, "pages": 8},
        {"page": 32, "used": True}, {"float8": "heads"}, {"float8": "heads", "page": 16},
        {"float8": "pages", "page": 16}, {"capacity": 512, "used": True},
        *({"rows": rows, "mask": "causal"} for rows in (512, 1024) if call.offsets),
        *({"first": ((name, 1),)} for name in ("q", "k", "v")),
        *({"widths": ((name, width),)} for name in ("q", "k", "v") for width in (129, 160)),
    ]  # fmt: skip
    for change in changes:
        other = replace(call, **change)
        if other != call:
            yield other


SMALL_ONE = Call(B=1, Bkv=1, D=32, Dv=32)
BASES = (PLAIN, TABLE, EXACT, DROPPED, PAIRS, GATE, SHORT, NARROW, CACHE, WIDE, SMALL_ONE)
CALLS = [
    *dict.fromkeys(itertools.chain.from_iterable(map(variants, BASES))),
    LATENT,
    STRIPED,
    *(replace(STRIPED, mask="causal", by_hand=by_hand) for by_hand in (False, True)),
    MASKED,
    replace(MASKED, by_hand=True),
    CAPTURED,
    replace(CAPTURED, table_learns=False),
    replace(TILED, tile=None),
    *(replace(TILED, tile=tile, in_tiles=in_tiles) for tile in ((16, 8), (8, 16)) for in_tiles in (False, True)),
]


@dataclass(frozen=True)
class Outcome:
    """What a launch is, apart from addresses."""

    plan: KernelPlan
    programs: int
    arguments: tuple[str, ...]
    fillers: tuple[tuple[int, str], ...]
    described: tuple[launch.DescriptorLayout, ...]


def outcome(spec: KernelSpec, problem: Problem, tensors: Mapping[str, Tensor], arrays: Mapping[str, Tensor]) -> Outcome:
    plan, _ = plan_best_form(spec, problem, SM90, tensors, arrays)
    made = launch.prepare(plan, problem, tensors)
    plan, everything = fit(plan), {**tensors, **arrays}
    sources = [argument.source for argument in plan.spec.arguments(plan)]
    described = [
        launch.layout_described(source, problem, everything) for source in sources if isinstance(source, DescriptorOf)
    ]
    return Outcome(
        plan, made.programs, tuple(map(repr, made.arguments)),
        tuple((position, fill.__qualname__) for position, fill in made.fillers),
        tuple(described),
    )  # fmt: skip


@contextlib.contextmanager
def settings_of(call: Call) -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before = products.allow_tf32, torch.are_deterministic_algorithms_enabled()
    products.allow_tf32 = call.tf32
    torch.use_deterministic_algorithms(call.deterministic)
    try:
        yield
    finally:
        products.allow_tf32 = before[0]
        torch.use_deterministic_algorithms(before[1])


def keys_and_outcomes(call: Call, keys: Mapping[str, Key]) -> Iterator[tuple[str, tuple[object, ...], object]]:
    """Yield (name of the key function, key, cached value) for each launch of a call and for its schedule."""
    found: list[tuple[tuple[Any, ...], object]] = []

    def keep(spec: KernelSpec, problem: Problem, tensors: Any, arrays: Any) -> None:
        found.append(((spec, problem, tensors, arrays), outcome(spec, problem, tensors, arrays)))

    def schedule(problems: Any, tensors: Any) -> launch.Schedule:
        kernels = backward_kernels(problems, tensors, SM90)
        scheduled = kernels, prepared_arrays(kernels, SM90)
        found.append(((DELTA, problems.capture_gradients, tensors, tensors), scheduled))
        return scheduled

    problem = call.problem()
    with torch.no_grad(), settings_of(call), patch.object(triton, "scheduled_backward", schedule):
        out, lse, _ = triton.forward(problem, keep)
        d_lse, d_out = torch.zeros_like(lse) if call.d_lse else None, torch.zeros_like(out)
        forward, needs = len(found), (*call.needs, False)
        if not (problem.is_paged or call.float8):  # their gradients are computed in dense form
            triton.backward(problem, out, lse, d_out, d_lse, needs, keep)
        for arguments, meant in found:
            for name, key in keys.items():
                yield name, key(*arguments), meant
        problem = triton._with_rows(problem)
        given = {"q": problem.query, "k": problem.key, "v": problem.value}
        launches = tuple(meant for _, meant in found)
        for name, left_out in (("known_key", {}), *((f"known_key: {x}", {x: ()}) for x in ("arrays", "needs"))):
            arrays = () if d_lse is None else ("dlse_ptr",)
            parts: dict[str, Any] = {"arrays": arrays, "needs": needs, **left_out}
            yield name, known_key(FORWARD, problem, given, (), ()), launches[:forward]
            if problem.is_paged or call.float8:
                continue
            yield name, known_key(DELTA, problem, {**given, "o": out, "do": d_out}, **parts), launches[forward:]


Meanings = dict[str, dict[object, set[object]]]  # values of each key, by the function that made the key


@pytest.fixture(scope="module")
def meanings() -> Meanings:
    keys = {"launch_key": launch.launch_key, **mutants()}
    found: Meanings = {name: {} for name in (*keys, "known_key", "known_key: arrays", "known_key: needs")}
    with on_sm90():
        for call in CALLS:
            for name, key, meant in keys_and_outcomes(call, keys):
                found[name].setdefault(key, set()).add(meant)
    return found


@contextlib.contextmanager
def on_sm90() -> Iterator[None]:
    """Plan for a card that is not here, and compile nothing."""
    with (
        patch.multiple(
            launch, load=lambda plan: LoadedKernel(fit(plan), None, None),
            target_of=lambda device: SM90, processors=lambda device: 100,
        ),
        patch.multiple(small_backward, PER_PROCESSOR=2, _WIDEST=32),  # other calls here are wider
        patch.multiple(scalars, l2_bytes=lambda device: 40 << 20, processors=lambda device: 100),
    ):  # fmt: skip
        yield


def ambiguous(meanings: Meanings, name: str) -> list[set[object]]:
    return [meant for meant in meanings[name].values() if len(meant) > 1]


# Elements that no call here needs, and why.
NOT_NEEDED = {
    "launch_key: spec": "tensors, arrays and settings tell the kernels of a problem apart",
    "launch_key: q.device": "there is one device here",
    "launch_key: k.shape": "batch, heads and rows are those of value, and the head dim is that of query",
    "launch_key: problem.max_scores": "max_ptr is among the arrays",
}


def mutants() -> dict[str, Key]:
    """Return functions that make the key without one of its elements, by the text of the element."""
    functions = (launch.launch_key, launch._layout_key, launch._mod_key)
    found: dict[str, Key] = {}
    for function in functions:
        number = sum(len(node.elts) for node in tuples(tree_of(function)))
        for index in range(number):
            tree = tree_of(function)
            places = [(node, i) for node in tuples(tree) for i in range(len(node.elts))]
            node, i = places[index]
            text = f"{function.__name__}: {ast.unparse(node.elts.pop(i))}"
            namespace = dict(vars(launch))
            for other in functions:
                body = tree if other is function else tree_of(other)
                exec(compile(ast.fix_missing_locations(body), "mutant", "exec"), namespace)
            found[text] = namespace["launch_key"]
    return found


def tree_of(function: Callable[..., Any]) -> ast.Module:
    return ast.parse("from __future__ import annotations\n" + inspect.getsource(function))


def tuples(tree: ast.AST) -> list[ast.Tuple]:
    """Return the tuples of several elements that a function returns, and those inside of them."""
    returned = [node for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    found = [node for r in returned for node in ast.walk(r.value) if isinstance(node, ast.Tuple)]
    return [node for node in found if len(node.elts) > 1]


def test_equal_keys_mean_equal_launches(meanings: Meanings) -> None:
    assert len(meanings["launch_key"]) > len(CALLS)
    assert ambiguous(meanings, "launch_key") == []


@pytest.mark.parametrize("element", mutants())
def test_each_element_of_the_key_is_needed(meanings: Meanings, element: str) -> None:
    assert bool(ambiguous(meanings, element)) == (element not in NOT_NEEDED)


def test_equal_keys_mean_equal_known_calls(meanings: Meanings) -> None:
    assert len(meanings["known_key"]) > len(CALLS)
    assert ambiguous(meanings, "known_key") == []
    assert ambiguous(meanings, "known_key: arrays") and ambiguous(meanings, "known_key: needs")


# The first elements of the key of a repeated call, in order, and those that no call here needs.
KIND = [ast.unparse(x) for x in next(
    node.value.elts for node in ast.walk(tree_of(call_kind.kind_of))
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "call_key" and isinstance(node.value, ast.Tuple)
) if not isinstance(x, ast.Starred)]  # fmt: skip
ONE_HERE = {
    "grouped heads are allowed in each call here": {"enable_gqa"},
    "they do not change here": {"settings", "torch.is_grad_enabled()"},
}


@pytest.fixture(scope="module")
def kinds() -> list[tuple[tuple[object, ...], object]]:
    """Return the kinds of the calls, and what each one launches."""
    learning = [replace(PLAIN, k_learns=True), replace(PLAIN, v_learns=True), replace(PLAIN, learns=False)]
    # What a backward depends on besides the call is in its own key.
    calls = dict.fromkeys(
        replace(call, needs=PLAIN.needs, d_lse=False) for call in (*CALLS, *learning) if not call.in_tiles
    )
    found = []
    with on_sm90():
        for call in calls:
            with settings_of(call):
                arguments = call.arguments()
                problem = pose(arguments)
                mask = problem.block_mask
                kept = mask is None or repeated_calls._keep_mask(mask, tuple(vars(arguments).values()), problem)
                kind = call_kind.kind_of(*vars(arguments).values()) if kept else None
            if kind is None or problem.batch_invariant:
                zero = call.scale == 0.0 or call.negative_zero
                assert call.sink != "none" or call.dropout or zero or problem.batch_invariant or arguments.layout, call
                continue
            launches = keys_and_outcomes(call, {"launch_key": launch.launch_key})
            meant = tuple(value for name, _, value in launches if name == "launch_key")
            found.append((kind.key, (meant, tuple(t.requires_grad for t in kind.tensors))))
    return found


def ambiguous_kinds(kinds: list[tuple[tuple[object, ...], object]], left_out: int | None = None) -> bool:
    meant: dict[object, set[object]] = {}
    for key, value in kinds:
        meant.setdefault(key if left_out is None else key[:left_out] + key[left_out + 1 :], set()).add(value)
    return any(len(values) > 1 for values in meant.values())


def test_equal_kinds_mean_equal_calls(kinds: list[tuple[tuple[object, ...], object]]) -> None:
    assert len({key for key, _ in kinds}) > 200, "others have a sink or dropout"
    assert not ambiguous_kinds(kinds)


@pytest.mark.parametrize("element", KIND)
def test_each_element_of_a_kind_is_needed(kinds: list[tuple[tuple[object, ...], object]], element: str) -> None:
    assert ambiguous_kinds(kinds, KIND.index(element)) == (element not in set().union(*ONE_HERE.values()))


def test_every_kernel_is_among_the_calls(meanings: Meanings) -> None:
    launched = set().union(*meanings["launch_key"].values())
    assert {meant.plan.spec.name for meant in launched if isinstance(meant, Outcome)} == set(KERNELS)


def test_every_field_of_a_problem_varies() -> None:
    """A new field of Problem needs a call here that has another value of it."""
    found: dict[str, set[object]] = {f.name: set() for f in fields(Problem)}
    for call in CALLS:  # one after the other: some have tensors of gigabytes
        problem = call.problem()
        for name, values in found.items():
            values.add(described(getattr(problem, name)))
        del problem
    same = {name for name, values in found.items() if len(values) < 2}
    assert same == {"equal_runs"}  # only masks built on a GPU have them; KernelProblems writes them into the mask


def described(value: object) -> object:
    match value:
        case Tensor():
            return tuple(value.shape), value.stride(), value.dtype
        case BoundMod():
            return value.graph, value.numbers
        case BlockMask():
            return value.shape, value.BLOCK_SIZE
        case Layout():
            return value.names, value.page_size, value.capacity
        case Dropout():
            return value.drop_below, value.place
    return value
