"""A fuzzer of flex_attention: random calls against the dense reference in float64. `python -m tests.fuzz --help`."""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).parents[1])
if _TESTS not in sys.path:  # where the modules that the tests share are found
    sys.path.insert(0, _TESTS)
