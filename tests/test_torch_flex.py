"""install_as_torch_flex: software that imports torch's flex_attention computes the same with flexattn."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import install_as_torch_flex

NAMES = ("flex_attention", "create_block_mask", "create_mask", "and_masks", "or_masks")
KEPT = ("BlockMask", "AuxOutput", "AuxRequest", "noop_mask", "_vmap_for_bhqkv", "_create_sparse_block_from_block_mask")
T, D = 200, 32
IDS = torch.arange(T) // 70
held = upstream.flex_attention  # as `from ... import flex_attention`
torchs_advice = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
held_before_all = {name: getattr(upstream, name) for name in (*NAMES, *KEPT)}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    assert all(getattr(upstream, name) is value for name, value in held_before_all.items()), "not restored"


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (IDS[q_idx] == IDS[kv_idx])


def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return 5 * torch.tanh(score / 5)


# score_mod, mask_mod, key heads
CASES: dict[str, tuple[Any, Any, int]] = {
    "full": (None, None, 4), "causal": (None, causal, 4), "document": (None, document, 4),
    "softcap": (softcap, causal, 4), "gqa": (softcap, document, 2),
}  # fmt: skip


def qkv(heads: int = 4, gradient: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, n, T, D, requires_grad=gradient) for n in (4, heads, heads))
    return q, k, v


def math(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any) -> Tensor:
    """Attention as torch computes it, dense and differentiable."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / D**0.5
    i = torch.arange(T)
    if score_mod is not None:
        scores = score_mod(scores, i[:1], i[:1], i[:, None], i)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(i[:1], i[:1], i[:, None], i), -float("inf"))
    return scores.softmax(-1) @ v


def mask_of(mod: Any) -> Any:
    return None if mod is None else upstream.create_block_mask(mod, None, None, T, T, device="cpu")


