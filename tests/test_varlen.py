"""varlen_attn and jagged tensors on the CPU: results, gradients, torch's arguments and errors."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import assert_close_to_oracle
from packed_cases import CASES, PackedCase, integers
from sequence_cases import alibi, relative
from torch import Tensor

import flexattn
from flexattn import (
    AuxRequest,
    BlockMask,
    counters,
    create_block_mask,
    flex_attention,
    mods,
    varlen_attn,
    varlen_attn_out,
)
from flexattn.call.varlen.arguments import Packed, PackedArguments
from flexattn.call.varlen.mods import packed_mask


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}], ids=["packed", "invariant"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_one_dense_computation_per_sequence(case: PackedCase, options: dict[str, object]) -> None:
    tensors = case.tensors()
    dense, exact = case.expected(*tensors, dtype=None), case.expected(*tensors)
    for name, found, x, y in zip(("out", "lse"), case.run(*tensors, **options), dense, exact, strict=True):
        assert_close_to_oracle(name, found, x, y)


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}], ids=["packed", "invariant"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, options: dict[str, object]) -> None:
    case = replace(CASES[name], dtype=torch.float64)
    tensors = case.tensors()
    out, expected = case.run(*tensors, **options)[0], case.expected(*tensors)[0]
    d_out = torch.randn(out.shape, dtype=out.dtype)
    for x, y in zip(*(torch.autograd.grad(o, tensors, d_out) for o in (out, expected)), strict=True):
        torch.testing.assert_close(x, y.to(x.dtype))


@pytest.mark.parametrize("options", [{}, {"window_size": (2, 0)}, {"seqused_k": integers(3, 6)}])
def test_training_after_inference_with_the_same_sequences(options: dict[str, Any]) -> None:
    """What is kept for these sequences was made in inference mode."""
    cu, x = integers(0, 4, 10), torch.randn(10, 2, 16)

    def gradient(cu: Tensor) -> Tensor:
        query = x.clone().requires_grad_()
        return torch.autograd.grad(varlen_attn(query, x, x, cu, cu, 6, 6, **options).square().sum(), query)[0]

    nested = torch.nested.nested_tensor_from_jagged(x, cu).transpose(1, 2)
    with torch.inference_mode():
        varlen_attn(x, x, x, cu, cu, 6, 6, **options)
        flex_attention(nested, nested, nested)
    torch.testing.assert_close(gradient(cu), gradient(cu.clone()), rtol=0, atol=0)


def test_a_block_table_of_another_rank() -> None:
    q, key, cu = torch.randn(4, 2, 16), torch.randn(2, 8, 2, 16), integers(0, 4)
    with pytest.raises(flexattn.errors.ArgumentError, match=r"block_table: found shape \[2\]"):
        varlen_attn(q, key, key, cu, None, 4, 16, seqused_k=integers(5), block_table=integers(0, 1))


def test_second_derivatives() -> None:
    case = PackedCase((3, 4), (3, 5), window_size=(-1, 0), D=4, Dv=4, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda *tensors: case.run(*tensors)[0], case.tensors())


def test_the_arguments_of_torch() -> None:
    torch_varlen = pytest.importorskip("torch.nn.attention.varlen")
    ours = inspect.signature(varlen_attn).parameters
    for name, parameter in inspect.signature(torch_varlen.varlen_attn).parameters.items():
        assert name in ours
        assert ours[name].default == parameter.default
        assert ours[name].kind == parameter.kind


CU = integers(0, 7, 20)
X = torch.randn(20, 2, 8)
PAGES = torch.randn(6, 16, 2, 8)
TABLE = integers(3, 5, 0, 1).view(2, 2)


def test_keys_of_a_dense_cache() -> None:
    """cu_seq_k=None: each sequence has its own row of key."""
    cache = torch.randn(2, 30, 2, 8)
    used = integers(11, 30)
    found = varlen_attn(X, cache, cache, CU, None, 13, 30, seqused_k=used, window_size=(-1, 0))
    rows = torch.cat([cache[0, :11], cache[1]])
    expected = varlen_attn(X, rows, rows, CU, integers(0, 11, 41), 13, 30, window_size=(-1, 0))
    torch.testing.assert_close(found, expected)
    found = varlen_attn(X, cache, cache, CU, None, 13, 30)
    rows = cache.flatten(0, 1)
    torch.testing.assert_close(found, varlen_attn(X, rows, rows, CU, integers(0, 30, 60), 13, 30))


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("cu_seq_k", [None, CU])  # torch ignores cu_seq_k if there are pages
def test_pages(cu_seq_k: Tensor | None, heads_first: bool) -> None:
    pages, options = (PAGES.transpose(1, 2), {"kv_layout": "HND"}) if heads_first else (PAGES, {})
    found = varlen_attn(
        X, pages, pages, CU, cu_seq_k, 13, 32, block_table=TABLE, seqused_k=integers(9, 30), window_size=(12, 0),
        score_mod=alibi, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx % 5 > b, **options,
    )  # fmt: skip
    rows = torch.cat([PAGES[3, :9], PAGES[0], PAGES[1, :14]])
    expected = varlen_attn(
        X, rows, rows, CU, integers(0, 9, 39), 13, 32, window_size=(12, 0), score_mod=alibi,
        mask_mod=lambda b, h, q_idx, kv_idx: kv_idx % 5 > b,
    )  # fmt: skip
    torch.testing.assert_close(found, expected)


def test_a_row_does_not_depend_on_other_sequences_with_num_splits_1() -> None:
    case = PackedCase((30, 50, 1), (30, 50, 70), window_size=(-1, 0))
    q, k, v = case.tensors()
    alone = PackedCase((50,), (50,), window_size=(-1, 0))
    out, _ = case.run(q, k, v, num_splits=1)
    one, _ = alone.run(q[30:80], k[30:80], v[30:80], num_splits=1)
    assert torch.equal(out[30:80], one)


@pytest.mark.parametrize("max_q", [13, 20])
@pytest.mark.parametrize("form", ["dense", "num_splits"])
def test_score_mods_are_not_used_for_padding(form: str, max_q: int) -> None:
    """A tensor with an element for each row of query, or for each distance, has none for the rows of the padding."""
    cu = integers(0, 13, 20)
    torch.manual_seed(0)  # gradients of 1 in 1,000 draws are less precise than the bounds below
    of_rows, of_distances = torch.randn(20, requires_grad=True), torch.randn(26, requires_grad=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + of_rows[cu[b] + q_idx] * kv_idx + of_distances[q_idx - kv_idx + 13]

    q, x = torch.randn(20, 2, 16, requires_grad=True), torch.randn(20, 2, 16, requires_grad=True)
    tensors = q, x, of_rows, of_distances
    other: dict[str, Any] = {"num_splits": 1}
    if form == "dense":
        padded = torch.stack((x[:13], torch.nn.functional.pad(x[13:], (0, 0, 0, 0, 0, 6))))
        other = {"key": padded, "value": padded, "cu_seq_k": None, "seqused_k": integers(13, 7)}
    given = {"query": q, "key": x, "value": x, "cu_seq_q": cu, "cu_seq_k": cu, "max_q": 13, "max_k": 13}
    expected = varlen_attn(**given, score_mod=score_mod)
    found = varlen_attn(**{**given, "max_q": max_q, **other}, score_mod=score_mod)
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(out.square().sum(), tensors) for out in (found, expected))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_results_of_varlen_attn_out() -> None:
    out = torch.empty_like(X)
    expected = varlen_attn(X, X, X, CU, CU, 13, 13, return_aux=AuxRequest(lse=True))
    found = varlen_attn_out(out, X, X, X, CU, CU, 13, 13, return_aux=AuxRequest(lse=True))
    assert found[0] is out
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    assert varlen_attn_out(out, X, X, X, CU, CU, 13, 13) is out


@pytest.mark.parametrize("out", [None, X[:1], X.half()])
def test_where_results_cannot_be_written(out: Any) -> None:
    with pytest.raises(ValueError, match=r"out: found .*, expected torch\.float32"):
        varlen_attn_out(out, X, X, X, CU, CU, 13, 13)


@pytest.mark.parametrize("num_splits", [None, 1])
def test_longest_lengths_may_be_larger_than_all_rows(num_splits: int | None) -> None:
    expected = varlen_attn(X, X, X, CU, CU, 13, 13)
    found = varlen_attn(X, X, X, CU, CU, 10**9, 10**9, num_splits=num_splits)
    torch.testing.assert_close(found, expected)
    nothing, no_rows = X[:0], integers(0, 0, 0)
    for q, k, cu_q, cu_k in (
        (nothing, X, no_rows, CU), (X, nothing, CU, no_rows), (nothing, nothing, no_rows, no_rows)
    ):  # fmt: skip
        found = varlen_attn(q, k, k, cu_q, cu_k, 20, 20, num_splits=num_splits, window_size=(3, 0))
        assert torch.equal(found, torch.zeros_like(q))


def test_no_array_of_queries_by_keys() -> None:
    T = 1 << 17
    q = torch.randn(T, 1, 8)
    cu = torch.arange(0, T + 1, 64, dtype=torch.int32)
    out = varlen_attn(q, q, q, cu, cu, 64, 64, window_size=(-1, 0))  # 16 GiB as booles
    last = torch.nn.functional.scaled_dot_product_attention(
        *(q[-64:].transpose(0, 1) for _ in range(3)), is_causal=True
    )
    torch.testing.assert_close(out[-64:, 0], last[0], rtol=1e-4, atol=1e-5)


def test_lengths_are_read_again_if_they_changed() -> None:
    cu = CU.clone()
    first = varlen_attn(X, X, X, cu, cu, 20, 20)
    cu[1] = 3
    torch.testing.assert_close(
        varlen_attn(X, X, X, cu, cu, 20, 20)[:3],
        varlen_attn(X[:3], X[:3], X[:3], CU[:2].clamp(max=3), CU[:2].clamp(max=3), 3, 3),
    )
    cu[1] = 7
    assert torch.equal(varlen_attn(X, X, X, cu, cu, 20, 20), first)


@pytest.mark.parametrize("write", [lambda cu: cu.numpy(), lambda cu: cu.data], ids=["numpy", "data"])
def test_writes_that_torch_does_not_count_are_seen(write: Any) -> None:
    cu = CU.clone()
    varlen_attn(X, X, X, cu, cu, 20, 20)
    write(cu)[1] = 3
    assert torch.equal(varlen_attn(X, X, X, cu, cu, 20, 20), varlen_attn(X, X, X, *[integers(0, 3, 20)] * 2, 20, 20))


def test_writes_to_long_tensors_that_torch_does_not_count_are_seen() -> None:
    x = torch.randn(5000, 1, 8)
    cu = torch.arange(5001, dtype=torch.int32)
    varlen_attn(x, x, x, cu, cu, 2, 2)
    cu.numpy()[3000] += 1
    assert torch.equal(varlen_attn(x, x, x, cu, cu, 2, 2), varlen_attn(x, x, x, cu.clone(), cu.clone(), 2, 2))


@pytest.mark.parametrize(
    ("lengths", "most"), [((1, 2), 2), ((3, 0), 2), ((0, 0), 1), ((2, 2), 2), ((0, 0), 0)], ids=str
)
@pytest.mark.parametrize("kind", ["pages", "rows", "invariant"])
def test_rows_after_the_last_sequence(kind: str, lengths: tuple[int, int], most: int) -> None:
    """They have the number of rows of padding, so that rows are as many as sequences times max_q."""
    q, used, most = X[:4], integers(9, 14), max(most, *lengths)
    cu_q, cu_k, ends = integers(0, lengths[0], sum(lengths)), integers(0, 9, 23), (9, 23)
    cache = torch.randn(23, 2, 8)
    given: tuple[Any, ...] = (cache, cache, cu_q, cu_k, most, 14)
    options: dict[str, Any] = {"num_splits": 1}
    if kind != "invariant":
        size = 16 if kind == "pages" else 20
        pages = torch.stack([torch.nn.functional.pad(x, (0, 0, 0, 0, 0, size - len(x))) for x in cache.split([9, 14])])
        given = (pages, pages, cu_q, None, most, size)
        options = {"seqused_k": used}
        options |= {"block_table": integers(0, 1)[:, None]} if kind == "pages" else {}
    out, lse = varlen_attn(q, *given, window_size=(-1, 0), return_aux=AuxRequest(lse=True), **options)  # type: ignore[misc]
    start = 0
    for rows, (first, last) in zip(lengths, ((0, ends[0]), ends), strict=True):
        one = [x.transpose(0, 1)[None] for x in (q[start : start + rows], cache[first:last], cache[first:last])]
        mask = torch.ones(rows, last - first, dtype=torch.bool).tril(last - first - rows)
        expected = torch.nn.functional.scaled_dot_product_attention(*one, attn_mask=mask)[0].transpose(0, 1)
        torch.testing.assert_close(out[start : start + rows], expected)
        start += rows
    assert not out[start:].any() and bool((lse[:, start:] == -torch.inf).all())


def test_new_lengths_compile_nothing() -> None:
    case = CASES["causal, bottom right"]
    case.run(*case.tensors())
    before = counters()
    other = replace(case, q_lengths=(9, 40), k_lengths=(30, 90))
    tensors = other.tensors()
    found = other.run(*tensors)[0]
    assert_close_to_oracle("out", found, other.expected(*tensors, dtype=None)[0], other.expected(*tensors)[0])
    after = counters()
    assert (after.traces, after.kernels_compiled) == (before.traces, before.kernels_compiled)


def test_a_window_that_is_a_list() -> None:
    for _ in range(2):
        found = varlen_attn(X, X, X, CU, CU, 13, 13, window_size=[3, 0])
        assert torch.equal(found, varlen_attn(X, X, X, CU, CU, 13, 13, window_size=(3, 0)))


ERRORS: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "start": ({"cu_seq_q": integers(1, 7, 20)}, ValueError, "cu_seq_q: found values that start at 1"),
    "end": ({"cu_seq_k": integers(0, 7, 21)}, ValueError, "cu_seq_k: found an end at 21.*at most 20"),
    "descending": ({"cu_seq_q": integers(0, 9, 7)}, ValueError, "cu_seq_q: found descending values"),
    "dtype": ({"cu_seq_q": CU.long()}, TypeError, "cu_seq_q: found i64, expected i32"),
    "device": ({"cu_seq_k": CU.to("meta")}, RuntimeError, "cu_seq_k: found device meta"),
    "rank": ({"cu_seq_q": CU[None]}, ValueError, "cu_seq_q: found shape"),
    "number of sequences": ({"cu_seq_k": integers(0, 20)}, ValueError, "cu_seq_k: found 2 entries, expected 3"),
    "no sequence": ({"cu_seq_q": integers(0), "cu_seq_k": integers(0)}, ValueError, "cu_seq_q: found 1 entries"),
    "not a tensor": ({"cu_seq_q": [0, 7, 20]}, TypeError, "cu_seq_q: found a list"),
    "max_q": ({"max_q": 12}, ValueError, "max_q: found 12, expected at least the length of the longest sequence, 13"),
    "max_k": ({"max_k": 2.5}, ValueError, "max_k: found 2.5"),
    "max_q of a tensor": ({"max_q": torch.tensor(13)}, ValueError, r"max_q: found tensor\(13\).*Pass int\(max_q\)\."),
    "max_k of a bool": ({"max_k": True}, ValueError, "max_k: found True"),
    "window": ({"window_size": (3,)}, ValueError, r"window_size: found \(3,\)"),
    "negative window": ({"window_size": (-2, 0)}, ValueError, r"window_size: found \(-2, 0\)"),
    "splits": ({"num_splits": -1}, ValueError, "num_splits: found -1"),
    "used": ({"seqused_k": integers(7, 14)}, ValueError, "seqused_k: found an entry out of range"),
    "number of used": ({"seqused_k": integers(7)}, ValueError, r"seqused_k: found shape \[1\], expected \[2\]"),
    "rank of query": ({"query": X[None]}, ValueError, "query: found shape"),
    "rank of key": ({"key": X[None]}, ValueError, "key: found shape"),
    "heads": ({"key": X[:, :1], "value": X[:, :1]}, ValueError, "enable_gqa"),
    "dense cache": ({"cu_seq_k": None}, ValueError, r"key: found shape.*\[sequences, N, Hkv, D\]"),
    "pages without lengths": (
        {"key": PAGES, "value": PAGES, "block_table": TABLE}, ValueError, "seqused_k: found None, expected a tensor"
    ),
    "table too short": (
        {"key": PAGES, "value": PAGES, "block_table": TABLE, "seqused_k": integers(9, 33)}, ValueError,
        "seqused_k: found an entry 33, expected entries from 0 to 32",
    ),
    "page": (
        {"key": PAGES, "value": PAGES, "block_table": TABLE + 5, "seqused_k": integers(9, 30)}, ValueError,
        "block_table: found an entry 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("num_splits", [None, 1])
@pytest.mark.parametrize(("changes", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(
    changes: dict[str, object], error: type[Exception], text: str, num_splits: int | None
) -> None:
    varlen_attn(X, X, X, CU, CU, 13, 13)  # what is known of a call like it makes no difference
    given = {"query": X, "key": X, "value": X, "cu_seq_q": CU, "cu_seq_k": CU, "max_q": 13, "max_k": 13}
    with pytest.raises(error, match=text):
        varlen_attn(**{"num_splits": num_splits, **given, **changes})


def test_heads_before_rows() -> None:
    swapped = X.transpose(0, 1)
    with pytest.raises(ValueError, match=r"cu_seq_q: found an end at 20.*are \[T, H, D\]. If yours are \[H, T, D\]"):
        varlen_attn(swapped, swapped, swapped, CU, CU, 13, 13)


@pytest.mark.parametrize("num_splits", [None, 1])
def test_longest_lengths_of_numpy(num_splits: int | None) -> None:
    expected = varlen_attn(X, X, X, CU, CU, 13, 13, num_splits=num_splits)
    longest = np.int64(13)
    for _ in range(2):
        found = varlen_attn(X, X, X, CU, CU, longest, longest, num_splits=num_splits)  # type: ignore[arg-type]
        assert torch.equal(found, expected)


OFFSETS = torch.tensor([0, 30, 30, 95, 140])
LENGTHS = torch.tensor([20, 0, 65, 31])


def jagged(H: int, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return rows [140, H, 16], and a nested tensor [4, H, lengths, 16] of them."""
    rows = torch.randn(140, H, 16, dtype=torch.float64, requires_grad=True)
    return rows, torch.nested.nested_tensor_from_jagged(rows, OFFSETS, lengths).transpose(1, 2)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["", "lengths"])
