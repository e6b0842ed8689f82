"""flexattn as an attention implementation of transformers: logits, gradients and tokens next to those of eager."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import generation
from flexattn import counters
from flexattn.errors import ArgumentError, DtypeError, OptionError, UnsupportedError
from flexattn.integrations import transformers as bridge
from flexattn.mask_build import cache as mask_cache

transformers = pytest.importorskip("transformers")
from tiny_models import CONFIGS, batch, labels, models, other_models, pair  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
KINDS = ("whole", "left", "right", "packed")


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def compare_training(ours: Any, compiled: Any, eager: Any, kind: str, **more: Any) -> None:
    tokens, real, arguments = batch(kind)
    wanted = labels(tokens, real)
    found = compiled(tokens, labels=wanted, use_cache=False, **{**arguments, **more})
    expected = eager(tokens, labels=wanted, use_cache=False, **arguments)
    close(found.logits[real], expected.logits[real])
    found.loss.backward()
    expected.loss.backward()
    for (label, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=label)


def generated(model: Any, tokens: Tensor, **more: Any) -> Tensor:
    return model.generate(tokens, **{"max_new_tokens": 12, "do_sample": False, "disable_compile": True, **more})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients(name: str, kind: str) -> None:
    ours, eager = models(name)
    compare_training(ours, ours, eager, kind)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["whole", "left"])
@pytest.mark.parametrize("name", CONFIGS)
def test_generation(name: str, kind: str, cache: str) -> None:
    ours, eager = models(name)
    tokens, _, arguments = batch(kind, 24)  # longer than the windows, which roll from then on
    found, expected = (generated(m, tokens, cache_implementation=cache, **arguments) for m in (ours, eager))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("more", [{"num_beams": 3}, {"prefill_chunk_size": 20}], ids=["beams", "chunked_prefill"])
def test_other_generation(more: dict[str, int]) -> None:
    ours, eager = models("gemma3")
    tokens, _, arguments = batch("left", 50)
    found, expected = (generated(m, tokens, **more, **arguments) for m in (ours, eager))
    assert torch.equal(found, expected)


def cache_of(kind: str, model: Any) -> Any:
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=96)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_turns_of_several_lengths_with_one_cache(kind: str) -> None:
    ours, eager = models("gemma3")
    tokens, _, _ = batch("whole", 70)
    mine, theirs = cache_of(kind, ours), cache_of(kind, eager)
    ends = (30, 33, 34, 60, 61, 70)
    with torch.no_grad():
        for start, end in zip((0, *ends), ends, strict=False):
            part = tokens[:, start:end]
            close(ours(part, past_key_values=mine).logits, eager(part, past_key_values=theirs).logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_step_traces_and_builds_nothing(name: str, cache: str) -> None:
    ours, _ = models(name)
    tokens, _, arguments = batch("left", 24)
    generated(ours, tokens, cache_implementation=cache, max_new_tokens=3, **arguments)
    builds = []
    for count in (3, 20):
        counters(reset=True)
        before = mask_cache.stats()["builds"]
        generated(ours, tokens, cache_implementation=cache, max_new_tokens=count, **arguments)
        builds.append(mask_cache.stats()["builds"] - before)
        assert counters().traces == 0
        assert not counters().fallbacks
    assert builds == [2, 2]  # of the prompt: one for each kind of layer


def test_masks_without_padding_come_from_the_cache() -> None:
    ours, _ = models("gemma2")
    tokens, real, _ = batch("whole")
    ours(tokens, attention_mask=real.long())
    before = mask_cache.stats()["builds"]
    ours(tokens, attention_mask=real.long())
    assert mask_cache.stats()["builds"] == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    ours, eager = models(name)
    tokens, real, arguments = batch("left")
    expected = eager(tokens, **arguments).logits[real]
    found = ours.to(dtype)(tokens, **arguments).logits[real]
    assert found.dtype == dtype
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


def test_autocast() -> None:
    ours, eager = models("llama")
    tokens, _, _ = batch("whole")
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(tokens, labels=tokens)
        cached = generated(ours, tokens, max_new_tokens=2)
    expected = eager(tokens).logits
    assert (found.logits - expected).abs().max() < 0.03 * expected.abs().max()
    assert cached.shape == (2, 42)
    found.loss.backward()
    assert all(p.grad is not None for p in ours.parameters())


def test_gradient_checkpointing() -> None:
    ours, eager = models("gemma2")
    for model in (ours, eager):
        model.train().gradient_checkpointing_enable()
    compare_training(ours, ours, eager, "left")


@pytest.mark.parametrize("form", ["bool", "added", "bfloat16"])
@pytest.mark.parametrize("sizes", [(2, 1, 20, 20), (1, 1, 20, 20), (2, 4, 20, 20), (2, 1, 1, 20)])
def test_dense_masks(sizes: tuple[int, ...], form: str) -> None:
    ours, eager = models("llama")
    tokens, _, _ = batch("whole", 20)
    kept = torch.rand(sizes, generator=torch.Generator().manual_seed(1)) < 0.5
    kept[..., 0] = True
    added = torch.where(kept, 0.0, torch.finfo(torch.float32).min)
    given = {"bool": kept, "added": added, "bfloat16": added.clamp(min=-1e30).bfloat16()}[form]
    close(ours(tokens, attention_mask=given).logits, eager(tokens, attention_mask=added).logits)


def test_functions_of_users_in_masks() -> None:
    from transformers.masking_utils import create_causal_mask  # type: ignore[import-not-found]

    ours, eager = models("llama")
    for length in (12, 30):
        first = (torch.arange(length) < 5).expand(2, -1)
        tokens, _, _ = batch("whole", length)
        found, expected = (
            m(tokens, attention_mask=create_causal_mask(
                m.config, torch.empty(2, length, 64), None, None,
                or_mask_function=lambda b, h, q, k, first=first: first[b, q] & first[b, k],
            )).logits
            for m in (ours, eager)
        )  # fmt: skip
        close(found, expected)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_keys_of_a_static_cache_that_are_not_written(padding: str) -> None:
    """A mask that is not causal would reach them."""
    from transformers.masking_utils import create_causal_mask  # type: ignore[import-not-found]

    logits = []
    real = batch("left" if padding == "left" else "whole")[1].long()
    for model in models("llama"):
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        mask = create_causal_mask(
            model.config, torch.empty(2, 40, 64), real, cache, or_mask_function=lambda b, h, q, k: k < 60
        )
        logits.append(model(batch("whole")[0], attention_mask=mask, past_key_values=cache).logits)
    close(*(x[real.bool()] for x in logits))


@pytest.mark.parametrize(
    ("padding", "window", "none"), [("whole", None, True), ("left", None, False), ("whole", 8, False)]
)
def test_one_query_has_a_mask_only_if_it_leaves_out_keys(padding: str, window: int | None, none: bool) -> None:
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    ours, eager = models("mistral" if window else "llama")
    make = create_sliding_window_causal_mask if window else create_causal_mask
    tokens, real, _ = batch(padding, 20)
    real = torch.nn.functional.pad(real.long(), (0, 1), value=1)
    logits = []
    for model in (ours, eager):
        cache = transformers.DynamicCache()
        model(tokens, attention_mask=real[:, :-1], past_key_values=cache)
        mask = make(model.config, torch.empty(2, 1, 64), real, cache)
        assert (mask is None) == (none and model is ours)
        logits.append(model(tokens[:, -1:], attention_mask=real, past_key_values=cache).logits)
    close(*logits)


def test_generation_of_a_model_that_asks_for_the_dimensions_of_a_mask() -> None:
    sizes = {"vocab_size": 101, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}
    ours, eager = pair(transformers.AutoModelForCausalLM.from_config, "GPT2Config", sizes)
    tokens, _, arguments = batch("left", 24)
    more = {"cache_implementation": "static", "pad_token_id": 0, **arguments}
    assert torch.equal(generated(ours, tokens, **more), generated(eager, tokens, **more))


@pytest.mark.parametrize("name", ["bert", "vit", "t5", "whisper"])
def test_encoders_and_cross_attention(name: str) -> None:
    ours, eager = other_models(name)
    tokens, real, arguments = batch("right", 24)
    if name in ("bert", "vit"):
        image = torch.randn(2, 3, 32, 32)
        given = {"pixel_values": image} if name == "vit" else {"input_ids": tokens, **arguments}
        found, expected = (m(**given).last_hidden_state for m in (ours, eager))
        return close(found, expected) if name == "vit" else close(found[real], expected[real])
    given = {"input_features": torch.randn(2, 8, 60)} if name == "whisper" else {"input_ids": tokens, **arguments}
    found, expected = (m(**given, labels=tokens) for m in (ours, eager))
    close(found.logits, expected.logits)
    found.loss.backward()
    expected.loss.backward()
    for (label, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=label)
    found, expected = (m.generate(**given, max_new_tokens=8, do_sample=False) for m in (ours, eager))
    return torch.testing.assert_close(found, expected)


def test_a_bidirectional_decoder() -> None:
    ours, eager = models("llama", is_causal=False)
    compare_training(ours, ours, eager, "right")


def test_sinks() -> None:
    x = torch.randn(1, 4, 8, 16)
    sinks = torch.randn(4)
    out, weights = bridge.attention(torch.nn.Identity().eval(), x, x, x, None, scaling=0.25, s_aux=sinks)
    scores = torch.cat([x @ x.mT * 0.25, sinks[None, :, None, None].expand(1, 4, 8, 1)], -1)
    torch.testing.assert_close(out.transpose(1, 2), scores.softmax(-1)[..., :-1] @ x)
    assert weights is None


def test_weights_are_an_error() -> None:
    ours, _ = models("llama")
    with pytest.raises(UnsupportedError, match="output_attentions: found True"):
        ours(batch("whole")[0], output_attentions=True)


def test_options_of_kernels_are_passed_on() -> None:
    ours, _ = models("llama")
    tokens, _, _ = batch("whole")
    close(ours(tokens, kernel_options={"BATCH_INVARIANT": True}).logits, ours(tokens).logits)
    with pytest.raises(OptionError, match="BLOCK_X"):
        ours(tokens, kernel_options={"BLOCK_X": 1})


@pytest.mark.parametrize(
    ("attention_mask", "error", "text"),
    [
        (torch.ones(2, 1, 8, 8, dtype=torch.int64), DtypeError, "attention_mask: found i64"),
        (torch.ones(2, 8, 8), ArgumentError, r"attention_mask: found shape \[2, 8, 8\]"),
        (torch.ones(3, 1, 8, 8), ArgumentError, r"attention_mask: found shape \[3, 1, 8, 8\]"),
        (torch.ones(2, 1, 8, 7), ArgumentError, r"attention_mask: found shape \[2, 1, 8, 7\]"),
        ("causal", DtypeError, "attention_mask: found a str"),
    ],
)
def test_other_masks_are_errors(attention_mask: Any, error: type[Exception], text: str) -> None:
    x = torch.randn(2, 4, 8, 16)
    with pytest.raises(error, match=text):
        bridge.attention(torch.nn.Identity(), x, x, x, attention_mask)


def test_versions_with_other_masks_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(UnsupportedError, match="transformers: found version"):
        bridge.register()


@pytest.mark.parametrize("order", ["installed", "5.17"])
def test_a_mask_of_few_queries_is_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    from transformers.masking_utils import sdpa_mask  # type: ignore[import-not-found]

    names = [name for name in inspect.signature(sdpa_mask).parameters if name != "allow_torch_fix"]
    names.insert(names.index("use_vmap"), "allow_torch_fix")  # deprecated, gone in 5.24

    def earlier(*values: Any, **named: Any) -> Any:
        given = {**dict(zip(names, values, strict=False)), **named}
        given.pop("allow_torch_fix", None)
        return sdpa_mask(**given)

    if order == "5.17":
        monkeypatch.setattr("transformers.masking_utils.sdpa_mask", earlier)
    written = torch.zeros((), dtype=torch.int64, device="meta")  # as in a static cache of a model on a GPU
    for offset in (written, 24):
        assert bridge.mask(2, 1, 28, offset, device=torch.device("meta")).device.type == "meta"  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("llama", "whole"), ("gemma2", "left"), ("gpt_oss", "packed")])
def test_a_compiled_model(name: str, kind: str) -> None:
    ours, eager = models(name)
    compare_training(ours, torch.compile(ours, fullgraph=True, backend="aot_eager"), eager, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("llama", "left"), ("gemma2", "packed")])
def test_masks_that_are_built_before_a_compiled_model(name: str, kind: str) -> None:
    from transformers.masking_utils import create_masks_for_generate  # type: ignore[import-not-found]

    ours, eager = models(name)
    tokens, _, arguments = batch(kind)
    masks = create_masks_for_generate(
        ours.config, torch.empty(*tokens.shape, 0), arguments.get("attention_mask"), None, arguments.get("position_ids")
    )
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    compare_training(ours, compiled, eager, kind, attention_mask=masks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "graphs"), [("llama", 1), ("gemma3", 2), ("gpt_oss", 2)])
def test_a_compiled_step(name: str, graphs: int) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    ours, eager = models(name)
    tokens, _, _ = batch("whole", 24)
    mine, theirs = cache_of("static", ours), cache_of("static", eager)
    torch.compiler.reset()
    counter: Any = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    with torch.no_grad():
        ours(tokens, past_key_values=mine)
        eager(tokens, past_key_values=theirs)
        for position in range(24, 32):
            token, positions = tokens[:, position - 24, None], torch.full((2, 1), position)
            found, expected = (
                m(token, past_key_values=c, position_ids=positions).logits
                for m, c in ((compiled, mine), (eager, theirs))
            )
            close(found, expected)
    assert counter.frame_count == graphs  # a rolling window is compiled again once: its offset becomes a symbol


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("llama", "left"), ("gpt_oss", "left")])
def test_generation_compiles_its_steps(name: str, kind: str) -> None:
    ours, eager = models(name)
    tokens, _, arguments = batch(kind, 24)
    settings = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    settings._compile_all_devices = True
    found = generated(
        ours, tokens, cache_implementation="static", disable_compile=False, compile_config=settings, **arguments
    )
    assert torch.equal(found, generated(eager, tokens, **arguments))


@pytest.mark.slow
def test_the_page(tmp_path: Path) -> None:
    page = Path(__file__).parents[1] / "docs" / "transformers.md"
    path = tmp_path / "page.py"
    path.write_text("\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)))
    exec(compile(path.read_text(), path, "exec"), {"__name__": "page"})


def test_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert generation.main(["--quick", "--device", "cpu", "--rounds", "1", "--peers", "flexattn,sdpa"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("quick")]
    assert [(peer, run) for _, peer, run, *_ in lines] == [
        (peer, run) for peer in ("flexattn", "sdpa") for run in ("dynamic", "static", "train")
    ]
    assert all(float(line[3].replace(",", "")) > 0 for line in lines)
