"""What MAPL's two ends cost beside the layers of a stage: forward and backward, packing included, in one run.

    python measure.py [--repeats 9] [--tokens 1024] [--threads 2]

D = 1024, K = K' = 256, V = 32,000, four LLaMA layers per stage, float32, one process. A middle stage receives and
sends: its codec's work is one decoder and one encoder forward, the same backward, and four payloads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from thinwire import codecs
from thinwire.models import Llama, LlamaConfig
from thinwire.pipeline.stage import Stage

HERE = Path(__file__).parent
DIM, RANK, VOCAB = 1024, 256, 32_000


def timed(function) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    config = LlamaConfig(vocab_size=VOCAB, dim=DIM, num_layers=4, num_heads=16, max_seq_len=given.tokens)
    whole = Llama(config)
    whole.init_weights(1)
    layers = whole.slice(range(4), embedding=False, head=False)
    results = {"command": f"python measure.py --repeats {given.repeats} --tokens {given.tokens} --threads {given.threads}"}
    rows = []
    for name, options in {
        "mapl, anchors 256": {"rank": RANK, "anchor_rank": 256},
        "mapl, no anchors": {"rank": RANK},
    }.items():
        codec = codecs.get("mapl", wire_format="bf16", **options)
        ends = middle_stage_without_layers(codec)
        ids = torch.randint(0, VOCAB, (1, given.tokens))
        carrier = incoming(codec, ids)
        x = torch.randn(1, given.tokens, DIM, requires_grad=True)

        def stage_pass() -> None:
            layers.zero_grad(set_to_none=True)
            layers(x).backward(torch.ones(1, given.tokens, DIM))

        def codec_pass() -> None:
            ends.zero_grad(set_to_none=True)
            arrived = carrier.detach().requires_grad_()
            out = ends(arrived, 0)
            out.backward(gradient_carrier(codec, ids))

        for function in (stage_pass, codec_pass):
            function()
        pairs = [(timed(codec_pass), timed(stage_pass)) for _ in range(given.repeats)]
        shares = sorted(100 * codec_s / stage_s for codec_s, stage_s in pairs)
        rows.append(
            {
                "codec": name,
                "tokens": given.tokens,
                "threads": given.threads,
                "codec_s_median": statistics.median(c for c, _ in pairs),
                "stage_s_median": statistics.median(s for _, s in pairs),
                "share_percent_median": statistics.median(shares),
                "share_percent_min": shares[0],
                "share_percent_max": shares[-1],
                "repeats": given.repeats,
            }
        )
        results[name] = pairs
    stem = f"tokens{given.tokens}-threads{given.threads}"
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{stem}.json").write_text(json.dumps({**results, "rows": rows}, indent=1))
    table = [row for path in sorted((HERE / "results").glob("*.json")) for row in json.loads(path.read_text())["rows"]]
    (HERE / "table.json").write_text(json.dumps(table, indent=1))
    for row in rows:
        print(row)


class Nothing(torch.nn.Module):
    """A stage without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def middle_stage_without_layers(codec: codecs.Codec) -> Stage:
    stage = Stage(1, 3, Nothing(), codec, DIM, VOCAB)
    stage.init_ends(1)
    stage.decoder.frame_DK.data.copy_(stage.encoder.frame_DK)
    return stage


def incoming(codec: codecs.Codec, ids: torch.Tensor) -> torch.Tensor:
    """What the stage before sends."""
    before = Stage(0, 3, Nothing(), codec, DIM, VOCAB)
    before.init_ends(1)
    return before.send(torch.randn(*ids.shape, DIM), ids, 0).detach()


def gradient_carrier(codec: codecs.Codec, ids: torch.Tensor) -> torch.Tensor:
    """What the stage behind sends back."""
    behind = Stage(2, 3, Nothing(), codec, DIM, VOCAB)
    assert behind.receiver is not None
    return behind.receiver.pack(torch.randn(*ids.shape, RANK), None, 0, DIM)


if __name__ == "__main__":
    main()