def test_jagged(lengths: Tensor | None) -> None:
    (a, q), (b, k), (c, v) = jagged(4, lengths), jagged(2, lengths), jagged(2, lengths)
    mask = create_block_mask(mods.causal, None, None, 70, 70, device="cpu")
    out, aux = flex_attention(
        q, k, v, relative, mask, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True)
    )  # fmt: skip
    assert out.is_nested and out.shape[:2] == (4, 4) and aux.lse.is_nested and aux.max_scores.is_nested
    used = OFFSETS.diff() if lengths is None else lengths
    rows = torch.cat([torch.arange(s, s + n) for s, n in zip(OFFSETS[:-1], used, strict=True)])
    case = PackedCase(tuple(used.tolist()), tuple(used.tolist()), mask_mod=mods.causal)
    case = replace(case, table=False, dtype=torch.float64)
    expected = Relative(**vars(case)).expected(a[rows], b[rows], c[rows])
    found = out.transpose(1, 2).values()[rows], aux.lse.transpose(1, 2).values()[rows].T
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    d_out = torch.randn_like(found[0])
    tensors = [a, b, c]
    for x, y in zip(*(torch.autograd.grad(o[0], tensors, d_out) for o in (found, expected)), strict=True):
        torch.testing.assert_close(x, y)


