"""KernelStore: built kernels on disk, one directory per digest that is complete or absent, closed to other users.

root/<digest>/      the generated source, the compiled files and manifest.json with the sha256 of each
root/locks/         one file lock for each kernel that is compiled now; released when its process dies
root/triton/        Triton's own C stubs
root/templates/     compiled jinja2 templates (compile/jinja.py)
root/tiles.json     tiles tuned on this machine (tile_choice.py)
root/.new-*/        files being written or removed; deleted afterwards, or a day later if the process died

Code in these directories runs in this process. So nothing is used that another user can write, except the owner of a
directory that this user names to read kernels from (`shared_store`). On the whole path to root, each directory belongs
to these or to the system's root, and only they can rename its entries.
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
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from flexattn.process.events import debug
from flexattn.process.forks import temporary
from flexattn.process.frozen_class import frozen

try:
    import fcntl
except ImportError:  # Windows has no Triton either; renames alone keep entries complete
    fcntl = None

_MANIFEST = "manifest.json"
_STAGING = ".new-"
_LOCKS = "locks"
LONGEST_WAIT = 60.0  # seconds that a process waits for another one that compiles the same kernel
_PAUSES = (0.005, 0.1)  # seconds between two attempts to lock, the first and the longest
_STAGING_AGE = 24 * 3600  # seconds after which a staging directory must belong to a dead process
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@frozen
class KernelStore:
    root: Path
    owner: int | None = None  # of a shared directory, which is only read; None: this user

    def find(self, digest: str) -> Path | None:
        """Return the directory of an entry that belongs to us and is unchanged since it was written, else None."""
        folder = self.root / digest
        if not (_is_private(self.root, self.owner) and _is_private(folder, self.owner)):
            return None
        try:
            manifest = json.loads((folder / _MANIFEST).read_bytes())
            whole = manifest["digest"] == digest and all(
                _sha256(folder / name) == checksum for name, checksum in manifest["files"].items()
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            debug("store", f"entry {digest[:12]} is not readable ({error!r}), it is rebuilt")
            return None
        if not whole:
            debug("store", f"entry {digest[:12]} is damaged, it is rebuilt")
            return None
        if self.owner is None:
            with contextlib.suppress(OSError):
                os.utime(folder / _MANIFEST)  # the least recently used entries are removed first
        return folder

    def begin(self) -> bool:
        """Whether this process is the first that compiles a kernel for this directory."""
        try:
            self._make_root()
            (self.root / _LOCKS).mkdir(mode=0o700)
        except OSError:  # it is there, or cannot be written
            return False
        return True

    @contextlib.contextmanager
    def lock(self, digest: str, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Let only one process (and thread) at a time build this entry.

        A process that hangs, and a file system without locks, do not block others: after LONGEST_WAIT seconds, or at
        once, the block runs without the lock. Then an entry is built twice. `waits` is called if there is a wait.
        """
        path = self.folder(_LOCKS) / digest
        start, pause, owner = time.monotonic(), _PAUSES[0], os.getpid()
        while True:
            with _opened(path) as handle:
                is_held = _try_lock(handle, path)
                waited = time.monotonic() - start
                if is_held is not False or waited >= LONGEST_WAIT:
                    if is_held is False:
                        debug("store", f"entry {digest[:12]} is locked for {waited:.0f} s, it is built here too")
                    try:
                        yield
                    finally:
                        if is_held and os.getpid() == owner:  # not in a forked child
                            with contextlib.suppress(OSError):
                                path.unlink()
                    return
            waits()
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSES[1])

    def folder(self, name: str) -> Path:
        """Return a directory next to the entries. If it or its contents are not ours, replace it by an empty one."""
        self._make_root()
        folder = self.root / name
        with contextlib.suppress(FileExistsError):  # a directory that another process has just made is not replaced
            folder.mkdir(mode=0o700)
        if not _is_ours(folder):
            with self.staging() as aside:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(folder, aside / "not ours")
                folder.mkdir(mode=0o700, exist_ok=True)
            if not _is_ours(folder):
                raise PermissionError(f"{folder} belongs to another user")
        return folder

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield an empty directory next to the entries, deleted afterwards."""
        self._make_root()
        folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self.root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, digest: str, files: dict[str, bytes]) -> Path:
        """Write an entry in a staging directory and move it to its place atomically."""
        folder = self.root / digest
        with self.staging() as aside:
            fresh = aside / "entry"
            fresh.mkdir(mode=0o700)
            for name, content in files.items():
                (fresh / name).write_bytes(content)
            checksums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
            manifest = {"digest": digest, "files": checksums}
            (fresh / _MANIFEST).write_text(json.dumps(manifest, indent=1))
            if self.find(digest) is not None:  # without the lock, another process was faster
                return folder
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder, aside / "damaged")
            try:
                os.rename(fresh, folder)
            except OSError:  # without locks, another process may have been first
                if self.find(digest) is None:
                    raise
        return folder

    def remove(self, name: str) -> None:
        """Remove an entry, or a directory next to the entries, atomically, unless another process does."""
        with self.staging() as aside, contextlib.suppress(FileNotFoundError):
            os.rename(self.root / name, aside / "old")

    def read(self, name: str) -> str | None:
        """Return the text of a file next to the entries; None if it is missing or others can write the directory."""
        if not _is_private(self.root):
            return None
        try:
            return (self.root / name).read_text()
        except FileNotFoundError:
            return None

    def write(self, name: str, text: str) -> None:
        """Write a file next to the entries atomically."""
        with self.staging() as aside:
            (aside / name).write_text(text)
            os.replace(aside / name, self.root / name)

    def _make_root(self) -> None:
        """Create the root again if it was deleted since it was opened."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(self.root):
            raise PermissionError(f"{self.root} belongs to another user, or others can write there")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file to lock it. Closing it releases the lock."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    owner = os.getpid()

    def release() -> None:
        # A forked child has the handle too: closing it here keeps the lock held. The child must not unlock it.
        if fcntl is not None and os.getpid() == owner:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)

    with temporary(release):
        yield handle


