"""What a mod reads of tensors beside their values: derived classes, shapes, flags, arguments of operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flexattn import AuxRequest, flex_attention
from flexattn.errors import ModError
from flexattn.trace.trace import trace

ONE = torch.zeros(1, 1, 1, 16, dtype=torch.float64)


def value_of(extra: Callable[[], Any]) -> float:
    """Return what a mod adds to a score of 0."""
    mod = lambda score, b, h, q_idx, kv_idx: score + extra()  # noqa: E731
    _, aux = flex_attention(ONE, ONE, ONE, mod, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return aux.lse.item()


class Table(torch.nn.Parameter):
    """A parameter with a method, an attribute of the class, a property and one that the instance hides."""

    gain = 2.0
    hidden = 1.0

    def scaled(self) -> float:
        return self.gain

    @property
    def twice(self) -> float:
        return 2 * self.gain


@pytest.mark.parametrize("name", ["method", "attribute", "property"])
def test_classes_derived_from_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table: Any = Table(torch.ones(4))
    read = {"method": lambda: table.scaled(), "attribute": lambda: table.gain, "property": lambda: table.twice}[name]
    before = value_of(read)
    assert before == read()
    monkeypatch.setattr(Table, "gain", 3.0)
    assert value_of(read) == read() != before


def test_an_attribute_of_the_instance_hides_that_of_its_class() -> None:
    table: Any = Table(torch.ones(4))
    assert value_of(lambda: table.hidden) == 1
    table.hidden = 5.0
    assert value_of(lambda: table.hidden) == 5
    assert value_of(lambda: table[2]) == 1  # still a tensor


X = torch.arange(8.0).view(2, 4)
SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "numel": lambda x: x.shape.numel(),
    "bytes": lambda x: x.nbytes,
    "text": lambda x: len(str(x.shape)),
    "count": lambda x: x.shape.count(4),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    for x in (X, torch.zeros(4, 100)):
        read = functools.partial(SHAPES[name], x)
        assert value_of(read) == read()


@pytest.mark.parametrize("name", ["is_inference", "_is_view", "is_shared", "is_neg", "is_conj"])
def test_flags_that_a_trace_does_not_know(name: str) -> None:
    with pytest.raises(ModError, match=f"reads {name} of a tensor"):
        value_of(lambda: getattr(X, name)())
    if hasattr(torch, name):
        with pytest.raises(ModError, match=f"reads {name} of a tensor"):
            value_of(lambda: getattr(torch, name)(X))


n, step = 2, 0.5
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "pad": lambda: F.pad(X, (n, 1))[1, 3],
    "constant_pad_nd": lambda: torch.constant_pad_nd(X, [n, 1])[1, 3],
    "arange": lambda: torch.arange(0, 8, step)[3],
    "interpolate": lambda: F.interpolate(X[None], size=n)[0, 1, -1],
    "scale": lambda: F.interpolate(X[None], scale_factor=n)[0, 1, 1],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_numbers_that_an_operator_takes_only_as_values(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    call = ARGUMENTS[name]
    before = value_of(call)
    assert before == call()
    monkeypatch.setitem(globals(), "n", 1)
    monkeypatch.setitem(globals(), "step", 0.25)
    assert value_of(call) == call() != before
    assert "failed while attempting" not in capfd.readouterr().err


GAIN, STEPS = np.float32(2.5), np.linspace(0, 1, 5, dtype=np.float32)
OF_NUMPY: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.tensor(np.float32(2.5)),
    "product": lambda: torch.tensor(GAIN * np.float32(1)),
    "root": lambda: torch.tensor([np.sqrt(GAIN)])[0],
    "items": lambda: torch.tensor([STEPS[1], STEPS[2]])[1],
    "float16": lambda: torch.as_tensor([np.float16(2.5)])[0],
    "float64": lambda: torch.tensor(np.float64(0.1)),
    "integers": lambda: torch.tensor([np.int8(3), np.uint8(200)]).sum(),
    "bool": lambda: torch.tensor(np.bool_(True)),
}


@pytest.mark.filterwarnings("ignore:.*is traced at each call")
@pytest.mark.parametrize("name", OF_NUMPY)
def test_tensors_of_numbers_of_numpy(name: str) -> None:
    make = OF_NUMPY[name]
    assert value_of(make) == make().item()
    assert value_of(lambda: make().dtype.itemsize) == make().dtype.itemsize


def test_numbers_that_an_operator_takes_as_symbols_stay_arguments() -> None:
    number = 2.0

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.add(score, q_idx, alpha=number)

    graph = trace(mod, "score").graph
    number = 3.0
    assert trace(mod, "score").graph is graph
