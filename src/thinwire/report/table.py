"""Runs side by side: rows for machines, a table for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from thinwire.report.runs import Run, distinct_names

_FROM_SUMMARY = (
    "val_loss",
    "val_bits_per_byte",
    "bytes_per_token_fwd",
    "bytes_per_token_bwd",
    "bytes_per_token_sync",
    "compression_factor_fwd",
    "compression_factor_bwd",
    "compression_factor_dp",
    "median_step_s",
    "predicted_step_s",
    "orthogonality_error",
)


def comparison_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One flat object per run; None for what a run has not (yet) measured.

    Beside the values of the summary: `predicted_error_percent` is how far the predicted step time lies above
    the measured median, `speedup` how many times shorter a step is than the first run's.
    """
    first_s = _measured(runs[0], "median_step_s") if runs else None
    return [_row(run, name, first_s) for run, name in zip(runs, distinct_names(runs), strict=True)]


def comparison_table(runs: Sequence[Run]) -> Table:
    """The rows of `comparison_rows` for a terminal, two lines a run, the emulated link in the caption."""
    rows = comparison_rows(runs)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, leading=1)
    table.caption, table.caption_justify = Text("\n" + link_caption(runs)), "left"
    columns = [column for column in _COLUMNS if column[0] not in _OPTIONAL or any(map(column[1], rows))]
    for title, _ in columns:
        names = title == _RUN
        table.add_column(
            title,
            justify="left" if names else "right",
            overflow="fold",
            no_wrap=not names,
            min_width=10 if names else None,
        )
    for row in rows:
        cells = [cell(row) for _, cell in columns]
        cells[0] += f"\nlink {row['link'] or 'real'}" if links_differ(runs) else ""
        table.add_row(*map(Text, cells))
    return table


def links_differ(runs: Sequence[Run]) -> bool:
    """Whether the runs' times were measured over different links, so that they do not compare."""
    return len({run.link for run in runs}) > 1


def link_caption(runs: Sequence[Run]) -> str:
    """One sentence that says over which link the runs' times were measured."""
    if links_differ(runs):
        return "Times were measured over DIFFERENT links and do not compare."
    link = runs[0].link if runs else None
    if link is None:
        return "No link was emulated: times are those of the real connections."
    return f"Times were measured over an emulated link of {link}."


def _row(run: Run, name: str, first_s: float | None) -> dict[str, Any]:
    measured_s, predicted_s = (_measured(run, key) for key in ("median_step_s", "predicted_step_s"))
    error = 100 * (predicted_s / measured_s - 1) if measured_s and predicted_s else None
    return {
        "name": name,
        "codec": run.codec,
        "link": run.link,
        "finished": run.finished,
        **{key: _measured(run, key) for key in _FROM_SUMMARY},
        "predicted_error_percent": error,
        "speedup": first_s / measured_s if measured_s and first_s else None,
    }


def _measured(run: Run, key: str) -> float | None:
    value = run.summary.get(key)
    return float(value) if isinstance(value, int | float) else None


def _show(form: str, value: object) -> str:
    return "-" if value is None else form.format(value)


def _stack(first: str, second: str, form: str) -> _Cell:
    """Two values, one above the other."""
    return lambda row: f"{_show(form, row[first])}\n{_show(form, row[second])}"


def _seconds(value: float | None) -> str:
    if value is None or value >= 0.9995 or not math.isfinite(value):
        return _show("{:.2f} s", value)
    return f"{1e3 * value:.3g} ms"


def _step_times(row: dict[str, Any]) -> str:
    error = row["predicted_error_percent"]
    note = "" if error is None else f" ({error:+.0f}%)"
    return f"{_seconds(row['median_step_s'])}\n{_seconds(row['predicted_step_s'])}{note}"


_Cell = Callable[[dict[str, Any]], str]
_RUN, _GRADIENTS = "run\ncodec", "compression\ngradients"
_OPTIONAL = (_GRADIENTS,)
_COLUMNS: tuple[tuple[str, _Cell], ...] = (
    (_RUN, _stack("name", "codec", "{}")),
    ("val loss\nbits/byte", _stack("val_loss", "val_bits_per_byte", "{:.4f}")),
    ("bytes/token\nfwd, bwd", _stack("bytes_per_token_fwd", "bytes_per_token_bwd", "{:,.0f}")),
    ("compression\nfwd, bwd", _stack("compression_factor_fwd", "compression_factor_bwd", "{:.2f}x")),
    (
        _GRADIENTS,
        lambda row: "" if row["compression_factor_dp"] is None else f"{row['compression_factor_dp']:.2f}x",
    ),
    ("step time\npredicted", _step_times),
    ("speed-\nup", lambda row: _show("{:.2f}x", row["speedup"])),
    ("orthog.\nerror", lambda row: _show("{:.1e}", row["orthogonality_error"])),
)
