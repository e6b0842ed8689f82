"""python -m flexattn: print the location of the kernel cache and its size."""

from __future__ import annotations

from flexattn.machine.cache_size import report
from flexattn.machine.kernel_store import open_store
from flexattn.process.config import settings


def main() -> None:
    """Print one line about the kernel cache directory."""
    store = open_store(settings().cache_dir)
    print(f"{settings().cache_dir}: no kernels can be kept" if store is None else report(store, settings().cache_size))


if __name__ == "__main__":
    main()
