"""Compare a result with a float64 oracle. Its error may be a small multiple of that of a dense computation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Allowed error as a multiple of that of a dense computation in the same dtype: (rmse, largest).
BOUNDS = {"out": (1.2, 2.0), "lse": (1.2, 2.0), "grad": (1.5, 2.0)}


@dataclass(frozen=True)
class Errors:
    """The errors of a result and their bounds."""

    rmse: float
    rmse_bound: float
    largest: float
    largest_bound: float
    text: str

    @property
    def ratio(self) -> float:
        """The error divided by its bound, the larger of both ratios."""
        return max(part(self.rmse, self.rmse_bound), part(self.largest, self.largest_bound))


def part(error: float, bound: float) -> float:
    """Return error / bound; infinity for NaN, or for an error whose bound is 0."""
    return 0.0 if error == 0 else error / bound if bound and error == error else math.inf


def assert_close_to_oracle(
    name: str,
    got: Tensor,
    dense_same_dtype: Tensor,
    oracle_fp64: Tensor,
    kind: Literal["out", "lse", "grad"] = "out",
    floor: float = 2.0,
    factor: float = 1.0,
    room: float = 0.0,
) -> None:
    """Raise unless `got` is about as close to the oracle as the dense result, or within `floor` ulp of the magnitude.

    `factor` scales the bounds relative to the dense computation. `room` is added to the bound of the largest error.

    The magnitude is the oracle's root mean square for the rmse, and its largest value for the largest error. Infinities
    must be at the same positions.
    """
    errors = errors_of(name, got, dense_same_dtype, oracle_fp64, kind, floor, factor, room)
    if errors is not None and (errors.rmse > errors.rmse_bound or errors.largest > errors.largest_bound):
        raise AssertionError(errors.text)


def errors_of(
    name: str, got: Tensor, dense_same_dtype: Tensor, oracle_fp64: Tensor, kind: Literal["out", "lse", "grad"] = "out",
    floor: float = 2.0, factor: float = 1.0, room: float = 0.0,
) -> Errors | None:  # fmt: skip
    """Return the errors that assert_close_to_oracle checks, None for an empty result.

    Raises for NaN and for infinities at other positions than the oracle's.
    """
    assert got.shape == oracle_fp64.shape, f"{name}: shape {list(got.shape)}, expected {list(oracle_fp64.shape)}"
    if got.numel() == 0:
        return None
    ulp = torch.finfo(got.dtype).eps if kind != "lse" else torch.finfo(dense_same_dtype.dtype).eps
    got, dense, oracle = (x.detach().double().cpu() for x in (got, dense_same_dtype, oracle_fp64))
    assert not oracle.isnan().any(), f"{name}: the oracle has NaN"
    if got.isnan().any():
        raise AssertionError(f"{name}: {int(got.isnan().sum())} of {got.numel()} values are NaN, {_first(got.isnan())}")
    infinite = oracle.isinf()
    wrong = (got.isinf() != infinite) | (infinite & (got != oracle))
    if wrong.any():
        raise AssertionError(f"{name}: {int(wrong.sum())} infinities are at wrong positions, {_first(wrong)}")
    error = (got - oracle).masked_fill(infinite, 0.0).abs()
    allowed = (dense - oracle).masked_fill(infinite, 0.0).abs().nan_to_num()
    size = oracle.masked_fill(infinite, 0.0).abs()
    rms_factor, largest_factor = (factor * bound for bound in BOUNDS[kind])
    rms_bound = max(rms_factor * _rms(allowed), floor * ulp * _rms(size))
    largest_bound = max(largest_factor * float(allowed.max()), floor * ulp * float(size.max())) + room
    return Errors(
        _rms(error), rms_bound, float(error.max()), largest_bound,
        f"{name}: rmse {_rms(error):.3g} (allowed {rms_bound:.3g}, dense {_rms(allowed):.3g}), largest error "
        f"{float(error.max()):.3g} (allowed {largest_bound:.3g}, dense {float(allowed.max()):.3g}), "
        f"{_first(error == error.max())}, values up to {float(size.max()):.3g}",
    )  # fmt: skip


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _first(where: Tensor) -> str:
    return f"the first at {where.nonzero()[0].tolist()}"
