"""explanation: explain, which returns an Explanation: each stage of a call, to print."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Never

from torch import Tensor
from torch.nn.attention import flex_attention as upstream

from flexattn.block_mask import BlockMask
from flexattn.call.blocks_read import blocks_read
from flexattn.call.call import Call, Mod
from flexattn.call.layout import KVLayout, LayoutArguments
from flexattn.call.pose import pose
from flexattn.call.problem import Problem
from flexattn.call.unknown_arguments import refuse_unknown
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.kernel_source import KernelSource
from flexattn.compile.plan import tile_origin
from flexattn.compile.render import render
from flexattn.engines import triton
from flexattn.engines.choice import engine_of, form_for, gpu_engine_of, is_empty
from flexattn.errors import ArgumentError, DtypeError, message, mod_in_messages
from flexattn.graph.differentiate import differentiate
from flexattn.graph.facts import ModFacts, analyze
from flexattn.graph.interval_bounds import bound as bounds_of
from flexattn.graph.mod_graph import ModGraph
from flexattn.machine.target import NAMES, Target, named, target_of
from flexattn.mask_build.create import create_block_mask, sizes_read
from flexattn.mask_build.kernels import plan_mask
from flexattn.mask_build.launch_plan import sources
from flexattn.mask_build.on_target import as_on_target
from flexattn.printing.html_page import html_page
from flexattn.printing.kernel_lines import cut, engine_line, kernel_lines
from flexattn.process.frozen_class import frozen
from flexattn.runtime.build import registers_on_disk
from flexattn.torch_state.modes import undisturbed
from flexattn.torch_state.uncompiled import uncompiled
from flexattn.trace.trace import trace


@frozen
class Explanation:
    """Everything between a call of flex_attention and its kernels. None: stage not present.

    `print` shows a summary. `full()` returns the text of each stage, `html()` the same as a page.
    """

    score: ModGraph | None
    gradient: ModGraph | None
    mask: ModGraph | None
    score_facts: ModFacts | None
    mask_facts: ModFacts | None
    block_mask: BlockMask | None = None
    engine: str | None = None
    plans: tuple[KernelPlan, ...] = ()  # one per kernel; empty for engines that generate none
    origins: tuple[str, ...] = ()  # where the tile of each plan comes from
    reasons: tuple[str | None, ...] = ()  # why each plan is not a Hopper kernel; None if it is one
    sources: tuple[KernelSource, ...] = ()  # one per plan
    mask_sources: tuple[KernelSource, ...] = ()  # kernels that build the mask on that GPU
    mask_bounds: ModGraph | None = None  # of a mask_mod that is explained alone
    batch_invariant: bool = False  # kernel_options["BATCH_INVARIANT"]
    bits: str | None = None  # of the partial blocks, or why there are none; only for Hopper GPUs
    call: str | None = None  # the shapes and dtype of a call
    blocks_note: str | None = None  # which blocks of the mask are read, and the order of tokens, if not its own

    def __str__(self) -> str:
        """Return a summary: facts, the mask and a line for each kernel."""
        alone = self.engine is None  # mods without a call
        stages: list[tuple[str, object]] = [
            ("call", self.call),
            *_mod_stages("score", self.score, self.score_facts, self.gradient, alone),
            *_mod_stages("mask", self.mask, self.mask_facts, None, alone),
            (
                "block mask",
                None if (m := self.block_mask) is None else _blocks(repr(m), m, self.blocks_note, self.bits),
            ),
            ("order of sums", _INVARIANT if self.batch_invariant else None),
            ("engine", None if self.engine is None else "\n".join([engine_line(self.engine), *self._kernel_lines()])),
        ]
        return _text(stages) + "\n\n" + _MORE

    def full(self) -> str:
        """Return the text of every stage: graphs, facts, bounds, the mask, plans and generated sources.

        Example:
            >>> made = explain(score_mod=lambda score, b, h, q_idx, kv_idx: score * 0.5)
            >>> print(made.full().partition("\\n\\n-- facts")[0].partition("\\n")[2])
            def score_mod(score, b, h, q_idx, kv_idx):
                t0 = score * 0.5  # f32
                return t0
            <BLANKLINE>
            -- gradient of score_mod -------------------------------------------------------
            def score_mod_grad(grad, score, b, h, q_idx, kv_idx):
                t0 = grad * 0.5  # f32
                return t0
        """
        return _text(self._stages())

    def html(self) -> str:
        """Return one HTML page that needs no other file: the summary, and the stages of `full` to unfold.

        Example:
            >>> from pathlib import Path
            >>> page = explain(score_mod=lambda score, b, h, q_idx, kv_idx: score * 0.5).html()
            >>> _ = Path("call.html").write_text(page)  # doctest: +SKIP
            >>> "<script" in page, "http" in page
            (False, False)
        """
        stages = [(title, str(text).strip(_BREAK)) for title, text in self._stages() if text is not None]
        names = [graph.name for graph in (self.score, self.mask) if graph is not None]
        return html_page(f"flex_attention: {', '.join(names) or 'no mods'}", str(self), stages)

    def _stages(self) -> list[tuple[str, object]]:
        return [
            ("call", self.call),
            (_heading("score_mod", self.score), self.score),
            ("gradient of score_mod", self.gradient),
            ("facts about score_mod", self.score_facts),
            (_heading("mask_mod", self.mask), self.mask),
            ("facts about mask_mod", self.mask_facts),
            (
                "bounds of mask_mod over a box of positions",
                None if self.mask_bounds is None else f"{self.mask_bounds}\n{_BOUNDS}",
            ),
            ("block mask", self._blocks(str)),
            ("engine", self.engine),
            ("order of sums", _INVARIANT if self.batch_invariant else None),
            *((f"plan {i} of {len(self.plans)}", self._plan(i - 1)) for i in range(1, len(self.plans) + 1)),
            *((f"source of {source.name}", source.text) for source in (*self.sources, *self.mask_sources)),
        ]

    def _blocks(self, draw: Callable[[object], str]) -> str | None:
        mask = self.block_mask
        return None if mask is None else _blocks(draw(mask), mask, self.blocks_note, self.bits)

    def _plan(self, i: int) -> str:
        origin = self.origins[i] if self.origins else ""
        reason = self.reasons[i] if self.reasons else None
        return self.plans[i].text(origin) + (f"\n    hopper   no: {reason}" if reason else "")

    def _kernel_lines(self) -> list[str]:
        """Return one line for each kernel."""
        if not self.plans:
            return []
        registers = [registers_on_disk(s, p.target) for s, p in zip(self.sources, self.plans, strict=True)]
        lines = [f"kernels for {self.plans[0].target}:"]
        lines += [f"    {line}" for line in kernel_lines(self.plans, self.origins, self.reasons, registers)]
        names = ", ".join(source.name for source in self.mask_sources)
        return [*lines, *([f"    mask      {names}"] if names else [])]


_BREAK = "\n"


def _text(stages: Sequence[tuple[str, object]]) -> str:
    return "\n\n".join(f"{_rule(title)}\n{str(text).strip(_BREAK)}" for title, text in stages if text is not None)


def _heading(kind: str, graph: ModGraph | None) -> str:
    return f"{kind} {graph.location}".strip() if graph is not None else kind


def _mod_stages(
    kind: str, graph: ModGraph | None, facts: ModFacts | None, gradient: ModGraph | None, alone: bool
) -> list[tuple[str, object]]:
    """Return what a summary shows of a mod: its facts, and its graph if it is explained alone."""
    if graph is None:
        return []
    about = str(facts).splitlines()[1:]  # without the name, which the heading has
    if gradient is not None:
        unchanged = gradient.outputs[0] is not None and gradient.is_input(gradient.outputs[0], "grad")
        learned = f", {len(gradient.sites)} reads of captured tensors receive one" if gradient.sites else ""
        about.append(f"    gradient {'passed on unchanged' if unchanged else 'computed'}{learned}")
    shown = [(_heading(f"{kind}_mod", graph), cut(str(graph), _MOST_OF_GRAPH))] if alone else []
    title = f"facts about {kind}_mod" if alone else _heading(mod_in_messages(kind, graph.name), graph)
    return [*shown, (title, cut("\n".join(about), _MOST_FACTS))]


_MOST_OF_GRAPH = 30  # lines of a graph in a summary
_MOST_FACTS = 8
_MORE = "full() returns all stages, .sources the kernels, html() a page."

_INVARIANT = """
batch-invariant: mask_mod is applied in every block, and keys ascend in tiles of one size. So the bits of a row's out,
lse, max_scores and dq do not depend on what else is computed
"""

_BOUNDS = """
Over a box of positions, ends included: the first result is true if all pairs attend, the second if some pairs may
attend. A block is full if the first is true, and empty if the second is false. Other blocks are evaluated.
"""


def _blocks(drawn: str, mask: BlockMask, *notes: str | None) -> str:
    """Return a drawn mask, its build counts if known, and notes about it."""
    lines, counts = [drawn], mask.build_counts
    if counts is not None:
        full, partial, empty = mask.counts()
        samples = "" if counts.samples is None else f"{counts.samples:,} positions sampled, "
        lines.append(
            f"{counts.boxes:,} boxes bounded, {samples}{counts.blocks:,} blocks evaluated pair by pair; "
            f"{full + partial:,} of {full + partial + empty:,} blocks live"
        )
    return "\n".join([*lines, *(note for note in notes if note is not None)])


def _bits(problem: Problem, target: Target) -> str | None:
    """Return what bits a mask has, or why it has none. None: the question does not arise."""
    blocks = problem.block_mask
    if blocks is None or problem.mask is None or not target.is_hopper:
        return None
    if blocks.bits is not None:
        text = f"bits of {blocks.bits.blocks:,} partial blocks take {blocks.bits.nbytes:,} bytes"
        tiles = None if blocks.in_tiles is None else blocks.in_tiles.mask.bits
        return text if tiles is None else f"{text}; of {tiles.blocks:,} in tiles of their grid, {tiles.nbytes:,}"
    return f"no bits of partial blocks: {blocks.no_bits}"


def _rule(title: str) -> str:
    return f"-- {title} ".ljust(80, "-")


@uncompiled
@undisturbed("explain")
def explain(
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    score_mod: Mod | None = None,
    block_mask: BlockMask | upstream.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Mapping[str, object] | None = None,
    *,
    sink: Tensor | float | None = None,
    dropout_p: float = 0.0,
    seqused_k: Tensor | None = None,
    q_offsets: Tensor | None = None,
    kv_positions: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_layout: KVLayout = "NHD",
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    mask_mod: Mod | None = None,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    target: str | None = None,
    **unknown: Never,
) -> Explanation:
    """Return every stage of a call of flex_attention without running it. Print the result for a summary.

    It takes the arguments of flex_attention except return_lse and return_aux.

    Without tensors, score_mod and mask_mod are explained on their own: their graphs, the facts proved about them, and
    the graph that bounds a mask_mod over boxes of positions. With lengths, the BlockMask of mask_mod is also built, and
    the work that this took is shown.

    Args:
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, sink: as in flex_attention.
        dropout_p: as in flex_attention. Nothing is drawn from the generator.
        seqused_k, q_offsets, kv_positions, block_table, kv_layout, k_descale, v_descale: as in flex_attention.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, only without tensors.
        B, H, Q_LEN, KV_LEN, BLOCK_SIZE: as in create_block_mask, to build the mask of mask_mod on the default device.
            Without Q_LEN and KV_LEN no mask is built.
        target: a GPU architecture ("sm_90") to show the kernels for, on any machine. For Hopper, the bits of an
            expensive mask are evaluated, which takes 0.5 s for 1,000 partial blocks on a CPU.

    Raises what flex_attention and create_block_mask raise before they compute, and ArgumentError for arguments that
    exclude each other. An index out of range in a mod is found when the call runs.

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(1, 2, 64, 32)
        >>> explain(q, k, v, lambda score, b, h, q_idx, kv_idx: -score).score
        def score_mod(score, b, h, q_idx, kv_idx):
            t0 = neg(score)  # f32
            return t0
        >>> explain(mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, Q_LEN=512, KV_LEN=512).block_mask.counts()
        (6, 4, 6)
    """
    if unknown:
        refuse_unknown(explain, unknown)
    sizes = {"B": B, "H": H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    if query is not None and key is None and not isinstance(query, Tensor):
        is_mask = isinstance(query, upstream.BlockMask)
        fix = (
            "Write mask_mod=block_mask.mask_mod, or pass tensors first."
            if is_mask
            else "Write score_mod= or mask_mod=."
        )
        raise DtypeError(message("query", f"a {type(query).__name__}", "a torch.Tensor", fix))
    if query is None and key is None and value is None and block_mask is None:
        return _explain_mods(score_mod, mask_mod, sizes, BLOCK_SIZE)
    if mask_mod is not None:
        fix = "Pass block_mask=create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) instead."
        raise ArgumentError(message("mask_mod", "one with other arguments", "only score_mod and mask_mod", fix))
    _reject_sizes(sizes, "a mask_mod without tensors", "Leave it out: the tensors and block_mask define it.")
    layout = LayoutArguments(seqused_k, q_offsets, kv_positions, block_table, kv_layout, k_descale, v_descale)
    call = Call(
        query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, sink, dropout_p,
        layout=None if layout.is_empty else layout,
    )  # fmt: skip
    if target is not None and isinstance(block_mask, BlockMask):
        call = replace(call, block_mask=as_on_target(block_mask, target_named(target))[0])
    return explain_call(call, target)


def explain_call(call: Call, target: str | None) -> Explanation:
    """Explain a call, for a GPU architecture if one is named, else for its own device.

    Its mask is as it is built there (`as_on_target`).
    """
    given = call.block_mask
    call = _reading_blocks(call)
    problem = pose(call, seeded=False, on_gpu=target is not None)
    score, mask = problem.score, problem.mask
    if score is not None and problem.score_grad is None:
        problem = replace(problem, score_grad=differentiate(score.graph, ()))
    engine = gpu_engine_of(problem) if target and not is_empty(problem) else engine_of(problem)
    problem = form_for(engine, problem)
    plans = (
        triton.plans(problem, target_named(target) if target else target_of(problem.query.device))
        if engine is triton
        else ()
    )
    return Explanation(
        call=_shapes(call),
        score=None if score is None else score.graph,
        gradient=problem.score_grad,
        mask=None if mask is None else mask.graph,
        score_facts=None if score is None else analyze(score.graph),
        mask_facts=None if mask is None else analyze(mask.graph),
        block_mask=problem.block_mask,
        engine=engine.__name__.rpartition(".")[2],  # type: ignore[attr-defined]
        plans=tuple(plan for plan, _ in plans),
        origins=tuple(tile_origin(plan, problem) for plan, _ in plans),
        reasons=tuple(reason for _, reason in plans),
        sources=tuple(render(plan) for plan, _ in plans),
        mask_sources=mask_sources(problem.block_mask, plans[0][0].target) if plans else (),
        batch_invariant=problem.batch_invariant,
        bits=_bits(problem, plans[0][0].target) if plans else None,
        blocks_note=_blocks_note(given, call.block_mask, [plan for plan, _ in plans]),
    )


def _reading_blocks(call: Call) -> Call:
    """Return the call with the mask in the blocks that it reads, as flex_attention passes it on."""
    if not isinstance(call.block_mask, BlockMask) or not isinstance(call.query, Tensor) or call.layout is not None:
        return call
    return replace(call, block_mask=blocks_read(call.block_mask, call.query, call.kernel_options))


def _blocks_note(given: Any, read: Any, plans: Sequence[KernelPlan]) -> str | None:
    """Return which blocks of a mask are read, and in which order of tokens, if these are not those of the mask."""
    notes = []
    if isinstance(given, BlockMask) and given.BLOCK_SIZE != read.BLOCK_SIZE:
        notes.append(
            f"Hopper kernels read blocks of {read.BLOCK_SIZE} instead of the mask's BLOCK_SIZE, {given.BLOCK_SIZE}."
        )
    tiled = {plan.spec.phase: plan.token_tile for plan in plans if plan.token_tile}
    if tiled:
        tile = " x ".join(map(str, next(iter(tiled.values()))))
        passes = " and ".join({"fwd": "forward", "bwd": "backward"}[phase] for phase in tiled)
        verb = "computes" if len(tiled) == 1 else "compute"
        notes.append(f"The {passes} {verb} tokens in tiles of {tile} of their grid, with fewer blocks.")
    return " ".join(notes) or None


def _shapes(call: Call) -> str:
    names = ("query", "key", "value")
    tensors = {name: x for name in names if isinstance(x := getattr(call, name), Tensor)}
    shapes = ", ".join(f"{name} {'nested' if x.is_nested else list(x.shape)}" for name, x in tensors.items())
    return f"{shapes}, {str(tensors['query'].dtype).removeprefix('torch.')} on {tensors['query'].device}"


def _explain_mods(
    score_mod: Mod | None, mask_mod: Mod | None, sizes: Mapping[str, int | None], block_size: int | tuple[int, int]
) -> Explanation:
    if score_mod is None and mask_mod is None:
        fix = "Pass query, key and value, or score_mod or mask_mod."
        raise ArgumentError(message("explain", "nothing", "tensors or mods", fix))
    B, H, Q_LEN, KV_LEN = sizes.values()
    if mask_mod is None:
        _reject_sizes(sizes, "a mask_mod to build a mask from", "Pass mask_mod, or leave it out.")
    elif Q_LEN is None or KV_LEN is None:
        _reject_sizes(sizes, "both Q_LEN and KV_LEN", "Pass both to build the mask, or leave it out.")
    score = None if score_mod is None else trace(score_mod, "score").graph
    mask = None if mask_mod is None else trace(mask_mod, "mask").graph
    blocks = None
    if mask_mod is not None and Q_LEN is not None and KV_LEN is not None:
        blocks = create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE=block_size)
    return Explanation(
        score=score,
        gradient=None if score is None else differentiate(score, tuple(range(len(score.captures)))),
        mask=mask,
        score_facts=None if score is None else analyze(score),
        mask_facts=None if mask is None else analyze(mask),
        block_mask=blocks,
        mask_bounds=None if mask is None else bounds_of(mask),
    )


def _reject_sizes(sizes: Mapping[str, int | None], expected: str, fix: str) -> None:
    for name, size in sizes.items():
        if size is not None:
            raise ArgumentError(message(name, size, expected, fix))


def mask_sources(blocks: BlockMask | None, target: Target) -> tuple[KernelSource, ...]:
    """Return the kernels that build a mask on a GPU; empty if it is built otherwise."""
    if blocks is None or not blocks.is_built or target.backend != "cuda":
        return ()
    bound = trace(blocks.mask_mod, "mask")
    plan = plan_mask(bound, target)
    evaluates = blocks.build_counts is not None and blocks.build_counts.blocks > 0
    if plan is None:
        return ()
    sizes = sizes_read(bound, (blocks.B, blocks.H, *blocks.seq_lengths))
    return sources(plan, bound, sizes, blocks.BLOCK_SIZE, evaluates, blocks.bits is not None)


def target_named(name: str) -> Target:
    """Return the target of an architecture named as in CUDA and HIP: sm_90, gfx942."""
    expected = f"one of {', '.join(NAMES)}, or another of their generations"
    if not isinstance(name, str):
        raise DtypeError(message("target", repr(name), expected, 'Write target="sm_90".'))
    if (target := named(name)) is not None:
        return target
    raise ArgumentError(message("target", repr(name), expected, 'Write target="sm_90".'))
