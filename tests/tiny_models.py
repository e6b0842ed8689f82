"""Random models of transformers with two layers: one that uses flexattn, one of the same weights that uses eager."""

from __future__ import annotations

from typing import Any

import torch
import transformers  # type: ignore[import-not-found]
from torch import Tensor

from flexattn.integrations import transformers as bridge

SIZES = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CHUNKS = {
    "attention_chunk_size": 8,
    "intermediate_size_mlp": 96,
    "layer_types": ["chunked_attention", "full_attention"],
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "gemma2": ("Gemma2Config", {**WINDOW, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {**WINDOW, "query_pre_attn_scalar": 16}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen3": ("Qwen3Config", {}),
    "gpt_oss": ("GptOssConfig", {**WINDOW, **EXPERTS}),
    "llama4": ("Llama4TextConfig", {**CHUNKS, **EXPERTS, "use_qk_norm": False}),
}
_SMALL = {"vocab_size": 101, "d_model": 64}
_LAYERS = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
}  # fmt: skip
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", {
        "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    }),
    "vit": ("ViTModel", "ViTConfig", {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 32,
        "patch_size": 8,
    }),
    "t5": ("T5ForConditionalGeneration", "T5Config", {
        **_SMALL, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
    }),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {
        **_SMALL, **_LAYERS, "num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 40,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }),
}  # fmt: skip


def models(name: str, **changes: Any) -> tuple[Any, Any]:
    """Return a causal language model with flexattn, and the same with eager attention."""
    config, more = CONFIGS[name]
    return pair(transformers.AutoModelForCausalLM.from_config, config, {**SIZES, **more, **changes})


def other_models(name: str) -> tuple[Any, Any]:
    """Return an encoder, or an encoder and decoder, with flexattn, and the same with eager attention."""
    kind, config, sizes = OTHERS[name]
    return pair(getattr(transformers, kind)._from_config, config, sizes)


def pair(make: Any, config: str, sizes: dict[str, Any]) -> tuple[Any, Any]:
    """Return make(config) with flexattn, and the same with eager attention and the same weights."""
    bridge.register()
    torch.manual_seed(0)
    # Models keep their config, which holds the name of the implementation: each needs its own.
    ours, eager = (
        make(getattr(transformers, config)(**sizes), attn_implementation=name).eval() for name in ("flexattn", "eager")
    )
    assert (ours.config._attn_implementation, eager.config._attn_implementation) == ("flexattn", "eager")
    for name, parameter in ours.named_parameters():
        if parameter.dim() > 1 or "sinks" in name:  # large enough that a wrong mask changes the logits
            torch.nn.init.normal_(parameter, std=0.05 if "expert" in name else 0.15)
    eager.load_state_dict(ours.state_dict())
    return ours, eager


def batch(kind: str, length: int = 40) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return tokens [2, length], which of them are no padding, and the arguments that say so.

    `kind` is "whole", "left" or "right" (a padded sequence), or "packed" (two sequences in each row).
    """
    tokens = torch.randint(2, 101, (2, length), generator=torch.Generator().manual_seed(0))
    real = torch.ones(2, length, dtype=torch.bool)
    if kind == "packed":
        positions = torch.cat([torch.arange(15), torch.arange(length - 15)])
        return tokens, real, {"position_ids": positions.expand(2, -1)}
    if kind == "whole":
        return tokens, real, {}
    real[1, slice(9) if kind == "left" else slice(length - 9, None)] = False
    return tokens, real, {"attention_mask": real.long()}


def labels(tokens: Tensor, real: Tensor) -> Tensor:
    """Return labels without those that padding predicts, whose rows attend to nothing."""
    before = torch.nn.functional.pad(real[:, :-1], (1, 0))
    return tokens.masked_fill(~(real & before), -100)
