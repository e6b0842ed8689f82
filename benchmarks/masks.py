"""Block masks: what building them costs, beside torch's own, for each kind and length.

    python -m benchmarks.overhead --parts masks

Times are wall times on a GPU, which is waited for before and after; on a CPU they are the process's own, of all its
threads, with the wall time beside them. `first` is the first build of a kind in this process, peers in the order given,
with whatever is imported, traced, compiled or read from a disk cache; `repeated` builds from the same
mask_mod object, which flexattn may serve from its mask cache; `new closure` from a function made anew over new tensors
and another number, which is not timed. `repeated` and `new closure` are warmed up by two builds; then the peers take
turns in random order, round by round. Where a build takes less than SHORT_S, a turn begins with one that is not timed,
as the peers evict each other's code from the processor's caches. A peer of torch's that fails, or takes more than
SLOW_S for each build, or would take so long if its time grew with the square of the length, is listed with the reason
and left out of greater lengths.

Memory is what a build takes at its peak beyond what was allocated before, with the mask that it returns: on a GPU the
most of all rounds; on a CPU by how much the resident set of a process rises that has built small masks before and is
used for this build alone.

Further builds of flexattn's are taken apart. `launches` counts generated kernels, `waits` the calls that wait for the
device (WAITS). Host time ends when create_block_mask returns; `python` is the host time outside of these calls, with
the launches in it. `cached` counts the builds that the mask cache served.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import flexattn
import flexattn.runtime.build
import flexattn.trace.trace
from benchmarks.harness import Config, Result, one_line, synchronize, table
from benchmarks.peers import torch_flex_module
from benchmarks.works import Mod, Mods, Work, document_lengths, make_inputs
from flexattn.mask_build import cache as mask_cache
from flexattn.mods import natten_2d

OURS = "flexattn"
SLOW_S = 20.0  # a peer of torch's whose builds take longer leaves; after as long a step ends, given its least rounds
LEAST_ROUNDS = 3
SHORT_S = 0.01  # before a build that is shorter goes one that is not timed
REST_S = 0.001  # before a time of the process is taken: threads of the build before may yet spin, for half of that
WAITS = ((Tensor, "tolist"), (Tensor, "item"), (Tensor, "cpu"), (torch, "equal"), (torch.cuda.Stream, "synchronize"))
MIB = 2**20
CPU = torch.device("cpu")
SMALL = 256  # tokens of a mask to warm up with

Build = Callable[[Mod, int], Any]  # (mask_mod, length) -> BlockMask


@dataclass(frozen=True)
class Packed:
    """Attention over ragged documents of one row, causal in each."""

    documents: int
    shortest: int
    longest: int
    heads: int
    kv_heads: int
    head_dim: int


LARGE = Packed(32, 16_384, 33_000, 32, 8, 128)
TINY = Packed(4, 16, 33, 4, 2, 16)


@dataclass(frozen=True)
class MaskSettings:
    """What the mask part measures, and where."""

    peers: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype  # of the packed attention
    rounds: int
    lengths: tuple[int, ...]
    churn: tuple[int, int]  # builds of new closures, and their length
    packed: Packed


# Kinds: (length, n, device) -> mask_mod; every n gives a new function over new tensors and another number.


def causal(length: int, n: int, device: torch.device) -> Mod:
    """Return a causal mask_mod over positions that begin at n."""

    def causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + n >= kv_idx + n

    return causal_mask


def sliding(length: int, n: int, device: torch.device) -> Mod:
    """Return a mask_mod of a causal window of 1024 + n."""
    window = min(1024, length // 4) + n

    def sliding_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    return sliding_mask


def documents(length: int, n: int, device: torch.device) -> Mod:
    """Return a causal mask_mod of ragged documents drawn with seed n: at least 12, 1,500 in 1,048,576 tokens."""
    return packed_documents(document_lengths(length, max(12, length * 1500 // 2**20), seed=n), device)


def packed_documents(lengths: Sequence[int], device: torch.device) -> Mod:
    """Return a causal mask_mod of documents of these lengths."""
    ids = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths)).to(device)

    def document_causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    return document_causal_mask


def natten(length: int, n: int, device: torch.device) -> Mod:
    """Return the mask_mod of NATTEN 13 x 13 on an image about as wide as high, whose last n rows are cut off."""
    width = 1 << length.bit_length() // 2
    height = -(-length // width)
    kernel = min(13, (min(width, height) - 1) | 1)
    return natten_2d(height + n, width, kernel)


KINDS: dict[str, Callable[[int, int, torch.device], Mod]] = {
    "causal": causal,
    "sliding 1024": sliding,
    "documents": documents,
    "natten 13x13": natten,
}
CHURNED = ("documents", "sliding 1024")


def mask_builders(peers: Sequence[str], device: torch.device) -> dict[str, Build]:
    """Return for each peer what builds its BlockMask."""
    eager = torch_flex_module().create_block_mask
    known: dict[str, Callable[[], Callable[..., object]]] = {
        OURS: lambda: flexattn.create_block_mask,
        "torch_flex": lambda: torch.compile(eager),
        "torch_flex_eager": lambda: eager,
    }

    def builder(peer: str) -> Build:
        create = known[peer]()
        return lambda mask, length: create(mask, None, None, length, length, device=device)

    return {peer: builder(peer) for peer in peers}


# One build.


@dataclass(frozen=True)
class Sample:
    """One build in seconds, and on a GPU the bytes that it took at its peak."""

    wall: float
    process: float
    peak: int | None

    def milliseconds(self, device: torch.device) -> float:
        """Return the time that counts on this device."""
        return (self.wall if device.type == "cuda" else self.process) * 1e3


def observe(run: Callable[[], Any], device: torch.device) -> tuple[Any, Sample]:
    """Return what `run` returns, and what it took with all that the device does for it."""
    on_gpu = device.type == "cuda"
    synchronize(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    until = time.perf_counter() + (0 if on_gpu else REST_S)
    while time.perf_counter() < until:  # asleep, the processor would slow down
        pass
    wall, process = time.perf_counter(), time.process_time()
    made = run()
    synchronize(device)
    wall, process = time.perf_counter() - wall, time.process_time() - process
    return made, Sample(wall, process, torch.cuda.max_memory_allocated(device) - before if on_gpu else None)


@contextlib.contextmanager
def allocations_raise(device: torch.device) -> Iterator[None]:
    """Let allocations beyond 3/4 of a CPU's free memory raise, as on a GPU: else the system may end the process."""
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        yield
        return
    free = int(re.findall(r"MemAvailable:\s+(\d+)", meminfo.read_text())[0]) << 10
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    bound = used + free * 3 // 4
    bound = bound if limits[0] == resource.RLIM_INFINITY else min(bound, limits[0])
    resource.setrlimit(resource.RLIMIT_AS, (bound, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def failure(peer: str, error: BaseException) -> str:
    """Return the note of a peer that raised: only flexattn's is an error."""
    return f"{'error' if peer == OURS else 'n/a'}: {one_line(error)}"


# flexattn's builds taken apart.


@dataclass(frozen=True)
class Anatomy:
    """What builds of flexattn's consist of: times are medians; blocks, launches and waits those of the last build."""

    blocks: int  # evaluated pair by pair
    launches: int
    waits: int
    cached: int  # of all `builds`, those that the mask cache served
    builds: int
    host_ms: float
    python_ms: float


@dataclass
class _Tally:
    launches: int = 0
    waits: int = 0
    waited: float = 0.0

    def launching(self, launch: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any, **kwargs: Any) -> None:
            self.launches += 1
            launch(*args, **kwargs)

        return counted

    def waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(of: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(of, Tensor) and not of.is_cuda:
                return wait(of, *args, **kwargs)
            self.waits += 1
            start = time.perf_counter()
            try:
                return wait(of, *args, **kwargs)
            finally:
                self.waited += time.perf_counter() - start

        return timed


def anatomy(build: Build, mods: Sequence[Mod], length: int, device: torch.device) -> Anatomy:
    """Build once from each mod, with launches and waits watched."""
    tally, host, python, mask = _Tally(), [], [], None
    hits = mask_cache.stats()["hits"]
    with contextlib.ExitStack() as patches:
        for kernel in flexattn.runtime.build.Kernel.__subclasses__():
            patches.enter_context(patch.object(kernel, "launch", tally.launching(kernel.launch)))
        for owner, name in WAITS:
            patches.enter_context(patch.object(owner, name, tally.waiting(getattr(owner, name))))
        for mod in mods:
            synchronize(device)
            tally.launches, tally.waits, tally.waited = 0, 0, 0.0
            start = time.perf_counter()
            mask = build(mod, length)
            host.append((time.perf_counter() - start) * 1e3)
            python.append(host[-1] - tally.waited * 1e3)
    cached = mask_cache.stats()["hits"] - hits
    blocks = mask.build_counts.blocks if mask is not None else 0
    return Anatomy(
        blocks, tally.launches, tally.waits, cached, len(mods), statistics.median(host), statistics.median(python)
    )


# Kinds and lengths, peers beside one another.


@dataclass(frozen=True)
class MaskResult(Result):
    """Times of one kind, length, peer and step, and what else is known of these builds."""

    wall: tuple[float, ...] = ()  # milliseconds
    peak_mib: float | None = None
    anatomy: Anatomy | None = None

    def record(self) -> dict[str, Any]:
        """Return what the JSON file holds of this result."""
        more = asdict(self.anatomy) if self.anatomy else {}
        return super().record() | {"wall_milliseconds": list(self.wall), "peak_mib": self.peak_mib, **more}


@dataclass
class Entry:
    """One peer at one kind and length, with the samples of each step."""

    kind: str
    length: int
    peer: str
    build: Build
    device: torch.device
    fresh: Iterator[Mod]
    note: str = ""
    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    anatomies: dict[str, Anatomy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.same = next(self.fresh)

    @property
    def fastest(self) -> float:
        """Seconds of the fastest build of any step."""
        return min(sample.wall for samples in self.samples.values() for sample in samples)

    @property
    def was_built(self) -> bool:
        return any(self.samples.values())

    def mod(self, step: str) -> Mod:
        return self.same if step == "repeated" else next(self.fresh)

    def attempt(self, step: str, label: str = "") -> None:
        """Build once and keep the sample under the step's name, or another; note a failure and slowness.

        A peer takes its turn as a training loop would: with its code in the caches, after a build that is not timed.
        """
        if not label and self.fastest < SHORT_S:
            self._guarded(lambda: self.build(self.mod(step), self.length))
        mod = self.mod(step)
        sample = self._guarded(lambda: observe(lambda: self.build(mod, self.length), self.device)[1])
        if sample is None:
            return
        again = self.was_built  # the first build may compile
        self.samples[label or step].append(sample)
        if again and self.peer != OURS and self.fastest > SLOW_S:
            self.note = f"n/a: {self.fastest:.0f} s for a build"

    def warm_up(self, step: str) -> None:
        """Build twice."""
        for _ in range(2):
            if not self.note:
                self.attempt(step, "warming up" if self.was_built else "first")

    def goes_on(self, step: str) -> bool:
        """Tell whether to take a further sample of a step."""
        samples = self.samples[step]
        return not self.note and (len(samples) < LEAST_ROUNDS or sum(s.wall for s in samples) < SLOW_S)

    def take_apart(self, step: str, builds: int) -> None:
        """Note the anatomy of builds of a step."""
        mods = [self.mod(step) for _ in range(builds)]
        found = self._guarded(lambda: anatomy(self.build, mods, self.length, self.device))
        if found is not None:
            self.anatomies[step] = found

    def _guarded(self, step: Callable[[], Any]) -> Any:
        try:
            with allocations_raise(self.device):
                return step()
        except Exception as error:
            self.note = failure(self.peer, error)
        gc.collect()  # the error's frames held what was allocated
        with contextlib.suppress(RuntimeError):  # of a device that an illegal access has spoiled
            torch.cuda.empty_cache()
        return None

    def results(self, steps: Sequence[str], host_peak: float | str | None) -> Iterator[MaskResult]:
        """Return the results of some steps, and the notes; `host_peak` is the MiB of a new closure, or a note."""
        work = f"{self.kind} {self.length}"
        peak_mib = host_peak if isinstance(host_peak, float) else None
        for step in steps:
            if samples := self.samples[step]:
                times = tuple(sample.milliseconds(self.device) for sample in samples)
                peaks = [sample.peak / MIB for sample in samples if sample.peak is not None]
                peak = max(peaks) if peaks else peak_mib if step == "new closure" else None
                wall = tuple(sample.wall * 1e3 for sample in samples)
                config = Config(work, self.peer, step)
                yield MaskResult(config, times, wall=wall, peak_mib=peak, anatomy=self.anatomies.get(step))
        for note in (self.note, host_peak):
            if note and isinstance(note, str):
                yield MaskResult(Config(work, self.peer, "any"), note=note)


def race(entries: Sequence[Entry], rounds: int, draw: random.Random) -> None:
    """Fill the entries of one kind and length: for each step all peers warm up, then take turns."""
    for step in ("repeated", "new closure"):
        for entry in entries:
            entry.warm_up(step)
        for _ in range(rounds):
            for entry in draw.sample(entries, len(entries)):
                if entry.goes_on(step):
                    entry.attempt(step)
        for entry in entries:
            if entry.peer == OURS and not entry.note:
                entry.take_apart(step, rounds)


def expected_slow(before: Entry | None, length: int) -> str:
    """Return why a peer of torch's need not try a length, from what a smaller one took; or nothing."""
    if before is None or before.peer == OURS:
        return ""
    seconds = before.fastest * (length / before.length) ** 2
    return f"n/a: {seconds:.0f} s expected from {before.length}" if seconds > SLOW_S else ""


def compare(settings: MaskSettings) -> list[MaskResult]:
    """Time all kinds at all lengths, from the smallest on."""
    device, draw = settings.device, random.Random(0)
    peaks = host_peaks(settings.lengths) if device.type == "cpu" and OURS in settings.peers else {}
    builders = mask_builders(settings.peers, device)
    last: dict[tuple[str, str], Entry] = {}
    results: list[MaskResult] = []
    lengths = sorted(set(settings.lengths))
    for length, (kind, make) in itertools.product(lengths, KINDS.items()):
        fresh = (make(length, n, device) for n in itertools.count())
        entries = []
        for peer, build in builders.items():
            before = last.get((kind, peer))
            if before is None or peer == OURS or not before.note:
                note = expected_slow(before, length)
                entries.append(Entry(kind, length, peer, build, device, fresh, note))
        race(entries, settings.rounds, draw)
        steps = ["first"] * (length == lengths[0]) + ["repeated", "new closure"]
        found: list[MaskResult] = []
        for entry in entries:
            last[kind, entry.peer] = entry
            found += entry.results(steps, peaks.get((kind, length)) if entry.peer == OURS else None)
        results += sorted(found, key=lambda result: [*steps, "any"].index(result.config.direction))
    return results


# The memory of a build on a CPU.


def in_child(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> Any:
    """Run `python -m` in a fresh process; return the JSON of its last line, or None where it fails, its errors told."""
    command = [sys.executable, "-m", *arguments]
    environ, root = os.environ | (environ or {}), Path(__file__).parent.parent
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def host_peaks(lengths: Sequence[int]) -> dict[tuple[str, int], float | str]:
    """Return MiB, or the note of a failure, for each kind and length; nothing where there is no /proc."""
    if not Path("/proc/self/clear_refs").exists():
        return {}
    # Buffers of 128 KiB and more go back to the system when they are freed: none hides in the heap from the next.
    found = in_child(["benchmarks.masks", *map(str, lengths)], {"MALLOC_MMAP_THRESHOLD_": str(2**17)})
    if found is None:
        return {(kind, n): "error: the process that measures memory failed" for kind in KINDS for n in lengths}
    return {(kind, length): peak for kind, length, peak in found}


def host_peaks_here(lengths: Sequence[int]) -> list[tuple[str, int, float | str]]:
    """Measure each kind and length in a fork of its own of this process, which has built small masks of all kinds."""
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    forks = multiprocessing.get_context("fork")
    for kind in KINDS:
        _build_small(kind, SMALL)
    found: list[tuple[str, int, float | str]] = []
    for kind, length in itertools.product(KINDS, lengths):
        try:
            with ProcessPoolExecutor(1, mp_context=forks) as pool:
                peak = pool.submit(_rise, kind, length).result()
        except Exception as error:
            peak = failure(OURS, error)
        found.append((kind, length, peak))
    return found


def _rise(kind: str, length: int) -> float:
    """Return by how many MiB the resident set rises at most in one build."""
    _build_small(kind, length)  # a fork has yet to read the pages of its parent's code
    mod = KINDS[kind](length, 3, CPU)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS; ru_maxrss would be that of the parent
    before = _resident("VmHWM")
    flexattn.create_block_mask(mod, None, None, length, length, device=CPU)
    return max(0.0, (_resident("VmHWM") - before) / 1024)


def _build_small(kind: str, length: int) -> None:
    """Build masks of few tokens from mods made for `length`: a width that mods divide by is traced anew."""
    mask_cache.clear()
    tokens = min(length, SMALL)
    for n in range(3):
        flexattn.create_block_mask(KINDS[kind](length, n, CPU), None, None, tokens, tokens, device=CPU)


def _resident(name: str) -> int:
    return int(re.findall(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[0])


# Many new closures.


@dataclass(frozen=True)
class Churn:
    """Builds of new closures of one kind, after a first one."""

    kind: str
    length: int
    milliseconds: tuple[float, ...] = ()
    compilations: int = 0
    traces: int = 0
    cached: int = 0
    note: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.note or self.compilations or self.traces)

    def __str__(self) -> str:
        if self.note:
            return f"builds of new {self.kind} closures at {self.length:,} tokens: {self.note}"
        ms = self.milliseconds
        return (
            f"{len(ms)} builds of new {self.kind} closures at {self.length:,} tokens: "
            f"median {statistics.median(ms):.4f} ms ({min(ms):.4f}..{max(ms):.4f}), {self.compilations} compilations, "
            f"{self.traces} traces, {self.cached} from the mask cache"
        )


def kernels_made() -> int:
    """Return how many kernels this process has compiled or read from the disk."""
    counts = flexattn.runtime.build.stats()
    return counts["compiles"] + counts["disk_hits"]


def churn(settings: MaskSettings, kind: str) -> Churn:
    """Build from one new closure after the other, flexattn alone, with an empty mask cache."""
    builds, length = settings.churn
    device, build = settings.device, mask_builders([OURS], settings.device)[OURS]
    mask_cache.clear()
    counters = (kernels_made, lambda: flexattn.trace.trace.stats()["traces"], lambda: mask_cache.stats()["hits"])
    taken, before = [], []
    try:
        for n in range(builds + 1):
            mod = KINDS[kind](length, n, device)
            taken.append(observe(partial(build, mod, length), device)[1].milliseconds(device))
            before = before or [count() for count in counters]
    except Exception as error:
        return Churn(kind, length, note=failure(OURS, error))
    counts = [count() - was for count, was in zip(counters, before, strict=True)]
    return Churn(kind, length, tuple(taken[1:]), *counts)


# A mask's share of the attention that uses it.


@dataclass(frozen=True)
class Share:
    """Milliseconds of a mask over new documents and of the forward pass that follows."""

    work: str
    mask: tuple[float, ...] = ()
    forward: tuple[float, ...] = ()
    note: str = ""

    @property
    def percent(self) -> float:
        """Return the mask's part of both."""
        mask, forward = statistics.median(self.mask), statistics.median(self.forward)
        return 100 * mask / (mask + forward)

    def record(self) -> dict[str, Any]:
        """Return what the JSON file holds of this share."""
        return asdict(self) | ({} if self.note else {"percent": self.percent})

    def __str__(self) -> str:
        if self.note:
            return f"{self.work}: {self.note}"
        mask, forward = statistics.median(self.mask), statistics.median(self.forward)
        return (
            f"{self.work}: mask {mask:.4f} ms (new closure), attention forward {forward:.3f} ms, "
            f"share {self.percent:.2f} %"
        )


def share(settings: MaskSettings) -> Share:
    """Time a new mask and its attention in turns; the documents of each round stand in another order."""
    packed, device, draw = settings.packed, settings.device, random.Random(0)
    lengths = [draw.randint(packed.shortest, packed.longest) for _ in range(packed.documents)]
    work = Work(
        "packed", 1, packed.heads, sum(lengths), packed.head_dim, lambda *_: Mods(), lambda _: None,
        kv_heads=packed.kv_heads,
    )  # fmt: skip
    name = f"{packed.documents} ragged documents of {packed.shortest:,} to {packed.longest:,} tokens ({work.shape})"
    build = mask_builders([OURS], device)[OURS]
    masks, forwards = [], []

    def one_round(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
        mod = packed_documents(draw.sample(lengths, len(lengths)), device)
        mask, taken = observe(lambda: build(mod, work.length), device)
        masks.append(taken.milliseconds(device))
        run = partial(flexattn.flex_attention, *qkv, None, mask, enable_gqa=True)
        forwards.append(observe(run, device)[1].milliseconds(device))

    try:
        inputs = make_inputs(work, device, settings.dtype, grad=False)
        for _ in range(2 + settings.rounds):
            one_round(inputs.qkv)
    except Exception as error:
        return Share(name, note=failure(OURS, error))
    return Share(name, tuple(masks[2:]), tuple(forwards[2:]))


# All of it.


@dataclass(frozen=True)
class Report:
    """What the mask part found."""

    device: torch.device
    results: Sequence[MaskResult]
    churns: Sequence[Churn]
    share: Share | None

    @property
    def failed(self) -> bool:
        """Whether anything of flexattn broke, or anything was traced or compiled again."""
        broken = any(found.failed for found in (*self.results, *self.churns))
        return broken or (self.share is not None and bool(self.share.note))

    def record(self) -> dict[str, Any]:
        """Return what the JSON file holds of the mask part."""
        return {
            "clock": "wall" if self.device.type == "cuda" else "process",
            "results": [result.record() for result in self.results],
            "churn": [asdict(found) | {"failed": found.failed} for found in self.churns],
            "share": self.share.record() if self.share else None,
        }

    def __str__(self) -> str:
        lines = [str(found) for found in (*self.churns, self.share) if found]
        return "\n\n".join([masks_table(self.results, self.device), "\n".join(lines)])


def measure_masks(settings: MaskSettings) -> Report:
    """Measure all of the mask part; what concerns flexattn alone only where it is among the peers."""
    results = compare(settings)
    ours = OURS in settings.peers
    churns = [churn(settings, kind) for kind in CHURNED] if ours else []
    return Report(settings.device, results, churns, share(settings) if ours else None)


def masks_table(results: Sequence[MaskResult], device: torch.device) -> str:
    """Return one line for each measured thing and peer, without the columns that are empty."""
    on_gpu = device.type == "cuda"
    headers = ["mask", "when", "peer", "ms" if on_gpu else "process ms", "min..max", "wall ms", "peak MiB"]
    headers += ["blocks", "launches", "waits", "host ms", "python ms", "cached", "note"]
    rows = [_row(result, on_gpu) for result in results]
    kept = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    return table([headers[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _row(result: MaskResult, on_gpu: bool) -> list[str]:
    config, found, ms = result.config, result.anatomy, result.milliseconds
    times = [""] * 3
    if ms:
        wall = "" if on_gpu else f"{statistics.median(result.wall):.4f}"
        times = [f"{result.median:.4f}", f"{min(ms):.4f}..{max(ms):.4f}", wall]
    peak = "" if result.peak_mib is None else f"{result.peak_mib:.2f}"
    parts = [""] * 6
    if found is not None:
        parts = [f"{found.blocks}", f"{found.launches}", f"{found.waits}"]
        parts += [f"{found.host_ms:.4f}", f"{found.python_ms:.4f}", f"{found.cached}/{found.builds}"]
    return [config.work, config.direction, config.peer, *times, peak, *parts, result.note]


if __name__ == "__main__":  # the process that host_peaks starts
    print(json.dumps(host_peaks_here([int(length) for length in sys.argv[1:]])))
