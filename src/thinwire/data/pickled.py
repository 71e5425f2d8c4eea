"""Reading a pickle of plain data and arrays without executing anything that it asks for.

Python's own unpickler imports and calls what a file names. Here the operations are carried out by the functions
below, which know containers, numbers, strings and the three names that numpy describes an array with; for these
they build the array themselves. They import nothing and call nothing, whatever the file says. The standard
library's `pickletools` only tells the operations apart.

Text and bytes both become bytes: Python 2, which wrote the files we want, made no difference.
"""

from __future__ import annotations

import math
import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError, one_line

_KNOWN = {
    "numpy.core.multiarray._reconstruct": "array",
    "numpy._core.multiarray._reconstruct": "array",
    "numpy.ndarray": "type",
    "numpy.dtype": "dtype",
}
_MARK = object()


@dataclass(frozen=True)
class _Global:
    """A name that the file asks for and that we know; nothing was imported for it."""

    kind: str


class _UInt8:
    """The only dtype that we accept."""


@dataclass
class _Array:
    """An array; its content comes after it was made."""

    value: NDArray[np.uint8] | None = None


@dataclass
class _Machine:
    """What the operations of a pickle work on."""

    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("an operation on too few values")
        kept = len(self.stack) - count
        items = self.stack[kept:]
        del self.stack[kept:]
        return items

    def pop_to_mark(self) -> list[Any]:
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"a {kind.__name__} was expected")
        return self.stack[-1]


def read_pickle(content: bytes, place: str) -> Any:
    """The dictionary, list, number, bytes or None in a pickle; values of a dictionary may be uint8 arrays.

    Args:
        place: the file's name for errors.

    Raises:
        ConfigError: the file wants any other global (the error names it), uses another operation, or is damaged.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of pickletools, about escapes in the names of globals
            return _run(content)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        given = f"{place}: not a pickle, or damaged ({one_line(error, 100)})"
        raise ConfigError(given, "an intact file", "fetch it again") from None


def _run(content: bytes) -> Any:
    machine = _Machine()
    for operation, argument, _ in pickletools.genops(content):
        if operation.name == "STOP":
            break
        if operation.name not in _STEPS:
            raise _refusal(f"uses the operation {operation.name}")
        _STEPS[operation.name](machine, argument)
    return _finished(machine.pop(1)[0])


def _refusal(given: str) -> ConfigError:
    return ConfigError(given, "plain data and uint8 arrays", "do not trust this file")


def _finished(value: Any) -> Any:
    return {key: _content(item) for key, item in value.items()} if isinstance(value, dict) else _content(value)


def _content(value: Any) -> Any:
    if isinstance(value, _Array) and value.value is not None:
        return value.value
    if isinstance(value, _Array | _UInt8 | _Global) or value is _MARK:
        raise ValueError("an array without content")
    return value


def _put_global(machine: _Machine, name: str) -> None:
    if name not in _KNOWN:
        raise _refusal(f"wants the global {name}")
    machine.stack.append(_Global(_KNOWN[name]))


def _put_stack_global(machine: _Machine, _: Any) -> None:
    parts = machine.pop(2)
    _put_global(machine, ".".join(p.decode(errors="replace") if isinstance(p, bytes) else repr(p) for p in parts))


def _reduce(machine: _Machine, _: Any) -> None:
    """Stands for the call of one of the known names."""
    function, arguments = machine.pop(2)
    kind = function.kind if isinstance(function, _Global) else ""
    if kind == "array":
        machine.stack.append(_Array())
    elif kind == "dtype" and isinstance(arguments, tuple) and arguments[0] in (b"u1", b"|u1"):
        machine.stack.append(_UInt8())
    else:
        raise _refusal(f"makes a {kind or 'thing'} that is not of uint8")


def _build(machine: _Machine, _: Any) -> None:
    """Fills an array. The state of a dtype is not needed: bytes have one order only."""
    (state,) = machine.pop(1)
    if machine.stack and isinstance(machine.stack[-1], _UInt8):
        return
    array = machine.top(_Array)
    _, shape, dtype, is_fortran, content = state
    if not isinstance(dtype, _UInt8) or not isinstance(content, bytes) or is_fortran:
        raise _refusal("holds an array that is not of uint8 in C order")
    if not all(isinstance(count, int) and count >= 0 for count in shape) or math.prod(shape) != len(content):
        raise ValueError(f"an array of {len(content)} bytes whose shape does not fit")
    array.value = np.frombuffer(content, np.uint8).reshape(shape)


def _put_tuple(machine: _Machine, count: int) -> None:
    machine.stack.append(tuple(machine.pop(count)))


def _append(machine: _Machine, items: list[Any]) -> None:
    machine.top(list).extend(items)


def _set_items(machine: _Machine, items: list[Any]) -> None:
    if not all(isinstance(key, bytes | int) for key in items[::2]):
        raise ValueError("a key that is neither text nor a number")  # a deep tuple's hash would exhaust the C stack
    machine.top(dict).update(zip(items[::2], items[1::2], strict=True))


def _memoize(machine: _Machine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]


def _put(make: Callable[[Any], Any]) -> Callable[[_Machine, Any], None]:
    """A step that puts a value made from the operation's argument."""
    return lambda machine, argument: machine.stack.append(make(argument))


def _same(argument: Any) -> Any:
    return argument


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, argument: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINBYTES", "BINBYTES"), _put(_same)),
    **dict.fromkeys(("SHORT_BINSTRING", "BINSTRING"), _put(lambda text: text.encode("latin-1"))),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), _put(lambda text: text.encode("utf-8", "surrogatepass"))),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, index: machine.stack.append(machine.memo[index])),
    "MEMOIZE": lambda machine, _: _memoize(machine, len(machine.memo)),
    "MARK": _put(lambda _: _MARK),
    "NONE": _put(lambda _: None),
    "NEWTRUE": _put(lambda _: True),
    "NEWFALSE": _put(lambda _: False),
    "EMPTY_DICT": _put(lambda _: {}),
    "EMPTY_LIST": _put(lambda _: []),
    "EMPTY_TUPLE": _put(lambda _: ()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: _put_tuple(machine, 1),
    "TUPLE2": lambda machine, _: _put_tuple(machine, 2),
    "TUPLE3": lambda machine, _: _put_tuple(machine, 3),
    "APPEND": lambda machine, _: _append(machine, machine.pop(1)),
    "APPENDS": lambda machine, _: _append(machine, machine.pop_to_mark()),
    "SETITEM": lambda machine, _: _set_items(machine, machine.pop(2)),
    "SETITEMS": lambda machine, _: _set_items(machine, machine.pop_to_mark()),
    "GLOBAL": lambda machine, name: _put_global(machine, name.replace(" ", ".")),
    "INST": lambda machine, name: _put_global(machine, name.replace(" ", ".")),
    "STACK_GLOBAL": _put_stack_global,
    "REDUCE": _reduce,
    "BUILD": _build,
}
