"""What packing costs beside reading a tensor once, and a packed vote beside an integer sum; all in one run.

    python measure.py [--repeats 15] [--threads 1]

Every repetition times each thing once, in turn, so that a busy neighbour slows both sides of a ratio. A time is the
least of three calls.
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

from thinwire import bits

HERE = Path(__file__).parent
CALLS = 3


def least_s(function: Callable[[], object]) -> float:
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def add_in_turn(signs: list[torch.Tensor]) -> torch.Tensor:
    """Sum as an all-reduce does it, one arriving tensor after the other, then the sign."""
    total = signs[0].clone()
    for other in signs[1:]:
        total += other
    return total.sign_()


def cases(num_elements: int, num_workers: int) -> list[tuple[str, str, Callable[[], object], Callable[[], object]]]:
    """Tuples of (ours, baseline, function, function)."""
    x = torch.randn(num_elements)
    half = x.bfloat16()
    signs = [torch.where(torch.rand(num_elements) < 0.5, -1, 1).to(torch.int8) for _ in range(num_workers)]
    stacked = torch.stack(signs)
    words_MW = torch.stack([bits.pack_signs(s) for s in signs])
    ternary = torch.stack([bits.pack_ternary(s) for s in signs])
    vote = partial(bits.majority, words_MW)
    in_turn, at_once = partial(add_in_turn, signs), lambda: stacked.sum(0, dtype=torch.int8).sign_()
    name = f"majority, M={num_workers}"
    return [
        ("pack_signs float32", "x.sum()", partial(bits.pack_signs, x), x.sum),
        ("pack_signs float32", "x.clone()", partial(bits.pack_signs, x), x.clone),
        ("pack_signs bfloat16", "x.sum()", partial(bits.pack_signs, half), half.sum),
        ("pack_ternary float32", "x.sum()", partial(bits.pack_ternary, x), x.sum),
        (name, "int8 tensors added in turn, sign", vote, in_turn),
        (name, "one int8 sum over a stacked tensor, sign", vote, at_once),
        (
            name.replace("y,", "y_ternary,"),
            "int8 tensors added in turn, sign",
            partial(bits.majority_ternary, ternary),
            in_turn,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows, raw = [], []
    for num_elements in (1 << 20, 1 << 22, 25_000_000):
        todo = cases(num_elements, 8)
        for _, _, ours, theirs in todo:
            ours(), theirs()
        times = [[(least_s(ours), least_s(theirs)) for _, _, ours, theirs in todo] for _ in range(given.repeats)]
        for (name, baseline, *_), pairs in zip(todo, zip(*times, strict=True), strict=True):
            raw.append({"what": name, "baseline": baseline, "num_elements": num_elements, "pairs_s": pairs})
            speeds = sorted(theirs / ours for ours, theirs in pairs)
            rows.append(
                {
                    "what": name,
                    "baseline": baseline,
                    "num_elements": num_elements,
                    "threads": given.threads,
                    "ms_median": 1e3 * statistics.median(ours for ours, _ in pairs),
                    "baseline_ms_median": 1e3 * statistics.median(theirs for _, theirs in pairs),
                    "speed_median": statistics.median(speeds),
                    "speed_min": speeds[0],
                    "speed_max": speeds[-1],
                    "repeats": given.repeats,
                }
            )
    command = "python " + " ".join(sys.argv)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"threads{given.threads}.json").write_text(
        json.dumps({"command": command, "raw": raw, "rows": rows})
    )
    table = [row for path in sorted((HERE / "results").glob("*.json")) for row in json.loads(path.read_text())["rows"]]
    (HERE / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    write_table(table)


def write_table(table: list[dict[str, object]]) -> None:
    """Print the README's table and put it between its marks."""
    lines = [
        "| what | against | elements | threads | ms | baseline ms | speed of baseline, median (min - max) |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['what']} | {r['baseline']} | {r['num_elements']:,} | {r['threads']} | {r['ms_median']:.2f} | "
        f"{r['baseline_ms_median']:.2f} | {r['speed_median']:.2f}x ({r['speed_min']:.2f} - {r['speed_max']:.2f}) |"
        for r in table
    ]
    print("\n".join(lines))
    readme = HERE / "README.md"
    if readme.exists():
        before, _, rest = readme.read_text().partition("<!-- table -->\n")
        after = rest.partition("<!-- end -->")[2]
        readme.write_text(before + "<!-- table -->\n" + "\n".join(lines) + "\n<!-- end -->" + after)


if __name__ == "__main__":
    main()
