"""What travels beside the signs so that the receiver knows which are present. Its size is known to both ends.

NONE    nothing
FEW     for each word that is partly present, its index and its mask
WORDS   a bit per word, present or not; and the list of FEW
ANY     a bit per sign
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire import bits
from thinwire.collectives.ballots import Ballot, Zeros


def write_mask(ballot: Ballot, full_W: Tensor, zeros: Zeros, few: int) -> Tensor:
    """Return int64 words, their number a function of W, `zeros` and `few`; `full_W` as of `all_present`."""
    if zeros is Zeros.NONE:
        return full_W[:0]
    if zeros is Zeros.ANY:
        return ballot.present_W
    partly = (ballot.present_W != full_W) & (ballot.present_W != 0)
    indices = partly.nonzero().flatten()
    listed = full_W.new_full((2, few), -1)
    listed[0, : indices.numel()] = indices
    listed[1, : indices.numel()] = ballot.present_W[indices]
    if zeros is Zeros.FEW:
        return listed.flatten()
    return torch.cat([bits.pack_mask(ballot.present_W != 0), listed.flatten()])


def read_mask(negative_W: Tensor, mask: Tensor, full_W: Tensor, zeros: Zeros, few: int) -> Ballot:
    """The inverse of `write_mask`.

    Raises:
        IndexError: a list that points outside the words.
    """
    if zeros is Zeros.NONE:
        return Ballot(negative_W, full_W, zeros)
    if zeros is Zeros.ANY:
        return Ballot(negative_W, mask, zeros)
    present_W = full_W.clone()
    if zeros is Zeros.WORDS:
        split = bits.num_words(full_W.numel())
        present_W &= -bits.unpack_mask(mask[:split], full_W.numel()).to(torch.int64)
        mask = mask[split:]
    indices, masks = mask.view(2, few)
    used = indices >= 0
    present_W[indices[used]] = masks[used]
    return Ballot(negative_W, present_W, zeros, few)
