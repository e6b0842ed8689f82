"""A process that runs cases: it reads what to do from stdin and answers on stdout, a line of JSON each.

What a GPU leaves behind after an error no later call can be trusted with: then the process ends after its answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import time
import unittest.mock
import warnings
from dataclasses import asdict
from typing import Any

import torch

import flexattn
from flexattn.runtime import launch
from fuzz.cases import SPACES, Case, Space
from fuzz.compare import ours, pose
from fuzz.draw import draw_case
from fuzz.judge import Verdict, try_case
from fuzz.shrink import shrink

POISONED = ("CUDA error", "AcceleratorError", "CUDA driver error", "illegal memory access")


def on_card(space: Space) -> contextlib.AbstractContextManager[None]:
    """Run kernels as PTX, where they are those of a card that is not here."""
    if not space.card:
        return contextlib.nullcontext()
    from emulation import emulated  # it imports Triton

    return emulated(space.card)


def run_case(space: Space, case: Case, engines: list[str]) -> dict[str, Verdict]:
    return {name: try_case(case, space.device, space.engines[name]) for name in engines}


def shrink_case(space: Space, case: Case, engine: str, seconds: float) -> Case:
    """Return the plainest case that fails in this engine as this one does."""
    options = space.engines[engine]
    first = try_case(case, space.device, options)
    return shrink(case, lambda simpler: first.is_like(try_case(simpler, space.device, options)), seconds)


def build_case(space: Space, case: Case, engines: list[str]) -> None:
    """Compile what a case needs, on this device, and launch none of it."""
    with unittest.mock.patch.object(launch.Launch, "__call__", lambda self, problem, tensors: None):
        for name in engines:
            with contextlib.suppress(Exception):
                ours(pose(case, space.device), space.engines[name])


def kernels_of(space: Space, case: Case) -> list[str]:
    """Return the kernels that a case on a GPU has by default."""
    if space.device != "cuda":
        return []
    with contextlib.suppress(Exception):
        call = pose(case, space.device).call
        for x in (call.query, *call.learned):
            x.requires_grad_(bool(case.needs))
        explained: Any = flexattn.explain(
            call.query, call.key, call.value, call.score_mod, call.mask, call.scale, enable_gqa=True,
            kernel_options=call.options,
        )  # fmt: skip
        return [plan.spec.name for plan in explained.plans]
    return []


def answer(space: Space, request: dict[str, Any]) -> dict[str, Any]:
    """Do one thing: build, run or shrink a case."""
    case, engines, started = draw_case(space, request["seed"], request["index"]), request["engines"], time.monotonic()
    match request["do"]:
        case "build":
            build_case(space, case, engines)
            return {}
        case "shrink":
            return {"shrunk": repr(shrink_case(space, case, engines[0], request["seconds"]))}
    verdicts = run_case(space, case, engines)
    kernels = [] if any(v.failed for v in verdicts.values()) else kernels_of(space, case)
    seconds = time.monotonic() - started
    return {"verdicts": {name: asdict(v) for name, v in verdicts.items()}, "kernels": kernels, "seconds": seconds}


def serve(space: Space) -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anyone prints is no answer
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(json.dumps({"ready": True}), file=answers)
    with on_card(space):
        for line in sys.stdin:
            found = answer(space, json.loads(line))
            ends = any(word in str(found) for word in POISONED)
            print(json.dumps(found | {"ends": ends}), file=answers)
            if ends:
                return


if __name__ == "__main__":
    serve(SPACES[sys.argv[1]])
