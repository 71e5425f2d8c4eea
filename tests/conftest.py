"""What every test has: one thread, fixed seeds, and no CUDA tests where there is no CUDA."""

from __future__ import annotations

import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start; torch reads it on import

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# A shared machine is too uneven for deadlines, and a failure must come back on the next run.
settings.register_profile("thinwire", deadline=None, derandomize=True)
settings.load_profile("thinwire")


@pytest.fixture(autouse=True)
def seeds() -> int:
    """Seeds every global generator before each test; returns the seed for generators of the test's own."""
    seed = 0
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
