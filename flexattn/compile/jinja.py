"""jinja: the jinja2 environment that renders the templates. Compiled templates are kept next to the kernels on disk.

Importing jinja2 takes 25 ms and compiling the templates of one call 100 ms, so only what renders imports this module,
and a template is compiled once per machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket

from flexattn.machine.kernel_store import KernelStore, open_store
from flexattn.process.config import settings

_FOLDER = "templates"
_VERSIONS = f"{jinja2.__version__} {sys.implementation.cache_tag} {sys.hexversion}"
_CHECKSUM = hashlib.sha256().digest_size  # bytes at the start of a file


class _CompiledTemplates(jinja2.BytecodeCache):
    """Files named for the template's name and text. A file that is missing, damaged or not ours is not used."""

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        return name

    def load_bytecode(self, bucket: Bucket) -> None:
        store = open_store(settings().cache_dir)
        if store is None:
            return
        with contextlib.suppress(OSError):
            content = _file(store, bucket).read_bytes()
            if hashlib.sha256(content[_CHECKSUM:]).digest() == content[:_CHECKSUM]:
                bucket.bytecode_from_string(content[_CHECKSUM:])

    def dump_bytecode(self, bucket: Bucket) -> None:
        store = open_store(settings().cache_dir)
        if store is None:
            return
        code = bucket.bytecode_to_string()
        with contextlib.suppress(OSError), store.staging() as aside:
            fresh = aside / "template"
            fresh.write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(fresh, _file(store, bucket))


def _file(store: KernelStore, bucket: Bucket) -> Path:
    name = hashlib.sha256(f"{_VERSIONS} {bucket.key} {bucket.checksum}".encode()).hexdigest()[:32]
    return store.folder(_FOLDER) / name


def make_environment(folder: Path) -> jinja2.Environment:
    """Return a new environment for the templates of a folder."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        cache_size=-1,  # unbounded: jinja2's LRU cache has a lock, which may be held when the process forks
        bytecode_cache=_CompiledTemplates(),
    )
