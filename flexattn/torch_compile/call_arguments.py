"""call_arguments: a call in a graph -> Operands of the operators. Tensors may be fake, sizes symbols."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask.prepared import MaskForm
from flexattn.call.dropout import drop_below
from flexattn.call.sinks import check_sink
from flexattn.call.validate import DEVICES, check_forms, check_mask_reads, check_mask_sizes
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.nodes import Const
from flexattn.options import Options, validate_options
from flexattn.process.frozen_class import frozen
from flexattn.torch_compile.attention import Operands
from flexattn.torch_compile.spec import Spec


@frozen
class CallArguments:
    """The arguments of a call, without its mods. `lists`, `sizes` and `form` are those of its mask."""

    query: Tensor
    key: Tensor
    value: Tensor
    lists: Sequence[Tensor]
    sizes: Sequence[int]  # M, N, B, H
    form: str | None  # a MaskForm
    scale: Any  # a float, or a symbol for one
    enable_gqa: bool
    options: Sequence[str]  # "name=value" of kernel_options
    sink: Tensor | None
    sink_number: float | None
    dropout_p: float
    seed: Tensor | None
    max_scores: bool


def check_given(given: CallArguments) -> None:
    """Check what does not depend on the mods."""
    query, key, value = given.query, given.key, given.value
    check_forms(query, key, value, given.enable_gqa, DEVICES | {"meta"})
    _options(given)
    drop_below(given.dropout_p)
    check_sink(given.sink, query, plain=False)
    if given.form is not None:
        M, N, B, H = given.sizes
        tensors = (query, key, value, *(() if given.sink is None else (given.sink,)))
        gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        both = MaskForm.loads(given.form).both
        check_mask_sizes((M, N, B, H), given.lists[0].device, both, query, key, gradient)


def operands_of(given: CallArguments, score: BoundMod | None, mask: BoundMod | None) -> Operands:
    """Return the operands of flexattn::forward for a call and its mods. A mod that does nothing becomes None."""
    query = given.query
    if score is not None and score.graph.is_input(score.graph.output, "score"):
        score = None
    form = None if given.form is None else MaskForm.loads(given.form)
    if mask is not None and form is not None:
        check_mask_reads(given.sizes[2], given.sizes[3], mask, query, by_hand=not form.is_built)
        result = mask.graph.nodes[mask.graph.output]
        mask = None if isinstance(result, Const) and result.value else mask
    bounds = [b for b in (score, mask) if b is not None]
    captures = tuple(_placed(c, query) for b in bounds for c in b.captures)
    numbers = [(n, described.dtype) for b in bounds for n, described in zip(b.numbers, b.graph.numbers, strict=True)]
    ints = tuple(n for n, dtype in numbers if dtype == torch.int64)
    floats = tuple(_as_tensor(n) for n, dtype in numbers if dtype == torch.float64)
    scale, has_scale = given.scale, isinstance(given.scale, (Tensor, torch.SymFloat))
    if has_scale:
        floats, scale = (*floats, _as_tensor(scale)), None
    spec = Spec(
        None if score is None else score.graph, None if mask is None else mask.graph, form, _options(given),
        given.sink_number, drop_below(given.dropout_p), given.max_scores, has_scale,
    )  # fmt: skip
    sink = check_sink(given.sink, query, plain=False)
    tensors = query, given.key, given.value
    return Operands(*tensors, captures, tuple(given.lists), sink, given.seed, ints, floats, scale, spec.dumps())


def option_texts(kernel_options: Any) -> list[str]:
    """Return kernel_options as text. Dynamo traces this function."""
    return [] if kernel_options is None else [f"{name}={value!r}" for name, value in kernel_options.items()]


def _options(given: CallArguments) -> Options:
    pairs = (text.split("=", 1) for text in given.options)
    return validate_options({name: ast.literal_eval(value) for name, value in pairs})


def _placed(capture: Tensor, query: Tensor) -> Tensor:
    """Return a captured CPU scalar on the device of the query. Other captures are checked where the mods are traced."""
    return capture.to(query.device) if capture.dim() == 0 and capture.device != query.device else capture


def _as_tensor(number: Any) -> Tensor:
    return number if isinstance(number, Tensor) else torch.scalar_tensor(number, dtype=torch.float64)