class Relative(PackedCase):
    """A case whose score_mod is `relative`."""

    def expected(self, *tensors: Tensor, dtype: torch.dtype | None = torch.float64) -> tuple[Tensor, Tensor]:
        return super().expected(*tensors, torch.empty(0), dtype=dtype)

    def score_mod(self, table: Tensor) -> Any:
        return relative


def test_the_loss_of_a_jagged_batch() -> None:
    rows, q = jagged(2)
    out = flex_attention(q, q, q)
    (out * out).sum().backward()
    first = rows.grad
    rows.grad = None
    cu = OFFSETS.int()
    varlen_attn(rows, rows, rows, cu, cu, 65, 65).square().sum().backward()
    torch.testing.assert_close(rows.grad, first)


def test_jagged_tensors_of_other_sequences() -> None:
    """Cross attention: keys have other lengths than queries."""
    _, q = jagged(2)
    k = torch.nested.nested_tensor(
        [torch.randn(n, 2, 16, dtype=torch.float64) for n in (5, 9, 0, 70)], layout=torch.jagged
    ).transpose(1, 2)
    out = flex_attention(q, k, k)
    for x, y, z in zip(out.unbind(), q.unbind(), k.unbind(), strict=True):
        expected, _ = flexattn.reference.attention(y[None], z[None], z[None])
        torch.testing.assert_close(x, expected[0])


