"""What is said of the machine and the process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from latte_convert.environment import peak_memory_bytes

LARGE = 400_000_000


def test_a_process_does_not_inherit_the_peak_of_the_one_that_started_it():
    held = np.ones(LARGE, dtype=np.uint8)
    program = "from latte_convert.environment import peak_memory_bytes; print(peak_memory_bytes())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert held.sum(dtype=np.int64) == LARGE
    assert 0 < int(done.stdout) < LARGE < peak_memory_bytes()
