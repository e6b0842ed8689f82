"""transformers on a GPU: logits and gradients next to eager, and steps that compile no kernel."""

from __future__ import annotations

import pytest
import torch

from flexattn import counters

pytest.importorskip("triton")
pytest.importorskip("transformers")
from tiny_models import batch, labels, models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
NAMES = ("llama", "gemma2", "gemma3", "gpt_oss")


@pytest.mark.parametrize("kind", ["whole", "left", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients(name: str, kind: str) -> None:
    ours, eager = (m.cuda() for m in models(name))
    tokens, real, arguments = batch(kind, 300)
    tokens, real, wanted = tokens.cuda(), real.cuda(), labels(tokens, real).cuda()
    arguments = {k: v.cuda() for k, v in arguments.items()}
    found, expected = (m(tokens, labels=wanted, use_cache=False, **arguments) for m in (ours, eager))
    torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=2e-3, atol=5e-3)
    found.loss.backward()
    expected.loss.backward()
    for (label, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-2, atol=1e-3, msg=label)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["uncompiled", "compiled"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", NAMES)
def test_generation(name: str, cache: str, is_compiled: bool) -> None:
    if is_compiled and cache == "dynamic":
        pytest.skip("transformers compiles steps with a static cache only")
    ours, eager = (m.cuda() for m in models(name))
    tokens, _, arguments = batch("left", 24)
    given = {"max_new_tokens": 20, "do_sample": False, "cache_implementation": cache}
    arguments = {**{k: v.cuda() for k, v in arguments.items()}, **given}
    expected = eager.generate(tokens.cuda(), disable_compile=True, **arguments)
    assert torch.equal(ours.generate(tokens.cuda(), disable_compile=not is_compiled, **arguments), expected)
    counters(reset=True)
    ours.generate(tokens.cuda(), disable_compile=not is_compiled, **arguments)
    found = counters()
    assert (found.traces, found.kernels_compiled, found.kernels_from_disk) == (0, 0, 0)
