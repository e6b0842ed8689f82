"""kernel_cache: list the kernels that are kept on disk, or remove them.

python -m flexattn cache
python -m flexattn cache list
python -m flexattn cache clear
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
import warnings
from pathlib import Path

from flexattn.machine.cache_size import items, remove_kernels, report
from flexattn.machine.kernel_store import KernelStore, open_store, shared_store
from flexattn.process.config import settings

NAME = "cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions on the cache."""
    parser.set_defaults(run=show_size)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    listed = actions.add_parser("list", help="print each kernel: last use, size, target and name; the latest first")
    listed.set_defaults(run=show_kernels)
    cleared = actions.add_parser("clear", help="remove all kernels; tiles that flexattn.tune stored are kept")
    cleared.set_defaults(run=clear)


def kept() -> tuple[str, bool]:
    """Return one line about the kernel cache directory, and whether kernels can be kept there."""
    folder = settings().cache_dir
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = open_store(folder)
    if store is not None and os.access(store.root, os.W_OK):
        return report(store, settings().cache_size), True
    if store is not None:
        kernels = sum(item.is_kernel for item in items(store))
        return f"{store.root}: {kernels:,} kernels, read-only: new ones are kept only as long as their process", False
    if caught:
        return str(caught[-1].message), False
    fix = "Set FLEXATTN_CACHE_DIR to a folder that you own and may write."
    return f"{folder}: no kernels can be kept, so each process compiles them again: {_obstacle(folder)}. {fix}", False


def shared_line(folder: Path) -> str:
    """Return one line about the shared directory."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shared_store.cache_clear()
        store = shared_store(folder)
    if store is None:
        return str(caught[-1].message) if caught else f"{folder}: not there, or not readable"
    return f"{store.root}: {sum(item.is_kernel for item in items(store)):,} kernels (FLEXATTN_SHARED_CACHE_DIR)"


def _obstacle(folder: Path | None) -> str:
    """Return why a folder cannot be written."""
    if folder is None:
        return "there is no home folder"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return "it belongs to another user, or others can write there"
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links
        return getattr(error, "strerror", None) or str(error)


def show_size(chosen: argparse.Namespace) -> int:
    """Print one line about the kernel cache directory."""
    text, works = kept()
    print(text)
    if (shared := settings().shared_cache_dir) is not None:
        print(shared_line(shared))
    return int(not works)


run = show_size


def show_kernels(chosen: argparse.Namespace) -> int:
    """Print a line for each kernel."""
    if (store := open_store(settings().cache_dir)) is None:
        return show_size(chosen)
    kernels = sorted((item for item in items(store) if item.is_kernel), key=lambda item: -item.used)
    if not kernels:
        print(f"{store.root}: no kernels")
    for item in kernels:
        used = datetime.datetime.fromtimestamp(item.used).strftime("%Y-%m-%d %H:%M")
        name, target = _name_and_target(store, item.name)
        print(f"{used}  {item.bytes / 2**10:9,.1f} KiB  {target:<8}  {name}")
    return 0


def clear(chosen: argparse.Namespace) -> int:
    """Remove all kernels."""
    if (store := open_store(settings().cache_dir)) is None:
        return show_size(chosen)
    kernels, size = remove_kernels(store)
    print(f"{store.root}: removed {kernels:,} kernels, {size / 2**20:,.1f} MiB")
    return 0


def _name_and_target(store: KernelStore, digest: str) -> tuple[str, str]:
    """Return what the file of a kernel says. Another process may remove it meanwhile."""
    try:
        file = next((store.root / digest).glob("*.py"))
        head = [line for line in file.read_text().splitlines()[:40] if line.startswith("# flexattn ")]
    except (OSError, StopIteration):
        return digest, "?"
    return file.stem, head[0].rpartition(", ")[2] if head else "?"
