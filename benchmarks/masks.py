"""Block masks: the cost of building them, compared with torch's own, for each kind and length.

    python -m benchmarks.overhead --parts masks

Times on a GPU are wall times, with a device sync before and after. Times on a CPU are process times over all threads,
with the wall time next to them. `first` is the first build of a kind in this process, with peers in the given order,
including everything that is imported, traced, compiled or read from a disk cache. `repeated` builds from the same
mask_mod object, which flexattn may serve from its mask cache. `new closure` builds from a new function over new tensors
and another number; creating these is not timed. `repeated` and `new closure` are warmed up by two builds. Then the
peers take turns in random order, round by round. If a build takes less than SHORT_S, a turn begins with an untimed
build, because the peers evict each other's code from the processor's caches. A torch peer that fails, takes more than
SLOW_S per build, or would take that long if its time grew with the square of the length, is listed with the reason and
skipped at greater lengths.

Memory is the peak of a build beyond what was allocated before, including the mask that it returns. On a GPU it is the
maximum over all rounds. On a CPU it is the growth of the resident set of a process that has built small masks before
and is used only for this build.

Further builds of flexattn are analyzed. `launches` counts generated kernels, `waits` the calls that wait for the
device (WAITS). Host time ends when create_block_mask returns. `python` is the host time outside of these calls,
including launches. `cached` counts the builds served by the mask cache.
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
SLOW_S = 20.0  # limit for a torch peer's build, and for a step once it has its minimum of rounds
LEAST_ROUNDS = 3
SHORT_S = 0.01  # a shorter build is preceded by an untimed one
REST_S = 0.001  # pause before process time is read: threads of the previous build may spin for half of that
WAITS = ((Tensor, "tolist"), (Tensor, "item"), (Tensor, "cpu"), (torch, "equal"), (torch.cuda.Stream, "synchronize"))
MIB = 2**20
CPU = torch.device("cpu")
SMALL = 256  # tokens of a mask for warming up

Build = Callable[[Mod, int], Any]  # (mask_mod, length) -> BlockMask


@dataclass(frozen=True)
class Packed:
    """Attention over ragged documents packed into one row, causal in each."""

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
    """What the mask part measures, and on which device."""

    peers: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype  # of the packed attention
    rounds: int
    lengths: tuple[int, ...]
    churn: tuple[int, int]  # builds of new closures, and their length
    packed: Packed


# Kinds: (length, n, device) -> mask_mod. Every n gives a new function over new tensors and another number.


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
    """Return the mask_mod of NATTEN 13 x 13 on an approximately square image without its last n rows."""
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
    """Return for each peer the function that builds its BlockMask."""
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
    """One build in seconds, and on a GPU its peak memory in bytes."""

    wall: float
    process: float
    peak: int | None

    def milliseconds(self, device: torch.device) -> float:
        """Return the time that is reported for this device."""
        return (self.wall if device.type == "cuda" else self.process) * 1e3


def observe(run: Callable[[], Any], device: torch.device) -> tuple[Any, Sample]:
    """Return the result of `run`, and its cost including its work on the device."""
    on_gpu = device.type == "cuda"
    synchronize(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    until = time.perf_counter() + (0 if on_gpu else REST_S)
    while time.perf_counter() < until:  # busy, because the processor would slow down while asleep
        pass
    wall, process = time.perf_counter(), time.process_time()
    made = run()
    synchronize(device)
    wall, process = time.perf_counter() - wall, time.process_time() - process
    return made, Sample(wall, process, torch.cuda.max_memory_allocated(device) - before if on_gpu else None)


@contextlib.contextmanager
def allocations_raise(device: torch.device) -> Iterator[None]:
    """Let allocations beyond 3/4 of a CPU's free memory raise, as on a GPU. Else the system may kill the process."""
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
    """Return the note for a peer that raised. Only flexattn's is an error."""
    return f"{'error' if peer == OURS else 'n/a'}: {one_line(error)}"


# Analysis of flexattn's builds.


@dataclass(frozen=True)
class Anatomy:
    """The parts of flexattn's builds. Times are medians; blocks, launches and waits are those of the last build."""

    blocks: int  # evaluated pair by pair
    launches: int
    waits: int
    cached: int  # of all `builds`, the number served by the mask cache
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
    """Build once from each mod, and record launches and waits."""
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


# Kinds and lengths, all peers.


