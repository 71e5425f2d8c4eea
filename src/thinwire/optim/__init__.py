"""Optimizers and the routing of parameters to them."""

from thinwire.optim.build import build_optimizers, clip_gradients, gradient_square_sum, lr_factor, set_lr
from thinwire.optim.groups import Route, describe, fused_splits, groups, param_groups, route, route_models
from thinwire.optim.muon import Muon
from thinwire.optim.spel import Spel

__all__ = [
    "Muon",
    "Route",
    "Spel",
    "build_optimizers",
    "clip_gradients",
    "describe",
    "fused_splits",
    "gradient_square_sum",
    "groups",
    "lr_factor",
    "param_groups",
    "route",
    "route_models",
    "set_lr",
]
