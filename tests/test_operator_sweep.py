"""Every row of the operator tables against torch: several elements, negative, zero and large values, inf and NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_ops import check_row, odd_rows, rows
from torch import Tensor

from flexattn.trace import elements
from flexattn.trace.aten import TABLES
from flexattn.trace.operator_calls import operator_name
from flexattn.trace.trace import trace

PLACES = ((0, 0, 0, 0), (1, 2, 10, 12), (0, 1, 7, 3), (1, 0, 3, 7), (1, 1, 5, 5), (0, 2, 10, 0))
POINTS = [torch.tensor(column) for column in zip(*PLACES, strict=True)]
ROWS = 13
NAN, INF = float("nan"), float("inf")


def numbers(offset: int, low: float = -2.0, high: float = 2.0) -> Tensor:
    """Return [13, 4] numbers in a fixed disorder."""
    n = torch.arange(ROWS * 4, dtype=torch.float64) + offset
    return (low + (high - low) * ((n * 0.754877666) % 1.0)).reshape(ROWS, 4)


f, g = numbers(0), numbers(100)
x = numbers(7, 0.1, 1.0)[:, 0].clone()  # [13], positive
u = numbers(50, -0.9, 0.9)[:, 1].clone()
w = numbers(3, 0.5, 1.5)[:4, 2].clone()
i4 = (numbers(9) * 40).long()
whole = torch.tensor([0, 1, -1, 7, -8, 63, -64, 2**31, -(2**31), 2**40 + 3, -(2**40), 2**62, 5])
counts = torch.tensor([0, 1, 31, 32, 33, 63, 64, 65, -1, 2, 5, 40, 7])
bytes_ = torch.tensor([0, 1, 2, 127, 128, 254, 255, 3, 4, 5, 6, 7, 8], dtype=torch.uint8)
flags = f > 0
table = torch.tensor([0, 3, 4, 4, 9, 13])
odd = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1e300, -1e300, 1.0, -1.0, 0.5, -0.5, 2.0, 1e-300], dtype=torch.float64)
f_odd = f.clone()
f_odd[0, 1], f_odd[3, 2], f_odd[7, 0], f_odd[10, 3], f_odd[12] = NAN, INF, -INF, NAN, 1e300

Mod = Callable[..., Any]


def of_score(function: Callable[[Tensor], Any]) -> Mod:
    """An elementwise function of one operand: on ordinary values, on odd ones, on integers if it takes them."""
    return lambda s, b, h, q, k: torch.where(q > k, function(s), function(odd[k])) + function(odd[q]) * 1.0


def of_two(function: Callable[[Tensor, Tensor], Any]) -> Mod:
    return lambda s, b, h, q, k: function(s, x[k]) + 0.0 * s + function(odd[q], odd[k]) * function(odd[k], u[q])


def on_integers(function: Callable[..., Any]) -> Mod:
    """An operation of integers, summed exactly enough: high and low parts of the result."""

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = function(whole[q], counts[k])
        return s * 0 + (found % 1000003).double()

    return mod


def read(function: Callable[..., Any]) -> Mod:
    """A function of a row of each of two tensors, once of ordinary values and once of odd ones."""
    return lambda s, b, h, q, k: s + function(f[q], g[k]) + 0.0 * s + function(f_odd[k], g[q]) * 1.0


CASES: dict[str, Mod] = {
    # arithmetic
    **{
        n: of_two(getattr(torch, n))
        for n in (
            "add",
            "sub",
            "mul",
            "div",
            "rsub",
            "fmod",
            "remainder",
            "floor_divide",
            "maximum",
            "minimum",
            "fmax",
            "fmin",
            "atan2",
            "copysign",
            "hypot",
            "pow",
        )
    },
    "add alpha": of_two(lambda a, c: torch.add(a, c, alpha=3)),
    "sub alpha": of_two(lambda a, c: torch.sub(a, c, alpha=3)),
    "rsub alpha": of_two(lambda a, c: torch.rsub(a, c, alpha=3)),
    "div floor": of_two(lambda a, c: torch.div(a, c, rounding_mode="floor")),
    "div trunc": of_two(lambda a, c: torch.div(a, c, rounding_mode="trunc")),
    "lerp": of_two(lambda a, c: torch.lerp(a, c, 0.3)),
    "logaddexp": of_two(torch.logaddexp),
    "xlogy": of_two(torch.xlogy),
    "xlog1py": of_two(torch.special.xlog1py),
    "heaviside": of_two(torch.heaviside),
    "addcmul": of_two(lambda a, c: torch.addcmul(a, a, c, value=2)),
    "clamp tensors": lambda s, b, h, q, k: s.clamp(u[k] - 1, x[q]),
    "clamp_min": of_score(lambda a: a.clamp_min(0.25)),
    "clamp_max": of_score(lambda a: a.clamp_max(0.25)),
    "clamp": of_score(lambda a: a.clamp(-0.5, 0.5)),
    # one operand
    **{
        n: of_score(getattr(torch, n))
        for n in (
            "neg",
            "abs",
            "sign",
            "sgn",
            "reciprocal",
            "square",
            "relu",
            "isnan",
            "isinf",
            "isfinite",
            "isposinf",
            "isneginf",
            "signbit",
            "floor",
            "ceil",
            "trunc",
            "round",
            "frac",
            "exp",
            "exp2",
            "expm1",
            "log",
            "log2",
            "log10",
            "log1p",
            "sqrt",
            "rsqrt",
            "sin",
            "cos",
            "tan",
            "asin",
            "acos",
            "atan",
            "sinh",
            "cosh",
            "tanh",
            "asinh",
            "acosh",
            "atanh",
            "sigmoid",
            "sinc",
            "erf",
            "erfc",
            "lgamma",
            "erfinv",
            "digamma",
            "logical_not",
            "nan_to_num",
        )
    },
    "nan_to_num all": of_score(lambda a: torch.nan_to_num(a, 1.5, 2.5, -3.5)),
    "erfcx": of_score(torch.special.erfcx),
    "ndtri": of_score(torch.special.ndtri),
    "log_ndtr": of_score(torch.special.log_ndtr),
    "round 2": lambda s, b, h, q, k: torch.round(s, decimals=1),
    "round -2": lambda s, b, h, q, k: torch.round(s * 100, decimals=-2),
    "float_power": of_score(lambda a: a**-2 + a**0.5 + 3.0**a + (-2.0) ** a),
    "detach": lambda s, b, h, q, k: s + s.detach(),
    "to": of_score(lambda a: a.to(torch.float32).double()),
    "convert": of_score(lambda a: torch.ops.prims.convert_element_type(a, torch.float32)),
    "half": lambda s, b, h, q, k: s.half().double(),
    "where": lambda s, b, h, q, k: torch.where(q > k, s, -1.0),
    "masked_fill": lambda s, b, h, q, k: torch.ops.aten.masked_fill(s, q > k, 2.0),
    "copy": lambda s, b, h, q, k: torch.ops.aten.copy(s, x[k]),
    "gelu": of_score(F.gelu),
    "mish": of_score(F.mish),
    "relu6": of_score(F.relu6),
    "hardtanh": of_score(lambda a: F.hardtanh(a, -0.5, 0.25)),
    "hardsigmoid": of_score(F.hardsigmoid),
    "hardswish": of_score(F.hardswish),
    # comparisons and booleans
    **{
        n: of_two(getattr(torch, n))
        for n in ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor")
    },
    "bools": lambda s, b, h, q, k: s * ((flags[q, 0] & flags[k, 1]) | (flags[q, 2] ^ flags[k, 3]) | ~flags[k, 0]),
    "ordered bools": lambda s, b, h, q, k: s * ((flags[q, 0] < flags[k, 1]) + (flags[q, 2] * flags[k, 3])),
    "larger bool": lambda s, b, h, q, k: (
        s * torch.maximum(flags[q, 0], flags[k, 1]) + torch.minimum(flags[q, 0], flags[k, 1])
    ),
    # integers
    "int add": on_integers(lambda m, n: m + n * 3),
    "int mul": on_integers(lambda m, n: m * n * 1000003),
    "int pow": on_integers(lambda m, n: m**n + 3**n + (-1) ** n + 2**n + m**3),
    "int shifts": on_integers(lambda m, n: (m << n) + (m >> n) + (1 << n) + torch.bitwise_right_shift(m, n)),
    "int bits": on_integers(lambda m, n: (m & n) + (m | n) * 3 + (m ^ n) * 5 + ~m * 7),
    "int divide": on_integers(
        lambda m, n: m // 7 + m % 7 + torch.fmod(m, -7) + torch.div(m, 7, rounding_mode="trunc") + m // -7
    ),
    "int rest": on_integers(
        lambda m, n: m.abs() + m.sign() + torch.clamp(m, -9, 9) + torch.maximum(m, n) - torch.fmin(m, n)
    ),
    "bytes": lambda s, b, h, q, k: (
        s + (~bytes_[q]) + (bytes_[q] + bytes_[k]) + (bytes_[k] >> 1) + bytes_[q] * bytes_[k] + bytes_[q] // 3
    ),
    "int32": lambda s, b, h, q, k: s + (whole[q].int() * 3 + whole[k].int()) % 1000 + (~whole[q].int()) // 3,
    "index product": lambda s, b, h, q, k: s + ((q * 2**40 + k * 2**33) // 2**30) + q * 100000 * k,
    # several elements
    "cat": read(lambda m, n: torch.cat([m, n])[5] + torch.cat([m, n])[2]),
    "hstack": read(lambda m, n: torch.hstack([m, n])[2] * 2),
    "cat indexed": lambda s, b, h, q, k: s + torch.cat([f[q], g[k], f[k, :3]])[(q + k) % 11],
    "vstack": read(lambda m, n: torch.vstack([m, n])[0, 2] - torch.vstack([m, n])[1, 2]),
    "stack": lambda s, b, h, q, k: s + torch.stack([f[q], g[k]])[k % 2, q % 4],
    "concat": read(lambda m, n: (torch.concat([m, n]) * torch.arange(8)).sum()),
    "roll": read(lambda m, n: m.roll(1, 0)[0] + n.roll(-1)[3]),
    "flip": read(lambda m, n: m.flip(0)[0]),
    "t": read(lambda m, n: m.view(2, 2).t()[0, 1]),
    "transpose": read(lambda m, n: m.view(2, 2).transpose(0, 1)[1, 0]),
    "permute": read(lambda m, n: m.view(2, 1, 2).permute(2, 0, 1)[1, 0, 0]),
    "expand": read(lambda m, n: m.unsqueeze(0).expand(3, 4)[2, 1]),
    "squeeze": read(lambda m, n: m[None].squeeze(0)[1]),
    "reshape": read(lambda m, n: m.reshape(2, 2)[1, 0]),
    "slice": read(lambda m, n: m[1::2][1] + n[-3:-1][0]),
    "pad": read(lambda m, n: F.pad(m, (1, 2), value=2.0)[3] + F.pad(m, (1, 2))[6] + F.pad(n, (2, 0))[0]),
    "pad indexed": lambda s, b, h, q, k: s + F.pad(f[q], (1, 2), value=2.0)[k % 7],
    "diag": read(lambda m, n: m.view(2, 2).diag()[1] + torch.diag(m.view(2, 2), 1)[0] + m.diag(-1)[3, 2]),
    "a copied diag": read(lambda m, n: torch.diag(input=m.view(2, 2), diagonal=0).mul_(2)[1]),
    "trace": read(lambda m, n: m.view(2, 2).trace() + torch.trace(input=m.view(2, 2))),
    "diagonal": read(lambda m, n: m.view(2, 2).diagonal()[1] + m.view(2, 2).diagonal(1)[0]),
    "unfold": read(lambda m, n: m.unfold(0, 2, 1)[2, 1]),
    "clone": read(lambda m, n: m.clone()[1]),
    "contiguous": lambda s, b, h, q, k: s.clone().contiguous(),
    "alias": lambda s, b, h, q, k: torch.ops.aten.alias(s),
    "lift_fresh": lambda s, b, h, q, k: torch.ops.aten.lift_fresh_copy(s) + torch.ops.aten.lift_fresh(s),
    "aten.reshape": read(lambda m, n: torch.ops.aten._unsafe_view(m, [2, 2])[1, 1]),
    "same dtype": lambda s, b, h, q, k: s.view(torch.float64),
    "index_select": read(lambda m, n: m.index_select(0, torch.tensor([3, 1]))[1]),
    "gather": lambda s, b, h, q, k: s + f[q].gather(0, i4[k].abs() % 4)[1],
    "take_along_dim": lambda s, b, h, q, k: s + f[q].take_along_dim(i4[k].abs() % 4, 0)[2],
    "embedding": lambda s, b, h, q, k: s + F.embedding(k, f)[2],
    "embedding padded": lambda s, b, h, q, k: s + F.embedding(k, f, padding_idx=3)[2],
    "unsafe index": lambda s, b, h, q, k: s + torch.ops.aten._unsafe_index(f[q], [k % 4]),
    "one_hot": lambda s, b, h, q, k: s + F.one_hot(k % 4, 4)[2],
    "arange": lambda s, b, h, q, k: (
        s + torch.arange(1, 9, 2)[k % 4] + torch.arange(5)[q % 5] + torch.arange(2, 6)[k % 4]
    ),
    "contractions": read(
        lambda m, n: (
            m @ n + (f[:4] @ n)[1] + (m[None] @ n[:, None])[0, 0] + torch.bmm(m[None, None], n[None, :, None])[0, 0, 0]
        )
    ),
    "cumsum": read(lambda m, n: m.cumsum(0)[2] + n.cumprod(0)[3]),
    "cumsum indexed": lambda s, b, h, q, k: s + f[q].cumsum(0)[k % 4] + g[k].cumprod(0)[q % 4],
    "cummax": read(lambda m, n: m.cummax(0)[0][2] + n.cummin(0)[1][3]),
    "cummin": read(lambda m, n: m.cummin(0)[0][2] + n.cummax(0)[1][3]),
    "argmax": read(lambda m, n: m.argmax() + n.argmin(0) * 5 + m.view(2, 2).argmax(1, keepdim=True)[1, 0] * 7),
    "max dim": read(lambda m, n: m.max(0)[0] + n.max(0).indices * 5 + m.view(2, 2).max(1, keepdim=True)[0][1, 0]),
    "min dim": read(lambda m, n: m.min(-1)[0] + n.min(0).indices * 5),
    "aminmax": read(lambda m, n: m.aminmax(dim=0)[0] * 2 + n.aminmax(dim=0)[1]),
    "sort": read(lambda m, n: m.sort()[0][1] + n.sort(descending=True)[1][2] * 5 + m.sort(stable=True)[0][3]),
    "sort indexed": lambda s, b, h, q, k: s + f[q].sort()[0][k % 4],
    "topk": read(lambda m, n: m.topk(2)[0].sum() + n.topk(3, largest=False)[1][2] * 5),
    "kthvalue": read(lambda m, n: n.kthvalue(2)[0] + n.kthvalue(3)[1]),
    "median": read(lambda m, n: m.median() + n.median(0)[0] * 2 + n.median(0)[1]),
    "chunk": read(lambda m, n: m.chunk(2)[1][0] + m.split(3)[1][0] + n.split([1, 3])[1][2]),
    "unsafe split": read(lambda m, n: torch.unsafe_split(m, 3)[1][0] + torch.unsafe_split_with_sizes(n, [1, 3])[1][2]),
    "unbind": read(lambda m, n: m.unbind()[3] * n.unbind()[0]),
    "var_mean": read(
        lambda m, n: (
            torch.var_mean(m)[0] + torch.std_mean(n, 0)[1] + torch.var_mean(m.view(2, 2), 1, correction=0)[0][1]
        )
    ),
    "layer_norm": lambda s, b, h, q, k: s + F.layer_norm(f[q], (4,))[2] + F.layer_norm(g[k], (4,), w, w, 1e-3)[1],
    "softmax": read(lambda m, n: m.softmax(0)[2] + F.log_softmax(n, 0)[1] + n.logsumexp(0)),
    "searchsorted": lambda s, b, h, q, k: (
        s
        + torch.searchsorted(table, k, right=True)
        + 20 * torch.searchsorted(table, q)
        + 400 * torch.searchsorted(table, q - k, side="right")
    ),
    "searchsorted floats": lambda s, b, h, q, k: (
        s
        + torch.searchsorted(x.sort()[0], odd[k])
        + 20 * torch.searchsorted(x.sort()[0], odd[q], right=True)
        + 400 * torch.searchsorted(x, u[k], sorter=x.argsort())
    ),
    "bucketize": lambda s, b, h, q, k: s + torch.bucketize(k, table) + 20 * torch.bucketize(q - k, table, right=True),
    # reductions
    **{
        n: read(lambda m, n, name=n: getattr(torch, name)(m) * 1.0 + getattr(torch, name)(n.view(2, 2), dim=1)[1])
        for n in ("sum", "mean", "prod", "any", "all", "amax", "amin")
    },
    "max": read(lambda m, n: m.max() - m.min() + n.view(2, 2).amax(0, keepdim=True)[0, 1]),
    "max of bools": lambda s, b, h, q, k: s * flags[q].max() + flags[k].min(),
    "var": read(lambda m, n: m.var() + n.std(0, correction=0) + n.view(2, 2).var(1, keepdim=True)[0, 0]),
    "sum dtype": lambda s, b, h, q, k: s + i4[q].sum(dtype=torch.float32),
    "norm": read(
        lambda m, n: (
            m.norm()
            + torch.linalg.vector_norm(n, 1)
            + torch.linalg.vector_norm(n, 3)
            + torch.linalg.vector_norm(m, INF)
            + torch.linalg.vector_norm(n, -INF)
            + torch.linalg.vector_norm(n, 0)
        )
    ),
    # tensors of one value
    "created": lambda s, b, h, q, k: (
        s
        + torch.full((3,), 2.0)[k % 3]
        + torch.zeros(3)[q % 3]
        + torch.ones(3)[q % 3]
        + torch.full_like(f[q], 3.0)[1]
        + f[q].new_full((2,), 4.0)[0]
    ),
    "created like": lambda s, b, h, q, k: (
        s
        + torch.zeros_like(f[q])[1]
        + torch.ones_like(f[q])[1]
        + f[q].new_zeros(2)[1]
        + f[q].new_ones(2)[1]
        + torch.scalar_tensor(3.0)
        + torch.ops.aten.scalar_tensor(2.0)
    ),
    "empty": lambda s, b, h, q, k: (
        s + 0 * (torch.empty(2)[q % 2].isnan() | torch.empty_like(f[q])[1].isnan() | f[q].new_empty(2)[0].isnan())
    ),
}

NAMES = ("rows", "views", "reductions", "creation", "results")
used: set[tuple[str, str]] = set()


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Note which row of which table each operator finds."""
    names = {id(getattr(TABLES, name)): name for name in NAMES}
    find = elements.entry

    def noted(table: dict[str, Any], node: torch.fx.Node) -> Any:
        found = find(table, node)
        if found is not None:
            used.update((names[id(table)], key) for key, row in table.items() if row is found and _is_of(key, node))
        return found

    monkeypatch.setattr(elements, "entry", noted)
    yield