def nested(*shapes: tuple[int, ...], layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(shape) for shape in shapes], layout=layout)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # torch's, that this layout is old
    STRIDED = nested((2, 3, 8), (2, 5, 8), layout=torch.strided)
N = nested((3, 2, 8), (5, 2, 8)).transpose(1, 2)
NO_BLOCKS = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
JAGGED_ERRORS: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "dense key": ({"key": torch.randn(2, 2, 8, 8)}, NotImplementedError, "key: found a dense tensor"),
    "strided": (
        {"query": STRIDED}, NotImplementedError,
        "query: found a nested tensor of layout torch.strided",
    ),
    "not transposed": ({"query": nested((3, 2, 8), (5, 2, 8))}, ValueError, "query: found shape"),
    "rank": ({"query": nested((3, 8), (5, 8))}, ValueError, "query: found shape"),
    "other sequences": ({"key": nested((3, 2, 8)).transpose(1, 2)}, ValueError, "key: found 1 sequences"),
    "other values": (
        {"value": nested((4, 2, 8), (5, 2, 8)).transpose(1, 2)}, ValueError, "value: found sequences of other lengths"
    ),
    "same number of other values": (
        {"value": nested((5, 2, 8), (3, 2, 8)).transpose(1, 2)}, ValueError, "value: found sequences of other lengths"
    ),
    "with lengths": ({"seqused_k": integers(3, 5)}, ValueError, "query: found a nested tensor, expected a dense one"),
    "lists of blocks": (
        {"block_mask": BlockMask.from_kv_blocks(NO_BLOCKS[..., 0], NO_BLOCKS, mask_mod=mods.causal)}, ValueError,
        "block_mask: found other block lists",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), JAGGED_ERRORS.values(), ids=JAGGED_ERRORS)
