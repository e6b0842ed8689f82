"""render: templates filled with a plan, and the argument specialization for the compiler."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
from dataclasses import replace

import jinja2.meta
import pytest
import torch

from flexattn import create_block_mask, explain, mods
from flexattn.compile.kernel_plan import KernelPlan
from flexattn.compile.kernels import CAPTURES
from flexattn.compile.render import render
from flexattn.compile.templates import environment, templates_folder

pytest.importorskip("triton")


def works() -> dict[str, tuple[KernelPlan, ...]]:
    """Return plans of calls that cover every branch of the templates."""
    found = {}
    table = torch.zeros(4, 200, requires_grad=True)
    scores = {
        "none": None, "softcap": mods.softcap(20.0), "alibi": mods.alibi(4),
        "capped": lambda s, b, h, i, j: torch.tanh(s + table[h, (i - j).clamp(-9, 9) + 9]),
        "learned": lambda s, b, h, i, j: s * torch.sigmoid(table[h, i]) + table[h, (i - j).clamp(-9, 9)],
    }  # fmt: skip
    for (name, score), masked, (D, Dv) in itertools.product(scores.items(), (False, True), ((64, 64), (40, 96))):
        q, k, v = (torch.zeros(2, 4, 200, d, dtype=torch.bfloat16, requires_grad=True) for d in (D, D, Dv))
        mask = create_block_mask(mods.causal, None, None, 200, 200, device="cpu") if masked else None
        for kind, target, options, deterministic in (
            ("", "sm_80", {}, False), ("", "sm_90", {"BACKEND": "TRITON"}, False), ("-hopper", "sm_90", {}, False),
            ("-pair", "sm_90", {}, True), ("-pair", "sm_80", {}, True),
        ):  # fmt: skip
            torch.use_deterministic_algorithms(deterministic)
            plans = explain(q, k, v, score, mask, target=target, kernel_options=options).plans
            found[f"{name}-{'causal' if masked else 'full'}-{D}-{target}{kind}"] = plans
    torch.use_deterministic_algorithms(False)
    return found


WORKS = works()


def variants(plan: KernelPlan) -> list[KernelPlan]:
    if plan.is_hopper:
        return [plan, replace(plan, features=(*plan.features, "max_scores"))]
    if plan.sums and plan.spec is not CAPTURES:
        return [plan, *variants(replace(plan, spec=CAPTURES))]
    if plan.spec.name == "backward_dq_rows":
        return [plan, replace(plan, aligned=False)]
    loose = replace(plan, aligned=False, tma=False)
    return [
        plan,
        replace(plan, tma=False),
        loose,
        replace(loose, wide_rows=True, full_overhangs=True, features=("max_scores",)),
        replace(plan, features=("dlse",)),
    ]


@pytest.mark.parametrize("work", WORKS)
def test_sources(work: str):
    for plan in itertools.chain.from_iterable(map(variants, WORKS[work])):
        source = render(plan)
        tree = ast.parse(source.text)
        functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert source.name in functions and source.name == plan.name
        names = [name for name, _ in source.signature]
        assert [a.arg for a in functions[source.name].args.args] == names and len(set(names)) == len(names)
        assert set(source.divisible) <= set(names)
        assert (source.num_warps, source.num_stages) == (plan.tile.num_warps, plan.tile.num_stages)
        assert not plan.tma or any("tensordesc" in kind for _, kind in source.signature)
        assert "{{" not in source.text and "{%" not in source.text
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)):
            if call.func.id in functions and not any(isinstance(a, ast.Starred) for a in call.args):
                taken = functions[call.func.id].args
                least, given = len(taken.args) - len(taken.defaults), len(call.args) + len(call.keywords)
                assert least <= given <= len(taken.args), f"{source.name}: {ast.unparse(call)}"
        assert str(templates_folder()) not in source.text, "the same on every machine"


@pytest.mark.parametrize("work", WORKS)
def test_arguments_have_the_type_of_what_is_passed(work: str):
    for plan in itertools.chain.from_iterable(map(variants, WORKS[work])):
        for name, kind in render(plan).signature:
            if name.endswith("_ptr"):
                assert kind.startswith("*"), name
            elif "_desc" in name:
                sums = name in ("shift_desc", "delta_desc") or (name == "dq_desc" and plan.spec.name != "hopper_dq")
                assert kind.startswith("tensordesc<fp32[" if sums else "tensordesc<bf16[1, 1, "), name
            elif name.endswith("scale") or name == "q_sign":
                assert kind == "fp32", name
            else:
                assert kind in ("i32", "i64", "fp32"), name
            if name.startswith("stride_") and name.endswith(("b", "h")) and "mask" not in name:
                assert kind == "i64", f"{name} may pass 2**31"


DIGESTS = """
import hashlib, torch
from flexattn import create_block_mask, explain, mods

