"""flexattn as an attention implementation of transformers: logits and gradients of tiny models, next to eager's."""

from __future__ import annotations

import pytest
import torch

from flexattn.integrations import transformers as bridge

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SIZES = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 16}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen3": ("Qwen3Config", {}),
}


def models(name: str):
    bridge.register()
    kind, more = CONFIGS[name]
    config = getattr(transformers, kind)(**SIZES, **more)
    torch.manual_seed(0)
    ours = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flexattn").eval()
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    eager.load_state_dict(ours.state_dict())
    return ours, eager


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients(name):
    ours, eager = models(name)
    tokens = torch.randint(0, 101, (2, 40), generator=torch.Generator().manual_seed(0))
    found, expected = (m(tokens, labels=tokens) for m in (ours, eager))
    torch.testing.assert_close(found.logits, expected.logits, rtol=2e-5, atol=2e-5)
    found.loss.backward()
    expected.loss.backward()
    for (label, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=label)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_padding(name, side):
    ours, eager = models(name)
    tokens = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, slice(9) if side == "left" else slice(15, None)] = 0
    with torch.no_grad():
        found, expected = (m(tokens, attention_mask=mask).logits for m in (ours, eager))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=2e-5, atol=2e-5)


def test_generation_with_a_cache():
    ours, eager = models("llama")
    tokens = torch.randint(0, 101, (2, 8), generator=torch.Generator().manual_seed(0))
    found, expected = (m.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0) for m in (ours, eager))
    assert torch.equal(found, expected)


def test_a_dense_mask():
    ours, eager = models("llama")
    tokens = torch.randint(0, 101, (1, 16), generator=torch.Generator().manual_seed(0))
    dense = torch.where(torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(1)) < 0.5, 0.0, -1e4)
    dense[..., 0] = 0.0
    with torch.no_grad():
        found, expected = (m(tokens, attention_mask=dense).logits for m in (ours, eager))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_sinks():
    x = torch.randn(1, 4, 8, 16)
    sinks = torch.randn(4)
    out, weights = bridge.attention(torch.nn.Identity().eval(), x, x, x, None, scaling=0.25, s_aux=sinks)
    scores = torch.cat([x @ x.mT * 0.25, sinks[None, :, None, None].expand(1, 4, 8, 1)], -1)
    torch.testing.assert_close(out.transpose(1, 2), scores.softmax(-1)[..., :-1] @ x)
    assert weights is None
