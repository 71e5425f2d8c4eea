"""Optimizers and the routing of parameters to them."""

from thinwire.optim.agreement import mean_of_workers, mean_state
from thinwire.optim.build import build_optimizers, clip_gradients, gradient_square_sum, lr_factor, set_lr
from thinwire.optim.data_parallel import DataParallel
from thinwire.optim.groups import Route, describe, fused_splits, groups, param_groups, route, route_models
from thinwire.optim.methods import METHODS, SGD, AdamW, DistributedLion, Muon, SignMuon, SignSGD, Signum, Spel

__all__ = [
    "METHODS",
    "SGD",
    "AdamW",
    "DataParallel",
    "DistributedLion",
    "Muon",
    "Route",
    "SignMuon",
    "SignSGD",
    "Signum",
    "Spel",
    "build_optimizers",
    "clip_gradients",
    "describe",
    "fused_splits",
    "gradient_square_sum",
    "groups",
    "lr_factor",
    "mean_of_workers",
    "mean_state",
    "param_groups",
    "route",
    "route_models",
    "set_lr",
]
