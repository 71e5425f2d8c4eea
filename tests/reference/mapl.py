"""MAPL's boundary by hand, in float64: no autograd, no modules. Symbols as in arXiv 2606.05484."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Crossing:
    """Everything that a boundary computes for one microbatch, given the gradient at the receiver."""

    z_BTK: Tensor
    x_hat_BTD: Tensor
    dz_BTK: Tensor
    dx_BTD: Tensor
    dframe_sender_DK: Tensor
    dframe_receiver_DK: Tensor
    dsend_VD: Tensor
    dreceive_VD: Tensor


def cross(
    x_BTD: Tensor, ids_BT: Tensor, frame_DK: Tensor, send_VD: Tensor, receive_VD: Tensor, gradient_BTD: Tensor
) -> Crossing:
    """Forward and backward with full anchor tables `(V, D)` at both ends, token by token."""
    num_rows, num_tokens = x_BTD.shape[:2]
    rank = frame_DK.size(1)
    z, dz = x_BTD.new_zeros(num_rows, num_tokens, rank), x_BTD.new_zeros(num_rows, num_tokens, rank)
    x_hat, dx = torch.zeros_like(x_BTD), torch.zeros_like(x_BTD)
    sender, receiver = torch.zeros_like(frame_DK), torch.zeros_like(frame_DK)
    dsend, dreceive = torch.zeros_like(send_VD), torch.zeros_like(receive_VD)
    for b in range(num_rows):
        for t in range(num_tokens):
            token, g = int(ids_BT[b, t]), gradient_BTD[b, t]
            residual = x_BTD[b, t] - send_VD[token]
            z[b, t] = residual @ frame_DK
            x_hat[b, t] = frame_DK @ z[b, t] + receive_VD[token]
            dz[b, t] = g @ frame_DK
            dx[b, t] = frame_DK @ dz[b, t]
            sender += torch.outer(residual, dz[b, t])
            receiver += torch.outer(g, z[b, t])
            dsend[token] -= dx[b, t]
            dreceive[token] += g
    return Crossing(z, x_hat, dz, dx, sender, receiver, dsend, dreceive)
