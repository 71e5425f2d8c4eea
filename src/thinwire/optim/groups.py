"""Which parameter is trained by which rule: decided once, printed, and every parameter exactly once."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from thinwire.errors import ConfigError

Rule = Literal["muon", "adamw", "spel", "mirror", "frozen"]

# Matrices that are not hidden: they map from or to the vocabulary or the classes.
_ENDS = r"(^|\.)(embedding|embeddings|embed|wte|wpe|head|lm_head|output|classifier|fc)\.weight$"
_FRAME = r"(^|\.)outbound\.\d+\.frame_DK$"
_MIRROR = r"(^|\.)(inbound|sending)\.\d+\."
_TABLE = r"(^|\.)anchors\.\d+\."


@dataclass(frozen=True)
class Route:
    """The decision for one parameter. `splits`: rows of the logical matrices fused in it, empty for one matrix."""

    name: str
    parameter: nn.Parameter
    rule: Rule
    lr: float
    splits: tuple[int, ...] = ()


def route(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    adamw_lr: float,
    frame_lr: float,
    fused: Mapping[str, Sequence[int]] | None = None,
    free_frames: bool = False,
    adamw: Sequence[str] = (),
    tables: Container[int] = (),
) -> list[Route]:
    """Decide the rule of every parameter.

    Hidden matrices (two dimensions or more, neither embedding nor head) go to Muon; frames to SPEL; everything else
    to AdamW. Mirrors follow an owner and are stepped by nobody here: what `pipeline.Sync` has marked so, receiving
    frames and sending anchors by their names, and a parameter that occurs a second time.

    Args:
        fused: row counts of the logical matrices in a fused projection, by parameter name (or its end after a dot).
        free_frames: frames learn without a constraint, by AdamW at `frame_lr`.
        adamw: further patterns (regular expressions, searched in names) of matrices that AdamW shall train.
        tables: `id`s of further parameters for AdamW: embeddings, whatever they are called.

    Raises:
        ConfigError: a pattern or a fused name that matches nothing, splits that do not add up, or a parameter that
            is not of real floating-point numbers.
    """
    parameters = list(named_parameters)
    for suffix in fused or {}:
        if not any(_is(name, suffix) for name, _ in parameters):
            raise ConfigError(f"fused projection {suffix!r}", "names of parameters")
    _check_patterns(adamw, [name for name, _ in parameters])
    seen: set[int] = set()
    routes = []
    for name, parameter in parameters:
        splits: tuple[int, ...] = ()
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ConfigError(f"parameter {name} of {parameter.dtype}", "real floating-point numbers", "freeze it")
        if id(parameter) in seen or getattr(parameter, "is_mirror", False) or re.search(_MIRROR, name):
            rule, rate = "mirror", 0.0
        elif not parameter.requires_grad:
            rule, rate = "frozen", 0.0
        elif re.search(_FRAME, name):
            rule, rate = ("adamw" if free_frames else "spel"), frame_lr
        elif (
            parameter.dim() < 2
            or not parameter.numel()
            or id(parameter) in tables
            or any(re.search(pattern, name) for pattern in (_ENDS, _TABLE, *adamw))
        ):
            rule, rate = "adamw", adamw_lr
        else:
            rule, rate = "muon", lr
            splits = _splits(name, parameter, fused or {})
        seen.add(id(parameter))
        routes.append(Route(name, parameter, rule, rate, splits))  # type: ignore[arg-type]
    return routes


def param_groups(
    model: nn.Module | Sequence[nn.Module],
    lr: float = 0.02,
    *,
    adamw_lr: float | None = None,
    frame_lr: float | None = None,
    adamw: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return optimizer groups for a model, or for stages: every parameter in exactly one, with `rule` and `names`.

    Rates default to MAPL's: AdamW 0.5 `lr`, frames 0.1 `lr`. Fused projections are taken from the model's
    `fused_splits()` where it has one. See `route` for the rules and errors, `describe` for the table.
    """
    models = [model] if isinstance(model, nn.Module) else model
    rates = 0.5 * lr if adamw_lr is None else adamw_lr, 0.1 * lr if frame_lr is None else frame_lr
    return groups(route_models(models, lr, *rates, adamw=adamw))


