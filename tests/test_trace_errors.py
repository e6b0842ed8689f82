"""trace: errors name the user's line, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager_comparison import N, Straight, values
from torch import Tensor

from flexattn import flex_attention, mods
from flexattn.errors import IndexRangeError, ModError, RetraceWarning, UnsupportedError
from flexattn.trace.aten import TABLES
from flexattn.trace.trace import trace

SCALE = values(N)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def line(mod: Callable[..., Any], offset: int = 1) -> str:
    return f"test_trace_errors.py:{mod.__code__.co_firstlineno + offset}"


def refuse(mod: Any, kind: str, pattern: str, error: type[Exception] = ModError, offset: int | None = None) -> None:
    with pytest.raises(error, match=pattern) as caught:
        trace(mod, kind)
    if offset is not None:
        assert line(mod, offset) in str(caught.value), str(caught.value)


def test_data_dependent_control_flow() -> None:
    def branch(s, b, h, q, k):
        if q > k:
            return s
        return -s

    def chained(b, h, q, k):
        return q > k and h == 0

    def item(s, b, h, q, k):
        return s * q.item()

    def as_int(s, b, h, q, k):
        return s * SCALE[int(q)]

    def ranged(s, b, h, q, k):
        return s + SCALE[h : h + 1].sum()

    def negation(b, h, q, k):
        return not q > k

    refuse(branch, "score", r"torch\.where\(condition", offset=1)
    refuse(chained, "mask", r"`&`", offset=1)
    refuse(negation, "mask", r"`~`", offset=1)
    for mod in (item, as_int):
        refuse(mod, "score", "reads the value of a tensor", offset=1)
    refuse(ranged, "score", r"uses a tensor as a Python index or length .*in a slice", offset=1)


def test_operators_whose_result_depends_on_values() -> None:
    flags = torch.arange(N) % 2 == 1
    count = torch.ones(N, dtype=torch.long)
    mods: dict[str, Callable[..., Tensor]] = {
        "aten.bincount.default": lambda s, b, h, q, k: s + torch.bincount(count)[count[k]],
        "aten._unique2.default": lambda s, b, h, q, k: s + torch.unique(count)[0],
        "aten.index.Tensor": lambda s, b, h, q, k: s + SCALE[flags].sum(),
        "aten.nonzero.default": lambda s, b, h, q, k: s + flags.nonzero()[0, 0],
        "aten.repeat_interleave.Tensor": lambda s, b, h, q, k: s + torch.repeat_interleave(SCALE, count)[k],
    }
    for operator, mod in mods.items():
        refuse(mod, "score", rf"depends on the values of a tensor \({operator}\). Call it outside of the mod")


def test_an_element_is_read_with_the_indices_that_the_mod_has() -> None:
    table = torch.rand(2, N)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h]

    refuse(mod, "score", r"for example table\[h, kv_idx\]")


def test_mutation_and_randomness() -> None:
    table = values(N).detach()

    def changes_capture(s, b, h, q, k):
        table[0] = 1.0
        return s

    def changes_score(s, b, h, q, k):
        s += 1
        return s

    def adds_in_place(s, b, h, q, k):
        table.add_(1)
        return s

    def noise(s, b, h, q, k):
        return s + torch.rand(())

    def dropout(s, b, h, q, k):
        return F.dropout(s, 0.5)

    for mod in (changes_capture, changes_score, adds_in_place):
        refuse(mod, "score", "in place", offset=1)
    for mod in (noise, dropout):
        refuse(mod, "score", "random numbers", offset=1)
    assert torch.equal(table, values(N))


def test_changes_without_gradient() -> None:
    def doubled(s, b, h, q, k):
        z = s * 1
        with torch.no_grad():
            z.mul_(2)
        return z

    def of_table(s, b, h, q, k):
        z = table[q] + 0
        with torch.no_grad():
            z += s
        return s + z

    def of_one_of_several_results(s, b, h, q, k):
        z = table.sort()[0]
        with torch.no_grad():
            z.mul_(2)
        return s + z[q]

    table = values(N)
    for mod in (doubled, of_table, of_one_of_several_results):
        refuse(mod, "score", "in place under torch.no_grad", offset=3)


def test_changes_of_views() -> None:
    table = values(N)
    views = (
        lambda x: x[0], lambda x: x.view(N), lambda x: x.T, lambda x: x.detach(), lambda x: x.unbind(0)[0],
        lambda x: x.split(1)[0], lambda x: next(iter(x)),
    )  # fmt: skip
    for view in views:
        for grad in (True, False):

            def mod(s, b, h, q, k, view=view, grad=grad):
                with torch.set_grad_enabled(grad):
                    x = (table * 2).view(1, N) * 1
                    view(x).mul_(3.0)
                return s + x[0, k]

            refuse(mod, "score", "a tensor that has views in place")


def test_gradients_inside_of_a_mod() -> None:
    table, module = values(N), torch.nn.Identity()
    module.register_full_backward_hook(lambda module, given, wanted: given)

    def of_torch_func(s, b, h, q, k):
        return torch.func.grad(torch.tanh)(s)

    def by_vjp(s, b, h, q, k):
        return torch.func.vjp(torch.tanh, s)[1](s)[0]

    def of_autograd(s, b, h, q, k):
        return torch.autograd.functional.jacobian(torch.tanh, s)

    def batched(s, b, h, q, k):
        return s + torch.vmap(torch.tanh)(table)[k]

    def asks(s, b, h, q, k):
        return s * 2 if s.requires_grad else s

    def asks_of_computed(s, b, h, q, k):
        return s * 2 if (s * table[q]).requires_grad else s

    def asks_of_others(s, b, h, q, k):
        parts = [torch.zeros(()), s.detach(), table[q].detach() * 2, (q - k).float()]
        return s * 2 if any(x.requires_grad for x in parts) else s

    def hooked(s, b, h, q, k):
        return module(s * 2)

    def of_capture(s, b, h, q, k):
        return s if table.grad is None else s * 2

    def by_function(s, b, h, q, k):
        return s if (table * 2).grad_fn is None else s * 2

    for mod in (of_torch_func, by_vjp):
        refuse(mod, "score", "differentiates with torch.func", offset=1)
    refuse(of_autograd, "score", r"differentiates with torch\.autograd\.functional", offset=1)
    refuse(batched, "score", r"calls torch\.vmap on a captured tensor", offset=1)
    for mod in (asks, asks_of_computed):
        refuse(mod, "score", "asks whether the score, or a tensor that it computes, requires a gradient", offset=1)
    x = torch.randn(1, 1, 4, 8)
    assert torch.equal(flex_attention(x, x, x, asks_of_others), flex_attention(x, x, x))
    refuse(hooked, "score", "a module with backward hooks", offset=1)
    for mod in (of_capture, by_function):
        refuse(mod, "score", r"reads \.grad or \.grad_fn", offset=1)


def test_results() -> None:
    one = values(1)
    refuse(lambda s, b, h, q, k: s * one, "score", r"shape \[1\], expected a scalar.*one\[h\]", offset=0)
    refuse(lambda s, b, h, q, k: None, "score", "type NoneType, expected a scalar tensor")
    refuse(lambda b, h, q, k: q - k, "mask", r"torch\.int64, expected torch\.bool\. Write a comparison", offset=0)
    refuse(lambda b, h, q, k: 1, "mask", "type int, expected a bool tensor")


def test_calls() -> None:
    refuse(3, "score", "found an int, expected a callable")
    refuse(causal, "score", "looks like a mask_mod: pass it as block_mask")
    refuse(lambda s, b, h, q, k: s, "mask", "looks like a score_mod")
    refuse(lambda s, b, h: s, "score", "5 positional parameters")
    refuse(lambda s, b, h, q, k, *, c: s, "score", "5 positional parameters")
    trace(lambda *args: args[0], "score")
    trace(lambda s, *rest: s, "score")
    trace(lambda s, b, h, q, k, extra=1: s * extra, "score")


def test_results_that_are_no_scores() -> None:
    mine = "score_mod mod, line .*"

    def refused(mod: Callable[..., Any], pattern: str) -> None:
        mod.__name__ = "mod"
        refuse(mod, "score", pattern)

    refused(lambda s, b, h, q, k: torch.complex(s, s), "score_mod mod")
    refused(lambda s, b, h, q, k: s.to(torch.complex64), mine + "dtype torch.complex64, expected a real number")
    refused(lambda s, b, h, q, k: q >= k, mine + r"dtype torch.bool, expected a real number. It looks like a mask_mod")
    refused(lambda s, b, h, q, k: True, "score_mod mod: found a result of type bool.* It looks like a mask_mod")
    refused(lambda s, b, h, q, k: 1j, "score_mod mod: found a result of type complex.*real part")
    refused(lambda s, b, h, q, k: s.unsqueeze(0), mine + r"shape \[1\]")
    refused(lambda s, b, h, q, k: s * q.item(), "score_mod mod at .* reads the value of a tensor")
    refused(lambda s, b, h, q, k: s * torch.rand(()), "score_mod mod at .* draws random numbers")
    refused(lambda s, b, h, q, k: torch.nonzero(s).sum(), r"score_mod mod at .* \(aten.nonzero.default\)")
    refused(lambda s, b, h, q, k: None, "score_mod mod: .* NoneType.* It has no return statement")


def test_messages_name_the_kind_of_mod() -> None:
    def mod(b, h, q, k):
        return q + k

    refuse(mod, "mask", "mask_mod mod, line .*: found a result of dtype torch.int64")
    refuse(lambda b, h, q, k: q, "mask", "^mask_mod, line")


def test_arguments_are_never_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row has no parameter for goes to PyTorch's decomposition, or is refused."""
    long = values(N, 4)
    refuse(lambda s, b, h, q, k: s + s.view(torch.int32), "score", "reinterprets a", UnsupportedError)
    refuse(lambda s, b, h, q, k: s + long[q].roll(1)[0] + torch.gcd(q, k), "score", "gcd.* of steps", UnsupportedError)
    refuse(
        lambda s, b, h, q, k: s + long[q].scatter(0, q[None], s[None].double())[1],
        "score",
        "torch.where",
        UnsupportedError,
    )
    monkeypatch.setitem(TABLES.rows, "round.decimals", TABLES.rows["floor"])
    refuse(lambda s, b, h, q, k: torch.round(s, decimals=1), "score", "no rule: .*'decimals'", UnsupportedError)


