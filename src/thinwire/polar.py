"""The polar factor of a matrix by odd polynomials in it, without an SVD.

Every iteration here has the form, with the Gram matrix G = X X^T of the shorter side,

    X <- (a I + b G + c G^2) X

which maps each singular value s to a s + b s^3 + c s^5 and leaves the singular vectors alone. A sequence of such
polynomials that drives all singular values to one computes the polar factor U V^T of X = U S V^T.

Gram form: several iterations need X only at their ends. With P = a I + b G + c G^2 the next Gram matrix is P G P, and
the product Q of the P's is applied to X once. For long matrices that saves most of the work; it loses the singular
values whose squares drown in the rounding of G, so a run of such iterations is short in bfloat16 (`_runs`).

Sources: Muon's constants, K. Jordan et al., "Muon"; Polar Express, Amsel et al., arXiv 2505.16932, Algorithm 1;
the Gram form, Dao-AILab, "Gram Newton-Schulz" (2026).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import ConfigError

Coefficients = Sequence[tuple[float, float, float]]

MUON: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5

# The optimal composition of five quintics for singular values in [1e-3, 1], a safety factor of 1.02 folded in.
POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# The quintic whose value and first two derivatives are right at one: it converges cubically from nearby.
CONVERGED: tuple[float, float, float] = (15 / 8, -10 / 8, 3 / 8)

# Polar Express until every singular value above a thousandth of the norm is near one, then to full precision.
CONVERGING: Coefficients = (*POLAR_EXPRESS, *(CONVERGED,) * 3)

NAMED: dict[str, Coefficients] = {"muon": MUON, "polar_express": POLAR_EXPRESS, "converging": CONVERGING}

_SQUARES = (1e-15, 1e15)  # norms whose matrices have squares well inside float32
_SAFETY = 1.02  # keeps the largest singular value below one in spite of rounding
_GRAM_ASPECT = 1.5  # from this ratio of sides on, n iterations in Gram form cost less than n direct ones
_CACHED_NUMBERS = 1 << 20  # of X per batch on the CPU: more would leave the cache between two products
_TILES_FROM = 256  # shorter side from which a CPU with matrix tiles is faster in bfloat16 (3 x at 256, 0.5 x at 64)
_BLOCKS_FROM = 512  # shorter side from which half a symmetric product pays for copying the other half, float32


@torch.no_grad()
def polar(
    x: Tensor,
    coefficients: Coefficients | str = POLAR_EXPRESS,
    *,
    dtype: torch.dtype | None = None,
    exact: bool = False,
) -> Tensor:
    """Return the approximate orthogonal polar factor of the last two dimensions of `x`. No gradient flows through it.

    Args:
        x: `(..., O, I)`, any real dtype; each matrix is treated alone.
        coefficients: one `(a, b, c)` per iteration, or a name in `NAMED`.
        dtype: of the iteration; default as `iteration_dtype` says.
        exact: the singular value decomposition in float64 instead; slow, for tests.

    Returns:
        A tensor of the shape and dtype of `x`. Singular values are 0.86 to 1.14 for the default (0.68 to 1.2 for
        `MUON`, one to 1e-5 for `CONVERGING` in float32) unless they were below a thousandth of the Frobenius norm. A
        zero matrix gives zero; the scale of `x` does not matter. Depends on nothing but `x`: equal inputs give equal
        outputs on equal hardware.
    """
    if exact:
        return _through_svd(x)
    return _apply(x, named(coefficients), dtype or iteration_dtype(x), normalise=True)


def named(coefficients: Coefficients | str) -> Coefficients:
    """Return a set of coefficients by its name; a set given by value comes back as it is."""
    if not isinstance(coefficients, str):
        return coefficients
    if coefficients not in NAMED:
        raise ConfigError(f"coefficients {coefficients!r}", f"one of {', '.join(NAMED)}, or (a, b, c) per iteration")
    return NAMED[coefficients]


def iteration_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that iterates fastest on the device of `x`, from capabilities alone, never from a measurement.

    bfloat16 on accelerators, and for matrices of 256 or more a side on CPUs with matrix tiles (AMX), where it is
    seven times faster; else float32.
    """
    if x.device.type != "cpu":
        return torch.bfloat16
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", bool)()  # torch has no public name for it
    return torch.bfloat16 if has_tiles and min(x.shape[-2:]) >= _TILES_FROM else torch.float32


