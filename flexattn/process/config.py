"""Settings: every environment variable that flexattn reads, parsed and checked once."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from flexattn.errors import ArgumentError, message
from flexattn.process.frozen_class import frozen

_TRUE = frozenset({"1", "true", "on", "yes"})
_FALSE = frozenset({"", "0", "false", "off", "no"})
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
CACHE_SIZE = 2**30  # default FLEXATTN_CACHE_SIZE in bytes, enough for thousands of kernels

# What FLEXATTN_WITHOUT may name.
MECHANISMS = ("bits", "early_keys", "fixed_reference", "hopper", "one_launch", "stripes", "tiles", "trimmed_runs")

COMPILE_PROCESSES = 4  # default FLEXATTN_COMPILE_PROCESSES; a training step needs at most that many large kernels


@frozen
class Settings:
    """Settings of this process, from environment variables."""

    cache_dir: Path | None  # FLEXATTN_CACHE_DIR: generated kernels; None if the user has no home directory
    shared_cache_dir: Path | None  # FLEXATTN_SHARED_CACHE_DIR: kernels that are only read; None: no such directory
    cache_size: int | None  # FLEXATTN_CACHE_SIZE: maximum bytes of the cache; None: no limit
    compile_processes: int  # FLEXATTN_COMPILE_PROCESSES: most processes that compile kernels ahead; 0: none
    debug: bool  # FLEXATTN_DEBUG: log each stage of a first call on stderr
    progress: bool  # FLEXATTN_PROGRESS: print lines on stderr about work that takes long
    print_source: bool  # FLEXATTN_DUMP=1: print generated sources on stderr
    dump_dir: Path | None  # FLEXATTN_DUMP=directory: copy generated sources and PTX there
    without: frozenset[str]  # FLEXATTN_WITHOUT: the names of MECHANISMS that no plan uses


@functools.cache
def settings() -> Settings:
    """Return this process's settings. Tests that change the environment call `settings.cache_clear()`."""
    return read_settings(os.environ)


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Parse `environment`. Raise an ArgumentError that names an invalid variable."""
    dump = environment.get("FLEXATTN_DUMP", "")
    shared = environment.get("FLEXATTN_SHARED_CACHE_DIR")
    is_switch = dump.lower() in _TRUE | _FALSE
    return Settings(
        cache_dir=_cache_dir(environment),
        shared_cache_dir=_folder("FLEXATTN_SHARED_CACHE_DIR", shared) if shared else None,
        cache_size=_size(environment, "FLEXATTN_CACHE_SIZE", CACHE_SIZE),
        compile_processes=_count(environment, "FLEXATTN_COMPILE_PROCESSES", COMPILE_PROCESSES),
        debug=_switch(environment, "FLEXATTN_DEBUG", False),
        progress=_switch(environment, "FLEXATTN_PROGRESS", True),
        print_source=is_switch and dump.lower() in _TRUE,
        dump_dir=None if is_switch else _folder("FLEXATTN_DUMP", dump),
        without=_names(environment, "FLEXATTN_WITHOUT", MECHANISMS),
    )


def _switch(environment: Mapping[str, str], name: str, default: bool) -> bool:
    value = environment.get(name, "").strip().lower()
    if value not in _TRUE | _FALSE:
        raise ArgumentError(message(name, repr(environment[name]), "1 or 0", f"Set {name}=1, or unset it."))
    return value in _TRUE if value else default


def _names(environment: Mapping[str, str], variable: str, allowed: tuple[str, ...]) -> frozenset[str]:
    found = {name.strip().lower() for name in environment.get(variable, "").split(",")} - {""}
    if unknown := sorted(found.difference(allowed)):
        fix = f"Set {variable}={','.join(allowed)} or a part of it, or unset it."
        raise ArgumentError(message(variable, repr(unknown[0]), f"names of {', '.join(allowed)}", fix))
    return frozenset(found)


def _count(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, "").strip()
    if not value:
        return default
    if re.fullmatch(r"[0-9]{1,4}", value) is None:
        raise ArgumentError(message(name, repr(value), "a number of processes", f"Set {name}=0, or unset it."))
    return int(value)


def _size(environment: Mapping[str, str], name: str, default: int) -> int | None:
    value = environment.get(name, "").strip().upper()
    if not value:
        return default
    match = re.fullmatch(r"([0-9]{1,15})([KMGT]?)(?:I?B)?", value)
    if match is None:
        fix = f"Set {name}=2G, or unset it."
        raise ArgumentError(message(name, repr(environment[name]), "bytes, e.g. 500M or 2G, or 0 for no limit", fix))
    return int(match[1]) * _UNITS[match[2]] or None


def _folder(name: str, value: str) -> Path:
    try:
        path = Path(value).expanduser().absolute()
    except RuntimeError:
        raise ArgumentError(message(name, repr(value), "a path without '~'", "This user has no home.")) from None
    try:
        is_possible = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, PermissionError):  # it is created on first use, which reports what is wrong
        is_possible = True
    except OSError as error:  # a file on the path, a cycle of links, a name that is too long
        found = f"{value[:200]!r} ({error.strerror})"
        raise ArgumentError(message(name, found, "a folder", "Pass a folder; it is created if missing.")) from None
    if not is_possible:
        raise ArgumentError(message(name, repr(value), "a folder", "Pass a folder; it is created if missing."))
    return path


def _cache_dir(environment: Mapping[str, str]) -> Path | None:
    if value := environment.get("FLEXATTN_CACHE_DIR"):
        return _folder("FLEXATTN_CACHE_DIR", value)
    base = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG standard: ignore a relative path
        return Path(base) / "flexattn"
    try:
        return Path.home() / ".cache" / "flexattn"
    except RuntimeError:
        return None
