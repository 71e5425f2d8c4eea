"""The five formulas of MAPL's boundary (methods.md 1.2) against autograd, and through the wire."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.reference.mapl import Crossing, cross
from thinwire import codecs
from thinwire.codecs import Boundary
from thinwire.codecs.anchors import FactorisedAnchors
from thinwire.codecs.port import Port, pack, unpack
from thinwire.codecs.subspace import SubspaceDecoder, SubspaceEncoder
from thinwire.stiefel import orthogonality_error
from thinwire.wire import Direction

SHAPE, DIM, RANK, ANCHOR_RANK, VOCAB = (2, 5), 7, 3, 2, 6
EXACT = 1e-12  # float64
WIRE = 1e-5  # float32 on the wire and in the modules


class Ends:
    """A boundary's two ends with random tables, and a gradient for what comes out."""

    def __init__(self, frame_gradient: str = "both", dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.codec = codecs.get(
            "mapl", rank=RANK, anchor_rank=ANCHOR_RANK, wire_format="fp32", frame_gradient=frame_gradient
        )
        encoder, decoder = self.codec.encoder(Boundary(0, DIM)), self.codec.decoder(Boundary(0, DIM))
        assert isinstance(encoder, SubspaceEncoder) and isinstance(decoder, SubspaceDecoder)
        encoder.init_weights(generator)
        decoder.load_state_dict(encoder.state_dict())
        self.encoder, self.decoder = encoder.to(dtype), decoder.to(dtype)
        self.sent, self.received = (self._anchors(generator).to(dtype) for _ in range(2))
        self.x = torch.randn(*SHAPE, DIM, dtype=dtype, generator=generator).requires_grad_()
        self.ids = torch.randint(VOCAB, SHAPE, generator=generator)
        self.gradient = torch.randn(*SHAPE, DIM, dtype=dtype, generator=generator)

    def _anchors(self, generator: torch.Generator) -> FactorisedAnchors:
        made = FactorisedAnchors(DIM, VOCAB, ANCHOR_RANK)
        made.init_weights(generator)
        torch.nn.init.normal_(made.table_VK, generator=generator)
        return made

    def reference(self) -> Crossing:
        tables = [(a.table_VK @ a.basis_KD).detach().double() for a in (self.sent, self.received)]
        frame, x = self.encoder.frame_DK.detach().double(), self.x.detach().double()
        return cross(x, self.ids, frame, *tables, self.gradient.double())

    def directly(self) -> tuple[Tensor, Tensor]:
        z = self.encoder(self.x, self.ids, self.sent)
        z.retain_grad()
        return z, self.decoder(z, self.ids, self.received)

    def over_the_wire(self) -> tuple[Tensor, Tensor]:
        sender, receiver = Port(self.codec, 0, Direction.FORWARD), Port(self.codec, 0, Direction.BACKWARD)
        z = self.encoder(self.x, self.ids, self.sent)
        z.retain_grad()
        arrived, ids = unpack(pack(z, self.ids, sender, 0, DIM), receiver, 0, DIM)
        return z, self.decoder(arrived, ids, self.received)


def check(ends: Ends, z: Tensor, x_hat: Tensor, atol: float) -> None:
    expected = ends.reference()
    x_hat.backward(ends.gradient)
    pairs: dict[str, tuple[Tensor | None, Tensor]] = {
        "Z": (z.detach(), expected.z_BTK),
        "X_hat": (x_hat.detach(), expected.x_hat_BTD),
        "dZ = G A": (z.grad, expected.dz_BTK),
        "dX = dZ A^T": (ends.x.grad, expected.dx_BTD),
        "sender's half": (ends.encoder.frame_DK.grad, expected.dframe_sender_DK),
        "receiver's half": (ends.decoder.frame_DK.grad, expected.dframe_receiver_DK),
        "e_send gets -dX": (ends.sent.table_VK.grad, expected.dsend_VD @ ends.sent.basis_KD.double().mT),
        "e_recv gets G": (ends.received.table_VK.grad, expected.dreceive_VD @ ends.received.basis_KD.double().mT),
    }
    for what, (got, wanted) in pairs.items():
        assert got is not None, what
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=atol, msg=lambda text, what=what: what + text)


def test_the_formulas_are_those_of_autograd() -> None:
    ends = Ends()
    check(ends, *ends.directly(), EXACT)


def test_the_formulas_hold_over_the_wire() -> None:
    ends = Ends(dtype=torch.float32)
    check(ends, *ends.over_the_wire(), WIRE)


def test_both_halves_add_up_to_the_gradient_of_one_frame() -> None:
    ends = Ends()
    expected = ends.reference()
    ends.decoder.frame_DK = ends.encoder.frame_DK
    ends.directly()[1].backward(ends.gradient)
    assert ends.encoder.frame_DK.grad is not None
    torch.testing.assert_close(
        ends.encoder.frame_DK.grad, expected.dframe_sender_DK + expected.dframe_receiver_DK, rtol=0, atol=EXACT
    )


def test_sender_only_leaves_the_receivers_half_out_and_nothing_else() -> None:
    both, sender = Ends(), Ends("sender")
    for ends in (both, sender):
        ends.directly()[1].backward(ends.gradient)
    assert sender.decoder.frame_DK.grad is None
    for a, b in (
        (both.encoder.frame_DK, sender.encoder.frame_DK),
        (both.sent.table_VK, sender.sent.table_VK),
        (both.received.table_VK, sender.received.table_VK),
        (both.x, sender.x),
    ):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_projected_anchors_are_the_anchors_projected() -> None:
    ends = Ends()
    torch.testing.assert_close(
        ends.sent.project(ends.ids, ends.encoder.frame_DK), ends.sent(ends.ids) @ ends.encoder.frame_DK
    )


def test_anchors_start_at_zero_on_orthonormal_rows_that_do_not_learn() -> None:
    anchors = FactorisedAnchors(DIM, VOCAB, ANCHOR_RANK)
    anchors.init_weights(torch.Generator().manual_seed(0))
    assert not anchors.table_VK.any() and orthogonality_error(anchors.basis_KD.mT) < 1e-6
    assert [name for name, _ in anchors.named_parameters()] == ["table_VK"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_principal_frame_keeps_activations_that_lie_in_a_plane(dtype: torch.dtype) -> None:
    ends = Ends(dtype=torch.float32)
    inside = torch.randn(2, 5, RANK) @ torch.linalg.qr(torch.randn(DIM, RANK))[0].mT
    x = (inside + ends.sent(ends.ids)).detach().to(dtype)
    ends.encoder.init_from(x, ends.ids, ends.sent)
    frame = ends.encoder.frame_DK.detach()
    residual = x.float() - ends.sent(ends.ids).detach()
    assert frame.dtype == torch.float32 and orthogonality_error(frame) < 1e-6
    error = (residual @ frame @ frame.mT - residual).norm() / residual.norm()
    assert float(error) < (1e-5 if dtype == torch.float32 else 2**-6)
