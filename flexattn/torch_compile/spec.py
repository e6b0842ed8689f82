"""spec: Spec, what an operator computes, as a string that crosses graphs, exported programs and caches on disk.

Tensors, sizes and numbers are arguments of the operator. Everything else is in this string: the graphs of the mods, the
options and the form of the mask. A graph that was compiled in another process can run it without tracing anything.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from flexattn.block_mask.prepared import MaskForm
from flexattn.errors import FormatError, message
from flexattn.graph import serialize
from flexattn.graph.mod_graph import ModGraph
from flexattn.process.frozen_class import frozen

FORMAT = 1  # changes whenever the arguments of the operators or the meaning of this string change


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

    def dumps(self) -> str:
        """Return the spec as text."""
        graphs = [None if g is None else serialize.dumps(g) for g in (self.score, self.mask)]
        form = None if self.form is None else self.form.dumps()
        rest = [form, self.options, self.sink, self.drop_below, self.max_scores, self.has_scale]
        return json.dumps([FORMAT, *graphs, *rest], separators=(",", ":"))


@lru_cache(1024)
def loads(text: str) -> Spec:
    """Inverse of `Spec.dumps`. Raise FormatError if another version of flexattn wrote the text."""
    version, *parts = json.loads(text)
    if version != FORMAT:
        fix = "Compile or export the model again with this version of flexattn."
        raise FormatError(message("spec", f"format {version} of a compiled graph", f"format {FORMAT}", fix))
    score, mask, form, options, *rest = parts
    graphs = [None if g is None else serialize.loads(g) for g in (score, mask)]
    form = None if form is None else MaskForm.loads(form)
    return Spec(graphs[0], graphs[1], form, tuple(map(tuple, options)), *rest)
