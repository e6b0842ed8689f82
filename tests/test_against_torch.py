"""PyTorch's own eager flex_attention as the peer: the same results, for every mask and score mod of flexattn.mods."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import AuxRequest, create_block_mask, flex_attention, mods

B, H, S = 2, 4, 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


OFFSETS = torch.tensor([0, 10, 11, 40, S])
IDS = torch.bucketize(torch.arange(S), OFFSETS[1:], right=True)
MASKS: dict[str, Callable[..., object]] = {
    "noop_mask": mods.noop_mask,
    "causal": mods.causal,
    "causal_lower_right": mods.causal_lower_right(S, S),
    "shifted": mods.shifted(mods.causal, 7),
    "sliding_window": mods.sliding_window(7),
    "band": mods.band(5, 9),
    "dilated": mods.dilated(3, 5),
    "strided": mods.strided(5),
    "global_tokens": mods.global_tokens(3),
    "prefix_lm": mods.prefix_lm(9),
    "document": mods.document(offsets=OFFSETS),
    "document_causal": mods.document_causal(torch.stack([IDS, IDS.flip(0)])),
    "block_diffusion": mods.block_diffusion(S // 2, 4),
    "natten_2d": mods.natten_2d(8, 8, 3),
    "natten_3d": mods.natten_3d(4, 4, 4, 3),
    "padding": mods.padding(torch.tensor([40, S])),
    "tree": mods.tree((torch.arange(S) - 1) // 2),
    "and_masks": mods.and_masks(mods.causal, mods.sliding_window(9)),
    "or_masks": mods.or_masks(mods.prefix_lm(5), mods.document(IDS)),
    "not_mask": mods.not_mask(mods.causal),
    "xor_masks": mods.xor_masks(mods.causal, mods.sliding_window(9)),
}
SCORES: dict[str, Callable[..., object]] = {
    "alibi": mods.alibi(H),
    "softcap": mods.softcap(2.0),
    "relative_bias": mods.relative_bias(rand(H, 2 * 10 + 1)),
    "t5_bias": mods.t5_bias(rand(16, H)),
    "head_gate": mods.head_gate(rand(H)),
    "temperature": mods.temperature(rand(H).abs() + 0.5),
    "distance_decay": mods.distance_decay(rand(H).abs()),
}


@pytest.fixture(autouse=True)
def eager_peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let PyTorch's flex_attention run its mathematics as they stand, without a compiler."""
    monkeypatch.setattr(upstream, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    yield


def inputs(dtype: torch.dtype, Hkv: int = H, M: int = S, N: int = S) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((B, H, M, 16), (B, Hkv, N, 16), (B, Hkv, N, 8))
    return tuple(rand(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes))


def check(
    dtype: torch.dtype, score_mod: Callable[..., object] | None, mask_mod: Callable[..., object] | None, **kwargs
) -> None:
    q, k, v = inputs(dtype, kwargs.pop("Hkv", H))
    ours = theirs = None
    if mask_mod is not None:
        ours = create_block_mask(mask_mod, B, H, S, S, device="cpu", BLOCK_SIZE=16)
        theirs = upstream.create_block_mask(mask_mod, B, H, S, S, device="cpu", BLOCK_SIZE=16)
    out, aux = flex_attention(q, k, v, score_mod, ours, return_aux=AuxRequest(lse=True), **kwargs)
    asked = upstream.AuxRequest(lse=True)
    peer, peer_aux = upstream.flex_attention(q, k, v, score_mod, theirs, return_aux=asked, **kwargs)
    # Scores are float32 on both sides, from products summed in another order.
    torch.testing.assert_close(aux.lse, peer_aux.lse.to(aux.lse.dtype), rtol=2e-5, atol=2e-5)
    if dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(out, peer)
        return
    # In half precision the peer rounds the weights before it multiplies, so the exact result judges both.
    exact = upstream.flex_attention(q.double(), k.double(), v.double(), score_mod, theirs, **kwargs)
    error, error_of_peer = (out - exact).abs(), (peer - exact).abs()
    assert error.square().mean() <= 1.2**2 * error_of_peer.square().mean()
    assert error.max() <= 2 * error_of_peer.max()


def test_every_ready_mod_is_compared() -> None:
    factories = {name for name, value in vars(mods).items() if callable(value)}
    assert factories == MASKS.keys() | SCORES.keys()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, dtype: torch.dtype) -> None:
    check(dtype, None, MASKS[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name: str, dtype: torch.dtype) -> None:
    check(dtype, SCORES[name], None)


@pytest.mark.parametrize("score", SCORES)
def test_score_mods_under_a_mask_with_groups_and_scale(score: str) -> None:
    check(torch.float32, SCORES[score], MASKS["document_causal"], Hkv=2, enable_gqa=True, scale=0.5)


@pytest.mark.parametrize("name", ["causal", "document_causal", "padding", "natten_2d"])
def test_upstreams_block_mask_is_accepted(name: str) -> None:
    q, k, v = inputs(torch.float32)
    mask = upstream.create_block_mask(MASKS[name], B, H, S, S, device="cpu", BLOCK_SIZE=16)
    torch.testing.assert_close(
        flex_attention(q, k, v, SCORES["alibi"], mask), upstream.flex_attention(q, k, v, SCORES["alibi"], mask)
    )


def test_upstreams_names_are_here_with_their_parameters() -> None:
    missing = [name for name in upstream.__all__ if not hasattr(flexattn, name)]
    assert not missing


def test_shared_keys_of_one_batch() -> None:
    q, k, v = inputs(torch.float32)
    ours, theirs = (
        make.create_block_mask(mods.causal, B, None, S, S, device="cpu", BLOCK_SIZE=16) for make in (flexattn, upstream)
    )
    torch.testing.assert_close(
        flex_attention(q, k[:1], v[:1], block_mask=ours), upstream.flex_attention(q, k[:1], v[:1], block_mask=theirs)
    )


def test_rows_without_a_key() -> None:
    q, k, v = inputs(torch.float32)

    def late(b, h, q_idx, kv_idx):
        return (q_idx > 5) & (q_idx >= kv_idx)

    ours = create_block_mask(late, None, None, S, S, device="cpu", BLOCK_SIZE=16)
    theirs = upstream.create_block_mask(late, None, None, S, S, device="cpu", BLOCK_SIZE=16)
    out, aux = flex_attention(q, k, v, block_mask=ours, return_aux=AuxRequest(lse=True))
    out_t, aux_t = upstream.flex_attention(q, k, v, block_mask=theirs, return_aux=upstream.AuxRequest(lse=True))
    torch.testing.assert_close(out, out_t)
    torch.testing.assert_close(aux.lse, aux_t.lse)
    assert torch.all(aux.lse[:, :, :6] == -torch.inf)
