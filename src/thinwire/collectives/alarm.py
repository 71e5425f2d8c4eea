"""Which workers of a group still live: who loses one raises the alarm in the group's store, and survivors answer."""

from __future__ import annotations

import time
from typing import Any

_ANSWER_S = 3.0  # how long a survivor waits for the others to say that they live


def missing(group: Any, mine: int, size: int) -> list[int]:
    """Raise the alarm, and return the workers that do not answer it over the group's store within a few seconds."""
    until = time.monotonic() + _ANSWER_S
    try:
        for key in ("alarm", str(mine)):
            group.get_group_store().set(f"thinwire/{key}", "")
    except RuntimeError:
        return []  # the store has died, with its process
    silent = list(range(size))
    while silent := [worker for worker in silent if not is_set(group, str(worker))]:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return silent


def is_set(group: Any, key: str) -> bool:
    """Whether a worker of the group has left this key in the group's store."""
    try:
        return bool(group.get_group_store().check([f"thinwire/{key}"]))
    except RuntimeError:
        return False
