"""The numbers of the forms of tensors: equal if and only if kernels see no difference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import Parameter

from flexattn.runtime import tensor_forms
from flexattn.runtime.launch import forget_launches
from flexattn.runtime.tensor_forms import key_of, learned, recalled


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    forget_launches()
    yield
    forget_launches()


def at(offset: int, shape: tuple[int, ...] = (2, 3, 8)) -> Tensor:
    """Return a tensor that begins at a number of bytes, modulo 64."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + offset
    count = 4 * torch.Size(shape).numel()
    return memory[start : start + count].view(torch.float32).view(shape)


def negated() -> Tensor:
    x = torch.zeros(2, 3, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    return x


def like_negated() -> Tensor:
    x = torch.zeros(2, 3, 8, dtype=torch.complex64).imag
    assert not x.is_neg() and x.stride() == negated().stride()
    return x


# Tensors of different forms.
OTHERS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: at(0),
    "other sizes": lambda: at(0, (2, 8, 3)),
    "a size of 1": lambda: at(0, (1, 3, 8)),
    "one dim more": lambda: at(0, (1, 2, 3, 8)),
    "other strides": lambda: at(0, (2, 8, 3)).mT,
    "another stride of a size of 1": lambda: at(0, (1, 3, 8)).as_strided((1, 3, 8), (5, 8, 1)),
    "another dtype": lambda: at(0).view(torch.int32),
    "another device": lambda: torch.empty(2, 3, 8, device="meta"),
    "at 4 bytes": lambda: at(4),
    "at 8 bytes": lambda: at(8),
    "requires a gradient": lambda: at(0).requires_grad_(),
    "negated": negated,
    "like the negated one": like_negated,
}


@pytest.mark.parametrize(("one", "other"), list(product(OTHERS, OTHERS)))
@pytest.mark.parametrize("place", [0, 2])
def test_numbers_differ_with_the_form_of_one_tensor(one: str, other: str, place: int) -> None:
    def tensors(name: str) -> list[Tensor]:
        found = [at(0), at(0, (4, 4)), at(0)]
        found[place] = OTHERS[name]()
        return found

    first = key_of(*tensors(one))
    assert (key_of(*tensors(other)) == first) == (one == other)
    assert key_of(*tensors(one)) == first


def test_known_forms_are_recalled() -> None:
    x, y = at(0), at(0, (4, 4))
    assert recalled(x, y) is None
    number = learned(x, y)
    assert recalled(x, y) == recalled(at(0), at(16, (4, 4))) == number
    assert recalled(y, x) is recalled(x) is recalled(x, y, at(0)) is None
    assert recalled(None, y) is recalled(x, "y") is None
    assert recalled(x, y, y) == (number, (0, 1, 1))


def test_addresses_are_compared_modulo_16_bytes() -> None:
    number = key_of(at(0), at(0))
    assert key_of(at(4), at(0)) == recalled(at(20), at(16)) == (number, (4, 0))
    assert recalled(at(0), at(8)) == (number, (0, 8))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
@pytest.mark.parametrize("place", [0, 1])
def test_other_kinds_of_tensors_are_not_recalled(place: int) -> None:
    x = at(0)
    learned(x, x)
    nested = [torch.nested.nested_tensor([at(0, (3, 8))] * 2, layout=form) for form in (torch.strided, torch.jagged)]
    others = [
        *nested, x.to_sparse(), x.to_sparse_csr(), x.to_mkldnn(), x.to("meta"), torch._efficientzerotensor(2, 3, 8),
    ]  # fmt: skip
    with FakeTensorMode():
        others.append(torch.empty(2, 3, 8))
    for other in others:
        pair = (other, x) if place == 0 else (x, other)
        assert recalled(*pair) is None


def test_transforms_are_not_recalled() -> None:
    x, found = at(0), []
    learned(x)
    torch.func.vmap(lambda t: found.append(recalled(t)) or t)(at(0, (2, 2, 3, 8)))
    torch.func.grad(lambda t: found.append(recalled(t)) or t.sum())(x)
    assert found == [None, None] and recalled(x) is not None


def test_tensors_of_many_shapes_are_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [(at(0, (n, 2)), at(0, (n, 3))) for n in range(1, 9)]
    numbers = [key_of(*pair) for pair in many]
    assert [recalled(*pair) for pair in many] == numbers and len({*numbers}) == len(many)
    monkeypatch.setattr(tensor_forms, "_MOST_SHAPES", len(many))
    assert recalled(*many[0]) == numbers[0]
    key_of(at(0), at(0))
    assert recalled(*many[1]) is None, "it was used the longest time ago"
    assert recalled(*many[0]) == numbers[0]
    assert [key_of(*pair) for pair in many] == numbers


