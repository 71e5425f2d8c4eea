"""Errors a user sees: one line that says what was given, what is allowed, and what to do."""

from __future__ import annotations


class ThinwireError(Exception):
    """Base of all errors that the command line prints as one line."""

    exit_code = 1


def one_line(error: BaseException, limit: int = 300) -> str:
    """An error's text on one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


class ConfigError(ThinwireError, ValueError):
    """The user's configuration is wrong. The command line exits with 2."""

    exit_code = 2

    def __init__(self, given: str, allowed: str = "", remedy: str = "") -> None:
        parts = [given, f"allowed: {allowed}" if allowed else "", remedy]
        super().__init__("; ".join(part for part in parts if part))


class WireError(ThinwireError, RuntimeError):
    """A payload does not match what its receiver expects. Names boundary, direction and microbatch. Exit code 3."""

    exit_code = 3


class PeerError(ThinwireError, RuntimeError):
    """A peer or the network failed. Names stage, peer and microbatch where known. Exit code 3."""

    exit_code = 3


class StorageError(ThinwireError, RuntimeError):
    """A run's files cannot be written: a full disk, a lost mount. Exit code 3; the last checkpoint stays good."""

    exit_code = 3
