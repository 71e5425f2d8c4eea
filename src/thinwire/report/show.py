"""What `thinwire report` shows: tables on the terminal and one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.report.picture import comparison_picture
from thinwire.report.runs import load_run
from thinwire.report.table import comparison_rows, comparison_tables
from thinwire.train.metrics import to_json


def show(folders: Sequence[Path], picture: Path, *, as_json: bool = False) -> None:
    """Print the comparison of run folders and write its picture.

    Raises:
        ConfigError: a folder that is no run.
    """
    from rich.console import Console

    runs = [load_run(folder) for folder in folders]
    comparison_picture(runs, picture)
    if as_json:
        print(to_json(comparison_rows(runs), indent=2))
        return
    console = Console()
    for table in comparison_tables(runs):
        console.print(table, "")
    console.print(f"picture: {picture}", highlight=False)
