"""Train a small byte-level GPT on packed documents, with and without attention, and show the effect of attention.

The text is the source code of Python's standard library on this machine. Each step packs excerpts of different files
into one row, so each step has a new document mask. ALiBi's slopes are learned, so the score_mod has a gradient.
At the end, a table shows how long a training step takes by length, and the model continues a text.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from flexattn import BlockMask, and_masks, create_block_mask, flex_attention
from flexattn.mods import alibi, causal, document
from flexattn.reference import attention as dense_attention

HELD_OUT = 10  # every tenth file is held out
ALPHABET = 256
PROMPT = b"def read(self, size=None):\n    "


@dataclass(frozen=True)
class Settings:
    """Size of the model and length of training."""

    length: int  # tokens in one row
    excerpts: tuple[int, int]  # shortest and longest excerpt of a file, in bytes
    width: int
    heads: int
    layers: int
    steps: int
    rate: float
    lengths: tuple[int, ...]  # of the table at the end
    most_mask_bytes: int  # of the dense mask that SDPA is given


ON_CPU = Settings(
    length=2048, excerpts=(128, 512), width=128, heads=4, layers=2, steps=320, rate=5e-3,
    lengths=(1024, 2048, 4096, 8192), most_mask_bytes=2**28,
)  # fmt: skip
ON_GPU = Settings(
    length=16384, excerpts=(256, 2048), width=512, heads=8, layers=6, steps=400, rate=1e-3,
    lengths=(4096, 16384, 32768, 65536), most_mask_bytes=2**33,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Packed documents."""

    tokens: Tensor  # [S], bytes
    targets: Tensor  # [S], the bytes that follow
    documents: Tensor  # int32 [S], the document of each token


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one training step."""

    step: float
    attention: float  # of all layers alone
    dense: float | None  # the same by SDPA, None if its mask is too large
    mask_bytes: int  # of that mask


class Attention(nn.Module):
    """Multi-head attention with learned ALiBi slopes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)
        self.log_slopes = nn.Parameter(torch.arange(heads) * (-8 / heads) * torch.tensor(2.0).log())

    def score_mod(self) -> Callable[..., Tensor]:
        """Return ALiBi with the current slopes. Gradients flow back through the exp."""
        return alibi(self.log_slopes.exp())

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v  # each [B, H, S, D]

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = self.project(x)
        out = flex_attention(q, k, v, score_mod=self.score_mod(), block_mask=mask)  # [B, H, S, D]
        return self.to_out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: BlockMask | None) -> Tensor:
        if mask is not None:
            x = x + self.attention(self.before_attention(x), mask)
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """A small GPT. Without a mask, attention is switched off, so only the previous byte predicts the next one."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embed = nn.Embedding(ALPHABET, settings.width)
        self.layers = nn.ModuleList(Layer(settings.width, settings.heads) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.to_logits = nn.Linear(settings.width, ALPHABET)

    def forward(self, tokens: Tensor, mask: BlockMask | None) -> Tensor:
        x = self.embed(tokens)[None]  # [1, S, width]
        for layer in self.layers:
            x = layer(x, mask)
        return self.to_logits(self.norm(x))[0]  # [S, 256]

    def loss(self, row: Row, mask: BlockMask | None) -> Tensor:
        with torch.autocast(row.tokens.device.type, torch.bfloat16, enabled=row.tokens.is_cuda):
            return functional.cross_entropy(self(row.tokens, mask).float(), row.targets)


def read_files() -> tuple[list[bytes], list[bytes]]:
    """Return the standard library's sources: those to train on and those held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for pattern in ("*.py", "*/*.py") for p in folder.glob(pattern) if "-packages" not in str(p))
    texts = [text for text in (p.read_bytes() for p in paths) if len(text) > 1024]
    return [t for i, t in enumerate(texts) if i % HELD_OUT], texts[::HELD_OUT]


def pack(texts: list[bytes], settings: Settings, device: torch.device, rng: random.Random) -> Row:
    """Fill one row with excerpts of random files."""
    tokens, targets, documents = bytearray(), bytearray(), []
    while len(tokens) < settings.length:
        size = min(rng.randint(*settings.excerpts), settings.length - len(tokens))
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - size - 1))
        excerpt = text[start : start + size + 1]
        documents += [documents[-1] + 1 if documents else 0] * (len(excerpt) - 1)
        tokens += excerpt[:-1]
        targets += excerpt[1:]
    as_tensor = [torch.tensor(list(part)).to(device) for part in (tokens, targets)]
    return Row(*as_tensor, torch.tensor(documents, dtype=torch.int32).to(device))


