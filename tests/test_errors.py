"""Every wrong call fails by name: the argument, what was found, what was expected and the fix."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import AuxRequest, create_block_mask, errors, explain, flex_attention
from flexattn.call import validate
from flexattn.call.validate import place_captures
from flexattn.errors import FlexAttentionError
from flexattn.trace.trace import trace


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", grad: bool = False) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device, requires_grad=grad)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def mask(B=None, H=None, M=32, N=32, **kwargs):
    return create_block_mask(causal, B, H, M, N, device="cpu", BLOCK_SIZE=16, **kwargs)


Q = ones(2, 4, 32, 16)
K = V = ones(2, 4, 32, 16)


def call(q=Q, k=K, v=V, *args, **kwargs):
    return lambda: flex_attention(q, k, v, *args, **kwargs)


def upstream_mask():
    return upstream.create_block_mask(causal, 2, None, 32, 32, device="cpu", BLOCK_SIZE=16)


def per_batch(create, B, H):
    def by_batch(b, h, q_idx, kv_idx):
        return kv_idx < 20 + b

    return create(by_batch, B, H, 32, 32, device="cpu", BLOCK_SIZE=16)


def per_head(create, B, H):
    def by_head(b, h, q_idx, kv_idx):
        return kv_idx < 20 + h

    return create(by_head, B, H, 32, 32, device="cpu", BLOCK_SIZE=16)


def options(**kernel_options):
    return call(kernel_options=kernel_options)


def masked(**kwargs):
    return lambda: flex_attention(Q, K, V, block_mask=mask(**kwargs))


def without_transpose():
    made = mask()
    return flexattn.BlockMask.from_kv_blocks(
        made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices, 16, causal, (32, 32),
        compute_q_blocks=False,
    )  # fmt: skip


def by_hand_without_lengths():
    made = mask()
    return flexattn.BlockMask.from_kv_blocks(
        made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices, 16, causal
    )


NESTED = torch.nested.nested_tensor([torch.ones(4, 8, 16), torch.ones(4, 6, 16)], layout=torch.jagged)
TENSORS: dict[str, tuple[Callable[[], object], tuple[type[Exception], ...], str]] = {
    "not a tensor": (
        call([1.0]), (TypeError,),
        "query: found a list, expected a torch.Tensor. Pass a tensor.",
    ),
    "nested": (
        call(k=NESTED), (NotImplementedError,),
        "key: found a nested tensor, expected a plain, dense tensor. "
        "Pad to one length, or pack the sequences and use mods.document.",
    ),
    "3-D": (
        call(ones(4, 32, 16)), (NotImplementedError,),
        "query: found shape (4, 32, 16), expected 4 dimensions (batch, heads, length, dim). "
        "Add the missing dimension with query.unsqueeze(0).",
    ),
    "1-D": (
        call(v=ones(16)), (NotImplementedError,),
        "value: found shape (16,), expected 4 dimensions (batch, heads, length, dim). Reshape it.",
    ),
    "integers": (
        call(Q.int(), K.int(), V.int()), (TypeError, ValueError),
        "query, key, value: found query i32, key i32, value i32, expected one dtype of f16, bf16, f32, f64. "
        "Cast: query.to(torch.bfloat16), key.to(torch.bfloat16), value.to(torch.bfloat16).",
    ),
    "mixed dtypes": (
        call(k=K.half(), v=V.double()), (TypeError, ValueError),
        "query, key, value: found query f32, key f16, value f64, expected one dtype of f16, bf16, f32, f64. "
        "Cast: key.to(torch.float32), value.to(torch.float32).",
    ),
    "8-bit keys": (
        call(k=K.to(torch.float8_e4m3fn), v=V.to(torch.float8_e4m3fn)), (NotImplementedError,),
        "query, key, value: found query f32, key float8_e4m3fn, value float8_e4m3fn, expected one dtype of f16, bf16, "
        "f32, f64. Cast to bfloat16, or pass key and value as float8_e4m3fn with k_descale and v_descale.",
    ),
    "devices": (
        call(k=K.to("meta")), (ValueError, RuntimeError),
        "query, key, value: found query on cpu, key on meta, value on cpu, expected one device. "
        "Move them with .to('cpu').",
    ),
    "too long": (
        call(k=ones(1, 4, 1, 16).expand(1, 4, 2**30 + 1, 16), v=ones(1, 4, 1, 16).expand(1, 4, 2**30 + 1, 16)),
        (ValueError,),
        "key: found length 1073741825, expected at most 1073741824. "
        "Split it into shorter sequences, and merge the results by their lse.",
    ),
    "head dim of key": (
        call(k=ones(2, 4, 32, 8)), (ValueError,),
        "key: found head dim 8, expected that of query, 16. "
        "Project query and key to the same head dim.",
    ),
    "no channels": (
        call(v=ones(2, 4, 32, 0)), (ValueError,),
        "value: found head dim 0, expected at least 1. Pass at least one channel.",
    ),
    "length of value": (
        call(v=ones(2, 4, 31, 16)), (ValueError,),
        "value: found length 31, expected that of key, 32. Each key needs one value. Slice both in the same way.",
    ),
    "heads of value": (
        call(v=ones(2, 2, 32, 16)), (ValueError,),
        "value: found 2 heads, expected those of key, 4. Give key and value the same number of heads.",
    ),
    "batch of value": (
        call(v=ones(1, 4, 32, 16)), (ValueError,),
        "value: found batch 1, expected that of key, 2. Expand it: value.expand(2, -1, -1, -1).",
    ),
    "batch of key": (
        call(k=ones(3, 4, 32, 16), v=ones(3, 4, 32, 16)), (ValueError,),
        "key: found batch 3, expected that of query, 2, or 1. Give each entry of query its keys and values, or pass "
        "batch 1 to share them. If key holds the pages of a cache, pass its block_table: flex_attention(..., "
        "**cache.arguments()).",
    ),
    "groups without enable_gqa": (
        call(k=ones(2, 2, 32, 16), v=ones(2, 2, 32, 16)), (ValueError,),
        "key: found 2 heads, expected those of query, 4. "
        "Pass enable_gqa=True to let groups of query heads share a key head.",
    ),
    "uneven groups": (
        call(k=ones(2, 3, 32, 16), v=ones(2, 3, 32, 16), enable_gqa=True), (ValueError,),
        "key: found 3 heads, expected a divisor of the heads of query, 4. "
        "Query heads share key heads in groups: 4 must be a multiple of 3.",
    ),
}  # fmt: skip
OTHERS: dict[str, tuple[Callable[[], object], tuple[type[Exception], ...], str]] = {
    "scale is a tensor": (
        call(scale=torch.tensor(1.0)), (TypeError,),
        "scale: found a Tensor, expected a number. "
        "Pass a Python float. Multiply a learnable scale into query, or into the score in score_mod.",
    ),
    "scale is a string": (call(scale="1"), (TypeError,), "scale: found a str, expected a number. "),
    "scale is nan": (
        call(scale=float("nan")), (ValueError,),
        "scale: found nan, expected a finite number. Pass None for 1 / sqrt(head dim).",
    ),
    "scale is beyond float64": (
        call(scale=10**400), (ValueError,), "scale: found a number beyond float64, expected one of at most 1e308. ",
    ),
    "scale has too many digits to be printed": (
        call(scale=10**5000), (ValueError,), "scale: found a number beyond float64, expected one of at most 1e308. ",
    ),
    "scale is a large fraction": (
        call(scale=Fraction(10**400, 3)), (ValueError,), "scale: found a number beyond float64",
    ),
    "scale is a decimal": (call(scale=Decimal("0.5")), (TypeError,), "scale: found a Decimal, expected a number. "),
    "scale is a bool": (call(scale=True), (TypeError,), "scale: found a bool, expected a number. "),
    "scale is numpy's bool": (call(scale=np.bool_(True)), (TypeError,), "scale: found a bool, expected a number. "),
    "scale is an array": (call(scale=np.ones(1)), (TypeError,), "scale: found a ndarray, expected a number. "),
    "scale is complex": (call(scale=1j), (TypeError,), "scale: found a complex, expected a number. "),
    "sink is beyond float64": (call(sink=10**400), (ValueError,), "sink: found a number beyond float64"),
    "dropout_p is beyond float64": (call(dropout_p=10**400), (ValueError,), "dropout_p: found a number beyond float64"),
    "scale is infinite": (call(scale=float("inf")), (ValueError,), "scale: found inf, expected a finite number. "),
    "both returns": (
        call(return_lse=True, return_aux=AuxRequest()), (ValueError,),
        "return_lse: found True with return_aux, expected one of the two. Keep return_aux=AuxRequest(lse=True).",
    ),
    "aux is a bool": (
        call(return_aux=True), (TypeError,),
        "return_aux: found a bool, expected an AuxRequest. Write return_aux=AuxRequest(lse=True).",
    ),
    "mask is a tensor": (
        call(block_mask=ones(32, 32)), (TypeError,),
        "block_mask: found a Tensor, expected a BlockMask or None. "
        "Make one with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN).",
    ),
    "mask too short": (
        masked(M=16), (ValueError, AssertionError),
        "block_mask: found lengths (16, 32), expected those of query and key, (32, 32). "
        "Build it with create_block_mask(mask_mod, B, H, Q_LEN=32, KV_LEN=32).",
    ),
    "mask too long": (
        masked(N=48), (ValueError, AssertionError),
        "block_mask: found lengths (32, 48), expected those of query and key, (32, 32). "
        "Build it with create_block_mask(mask_mod, B, H, Q_LEN=32, KV_LEN=32).",
    ),
    "mask of more queries": (
        masked(M=48), (ValueError, AssertionError),
        "block_mask: found lengths (48, 32), expected those of query and key, (32, 32). "
        "Build it with create_block_mask(mask_mod, B, H, Q_LEN=32, KV_LEN=32). For queries at later positions, as in "
        "decoding, keep this mask and pass q_offsets=, the position of the first query of each sequence "
        "(docs/decoding.md).",
    ),
    "mask of tensors with heads and positions swapped": (
        lambda: flex_attention(*[ones(2, 32, 4, 16)] * 3, block_mask=mask()), (ValueError, AssertionError),
        "block_mask: found lengths (32, 32), expected those of query and key, (4, 4). query, key and value are "
        "[B, H, S, D]. If yours are [B, S, H, D], pass query.transpose(1, 2) and so on, and transpose the output back.",
    ),
    "mask of one row with offsets": (
        lambda: flex_attention(
            ones(1, 4, 1, 16), K[:1], V[:1], block_mask=mask(M=1), q_offsets=torch.tensor([5], dtype=torch.int32)
        ), (ValueError,),
        "q_offsets: found an entry 5, expected entries from 0 to 0. The rows of block_mask (1) are positions, and "
        "query has 1 row for each sequence. Build the mask with Q_LEN >= KV_LEN + M - 1, which is 32.",
    ),
    "mask of all rows with an offset past the keys": (
        lambda: flex_attention(
            ones(1, 4, 1, 16), K[:1], V[:1], block_mask=mask(), q_offsets=torch.tensor([32], dtype=torch.int32)
        ), (ValueError,),
        "query has 1 row for each sequence. The position of a query is below KV_LEN (32): build the mask for more "
        "keys.",
    ),
    "lists made by hand, without lengths": (
        lambda: flex_attention(*[ones(1, 4, 30, 16)] * 3, block_mask=by_hand_without_lengths()),
        (ValueError, AssertionError),
        "block_mask: found lengths (32, 32), expected those of query and key, (30, 30). Build it with "
        "create_block_mask(mask_mod, B, H, Q_LEN=30, KV_LEN=30), or pass seq_lengths=(30, 30) to "
        "BlockMask.from_kv_blocks.",
    ),
    "pages without a table": (
        lambda: flex_attention(ones(1, 4, 1, 16), ones(8, 4, 32, 16), ones(8, 4, 32, 16)), (ValueError,),
        "key: found batch 8, expected that of query, 1. Give query and key one batch. If key holds the pages of a "
        "cache, pass its block_table: flex_attention(..., **cache.arguments()).",
    ),
    "enable_gqa": (
        call(enable_gqa="no"), (TypeError, ValueError),
        "enable_gqa: found 'no', expected a bool. Pass True to let groups of query heads share a key head, or leave "
        "it out.",
    ),
    "batch of mask": (
        masked(B=3), (ValueError,),
        "block_mask: found batch 3, expected that of query, 2, or 1. "
        "Build it with create_block_mask(mask_mod, B=2, ...), or B=None to share one mask.",
    ),
    "heads of mask": (
        masked(H=2), (ValueError,),
        "block_mask: found 2 heads, expected those of query, 4, or 1. "
        "Build it with create_block_mask(mask_mod, ..., H=4), or H=None to share one mask.",
    ),
    "one batch of a mask that reads b": (
        lambda: call(block_mask=per_batch(create_block_mask, 1, None))(), (ValueError,),
        "block_mask: found batch 1 with the mask_mod by_batch, which reads b, expected that of query, 2. "
        "Build it with create_block_mask(mask_mod, B=2, ...).",
    ),
    "one head of a mask that reads h": (
        lambda: call(block_mask=per_head(create_block_mask, None, 1))(), (ValueError,),
        "block_mask: found heads 1 with the mask_mod by_head, which reads h, expected that of query, 4. "
        "Build it with create_block_mask(mask_mod, B=..., H=4, ...).",
    ),
    "one batch of PyTorch's mask that reads b": (
        lambda: call(block_mask=per_batch(upstream.create_block_mask, None, None))(), (ValueError,),
        "block_mask: found batch 1 with the mask_mod by_batch, which reads b, expected that of query, 2. ",
    ),
    "one batch of a slice that reads b": (
        lambda: call(block_mask=per_batch(create_block_mask, 4, None)[2])(), (ValueError,),
        "block_mask: found batch 1 with the mask_mod by_batch, which reads b, expected that of query, 2. ",
    ),
    "device of mask": (
        lambda: call(block_mask=mask().to("meta"))(), (RuntimeError,),
        "block_mask: found device meta, expected that of query, cpu. Move it with block_mask.to('cpu').",
    ),
    "mask without transpose": (
        lambda: call(q=ones(2, 4, 32, 16, grad=True), block_mask=without_transpose())(), (RuntimeError,),
        "block_mask: found no q_indices, expected both directions, as a backward may follow. "
        "Build it with compute_q_blocks=True, or call under torch.no_grad().",
    ),
    "sliced upstream mask": (
        lambda: flex_attention(Q[:1], K[:1], V[:1], block_mask=upstream_mask()[0]), (RuntimeError,),
        "block_mask: found a slice of PyTorch's BlockMask, expected a mask with its mask_mod. "
        "Slice flexattn's BlockMask, whose mask_mod is sliced too.",
    ),
}  # fmt: skip


def on_meta(score, b, h, q_idx, kv_idx):
    return score + META[h]


META = ones(4, device="meta")
MODS: dict[str, tuple[Callable[[], object], tuple[type[Exception], ...], str]] = {
    "score_mod of four": (call(score_mod=causal), (AssertionError,), "score_mod"),
    "mask_mod of five": (
        lambda: create_block_mask(on_meta, None, None, 32, 32, device="cpu"), (AssertionError,), "mask_mod"
    ),
    "score_mod is no function": (call(score_mod=3), (FlexAttentionError,), "score_mod"),
    "data-dependent if": (
        call(score_mod=lambda score, b, h, q_idx, kv_idx: score if q_idx > kv_idx else -score), (RuntimeError,),
        r"test_errors.py:\d+",
    ),
    "mask of integers": (
        lambda: create_block_mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx, None, None, 32, 32, device="cpu"),
        (AssertionError, ValueError), "bool",
    ),
    "capture elsewhere": (
        call(score_mod=on_meta), (RuntimeError, ValueError),
        "score_mod: found the captured tensor META on meta, expected the device of query, cpu. "
        "Move it with .to('cpu') outside of the mod.",
    ),
}  # fmt: skip
OPTIONS: dict[str, tuple[Callable[[], object], tuple[type[Exception], ...], str]] = {
    "unknown": (options(BLOCK_MM=64), (ValueError,), "Did you mean 'BLOCK_M'?"),
    "unknown with prefix": (options(bwd_BLOKC_M1=64), (ValueError,), "Did you mean 'bwd_BLOCK_M1'?"),
    "wrong case": (options(block_n=64), (ValueError,), "found the unknown name 'block_n'"),
    "nothing near": (options(zzz=1), (ValueError,), "Leave it out."),
    "not a dict": (call(kernel_options=[1]), (TypeError,), "kernel_options: found a list, expected a dict."),
    "int for bool": (options(EXACT=1), (TypeError,), "kernel_options['EXACT']: found 1 (int), expected a bool."),
    "float for int": (
        options(BLOCK_M=64.0), (TypeError,), "kernel_options['BLOCK_M']: found 64.0 (float), expected an int."
    ),
    "bool for int": (options(num_warps=True), (TypeError,), "kernel_options['num_warps']: found True (bool)"),
    "a tile larger than what is padded": (
        options(BLOCK_M1=256), (ValueError,),
        "kernel_options['BLOCK_M1']: found 256, expected a power of two from 16 to 128. Write 128.",
    ),
    "not a power of two": (
        options(BLOCK_N=96), (ValueError,),
        "kernel_options['BLOCK_N']: found 96, expected a power of two from 16 to 128. Write 64.",
    ),
    "no warps": (options(num_warps=0), (ValueError,), "expected a power of two from 1 to 32. Write 1."),
    "unknown backend": (
        options(BACKEND="CUDA"), (ValueError,),
        "kernel_options['BACKEND']: found 'CUDA', expected one of AUTO, TRITON, HOPPER, CPU, TRITON_DECODE. "
        "Write 'AUTO'.",
    ),
    "backend in lower case": (options(BACKEND="triton"), (ValueError,), "Did you mean 'TRITON'?"),
    "precision in upper case": (options(FLOAT32_PRECISION="TF32"), (ValueError,), "Did you mean 'tf32'?"),
    "flash": (
        options(BACKEND="FLASH"), (NotImplementedError,),
        "found BACKEND='FLASH', expected AUTO, TRITON, TRITON_DECODE, HOPPER or CPU.",
    ),
    "decode": (
        options(BACKEND="TRITON_DECODE"), (ValueError,),
        "found BACKEND='TRITON_DECODE' with tensors on the CPU, expected AUTO or CPU.",
    ),
    "backend and force": (
        options(BACKEND="TRITON", FORCE_USE_FLEX_ATTENTION=True), (RuntimeError,),
        "found FORCE_USE_FLEX_ATTENTION together with BACKEND='TRITON', expected one of the two.",
    ),
    "internal": (options(OUTPUT_LOGSUMEXP=True), (AssertionError,), "flexattn derives this from the call"),
    "internal max": (options(OUTPUT_MAX=True), (AssertionError,), "kernel_options['OUTPUT_MAX']"),
    "triton on cpu": (
        options(BACKEND="TRITON"), (ValueError,),
        "kernel_options: found BACKEND='TRITON' with tensors on the CPU, expected AUTO or CPU.",
    ),
}  # fmt: skip
ROWS = [
    pytest.param(*row, id=f"{table}: {name}")
    for table, rows in (("tensors", TENSORS), ("others", OTHERS), ("mods", MODS), ("options", OPTIONS))
    for name, row in rows.items()
]


@pytest.mark.parametrize(("wrong", "kinds", "text"), ROWS)
def test_wrong_call_is_refused_by_name(
    wrong: Callable[[], object], kinds: tuple[type[Exception], ...], text: str
) -> None:
    with pytest.raises(FlexAttentionError) as caught:
        wrong()
    assert all(isinstance(caught.value, kind) for kind in kinds), type(caught.value).__mro__
    assert text in str(caught.value) or re.search(text, str(caught.value)), str(caught.value)


def test_one_batch_of_lists_made_by_hand_serves_all() -> None:
    made = per_batch(create_block_mask, 2, None)
    lists = (made.kv_num_blocks[:1], made.kv_indices[:1], made.full_kv_num_blocks[:1], made.full_kv_indices[:1])
    by_hand = flexattn.BlockMask.from_kv_blocks(*lists, 16, made.mask_mod, (32, 32))
    v = torch.arange(32.0)[:, None].expand(2, 4, 32, 16)  # the mean of the keys that a row attends to
    rows = ones(1, 4, 32, 16)
    torch.testing.assert_close(call(v=v, block_mask=by_hand)(), torch.cat((9.5 * rows, 10 * rows)))
    torch.testing.assert_close(call(q=Q[1:], k=K[1:], v=v[1:], block_mask=made[1])(), 10 * rows)


def test_scalars_of_the_cpu_go_along_with_any_device() -> None:
    scalar, table = torch.tensor(2.0, requires_grad=True), torch.ones(4)
    bound = trace(
        lambda score, b, h, q_idx, kv_idx: score * scalar + torch.tensor([0.5 * n for n in range(40)])[h], "score"
    )
    placed = place_captures(bound, torch.device("meta"), "score_mod")
    assert [c.device.type for c in placed.captures] == ["meta"] * 2
    assert placed.captures[1] is place_captures(bound, torch.device("meta"), "score_mod").captures[1]
    assert placed.captures[0].requires_grad or placed.captures[1].requires_grad
    elsewhere = trace(lambda score, b, h, q_idx, kv_idx: score * scalar + table[h], "score")
    with pytest.raises(errors.DeviceError, match="score_mod: found the captured tensor table on cpu, expected the dev"):
        place_captures(elsewhere, torch.device("meta"), "score_mod")
    with pytest.raises(errors.DeviceError, match="the captured tensor far on meta, expected the device of query, cpu"):
        far = torch.ones((), device="meta")
        flex_attention(Q, K, V, lambda score, b, h, q_idx, kv_idx: score * far)


def test_explain_checks_as_the_call_does() -> None:
    with pytest.raises(errors.ArgumentError, match="value: found length 31"):
        explain(Q, K, ones(2, 4, 31, 16))


def test_upstream_names_of_options_are_accepted() -> None:
    given = {"BLOCK_M": 32, "fwd_num_warps": 4, "bwd_BLOCK_M1": 16, "PRESCALE_QK": True, "FLOAT32_PRECISION": "'ieee'"}
    torch.testing.assert_close(flex_attention(Q, K, V, kernel_options=given), V)


def test_every_name_of_upstream_is_an_option() -> None:
    assert set(upstream.FlexKernelOptions.__annotations__) <= set(flexattn.FlexKernelOptions.__annotations__)


def test_errors_are_one_family_of_built_in_kinds() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    classes = [c for c in classes if not issubclass(c, Warning)]
    assert all(issubclass(c, FlexAttentionError) for c in classes)
    assert all(len(c.__mro__) > len(FlexAttentionError.__mro__) for c in classes if c is not FlexAttentionError)


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"is_causal": True}, "create_block_mask(mods.causal"), ({"attn_mask": None}, "mask[q_idx, kv_idx]"),
        ({"mask_mod": causal}, "create_block_mask(mask_mod"), ({"softmax_scale": 1.0}, "Write scale instead"),
        ({"dropout": 0.1}, "Write dropout_p instead"),
        ({"colour": 1}, "Its arguments are query, key, value, score_mod"),
        ({"causal": True}, "mods.causal_lower_right(Q_LEN, KV_LEN)"),
        ({"alibi_slopes": None}, "score - alibi_slopes[h] * (q_idx + N - M - kv_idx).abs()"),
        ({"window_size": (4, 0)}, "mods.shifted(mods.band(left, right), KV_LEN - Q_LEN)"),
        ({"sliding_window": 4}, "(mods.sliding_window(window), None"),
        ({"mask": None}, "block_mask=create_block_mask(lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx]"),
        ({"bias": None}, "score_mod=lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx]"),
        ({"head_mask": None}, "flex_attention(...) * head_mask[:, None, None]"),
        ({"cache_seqlens": None}, "Write seqused_k= for the lengths and q_offsets="),
        ({"cu_seqlens": None}, "Write varlen_attn"), ({"num_splits": 4}, 'kernel_options={"SPLIT_KV": num_splits}'),
    ],
)  # fmt: skip
def test_arguments_of_other_functions(given: dict[str, object], instead: str) -> None:
    with pytest.raises(TypeError, match=re.escape(instead)) as error:
        flex_attention(Q, K, V, **given)
    assert isinstance(error.value, errors.UnknownArgumentError)
    assert f"found the keyword argument {next(iter(given))}" in str(error.value)


VARLEN = (ones(8, 2, 16), ones(8, 2, 16), ones(8, 2, 16), *[torch.tensor([0, 8], dtype=torch.int32)] * 2, 8, 8)


@pytest.mark.parametrize(
    ("function", "given", "text"),
    [
        (flex_attention, "key_padding_mask", "block_mask=create_block_mask(mods.padding(lengths), B"),
        (flex_attention, "block_msk", "Did you mean block_mask?"),
        (flex_attention, "need_weights", "flexattn.statistics returns their entropy"),
        (explain, "is_causal", "create_block_mask(mods.causal"),
        (explain, "return_aux", "Leave it out: explain returns no output"),
        (flexattn.statistics, "kernel_options", "Its arguments are query, key, value"),
        (flexattn.verify, "attn_mask", "mask[q_idx, kv_idx]"),
        (functools.partial(flexattn.debug, at=[(0, 0, 0, 0)]), "scales", "Did you mean scale?"),
        (flexattn.varlen_attn, "causal", "Write window_size=(-1, 0) instead."),
        (flexattn.varlen_attn, "is_causal", "Write window_size=(-1, 0) instead."),
        (flexattn.varlen_attn, "softmax_scale", "Write scale instead."),
        (flexattn.varlen_attn, "block_mask", "Write mask_mod=, whose q_idx and kv_idx are positions in the sequence"),
        (flexattn.varlen_attn, "max_seqlen_q", "Write max_q instead."),
        (flexattn.varlen_attn, "attn_mask", "Write mask_mod instead."),
        (flexattn.varlen_attn, "sliding_window", "Write window_size=(window - 1, 0) instead."),
        (create_block_mask, "q_len", "Did you mean Q_LEN?"),
        (create_block_mask, "is_causal", "create_block_mask(mods.causal"),
        (create_block_mask, "window_size", "mods.shifted(mods.band(left, right), KV_LEN - Q_LEN)"),
        (create_block_mask, "batch", "Write B instead."),
        (create_block_mask, "num_heads", "Write H instead."),
        (create_block_mask, "colour", "Its arguments are mask_mod, B, H, Q_LEN, KV_LEN, device"),
        (create_block_mask, "score_mod", "flex_attention(..., score_mod=score_mod)"),
    ],
)
def test_unknown_arguments_of_each_function(function: Callable[..., object], given: str, text: str) -> None:
    arguments = {flexattn.varlen_attn: VARLEN, create_block_mask: (causal, None, None, 32, 32)}.get(function, (Q, K, V))
    with pytest.raises(errors.UnknownArgumentError, match=re.escape(text)) as error:
        function(*arguments, **{given: True})
    name = getattr(function, "func", function).__name__
    assert str(error.value).startswith(f"{name}: found the keyword argument {given}, expected one that it has. ")


def test_hints_of_other_libraries_give_their_results() -> None:
    M, N = 5, 9
    q, k = torch.randn(1, 2, M, 16), torch.randn(1, 2, N, 16)
    slopes, keep, bias = torch.rand(2), torch.rand(2) < 0.5, torch.randn(2, M, N)
    i, j = torch.arange(M)[:, None] + N - M, torch.arange(N)  # aligned at the last query and key

    def check(expected: Tensor, **given: object) -> None:
        out = flex_attention(q, k, k, **given)  # type: ignore[call-overload]
        torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=expected))

    mods = flexattn.mods
    for expected, mod in (
        (j <= i, mods.causal_lower_right(M, N)),
        ((j >= i - 2) & (j <= i + 1), mods.shifted(mods.band(2, 1), N - M)),
    ):
        check(expected, block_mask=create_block_mask(mod, None, None, M, N))
    check(
        -slopes[:, None, None] * (i - j).abs(),
        score_mod=lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx + N - M - kv_idx).abs(),
    )
    check(bias, score_mod=lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx])
    weights = (q @ k.mT / 4).softmax(-1)
    torch.testing.assert_close(flex_attention(q, k, k) * keep[:, None, None], weights * keep[:, None, None] @ k)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (
            lambda: flexattn.varlen_attn(*VARLEN[:3], cu_seqlens_q=VARLEN[3], max_seqlen_q=8),
            "varlen_attn: found the keyword argument cu_seqlens_q, expected one that it has. Write cu_seq_q instead.",
        ),
        (
            lambda: create_block_mask(causal, B=1, H=1, q_len=64, kv_len=64),
            "create_block_mask: found the keyword argument q_len, expected one that it has. Did you mean Q_LEN?",
        ),
        (
            lambda: flexattn.PagedKVCache(2, 64, num_pages=8, heads=2, head_dim=16),
            "PagedKVCache: found the keyword argument num_pages, expected one that it has. Did you mean pages?",
        ),
        (lambda: flexattn.PagedKVCache(2, 64, pages=8, num_kv_heads=2, head_dim=16), "Write heads instead."),
    ],
)
def test_unknown_arguments_in_place_of_required_ones(act: Callable[[], object], text: str) -> None:
    with pytest.raises(errors.UnknownArgumentError, match=re.escape(text)):
        act()


def test_required_arguments_that_are_missing() -> None:
    for act, text in (
        (lambda: flexattn.varlen_attn(*VARLEN[:3]), "cu_seq_q: found no argument, expected a torch.Tensor"),
        (lambda: flexattn.varlen_attn(*VARLEN[:6]), "max_k: found no argument, expected the length of the longest"),
        (lambda: create_block_mask(causal, None, None, 64), "KV_LEN: found no argument, expected an int >= 0"),
        (lambda: flexattn.PagedKVCache(2, 64, heads=2, head_dim=16), "pages: found no argument, expected an int"),
    ):
        with pytest.raises(FlexAttentionError, match=text):
            act()
    for function in (flexattn.varlen_attn, create_block_mask, flexattn.PagedKVCache):
        required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        assert required[0] in ("query", "mask_mod", "sequences") and len(required) > 5
        assert "MissingArgument" not in str(inspect.signature(function))


@pytest.mark.parametrize(
    "act",
    [
        lambda given: flex_attention(Q, K, V, given),
        lambda given: explain(Q, K, V, given),
        lambda given: flexattn.debug(Q, K, V, given, at=[(0, 0, 0, 0)]),
        lambda given: flexattn.statistics(Q, K, V, given),
        lambda given: flexattn.verify(Q, K, V, given),
        lambda given: explain(score_mod=given),
        lambda given: explain(mask_mod=given),
        lambda given: create_block_mask(given, None, None, 32, 32),
        lambda given: flexattn.varlen_attn(*VARLEN, score_mod=given),
        lambda given: flexattn.varlen_attn(*VARLEN, mask_mod=given),
        lambda given: torch.compile(flex_attention, backend="eager")(Q, K, V, given),
    ],
)
@pytest.mark.parametrize("kind", ["ours", "of torch"])
def test_a_block_mask_as_a_mod(act: Callable[[object], object], kind: str) -> None:
    given = mask() if kind == "ours" else upstream_mask()
    with pytest.raises(errors.ModError, match=r"(score|mask)_mod: found a BlockMask, expected.*as block_mask"):
        act(given)


def test_objects_that_are_no_mods() -> None:
    class Mod:
        def __call__(self, score: Tensor, *place: Tensor) -> Tensor:
            return score

    for mod, text in (
        (Mod, "score_mod: found the class Mod, expected .*Pass an instance: Mod"),
        (ones(32, 32), r"score_mod: found a tensor, float32 \[32, 32\].*score \+ bias\[q_idx, kv_idx\]"),
        ([Mod()], "score_mod: found a list, expected a callable"),
        (lambda b, h, q_idx, kv_idx, score: score, "expected the order score, b, h, q_idx, kv_idx.*reorder"),
    ):
        with pytest.raises(errors.ModError, match=text):
            flex_attention(Q, K, V, mod)
    with pytest.raises(errors.ModError, match=r"mask_mod.*expected the order b, h, q_idx, kv_idx"):
        create_block_mask(lambda q_idx, kv_idx, b, h: q_idx >= kv_idx, None, None, 32, 32)
    with pytest.raises(errors.ModError, match=r"mask_mod: found a tensor.*keep\[q_idx, kv_idx\]"):
        create_block_mask(ones(32, 32), None, None, 32, 32)
    with pytest.raises(errors.DtypeError, match=r"query: found a function.*Write score_mod= or mask_mod="):
        explain(flexattn.mods.alibi(8))


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.DeviceError, match="device: found 'gpu', expected a device of torch"):
        create_block_mask(causal, None, None, 32, 32, device="gpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:0"):
        with pytest.raises(errors.DeviceError, match=f"device: found '{device}', expected a device of this machine"):
            create_block_mask(causal, None, None, 32, 32, device=device)


def test_arguments_of_other_types() -> None:
    with pytest.raises(errors.DtypeError, match="target: found 90, expected one of sm_75, "):
        explain(Q, K, V, target=90)  # type: ignore[arg-type]
    for name in ("sm_12345", "sm_13", "sm_60", "gfx8", "h100"):
        with pytest.raises(errors.ArgumentError, match=f"target: found '{name}', expected one of sm_75, .*gfx942"):
            explain(Q, K, V, target=name)
    assert str(explain(Q, K, V, target="sm_101").plans[0].target) == "sm_101"
    with pytest.raises(errors.ArgumentError, match=r"shape: found \(2, 2\), expected four ints"):
        flexattn.dropout_mask(0.1, (2, 2))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_another_layout() -> None:
    strided = torch.nested.nested_tensor([ones(3, 4), ones(2, 4)], layout=torch.strided)
    with pytest.raises(errors.UnsupportedError, match=r"query: found a nested.*layout torch\.jagged\. "):
        flex_attention(strided, strided, strided)


@pytest.mark.parametrize("make", [flexattn.mods.softcap, flexattn.mods.natten_2d, flexattn.mods.sliding_window])
def test_a_factory_that_was_not_called(make: Callable[..., object]) -> None:
    with pytest.raises(errors.ModError, match=rf"Call it: mods\.{make.__name__}\(\w+.*\)\.$"):
        trace(make, "score" if make is flexattn.mods.softcap else "mask")


def test_lists_and_arrays_in_mods() -> None:
    values, array = [0.5, 1.0, 1.5, 2.0], np.array([0.5, 1.0, 1.5, 2.0])
    with pytest.raises(errors.ModError, match=r"test_errors\.py:\d+ uses a tensor as a Python index.*torch.tensor"):
        flex_attention(Q, K, V, lambda score, b, h, q_idx, kv_idx: score * values[h])
    with pytest.raises(errors.ModError, match=r"test_errors\.py:\d+ uses a position or score with a numpy array"):
        flex_attention(Q, K, V, lambda score, b, h, q_idx, kv_idx: score * array[h])


def test_heads_and_positions_that_look_swapped() -> None:
    swapped = ones(1, 512, 8, 16)  # [B, S, H, D]
    validate._warn_swapped.cache_clear()
    with pytest.warns(UserWarning, match=r"512 heads of 8 positions.*transpose\(1, 2\)") as found:
        flex_attention(swapped, swapped, swapped)
        flex_attention(swapped, swapped, swapped)
    assert len(found) == 1
    assert found[0].filename == __file__
