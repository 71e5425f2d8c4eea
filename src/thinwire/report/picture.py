"""One picture of several runs: loss against data, against wall-clock time, against bytes sent."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from thinwire.report.runs import Run, distinct_names, number
from thinwire.report.table import link_caption, links_differ

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# M. Okabe and K. Ito, "Color Universal Design" (2008): told apart with every kind of colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_INK, _PALE_INK = "#222222", "#5a5a5a"
_DPI = 150
_WIDTH, _HEIGHT = 1800 / _DPI, 650 / _DPI  # inches
_LEGEND_LINE = 0.22  # inches
_SMOOTHING_SHARE = 0.03  # the training loss is averaged over about this share of the steps
_SETTLED_SHARE = 0.05  # the first steps' loss would leave no height for the rest; the axis is cut there

Points = list[tuple[float, float]]


class _Panel(NamedTuple):
    title: str
    label: str
    positions: Callable[[Run], list[float]]
    logarithmic: bool = False


def comparison_picture(runs: Sequence[Run], path: Path) -> None:
    """Write the picture as a PNG of 1800 x 650 pixels, higher for more than six runs; whole or not at all.

    Lines are the training loss, smoothed; where a run was evaluated they are faint, and the strong line with
    markers is the validation loss. Bytes are all that was sent: both directions, votes and frame updates.
    """
    from matplotlib.figure import Figure

    num_lines = max(1, math.ceil(len(runs) / 3))
    height = _HEIGHT + _LEGEND_LINE * max(0, num_lines - 2)
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    axes = figure.subplots(1, 3, sharey=True)
    drawn = [_draw(axis, panel, runs) for axis, panel in zip(axes, _panels(runs), strict=True)]
    per = " or ".join(sorted({run.unit.removesuffix("s") for run in runs})) or "token"
    axes[0].set_ylabel(f"loss (nats per {per})", fontsize=10, color=_INK)
    _set_ranges(axes, runs, drawn[-1])
    _write_around(figure, runs, height, num_lines)
    _save(figure, path)


def _panels(runs: Sequence[Run]) -> list[_Panel]:
    longest_s = max((seconds[-1] for run in runs if (seconds := _elapsed_s(run))), default=0.0)
    unit, unit_s = "seconds", 1.0
    if longest_s > 300:
        unit, unit_s = ("minutes", 60.0) if longest_s < 3 * 3600 else ("hours", 3600.0)
    units = sorted({run.unit for run in runs}) or ["tokens"]
    return [
        _Panel("Against data", " or ".join(units), lambda run: run.column("tokens")),
        _Panel("Against time", f"wall-clock time of the steps ({unit})", lambda run: _elapsed_s(run, unit_s)),
        _Panel("Against traffic", "bytes sent", _bytes_sent, logarithmic=True),
    ]


def _elapsed_s(run: Run, unit_s: float = 1.0) -> list[float]:
    return [seconds / unit_s for seconds in _running_sum(run.column("step_s"))]


def _bytes_sent(run: Run) -> list[float]:
    kinds = [run.column(f"wire_bytes_{kind}") for kind in ("fwd", "bwd", "dp", "sync")]
    return _running_sum(sum(map(_or_zero, values)) for values in zip(*kinds, strict=True))


def _running_sum(values: Iterable[float]) -> list[float]:
    return list(accumulate(map(_or_zero, values)))


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _draw(axis: Axes, panel: _Panel, runs: Sequence[Run]) -> Points:
    """Draw every run, and return all points that were drawn."""
    drawn = []
    for index, run in enumerate(runs):
        positions = panel.positions(run)
        training = _drawable(zip(positions, _smoothed(run.column("loss")), strict=True), panel.logarithmic)
        validation = _drawable(_validation(run, positions), panel.logarithmic)
        _draw_run(axis, index, training, validation)
        drawn += training + validation
    _style(axis, panel, bool(drawn))
    return drawn


def _draw_run(axis: Axes, index: int, training: Points, validation: Points) -> None:
    colour, marker = _look(index)
    if training:
        width, alpha = (1.3, 0.4) if validation else (2.0, 1.0)
        axis.plot(*zip(*training, strict=True), color=colour, linewidth=width, alpha=alpha, zorder=2)
    if validation:
        axis.plot(
            *zip(*validation, strict=True),
            color=colour,
            linewidth=2.0,
            marker=marker,
            markersize=6,
            markeredgecolor="white",
            markeredgewidth=0.8,
            zorder=3,
        )


def _look(index: int) -> tuple[str, str]:
    return _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]


def _drawable(points: Iterable[tuple[float, float]], logarithmic: bool) -> Points:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (x > 0 or not logarithmic)]


def _validation(run: Run, positions: Sequence[float]) -> Points:
    """Validation losses, each where the run stood after the last step before its evaluation."""
    steps = run.column("step")
    points = []
    for evaluation in run.evaluations:
        done = bisect_right(steps, number(evaluation.get("step")))
        x = positions[done - 1] if done else 0.0
        points.append((x, number(evaluation.get("val_loss"))))
    return points


def _smoothed(values: Sequence[float]) -> list[float]:
    """An exponential average that starts without bias and steps over what is not finite."""
    keep = 1 - 1 / max(1.0, _SMOOTHING_SHARE * len(values))
    total = weight = 0.0
    smooth = []
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
        smooth.append(total / weight if weight else math.nan)
    return smooth


def _set_ranges(axes: Sequence[Axes], runs: Sequence[Run], traffic: Points) -> None:
    """Leave the steep beginning out of the loss axis, and what it leaves empty out of the byte axis."""
    losses = _finite(loss for run in runs for loss in _settled(run))
    if not losses:
        axes[0].set_yticks([])
    if not losses or max(losses) == min(losses):
        return
    margin = 0.06 * (max(losses) - min(losses))
    top = max(losses) + margin
    axes[0].set_ylim(min(losses) - margin, top)
    visible = [x for x, y in traffic if y <= top]
    if visible:
        axes[-1].set_xlim(left=min(visible) / 1.3)


def _settled(run: Run) -> list[float]:
    smooth = _smoothed(run.column("loss"))
    last = [y for _, y in _validation(run, [math.nan] * len(smooth))[-1:]]
    return smooth[int(_SETTLED_SHARE * len(smooth)) :] + last


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _style(axis: Axes, panel: _Panel, drawn: bool) -> None:
    from matplotlib.ticker import EngFormatter

    axis.set_title(panel.title, fontsize=12, color=_INK, loc="left", pad=7)
    axis.set_xlabel(panel.label, fontsize=10, color=_INK)
    axis.tick_params(labelsize=9.5, colors=_PALE_INK, length=3)
    axis.grid(color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#b0b0b0")
    if not drawn:
        axis.text(0.5, 0.5, "nothing to draw", transform=axis.transAxes, ha="center", color=_PALE_INK)
        axis.set_xticks([])
        return
    if panel.logarithmic:
        axis.set_xscale("log")
    axis.xaxis.set_major_formatter(
        EngFormatter(unit="B" if panel.logarithmic else "", sep=" " if panel.logarithmic else "")
    )


def _write_around(figure: Figure, runs: Sequence[Run], height: float, num_lines: int) -> None:
    """Title above; legend and caption below. Inches from the edges, whatever the height."""
    below = 0.9 + _LEGEND_LINE * num_lines
    figure.subplots_adjust(left=0.055, right=0.985, top=1 - 0.78 / height, bottom=below / height, wspace=0.07)
    title = figure.suptitle("Loss against data, time and traffic", fontsize=15, fontweight="bold", color=_INK)
    title.set(x=0.055, y=1 - 0.12 / height, ha="left", va="top")
    _write_legend(figure, runs, 0.3 / height)
    lines = "Faint: training loss, smoothed. Markers: validation loss. "
    if not any(run.evaluations for run in runs):
        lines = "Training loss, smoothed. "
    caption = figure.text(0.52, 0.08 / height, lines + link_caption(runs), ha="center", fontsize=9)
    caption.set(color=_PALE_INK, parse_math=False)


def _write_legend(figure: Figure, runs: Sequence[Run], bottom: float) -> None:
    from matplotlib.lines import Line2D

    looks = [_look(index) for index in range(len(runs))]
    legend = figure.legend(
        [Line2D([], [], color=c, marker=m, linewidth=2.2, markeredgecolor="white") for c, m in looks],
        [str(index) for index in range(len(runs))],
        loc="lower center",
        bbox_to_anchor=(0.52, bottom),
        ncols=min(3, max(1, len(runs))),
        frameon=False,
        fontsize=10.5,
        labelcolor=_INK,
        handlelength=2.4,
    )
    # Named afterwards: matplotlib drops a label that begins with an underscore.
    for text, name, run in zip(legend.get_texts(), distinct_names(runs), runs, strict=True):
        link = (run.links or "real links",) if links_differ(runs) else ()
        text.set(text=f"{name} ({', '.join([*_compressors(run), *link])})", parse_math=False)


def _compressors(run: Run) -> list[str]:
    """What replicas train by, and what crosses the boundaries, where there are any."""
    method = [run.method] if run.num_replicas > 1 else []
    return [*method, run.codec] if run.num_stages > 1 or not method else method


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        figure.savefig(unfinished, format="png", dpi=_DPI)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
