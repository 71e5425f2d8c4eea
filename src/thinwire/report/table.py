"""Runs side by side: rows for machines, tables for people, which fit 80 columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from thinwire.link import rate
from thinwire.report.runs import Run, distinct_names

_FROM_SUMMARY = (
    "val_loss",
    "val_bits_per_byte",
    "val_accuracy",
    "bytes_per_token_fwd",
    "bytes_per_token_bwd",
    "bytes_per_token_sync",
    "compression_factor_fwd",
    "compression_factor_bwd",
    "compression_factor_dp",
    "bytes_per_step_worker_dp",
    "exchange_s",
    "predicted_exchange_s",
    "dp_bandwidth_bps",
    "break_even_bps",
    "median_step_s",
    "predicted_step_s",
    "orthogonality_error",
)
Row = dict[str, Any]
_Column = tuple[str, Callable[[Row], str]]


def comparison_rows(runs: Sequence[Run]) -> list[Row]:
    """One flat object per run; None for what a run has not (yet) measured.

    Beside the values of the summary: `predicted_error_percent` is how far the predicted step time lies above
    the measured median, `speedup` how many times shorter a step is than the first run's, `wire_value_kept` what
    `wire_value_kept` says.
    """
    first_s = _measured(runs[0], "median_step_s") if runs else None
    rows = [_row(run, name, first_s) for run, name in zip(runs, distinct_names(runs), strict=True)]
    return [row | {"wire_value_kept": wire_value_kept(run, runs)} for row, run in zip(rows, runs, strict=True)]


def wire_value_kept(run: Run, among: Sequence[Run]) -> float | None:
    """The share of the wire's value that a run's codec keeps: 1 like an uncompressed wire, 0 like none.

    `(loss_cut - loss) / (loss_cut - loss_uncompressed)`, where both have the anchors of `run` and as many stages.
    Uncompressed is what sends no less than bfloat16, as `fixed` with a frame as wide as the model does. None where
    `among` does not hold exactly one of each, or where the cut is no worse: there the wire is worth nothing.
    """
    alike = [one for one in among if (one.anchor_rank, one.num_stages) == (run.anchor_rank, run.num_stages)]
    cut = [_measured(one, "val_loss") for one in alike if one.is_cut]
    whole = [_measured(one, "val_loss") for one in alike if is_uncompressed(one)]
    loss = _measured(run, "val_loss")
    if len(cut) != 1 or len(whole) != 1 or loss is None or cut[0] is None or whole[0] is None or cut[0] <= whole[0]:
        return None
    return (cut[0] - loss) / (cut[0] - whole[0])


def is_uncompressed(run: Run) -> bool:
    """Whether a run sent no less than bfloat16 over its boundaries."""
    factor = _measured(run, "compression_factor_fwd")
    return factor is not None and factor <= 1


def comparison_tables(runs: Sequence[Run]) -> list[Table | Text]:
    """The rows of `comparison_rows` for a terminal, two lines a run: learning and time, boundaries, replicas.

    A table without anything to say is left out. The last line says over which links times were measured.
    """
    rows = comparison_rows(runs)
    tables: list[Table | Text] = [_table(_LEARNING, rows)]
    crossed = [row for row in rows if row["stages"] > 1]
    replicated = [row for row in rows if row["replicas"] > 1]
    tables += [_table(columns, part) for columns, part in ((_BOUNDARIES, crossed), (_REPLICAS, replicated)) if part]
    return [*tables, Text(link_caption(runs))]


def _table(columns: Iterable[_Column], rows: Sequence[Row]) -> Table:
    """Only the first column, the name, is folded where space is short."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, leading=1)
    for number, (title, _) in enumerate(columns):
        table.add_column(title, justify="right" if number else "left", overflow="fold", no_wrap=number > 0)
    for row in rows:
        table.add_row(*(Text(cell(row)) for _, cell in columns))
    return table


