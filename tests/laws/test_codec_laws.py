"""What every boundary codec must satisfy, over the registry: cost, exactness, refusals, gradients, effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.small import CONFIG, batch, small_twin
from thinwire import codecs
from thinwire.codecs import Anchors, Boundary, Codec, Decoder, Encoder
from thinwire.codecs.format_names import FORMATS
from thinwire.codecs.port import Port, pack, unpack
from thinwire.errors import ConfigError, WireError
from thinwire.wire import HEADER_BYTES, Direction

DIM, VOCAB, BOUNDARY = 6, 11, 3

# Options to test each codec with. A new name of the registry needs a line here.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "identity": [{"wire_format": name} for name in FORMATS],
    "mapl": [
        {"rank": 4, "wire_format": "fp32"},
        {"rank": 3, "anchor_rank": 2, "id_bytes": 1},
        {"rank": 1, "anchor_rank": 6, "id_bytes": 2, "wire_format": "fp16"},
        {"rank": 6, "anchor_rank": 1, "id_bytes": 4, "wire_format": "fp32", "frame_gradient": "sender"},
    ],
    "fixed": [{"rank": 3}, {"rank": 3, "anchor_rank": 2, "wire_format": "fp32"}],
    "free": [{"rank": 3}, {"rank": 3, "anchor_rank": 2, "wire_format": "fp16"}],
    "cut": [{}, {"anchor_rank": 2}, {"anchor_rank": 6, "id_bytes": 1, "wire_format": "int4"}],
}
CODECS = [codecs.get(name, **options) for name, rows in OPTIONS.items() for options in rows]
LEARNED = [codec for codec in CODECS if isinstance(codec, codecs.Subspace)]
SHAPES = [(1, 1), (1, 3), (3, 1), (2, 5), (3, 7)]  # B, T: one element, odd sizes, ids that need padding

every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)
every_learned_codec = pytest.mark.parametrize("codec", LEARNED, ids=repr)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@dataclass
class Wire:
    """Both ends of boundary 3, in one process."""

    encoder: Encoder
    decoder: Decoder
    sent: Anchors | None
    received: Anchors | None
    sender: Port
    receiver: Port

    def carry(self, x_BTD: Tensor, ids_BT: Tensor | None, microbatch: int = 0) -> Tensor:
        z_BTK = self.encoder(x_BTD, ids_BT, self.sent)
        carrier = pack(z_BTK, ids_BT, self.sender, microbatch, DIM)
        arrived_BTK, arrived_BT = unpack(carrier, self.receiver, microbatch, DIM)
        return self.decoder(arrived_BTK, arrived_BT, self.received)


def ports(codec: Codec) -> tuple[Port, Port]:
    return Port(codec, BOUNDARY, Direction.FORWARD), Port(codec, BOUNDARY, Direction.BACKWARD)


def wire_of(codec: Codec) -> Wire:
    boundary, generator = Boundary(BOUNDARY, DIM), torch.Generator().manual_seed(0)
    encoder, decoder = codec.encoder(boundary), codec.decoder(boundary)
    if isinstance(encoder, codecs.subspace.SubspaceEncoder):
        encoder.init_weights(generator)
    decoder.load_state_dict(encoder.state_dict())
    anchors = [codec.anchors(DIM, VOCAB) for _ in range(2)]
    for one in anchors:
        if one is not None:
            one.init_weights(generator)
            torch.nn.init.normal_(one.table_VK, generator=generator)
    return Wire(encoder, decoder, *anchors, *ports(codec))


def activations(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape, DIM), torch.randint(VOCAB, shape)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def crossed(codec: Codec, z_BTK: Tensor, ids_BT: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    sender, receiver = ports(codec)
    return unpack(pack(z_BTK, ids_BT, sender, 0, DIM), receiver, 0, DIM)


def test_every_registered_codec_is_tested() -> None:
    assert set(OPTIONS) == set(codecs.names())


@every_codec
@every_shape
def test_shape_dtype_and_device_are_kept(codec: Codec, shape: tuple[int, int]) -> None:
    x, ids = activations(shape)
    y = wire_of(codec).carry(x, ids)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)


@every_codec
@every_shape
def test_the_stated_bytes_are_sent_and_billed_in_both_directions(codec: Codec, shape: tuple[int, int]) -> None:
    wire, (x, ids) = wire_of(codec), activations(shape)
    stated = codec.wire_bytes((*shape, DIM))
    z_BTK = wire.encoder(x, ids, wire.sent).detach()
    there, back = wire.sender.pack(z_BTK, ids, 0, DIM), wire.receiver.pack(z_BTK, None, 0, DIM)
    assert 4 * there.numel() == 4 * back.numel() == stated
    assert wire.sender.ledger.total(direction=Direction.FORWARD, kind="activation", boundary=BOUNDARY) == stated
    assert wire.receiver.ledger.total(direction=Direction.BACKWARD, kind="gradient", boundary=BOUNDARY) == stated


@every_codec
def test_one_training_message_bills_one_activation_and_one_gradient(codec: Codec) -> None:
    wire, (x, ids) = wire_of(codec), activations((2, 5))
    wire.carry(x.requires_grad_(), ids).sum().backward()
    stated = codec.wire_bytes((2, 5, DIM))
    assert list(wire.sender.ledger.num_bytes.values()) == list(wire.receiver.ledger.num_bytes.values()) == [stated]
    with torch.no_grad():
        wire.carry(x.detach(), ids)
    assert wire.sender.ledger.total(kind="evaluation") == stated


@every_codec
def test_a_stage_inside_a_process_bills_nothing(codec: Codec) -> None:
    sender, _ = ports(codec)
    sender.connect(sender.ledger, None, crosses=False)
    sender.pack(torch.randn(2, 5, codec.num_coordinates(DIM)), torch.randint(VOCAB, (2, 5)), 0, DIM)
    assert sender.ledger.total() == 0


@every_codec
@every_shape
def test_carriers_are_fresh_flat_and_can_be_detached_in_place(codec: Codec, shape: tuple[int, int]) -> None:
    wire, (x, ids) = wire_of(codec), activations(shape)
    carrier = pack(wire.encoder(x.requires_grad_(), ids, wire.sent), ids, wire.sender, 0, DIM)
    assert carrier._base is None and carrier.dtype == torch.float32 and carrier.dim() == 1
    assert carrier.requires_grad
    carrier.detach_()


@every_codec
def test_equal_messages_have_equal_bytes_padding_included(codec: Codec) -> None:
    z_BTK, ids = torch.randn(3, 1, codec.num_coordinates(DIM)), torch.randint(VOCAB, (3, 1))
    torch.use_deterministic_algorithms(True)  # torch then fills fresh memory, here with other bytes than zero
    try:
        sender, _ = ports(codec)
        carrier = sender.pack(z_BTK, ids, 0, DIM)
    finally:
        torch.use_deterministic_algorithms(False)
    layout, payload = codec.layout((3, 1, DIM)), bits(carrier)
    used = torch.zeros(len(payload), dtype=torch.bool)
    used[:HEADER_BYTES] = True
    for section in (layout.ids_section, layout.codes_section, layout.side_section):
        used[section] = True
    assert not payload[~used].any()


@every_codec
def test_non_contiguous_and_bf16_inputs_arrive_like_any_other(codec: Codec) -> None:
    z_BTK, ids = torch.randn(3, 5, codec.num_coordinates(DIM)).bfloat16().float(), torch.randint(VOCAB, (3, 5))
    expected = crossed(codec, z_BTK, ids)
    strided = torch.stack([z_BTK, z_BTK + 1], -1)[..., 0].mT.contiguous().mT
    for other in (crossed(codec, strided, ids.T.contiguous().T), crossed(codec, z_BTK.bfloat16(), ids)):
        assert torch.equal(other[0], expected[0])
        assert (other[1] is None) is (expected[1] is None) and (other[1] is None or torch.equal(other[1], ids))


@every_learned_codec
def test_ends_compute_in_float32_for_a_bf16_model(codec: Codec) -> None:
    wire, (x, ids) = wire_of(codec), activations((2, 5))
    assert torch.equal(wire.carry(x.bfloat16(), ids), wire.carry(x.bfloat16().float(), ids))


@pytest.mark.parametrize(("id_bytes", "largest"), [(1, 2**8 - 1), (2, 2**16 - 1), (4, 2**32 - 1)], ids=["1", "2", "4"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_ids_are_exact(id_bytes: int, largest: int, dtype: torch.dtype) -> None:
    codec = codecs.get("mapl", rank=2, anchor_rank=1, id_bytes=id_bytes)
    largest = min(largest, torch.iinfo(dtype).max)
    ids = torch.tensor([[0, 1, 255 & largest], [largest, largest - 1, largest // 2]], dtype=dtype)
    _, arrived = crossed(codec, torch.randn(2, 3, 2), ids)
    assert arrived is not None and arrived.dtype == torch.int64
    assert arrived.tolist() == ids.tolist()


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(receiver: Port, carrier: Tensor, microbatch: int = 5) -> str:
    with pytest.raises(WireError) as caught:
        unpack(carrier, receiver, microbatch, DIM)
    for word in ("boundary 3", "forward", "microbatch 5"):
        assert word in str(caught.value)
    return str(caught.value)


def message(codec: Codec, microbatch: int = 5, boundary: int = BOUNDARY) -> Tensor:
    z_BTK = torch.randn(2, 5, codec.num_coordinates(DIM))
    return Port(codec, boundary, Direction.FORWARD).pack(z_BTK, torch.randint(VOCAB, (2, 5)), microbatch, DIM)


def test_codecs_with_other_options_have_other_digests() -> None:
    assert len({codec.digest for codec in CODECS}) == len(CODECS)
    assert codecs.get("mapl", rank=3).digest == codecs.get("mapl", rank=3).digest


@every_codec
def test_the_other_end_refuses_other_options(codec: Codec) -> None:
    _, receiver = ports(codec)
    unpack(message(codec), receiver, 5, DIM)
    for other in CODECS:
        if other != codec:
            assert "codec" in refusal(receiver, message(other))


@every_codec
def test_messages_for_somebody_else_are_refused(codec: Codec) -> None:
    _, receiver = ports(codec)
    backward = Port(codec, BOUNDARY, Direction.BACKWARD).pack(
        torch.randn(2, 5, codec.num_coordinates(DIM)), None, 5, DIM
    )
    assert "microbatch 4, expected 5" in refusal(receiver, message(codec, microbatch=4))
    assert "boundary 2, expected 3" in refusal(receiver, message(codec, boundary=2))
    assert "direction" in refusal(receiver, backward)


def with_byte(carrier: Tensor, offset: int, value: int) -> Tensor:
    changed = carrier.clone()
    changed.view(torch.uint8)[offset] = value
    return changed


@every_codec
def test_damaged_messages_are_refused(codec: Codec) -> None:
    (_, receiver), carrier = ports(codec), message(codec)
    assert "no payload" in refusal(receiver, with_byte(carrier, 0, 0x55))
    assert "version 9" in refusal(receiver, with_byte(carrier, 4, 9))
    assert "no payload" in refusal(receiver, with_byte(carrier, 5, 7))
    assert "no payload" in refusal(receiver, torch.randn_like(carrier))
    for damaged in (carrier[:-1], carrier[:3], carrier[:0], carrier.double(), carrier.view(1, -1)):
        refusal(receiver, damaged)


@every_codec
@pytest.mark.parametrize("field", ["rows", "tokens"])
def test_a_header_with_another_number_of_rows_or_tokens_is_refused(codec: Codec, field: str) -> None:
    _, receiver = ports(codec)
    offset = {"rows": 20, "tokens": 24}[field]
    assert message(codec).view(torch.uint8)[offset] == {"rows": 2, "tokens": 5}[field]
    refusal(receiver, with_byte(message(codec), offset, 7))


def test_a_codec_refuses_what_it_cannot_do() -> None:
    for wrong in (
        lambda: codecs.get("vq"),
        lambda: codecs.get("mapl"),
        lambda: codecs.get("identity", rank=3),
        lambda: codecs.get("mapl", rank=0),
        lambda: codecs.get("mapl", rank=3, anchor_rank=-1),
        lambda: codecs.get("mapl", rank=3, id_bytes=3),
        lambda: codecs.get("mapl", rank=3, wire_format="fp8"),
        lambda: codecs.get("mapl", rank=3, frame="square"),
        lambda: codecs.get("mapl", rank=DIM + 1).wire_bytes((1, 1, DIM)),
        lambda: codecs.get("mapl", rank=3, anchor_rank=DIM + 1).encoder(Boundary(0, DIM)),
    ):
        with pytest.raises(ConfigError, match="allowed"):
            wrong()


# --- learning ----------------------------------------------------------------------------------------------------


@every_learned_codec
def test_gradients_are_those_of_the_function(codec: Codec) -> None:
    wire, (x, ids) = wire_of(codec), activations((2, 3))
    for end in (wire.encoder, wire.decoder, wire.sent, wire.received):
        if end is not None:
            end.double()
    inputs = [x.double().requires_grad_()]
    inputs += [a.table_VK for a in (wire.sent, wire.received) if a is not None]
    inputs += [end.frame_DK for end in (wire.encoder, wire.decoder) if end.frame_DK.requires_grad]
    if isinstance(codec, codecs.Subspace) and codec.frame_gradient == "sender":
        inputs.pop()  # the receiver's half is left out on purpose

    def function(*_: Tensor) -> Tensor:
        return wire.decoder(wire.encoder(inputs[0], ids, wire.sent), ids, wire.received)

    assert torch.autograd.gradcheck(function, inputs)


@every_learned_codec
def test_frames_learn_at_both_ends_unless_they_are_frozen(codec: Codec) -> None:
    wire, (x, ids) = wire_of(codec), activations((2, 5))
    wire.carry(x.requires_grad_(), ids).square().sum().backward()
    assert isinstance(codec, codecs.Subspace)
    assert (wire.encoder.frame_DK.grad is not None) is (codec.frame != "frozen")
    learns = codec.frame != "frozen" and codec.frame_gradient == "both"
    assert (wire.decoder.frame_DK.grad is not None) is learns
    assert x.grad is not None and all(a.table_VK.grad is not None for a in (wire.sent, wire.received) if a)


def loss_of(codec: Codec, num_stages: int) -> tuple[float, dict[str, Tensor]]:
    twin = small_twin(codec, num_stages)
    total = float(twin.step(*batch()))
    return total, {
        name: parameter.grad
        for stage in twin.stages
        for name, parameter in stage.model.named_parameters()
        if parameter.grad is not None
    }


def test_the_exact_wire_is_bitwise_neutral() -> None:
    codec = codecs.get("identity", wire_format="fp32")
    (alone, whole), (piped, parts) = loss_of(codec, 1), loss_of(codec, 4)
    assert piped == alone and parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    "codec",
    [codecs.get("identity"), *(codecs.get(name, **OPTIONS[name][-1]) for name in codecs.names() if name != "identity")],
    ids=repr,
)
def test_a_lossy_codec_changes_the_loss(codec: Codec) -> None:
    assert loss_of(codec, 4)[0] != loss_of(codecs.get("identity", wire_format="fp32"), 4)[0]


def test_a_full_frame_loses_nothing_but_rounding() -> None:
    full = codecs.get("mapl", rank=CONFIG.dim, wire_format="fp32")
    assert loss_of(full, 4)[0] == pytest.approx(loss_of(full, 1)[0], rel=1e-5)
