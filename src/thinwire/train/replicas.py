"""What replicas cost each other: predicted beside measured, and whether sending signs pays on this network."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from thinwire.collectives import cost
from thinwire.link import Link
from thinwire.optim.methods import VOTING
from thinwire.train.build import Parts
from thinwire.train.config import Config
from thinwire.train.place import Place

_log = logging.getLogger("thinwire")


def network(config: Config, parts: Parts, place: Place) -> cost.AlphaBeta | None:
    """The network between replicas: the emulated one, else measured; None where nothing is sent."""
    if place.replica_group is None:
        return None
    link = Link.parse(config.dp.link)
    if link is not None and not math.isinf(link.bandwidth_bps):
        return cost.AlphaBeta.of(link.bandwidth_bps, link.latency_s)
    return cost.probe(parts.optimizers[0].workers, place.device)


def exchange_s(config: Config, voted: int, averaged: int, net: cost.AlphaBeta) -> float:
    """Seconds of one step's exchange by the alpha-beta model: signs, and means of what is not voted on."""
    size, ties = config.dp.replicas, config.dp.ties
    method = cost.cheapest(voted, size, net, ties) if config.dp.transport == "auto" else config.dp.transport
    votes_s = cost.seconds(method, voted, size, net, ties) if voted else 0.0
    wide = "bf16" if config.optim.method in VOTING or config.optim.method == "muon" else "fp32"
    return votes_s + (cost.seconds(wide, averaged, size, net) if averaged else 0.0)


def account(
    config: Config, parts: Parts, records: Sequence[dict[str, Any]], net: cost.AlphaBeta | None, params: int
) -> dict[str, Any]:
    """What goes into the summary: bytes, factor, seconds predicted and measured, break-even bandwidth.

    The factor compares with fp32 all-reduces of all gradients, everything that was sent included.
    """
    sent = sum(record["wire_bytes_dp"] for record in records)
    size, steps = config.dp.replicas, len(records)
    full = 8 * (size - 1) * params * steps  # over all ranks: a ring sends 2 (M - 1) / M of 4 bytes from each
    result: dict[str, Any] = {"bytes_per_step_dp": sent / steps, "compression_factor_dp": full / sent if sent else None}
    if net is None:
        return result
    voted, averaged = _elements(parts)
    measured_s = median(record["vote_s"] for record in records)
    extra_s = median(record["optimizer_s"] for record in records) - measured_s
    saved = cost.payload_bytes("fp32", voted + averaged, size) - sent / steps / (config.pipeline_ranks * size)
    limit = cost.break_even_bps(saved, extra_s)
    result |= {
        "vote_s": measured_s,
        "predicted_vote_s": exchange_s(config, voted, averaged, net),
        "predicted_fp32_s": cost.seconds("fp32", voted + averaged, size, net),
        "dp_bandwidth_bps": net.bandwidth_bps,
        "break_even_bps": limit,
    }
    signs = config.optim.method in VOTING or config.dp.aux == "vote"
    if signs and net.bandwidth_bps > limit:
        _log.warning(
            "replicas: signs save less time than computing them takes: the network carries %.3g Mbit/s, signs pay "
            "below %.3g Mbit/s; use optim.method=muon or adamw here", net.bandwidth_bps / 1e6, limit / 1e6,
        )  # fmt: skip
    return result


def _elements(parts: Parts) -> tuple[int, int]:
    """Numbers of this process that are voted on, and that are averaged."""
    voted = averaged = 0
    for optimizer in parts.optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if optimizer.is_worker_state(p):
                    voted += p.numel()
                else:
                    averaged += p.numel()
    return voted, averaged
