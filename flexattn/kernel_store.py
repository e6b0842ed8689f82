"""KernelStore: built kernels on disk, a folder per digest that is complete or absent, closed to other users.

root/<digest>/      the generated source, the compiled files and manifest.json with the sha256 of each
root/locks/         one file lock for each first byte of a digest; a dead process holds none
root/triton/        Triton's own C stubs
root/tiles.json     tiles tuned on this machine (tile_choice.py)
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flexattn.config import debug

try:
    import fcntl
except ImportError:  # Windows has no Triton either; the renames alone keep entries whole
    fcntl = None

_MANIFEST = "manifest.json"
_STAGING = ".new-"
_STAGING_AGE = 24 * 3600  # seconds after which a staging folder must be that of a dead process


@dataclass(frozen=True)
class KernelStore:
    root: Path

    def find(self, digest: str) -> Path | None:
        """Return the folder of an entry that is ours and unchanged since it was written, else None."""
        folder = self.root / digest
        if not (_is_private(self.root) and _is_private(folder)):
            return None
        try:
            manifest = json.loads((folder / _MANIFEST).read_bytes())
            whole = manifest["digest"] == digest and all(
                _sha256(folder / name) == checksum for name, checksum in manifest["files"].items()
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            debug("store", f"entry {digest[:12]} is not readable ({error!r}), it is built anew")
            return None
        if not whole:
            debug("store", f"entry {digest[:12]} is damaged, it is built anew")
        return folder if whole else None

    @contextlib.contextmanager
    def lock(self, digest: str) -> Iterator[None]:
        """Let one process (and thread) at a time build this entry."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been deleted since it was opened
        folder = self.root / "locks"
        folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(folder / digest[:2], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # some network folders have no locks: then a kernel is built twice
                    fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Give an empty folder beside the entries, gone afterwards."""
        folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self.root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, digest: str, files: dict[str, bytes]) -> Path:
        """Write an entry beside its place and move it there in one step."""
        folder = self.root / digest
        with self.staging() as aside:
            fresh = aside / "entry"
            fresh.mkdir(mode=0o700)
            for name, content in files.items():
                (fresh / name).write_bytes(content)
            checksums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
            manifest = {"digest": digest, "files": checksums}
            (fresh / _MANIFEST).write_text(json.dumps(manifest, indent=1))
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder, aside / "damaged")
            try:
                os.rename(fresh, folder)
            except OSError:  # without locks another process may have been first
                if self.find(digest) is None:
                    raise
        return folder

    def read(self, name: str) -> str | None:
        """Return the text of a file beside the entries, None where there is none or the folder is not ours alone."""
        if not _is_private(self.root):
            return None
        try:
            return (self.root / name).read_text()
        except FileNotFoundError:
            return None

    def write(self, name: str, text: str) -> None:
        """Write a file beside the entries in one step."""
        with self.staging() as aside:
            (aside / name).write_text(text)
            os.replace(aside / name, self.root / name)


@functools.lru_cache(maxsize=8)
def open_store(folder: Path | None) -> KernelStore | None:
    """Make `folder` ready to hold entries; None where that is not possible or others may write there."""
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        if not _is_private(folder) and folder.stat().st_uid == os.geteuid():
            folder.chmod(0o700)
        _sweep(folder)
    except OSError as error:
        debug("store", f"no kernels are kept in {folder}: {error}")
        return None
    if not _is_private(folder):
        debug("store", f"no kernels are kept in {folder}: it belongs to another user")
        return None
    return KernelStore(folder)


@functools.cache
def temporary_store() -> KernelStore:
    """Return a store that lasts as long as this process."""
    folder = tempfile.mkdtemp(prefix="flexattn-")
    atexit.register(_remove, folder, os.getpid())
    return KernelStore(Path(folder))


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not take away its parent's kernels
        shutil.rmtree(folder, ignore_errors=True)


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{_STAGING}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STAGING_AGE:
                shutil.rmtree(folder, ignore_errors=True)
