"""Reports: run folders read back, compared in a table and in a picture."""

from __future__ import annotations

from thinwire.report.picture import comparison_picture
from thinwire.report.runs import Run, load_run
from thinwire.report.show import show
from thinwire.report.table import comparison_rows, comparison_tables

__all__ = ["Run", "comparison_picture", "comparison_rows", "comparison_tables", "load_run", "show"]
