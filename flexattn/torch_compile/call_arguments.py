"""call_arguments: a call in a graph -> Operands of the operators. Tensors may be fake, sizes symbols."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask.prepared import MaskForm
from flexattn.call.dropout import drop_below
from flexattn.call.layout import FLOAT8, Layout, check_mask_layout, check_pages, layout_of
from flexattn.call.sinks import check_sink, number_of_sink
from flexattn.call.validate import DEVICES, check_forms, check_mask_reads, check_mask_sizes, check_scale
from flexattn.call.varlen.arguments import check_packed_forms, used_rows, without_unused
from flexattn.graph.bound_mod import BoundMod
from flexattn.options import Options, validate_options
from flexattn.process.frozen_class import frozen
from flexattn.torch_compile.attention import Operands
from flexattn.torch_compile.sequence_form import SequenceForm
from flexattn.torch_compile.sequences import list_rows, pack_rows
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
    layout: Sequence[Tensor]  # the tensors of a layout or of packed sequences. Keys are then [pages, Hkv, page_size, D]
    lengths: Sequence[Any]  # max_q and max_k of packed sequences
    sequences: str | None  # a SequenceForm


def check_given(given: CallArguments) -> None:
    """Check what does not depend on the mods."""
    query, key, value = given.query, given.key, given.value
    lengths = _check_sequences(given)
    _options(given)
    drop_below(given.dropout_p)
    check_sink(given.sink, query, plain=False)
    if isinstance(given.scale, (bool, int, float)):  # not a symbol
        check_scale(given.scale, query.shape[3])
    if isinstance(given.sink_number, (bool, int, float)):
        number_of_sink(given.sink_number)
    if given.form is not None:
        M, N, B, H = given.sizes
        if lengths is not None:
            check_mask_layout((M, N), lengths, query.shape[2])
            M, N = query.shape[2], key.shape[2]
        tensors = (query, key, value, *(() if given.sink is None else (given.sink,)))
        gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        both = MaskForm.loads(given.form).both
        check_mask_sizes((M, N, B, H), given.lists[0].device, both, query, key, gradient)


def _check_sequences(given: CallArguments) -> Layout | None:
    """Check query, key and value, and the tensors of a layout or of packed sequences. Return the layout."""
    query, key, value = given.query, given.key, given.value
    devices, form = DEVICES | {"meta"}, _form(given)
    if form is None or form.window is not None:
        check_forms(query, key, value, given.enable_gqa, devices)
        if form is not None:
            check_packed_forms(form.packed_of(given.layout, given.lengths), query, key)
        return None
    arguments = form.layout_of(given.layout)
    quantized = key.dtype == FLOAT8 and (arguments.k_descale, arguments.v_descale) != (None, None)
    if arguments.block_table is None:
        check_forms(query, key, value, given.enable_gqa, devices, quantized)
    else:  # one page stands for the keys of a sequence
        check_pages(query, key, value)
        check_forms(query, key[:1], value[:1], given.enable_gqa, devices, quantized)
    return layout_of(arguments, query, key)


def _form(given: CallArguments) -> SequenceForm | None:
    return None if given.sequences is None else SequenceForm.loads(given.sequences)


def operands_of(given: CallArguments, score: BoundMod | None, mask: BoundMod | None) -> Operands:
    """Return the operands of flexattn::forward for a call and its mods. A mod that does nothing becomes None."""
    query, sequences = given.query, _form(given)
    if score is not None and score.graph.is_input(score.graph.output, "score"):
        score = None
    form = None if given.form is None else MaskForm.loads(given.form)
    if mask is not None and form is not None:
        by_hand = not form.is_built and not form.is_torchs  # PyTorch's masks do not tell, and most of them are built
        check_mask_reads(given.sizes[2], given.sizes[3], mask, query, by_hand)
        mask = None if mask.graph.is_true else mask
    bounds = [b for b in (score, mask) if b is not None]
    captures = tuple(_placed(c, query) for b in bounds for c in b.captures)
    ints, floats = _numbers(bounds)
    scale, has_scale = given.scale, isinstance(given.scale, (Tensor, torch.SymFloat))
    if has_scale:
        floats, scale = (*floats, _as_tensor(scale)), None
    spec = Spec(
        None if score is None else score.graph, None if mask is None else mask.graph, form, _options(given),
        given.sink_number, drop_below(given.dropout_p), given.max_scores, has_scale, sequences,
    )  # fmt: skip
    sink = check_sink(given.sink, query, plain=False)
    tensors, layout, lengths = (query, given.key, given.value), tuple(given.layout), ()
    if sequences is not None and sequences.window is not None:
        learning = (*tensors, *(() if score is None else score.captures), *(() if sink is None else (sink,)))
        both = torch.is_grad_enabled() and any(x.requires_grad for x in learning)
        tensors, layout = _described(given, sequences, mask, both)
        lengths = (torch.sym_max(*given.lengths),)
    elif sequences is not None and form is not None:
        lengths = tuple(given.sizes[:2])
    return Operands(
        *tensors, captures, tuple(given.lists), layout, sink, given.seed, (*ints, *lengths), floats, scale,
        spec.dumps(),
    )  # fmt: skip


def _described(
    given: CallArguments, form: SequenceForm, mask: BoundMod | None, both: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """Return query, key and value of packed sequences, and what pack_rows and list_rows return."""
    query, key, value = given.query, given.key, given.value
    packed, T_q, T_k = form.packed_of(given.layout, given.lengths), query.shape[2], key.shape[2]
    if packed.seqused_k is not None:
        key, value = without_unused(key, value, used_rows(packed.cu_seq_k, packed.seqused_k, T_k))
    columns = pack_rows(packed, T_q, T_k)
    captures = [] if mask is None else [_placed(c, query) for c in mask.captures]
    ints, floats = _numbers(() if mask is None else (mask,))
    spec = Spec(mask=None if mask is None else mask.graph, sequences=form)
    sizes = T_q, T_k, query.shape[1], torch.sym_max(packed.max_q, packed.max_k)
    lists = list_rows(columns, captures, list(ints), list(floats), sizes, both, spec.dumps())
    return (query, key, value), (columns, *lists)


def _numbers(bounds: Sequence[BoundMod]) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Return the integers, and the floats as tensors, of mods."""
    numbers = [(n, described.dtype) for b in bounds for n, described in zip(b.numbers, b.graph.numbers, strict=True)]
    ints = tuple(n for n, dtype in numbers if dtype == torch.int64)
    return ints, tuple(_as_tensor(n) for n, dtype in numbers if dtype == torch.float64)


def option_texts(kernel_options: Any) -> list[str]:
    """Return kernel_options as text. Dynamo traces this function."""
    return [] if kernel_options is None else [f"{name}={_constant(x)!r}" for name, x in kernel_options.items()]


def _constant(value: Any) -> Any:
    """Return an int that Dynamo made a symbol as a number."""
    return range(value).stop if isinstance(value, int) and not isinstance(value, bool) else value


def _options(given: CallArguments) -> Options:
    pairs = (text.split("=", 1) for text in given.options)
    return validate_options({name: ast.literal_eval(value) for name, value in pairs})


def _placed(capture: Tensor, query: Tensor) -> Tensor:
    """Return a captured CPU scalar on the device of the query. Other captures are checked where the mods are traced."""
    return capture.to(query.device) if capture.dim() == 0 and capture.device != query.device else capture


def _as_tensor(number: Any) -> Tensor:
    return number if isinstance(number, Tensor) else torch.scalar_tensor(number, dtype=torch.float64)