def mask_of(row: Row) -> BlockMask:
    """Let each token attend to itself and to the tokens before it in its own document."""
    length = len(row.tokens)
    mask_mod = and_masks(causal, document(row.documents))
    return create_block_mask(mask_mod, None, None, length, length, device=row.tokens.device)


def progress(steps: int, label: str, loss_of: Callable[[int], float]) -> Iterator[None]:
    """Run `loss_of(step)` for each step with a progress bar; without a terminal, print every fifth."""
    start = time.perf_counter()
    for step in range(steps):
        loss = loss_of(step)
        done = step + 1
        bar = ("█" * (30 * done // steps)).ljust(30, "·")
        line = f"{label:18} {bar} {done:4}/{steps}  loss {loss:.3f}  {time.perf_counter() - start:5.1f} s"
        if sys.stdout.isatty():
            print("\r" + line, end="" if done < steps else "\n", flush=True)
        elif done == steps or done % max(1, steps // 5) == 0:
            print(line, flush=True)
        yield


def train(texts: list[bytes], settings: Settings, device: torch.device, attend: bool) -> GPT:
    torch.manual_seed(0)
    rng = random.Random(0)
    model = GPT(settings).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.rate, settings.steps, pct_start=0.1)

    def step(_: int) -> float:
        row = pack(texts, settings, device, rng)
        loss = model.loss(row, mask_of(row) if attend else None)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss.item()

    for _ in progress(settings.steps, "with attention" if attend else "without attention", step):
        pass
    return model


@torch.no_grad()
def held_out_loss(model: GPT, rows: list[Row], attend: bool) -> float:
    return sum(model.loss(row, mask_of(row) if attend else None).item() for row in rows) / len(rows)


@torch.no_grad()
def check_output(model: GPT, row: Row) -> None:
    """Compare the first layer's attention, on real activations, with dense attention in float64."""
    size = min(2048, len(row.tokens))
    row = Row(row.tokens[:size], row.targets[:size], row.documents[:size])
    layer = model.layers[0]
    dtype = torch.bfloat16 if row.tokens.is_cuda else torch.float32
    q, k, v = (x.to(dtype) for x in layer.attention.project(layer.before_attention(model.embed(row.tokens)[None])))
    mask = mask_of(row)
    mods = layer.attention.score_mod(), mask.mask_mod
    exact, _ = dense_attention(q, k, v, *mods)
    dense, _ = dense_attention(q, k, v, *mods, dtype=None)
    error = (flex_attention(q, k, v, score_mod=mods[0], block_mask=mask) - exact).abs().max().item()
    allowed = max(2 * (dense - exact).abs().max().item(), 4 * torch.finfo(dtype).eps * exact.abs().max().item())
    assert error <= allowed, f"largest error {error:.1e} where dense {dtype} attention has {allowed / 2:.1e}"
    print(f"output: largest error {error:.1e} against float64, of {allowed:.1e} allowed in {str(dtype)[6:]}")


def draw(mask: BlockMask, path: Path) -> None:
    """Print a mask, and draw it to a file if matplotlib is installed."""
    print(mask.to_string())
    try:
        mask.plot().figure.savefig(path)
    except ImportError:
        print('no image of it, because matplotlib is not installed (pip install ".[plot]")')
    else:
        print(f"the same as an image: {path}")


@torch.no_grad()
def generate(model: GPT, prompt: bytes, settings: Settings, size: int, temperature: float = 0.7) -> str:
    """Continue a text byte by byte, with as much context as the model was trained with."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    text = bytearray(prompt)
    for _ in range(size):
        tokens = torch.tensor(list(text[-settings.excerpts[1] :]), device=device)
        mask = create_block_mask(causal, None, None, len(tokens), len(tokens), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens, mask)[-1].float().cpu()
        text.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
    return text.decode(errors="replace")


def one_document(row: Row) -> Row:
    """Return a row whose tokens all belong to one document: its mask is causal."""
    return replace(row, documents=torch.zeros_like(row.documents))


def compare_lengths(model: GPT, texts: list[bytes], settings: Settings, device: torch.device) -> None:
    """Print how long a training step takes by length, how much of it is attention, and what SDPA takes for it."""
    print("by SDPA: the same attention with mask and bias as one dense tensor, left out where that is too large")
    print(f"{'tokens':>7}  {'mask':10}  {'step':>9}  {'attention in it':>19}  {'by SDPA':>9}  {'dense mask':>10}")
    for length in settings.lengths:
        row = pack(texts, replace(settings, length=length), device, random.Random(length))
        for name, packed in (("documents", row), ("causal", one_document(row))):
            timing = time_step(model, packed, settings)
            share = f"{timing.attention:.1f} ms, {100 * timing.attention / timing.step:.0f} %"
            dense = f"{timing.dense:.1f} ms" if timing.dense is not None else "left out"
            size = f"{timing.mask_bytes / 2**20:,.0f} MiB"
            print(f"{length:7}  {name:10}  {timing.step:6.1f} ms  {share:>19}  {dense:>9}  {size:>10}", flush=True)


def time_step(model: GPT, row: Row, settings: Settings) -> Timing:
    """Time a forward and backward of the model, and of the attention of all its layers alone."""
    attention = model.layers[0].attention
    on_gpu, dtype = row.tokens.is_cuda, torch.bfloat16 if row.tokens.is_cuda else torch.float32
    with torch.no_grad():
        projected = attention.project(model.layers[0].before_attention(model.embed(row.tokens)[None]))
    q, k, v = (x.to(dtype).contiguous().requires_grad_() for x in projected)
    slopes = attention.log_slopes.detach().exp()  # [H]
    score_mod, mask = alibi(slopes), mask_of(row)

    def step() -> None:
        model.loss(row, mask).backward()
        model.zero_grad()

    def attend() -> None:
        flex_attention(q, k, v, score_mod=score_mod, block_mask=mask).sum().backward()

    layers, mask_bytes = len(model.layers), len(slopes) * len(row.tokens) ** 2 * dtype.itemsize
    dense = None
    if mask_bytes <= settings.most_mask_bytes:
        bias = dense_bias(row, slopes.to(dtype))
        dense = layers * median_time(
            lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).sum().backward(), on_gpu
        )
    return Timing(median_time(step, on_gpu), layers * median_time(attend, on_gpu), dense, mask_bytes)


def dense_bias(row: Row, slopes: Tensor) -> Tensor:
    """Return mask and bias as the dense tensor that SDPA needs, [1, H, S, S]."""
    positions = torch.arange(len(row.tokens), device=row.tokens.device)
    distance = positions[:, None] - positions  # [S, S]
    hidden = (distance < 0) | (row.documents[:, None] != row.documents)
    return (-slopes[:, None, None] * distance).masked_fill_(hidden, float("-inf"))[None]


def median_time(run: Callable[[], None], on_gpu: bool, most: float = 1.0) -> float:
    """Return the median in ms of up to five runs after the first, which may compile; fewer if they take long."""
    times: list[float] = []
    while len(times) < 6 and (len(times) < 2 or sum(times[1:]) < most):
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="half a minute's version of the CPU's setting")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="training steps of each model")
    image = Path(tempfile.gettempdir()) / "flexattn_demo_mask.png"
    parser.add_argument("--image", type=Path, default=image, help=f"where the mask is drawn (default: {image})")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    settings = ON_GPU if device.type == "cuda" and not arguments.small else ON_CPU
    if arguments.small:
        settings = replace(settings, length=1024, width=96, steps=90, lengths=(512, 1024, 2048))
    if arguments.steps:
        settings = replace(settings, steps=arguments.steps)

    print("The text is the source code of Python's standard library on this machine. Nothing is downloaded.")
    train_texts, held_out_texts = read_files()
    rng = random.Random(1)
    rows = [pack(held_out_texts, settings, device, rng) for _ in range(8)]
    print(f"{len(train_texts)} files to train on, {len(held_out_texts)} held out; {device}; {settings}")
    mask = mask_of(rows[0])
    print(f"one row's mask: each document attends to itself, {mask.sparsity():.0f}% of the pairs are never computed")
    draw(mask, arguments.image)

    with_attention = train(train_texts, settings, device, attend=True)
    without = train(train_texts, settings, device, attend=False)
    losses = held_out_loss(with_attention, rows, attend=True), held_out_loss(without, rows, attend=False)
    print(f"held-out loss: {losses[0]:.3f} with attention, {losses[1]:.3f} without (nats per byte)")
    slopes = with_attention.layers[0].attention.log_slopes.exp().tolist()
    print(f"slopes that the first layer learned: {', '.join(f'{s:.3f}' for s in slopes)}")
    check_output(with_attention, rows[0])
    print("\nforward and backward of the model, by length:")
    compare_lengths(with_attention, held_out_texts, settings, device)
    print("\na text that it continues after the first line:\n")
    print(generate(with_attention, PROMPT, settings, 320))
    assert losses[0] < losses[1] - 0.1, "attention should have helped more"


if __name__ == "__main__":
    main()
