"""Pipelines: a model cut into stages, its wires, and torch's schedules over them."""

from thinwire.pipeline.activity import Activity
from thinwire.pipeline.connect import connect
from thinwire.pipeline.engine import Engine, Pipeline, Twin
from thinwire.pipeline.split import split
from thinwire.pipeline.stage import Stage
from thinwire.pipeline.sync import Sync, frames

__all__ = ["Activity", "Engine", "Pipeline", "Stage", "Sync", "Twin", "connect", "frames", "split"]
