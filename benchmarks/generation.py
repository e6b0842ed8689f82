"""Models of transformers with flexattn, next to its own implementations of attention.

`python -m benchmarks.generation` generates with random models in bfloat16: tokens per second of a whole `generate`
with a prompt, with a dynamic cache, and with a static cache whose steps transformers compiles on a GPU. It also trains.
`--runs static` selects some of these.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from benchmarks.harness import Config, Run, environment, measure, table, write_json
from flexattn.integrations import transformers as bridge

PEERS = ("flexattn", "sdpa", "flex_attention", "eager")
RUNS = ("dynamic", "static", "train")


@dataclass(frozen=True)
class Work:
    """A model and the lengths that it is run with."""

    config: str  # a class of transformers
    batch: int
    prompt: int
    new: int
    layers: int = 8
    hidden: int = 2048
    heads: int = 16
    window: int | None = None
    more: tuple[tuple[str, object], ...] = ()  # of the config

    def model(self, peer: str, device: torch.device) -> Any:
        """Return a model with random weights. Each has a config of its own, as it holds the name of the peer."""
        import transformers  # type: ignore[import-not-found]

        window = {} if self.window is None else {"sliding_window": self.window}
        config = getattr(transformers, self.config)(
            vocab_size=32_000, hidden_size=self.hidden, intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.heads // 4,
            head_dim=self.hidden // self.heads, pad_token_id=0, eos_token_id=None, **window, **dict(self.more),
        )  # fmt: skip
        torch.manual_seed(0)
        make = transformers.AutoModelForCausalLM.from_config
        with device:
            return make(config, attn_implementation=peer, dtype=torch.bfloat16)


WORKS = {
    "llama": Work("LlamaConfig", 8, 2048, 128),
    "mistral_window": Work("MistralConfig", 8, 8192, 128, window=1024),
    "gemma2": Work("Gemma2Config", 8, 8192, 128, layers=4, window=1024),
    "gemma3": Work("Gemma3TextConfig", 8, 8192, 128, layers=6, window=1024),  # the sixth has no window
    "gpt_oss": Work("GptOssConfig", 8, 2048, 128, layers=4, window=128, more=(("num_local_experts", 8),)),
}
QUICK = Work("MistralConfig", 2, 24, 4, layers=2, hidden=64, heads=4, window=8)


def runs_of(work: Work, peer: str, device: torch.device) -> dict[str, Run]:
    """Return what is timed, by name."""

    @cache  # made in the first run, so that a peer without such a model becomes a row with its error
    def model() -> Any:
        return work.model(peer, device)

    tokens = torch.randint(1, 32_000, (work.batch, work.prompt), device=device)

    def generate(cache: str) -> None:
        new = {"max_new_tokens": work.new, "min_new_tokens": work.new, "do_sample": False}
        model().eval().generate(tokens, cache_implementation=cache, **new)

    def train() -> None:
        model().train()(tokens, labels=tokens, use_cache=False).loss.backward()
        model().zero_grad()

    return dict(zip(RUNS, (lambda: generate("dynamic"), lambda: generate("static"), train), strict=True))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one tiny model")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    bridge.register()
    device = torch.device(options.device)
    works = {"quick": QUICK} if options.quick else {name: WORKS[name] for name in options.works.split(",")}
    rows, records, failed = [], [], False
    for name, work in works.items():
        found = {peer: runs_of(work, peer, device) for peer in options.peers.split(",")}
        kinds = options.runs.split(",")
        runs = {Config(name, peer, kind): of_peer[kind] for peer, of_peer in found.items() for kind in kinds}
        for config, result in measure(runs, device, options.rounds).items():
            tokens = work.batch * (work.prompt if config.direction == "train" else work.new)
            rows.append([name, config.peer, config.direction, f"{tokens / result.median * 1e3:,.0f}", result.note])
            records.append({**result.record(), "tokens": tokens})
            failed = failed or (result.failed and config.peer == "flexattn")
    where = environment(device)
    print(f"{where}\n\n{table(['work', 'peer', 'run', 'tokens/s', 'note'], rows)}")
    write_json(options.json, {"environment": asdict(where), "results": records})
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
