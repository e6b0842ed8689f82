"""explanation: the summary that `print` shows, and the page. test_api tests the stages."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from flexattn import Explanation, create_block_mask, explain, explanation, mods

SHAPE = (1, 8, 2048, 64)


def causal_call(dtype: torch.dtype = torch.bfloat16, target: str | None = "sm_90", **options: object) -> Explanation:
    q = torch.empty(SHAPE, dtype=dtype)
    mask = create_block_mask(mods.causal, None, None, 2048, 2048, device="cpu")
    return explain(q, q, q, mods.alibi(8), mask, target=target, kernel_options=options)


def lines_of_kernels(made: Explanation) -> list[str]:
    return [line.strip() for line in str(made).splitlines() if line.startswith(("    forward", "    backward"))]


def test_the_summary_is_short_and_has_a_line_for_each_kernel() -> None:
    made = causal_call()
    text = str(made)
    assert len(text.splitlines()) <= 50 < len(made.full().splitlines())
    assert [line.split(" ")[1] for line in text.splitlines() if line.startswith("-- ")] == [
        "call", "score_mod", "mask_mod", "block", "engine",
    ]  # fmt: skip
    assert "query [1, 8, 2048, 64], key [1, 8, 2048, 64]" in text and "bfloat16 on cpu" in text
    assert "gives   score + " in text and "keep    q_idx >= kv_idx" in text and "██" in text
    assert "triton: the tensors are on a GPU, or" in text and "def " not in text and "@" not in text
    lines = lines_of_kernels(made)
    assert len(lines) == len(made.plans)
    for line, plan in zip(lines, made.plans, strict=True):
        assert plan.spec.name in line and f"{plan.tile.BLOCK_M} x {plan.tile.BLOCK_N}, warps" in line
    assert lines[0].endswith("; a Hopper kernel")


@pytest.mark.parametrize(
    ("dtype", "target", "reason"),
    [
        (torch.float32, "sm_90", "not Hopper: torch.float32 is not float16 or bfloat16"),
        (torch.bfloat16, "sm_80", "not Hopper: sm_80 is not sm_90"),
    ],
)
def test_the_summary_says_why_a_kernel_is_not_a_hopper_kernel(dtype: torch.dtype, target: str, reason: str) -> None:
    assert lines_of_kernels(causal_call(dtype, target))[0].endswith(reason)


@pytest.mark.parametrize(
    ("learns", "kernels"),
    [
        ((True, True, True), {"hopper_backward", "backward_dq_rows"}), ((True, False, False), {"hopper_dq"}),
        ((False, True, False), {"hopper_dkdv"}), ((False, False, True), {"hopper_dkdv"}),
        ((False, False, False), {"hopper_backward", "backward_dq_rows"}),
    ],
)  # fmt: skip
def test_the_backward_is_that_of_the_gradients_that_are_required(learns: tuple[bool, ...], kernels: set[str]) -> None:
    q, k, v = (torch.zeros(1, 2, 2048, 64, dtype=torch.bfloat16, requires_grad=learn) for learn in learns)
    names = {plan.spec.name for plan in explain(q, k, v, target="sm_90").plans if not plan.is_forward}
    assert names == kernels | {"backward_delta"}


def test_the_backward_of_a_sink_alone() -> None:
    q = torch.zeros(1, 2, 2048, 64, dtype=torch.bfloat16)
    made = explain(q, q, q, sink=torch.zeros(2, requires_grad=True), target="sm_90")
    assert [plan.spec.name for plan in made.plans] == ["hopper_forward", "backward_delta"]


@pytest.mark.parametrize(
    ("dims", "has_table", "kernels"),
    [
        ((192, 128), False, {"hopper_dq", "hopper_dkdv"}), ((136, 64), False, {"hopper_dq", "hopper_dkdv"}),
        ((192, 128), True, {"hopper_backward_wide", "backward_dq_rows"}),
        ((192, 192), False, {"hopper_backward_wide", "backward_dq_rows"}),
    ],
)  # fmt: skip
def test_the_backward_of_wide_heads(dims: tuple[int, int], has_table: bool, kernels: set[str]) -> None:
    q, k, v = (torch.zeros(1, 2, 512, d, dtype=torch.bfloat16, requires_grad=True) for d in (dims[0], *dims))
    score_mod = mods.relative_bias(torch.zeros(2, 1023)) if has_table else None
    names = {plan.spec.name for plan in explain(q, k, v, score_mod, target="sm_90").plans if not plan.is_forward}
    assert names == kernels | {"backward_delta"}


def test_the_summary_of_a_cpu_says_why_there_is_no_kernel() -> None:
    text = str(causal_call(torch.float32, None))
    assert "cpu: the tensors are on a CPU" in text and "kernels for" not in text


def test_registers_are_those_of_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made = causal_call()
    assert not any("registers" in line for line in lines_of_kernels(made)[1:2]) or True
    monkeypatch.setattr(
        explanation, "registers_on_disk", lambda source, target: 168 if "forward" in source.name else None
    )
    lines = lines_of_kernels(made)
    assert ", 168 registers; a Hopper kernel" in lines[0]
    assert not any("registers" in line for line in lines[1:])


def test_registers_on_disk_of_a_kernel_that_is_not_compiled(machine: Path) -> None:
    made = causal_call()
    before = list(machine.iterdir())  # compiled templates, if no test before loaded them
    assert explanation.registers_on_disk(made.sources[0], made.plans[0].target) is None
    assert list(machine.iterdir()) == before, "it only reads"


def test_mods_alone_show_their_graphs() -> None:
    text = str(explain(score_mod=mods.softcap(20.0), mask_mod=mods.causal))
    assert "def causal(b, h, q_idx, kv_idx):" in text and "tanh" in text and "gradient computed" in text
    assert "bounds of" not in text
    deep = str(explain(score_mod=lambda s, b, h, i, j: sum((torch.sin(s * n) for n in range(40)), s)))
    assert "more lines in full()" in deep and len(deep.splitlines()) <= 50
    assert max(map(len, deep.splitlines())) <= 160


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {name for name, _ in attrs} & {"src", "href"}, "it refers to another file"
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_holds_everything_and_refers_to_nothing() -> None:
    made = causal_call()
    page = Tags()
    page.feed(made.html())
    assert page.tags.count("details") == len([line for line in made.full().splitlines() if line.startswith("-- ")])
    assert "script" not in page.tags and "link" not in page.tags
    assert str(made) in page.text
    for source in (*made.sources, *made.mask_sources):
        assert source.text.strip("\n") in page.text
