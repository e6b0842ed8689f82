"""Settings: every environment variable that flexattn reads, parsed and checked once."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexattn.errors import ArgumentError, message

_TRUE = frozenset({"1", "true", "on", "yes"})
_FALSE = frozenset({"", "0", "false", "off", "no"})


@dataclass(frozen=True)
class Settings:
    """How flexattn behaves in this process."""

    cache_dir: Path | None  # FLEXATTN_CACHE_DIR: generated kernels; None where the user has no home
    debug: bool  # FLEXATTN_DEBUG: tell each stage of a first call on stderr
    print_source: bool  # FLEXATTN_DUMP=1: print generated sources on stderr
    dump_dir: Path | None  # FLEXATTN_DUMP=folder: copy generated sources and PTX there


@functools.cache
def settings() -> Settings:
    """Return this process' settings. Tests that change the environment call `settings.cache_clear()`."""
    return read_settings(os.environ)


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Parse `environment`; an ArgumentError names the variable that is wrong."""
    dump = environment.get("FLEXATTN_DUMP", "")
    is_switch = dump.lower() in _TRUE | _FALSE
    return Settings(
        cache_dir=_cache_dir(environment),
        debug=_switch(environment, "FLEXATTN_DEBUG"),
        print_source=is_switch and dump.lower() in _TRUE,
        dump_dir=None if is_switch else _folder("FLEXATTN_DUMP", dump),
    )


def debug(stage: str, detail: object) -> None:
    """Tell what `stage` did, where FLEXATTN_DEBUG asks for it."""
    if settings().debug:
        print(f"flexattn {stage}: {detail}", file=sys.stderr, flush=True)


def _switch(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "").strip().lower()
    if value not in _TRUE | _FALSE:
        raise ArgumentError(message(name, repr(environment[name]), "1 or 0", f"Set {name}=1, or unset it."))
    return value in _TRUE


def _folder(name: str, value: str) -> Path:
    try:
        path = Path(value).expanduser().absolute()
    except RuntimeError:
        raise ArgumentError(message(name, repr(value), "a path without '~'", "This user has no home.")) from None
    if path.exists() and not path.is_dir():
        raise ArgumentError(message(name, repr(value), "a folder", "Name a folder; it is made where missing."))
    return path


def _cache_dir(environment: Mapping[str, str]) -> Path | None:
    if value := environment.get("FLEXATTN_CACHE_DIR"):
        return _folder("FLEXATTN_CACHE_DIR", value)
    base = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG standard: a relative path counts as unset
        return Path(base) / "flexattn"
    try:
        return Path.home() / ".cache" / "flexattn"
    except RuntimeError:
        return None