def test_unknown_operators_and_long_reductions() -> None:
    long = values(N, 256)
    refuse(lambda s, b, h, q, k: s + long[q].norm(), "score", "over 256 elements", UnsupportedError)
    refuse(lambda s, b, h, q, k: torch.special.bessel_j0(s), "score", "bessel_j0", UnsupportedError, offset=0)
    refuse(lambda s, b, h, q, k: s + long[q].sort()[0][k], "score", "sort", UnsupportedError, offset=0)
    refuse(lambda s, b, h, q, k: Straight.apply(s), "score", "autograd.Function", UnsupportedError)


def test_the_users_exception_is_the_cause() -> None:
    def fails(s, b, h, q, k):
        raise KeyError("no such bias")

    with pytest.raises(ModError, match="raised KeyError: 'no such bias'") as caught:
        trace(fails, "score")
    assert isinstance(caught.value.__cause__, KeyError)
    assert line(fails) in str(caught.value)


TWO, LENGTH = 2.0, 2


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + torch.tensor([1.0, 2.0])[k],
        lambda s, b, h, q, k: s + torch.tensor([1.0, TWO])[k],
        lambda s, b, h, q, k: s + torch.arange(2)[k],
        lambda s, b, h, q, k: s + torch.arange(LENGTH)[k],
        lambda s, b, h, q, k: s + torch.zeros(2)[k],
        lambda s, b, h, q, k: s + torch.full((2,), TWO)[k],
        lambda s, b, h, q, k: s + torch.stack([s, s * 2])[k],
        lambda s, b, h, q, k: s + s.expand(2)[k],
        lambda s, b, h, q, k: s + torch.tensor([[1.0, 2.0], [3.0, 4.0]])[q % 2, k],
        lambda s, b, h, q, k: s + torch.take(torch.ones(2, 1), k),
        lambda s, b, h, q, k: s + F.embedding(k, torch.ones(2, 3)).sum(),
        lambda s, b, h, q, k: s + torch.ones(2).index_select(0, k.view(1)).sum(),
        lambda s, b, h, q, k: s + torch.ones(2).gather(0, k.view(1)).sum(),
    ],
)
def test_an_index_outside_of_a_tensor_that_the_mod_makes(mod: Callable[..., Any]) -> None:
    bound = trace(mod, "score")
    zero, inside = torch.zeros(()), torch.arange(2)
    places = torch.tensor(0), torch.tensor(0), torch.tensor(1)
    expected = torch.stack([mod(zero, *places, k) for k in inside])
    torch.testing.assert_close(bound(zero, *places, inside), expected.float())
    for outside in (2, -3):
        text = rf"score_mod \(.*{line(mod, 0)}\): found index {outside} of a tensor that it makes, expected -2 to 1, as"
        with pytest.raises(IndexRangeError, match=text):
            bound(zero, *places, torch.tensor([0, outside]))


