"""What a run amounts to: `summary.json`, every value measured, and the step time that the link model predicts."""

from __future__ import annotations

import math
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from thinwire import __version__
from thinwire.link import Link
from thinwire.optim import Route, describe
from thinwire.pipeline.orders import Action, schedule_actions
from thinwire.plan import simulate
from thinwire.train import replicas
from thinwire.train.build import Parts, ranks_of_stages
from thinwire.train.config import Config
from thinwire.train.metrics import MEANED, SUMMED, to_json, write_atomically
from thinwire.train.place import Place, gather_json
from thinwire.wire import HEADER_BYTES

_SETTLING_STEPS = 2  # the first steps open connections and fill caches; medians leave them out


def summarise(
    config: Config,
    place: Place,
    parts: Parts,
    records: Sequence[dict[str, Any]],
    evaluation: dict[str, float],
    exchange: replicas.Plan | None = None,
    first_step: int = 0,
) -> dict[str, Any]:
    """Gather what the ranks know and write `summary.json`; returns it on the main process, {} elsewhere.

    What replicas cost is that of the steps after `first_step`: earlier ones may have been taken by another number.
    """
    stages = _gather(_stage_accounts(config, parts) if place.replica == 0 else [], place)
    if not place.is_main:
        return {}
    records = [record for record in records if record.keys() >= {"step_s", *SUMMED, *MEANED}]  # of this version
    steady = records[_SETTLING_STEPS:] or records
    lately = [record for record in steady if record["step"] > first_step] or steady[-1:]
    summary = {
        **evaluation,
        "params": sum(stage["params"] for stage in stages),
        **_traffic(config, records),
        **replicas.account(config, exchange, lately, sum(stage["params"] for stage in stages)),
        "median_step_s": median(record["step_s"] for record in steady),
        "predicted_step_s": predicted_step_s(config, stages, steady),
        "link": config.pipeline.link if place.group is not None else "none",  # the twin waits for no link
        "predicted_for_link": config.pipeline.link,
        "codec": _codec_name(config),
        "orthogonality_error": None if config.codec.name == "identity" else _largest_error(records),
        "train_tokens": config.train.steps * config.tokens_per_step,
        "skipped_steps": sum(record["skipped"] for record in records),
        "stages": stages,
        "versions": {"thinwire": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": _commit(),
        "command": shlex.join(["thinwire", *sys.argv[1:]]),
        "seed": config.train.seed,
    }
    write_atomically(Path(config.folder) / config.name / "summary.json", to_json(summary, indent=2))
    return summary


def _largest_error(records: Sequence[dict[str, Any]]) -> float:
    return max(math.nan if error is None else error for error in (record["orthogonality_error"] for record in records))


def predicted_step_s(config: Config, stages: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> float:
    """Step time of the link model: torch's order of actions, each stage's measured compute, the link's rate and delay.

    The optimizer, reading data and the exchange of frames are added as they were measured or, for the exchange, as the
    link would take.
    """
    pipe = config.pipeline
    link = Link.parse(pipe.link)
    forward_s = [stage["forward_s"] for stage in stages]
    backward_s = [stage["backward_s"] for stage in stages]
    if pipe.stages == 1:
        actions = {0: [Action(0, kind, i) for i in range(pipe.microbatches) for kind in "FB"]}
        message_bytes = []
    else:
        actions = schedule_actions(pipe.schedule, pipe.ranks, pipe.per_rank, pipe.microbatches)
        wire_bytes = _message_bytes(config)
        message_bytes = [wire_bytes] * (pipe.stages - 1)
    timeline = simulate(
        actions,
        ranks_of_stages(config),
        forward_s=forward_s,
        backward_s=backward_s,
        message_bytes=message_bytes,
        link=link,
    )
    rest_s: float = median(record["optimizer_s"] + record["data_s"] for record in records)
    if link is not None:
        rest_s += 2 * _exchange_s(config, link, max(stage["frame_bytes"] for stage in stages))
    copies = config.dp.replicas if config.dp.emulate else 1
    return copies * config.train.accumulation * timeline.step_s + rest_s


def _message_bytes(config: Config) -> int:
    """Bytes of one microbatch across one boundary."""
    batch, tokens, *_ = config.microbatch_shape
    return config.make_codec().wire_bytes((batch, tokens, config.dim))


def _exchange_s(config: Config, link: Link, frame_bytes: int) -> float:
    """Seconds in which shared tensors go one way, all boundaries at once."""
    placed = ranks_of_stages(config)
    tied = config.model.tied_head and placed[0] != placed[len(placed) - 1]
    messages = [frame_bytes, 4 * config.vocab_size * config.dim if tied else 0]
    return max((link.transfer_s(size + HEADER_BYTES) for size in messages if size), default=0.0)


def routing_table(config: Config, routes: Sequence[Route], place: Place) -> list[str]:
    """The start-up table `parameter | shape | rule | lr` of the whole pipeline, as lines, with the run's methods."""
    rows = _gather(describe(routes) if place.replica == 0 else [], place)
    if not place.is_main:
        return []
    rules = {"muon": config.optim.method, "adamw": "vote" if config.dp.aux == "vote" else "adamw"}
    for row in rows:
        rule, *matrices = row["rule"].split(" ", 1)
        row["rule"] = " ".join([rules.get(rule, rule), *matrices])
    titles = ("parameter", "shape", "rule")
    widths = [max(len(title), *(len(row[title]) for row in rows)) for title in titles]
    table = [(*titles, "lr"), *((*(row[title] for title in titles), f"{row['lr']:g}") for row in rows)]
    head, *lines = (
        " | ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)), cells[-1]])
        for cells in table
    )
    has_mirrors = any(row["rule"] == "mirror" for row in rows)
    note = ["(mirror: follows the owner of the same tensor on another stage)"] if has_mirrors else []
    return [head, "-" * len(head), *lines, *note, ""]


def _traffic(config: Config, records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Bytes per token and boundary between two ranks, and compression factors, over all steps of the run."""
    ranks = ranks_of_stages(config)
    boundaries = sum(ranks[p] != ranks[p + 1] for p in range(len(ranks) - 1))
    tokens = boundaries * len(records) * config.tokens_per_step
    result: dict[str, float | None] = {"bytes_per_token_sync": 0.0}
    for way in ("fwd", "bwd"):
        sync = sum(record[f"sync_bytes_{way}"] for record in records)
        sent = sum(record[f"wire_bytes_{way}"] for record in records) + sync
        result[f"bytes_per_token_{way}"] = sent / tokens if tokens else 0.0
        result[f"compression_factor_{way}"] = 2 * config.dim * tokens / sent if sent else None
        result["bytes_per_token_sync"] += sync / tokens if tokens else 0.0  # type: ignore[operator]
    return result


def _stage_accounts(config: Config, parts: Parts) -> list[dict[str, Any]]:
    """Per stage of this process: sizes, medians of its compute, and the process's peak memory.

    `held_bytes`: parameters and buffers, the codec's included. `wire_buffer_bytes`: what torch's schedule receives
    into, one carrier per microbatch and direction. `max_in_flight`: microbatches between forward and backward.
    """
    pipe = config.pipeline
    wire_bytes = _message_bytes(config)
    mirrors = parts.engine.sync.mirrors()
    accounts = []
    for stage in parts.stages:
        own = [p for name, p in stage.named_parameters() if name not in mirrors]
        held = {p.data_ptr(): p.numel() * p.element_size() for p in [*stage.parameters(), *stage.buffers()]}
        accounts.append(
            {
                "stage": stage.index,
                "params": sum(p.numel() for p in own),
                "held_bytes": sum(held.values()),
                "frame_bytes": sum(4 * p.numel() for p in stage.outbound.parameters() if p.requires_grad),
                "wire_buffer_bytes": len(list(stage.ports())) * pipe.microbatches * wire_bytes,
                "max_in_flight": parts.engine.activity.max_in_flight.get(stage.index, 1),
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                **_compute_medians(parts, stage.index),
            }
        )
    return accounts


def _compute_medians(parts: Parts, index: int) -> dict[str, float]:
    times = parts.engine.activity.durations_s
    forward_s = median(times.get((index, "F"), [0.0]))
    if (-1, "B") in times:  # the twin runs one backward pass through all stages
        whole = median(sum(column) for column in zip(*(times[s.index, "F"] for s in parts.stages), strict=False))
        return {"forward_s": forward_s, "backward_s": median(times[-1, "B"]) * forward_s / whole}
    parted_s = sum(median(times[index, kind]) for kind in "IW" if times.get((index, kind)))
    backward_s = median(times[index, "B"]) if times.get((index, "B")) else parted_s
    return {"forward_s": forward_s, "backward_s": backward_s}


def _gather(rows: list[dict[str, Any]], place: Place) -> list[dict[str, Any]]:
    """All ranks' rows, by stage where they have one."""
    gathered = [row for part in gather_json(rows, place) for row in part]
    return sorted(gathered, key=lambda row: row.get("stage", 0))


def _codec_name(config: Config) -> str:
    codec = config.make_codec()
    rank = getattr(codec, "rank", None)
    parts = [config.codec.name, f"K={rank}" if rank else "", config.codec.wire_format]
    if config.codec.gradient_format:
        parts.append(f"back {config.codec.gradient_format}")
    if config.codec.anchor_rank:
        parts.append(f"anchors {config.codec.anchor_rank}")
    return " ".join(part for part in parts if part)


def _commit() -> str | None:
    """The commit of the code in use, or None outside a checkout."""
    where = Path(__file__).parent
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