table = torch.zeros(4, 200, requires_grad=True)
q = torch.zeros(2, 4, 200, 40, dtype=torch.bfloat16, requires_grad=True)
mask = create_block_mask(mods.causal, None, None, 200, 200, device="cpu")
learned = lambda s, b, h, i, j: s * torch.sigmoid(table[h, i]) + table[h, (i - j).clamp(-9, 9)]
for target in ("sm_80", "sm_90"):
    for source in explain(q, q, q, learned, mask, target=target).sources:
        print(source.name, hashlib.sha256(source.text.encode()).hexdigest())
"""


@pytest.mark.slow
def test_sources_do_not_depend_on_the_hash_seed():
    """The source is part of the key of a kernel on disk: another process must find it."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", DIGESTS], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    one, other = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert len(one.splitlines()) == 8
    assert one == other


def test_macros_name_nothing_but_their_arguments():
    text = (templates_folder() / "macros.py.jinja").read_text()
    assert not jinja2.meta.find_undeclared_variables(environment().parse(text))


def test_equal_plans_of_two_calls_give_one_text():
    for one, other in zip(WORKS["learned-causal-40-sm_90"], works()["learned-causal-40-sm_90"], strict=True):
        assert one == other
        assert render.__wrapped__(one).text == render.__wrapped__(other).text


def test_names_are_identifiers():
    mask = create_block_mask(mods.and_masks(mods.causal, mods.sliding_window(9)), None, None, 64, 64, device="cpu")
    q = torch.zeros(1, 1, 64, 16)
    for plan in explain(q, q, q, lambda s, b, h, i, j: -s, mask, target="sm_80").plans:
        assert plan.name.isidentifier() and plan.name.startswith(plan.spec.name)
        assert render(plan).name == plan.name and len(plan.name) <= 120


def test_kernels_of_mods_with_long_names_have_files():
    """A file name may have 255 characters, and Triton adds a prefix and a suffix to a kernel's name."""

    def score(s, b, h, q_idx, kv_idx):
        return s + q_idx

    def mask(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    for mod in (score, mask):
        mod.__name__ = f"{mod.__name__}_ä" + "x" * 300
    q = torch.zeros(1, 1, 64, 16)
    block_mask = create_block_mask(mask, None, None, 64, 64, device="cpu")
    shown = explain(q, q, q, score, block_mask, target="sm_90")
    assert shown.mask_sources and all(
        len(source.name) <= 120 and source.name.isidentifier() and f"def {source.name}(" in source.text
        for source in (*shown.sources, *shown.mask_sources)
    )


def test_headers_name_the_users_lines():
    def shifted(score, b, h, q_idx, kv_idx):
        return score * 0.5 + h

    q = torch.zeros(1, 1, 64, 16)
    source = explain(q, q, q, shifted, target="sm_90").sources[0]
    assert any("shifted" in line and "test_render.py" in line for line in source.header)
    assert source.name == "forward_shifted"
