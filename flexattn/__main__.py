"""python -m flexattn: the commands of flexattn/command_line."""

from __future__ import annotations

import sys

from flexattn.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
