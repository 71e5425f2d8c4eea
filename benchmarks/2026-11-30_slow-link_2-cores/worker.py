"""One rank of the measurement: exchanges in turn, round after round, with times and the kernel's byte counts.

python worker.py RANK RANKS FOLDER LAYERS ROUNDS EXCHANGE...      (run.py starts it, in a namespace of its own)
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from exchanges import EXCHANGES, Gradients
from network import sent

LONGEST_COLLECTIVE = timedelta(minutes=3)


def main() -> None:
    rank, num_ranks, folder, num_layers, rounds, *names = sys.argv[1:]
    sys.stdin.readline()  # the link is up
    torch.set_num_threads(1)
    about = {"rank": int(rank), "world_size": int(num_ranks), "timeout": LONGEST_COLLECTIVE}
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", **about)
    gradients = Gradients(int(num_layers), seed=int(rank), folder=folder)
    exchanges = {name: EXCHANGES[name](gradients) for name in names}
    for exchange in exchanges.values():
        for _ in range(exchange.num_warmups):
            exchange.prepare()
            result = exchange.run()
        exchange.check(result)
    rows = []
    for round_number in range(int(rounds)):
        for name, exchange in exchanges.items():
            exchange.prepare()
            dist.barrier()
            before = sent()
            began_s = time.monotonic()
            exchange.run()
            ended_s = time.monotonic()
            dist.barrier()  # behind everything that is still in a socket's buffer
            num_bytes, num_packets = (after - b for after, b in zip(sent(), before, strict=True))
            rows.append({
                "round": round_number, "exchange": name, "began_s": began_s, "ended_s": ended_s,
                "bytes": num_bytes, "packets": num_packets, "needed_bytes": exchange.needed_bytes,
                "parameters": gradients.flat.numel(),
            })  # fmt: skip
    Path(folder, f"rank{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