def test_errors_of_jagged_tensors(changes: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        flex_attention(**{"query": N, "key": N, "value": N, **changes})


@pytest.mark.parametrize("both", [True, False])
def test_short_sequences_are_taken_in_order(both: bool) -> None:
    """Otherwise rows with many blocks come first."""
    cu = torch.arange(0, 4097, 256, dtype=torch.int32)
    query = torch.zeros(1, 32, 4096, 16)
    for longest, heads, reach in ((256, 32, 256), (200, 32, 256), (257, 32, None), (4096, 32, None), (256, 31, None)):
        packed = Packed.of(PackedArguments(cu, cu, 256, 256, (-1, 0)), query, query)
        packed = replace(packed, longest=longest)
        mask = packed_mask(None, packed.packing, packed.window)
        blocks = packed.blocks_of(mask, (4096, 4096), heads, both)
        assert blocks.reach == reach
        assert (blocks.kv_runs.order[0].tolist() == list(range(31, -1, -1))) == (reach is not None)
        if both:
            assert blocks.q_runs is not None
            assert (blocks.q_runs.order[0].tolist() == list(range(32))) == (reach is not None)


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}], ids=["packed", "padded"])
def test_rows_after_the_last_sequence_have_no_sink(options: dict[str, Any]) -> None:
    case = PackedCase(after=3, sink=True, window_size=(-1, 0))
    tensors = case.tensors()
    _, lse = case.run(*tensors, **options)
    torch.testing.assert_close(lse.double(), case.expected(*tensors)[1], rtol=1e-4, atol=1e-5)