def route_models(
    models: Sequence[nn.Module], lr: float, adamw_lr: float, frame_lr: float, *, adamw: Sequence[str] = ()
) -> list[Route]:
    """`route` for all parameters of these modules, with what their types tell: fused weights, embeddings, frames."""
    return route(
        [pair for one in models for pair in one.named_parameters(remove_duplicate=False)],
        lr=lr,
        adamw_lr=adamw_lr,
        frame_lr=frame_lr,
        fused=fused_splits(models),
        free_frames=has_free_frames(models),
        adamw=adamw,
        tables=embedding_tables(models),
    )


def has_free_frames(models: Iterable[nn.Module]) -> bool:
    """Whether the codec ends inside `models` say that their frames learn without a constraint."""
    return any(getattr(module, "rule", None) == "free" for model in models for module in model.modules())


def embedding_tables(models: Iterable[nn.Module]) -> set[int]:
    """`id`s of the weights of all embeddings inside `models`."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight) for model in models for module in model.modules() if isinstance(module, kinds)}


def fused_splits(models: Iterable[nn.Module]) -> dict[str, Sequence[int]]:
    """Row counts of all fused projections that modules inside `models` know of, by full parameter name.

    Modules tell by a method `fused_splits()`; of torch's own, attention and recurrent layers are known.
    """
    return {
        f"{prefix}.{name}" if prefix else name: rows
        for model in models
        for prefix, module in model.named_modules()
        for name, rows in _known_splits(module).items()
    }


def _known_splits(module: nn.Module) -> dict[str, Sequence[int]]:
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        return {"in_proj_weight": (module.embed_dim,) * 3}
    if isinstance(module, nn.RNNBase):
        gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
        weights = {name: p for name, p in module.named_parameters() if name.startswith("weight_") and gates > 1}
        return {name: (p.shape[0] // gates,) * gates for name, p in weights.items() if "_hr_" not in name}
    splits: dict[str, Sequence[int]] = getattr(module, "fused_splits", dict)()
    return splits


def groups(routes: Iterable[Route]) -> list[dict[str, Any]]:
    """Gather routes into optimizer groups, one per rule and rate. Parameters that nobody steps are left out."""
    gathered: dict[tuple[str, float], dict[str, Any]] = {}
    for one in routes:
        if one.rule in ("mirror", "frozen"):
            continue
        group = gathered.setdefault(
            (one.rule, one.lr),
            {"params": [], "names": [], "splits": [], "rule": one.rule, "lr": one.lr, "base_lr": one.lr},
        )
        group["params"].append(one.parameter)
        group["names"].append(one.name)
        group["splits"].append(one.splits)
    return list(gathered.values())


def describe(routes: Iterable[Route]) -> list[dict[str, Any]]:
    """The start-up table: one row `parameter | shape | rule | lr` per parameter."""
    return [
        {
            "parameter": one.name,
            "shape": " x ".join(map(str, one.parameter.shape)),
            "rule": one.rule + (f" ({len(one.splits)} matrices)" if one.splits else ""),
            "lr": one.lr,
        }
        for one in routes
    ]


def _is(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    if isinstance(patterns, str):
        raise ConfigError(f"adamw={patterns!r}", "a list of patterns", f"write [{patterns!r}]")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"pattern {pattern!r} for AdamW ({error})", "regular expressions") from None
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(f"pattern {pattern!r} for AdamW", "patterns that match a parameter")


def _splits(name: str, parameter: nn.Parameter, fused: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    for suffix, rows in fused.items():
        if _is(name, suffix):
            if sum(rows) != parameter.shape[0]:
                raise ConfigError(f"splits {tuple(rows)} of {name}", f"row counts that add up to {parameter.shape[0]}")
            return tuple(rows)
    return ()
