"""spec: Spec, what an operator computes, as a string that crosses graphs, exported programs and caches on disk.

Tensors, sizes and numbers are arguments of the operator. Everything else is in this string: the graphs of the mods, the
options and the form of the mask. A graph that was compiled in another process can run it without tracing anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import NoneType

import torch
from torch import Tensor

from flexattn.block_mask.prepared import MaskForm
from flexattn.errors import FormatError, message
from flexattn.graph import serialize
from flexattn.graph.bound_mod import BoundMod
from flexattn.graph.mod_graph import ModGraph
from flexattn.graph.narrow import narrowed
from flexattn.process.frozen_class import frozen
from flexattn.torch_compile.sequence_form import SequenceForm

FORMAT = 8  # changes whenever the arguments of the operators or the meaning of this string change


def revision() -> str:
    """Return a digest of this package. A graph cached by torch is valid only for the code that made it."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:20]


@frozen
class Spec:
    """What an operator computes. A mod is None if it does nothing."""

    score: ModGraph | None = None
    mask: ModGraph | None = None
    form: MaskForm | None = None  # of a mask whose lists are arguments of the operator
    options: tuple[tuple[str, object], ...] = ()  # validated kernel_options
    sink: float | None = None  # a number; a tensor is an argument
    drop_below: int | None = None  # see call/dropout.py
    max_scores: bool = False
    has_scale: bool = False  # whether the last of the floats is the scale
    sequences: SequenceForm | None = None  # of a layout or of packed sequences, whose tensors are arguments

    @property
    def is_layout(self) -> bool:
        """Whether the operator's tensors of sequences are those of a layout, and not of packed sequences."""
        return self.sequences is not None and self.sequences.window is None

    def dumps(self) -> str:
        """Return the spec as text."""
        graphs = [None if g is None else serialize.dumps(g) for g in (self.score, self.mask)]
        form = None if self.form is None else self.form.dumps()
        sequences = None if self.sequences is None else self.sequences.dumps()
        rest = [form, self.options, self.sink, self.drop_below, self.max_scores, self.has_scale, sequences]
        return json.dumps([FORMAT, *graphs, *rest], separators=(",", ":"))


@lru_cache(1024)
def loads(text: str) -> Spec:
    """Inverse of `Spec.dumps`. Raise FormatError if another version of flexattn wrote the text, or if it is damaged."""
    fix = "Compile or export the model again with this version of flexattn."
    try:
        version, *parts = json.loads(text)
        if type(version) is int and version != FORMAT:
            raise FormatError(message("spec", f"format {version} of a compiled graph", f"format {FORMAT}", fix))
        return _spec(*parts)
    except FormatError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(message("spec", f"a text that is no spec ({error!r})", "one of `Spec.dumps`", fix)) from error


def _spec(
    score: str | None, mask: str | None, form: str | None, options: list[list[object]], sink: float | None,
    drop_below: int | None, max_scores: bool, has_scale: bool, sequences: str | None,
) -> Spec:  # fmt: skip
    if type(sink) not in (float, int, NoneType) or type(drop_below) not in (int, NoneType):
        raise TypeError("sink or drop_below")
    if type(max_scores) is not bool or type(has_scale) is not bool:
        raise TypeError("max_scores or has_scale")
    graphs = [None if g is None else serialize.loads(g) for g in (score, mask)]
    return Spec(
        graphs[0], graphs[1], None if form is None else MaskForm.loads(form),
        tuple((str(name), value) for name, value in options), sink, drop_below, max_scores, has_scale,
        None if sequences is None else SequenceForm.loads(sequences),
    )  # fmt: skip


def bound_to(
    graph: ModGraph | None, captures: Sequence[Tensor], ints: Iterator[int], floats: Iterator[float]
) -> BoundMod | None:
    """Return a mod with its tensors, and with the next of the numbers."""
    if graph is None:
        return None
    numbers = tuple([next(floats if n.dtype == torch.float64 else ints) for n in graph.numbers])
    return BoundMod(narrowed(graph, numbers) if numbers else graph, tuple(captures), numbers, wide=graph)
