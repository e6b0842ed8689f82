"""precompile: a call on that GPU, whose launches are left out here, then compiles nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flexattn
from flexattn import AuxRequest, create_block_mask, flex_attention, mods, precompile
from flexattn.errors import ArgumentError
from flexattn.machine.target import Target
from flexattn.process import config
from flexattn.runtime.build import clear_memory, stats

pytest.importorskip("triton")

from kernel_warmup import compiling_only

from flexattn.mask_build.kernels import plan_mask
from flexattn.mask_build.launch_plan import recipe_of
from flexattn.mask_build.on_target import as_on_target
from flexattn.trace.trace import trace


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(folder))
    config.settings.cache_clear()
    clear_memory()
    yield folder
    monkeypatch.undo()
    config.settings.cache_clear()
    clear_memory()


def _call(device: str, learns: bool = True, **others: Any) -> dict[str, Any]:
    def tensor(H: int, N: int) -> torch.Tensor:
        return torch.empty(1, H, N, 64, dtype=torch.bfloat16, device=device, requires_grad=learns)

    return {"query": tensor(4, 512), "key": tensor(2, 512), "value": tensor(2, 512), "enable_gqa": True, **others}


def _causal(size: int = 128) -> flexattn.BlockMask:
    return create_block_mask(mods.causal, None, None, 512, 512, device="cpu", BLOCK_SIZE=size)


def _softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 20 * torch.tanh(score / 20)


@contextlib.contextmanager
def _compiling_nothing() -> Iterator[None]:
    clear_memory()
    yield
    assert stats()["compiles"] == 0
    assert stats()["disk_hits"] > 0


def _run(arch: int, **call: Any) -> None:
    with compiling_only(arch):
        out = flex_attention(**call)
        out = out[0] if isinstance(out, tuple) else out
        if out.requires_grad:
            out.sum().backward()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "forward": {"learns": False},
    "score": {"score_mod": _softcap},
    "largest scores": {"return_aux": AuxRequest(max_scores=True)},
    "sink": {"sink": 0.0},
    "dropout": {"dropout_p": 0.5},
    "captured": {"score_mod": mods.alibi(4)},
    "lengths": {"learns": False, "seqused_k": torch.full((1,), 300, dtype=torch.int32)},
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", CASES)
def test_a_call_compiles_nothing(case: str, arch: int) -> None:
    mask = None if case == "plain" else _causal()
    done = precompile([_call("meta", block_mask=mask, **CASES[case])], target=f"sm_{arch}")
    assert done.compiled and not done.found
    with _compiling_nothing():
        _run(arch, **_call("cpu", block_mask=mask, **CASES[case]))


def test_what_is_there_is_not_compiled_again(cache: Path) -> None:
    call = _call("meta", learns=False)
    first = precompile(call, processes=1)
    assert first.compiled == ("hopper_forward",)
    assert (first.target, first.folder) == ("sm_90", cache)
    clear_memory()
    second = precompile([call, call], processes=1)
    assert (second.compiled, second.found) == ((), first.compiled)
    assert str(second).startswith("0 kernels compiled for sm_90 in ")
    with _compiling_nothing():
        _run(90, **_call("cpu", learns=False))


@pytest.mark.slow
def test_masks_of_other_blocks_are_built_twice_on_a_hopper_gpu() -> None:
    mask = _causal(64)
    done = precompile(_call("meta", learns=False, block_mask=mask))
    assert "hopper_forward_causal" in done.compiled
    target = Target("cuda", 90, 32)
    plan = plan_mask(trace(mask.mask_mod, "mask"), target)
    assert plan is not None
    with _compiling_nothing():
        for block_size in ((64, 64), (128, 128)):
            recipe_of(plan, (), (1, 1, 512, 512), block_size, True, target)


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
def test_a_mask_of_a_grid_is_built_in_both_orders(learns: bool) -> None:
    tokens = 64 * 64
    mask = create_block_mask(mods.natten_2d(64, 64, 13), None, None, tokens, tokens, device="cpu")
    q = torch.empty(1, 2, tokens, 64, dtype=torch.bfloat16, device="meta", requires_grad=learns)
    done = precompile({"query": q, "key": q, "value": q, "block_mask": mask})
    # Windows of other sizes share kernels, and the first one that is traced names them.
    names = [name for name in done.compiled if name.startswith("mask_pair_bits")]
    assert sorted(re.sub(r"\d+x\d+", "window", name) for name in names) == [
        "mask_pair_bits_natten_2d_window", "mask_pair_bits_natten_2d_window_in_tiles"
    ]  # fmt: skip
    expected = {"hopper_forward"}  # which reads bits, so no mask_mod is in its name
    expected |= {"backward_delta", "hopper_backward", "backward_dq_rows"} if learns else set()
    assert expected == {name for name in done.compiled if not name.startswith("mask_")}
    with _compiling_nothing():
        there = as_on_target(mask, Target("cuda", 90, 32))[0]
        assert there.in_tiles is not None
        x = torch.empty_like(q, device="cpu").requires_grad_(learns)
        _run(90, query=x, key=x, value=x, block_mask=there)


@pytest.mark.parametrize(
    ("calls", "options", "text"),
    [
        ([3], {}, "calls: found a int"),
        ([{"query": None, "masks": 3}], {}, "an argument 'masks'"),
        ([], {"target": "h100"}, "target: found 'h100'"),
        ([], {"processes": 0}, "processes: found 0"),
    ],
)
def test_wrong_arguments(calls: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        precompile(calls, **options)


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", "/proc/flexattn")
    config.settings.cache_clear()
    with pytest.raises(ArgumentError, match="FLEXATTN_CACHE_DIR"):
        precompile([])
