"""Time and bytes of one optimizer exchange over real slow links: four ranks, 100 Mbit/s, 25 million parameters.

    python run.py [--rounds 5] [--layers 6] [--rate 100mbit] [--only time|bytes]        as root, on Linux

Time: all exchanges in turn, in every round; seconds from the first rank's start to the last rank's end. Bytes: what
every rank's link carried away, by the kernel's counters, for 2 to 8 ranks. Elsewhere it says why it was skipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from network import HEADER_BYTES, PAYLOAD_SHARE, Ranks, UnavailableError, enter_namespace

HERE = Path(__file__).parent
RING, WORDS_ALONE = "ring all-reduce fp32", "packed, words alone, in pairs"
TIMED = [
    "thinwire packed", WORDS_ALONE, "packed, words alone, by gloo", "packed, computing alone",
    RING, "thinwire packed, one zero", "thinwire gather", "thinwire sum", "DDP fp32", "DDP bf16", "DDP PowerSGD",
]  # fmt: skip
# Where hivemind is installed, in a run of its own: its processes are never quite at rest, and the others would feel it.
APART = [RING, "hivemind 8 bit"]
COUNTED = [RING, "ring all-reduce bf16", "thinwire sum", "thinwire gather", "thinwire packed"]
COUNTED_RANKS = (2, 3, 4, 5, 8)
COUNTED_LAYERS = 1
UNITS_BPS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def measure(num_ranks: int, rate: str | None, layers: int, rounds: int, names: list[str]) -> dict[str, object]:
    """Run the exchanges on so many ranks; every rank's rows in order, and packets lost in the queues."""
    with tempfile.TemporaryDirectory() as folder:
        about = [str(num_ranks), folder, str(layers), str(rounds), *names]
        commands = [[sys.executable, str(HERE / "worker.py"), str(rank), *about] for rank in range(num_ranks)]
        with Ranks(commands, rate) as ranks:
            ranks.wait()
            dropped = ranks.dropped_packets()
        by_rank = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    moments = [list(rows) for rows in zip(*by_rank, strict=True)]
    return {
        "ranks": num_ranks, "rate": rate, "layers": layers, "parameters": moments[0][0]["parameters"],
        "dropped_packets": dropped, "exchanges": [collect(rows) for rows in moments],
    }  # fmt: skip


def collect(rows: list[dict]) -> dict[str, object]:
    """One exchange of one round, all ranks: on one machine they share the clock."""
    return {
        "round": rows[0]["round"],
        "exchange": rows[0]["exchange"],
        "seconds": max(row["ended_s"] for row in rows) - min(row["began_s"] for row in rows),
        "bytes": [row["bytes"] for row in rows],
        "packets": [row["packets"] for row in rows],
        "needed_bytes": rows[0]["needed_bytes"],
    }


def spread(name: str, values: list[float], digits: int) -> dict[str, float]:
    """Median, least and most, as columns."""
    whole = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {f"{name}_{which}": round(value, digits) for which, value in whole.items()}


def per_parameter(run: dict, named: str) -> dict[str, object]:
    """Bytes a rank sends: needed by theory, in packets' payloads, on the wire with headers and acknowledgements."""
    done = [exchange for exchange in run["exchanges"] if exchange["exchange"] == named]
    wire = [count / run["parameters"] for exchange in done for count in exchange["bytes"]]
    payload = [
        (count - HEADER_BYTES * packets) / run["parameters"]
        for exchange in done
        for count, packets in zip(exchange["bytes"], exchange["packets"], strict=True)
    ]
    return {
        "needed_bytes_per_parameter": round(done[0]["needed_bytes"] / run["parameters"], 4),
        "payload_bytes_per_parameter": round(statistics.mean(payload), 4),
        **spread("wire_bytes_per_parameter", wire, 4),
        "headers_percent": round(100 * (sum(wire) / sum(payload) - 1), 2) if done[0]["needed_bytes"] else None,
    }


