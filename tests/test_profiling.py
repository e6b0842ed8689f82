"""flexattn.profile, without a GPU: its kernel run as PTX, where the clock counts instructions."""

from __future__ import annotations

import pytest
import torch

import flexattn
from flexattn import create_block_mask, explain, mods
from flexattn.errors import UnsupportedError

pytest.importorskip("triton")

from emulation import emulated

from flexattn.call.call import Call
from flexattn.call.pose import pose
from flexattn.machine.target import Target
from flexattn.profiling import profile_problem

OPTIONS = {"PROFILE": True, "BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 1}


def profiled(M: int, N: int, mask: flexattn.BlockMask | None) -> flexattn.Profile:
    q, k = torch.zeros(1, 2, M, 16, dtype=torch.float16), torch.zeros(1, 2, N, 16, dtype=torch.float16)
    with emulated("sm_80"):
        return profile_problem(pose(Call(q, k, k, block_mask=mask, kernel_options=OPTIONS)), Target("cuda", 80, 32))


def test_tiles_of_a_causal_mask() -> None:
    mask = create_block_mask(mods.causal, None, None, 72, 72, device="cpu", BLOCK_SIZE=32)
    found = profiled(72, 72, mask)
    assert found.first_row.tolist() == [0, 16, 32, 48, 64]
    assert found.pairs.tolist() == [[[16 * 32, 16 * 32, 16 * 64, 16 * 64, 8 * 72]] * 2]
    assert found.cycles.shape == (1, 2, 5) and (found.cycles > 0).all()
    first, third, last = found.cycles[0, 0, [0, 2, 4]].tolist()
    assert first < third < last, "cycles grow with the keys"
    lines = str(found).splitlines()
    assert lines[0].startswith("Profile of forward_causal") and "10 tiles" in lines[1]
    assert lines[4].split()[2] == "64", "the slowest tile comes first"


def test_without_a_mask_every_tile_has_all_keys() -> None:
    found = profiled(40, 24, None)
    assert found.first_row.tolist() == [0, 16, 32] and found.pairs.tolist() == [[[16 * 24, 16 * 24, 8 * 24]] * 2]
    assert (found.cycles > 0).all()


def test_a_cpu_has_no_profile() -> None:
    q = torch.zeros(1, 1, 16, 16)
    with pytest.raises(UnsupportedError, match=r"query: found float32 \(1, 1, 16, 16\) on cpu"):
        flexattn.profile(q, q, q)


def test_a_call_without_the_option_counts_nothing() -> None:
    q = torch.zeros(1, 1, 128, 64, dtype=torch.float16)
    plain = explain(q, q, q, target="sm_90")
    counted = explain(q, q, q, target="sm_90", kernel_options={"PROFILE": True})
    assert plain.plans[0].is_hopper and "clock64" not in plain.sources[0].text
    assert not counted.plans[0].is_hopper and "clock64" in counted.sources[0].text
    assert "not Hopper: it does not support profile" in str(counted)
