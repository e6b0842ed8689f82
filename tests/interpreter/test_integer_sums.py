"""Gradients of captured tensors as integer sums, in Triton's interpreter: right, and NaN where one does not exist."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from kernel_cases import CASES, Call, Setting, check_case
from kernel_checks import run
from quick import slow_unless
from torch import Tensor

from flexattn import BlockMask
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.runtime import launch

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of masked places

AT = Setting("cpu", torch.float32)
# Additive, multiplicative, 0-d, several uses of one tensor, indices that are read, diagonals of one cell and of many.
USES = (
    "unmasked-row_plus_column", "unmasked-dense_factor", "score-chained", "unmasked-zero_d", "unmasked-sites",
    "score-nested_pairs", "score-clamped", "unmasked-relative",
)  # fmt: skip


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KernelPlan]]:
    """Ask for deterministic algorithms; give the plans that are made from then on."""
    made: list[KernelPlan] = []
    prepare = launch.prepare

    def remembering(plan: KernelPlan, *rest: object) -> launch.Launch:
        made.append(plan)
        return prepare(plan, *rest)

    monkeypatch.setattr(launch, "prepare", remembering)
    launch.forget_launches()
    torch.use_deterministic_algorithms(True)
    yield made
    torch.use_deterministic_algorithms(False)


def captured_gradients(call: Call, d_out: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of captured tensors where nothing else needs one."""
    inputs = (x.detach() for x in (call.query, call.key, call.value))
    learned = [x.requires_grad_() for x in call.learned]
    return torch.autograd.grad(run(AT, *inputs, call.score_mod, call.mask), learned, d_out)


def with_floats(call: Call, d_out: Tensor) -> tuple[Tensor, ...]:
    torch.use_deterministic_algorithms(False)
    found = captured_gradients(call, d_out)
    torch.use_deterministic_algorithms(True)
    return found


def random_like_out(call: Call) -> Tensor:
    return AT.randn(*call.query.shape[:3], call.value.size(3), seed=5)


@pytest.mark.parametrize("name", USES)
def test_use(name: str, plans: list[KernelPlan]) -> None:
    check_case(name, AT)
    assert "integer" in {plan.sums for plan in plans}


@pytest.mark.parametrize("name", slow_unless("score-clamped".__eq__, ["score-clamped", "unmasked-gate"]))
def test_steps_follow_the_size_of_gradients(name: str, plans: list[KernelPlan]) -> None:
    """Integers lose nothing that floats keep, and turning the mode off and on finds the right kernels."""
    call = CASES[name](AT)
    d_out = random_like_out(call)
    factors = (2.0**13, 2.0**-20, 2.0**-83, 0.0)
    integers = [captured_gradients(call, d_out * factor) for factor in factors]
    floats = with_floats(call, d_out)
    for factor, found in zip(factors, integers, strict=True):
        for ours, theirs in zip(found, floats, strict=True):  # a power of two is a factor without rounding
            assert (ours - theirs * factor).abs().max() <= 2e-6 * factor * theirs.abs().max()
            assert bool(ours.any()) == (factor > 0)
    measured = name == "unmasked-gate"
    kernels = ["forward", "backward_delta", *(["backward_sizes"] if measured else []), "backward_captures"]
    planned = [(plan.spec.name, plan.sums) for plan in plans if plan.spec.name not in ("forward", "backward_delta")]
    assert [kernel for kernel, _ in planned] == [*kernels[2:], "backward_captures"], "dq, dk and dv are not computed"
    assert [sums for _, sums in planned[-2:]] == ["integer", "float"]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("name", ["score-clamped", "unmasked-gate"])
def test_what_is_no_number_is_not_hidden(name: str, bad: float, plans: list[KernelPlan]) -> None:
    call = CASES[name](AT)
    d_out = random_like_out(call)
    d_out[1, 1, 33, 3] = bad
    integers, floats = captured_gradients(call, d_out), with_floats(call, d_out)
    for ours, theirs in zip(integers, floats, strict=True):
        assert ours[~theirs.isfinite()].isnan().all() and not theirs.isfinite().all()


def test_keys_without_a_query_may_be_nan(plans: list[KernelPlan]) -> None:
    """They are in no sum, and in no bound of one."""
    q, k, v = (AT.randn(1, 2, 64, 16, seed=i) for i in range(3))
    table = AT.randn(64, seed=4).requires_grad_()
    counts, columns = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts * 0, columns, counts, columns, 32, None, (64, 64))

    def gradient() -> Tensor:
        call = Call(q, k, v, lambda s, b, h, i, j: s + table[j], mask, learned=(table,))
        return captured_gradients(call, random_like_out(call))[0]

    want = gradient()
    k[:, :, 32:] = v[:, :, 32:] = math.nan
    assert torch.equal(gradient(), want) and want.isfinite().all() and want.any()