def time_rows(run: dict) -> list[dict[str, object]]:
    """A row per exchange. Quotients are of the same round; the shares are of the rate, by what had to be sent."""
    seconds: dict[str, list[float]] = {}
    needed_s: dict[str, float] = {}
    for exchange in run["exchanges"]:
        seconds.setdefault(exchange["exchange"], []).append(exchange["seconds"])
        needed_s[exchange["exchange"]] = 8 * exchange["needed_bytes"] / rate_bps(run["rate"])
    rows = []
    for name, mine in seconds.items():
        quotients = [ring_s / own_s for ring_s, own_s in zip(seconds[RING], mine, strict=True)]
        shares = [100 * needed_s[name] / own_s for own_s in mine]
        rows.append({
            "table": "time", "exchange": name, "ranks": run["ranks"], "rate": run["rate"],
            "parameters": run["parameters"], "rounds": len(mine), **spread("seconds", mine, 4),
            **spread("ring_fp32_seconds_over_these", quotients, 2),
            **spread("line_rate_percent", shares, 1),
            **spread("payload_rate_percent", [share / PAYLOAD_SHARE for share in shares], 1),
            **wire_share(seconds, name),
            **per_parameter(run, name),
        })  # fmt: skip
    return rows


def wire_share(seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    """How much of the packed vote's time the same words take on the wire alone; the rest is computing."""
    if name != "thinwire packed":
        return {}
    pairs = zip(seconds[WORDS_ALONE], seconds[name], strict=True)
    return spread("words_alone_percent", [100 * words_s / own_s for words_s, own_s in pairs], 1)


def byte_rows(run: dict) -> list[dict[str, object]]:
    """A row per exchange, for one number of ranks."""
    about = {"ranks": run["ranks"], "parameters": run["parameters"]}
    return [{"table": "bytes", "exchange": name, **about, **per_parameter(run, name)} for name in COUNTED]


def rate_bps(rate: str) -> float:
    """Bits per second of a rate as tc writes it."""
    unit = next(unit for unit in UNITS_BPS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * UNITS_BPS[unit]


def save(name: str, runs: list[dict]) -> None:
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{name}.json").write_text(json.dumps(runs, indent=1) + "\n")


def write_table() -> list[dict[str, object]]:
    """The table of everything in `results/`."""
    rows: list[dict[str, object]] = []
    for name, to_rows in (("time", time_rows), ("bytes", byte_rows)):
        path = HERE / "results" / f"{name}.json"
        if path.exists():
            rows += [row for run in json.loads(path.read_text()) for row in to_rows(run)]
    (HERE / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def write_readme(rows: list[dict[str, object]]) -> None:
    """Put the rows between the README's marks."""
    text = (HERE / "README.md").read_text()
    for table, to_line in (("time", time_line), ("bytes", bytes_line)):
        before, mark, behind = text.partition(f"<!-- {table} -->\n")
        head = behind.splitlines(keepends=True)[:2]
        lines = [to_line(row) + "\n" for row in rows if row["table"] == table]
        text = before + mark + "".join(head + lines) + behind[behind.index("<!-- end -->") :]
    (HERE / "README.md").write_text(text)


def time_line(row: dict[str, object]) -> str:
    seconds, quotient, line, payload = (
        "{:g} ({:g} - {:g})".format(*(row[f"{name}_{which}"] for which in ("median", "min", "max")))
        for name in ("seconds", "ring_fp32_seconds_over_these", "line_rate_percent", "payload_rate_percent")
    )
    if not row["needed_bytes_per_parameter"]:
        quotient = line = payload = "-"
    wire = row["wire_bytes_per_parameter_median"]
    needed = row["needed_bytes_per_parameter"]
    return f"| {row['exchange']} | {seconds} | {quotient} | {line} | {payload} | {needed} | {wire} |"


def bytes_line(row: dict[str, object]) -> str:
    wire, most = row["wire_bytes_per_parameter_median"], row["wire_bytes_per_parameter_max"]
    parts = [row["ranks"], row["exchange"], row["needed_bytes_per_parameter"], row["payload_bytes_per_parameter"]]
    return f"| {' | '.join(map(str, parts))} | {wire} ({most}) | {row['headers_percent']} % |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6, help="of the model whose gradients are exchanged")
    parser.add_argument("--rate", default="100mbit", help="of every link, in both directions; kbit, mbit or gbit")
    parser.add_argument("--only", choices=("time", "bytes"))
    given = parser.parse_args()
    try:
        enter_namespace()
        if given.only != "bytes":
            groups = [TIMED, APART] if find_spec("hivemind") else [TIMED]
            save("time", [measure(4, given.rate, given.layers, given.rounds, names) for names in groups])
        if given.only != "time":
            save("bytes", [measure(num_ranks, None, COUNTED_LAYERS, 3, COUNTED) for num_ranks in COUNTED_RANKS])
    except UnavailableError as reason:
        print(f"skipped: {reason}")
        return
    rows = write_table()
    write_readme(rows)
    print(*(time_line(row) if row["table"] == "time" else bytes_line(row) for row in rows), sep="\n")


if __name__ == "__main__":
    main()