DENSE = torch.randn(2, 9, 2, 16)
DENSE_KEYS = {"cu_seq_k": None, "key": DENSE, "value": DENSE, "window_size": (3, 0)}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"return_aux": True}, "return_aux"),
        ({"return_aux": flexattn.AuxRequest(lse=True, max_scores=True)}, "return_aux"),
        ({"kernel_options": 3}, "kernel_options"),
        ({"kv_layout": "HND"}, "kv_layout"),
        ({"block_table": [[0]], "seqused_k": integers(3, 4)}, "block_table"),
        ({"value": torch.randn(9, 2, 16), "num_splits": 1}, "value"),
        ({"cu_seq_k": None, "key": torch.randn(1, 9, 2, 16), "value": torch.randn(1, 9, 2, 16)}, "key"),
        ({"kv_layout": "HND"}, "kv_layout"),
        ({"kv_layout": "HND", "num_splits": 1}, "kv_layout"),
        ({**DENSE_KEYS, "seqused_k": [4, 9]}, "seqused_k"),
        ({**DENSE_KEYS, "seqused_k": integers(4, 9, 3)}, "seqused_k"),
    ],
)
def test_errors_of_forms_name_the_argument(changes: dict[str, Any], name: str) -> None:
    x, cu = torch.randn(10, 2, 16), integers(0, 4, 10)
    given = {"query": x, "key": x, "value": x, "cu_seq_q": cu, "cu_seq_k": cu, "max_q": 6, "max_k": 9, **changes}
    with pytest.raises(flexattn.errors.FlexAttentionError, match=f"^{name}: found"):
        varlen_attn(**given)


@pytest.mark.parametrize("num_splits", [None, 1])
def test_a_mask_mod_reads_no_table_at_rows_of_padding(num_splits: int | None) -> None:
    """max_q may be larger than the longest sequence, for which a table has elements."""
    x, cu, ids = torch.randn(7, 2, 16), integers(0, 4, 7), torch.tensor([0, 0, 1, 1])
    found = varlen_attn(x, x, x, cu, cu, 9, 9, mask_mod=lambda b, h, i, j: ids[i] == ids[j], num_splits=num_splits)
    alone = [rows.transpose(0, 1)[None] for rows in x.split([4, 3])]
    expected = []
    for rows in alone:
        n = rows.size(2)
        mask = create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, n, n, device="cpu")
        expected.append(flex_attention(rows, rows, rows, block_mask=mask)[0].transpose(0, 1))
    torch.testing.assert_close(found, torch.cat(expected))