def test_indices_that_are_checked_cost_nothing() -> None:
    table = values(N, N, 2)
    for mod in (
        lambda s, b, h, q, k: s + table[q][k][0],
        lambda s, b, h, q, k: s + table[q].square()[k, 1],
        lambda s, b, h, q, k: s + (table[q] * s).sum(-1)[k],
    ):
        assert [c.name for c in trace(mod, "score").graph.captures] == ["table"]


def test_indices_that_are_in_range_cost_nothing() -> None:
    assert not trace(lambda s, b, h, q, k: s + torch.tensor([1.0, 2.0])[k % 2], "score").captures
    assert not trace(lambda s, b, h, q, k: s + torch.arange(8)[(q - k).clamp(-8, 7)], "score").captures


def test_fixes_of_indices_out_of_range() -> None:
    table = torch.zeros(2)

    def read(mod: Callable[..., Any], kind: Any, b: int, h: int, length: int) -> None:
        places = torch.arange(b), torch.arange(h), torch.arange(length), torch.arange(length)
        given = torch.meshgrid(*places, indexing="ij")
        trace(mod, kind)(*(torch.zeros(()),) * (kind == "score"), *given)

    for mod, sizes, fix in (
        (lambda s, b, h, q, k: s + table[b], (3, 1, 1), "The index is b: give `table` an entry for each sequence"),
        (lambda s, b, h, q, k: s + table[h], (1, 3, 1), "The index is h: give `table` an entry for each query head"),
        (lambda s, b, h, q, k: s + table[q], (1, 1, 3), "Pad `table` up to the lengths of query and key"),
        (lambda s, b, h, q, k: s + torch.ones(2)[h], (1, 3, 1), "The index is h: give it an entry for each query head"),
    ):
        with pytest.raises(IndexRangeError, match=fix):
            read(mod, "score", *sizes)
    with pytest.raises(IndexRangeError, match=r"offsets ends at 2\. It is cumulative.*offsets\[-1\] is that length"):
        read(mods.document(offsets=torch.tensor([0, 1, 2])), "mask", 1, 1, 3)


