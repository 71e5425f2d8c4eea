"""Pickles are read without executing anything: what Python 2 wrote, what is refused and by which name, damage."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference.cifar_files import python2_batch
from thinwire.data.pickled import read_pickle
from thinwire.errors import ConfigError


def test_a_batch_as_python_2_wrote_it() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    content = python2_batch(rows, [6, 9, 300])
    found = read_pickle(content, "batch")
    assert np.array_equal(found[b"data"], rows) and found[b"data"].dtype == np.uint8
    assert found[b"labels"] == [6, 9, 300] and found[b"batch_label"] == b"training batch 1 of 5"
    theirs = pickle.loads(content, encoding="bytes")  # the file is what Python itself reads, too
    assert np.array_equal(theirs[b"data"], rows) and theirs[b"labels"] == [6, 9, 300]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_of_later_protocols(protocol: int) -> None:
    value = {"a": [1, -1, 70000, 2**40, None, True], "b": ("ä", ()), 3: "x" * 300}
    expected = {b"a": value["a"], b"b": ("ä".encode(), ()), 3: b"x" * 300}
    assert read_pickle(pickle.dumps(value, protocol), "it") == expected


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_of_later_protocols(protocol: int) -> None:
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert np.array_equal(read_pickle(pickle.dumps({"data": array}, protocol), "it")[b"data"], array)


class Evil:
    """Asks Python's unpickler to call `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_malicious_pickle_is_refused_by_the_name_it_wants(protocol: int, is_nested: bool, tmp_path: Path) -> None:
    target = tmp_path / "made by the pickle"
    evil = Evil(os.mkdir, str(target))
    content = pickle.dumps({"labels": [evil]} if is_nested else evil, protocol)
    with pytest.raises(ConfigError, match=rf"^batch: wants the global {os.mkdir.__module__}\.mkdir; .*do not trust"):
        read_pickle(content, "batch")
    assert not target.exists()
    pickle.loads(content)
    assert target.exists(), "the pickle was harmless, so the test shows nothing"


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "global os.system"),
        (b"(S'true'\nios\nsystem\n.", "operation STRING"),
        (b"(ios\nsystem\n.", "global os.system"),
        (b"\x80\x02(cbuiltins\neval\nU\x011o.", "global builtins.eval"),
        (b"\x80\x02cnumpy\nload\nU\x01x\x85R.", "global numpy.load"),
        (b"\x80\x02\x82\x01.", "operation EXT1"),
        (b"\x80\x02U\x01xQ.", "operation BINPERSID"),
        (b"\x80\x02cnumpy\nndarray\n)R.", "makes a type"),
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "operation NEWOBJ"),
        (b"\x80\x02cnumpy\ndtype\nU\x02O8\x85R.", "makes a dtype that is not of uint8"),
        (b"\x80\x02U\x01x)R.", "makes a thing"),
        (b"\x80\x04K\x01K\x02\x93.", "global 1.2"),
    ],
)
def test_everything_else_that_could_act_is_refused(content: bytes, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        read_pickle(content, "it")


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
UINT8 = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged"),
        (b"PK\x03\x04 not a pickle", "damaged"),
        (b"\x80\x02}", "damaged"),
        (b"\x80\x02.", "too few"),
        (b"\x80\x02s.", "too few"),
        (b"\x80\x02u.", "damaged"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"\x80\x02K\x01K\x02a.", "list was expected"),
        (b"\x80\x02]K\x02K\x03s.", "dict was expected"),
        (b"\x80\x02}(K\x02u.", "damaged"),
        (b"\x80\x02})K\x03s.", "neither text nor a number"),
        (b"\x80\x02}K\x01" + ARRAY + b"s.", "without content"),
        (b"\x80\x02" + ARRAY + b"(K\x01K\x02\x85" + UINT8 + b"\x89U\x01atb.", "shape does not fit"),
        (b"\x80\x02" + ARRAY + b"(K\x01U\x01x\x85" + UINT8 + b"\x89U\x01atb.", "shape does not fit"),
        (b"\x80\x02" + ARRAY + b"(K\x01J\xff\xff\xff\xff\x85" + UINT8 + b"\x89U\x01atb.", "shape does not fit"),
        (b"\x80\x02" + ARRAY + b"(K\x01K\x01\x85" + UINT8 + b"\x88U\x01atb.", "C order"),
        (b"\x80\x02" + ARRAY + b"(K\x01K\x01\x85N\x89U\x01atb.", "C order"),
        (b"\x80\x02" + ARRAY + b"K\x01b.", "damaged"),
        (b"\x80\x02}K\x01b.", "_Array was expected"),
        (b"\x80\x02T" + struct.pack("<i", 2**30) + b"x.", "damaged"),
    ],
)
def test_damage_is_one_line(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_pickle(content, "it")
    assert str(caught.value).startswith("it: ") and "\n" not in str(caught.value)


def test_any_change_of_a_byte_gives_a_value_or_our_error() -> None:
    content, dice = python2_batch(np.zeros((2, 3072), np.uint8), [1, 2]), random.Random(0)
    places = [place for place in range(len(content)) if content[place]]
    for _ in range(1500):
        damaged = bytearray(content)
        damaged[dice.choice(places)] = dice.choice(b"(.0}]absutRcU\x80\x82\x85\x93\x94" + bytes(range(256)))
        with contextlib.suppress(ConfigError):
            read_pickle(bytes(damaged), "it")
