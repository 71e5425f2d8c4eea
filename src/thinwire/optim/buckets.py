"""Parameters that are exchanged together, and what one worker contributes to their exchange."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.bits import num_words
from thinwire.optim.feedback import add_feedback
from thinwire.optim.gradients import Gradients
from thinwire.optim.rule import Group, Rule, Slot, Wire, has_feedback


@dataclass
class Bucket:
    """Parameters of one group. `indices` count over all groups; `first_word` over all that is voted on."""

    group: Group
    rule: Rule
    first_word: int = 0
    indices: list[int] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    splits: list[Sequence[int]] = field(default_factory=list)


def make_buckets(groups: Iterable[tuple[Group, Rule]], moving: Sequence[bool], bucket_elements: int) -> list[Bucket]:
    """Gather the parameters that move, at most `bucket_elements` together unless one alone is larger.

    What is averaged comes first: it needs no computing, and the most bytes. A parameter's words are where all that is
    voted on, moving or not, would put them, or where a group's `positions` say (by parameter): ties are broken alike
    whatever else moves, and however a model is cut into stages.
    """
    buckets: dict[Wire, list[Bucket]] = {"vote": [], "mean": []}
    index = place = following = 0  # `following`: the word behind the last bucket
    for group, rule in groups:
        size, made = math.inf, buckets[rule.wire]
        for k, (p, splits) in enumerate(zip(group["params"], group["splits"], strict=True)):
            words = num_words(p.numel()) if rule.wire == "vote" else 0
            word = group["positions"][k] if words and "positions" in group else place
            if moving[index]:
                if size + p.numel() > bucket_elements or (words and word != following):
                    made.append(Bucket(group, rule, word))
                    size = 0
                made[-1].indices.append(index)
                made[-1].parameters.append(p)
                made[-1].splits.append(splits)
                size += p.numel()
                following = word + words
            index, place = index + 1, place + words
    return [*buckets["mean"], *buckets["vote"]]


def directions(bucket: Bucket, slots: Sequence[Slot], own: Gradients) -> tuple[list[Tensor], list[Tensor]]:
    """One worker's directions, zero where it has no gradient, and with error feedback the sizes of its matrices."""
    feedback = has_feedback(bucket.rule, bucket.group)
    sizes = [torch.zeros(2, max(1, len(s.splits)), device=s.parameter.device) for s in slots] if feedback else []
    having = [(k, g) for k, i in enumerate(bucket.indices) if (g := own[i]) is not None]
    found = bucket.rule.directions([slots[k] for k, _ in having], [g for _, g in having], bucket.group)
    result = {k: direction for (k, _), direction in zip(having, found, strict=True)}
    for k in result if feedback else ():
        result[k], sizes[k] = add_feedback(result[k], slots[k].state["feedback"], slots[k].splits)
    for k, p in enumerate(bucket.parameters):
        if k not in result:
            result[k] = torch.zeros_like(p, dtype=torch.float32)
    return [result[k] for k in range(len(slots))], sizes
