"""Runs a script on the simulated accelerator: ``python -m tests.simulated script.py --its arguments``.

At its end each process says which accesses to memory nothing orders. See ``docs/simulated-accelerator.md``.
"""

import os
import sys

from tests.simulated.build import environment, library

if __name__ == "__main__":
    library()
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, "SIM_REPORT": "1", **environment()})
