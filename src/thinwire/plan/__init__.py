"""What a step would cost: schedules simulated on a link model."""

from __future__ import annotations

from thinwire.plan.simulate import Action, Span, StepTimeline, schedule_actions, simulate, stage_rank

__all__ = ["Action", "Span", "StepTimeline", "schedule_actions", "simulate", "stage_rank"]
