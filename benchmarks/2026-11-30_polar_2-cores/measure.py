"""Orthogonalising the matrices of a 150m LLaMA: ours against torch.optim.Muon's function, in one run, in turn.

    python measure.py [--repeats 5] [--layers 1]

The matrices are the logical ones (wqkv and w13 cut into their parts), of random normal numbers: the work does not
depend on the values. All layers have the same shapes, so `--layers` multiplies both sides alike.

Baselines: torch's function as it is, which casts to bfloat16, and the same lines without the cast, in float32; both
with Muon's five steps. Times are CPU seconds of this process, which other processes disturb less than the clock on
the wall; so it has one thread. Accuracy is measured on a square and a long matrix of half the size, with a flat
spectrum (normal numbers) and with singular values that decay to 3e-4 of the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as torch_muon

from thinwire.models import Llama, llama_config
from thinwire.optim.muon import logical_matrices
from thinwire.polar import MUON, POLAR_EXPRESS, Coefficients, batch_size, polar

HERE = Path(__file__).parent
STEP = MUON[0]
KINDS = {"error_exact": ".3f", "error_polynomial": ".4f", "signs_differ_percent": ".1f"}


def torch_muon_float32(x: Tensor) -> Tensor:
    """What torch 2.13 does, line for line, without the cast."""
    a, b, c = STEP
    x, is_tall = x.clone(), x.size(0) > x.size(1)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=1e-7))
    for _ in MUON:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def ours(matrices: list[Tensor], coefficients: Coefficients, dtype: torch.dtype) -> list[Tensor]:
    """As the optimizer does it: equal shapes together, as many as `batch_size` says."""
    results: list[Tensor] = []
    for shape in sorted({m.shape for m in matrices}):
        same = [m for m in matrices if m.shape == shape]
        for part in range(0, len(same), batch_size(same[0])):
            some = same[part : part + batch_size(same[0])]
            batch = torch.stack(some) if len(some) > 1 else some[0].unsqueeze(0)
            results.extend(polar(batch, coefficients, dtype=dtype))
    return results


def matrices_of_layers(num_layers: int) -> list[Tensor]:
    """Random matrices of the logical shapes of so many layers of the `150m` model."""
    with torch.device("meta"):
        model = Llama(llama_config("150m"), layers=range(num_layers), embedding=False, head=False)
    splits = model.fused_splits()
    weights = ((name, p) for name, p in model.named_parameters() if p.dim() == 2)
    return [torch.randn(part.shape) for name, p in weights for part in logical_matrices(p, splits.get(name, ()))]


def decaying(rows: int, columns: int) -> Tensor:
    left, right = (torch.linalg.qr(torch.randn(n, rows)).Q for n in (rows, columns))
    return left @ torch.diag(torch.logspace(0, -3.5, rows)) @ right.T


def errors(name: str, x: Tensor) -> dict[str, float]:
    """Relative to the exact polar factor and to the same polynomial in float64, and the share of signs that differ."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    function, coefficients, baseline = METHODS[name]
    s = s / s.norm() / (1.02 if baseline else 1)  # ours divides by 1.02 times the norm
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    got, exact, polynomial = function([x])[0].double(), u @ vh, u @ torch.diag(s) @ vh
    return {
        "error_exact": float((got - exact).norm() / exact.norm()),
        "error_polynomial": float((got - polynomial).norm() / polynomial.norm()),
        "signs_differ_percent": float(100 * (got.sign() != exact.sign()).double().mean()),
    }


METHODS: dict[str, tuple[Callable[[list[Tensor]], list[Tensor]], Coefficients, str]] = {
    "torch.optim.Muon, bf16": (lambda ms: [torch_muon(m, STEP, 5, 1e-7) for m in ms], MUON, ""),
    "thinwire muon, bf16": (partial(ours, coefficients=MUON, dtype=torch.bfloat16), MUON, "torch.optim.Muon, bf16"),
    "thinwire polar_express, bf16": (
        partial(ours, coefficients=POLAR_EXPRESS, dtype=torch.bfloat16),
        POLAR_EXPRESS,
        "torch.optim.Muon, bf16",
    ),
    "torch.optim.Muon's lines, fp32": (lambda ms: [torch_muon_float32(m) for m in ms], MUON, ""),
    "thinwire muon, fp32": (
        partial(ours, coefficients=MUON, dtype=torch.float32),
        MUON,
        "torch.optim.Muon's lines, fp32",
    ),
    "thinwire polar_express, fp32": (
        partial(ours, coefficients=POLAR_EXPRESS, dtype=torch.float32),
        POLAR_EXPRESS,
        "torch.optim.Muon's lines, fp32",
    ),
}


def seconds(function: Callable[[list[Tensor]], list[Tensor]], matrices: list[Tensor]) -> float:
    began = time.process_time()
    function(matrices)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    matrices = matrices_of_layers(given.layers)
    samples = {
        f"{kind} {rows}x{columns}": make(rows, columns)
        for rows, columns in ((512, 512), (512, 1376))
        for kind, make in (("flat", torch.randn), ("decaying", decaying))
    }
    accuracy = {name: {sample: errors(name, x) for sample, x in samples.items()} for name in METHODS}
    for function, *_ in METHODS.values():
        function(matrices)
    times = [{name: seconds(method[0], matrices) for name, method in METHODS.items()} for _ in range(given.repeats)]
    rows = []
    for name, (_, _, baseline) in METHODS.items():
        speeds = sorted(t[baseline or name] / t[name] for t in times)
        rows.append(
            {
                "method": name,
                "against": baseline,
                "layers": given.layers,
                "ms_median": 1e3 * statistics.median(t[name] for t in times),
                "speed_median": statistics.median(speeds),
                "speed_min": speeds[0],
                "speed_max": speeds[-1],
                "repeats": given.repeats,
                **{f"{key}, {sample}": value for sample, e in accuracy[name].items() for key, value in e.items()},
            }
        )
    shapes = [list(m.shape) for m in matrices]
    result = {"command": "python " + " ".join(sys.argv), "shapes": shapes, "seconds": times, "rows": rows}
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "threads1.json").write_text(json.dumps(result, indent=1))
    (HERE / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
    write_table(rows, list(samples))


def write_table(table: list[dict], samples: list[str]) -> None:
    """Print the README's tables and put them between their marks."""
    lines = [
        "| method | ms | speed against torch in the same dtype, median (min - max) |",
        "|---|---|---|---|",
    ]
    for r in table:
        speed = f"{r['speed_median']:.2f}x ({r['speed_min']:.2f} - {r['speed_max']:.2f})" if r["against"] else ""
        lines.append(f"| {r['method']} | {r['ms_median']:.0f} | {speed} |")
    lines += ["", "| method | " + " | ".join(samples) + " |", "|---" * (1 + len(samples)) + "|"]
    for r in table:
        cells = [" / ".join(f"{r[f'{kind}, {sample}']:{form}}" for kind, form in KINDS.items()) for sample in samples]
        lines.append(f"| {r['method']} | " + " | ".join(cells) + " |")
    print("\n".join(lines))
    readme = HERE / "README.md"
    if readme.exists():
        before, _, rest = readme.read_text().partition("<!-- table -->\n")
        after = rest.partition("<!-- end -->")[2]
        readme.write_text(before + "<!-- table -->\n" + "\n".join(lines) + "\n<!-- end -->" + after)


if __name__ == "__main__":
    main()
