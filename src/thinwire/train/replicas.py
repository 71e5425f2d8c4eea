"""What replicas cost each other: predicted beside measured, and whether sending signs pays on this network."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from thinwire.collectives import cost
from thinwire.link import Link, rate
from thinwire.optim import DataParallel
from thinwire.optim.rule import has_feedback
from thinwire.train.build import Parts
from thinwire.train.config import Config
from thinwire.train.place import Place, gather_json

_log = logging.getLogger("thinwire")
_METHODS = {torch.float32: "fp32", torch.bfloat16: "bf16"}  # of `collectives.cost`, for means that travel so


@dataclass(frozen=True)
class Plan:
    """The exchange of a step as the alpha-beta model sees it; numbers of one process, in the mean over stages."""

    config: Config
    network: cost.AlphaBeta
    voted: float
    averaged: dict[str, float]

    @property
    def transport(self) -> str:
        """Of the votes; `means` where there are none."""
        dp = self.config.dp
        if not self.voted:
            return "means"
        return dp.transport if dp.transport != "auto" else cost.cheapest(self.voted, dp.replicas, self.network, dp.ties)

    def table(self) -> dict[str, tuple[float, float]]:
        """Bytes per process and seconds, by transport, `fp32` for all-reduces of all gradients."""
        dp = self.config.dp
        rows = cost.table(self.voted, self.averaged, dp.replicas, self.network, dp.ties)
        return {name: (num_bytes, seconds) for name, num_bytes, seconds in rows}

    def lines(self) -> list[str]:
        """What is said before the first step."""
        dp = self.config.dp
        kind = "measured" if Link.parse(dp.link) is None else "emulated"
        rows = [
            f"  {name:6}  {num_bytes / 1e6:10.3f} MB  {seconds:8.3f} s" + "  <- this run" * (name == self.transport)
            for name, (num_bytes, seconds) in self.table().items()
        ]
        head = f"predicted exchange of {dp.replicas} replicas, a step and process"
        return [
            f"{head}, at {rate(self.network.bandwidth_bps)} and {1e3 * self.network.alpha_s:.3g} ms ({kind}):",
            *rows,
            "",
        ]


def plan(config: Config, parts: Parts, place: Place) -> Plan | None:
    """Look at the network and settle the transport `auto`; None where nothing is sent. All ranks must call it."""
    if place.replica_group is None or config.dp.replicas == 1 or config.dp.emulate:
        return None
    link = Link.parse(config.dp.link)
    if link is not None and not math.isinf(link.bandwidth_bps):
        network = cost.AlphaBeta.of(link.bandwidth_bps, link.latency_s)
    else:
        network = cost.probe(parts.optimizers[0].workers, place.device)
        parts.optimizers[0].workers.waited_s = 0.0  # belongs to no step
    everywhere = gather_json(numbers_sent(parts.optimizers), place)
    total: Counter[str] = sum(map(Counter, everywhere), Counter())
    mean = {method: number / len(everywhere) for method, number in total.items()}
    made = Plan(config, network, mean.pop("vote", 0.0), mean)
    if made.voted:
        for optimizer in parts.optimizers:
            optimizer.transport = made.transport  # type: ignore[assignment]
    return made


def numbers_sent(optimizers: Sequence[DataParallel]) -> dict[str, int]:
    """How many numbers a process has voted on (`vote`), and how many it has averaged in which dtype, in every step."""
    found: Counter[str] = Counter()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rule = optimizer.rules[group["rule"]]
            method = "vote" if rule.wire == "vote" else _METHODS[group["wire_dtype"]]
            found[method] += sum(p.numel() for p in group["params"])
            if has_feedback(rule, group):  # of each matrix its size, and whether there is a vote
                found["fp32"] += 2 * sum(max(1, len(splits)) for splits in group["splits"])
    return dict(found)


def account(config: Config, made: Plan | None, records: Sequence[dict[str, Any]], params: int) -> dict[str, Any]:
    """What goes into the summary; docs/replicas.md defines every key."""
    sent = sum(record["wire_bytes_dp"] for record in records)
    size, steps = config.dp.replicas, len(records)
    full = 8 * (size - 1) * params * steps  # over all processes: a ring sends 2 (M - 1) / M of 4 bytes from each
    result: dict[str, Any] = {"bytes_per_step_dp": sent / steps, "compression_factor_dp": full / sent if sent else None}
    if made is None:
        return result
    exchange_s = median(record["exchange_s"] for record in records)
    table = made.table()
    result |= {
        "bytes_per_step_worker_dp": sent / steps / (config.pipeline_ranks * size),
        "exchange_s": exchange_s,
        "predicted_exchange_s": table[made.transport][1],
        "predicted_fp32_s": table["fp32"][1],
        "dp_bandwidth_bps": _known(made.network.bandwidth_bps),
        "dp_latency_s": made.network.alpha_s,
    }
    if made.voted:
        saved = table["fp32"][0] - result["bytes_per_step_worker_dp"]
        computing_s = median(record["optimizer_s"] for record in records) - exchange_s
        limit = cost.break_even_bps(saved, computing_s)
        result["break_even_bps"] = _known(limit)
        if made.network.bandwidth_bps > limit:
            _log.warning(
                "replicas: signs save less time than computing them takes: the network carries %s, signs pay below "
                "%s; here a new run with `%s` may be faster",
                rate(made.network.bandwidth_bps), rate(limit), " ".join(without_signs(config)),
            )  # fmt: skip
    return result


def _known(bandwidth_bps: float) -> float | None:
    """JSON has no infinity."""
    return None if math.isinf(bandwidth_bps) else bandwidth_bps


def lines(summary: dict[str, Any]) -> list[str]:
    """What is said after the last step: measured beside predicted."""
    if "exchange_s" not in summary:
        return []
    said = [
        f"replicas: a step's exchange took {summary['exchange_s']:.3f} s, predicted "
        f"{summary['predicted_exchange_s']:.3f} s, with fp32 all-reduces {summary['predicted_fp32_s']:.3f} s",
        f"replicas: {summary['bytes_per_step_worker_dp']:,.0f} bytes a step from each process, "
        f"{summary['compression_factor_dp'] or 0:.2f}x fewer than with fp32 all-reduces",
    ]
    if "break_even_bps" in summary:
        limit, carried = summary["break_even_bps"], summary["dp_bandwidth_bps"]
        pays = "on every network" if limit is None else f"below {rate(limit)}"
        said.append(f"replicas: signs pay {pays}; this one carries {rate(math.inf if carried is None else carried)}")
    return said


def without_signs(config: Config) -> list[str]:
    """Flags that turn a run which votes into Muon on averaged gradients, with Muon's rates."""
    default = Config()
    words = ["--optim.method", "muon", "--optim.lr", f"{default.optim.lr:g}"]
    for section, names in (
        ("dp", ("aux", "ties", "transport")),
        ("optim", ("adamw_ratio", "frame_ratio", "scale", "local_polar", "feedback")),
    ):
        for name in names:
            value, usual = (getattr(getattr(one, section), name) for one in (config, default))
            flag = f"{section}.{name.replace('_', '-')}"
            if value != usual:
                words += [f"--{section}.no-{name.replace('_', '-')}"] if usual is False else [f"--{flag}", str(usual)]
    return words