def _try_lock(handle: int, path: Path) -> bool | None:
    """Return whether the open file is locked now; None if locks do not work here, as on some network file systems."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    try:  # its last holder has removed it, and another file may be there
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def existing_store(folder: Path | None) -> KernelStore | None:
    """Return the store of an existing directory, to read from; None if there is none."""
    if folder is None:
        return None
    try:
        return KernelStore(folder.resolve(strict=True))
    except (OSError, RuntimeError):  # RuntimeError: a cycle of links
        return None


@functools.lru_cache(maxsize=8)
def open_store(folder: Path | None) -> KernelStore | None:
    """Prepare `folder` for entries; return None if that is not possible or others may write there."""
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve(strict=True)
        if not _is_private(folder) and folder.stat().st_uid == os.geteuid():
            folder.chmod(0o700)
        _sweep(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links
        debug("store", f"no kernels are stored in {folder}: {error}")
        return None
    unsafe = None if _is_private(folder) else folder
    unsafe = unsafe or next((parent for parent in folder.parents if not _is_safe_parent(parent)), None)
    if unsafe is None:
        return KernelStore(folder)
    warnings.warn(
        f"flexattn stores no kernels in {folder}, so each process recompiles them: {unsafe} belongs to another user, "
        f"or others can write there. Set FLEXATTN_CACHE_DIR to your own folder.",
        RuntimeWarning, stacklevel=2,
    )  # fmt: skip
    return None


@functools.lru_cache(maxsize=8)
def shared_store(folder: Path | None) -> KernelStore | None:
    """Return the store of a directory to read from, which may belong to another user; None if it cannot be used.

    The user names this directory, and so trusts its owner. Nobody else but root may write to it.
    """
    if folder is None:
        return None
    try:
        folder = folder.resolve(strict=True)
        owner = folder.stat().st_uid
        unsafe = None if _is_private(folder, owner) else folder
        unsafe = unsafe or next((parent for parent in folder.parents if not _is_safe_parent(parent, owner)), None)
    except (OSError, RuntimeError) as error:
        debug("store", f"no kernels are read from {folder}: {error}")
        return None
    if unsafe is None:
        return KernelStore(folder, owner)
    warnings.warn(
        f"flexattn reads no kernels from {folder} (FLEXATTN_SHARED_CACHE_DIR): others than its owner can write to "
        f"{unsafe}. Remove their access with chmod go-w.",
        RuntimeWarning, stacklevel=2,
    )  # fmt: skip
    return None


def temporary_store() -> KernelStore:
    """Return a store that lasts as long as this process, or a new one if the last was deleted."""
    store = _temporary_store()
    if not _is_private(store.root):
        _temporary_store.cache_clear()
        store = _temporary_store()
    return store


@functools.cache
def _temporary_store() -> KernelStore:
    folder = tempfile.mkdtemp(prefix="flexattn-")
    atexit.register(_remove, folder, os.getpid())
    return KernelStore(Path(folder).resolve())


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not delete its parent's kernels
        shutil.rmtree(folder, ignore_errors=True)


def _is_private(folder: Path, owner: int | None = None) -> bool:
    """Return whether a directory belongs to a user, by default this one, and nobody else can write to it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    owner = os.geteuid() if owner is None else owner
    return stat.S_ISDIR(status.st_mode) and status.st_uid == owner and not status.st_mode & _OTHERS


def _is_safe_parent(folder: Path, owner: int | None = None) -> bool:
    """Return whether only this user, root and `owner` can rename their entries in a directory."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid(), owner):
        return False
    return bool(status.st_mode & stat.S_ISVTX) or not (
        status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid))
    )


def _is_own_group(gid: int) -> bool:
    """Return whether a group contains only this user, as on many systems."""
    try:
        import grp
        import pwd

        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except (ImportError, KeyError):
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _is_ours(folder: Path) -> bool:
    """Return whether a directory is private and contains only this user's directories and files, and no links.

    Nobody else can change a private directory. This also finds files that others left before it became private.
    """
    if not _is_private(folder):
        return False
    try:
        inode = folder.stat().st_ino
        if (folder, inode) in _examined:
            return True
        with os.scandir(folder) as entries:
            ours = all(_is_ours_below(entry) for entry in entries)
    except OSError:
        return False
    if ours:
        _examined.add((folder, inode))
    return ours


_examined: set[tuple[Path, int]] = set()  # directories of this process; 500 launcher stubs take 6 ms per kernel


def _is_ours_below(entry: os.DirEntry[str]) -> bool:
    try:
        status = entry.stat(follow_symlinks=False)
        if status.st_uid != os.geteuid():
            return False
        if stat.S_ISREG(status.st_mode):
            return True
        if not stat.S_ISDIR(status.st_mode):
            return False
        with os.scandir(entry) as entries:
            return all(_is_ours_below(inner) for inner in entries)
    except FileNotFoundError:  # another process removed its own file
        return True


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{_STAGING}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STAGING_AGE:
                shutil.rmtree(folder, ignore_errors=True)
