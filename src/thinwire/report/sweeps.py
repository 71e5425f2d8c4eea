"""The table of a sweep, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

_COLUMNS = (
    ("method", "method", "{}"),
    ("seeds", "seeds", "{}"),
    ("factor\nfwd", "compression_factor_fwd", "{:.2f}x"),
    ("bytes/\ntoken", "bytes_per_token", "{:,.0f}"),
    ("validation\nloss", "val_loss", "{:.4f}"),
    ("against\nuncompressed", "degradation_percent", "{:+.2f}%"),
    ("wire's\nvalue kept", "wire_value_kept", "{:.2f}"),
)


def sweep_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line per method; under a mean its standard deviation over seeds."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, leading=1)
    for number, (title, _, _) in enumerate(_COLUMNS):
        table.add_column(title, justify="right" if number else "left", overflow="fold", no_wrap=number > 0)
    for row in rows:
        table.add_row(*(_cell(row, key, form) for _, key, form in _COLUMNS))
    return table


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    value, spread = row.get(key, row.get(f"{key}_mean")), row.get(f"{key}_sd")
    if value is None:
        return "-"
    return form.format(value) + ("" if spread is None else f"\n± {form.replace('+', '').format(spread)}")
