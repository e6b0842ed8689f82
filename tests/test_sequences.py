"""seqused_k, q_offsets, kv_positions and block_table: results, gradients and errors on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import assert_close_to_oracle
from sequence_cases import CASES, FLOAT8, SequenceCase
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn import create_block_mask, flex_attention, mods


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_one_dense_computation_per_sequence(case: SequenceCase) -> None:
    q, k, v = case.tensors()
    out, lse, largest = case.run(q, k, v)
    for name, found, dense, exact in zip(
        ("out", "lse"), (out, lse), case.expected(q, k, v, None), case.expected(q, k, v), strict=True
    ):
        assert_close_to_oracle(name, found, dense, exact)
    assert (largest is not None) == case.max_scores


GRADIENTS = ["many queries", "window", "lengths, mask", "by batch", "pages, many queries", "across rows of blocks"]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    case = replace(CASES[name], dtype=torch.float64)
    tensors = [x.requires_grad_() for x in case.tensors()]
    d_out = torch.randn(3, case.Hq, case.M, case.Dv, dtype=torch.float64)
    found = torch.autograd.grad(case.run(*tensors)[0], tensors, d_out)
    expected = torch.autograd.grad(case.expected(*tensors)[0], tensors, d_out)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", ["float8, whole rows", "float8 pages"])
def test_gradient_of_query_with_float8_keys(name: str) -> None:
    case = replace(CASES[name], dtype=torch.float64)
    q, k, v = case.tensors()
    q.requires_grad_()
    d_out = torch.randn(3, case.Hq, case.M, case.Dv, dtype=torch.float64)
    (found,) = torch.autograd.grad(case.run(q, k, v)[0], q, d_out)
    (expected,) = torch.autograd.grad(case.expected(q, k, v)[0], q, d_out)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # descales are float32


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


q = torch.randn(2, 2, 3, 8)
k = torch.randn(2, 2, 64, 8)
K8, DESCALES = k.to(FLOAT8), {"k_descale": torch.ones(2), "v_descale": torch.ones(2)}
PAGES = torch.randn(8, 16, 2, 8)
TABLE = torch.arange(8, dtype=torch.int32).view(2, 4)
ERRORS: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "dtype of lengths": ({"seqused_k": torch.tensor([1, 2])}, TypeError, "seqused_k: found i64, expected i32"),
    "list of lengths": ({"seqused_k": [1, 2]}, TypeError, "seqused_k: found a list"),
    "number of lengths": ({"seqused_k": integers(1)}, ValueError, r"seqused_k: found shape \[1\], expected \[2\]"),
    "length past the capacity": ({"seqused_k": integers(1, 65)}, ValueError, "seqused_k: found an entry 65.*0 to 64"),
    "negative length": ({"seqused_k": integers(-1, 5)}, ValueError, "seqused_k: found an entry -1"),
    "device": ({"seqused_k": integers(1, 2).to("meta")}, RuntimeError, "seqused_k"),
    "offsets": ({"q_offsets": integers(1, 2, 3)}, ValueError, "q_offsets: found shape"),
    "negative offset": ({"q_offsets": integers(0, -4)}, ValueError, "q_offsets: found an entry -4"),
    "rank of offsets": ({"q_offsets": integers(1, 2)[None]}, ValueError, "q_offsets: found shape"),
    "positions": ({"kv_positions": integers(*range(64))}, ValueError, "kv_positions: found shape"),
    "positions of other slots": ({"kv_positions": integers(*range(32))[None]}, ValueError, r"\[2, 64\] or \[1, 64\]"),
    "descale of bf16": ({"k_descale": torch.ones(2)}, ValueError, "k_descale: found a tensor, expected None with f32"),
    "float8": ({"key": K8, "value": K8}, NotImplementedError, "pass key and value as float8_e4m3fn with k_descale"),
    "no v_descale": ({"key": K8, "value": K8, "k_descale": torch.ones(2)}, TypeError, "v_descale: found a NoneType"),
    "float8 keys only": ({"key": K8, **DESCALES}, NotImplementedError, "query f32, key float8_e4m3fn, value f32"),
    "other float8": (
        {"key": k.to(torch.float8_e5m2), "value": k.to(torch.float8_e5m2), **DESCALES},
        NotImplementedError,
        "float8_e5m2",
    ),
    "shape of descales": (
        {"key": K8, "value": K8, **DESCALES, "v_descale": torch.ones(2, 2)},
        ValueError,
        r"v_descale: found shape \[2, 2\], expected \[2\]",
    ),
    "dtype of descales": (
        {"key": K8, "value": K8, **DESCALES, "v_descale": torch.ones(2).half()},
        TypeError,
        "v_descale: found f16",
    ),
    "descale that learns": (
        {"key": K8, "value": K8, **DESCALES, "k_descale": torch.ones(2, requires_grad=True)},
        NotImplementedError,
        "k_descale: found a tensor that requires a gradient",
    ),
    "layout without pages": ({"kv_layout": "HND"}, ValueError, "kv_layout: found 'HND', expected a block_table"),
}
PAGED_ERRORS: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "type of the layout": (
        {"kv_layout": ["NHD"], "block_table": torch.zeros(2, 4, dtype=torch.int32)},
        ValueError,
        r"kv_layout: found \['NHD'\], expected 'NHD' or 'HND'",
    ),
    "name of the layout": ({"kv_layout": "DNH"}, ValueError, "kv_layout: found 'DNH', expected 'NHD' or 'HND'"),
    "rows of the table": ({"block_table": TABLE[:1]}, ValueError, "block_table: found 1 rows"),
    "dtype of the table": ({"block_table": TABLE.long()}, TypeError, "block_table: found i64"),
    "page past the pool": ({"block_table": TABLE + 1}, ValueError, "block_table: found an entry 8.*from 0 to 7"),
    "length past the table": ({"seqused_k": integers(64, 65)}, ValueError, "seqused_k.*65.*capacity of block_table"),
    "positions of pages": ({"kv_positions": integers(*range(64))[None]}, ValueError, "kv_positions.*block_table"),
    "page size": ({"key": PAGES[:, :8], "value": PAGES[:, :8]}, ValueError, "key: found pages of 8, expected a power"),
    "order of dims": ({"kv_layout": "HND"}, ValueError, "key"),
    "dense keys": (
        {"key": k, "value": k},
        ValueError,
        r"pages of 2, .*With a block_table, key is \[pages, page_size, ",
    ),
    "dense keys with as many heads as a page has tokens": (
        {"key": k.new_zeros(2, 16, 64, 8), "value": k.new_zeros(2, 16, 64, 8)},
        ValueError,
        r"key: found 64 heads, expected at most those of query, 2.*Leave the block_table out if key is \[B, Hkv, N, D",
    ),
    "no pages": ({"key": PAGES[:0], "value": PAGES[:0]}, ValueError, "key: found no pages"),
    "values of fewer pages": ({"value": PAGES[:4]}, ValueError, "value: found 4 pages"),
    "rank of pages": ({"key": PAGES[0]}, ValueError, "key: found shape"),
}


@pytest.mark.parametrize(("changes", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(changes: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        flex_attention(q, **{"key": k, "value": k, **changes})


@pytest.mark.parametrize(("changes", "error", "text"), PAGED_ERRORS.values(), ids=PAGED_ERRORS)
def test_errors_of_pages_name_the_argument(changes: dict[str, object], error: type[Exception], text: str) -> None:
    arguments = {"key": PAGES, "value": PAGES, "block_table": TABLE, **changes}
    with pytest.raises(error, match=text):
        flex_attention(q, **arguments)


def test_masks_that_do_not_cover_the_positions_are_rejected() -> None:
    mask = create_block_mask(mods.causal, None, None, 40, 64, device="cpu")
    flex_attention(q, k, k, block_mask=mask, q_offsets=integers(0, 37))
    with pytest.raises(ValueError, match="q_offsets: found an entry 38, expected entries from 0 to 37"):
        flex_attention(q, k, k, block_mask=mask, q_offsets=integers(0, 38))
    # The last page need not be filled. But no sequence may use more keys than the mask has.
    pages = mods.causal, None, None, 64, 60
    whole, used = {"block_table": TABLE, "q_offsets": integers(0, 30)}, integers(60, 61)
    flex_attention(q, PAGES, PAGES, block_mask=create_block_mask(*pages, device="cpu"), seqused_k=used - 1, **whole)
    with pytest.raises(ValueError, match="seqused_k: found an entry 61, expected entries from 0 to 60"):
        flex_attention(q, PAGES, PAGES, block_mask=create_block_mask(*pages, device="cpu"), seqused_k=used, **whole)
    short = create_block_mask(mods.causal, None, None, 64, 63, device="cpu")
    with pytest.raises(flexattn.errors.MaskError, match=r"block_mask: found lengths \(64, 63\)"):
        flex_attention(q, k, k, block_mask=short, q_offsets=integers(0, 1))


def test_lists_by_hand_are_read_at_the_offsets() -> None:
    """Keys in blocks that the lists leave empty never count, even if they are NaN."""
    counts, indices = torch.tensor([[[1, 1, 2, 1]]]), torch.tensor([[[[0, 0], [1, 0], [0, 2], [3, 0]]]])
    mask = flexattn.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, seq_lengths=(64, 64))
    key = k.clone()
    key[:, :, 16:32] = torch.nan
    out = flex_attention(q, key, key, block_mask=mask, q_offsets=integers(0, 32))
    for b, blocks in ((0, [0]), (1, [0, 2])):
        keys = torch.cat([k[b : b + 1, :, 16 * i : 16 * i + 16] for i in blocks], 2)
        torch.testing.assert_close(out[b : b + 1], flex_attention(q[b : b + 1], keys, keys))


def test_lengths_may_change_between_calls_but_not_before_the_backward() -> None:
    used = integers(3, 60)
    query = q.clone().requires_grad_()
    first = flex_attention(query, k, k, seqused_k=used)
    used += 1
    expected = flex_attention(q, k[:, :, :4], k[:, :, :4])
    torch.testing.assert_close(flex_attention(q, k, k, seqused_k=used)[0], expected[0])
    with pytest.raises(flexattn.errors.MutationError, match="seqused_k"):
        first.sum().backward()


def test_derivatives_of_second_order() -> None:
    query, key = (x.double().requires_grad_() for x in (q[..., :2], k[:, :, :6, :2]))
    mask = create_block_mask(mods.causal, None, None, 6, 6, device="cpu")

    def call(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return flex_attention(query, key, key, block_mask=mask, seqused_k=integers(3, 6), q_offsets=integers(0, 3))

    assert torch.autograd.gradgradcheck(call, (query, key))


def test_explain_shows_what_is_read_from_the_device() -> None:
    mask = create_block_mask(mods.causal, None, None, 64, 64, device="cpu")
    text = flexattn.explain(
        q, PAGES, PAGES, block_mask=mask, seqused_k=integers(3, 4), q_offsets=integers(0, 1), block_table=TABLE,
        target="sm_90",
    ).full()  # fmt: skip
    for line in (
        "lengths  of sequences",
        "rows     of the mask from q_offsets on",
        "pages    of keys, from block_table",
    ):
        assert line in text


def test_compiled_graphs_break_at_the_call() -> None:
    def call(query: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        return flex_attention(query * 2, k, k, seqused_k=used) + 1

    expected = call(q, integers(3, 60))
    torch.testing.assert_close(torch.compile(call, backend="eager")(q, integers(3, 60)), expected)


def test_paged_attention_of_torch() -> None:
    """PyTorch's class, which is attention-gym's, converts masks and score_mods to pages itself."""
    module = pytest.importorskip("torch.nn.attention.experimental._paged_attention")
    B, H, N, size = 3, 2, 256, 64
    pages = module.PagedAttention(16, size, B, device="cpu")
    query, key, value = torch.randn(B, H, 4, 16), torch.randn(B, H, N, 16), torch.randn(B, H, N, 16)
    stored = [torch.zeros(1, H, 16 * size, 16) for _ in range(2)]
    for b in torch.arange(B):
        pages.reserve(b, torch.tensor(N))
    pages.assign(torch.arange(B), torch.arange(N).expand(B, N), key, value, *stored)

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return kv_idx <= q_idx + 200

    mask = upstream.create_block_mask(mask_mod, B, 1, 4, N, device="cpu", BLOCK_SIZE=(64, size))
    out = flex_attention(
        query, *stored, pages.get_score_mod(mods.alibi(H)), pages.convert_logical_block_mask(mask)
    )  # fmt: skip
    expected, _ = flexattn.reference.attention(query, key, value, mods.alibi(H), mask_mod)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
