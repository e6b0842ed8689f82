"""docs/differences.md: what each row says that flexattn refuses, it refuses, and PyTorch answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_subclasses import Unit
from torch import Tensor
from torch.nn.attention import flex_attention as upstream

import flexattn
from flexattn.errors import FlexAttentionError

PAGE = Path(__file__).parent.parent / "docs" / "differences.md"
X = torch.randn(2, 2, 128, 16, generator=torch.Generator().manual_seed(0))
TABLE = torch.linspace(-1.0, 1.0, 128)
BYTES = torch.arange(128, dtype=torch.uint8)
Call = Callable[[Any], object]  # of flexattn, or of PyTorch's module


def attend(score_mod: Any = None, **rest: Any) -> Call:
    return lambda module: module.flex_attention(X, X, X, score_mod, **rest)


def masked(mask_mod: Any, B: int | None = None, H: int | None = None) -> Call:
    return lambda m: m.flex_attention(X, X, X, block_mask=m.create_block_mask(mask_mod, B, H, 128, 128, device="cpu"))


def mask_in_a_graph(module: Any) -> object:
    def counts(x: Tensor) -> Tensor:
        mask = module.create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
        return mask.kv_num_blocks + x.shape[0]

    return torch.compile(counts, backend="eager", fullgraph=True)(X)


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(score):
        return score * score

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def changed_after(module: Any) -> object:
    ids = torch.zeros(128, dtype=torch.int32)
    mask = module.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 128, 128, device="cpu")
    ids[5] = 1
    return module.flex_attention(X, X, X, block_mask=mask)


def longer(module: Any) -> object:
    mask = module.create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    mask.seq_lengths = (256, 256)
    return mask


def assigned(module: Any) -> object:
    mask = module.create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    mask.kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)
    return mask


def in_place_without_gradient(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    x = s * 2
    with torch.no_grad():
        x.mul_(2)
    return x


def in_place(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    score += 1
    return score


def differing_masks(module: Any) -> object:
    def blocks(t: Tensor) -> Tensor:
        return module.create_block_mask(
            lambda b, h, i, j: t[i] > t[j], None, None, 128, 128, device="cpu"
        ).kv_num_blocks

    return torch.vmap(blocks)(TABLE[None])


# By the beginning of the first cell of a row.
CASES: dict[str, Call] = {
    "a subclass of torch.Tensor": lambda m: m.flex_attention(X.as_subclass(Unit), X, X),
    "integer query": lambda m: m.flex_attention(X.int(), X.int(), X.int()),
    "query of another dtype": lambda m: m.flex_attention(X.half(), X, X),
    "a head dim of value of 0": lambda m: m.flex_attention(X, X, X[..., :0]),
    "`scale` that is infinite": attend(scale=float("inf")),
    "`scale` that is a tensor": attend(scale=torch.tensor(0.5)),
    "`create_block_mask` inside of": mask_in_a_graph,
    "a mask built inside of": differing_masks,
    "a tensor that mask_mod reads": changed_after,
    "a mask of batch 1": masked(lambda b, h, i, j: i >= j + b, B=1),
    "a mask of one head": masked(lambda b, h, i, j: i >= j + h),
    "a mask of more heads": masked(lambda b, h, i, j: i >= j, H=4),
    "`mask.seq_lengths = ": longer,
    "`mask.kv_num_blocks = ": assigned,
    "a 0-d tensor as `Q_LEN`": lambda m: m.create_block_mask(
        lambda b, h, i, j: i >= j, None, None, torch.tensor(128), 128, device="cpu"
    ),
    "a mask_mod that returns numbers": lambda m: m.create_mask(
        lambda b, h, i, j: (i >= j).float(), None, None, 8, 8, device="cpu"
    ),
    "an unknown name": attend(kernel_options={"NO_SUCH_OPTION": 1}),
    "`IS_DIVISIBLE`": attend(kernel_options={"IS_DIVISIBLE": True}),
    "an option of None": attend(kernel_options={"BLOCK_M": None}),
    "`BACKEND=": attend(kernel_options={"BACKEND": "FLASH"}),
    "a tile": attend(kernel_options={"BLOCK_M": 48}),
    "a change in place": attend(in_place),
    "a tensor's value": attend(lambda s, b, h, i, j: s + TABLE[3].item()),
    "a tensor with a gradient": attend(in_place_without_gradient),
    "`.grad`, `.grad_fn`": attend(lambda s, b, h, i, j: s if s.requires_grad else s * 2),
    "`torch.vmap` of a captured": attend(lambda s, b, h, i, j: s + torch.vmap(torch.tanh)(TABLE)[j]),
    "a `torch.autograd.Function`": attend(lambda s, b, h, i, j: Square.apply(s)),
    "attention inside": attend(
        lambda s, b, h, i, j: s + torch.nn.functional.scaled_dot_product_attention(X, X, X)[b, h, i, 0]
    ),
    "a reduction over the score": attend(lambda s, b, h, i, j: torch.softmax(s, -1)),
    "a sum over more than 64": attend(lambda s, b, h, i, j: s + (TABLE * s).sum()),
    "complex numbers": attend(lambda s, b, h, i, j: s + TABLE.to(torch.complex64)[j].real),
    "operators without": attend(lambda s, b, h, i, j: s + torch.gcd(i, j)),
    "operators on captured tensors": attend(lambda s, b, h, i, j: s + torch.unique(TABLE).sum()),
    "the bits of": attend(lambda s, b, h, i, j: s + (TABLE[i].view(torch.int32) & 1)),
    "a number that the dtype": masked(lambda b, h, i, j: BYTES[i] != -1),
}


def rows() -> list[tuple[str, str]]:
    """Return the first two cells of each row: the call, the error."""
    cells = [re.split(r" *\| *", line.strip("| \n")) for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [(cell[0], cell[1]) for cell in cells if cell[0] != "call"]


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    assert [next((name for name in CASES if call.startswith(name)), call) for call, _ in rows()] == list(CASES)


@pytest.mark.parametrize(("call", "error"), rows(), ids=lambda cell: cell[:40])
def test_flexattn_refuses(call: str, error: str) -> None:
    case = next(case for name, case in CASES.items() if call.startswith(name))
    with pytest.raises((FlexAttentionError, torch._dynamo.exc.Unsupported)) as caught:
        case(flexattn)
    assert error == type(caught.value).__name__ or (error.startswith("Dynamo") and "flexattn" in str(caught.value))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_pytorch_answers(name: str) -> None:
    torch._dynamo.reset()
    assert CASES[name](upstream) is not None
