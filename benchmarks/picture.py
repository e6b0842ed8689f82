"""The picture of the README: a mask, its blocks, and speeds next to those of peers, from a file of results.

`python -m benchmarks.picture benchmarks/results/2026-11-26-h200-attention-native.json --out docs/images/flexattn.png`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from flexattn import and_masks, create_block_mask, mods

# Works of benchmarks.attention, and what the picture calls them.
WORKS = {
    "full_d128": "full, D 128", "causal_d128": "causal, D 128", "causal_d64": "causal, D 64",
    "causal_d256": "causal, D 256", "causal_gqa": "32 and 8 heads", "causal_2k": "2,048 tokens",
    "causal_32k": "32,768 tokens", "sliding_32k": "window of 1,024", "documents_16k": "packed documents",
}  # fmt: skip
PEERS = {
    "flexattn": ("flexattn", "#1f5fa8"),
    "fa3": ("FlashAttention-3", "#e08a2e"),
    "fa4": ("FlashAttention-4", "#e8b878"),
    "sdpa_cudnn": ("cuDNN", "#9a9a9a"),
}
LENGTHS = (300, 180, 420, 124)  # of the documents in the mask
BLOCK = 64


def speeds(results: list[dict[str, Any]], direction: str) -> dict[str, list[float]]:
    """Return the TFLOP/s of each peer for WORKS, 0 where it cannot compute one."""
    found = {(r["work"], r["peer"]): r.get("tflops") or 0.0 for r in results if r["direction"] == direction}
    return {peer: [found.get((work, peer), 0.0) for work in WORKS] for peer in PEERS}


def draw(results: list[dict[str, Any]], out: Path) -> None:
    """Draw the picture to a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (pairs, blocks, forward, backward) = pyplot.subplots(
        1, 4, figsize=(16, 4.6), width_ratios=(1, 1, 1.15, 1.15), layout="constrained"
    )
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = create_block_mask(
        and_masks(mods.causal, mods.document(ids)), None, None, len(ids), len(ids), device="cpu", BLOCK_SIZE=BLOCK
    )
    mask.plot(pairs, pairs=True)
    mask.plot(blocks)
    pairs.set_title("a mask_mod: causal, four documents")
    blocks.set_title(f"its blocks of {BLOCK} x {BLOCK}")
    for axis, direction in ((forward, "forward"), (backward, "backward")):
        for i, (peer, values) in enumerate(speeds(results, direction).items()):
            label, color = PEERS[peer]
            places = [n + 0.21 * (i - 1.5) for n in range(len(WORKS))]
            axis.barh(places, values, 0.2, color=color, label=label)
        axis.set_yticks(range(len(WORKS)), WORKS.values() if direction == "forward" else [""] * len(WORKS))
        axis.invert_yaxis()
        axis.set_title(f"{direction}, TFLOP/s (H200, bfloat16)")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*forward.get_legend_handles_labels(), loc="outside lower right", ncols=len(PEERS), frameon=False)
    figure.savefig(out, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=__doc__)
    parser.add_argument("results", type=Path, help="a JSON file of benchmarks.attention")
    parser.add_argument("--out", type=Path, default=Path("docs/images/flexattn.png"))
    options = parser.parse_args(arguments)
    draw(json.loads(options.results.read_text())["results"], options.out)
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
