"""The table of operations through kernels: the lse of a row with a single key is the score that a mod gives it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from test_operators import DOMAINS, FLOATS, INTEGERS
from torch import Tensor

from flexattn import AuxRequest, flex_attention
from flexattn.graph.operators import OPS

_INTEGER_ONLY = ("bitand", "bitor", "bitxor", "bitnot", "shl", "shr")
_BOOLEAN = ("and", "or", "xor", "not")
_BOTH = (
    "add", "sub", "mul", "floordiv", "mod", "fmod", "neg", "abs", "maximum", "minimum",
    "eq", "ne", "lt", "le", "gt", "ge", "where",
)  # fmt: skip
_BINARY = (*_BOTH[:6], "div", "pow", *_BOTH[8:16], "atan2", "copysign", *_BOOLEAN[:3], *_INTEGER_ONLY[:3], "shl", "shr")
_SPECIAL = [math.nan, math.inf, -math.inf, 0.0, 1.5]
_ODD = [math.nan, math.inf, -math.inf, -0.0, 1e30, -1e30, 1e-30, -2.5, 3.0]
KINDS = {"float": torch.float32, "odd": torch.float32, "int": torch.int32, "long": torch.int64, "bool": torch.bool}


def rows() -> list[tuple[str, str]]:
    """Return (operation, kind of operands) of every row of the table."""
    found = []
    for name in OPS:
        if name in _BOOLEAN:
            found.append((name, "bool"))
        elif name in _INTEGER_ONLY:
            found += [(name, "int"), (name, "long")]
        else:
            found.append((name, "float"))
            found += [(name, "int")] if name in _BOTH else []
    return found


# Integers where the width decides: of counts from -3 to 69 and of large numbers.
WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "shift left": lambda k, n: (1 << k) & n, "shift right": lambda k, n: n >> k, "powers of 3": lambda k, n: 3**k,
    "powers": lambda k, n: (n % 5) ** (k % 9), "powers of int32": lambda k, n: (n % 5).int() ** (k % 9).int(),
    "signs": lambda k, n: (-1) ** (k - 5), "int32 shift": lambda k, n: k.int() << (n % 40).int(),
    "sums": lambda k, n: k * 2**40 + n, "bytes": lambda k, n: ~n.to(torch.uint8) + k.to(torch.uint8),
}  # fmt: skip


def check_whole(name: str) -> None:
    """Compare an operation of integers, whose result is taken apart so that float32 holds it, with torch's."""
    k = torch.arange(-3, 70)
    n = torch.randint(-(2**62), 2**62, k.shape, generator=torch.Generator().manual_seed(0))

    def mod(k: Tensor, n: Tensor) -> Tensor:
        return (WHOLE[name](k, n).long() % 1_000_003).to(torch.float32)

    got, _ = through_kernel(mod, [k, n], "cpu", exact=True)
    torch.testing.assert_close(got, mod(k, n), rtol=1e-6, atol=0)


def odd_rows() -> list[tuple[str, str]]:
    """Return (operation, "odd") of those on floats: NaN, infinities, a negative zero, huge and tiny numbers."""
    return [(name, "odd") for name, kind in rows() if kind == "float"]


def operands(name: str, kind: str) -> list[Tensor]:
    """Return the columns of operands, every pair of values once where there are two."""
    if kind == "bool":
        values: list[float] = [0.0, 1.0]
    elif kind == "odd":
        values = _ODD
    elif kind != "float":
        values = [float(i) for i in (INTEGERS if name not in ("shl", "shr") else [0, 1, 3, 5])]
    elif name in ("isnan", "isinf"):
        values = _SPECIAL
    elif name in DOMAINS:
        low, high = DOMAINS[name]
        values = torch.linspace(low, high, 8).tolist()
    else:
        values = FLOATS
    first = torch.tensor(values).to(KINDS[kind])
    if name == "where":
        second = first.flip(0)
        return [first > 0, first, second]
    if name not in _BINARY:
        return [first]
    second = first if name == "pow" or kind != "float" else torch.tensor(FLOATS)
    if name in ("div", "floordiv", "mod", "fmod", "atan2", "copysign"):
        second = second[second != 0]
    pairs = torch.cartesian_prod(torch.arange(len(first)), torch.arange(len(second)))
    return [first[pairs[:, 0]], second[pairs[:, 1]]]


