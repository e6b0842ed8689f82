"""append_kernel: one Triton kernel that writes new tokens into pages, and rotates keys and queries by their positions.

A program handles some tokens of one head of one sequence. The last program of a sequence updates its length: all
others have read it by then.
"""

import triton
import triton.language as tl


@triton.jit
def rotated(x_ptr, m, inside, stride_m, cos_ptr, sin_ptr, position, positions, SIZE: tl.constexpr, ROTARY: tl.constexpr,
            INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Load the rows m of a tensor and rotate their first ROTARY columns. Positions without an angle give NaN.

    The result is float64 if the tensor is, otherwise float32.
    """
    wide = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    d = tl.arange(0, WIDTH)[None, :]
    row = x_ptr + m.to(tl.int64)[:, None] * stride_m
    x = tl.load(row + d, mask=inside[:, None] & (d < SIZE), other=0.0).to(wide)
    if ROTARY > 0:
        half: tl.constexpr = ROTARY // 2
        if INTERLEAVED:
            pair, is_first = d // 2, d % 2 == 0
            partner = tl.where(is_first, d + 1, d - 1)
        else:
            is_first = d < half
            pair = tl.where(is_first, d, d - half)
            partner = tl.where(is_first, d + half, d - half)
        turns = inside[:, None] & (d < ROTARY)
        known = turns & (position < positions)[:, None]
        y = tl.load(row + partner, mask=turns, other=0.0).to(wide)
        angle = position.to(tl.int64)[:, None] * half + pair
        cos = tl.load(cos_ptr + angle, mask=known, other=float("nan")).to(wide)
        sin = tl.load(sin_ptr + angle, mask=known, other=float("nan")).to(wide)
        x = tl.where(turns, x * cos + tl.where(is_first, -y, y) * sin, x)
    return x


@triton.jit
def stored(x, descale_ptr, h, DTYPE: tl.constexpr):
    """Return x in the dtype of the cache: float8 is divided by the scale of its head, and saturates."""
    if descale_ptr is not None:
        x = x / tl.load(descale_ptr + h)
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -448.0), 448.0), x)  # NaN stays NaN
    return x.to(DTYPE)


@triton.jit
def append_tokens(
    key_ptr, value_ptr, query_ptr, rotated_ptr, k_pages_ptr, v_pages_ptr, table_ptr, lengths_ptr, starts_ptr,
    counts_ptr, rows_ptr, arrived_ptr, cos_ptr, sin_ptr, k_descale_ptr, v_descale_ptr,
    M, heads_q, heads_kv, columns, positions,
    stride_kb, stride_kh, stride_km, stride_vb, stride_vh, stride_vm, stride_qb, stride_qh, stride_qm,
    stride_rb, stride_rh, stride_rm, stride_kp, stride_kt, stride_kg, stride_vp, stride_vt, stride_vg,
    D: tl.constexpr, DV: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, TOKENS)
    b, tile, h = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    row = b if rows_ptr is None else tl.load(rows_ptr + b)  # of the table
    start = tl.load(lengths_ptr + row)
    count = M if counts_ptr is None else tl.minimum(tl.maximum(tl.load(counts_ptr + b), 0), M)
    end = start + count
    last = tl.maximum(end - 1, 0) // PAGE_SIZE
    # A CUDA graph may be replayed more often than there is room for. Then nothing is written, and the length is
    # negative from then on, for which attention returns NaN.
    fits = (start >= 0) & (last < columns)
    fits = fits & ((count == 0) | (tl.load(table_ptr + row * columns + tl.minimum(last, columns - 1)) >= 0))

    m = tile * TOKENS + tl.arange(0, TOKENS)
    position = start + m
    if h < heads_kv:
        writes = (m < count) & fits
        page = tl.load(table_ptr + row * columns + position // PAGE_SIZE, mask=writes, other=0).to(tl.int64)
        slot = (position % PAGE_SIZE).to(tl.int64)
        k = rotated(key_ptr + b.to(tl.int64) * stride_kb + h.to(tl.int64) * stride_kh, m, writes, stride_km, cos_ptr,
                    sin_ptr, position, positions, D, ROTARY, INTERLEAVED, WIDTH)  # fmt: skip
        d = tl.arange(0, WIDTH)[None, :]
        tl.store(
            k_pages_ptr + (page * stride_kp + slot * stride_kt + h.to(tl.int64) * stride_kg)[:, None] + d,
            stored(k, k_descale_ptr, h, k_pages_ptr.dtype.element_ty), mask=writes[:, None] & (d < D),
        )  # fmt: skip
        v = rotated(value_ptr + b.to(tl.int64) * stride_vb + h.to(tl.int64) * stride_vh, m, writes, stride_vm, cos_ptr,
                    sin_ptr, position, positions, DV, 0, INTERLEAVED, WIDTH_V)  # fmt: skip
        d = tl.arange(0, WIDTH_V)[None, :]
        tl.store(
            v_pages_ptr + (page * stride_vp + slot * stride_vt + h.to(tl.int64) * stride_vg)[:, None] + d,
            stored(v, v_descale_ptr, h, v_pages_ptr.dtype.element_ty), mask=writes[:, None] & (d < DV),
        )  # fmt: skip
    if query_ptr is not None:  # noqa: SIM102  (known to the compiler, as the next one is not)
        if h < heads_q:
            q = rotated(query_ptr + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh, m, m < M, stride_qm,
                        cos_ptr, sin_ptr, position, positions, D, ROTARY, INTERLEAVED, WIDTH)  # fmt: skip
            d = tl.arange(0, WIDTH)[None, :]
            out = rotated_ptr + b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh
            tl.store(
                out + m.to(tl.int64)[:, None] * stride_rm + d, q.to(rotated_ptr.dtype.element_ty),
                mask=(m < M)[:, None] & (d < D),
            )  # fmt: skip

    tl.debug_barrier()  # all threads have read the length
    if tl.atomic_add(arrived_ptr + row, 1) == tiles * tl.num_programs(1) - 1:
        tl.store(arrived_ptr + row, 0)
        tl.store(starts_ptr + row, start)
        tl.store(lengths_ptr + row, tl.where(start < 0, start, tl.where(fits, end, -start - 1)))