def _is_of(key: str, node: torch.fx.Node) -> bool:
    name = operator_name(node)
    return key in (name, f"{name}.{getattr(node.target, '_overloadname', '')}")


@pytest.mark.parametrize(("name", "kind"), [*odd_rows(), *(row for row in rows() if row[1] != "float")])
def test_cpu_engine(name: str, kind: str) -> None:
    check_row(name, kind, "cpu", exact=False, backend="CPU")


@pytest.mark.parametrize("name", CASES)
def test_operator(name: str) -> None:
    score = torch.tensor([-1.7, 0.4, 2.3, -0.2, 0.9, 5.1], dtype=torch.float64)
    mod = CASES[name]
    wanted = torch.stack([torch.as_tensor(mod(score[i], *(p[i] for p in POINTS))) for i in range(len(PLACES))])
    bound = trace(mod, "score", torch.float64)
    found = bound(score, *(p.int() for p in POINTS)).expand(len(PLACES))
    torch.testing.assert_close(found, wanted.double(), equal_nan=True, rtol=1e-6, atol=1e-9)


def test_every_row_was_used() -> None:
    """A row that no case above reaches has no test: add one."""
    for mod in CASES.values():
        trace(mod, "score", torch.float64)
    missing = {(t, key) for t in NAMES for key in getattr(TABLES, t)} - used
    assert not missing
