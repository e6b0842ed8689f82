"""arguments: options that several commands take. What is wrong with one is found before the work of the command."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from flexattn.errors import ArgumentError, message
from flexattn.machine.target import named

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # that an engine computes
# The GPUs whose shared memory or matrix units the plans know. Python code may name others.
TARGETS = (
    "sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121",
    "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201",
)  # fmt: skip


def dtype_of(text: str) -> torch.dtype:
    """Return the dtype of a name such as bfloat16."""
    if (found := getattr(torch, text, None)) not in _DTYPES:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise argparse.ArgumentTypeError(f"found {text!r}, expected one of {expected}")
    return found


def device_of(text: str) -> torch.device:
    """Return a device that this machine has."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise argparse.ArgumentTypeError(f"found {text!r}, but torch finds {count or 'no'} GPU{'s' * (count > 1)}")
    return device


def positive(text: str) -> int:
    """Return a number that is at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number >= 1")
    return int(text)


def target_of(text: str) -> str:
    """Return the name of a GPU architecture that the plans know: a misspelled one would be planned as another."""
    if (text.removesuffix("a") not in TARGETS and text not in TARGETS) or named(text) is None:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected one of {', '.join(TARGETS)}")
    return text


def check_output(argument: str, path: Path, endings: tuple[str, ...] = ()) -> None:
    """Raise ArgumentError if a file cannot be written there."""
    found = repr(str(path))
    if endings and path.suffix.removeprefix(".").lower() not in endings:
        fix = f"Write for example --{argument} {path.with_suffix('.png').name}."
        raise ArgumentError(message(argument, found, f"a name that ends with one of {', '.join(endings)}", fix))
    if path.is_dir():
        raise ArgumentError(message(argument, f"the folder {found}", "a file", "Add the name of a file."))
    folder = path.parent
    if not folder.is_dir():
        fix = f"Create the folder {str(folder)!r}, or choose another one."
        raise ArgumentError(message(argument, found, "a file in an existing folder", fix))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentError(message(argument, found, "a file that you may write", "Choose another folder."))


@contextlib.contextmanager
def writing(argument: str, path: Path) -> Iterator[None]:
    """Raise ArgumentError if a write to this file fails all the same, as on a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename not in (None, str(path), path):
            raise
        found = f"{str(path)!r} ({error.strerror})"
        raise ArgumentError(message(argument, found, "a file that can be written", "Choose another one.")) from None