def links_differ(runs: Sequence[Run]) -> bool:
    """Whether the runs' times were measured over different links, so that they do not compare."""
    return len({run.links for run in runs}) > 1


def link_caption(runs: Sequence[Run]) -> str:
    """One sentence that says over which links the runs' times were measured."""
    if links_differ(runs):
        return "Times were measured over DIFFERENT links and do not compare."
    links = runs[0].links if runs else None
    if links is None:
        return "No link was emulated: times are those of the real connections."
    return f"Times were measured over an emulated link of {links}."


def _row(run: Run, name: str, first_s: float | None) -> Row:
    measured_s, predicted_s = (_measured(run, key) for key in ("median_step_s", "predicted_step_s"))
    error = 100 * (predicted_s / measured_s - 1) if measured_s and predicted_s else None
    return {
        "name": name,
        "method": run.method,
        "codec": run.codec,
        "stages": run.num_stages,
        "link": run.link,
        "replicas": run.num_replicas,
        "dp_link": run.dp_link,
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


def _stack(first: str, second: str, form: str) -> Callable[[Row], str]:
    """Two values, one above the other."""
    return lambda row: f"{_show(form, row[first])}\n{_show(form, row[second])}"


def _seconds(value: float | None) -> str:
    if value is None or value >= 0.9995 or not math.isfinite(value):
        return _show("{:.2f} s", value)
    return f"{1e3 * value:.3g} ms"


def _step_times(row: Row) -> str:
    error = row["predicted_error_percent"]
    note = "" if error is None else f" ({error:+.0f}%)"
    return f"{_seconds(row['median_step_s'])}\n{_seconds(row['predicted_step_s'])}{note}"


def _quality(row: Row) -> str:
    """Bits per byte of text, right answers on pictures."""
    accuracy = row["val_accuracy"]
    second = _show("{:.4f}", row["val_bits_per_byte"]) if accuracy is None else f"{accuracy:.2f} %"
    return _show("{:.4f}", row["val_loss"]) + "\n" + second


def _sent(row: Row) -> str:
    num_bytes = row["bytes_per_step_worker_dp"]
    kilobytes = None if num_bytes is None else num_bytes / 1e3
    return f"{_show('{:,.1f}', kilobytes)}\n{_show('{:.2f}x', row['compression_factor_dp'])}"


def _kept(row: Row) -> str:
    return f"{_show('{:.0%}', row['wire_value_kept'])}\n{_show('{:.1e}', row['orthogonality_error'])}"


def _rate(value: float | None) -> str:
    return "-" if value is None else rate(value)


_LEARNING: tuple[_Column, ...] = (
    ("run\nmethod", _stack("name", "method", "{}")),
    ("validation loss\nbits/byte or accuracy", _quality),
    ("step time\npredicted", _step_times),
    ("speed-\nup", lambda row: _show("{:.2f}x", row["speedup"])),
)
_BOUNDARIES: tuple[_Column, ...] = (
    ("between stages\ncodec", _stack("name", "codec", "{}")),
    ("link", lambda row: row["link"] or "real"),
    ("bytes/token\nfwd, bwd", _stack("bytes_per_token_fwd", "bytes_per_token_bwd", "{:,.0f}")),
    ("compression\nfwd, bwd", _stack("compression_factor_fwd", "compression_factor_bwd", "{:.2f}x")),
    ("wire's value\northog. error", lambda row: _kept(row)),
)
_REPLICAS: tuple[_Column, ...] = (
    ("between replicas\nnumber", _stack("name", "replicas", "{}")),
    ("link\ncarries", lambda row: f"{row['dp_link'] or 'real'}\n{_rate(row['dp_bandwidth_bps'])}"),
    ("kB/step, worker\ncompression", _sent),
    ("exchange\npredicted", lambda row: f"{_seconds(row['exchange_s'])}\n{_seconds(row['predicted_exchange_s'])}"),
    ("signs pay\nbelow", lambda row: _rate(row["break_even_bps"])),
)
