"""python -m flexattn: tell where the generated kernels are kept, and what they take."""

from __future__ import annotations

from flexattn.machine.cache_size import report
from flexattn.machine.kernel_store import open_store
from flexattn.process.config import settings


def main() -> None:
    """Print a line on the folder of the kernels."""
    store = open_store(settings().cache_dir)
    print(f"{settings().cache_dir}: no kernels can be kept" if store is None else report(store, settings().cache_size))


if __name__ == "__main__":
    main()
