"""The peers: each one turns a workload into a function of (query, key, value), or says why it does not support it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexattn
from benchmarks.works import Mods, Native, Work

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Peer = Callable[[Work, Mods, torch.device], Attend]


class NotApplicable(Exception):
    """The peer does not support this workload."""


def prepare_torch() -> None:
    """Configure torch for measuring: room for every workload's graph, and backwards that can be repeated."""
    torch._dynamo.config.recompile_limit = 10_000  # beyond the limit of 8, torch silently runs flex densely
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    torch._functorch.config.donated_buffer = False  # donated buffers forbid retain_graph=True


def flexattn_peer(work: Work, mods: Mods, device: torch.device) -> Attend:
    """This package, called from plain Python."""
    block_mask = None
    if mods.mask_mod is not None:
        block_mask = flexattn.create_block_mask(mods.mask_mod, None, None, work.length, work.length, device=device)
    return lambda q, k, v: flexattn.flex_attention(
        q, k, v, mods.score_mod, block_mask, enable_gqa=q.size(1) != k.size(1)
    )


def torch_flex(work: Work, mods: Mods, device: torch.device) -> Attend:
    """PyTorch's flex_attention under torch.compile."""
    compiled = torch.compile(torch_flex_module().flex_attention, dynamic=False)
    return _torch_flex(work, mods, device, compiled, compile_mask=device.type == "cuda")


def torch_flex_eager(work: Work, mods: Mods, device: torch.device) -> Attend:
    """PyTorch's flex_attention without torch.compile: dense."""
    return _torch_flex(work, mods, device, torch_flex_module().flex_attention, compile_mask=False)


def torch_flex_module() -> Any:
    return importlib.import_module("torch.nn.attention.flex_attention")


def _torch_flex(work: Work, mods: Mods, device: torch.device, call: Callable[..., Any], compile_mask: bool) -> Attend:
    block_mask = None
    if mods.mask_mod is not None:
        create = torch_flex_module().create_block_mask
        block_mask = create(mods.mask_mod, None, None, work.length, work.length, device=device, _compile=compile_mask)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(q, k, v, mods.score_mod, block_mask, enable_gqa=q.size(1) != k.size(1))

    def attend_forward_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            return attend(q.detach(), k.detach(), v.detach())

    return attend_forward_only if device.type == "cpu" else attend  # PyTorch rejects tensors with gradients on a CPU


def _sdpa(backend: SDPBackend | None) -> Peer:
    """scaled_dot_product_attention with one backend, or with torch's own choice."""

    def peer(work: Work, mods: Mods, device: torch.device) -> Attend:
        native = _native(work)
        if native.window or native.softcap or native.documents:
            raise NotApplicable("SDPA knows full and causal only")

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=native.causal, enable_gqa=q.size(1) != k.size(1)
            )

        def attend_with_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return attend(q, k, v)

        return attend if backend is None else attend_with_backend

    return peer


def _flash(module: str) -> Peer:
    def peer(work: Work, mods: Mods, device: torch.device) -> Attend:
        native = _native(work)
        try:
            library = importlib.import_module(module)
        except ImportError as error:
            raise NotApplicable(f"{module} cannot be imported") from error
        options: dict[str, Any] = {"causal": native.causal}
        if native.window:
            options["window_size"] = (native.window - 1, 0)
        if native.softcap:
            options["softcap"] = native.softcap
        if native.documents:
            return _packed(library.flash_attn_varlen_func, native.documents, options, device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = library.flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
            return _first(out).transpose(1, 2)

        return attend

    return peer


def _packed(
    call: Callable[..., Any], lengths: tuple[int, ...], options: dict[str, Any], device: torch.device
) -> Attend:
    starts = torch.tensor((0, *lengths), device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    sizes = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B * length, heads, dim], batch is 1
        return _first(call(*packed, **sizes, **options)).unflatten(0, (q.size(0), -1)).transpose(1, 2)

    return attend


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _native(work: Work) -> Native:
    native = work.native(work)
    if native is None:
        raise NotApplicable("this work needs a mod")
    return native


PEERS: dict[str, Peer] = {
    "flexattn": flexattn_peer,
    "torch_flex": torch_flex,
    "torch_flex_eager": torch_flex_eager,
    "sdpa": _sdpa(None),
    "sdpa_flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa3": _flash("flash_attn_interface"),
    "fa4": _flash("flash_attn.cute"),
}
