"""What CPU ranks run needs no Triton, which their installations lack."""

from __future__ import annotations

import subprocess
import sys


def test_a_cpu_rank_loads_without_it() -> None:
    # torch looks for it and does without.
    program = "import sys; sys.modules['triton'] = None; import splash_trt.worker, splash_trt.runtime.network_program"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