def test_many_forms_of_the_same_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [at(0, (1, 3, 8)).as_strided((1, 3, 8), (n, 8, 1)) for n in range(1, 9)]
    numbers = [key_of(x) for x in many]
    assert [recalled(x) for x in many] == numbers and len({*numbers}) == len(many)
    monkeypatch.setattr(tensor_forms, "_MOST_OF_SHAPES", 4)
    key_of(at(0, (1, 3, 8)).as_strided((1, 3, 8), (0, 8, 1)))
    assert recalled(many[0]) is None
    for _ in range(2):
        assert [key_of(x) for x in many] == numbers


@pytest.mark.parametrize("other", ["requires a gradient", "a parameter", "of inference_mode"])
def test_two_kinds_in_turn_are_recalled(other: str) -> None:
    def inference() -> Tensor:
        with torch.inference_mode():
            return at(0).clone()

    makers = {
        "requires a gradient": OTHERS["requires a gradient"],
        "a parameter": lambda: Parameter(at(0), requires_grad=False),
        "of inference_mode": inference,
    }
    pair = at(0), makers[other]()
    keys = [key_of(x) for x in pair]
    assert (keys[0] == keys[1]) == (other != "requires a gradient")
    for _ in range(2):
        assert [recalled(x) for x in pair] == keys


class Derived(Tensor):
    """Plain, but what an operator has seen of it shall not let calls accept other classes."""


@pytest.mark.parametrize("make", [lambda: at(0).as_subclass(Derived), negated])
def test_guards_recognize_plain_tensors_only(make: Callable[[], Tensor]) -> None:
    x = make()
    assert key_of(x, at(0)) == key_of(x, at(0))
    assert recalled(x, at(0)) is None


@pytest.mark.parametrize("places", [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0), (0, 1, 1, 2, 0)])
def test_tensors_that_are_given_twice(places: tuple[int, ...]) -> None:
    def tensors() -> list[Tensor]:
        several = [at(0), at(0), at(0)]
        return [several[i] for i in places]

    distinct = key_of(*[at(0) for _ in places])
    number = key_of(*tensors())
    assert key_of(*tensors()) == learned(*tensors()) == number != distinct
    assert recalled(*tensors()) == number
    assert recalled(*[at(0) for _ in places]) == distinct


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def test_a_parameter_is_a_tensor() -> None:
    x = at(0).requires_grad_()
    assert key_of(Parameter(x.detach())) == key_of(x)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("first", ["in the mode", "outside"])
def test_modes_do_not_change_a_number(
    mode: Callable[[], contextlib.AbstractContextManager[object]], first: str
) -> None:
    x = at(0)

    def inside() -> object:
        with mode():
            return key_of(x)

    steps: tuple[Callable[[], object], ...] = (inside, lambda: key_of(x))
    for _ in range(2):
        assert len({step() for step in (steps if first == "in the mode" else steps[::-1])}) == 1
    assert key_of(x) == recalled(x)


@pytest.mark.parametrize("guards", [None, lambda *tensors: None])
def test_without_the_guards_of_torch(guards: Callable[..., None] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, or those of another version of torch."""
    monkeypatch.setattr(tensor_forms, "_guards", guards)
    number = key_of(at(0), at(0))
    assert key_of(at(0), at(0)) == number != key_of(at(0), at(4))
    assert recalled(at(0), at(0)) is None


SIZES = st.tuples(*[st.integers(1, 3)] * 2)
TENSORS = st.builds(
    lambda size, offset, moved, dtype: at(offset, size).view(dtype).transpose(0, int(moved)),
    SIZES, st.sampled_from([0, 0, 4]), st.booleans(), st.sampled_from([torch.float32, torch.int32]),
)  # fmt: skip


@given(st.lists(st.lists(TENSORS, min_size=1, max_size=3), min_size=2, max_size=12))
def test_numbers_are_equal_if_and_only_if_the_properties_are(several: list[list[Tensor]]) -> None:
    def properties(tensors: list[Tensor]) -> object:
        return tuple((t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in tensors)

    numbers: dict[object, object] = {}
    for tensors in several:
        number = key_of(*tensors)
        assert numbers.setdefault(properties(tensors), number) == number
    assert len({*numbers.values()}) == len(numbers)