def runs_flexattn(call: Callable[[], Any]) -> bool:
    with torch.profiler.profile(acc_events=True) as seen:
        call()
    return any(event.key.startswith("flexattn::") for event in seen.key_averages())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("torchs_mask", [False, True], ids=["own mask", "torch's mask"])
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
def test_results_and_gradients(case, torchs_mask, backend):
    score_mod, mask_mod, heads = CASES[case]
    if backend == "inductor" and case not in ("document", "gqa"):
        pytest.skip("as quicker backends")
    q, k, v = qkv(heads, gradient=True)
    mask = mask_of(mask_mod) if torchs_mask else None
    with install_as_torch_flex():
        flex: Any = upstream.flex_attention
        if backend is not None:
            flex = torch.compile(flex, dynamic=False, fullgraph=True, backend=backend)
        out = flex(q, k, v, score_mod, mask if torchs_mask else mask_of(mask_mod), enable_gqa=heads != 4)
    expected = math(q, k, v, score_mod, mask_mod)
    torch.testing.assert_close(out, expected)
    d_out = torch.randn_like(out)
    for x, y in zip(*(torch.autograd.grad(o, (q, k, v), d_out) for o in (out, expected)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("reads", ["b", "h"])
@pytest.mark.parametrize("how", ["eager", "compiled", "recorded"])
def test_torchs_mask_of_one_batch_and_head_must_not_read_them(reads: str, how: str) -> None:
    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx + (b if reads == "b" else h)

    q, mask = torch.randn(2, 4, T, D), mask_of(mod)
    with install_as_torch_flex():
        flex: Any = upstream.flex_attention

    def call(q: Tensor) -> Any:
        return flex(q, q, q, block_mask=mask)

    run: Any = call
    if how == "compiled":
        run = torch.compile(call, fullgraph=True, backend="eager")
    if how == "recorded":
        run = make_fx(call)
    with pytest.raises(Exception, match=f"the mask_mod mod, which reads {reads}"):
        run(q)


@torchs_advice
def test_the_same_as_torchs_own():
    q, k, v = qkv()
    expected = held(q, k, v, softcap, mask_of(document), return_aux=upstream.AuxRequest(lse=True))
    options: Any = {"BLOCK_M": 64, "BLOCK_N": 64}
    with install_as_torch_flex():
        out, aux = upstream.flex_attention(
            q, k, v, softcap, mask_of(document), kernel_options=options, return_aux=upstream.AuxRequest(lse=True)
        )  # fmt: skip
    torch.testing.assert_close((out, aux.lse), (expected[0], expected[1].lse))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_return_lse(backend):
    q, k, v = qkv()
    compiled: Any = held if backend is None else torch.compile(held, fullgraph=True, backend=backend)
    with install_as_torch_flex():
        _, expected = upstream.flex_attention(q, k, v, return_aux=upstream.AuxRequest(lse=True))
        flexattn.api._warn_return_lse.cache_clear()
        if backend is None:
            with pytest.warns(FutureWarning, match="return_lse is deprecated") as caught:
                out, lse = compiled(q, k, v, return_lse=True)
            assert caught[0].filename == __file__
        else:
            out, lse = compiled(q, k, v, return_lse=True)
    assert out.shape == q.shape
    torch.testing.assert_close(lse, expected.lse)


def test_the_private_compile_argument_and_compiled_masks():
    with install_as_torch_flex():
        with pytest.warns(DeprecationWarning, match="_compile"):
            mask = upstream.create_block_mask(causal, None, None, T, T, device="cpu", _compile=True)
        compiled = torch.compile(upstream.create_block_mask, backend="eager")(causal, None, None, T, T, device="cpu")
        both = upstream.and_masks(causal, upstream.or_masks(document, upstream.noop_mask))
        dense = upstream.create_mask(both, 1, 1, T, T, device="cpu")
    assert type(mask) is type(compiled) is flexattn.BlockMask
    assert torch.equal(mask.to_dense(), compiled.to_dense())
    assert torch.equal(dense, upstream.create_mask(causal, 1, 1, T, T, device="cpu"))


def test_what_is_replaced():
    with install_as_torch_flex():
        assert all(getattr(upstream, name) is getattr(flexattn, name) for name in NAMES)
        assert all(getattr(upstream, name) is held_before_all[name] for name in KEPT)
        assert issubclass(flexattn.BlockMask, upstream.BlockMask)


@torchs_advice
def test_functions_that_were_imported_before_forward():
    q, k, v = qkv()
    early = torch.compile(held, dynamic=False, fullgraph=True, backend="aot_eager")

    @torch.compile(backend="aot_eager")
    def model(x: Tensor) -> Tensor:
        return held(x, x, x) + 1

    expected, calls = model(q), (lambda: held(q, k, v, softcap), lambda: early(q, k, v), lambda: model(q))
    early(q, k, v)
    for _ in range(2):
        with install_as_torch_flex():
            torch.testing.assert_close(model(q), expected)
            early(q, k, v)
            assert all(runs_flexattn(call) for call in calls[1:])
            with pytest.raises(flexattn.FlexAttentionError, match="dropout_p"):
                held(q, k, v, dropout_p=2.0)  # type: ignore[call-arg]
        assert not any(runs_flexattn(call) for call in calls)
        torch.testing.assert_close(model(q), expected)


def test_holders_are_named_and_logged(caplog):
    with caplog.at_level(logging.INFO, "flexattn"), install_as_torch_flex() as installed:
        assert f"{__name__}.held" in installed.holders
        assert not any(name.startswith(("flexattn.", upstream.__name__)) for name in installed.holders)
        assert f"{__name__}.held" in caplog.text
        assert "active" in repr(installed)
    assert "removed" in repr(installed)


def test_restored_exactly():
    def state(function: Any) -> tuple[Any, ...]:
        return function.__code__, function.__defaults__, function.__kwdefaults__, dict(function.__dict__)

    names, before = dict(vars(upstream)), [state(held_before_all[name]) for name in NAMES]
    with pytest.raises(ZeroDivisionError), install_as_torch_flex():
        raise ZeroDivisionError
    assert vars(upstream) == names
    assert [state(held_before_all[name]) for name in NAMES] == before
    assert pickle.loads(pickle.dumps(held)) is held


def test_nested_and_repeated():
    first, second = install_as_torch_flex(), install_as_torch_flex()
    with install_as_torch_flex():
        first.remove()
        first.remove()
    assert upstream.flex_attention is flexattn.flex_attention
    second.remove()
    assert upstream.flex_attention is held


def test_a_function_that_was_replaced_by_others_is_put_back(monkeypatch):
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return held(*args, **kwargs)

    monkeypatch.setattr(upstream, "flex_attention", theirs)
    with install_as_torch_flex():
        assert upstream.flex_attention is flexattn.flex_attention
    assert upstream.flex_attention is theirs
    monkeypatch.undo()


def test_software_that_imported_before(tmp_path):
    script = """
import torch, earlier_import as software, flexattn
x, mask = torch.randn(1, 2, 64, 16), software.mask(64)
expected = software.compiled(x, x, x, block_mask=mask)
installed = flexattn.install_as_torch_flex()
print(*installed.holders)
print(type(software.mask(64)).__module__)
for found in (software.compiled(x, x, x, block_mask=mask), software.Attention()(x, software.mask(64))):
    torch.testing.assert_close(found, expected)
from torch.nn.attention.flex_attention import flex_attention
print(flex_attention is flexattn.flex_attention)
installed.remove()
print(type(software.mask(64)).__module__)
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    folders = [str(Path(__file__).parent), str(Path(flexattn.__file__).parent.parent)]
    code = f"import sys, runpy; sys.path[:0] = {folders!r}; runpy.run_path({str(path)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    holders, *rest = done.stdout.splitlines()
    names = {"earlier_import.compiled", "earlier_import.create_block_mask", "earlier_import.flex_attention"}
    assert names <= set(holders.split())
    assert rest == ["flexattn.block_mask.mask", "True", "torch.nn.attention.flex_attention"]


def test_installations_that_nobody_keeps_stay():
    """Python gives their ids to later ones."""
    from flexattn.integrations import torch_flex

    for _ in range(20):
        install_as_torch_flex()
    for _ in range(20):
        with install_as_torch_flex():
            pass
    assert upstream.flex_attention is flexattn.flex_attention
    forgotten = install_as_torch_flex()
    torch_flex._users.intersection_update({forgotten._number})
    forgotten.remove()


def test_a_removed_installation_can_be_entered_again():
    installed = install_as_torch_flex()
    for _ in range(2):
        with installed:
            assert upstream.flex_attention is flexattn.flex_attention
        assert upstream.flex_attention is held


def test_what_other_software_put_there_later_stays():
    names: Any = upstream
    installed = install_as_torch_flex()
    names.create_mask = len
    installed.remove()
    found, names.create_mask = names.create_mask, held_before_all["create_mask"]
    assert found is len and upstream.flex_attention is held


def test_installing_inside_of_a_compiled_function():
    def attention(q: Tensor) -> Tensor:
        with install_as_torch_flex():
            return held(q, q, q)

    q, _, _ = qkv()
    torch.testing.assert_close(torch.compile(attention, backend="eager")(q), math(q, q, q, None, None))
    assert upstream.flex_attention is held