def test_an_index_out_of_range_names_the_line_of_the_read() -> None:
    table = torch.zeros(2)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        doubled = s * 2
        return doubled + table[k]

    with pytest.raises(IndexRangeError, match=rf"score_mod mod \(.*{line(mod, 2)}\): found index 2 in dimension 0"):
        trace(mod, "score")(*[torch.tensor(2)] * 5)


def test_shapes_of_captured_tensors_are_named() -> None:
    bias = torch.zeros(7, 9)
    text = r"found a result of shape \[7, 9\], expected a scalar.*for example bias\[q_idx, kv_idx\]"
    refuse(lambda s, b, h, q, k: s + bias, "score", text, offset=0)
    text = r"found 4 indices into the captured tensor `bias` of shape \[7, 9\], expected at most 2\. Leave out"
    refuse(lambda s, b, h, q, k: s + bias[b, h, q, k], "score", text, offset=0)


def test_the_users_own_exceptions_have_no_advice() -> None:
    def fails(error: Exception) -> Any:
        def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            raise error

        return mod

    for error in (KeyError("x"), ZeroDivisionError("x"), ValueError("x"), NameError("x"), NotImplementedError("x")):
        with pytest.raises(ModError, match=rf"raised {type(error).__name__}: '?x'?$"):
            trace(fails(error), "score")
    with pytest.raises(ModError, match=r"raised TypeError: x\. A score_mod is called with 0-d tensors"):
        trace(fails(TypeError("x")), "score")


def test_a_mod_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        print("score:", s)
        return s

    trace(mod, "score")
    assert capsys.readouterr().out.count("score:") == 1


def test_tables_and_indices_of_other_kinds_name_the_fix() -> None:
    table, numbers, limit = torch.zeros(4), {0: 1.0}, np.array(3)
    index = r"found an index that is no integer, expected int32 or int64\. Write `i // 2` instead of `i / 2`, or .*long"
    refuse(lambda s, b, h, q, k: s + table[q / 2], "score", index, offset=0)
    key = r"uses a position as the key of a dict.*are tensors.*table = torch\.tensor"
    refuse(lambda s, b, h, q, k: s + numbers[h], "score", key, offset=0)
    array = r"uses a position or score with a numpy array\. Capture a tensor"
    refuse(lambda b, h, q, k: q - k < limit, "mask", array, offset=0)
    refuse(lambda s, b, h, q, k: limit * s, "score", array, offset=0)
    with pytest.raises(ModError, match="raised KeyError: 'x'"):
        trace(lambda s, b, h, q, k: s + {}["x"], "score")


def test_numpy_arrays_name_the_fix() -> None:
    array = np.array([0.5])

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * array[0]

    with pytest.warns(RetraceWarning, match=r"^score_mod \(.*it reads a numpy array.*capture torch\.from_numpy"):
        trace(score_mod, "score")