def through_kernel(
    mod: Callable[..., Tensor], columns: list[Tensor], device: str, exact: bool = False, backend: str = "TRITON"
) -> tuple[Tensor, list[Tensor | None]]:
    """Return mod(*columns) as the kernels compute it, and the gradient of its sum by each column."""
    columns = [x.to(device).requires_grad_(x.is_floating_point()) for x in columns]
    q, k = (torch.ones(1, 1, n, 16, device=device) for n in (len(columns[0]), 1))
    score_mod = lambda s, b, h, i, j: mod(*(x[i] for x in columns))  # noqa: E731
    options = {"BACKEND": backend, "EXACT": exact}
    _, aux = flex_attention(q, k, k, score_mod, scale=1.0, return_aux=AuxRequest(lse=True), kernel_options=options)
    assert aux.lse is not None
    learned = [x for x in columns if x.requires_grad]
    grads: list[Tensor | None] = []
    if learned and aux.lse.requires_grad:
        grads = list(torch.autograd.grad(aux.lse[aux.lse.isfinite()].sum(), learned, allow_unused=True))
    return aux.lse.detach()[0, 0].cpu(), grads


def check_row(
    name: str, kind: str, device: str, rtol: float = 2e-5, exact: bool = True, backend: str = "TRITON"
) -> None:
    """Compare an operation's values and gradients with torch's."""
    op = OPS[name]
    columns = operands(name, kind)
    boolean = op.result == "bool" or kind == "bool"

    def mod(*x: Tensor) -> Tensor:
        result = op.torch(*x)
        if kind == "odd" and not boolean:
            return _told_apart(result.to(torch.float32))
        return torch.where(result, 1.0, 0.25) if boolean else result.to(torch.float32)

    got, grads = through_kernel(mod, columns, device, exact, backend)
    wide = [x.double().requires_grad_() if x.is_floating_point() else x for x in columns]
    want = op.torch(*wide)
    expected = torch.where(want, 1.0, 0.25) if boolean else want.detach().double()
    if kind == "odd" and not boolean:
        expected = _told_apart(op.torch(*columns).detach()).double()
    told = _told(name, columns, device)
    torch.testing.assert_close(got.double()[told], expected.double()[told], rtol=rtol, atol=4e-6, equal_nan=True)
    if kind == "odd" or op.grad is None or not want.requires_grad or not grads:
        return
    exact_grads = torch.autograd.grad(want.sum(), [x for x in wide if x.requires_grad], allow_unused=True)
    for ours, theirs in zip(grads, exact_grads, strict=True):
        theirs = torch.zeros_like(columns[-1], dtype=torch.float64) if theirs is None else theirs
        ours = torch.zeros_like(theirs) if ours is None else ours.cpu().double()
        torch.testing.assert_close(ours[told], theirs[told], rtol=5 * rtol, atol=2e-5)


def _told_apart(x: Tensor) -> Tensor:
    """Return finite scores, which an lse can be: other numbers, and NaN, by one each; huge ones by their size alone."""
    x = torch.where(x.isnan(), 7.0, torch.where(x == math.inf, 11.0, torch.where(x == -math.inf, 13.0, x)))
    return torch.where(x.abs() > 1e20, torch.where(x > 0, 17.0, 19.0), x)


def _told(name: str, columns: list[Tensor], device: str) -> Tensor:
    """Return what can be compared: all on a GPU.

    Remainders near whole quotients want an fma, and in Triton's interpreter, which runs where there is none, it rounds
    twice.
    """
    if device == "cpu" and name in ("floordiv", "mod", "fmod") and columns[0].is_floating_point():
        quotient = columns[0] / columns[1]
        return (quotient - quotient.round()).abs() > 1e-3
    return torch.ones(len(columns[0]), dtype=torch.bool)