@dataclass(frozen=True)
class MaskResult(Result):
    """Times of one kind, length, peer and step, and other data of these builds."""

    wall: tuple[float, ...] = ()  # milliseconds
    peak_mib: float | None = None
    anatomy: Anatomy | None = None

    def record(self) -> dict[str, Any]:
        """Return the JSON record of this result."""
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
        """Build once and keep the sample under the name of the step, or `label`. Note failures and slow builds.

        A peer takes its turn as in a training loop: with its code in the caches, after an untimed build.
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
        """Return whether to take another sample of a step."""
        samples = self.samples[step]
        return not self.note and (len(samples) < LEAST_ROUNDS or sum(s.wall for s in samples) < SLOW_S)

    def take_apart(self, step: str, builds: int) -> None:
        """Record the anatomy of builds of a step."""
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
        gc.collect()  # the error's frames referenced the allocations
        with contextlib.suppress(RuntimeError):  # the device may be unusable after an illegal access
            torch.cuda.empty_cache()
        return None

    def results(self, steps: Sequence[str], host_peak: float | str | None) -> Iterator[MaskResult]:
        """Return the results of some steps, and the notes. `host_peak` is the MiB of a new closure, or a note."""
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
    """Fill the entries of one kind and length: in each step all peers warm up, then take turns."""
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
    """Return why a torch peer need not try a length, judged by a smaller length; or an empty string."""
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
    """Run `python -m` in a fresh process. Return the JSON of its last line, or print errors and return None."""
    command = [sys.executable, "-m", *arguments]
    environ, root = os.environ | (environ or {}), Path(__file__).parent.parent
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def host_peaks(lengths: Sequence[int]) -> dict[tuple[str, int], float | str]:
    """Return MiB, or the note of a failure, for each kind and length; nothing if there is no /proc."""
    if not Path("/proc/self/clear_refs").exists():
        return {}
    # Buffers of 128 KiB and more are returned to the system when freed, so none stays in the heap for the next build.
    found = in_child(["benchmarks.masks", *map(str, lengths)], {"MALLOC_MMAP_THRESHOLD_": str(2**17)})
    if found is None:
        return {(kind, n): "error: the process that measures memory failed" for kind in KINDS for n in lengths}
    return {(kind, length): peak for kind, length, peak in found}


def host_peaks_here(lengths: Sequence[int]) -> list[tuple[str, int, float | str]]:
    """Measure each kind and length in its own fork of this process, which has built small masks of all kinds."""
    torch.set_num_threads(1)  # a fork does not inherit its parent's threads
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
    """Return the maximum growth of the resident set in one build, in MiB."""
    _build_small(kind, length)  # a fork first has to read the pages of its parent's code
    mod = KINDS[kind](length, 3, CPU)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS; ru_maxrss would be that of the parent
    before = _resident("VmHWM")
    flexattn.create_block_mask(mod, None, None, length, length, device=CPU)
    return max(0.0, (_resident("VmHWM") - before) / 1024)


def _build_small(kind: str, length: int) -> None:
    """Build masks of few tokens from mods created for `length`, because a width that mods divide by is retraced."""
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
    """Return how many kernels this process has compiled or loaded from disk."""
    counts = flexattn.runtime.build.stats()
    return counts["compiles"] + counts["disk_hits"]


def churn(settings: MaskSettings, kind: str) -> Churn:
    """Build from one new closure after the other with flexattn only, with an empty mask cache."""
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


# The cost of a mask relative to the attention that uses it.


@dataclass(frozen=True)
class Share:
    """Milliseconds of a mask over new documents and of the forward that follows."""

    work: str
    mask: tuple[float, ...] = ()
    forward: tuple[float, ...] = ()
    note: str = ""

    @property
    def percent(self) -> float:
        """Return the mask's percentage of the sum."""
        mask, forward = statistics.median(self.mask), statistics.median(self.forward)
        return 100 * mask / (mask + forward)

    def record(self) -> dict[str, Any]:
        """Return the JSON record of this share."""
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
    """Time a new mask and its attention, interleaved. The order of the documents differs in each round."""
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


# The whole mask part.


@dataclass(frozen=True)
class Report:
    """Results of the mask part."""

    device: torch.device
    results: Sequence[MaskResult]
    churns: Sequence[Churn]
    share: Share | None

    @property
    def failed(self) -> bool:
        """Whether anything of flexattn failed, or was traced or compiled again."""
        broken = any(found.failed for found in (*self.results, *self.churns))
        return broken or (self.share is not None and bool(self.share.note))

    def record(self) -> dict[str, Any]:
        """Return the JSON record of the mask part."""
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
    """Measure the whole mask part. Steps that concern only flexattn run only if it is among the peers."""
    results = compare(settings)
    ours = OURS in settings.peers
    churns = [churn(settings, kind) for kind in CHURNED] if ours else []
    return Report(settings.device, results, churns, share(settings) if ours else None)


def masks_table(results: Sequence[MaskResult], device: torch.device) -> str:
    """Return one line per measurement and peer, without empty columns."""
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


if __name__ == "__main__":  # the process started by host_peaks
    print(json.dumps(host_peaks_here([int(length) for length in sys.argv[1:]])))