@torch.no_grad()
def newton_schulz(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Apply the polynomials to `x` `(..., O, I)` as it is, without normalising, in the dtype of `x`."""
    return _apply(x, coefficients, x.dtype, normalise=False)


def batch_size(x: Tensor) -> int:
    """How many matrices of the last two dimensions of `x` are iterated together: as many as stay in a CPU's cache."""
    if x.device.type != "cpu":
        return max(1, x.numel())
    return max(1, _CACHED_NUMBERS // max(1, x.size(-2) * x.size(-1)))


def _apply(x: Tensor, coefficients: Coefficients, dtype: torch.dtype, *, normalise: bool) -> Tensor:
    """Load each batch into buffers of `dtype`, iterate, store. Fresh memory is slow, so buffers are reused."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return result
    matrices_NOI = x.reshape(-1, *x.shape[-2:])
    size = min(batch_size(x), matrices_NOI.size(0))
    shorter, longer = sorted(x.shape[-2:])
    runs = _runs(coefficients, longer / shorter, dtype)
    num_squares = 4 if any(len(run) > 1 for run in runs) else 2
    wides = [x.new_empty(size, shorter, longer, dtype=dtype) for _ in range(2)]
    squares = [x.new_empty(size, shorter, shorter, dtype=dtype) for _ in range(num_squares)]
    for source, target in zip(matrices_NOI.split(size), result.view(matrices_NOI.shape).split(size), strict=True):
        now, other, *work = (buffer[: len(source)] for buffer in (*wides, *squares))
        _load(source, now, other, normalise)
        for run in runs:
            _apply_run(run, now, work, other)
            now, other = other, now
        _store(now, target, other)
    return result


def _load(source_BOI: Tensor, wide: Tensor, spare: Tensor, normalise: bool) -> None:
    """Fill `wide` with the matrices, each divided by 1.02 times its norm if asked; `spare` is overwritten."""
    if wide.shape == source_BOI.shape:
        spare = wide
    upright = spare.view(source_BOI.shape)
    if normalise:
        exact = source_BOI.float()
        torch.mul(exact, 1 / (_SAFETY * _norm(exact)), out=upright)
    else:
        upright.copy_(source_BOI)
    if spare is not wide:
        _transpose(upright, wide)


def _store(wide: Tensor, target_BOI: Tensor, spare: Tensor) -> None:
    """Copy the result out; `spare` is overwritten."""
    if wide.shape != target_BOI.shape:
        _transpose(wide, spare.view(target_BOI.shape))
        wide = spare.view(target_BOI.shape)
    target_BOI.copy_(wide)


def _transpose(source_BOI: Tensor, target_BIO: Tensor) -> None:
    """Copy transposed. On the CPU one by one: torch is ten times slower at it for a batch."""
    if source_BOI.device.type != "cpu":
        target_BIO.copy_(source_BOI.mT)
        return
    for source, target in zip(source_BOI, target_BIO, strict=True):
        target.copy_(source.T)


def _runs(coefficients: Coefficients, aspect: float, dtype: torch.dtype) -> list[Coefficients]:
    """Cut the iterations into runs, each one in Gram form; runs of one iteration where that is no gain.

    Over a run, rounding in its first Gram matrix grows like the small eigenvalues themselves, by a^2 an iteration.
    A run ends when this growth has reached 1 / eps: by then what was lost would be as large as what was kept.
    """
    if aspect < _GRAM_ASPECT:
        return [(step,) for step in coefficients]
    runs: list[list[tuple[float, float, float]]] = []
    growth = float("inf")
    for step in coefficients:
        if growth * torch.finfo(dtype).eps > 1:
            runs.append([])
            growth = 1.0
        runs[-1].append(step)
        growth *= step[0] ** 2
    return list(runs)


def _apply_run(run: Coefficients, x: Tensor, squares: Sequence[Tensor], out: Tensor) -> None:
    """Write Q X into `out`, Q the product of the polynomials of a run."""
    gram, poly, *more = squares
    a, b, c = run[0]
    _symmetric(gram, x, x.mT, 0, 1, gram)
    _symmetric(gram, gram, gram, b, c, poly)
    if len(run) == 1:
        torch.baddbmm(x, poly, x, beta=a, out=out)
        return
    q, product = more
    q.copy_(poly).diagonal(dim1=-2, dim2=-1).add_(a)
    for next_a, b, c in run[1:]:
        _symmetric(gram, gram, poly, a, 1, product)
        _symmetric(product, product, poly, a, 1, gram)
        a = next_a
        _symmetric(gram, gram, gram, b, c, poly)
        _symmetric(q, q, poly, a, 1, product)
        q, product = product, q
    torch.bmm(q, x, out=out)


def _symmetric(add: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float, out: Tensor) -> None:
    """Write beta add + alpha left right, known to be symmetric, into `out`; copy its upper half where that pays."""
    size = out.size(-1)
    if out.device.type != "cpu" or out.dtype != torch.float32 or size < _BLOCKS_FROM:
        torch.baddbmm(add, left, right, beta=beta, alpha=alpha, out=out)
        return
    for start, end in ((i * size // 4, (i + 1) * size // 4) for i in range(4)):
        block = out[:, start:end, :end]
        torch.baddbmm(add[:, start:end, :end], left[:, start:end], right[..., :end], beta=beta, alpha=alpha, out=block)
        out[:, :start, start:end].copy_(block[..., :start].mT)


def _norm(x: Tensor) -> Tensor:
    """The Frobenius norm of each float32 matrix, `(..., 1, 1)`, never zero, safe where squares leave float32."""
    norm: Tensor = torch.linalg.matrix_norm(x, keepdim=True)
    if x.device.type == "cpu" and bool(((norm > _SQUARES[0]) & (norm < _SQUARES[1])).all()):
        return norm  # elsewhere looking at values would wait for the device
    largest = x.abs().amax((-2, -1), keepdim=True)
    scaled = x / torch.where(largest > 0, largest, torch.ones_like(largest))
    norm = largest * torch.linalg.matrix_norm(scaled, keepdim=True)
    return norm.clamp_min(2 * torch.finfo(x.dtype).tiny)


def _through_svd(x: Tensor) -> Tensor:
    """The polar factor in float64, zero where `x` has no direction: U V^T over the singular values above rounding."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    largest = s.amax(-1, keepdim=True) if s.numel() else s
    kept = s > largest * max(x.shape[-2:]) * torch.finfo(torch.float64).eps
    factor: Tensor = (u * kept.unsqueeze(-2)) @ vh
    return factor.to(x.dtype)
