"""Write `environment.json` into a benchmark folder: hardware, versions, commit.

python benchmarks/environment.py benchmarks/FOLDER
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

import thinwire


def environment() -> dict[str, object]:
    """What a reader needs to repeat a measurement."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "thinwire": thinwire.__version__,
        "commit": commit,
    }


if __name__ == "__main__":
    Path(sys.argv[1], "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
