"""Payload layout, headers, ids and the ledger."""

from __future__ import annotations

import pytest
import torch

from thinwire.errors import ConfigError, WireError
from thinwire.wire import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Direction,
    Header,
    Layout,
    Ledger,
    id_width,
    new_carrier,
    open_carrier,
    padded,
    read_ids,
    write_ids,
)

CPU = torch.device("cpu")
HEADER = Header(0xDEADBEEF, 513, Direction.BACKWARD, 70_000, Layout(3, 5, 2, 61, 4), 12345.678901234)


def test_padding_goes_to_the_next_multiple_of_four() -> None:
    assert [padded(n) for n in (0, 1, 3, 4, 5, 8)] == [0, 4, 4, 4, 8, 8]


@pytest.mark.parametrize("id_bytes", [0, 1, 2, 4])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 3), (3, 5), (2, 8)])
@pytest.mark.parametrize(("code_bytes", "side_bytes"), [(0, 0), (2, 0), (7, 4), (64, 3)])
def test_sections_follow_each_other_without_overlap(
    rows: int, tokens: int, id_bytes: int, code_bytes: int, side_bytes: int
) -> None:
    layout = Layout(rows, tokens, id_bytes, code_bytes, side_bytes)
    end = HEADER_BYTES
    for section, size in (
        (layout.ids_section, rows * tokens * id_bytes),
        (layout.codes_section, code_bytes),
        (layout.side_section, side_bytes),
    ):
        assert section.start % 4 == 0 and 0 <= section.start - end < 4
        assert section.stop - section.start == size
        end = section.stop
    assert layout.total_bytes % 4 == 0 and 0 <= layout.total_bytes - end < 4


def test_a_header_comes_back_as_it_was() -> None:
    raw = HEADER.to_bytes()
    assert len(raw) == HEADER_BYTES == 48
    assert raw[:4] == MAGIC and raw[4] == VERSION
    assert Header.from_bytes(raw, "here") == HEADER


def test_a_header_is_little_endian_whatever_the_machine() -> None:
    assert HEADER.to_bytes()[8:12] == bytes.fromhex("efbeadde")


def test_a_carrier_holds_its_header_and_all_bytes() -> None:
    carrier, payload = new_carrier(HEADER, CPU)
    assert carrier.shape == (HEADER.layout.total_bytes // 4,)
    payload[HEADER_BYTES:] = torch.arange(len(payload) - HEADER_BYTES) % 256
    header, opened = open_carrier(carrier, "here")
    assert header == HEADER and torch.equal(opened, payload)


def test_a_carrier_that_is_a_stride_of_another_tensor_opens() -> None:
    carrier, _ = new_carrier(HEADER, CPU)
    strided = torch.stack([carrier, torch.zeros_like(carrier)], 1)[:, 0]
    assert open_carrier(strided, "here")[0] == HEADER


@pytest.mark.parametrize(
    ("offset", "value", "says"),
    [(0, 0, "no payload"), (4, VERSION + 1, f"version {VERSION + 1}"), (5, 2, "no payload"), (28, 9, "damaged")],
)
def test_damaged_headers_name_the_place(offset: int, value: int, says: str) -> None:
    raw = bytearray(HEADER.to_bytes())
    raw[offset] = value
    with pytest.raises(WireError, match=f"the place.*{says}"):
        Header.from_bytes(bytes(raw), "the place")


def test_no_flipped_bit_of_a_header_goes_unnoticed() -> None:
    for bit in range(8 * HEADER_BYTES):
        raw = bytearray(HEADER.to_bytes())
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match="the place"):
            Header.from_bytes(bytes(raw), "the place")


@pytest.mark.parametrize("cut", [slice(0, 11), slice(0, -1), slice(0, 0)])
def test_truncated_carriers_name_the_place(cut: slice) -> None:
    carrier, _ = new_carrier(HEADER, CPU)
    with pytest.raises(WireError, match="the place"):
        open_carrier(carrier[cut], "the place")


@pytest.mark.parametrize("id_bytes", [1, 2, 4])
def test_ids_fill_their_section_and_nothing_else(id_bytes: int) -> None:
    layout = Layout(1, 3, id_bytes, 4)
    _, payload = new_carrier(Header(1, 0, Direction.FORWARD, 0, layout), CPU)
    payload[HEADER_BYTES:] = 0xAA
    ids = torch.tensor([[0, 1, (1 << 8 * id_bytes) - 1]])
    write_ids(payload, layout, ids)
    got = read_ids(payload, layout)
    assert got is not None and torch.equal(got, ids)
    assert bool((payload[layout.ids_section.stop :] == 0xAA).all())
    write_ids(payload, layout, None)
    assert not payload[layout.ids_section].any()


def test_a_wire_without_ids_gives_none() -> None:
    layout = Layout(2, 3, 0, 4)
    payload = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    write_ids(payload, layout, torch.ones(2, 3, dtype=torch.int64))
    assert read_ids(payload, layout) is None and not payload.any()


@pytest.mark.parametrize(("vocab_size", "width"), [(1, 1), (256, 1), (257, 2), (65536, 2), (65537, 4), (1 << 32, 4)])
def test_ids_travel_in_the_fewest_bytes_that_hold_them(vocab_size: int, width: int) -> None:
    assert id_width(vocab_size) == width


@pytest.mark.parametrize("vocab_size", [-1, 0, (1 << 32) + 1])
def test_impossible_vocabularies_are_refused(vocab_size: int) -> None:
    with pytest.raises(ConfigError, match=f"vocabulary of {vocab_size}; allowed: 1 to 4294967296"):
        id_width(vocab_size)


def test_a_ledger_adds_up_by_boundary_direction_and_kind() -> None:
    ledger = Ledger()
    assert ledger.total() == 0
    ledger.bill(0, Direction.FORWARD, "activation", 100)
    ledger.bill(0, Direction.FORWARD, "activation", 20)
    ledger.bill(0, Direction.BACKWARD, "gradient", 3)
    ledger.bill(1, Direction.FORWARD, "frame", 4000)
    assert ledger.total() == 4123
    assert ledger.total(boundary=0) == 123
    assert ledger.total(direction=Direction.FORWARD) == 4120
    assert ledger.total(direction=Direction.FORWARD, kind="activation") == 120
    assert ledger.total(kind="frame", boundary=0) == 0
    assert sorted(ledger.num_messages.values()) == [1, 1, 2]
