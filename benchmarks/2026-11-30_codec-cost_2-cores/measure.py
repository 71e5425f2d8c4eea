"""What MAPL's two ends cost beside the layers of a stage: forward and backward, packing included, in one run.

    python measure.py [--repeats 9] [--tokens 1024] [--threads 2]

D = 1024, K = K' = 256, V = 32,000, four LLaMA layers per stage, float32, one process. A middle stage receives and
sends: its codec's work is one decoder and one encoder forward, the same backward, and four payloads opened or written.
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


class StageAlone:
    """Four layers, forward and backward, without a codec."""

    def __init__(self, tokens: int) -> None:
        config = LlamaConfig(vocab_size=VOCAB, dim=DIM, num_layers=4, num_heads=16, max_seq_len=tokens)
        whole = Llama(config)
        whole.init_weights(1)
        self.layers = whole.slice(range(4), embedding=False, head=False)
        self.x = torch.randn(1, tokens, DIM, requires_grad=True)
        self.gradient = torch.randn(1, tokens, DIM)

    def __call__(self) -> None:
        self.layers.zero_grad(set_to_none=True)
        self.layers(self.x).backward(self.gradient)


class CodecAlone:
    """Both ends of a middle stage, forward and backward, without layers: two payloads opened, two written."""

    def __init__(self, codec: codecs.Codec, tokens: int) -> None:
        ids = torch.randint(0, VOCAB, (1, tokens))
        before, self.stage, behind = (Stage(i, 3, Nothing(), codec, DIM, VOCAB) for i in range(3))
        for stage in (before, self.stage):
            stage.init_ends(1)
        self.stage.decoder.frame_DK.data.copy_(before.encoder.frame_DK)
        self.carrier = before.send(torch.randn(1, tokens, DIM), ids, 0).detach()
        self.gradient = behind.receiver.pack(torch.randn(1, tokens, RANK), None, 0, DIM)

    def __call__(self) -> None:
        self.stage.zero_grad(set_to_none=True)
        self.stage(self.carrier.detach().requires_grad_(), 0).backward(self.gradient)


def timed(function) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def compare(name: str, codec_pass: CodecAlone, stage_pass: StageAlone, repeats: int, **about: object) -> dict:
    """Interleaved: codec, stage, codec, stage ..., after one pass of each."""
    codec_pass()
    stage_pass()
    pairs = [(timed(codec_pass), timed(stage_pass)) for _ in range(repeats)]
    shares = sorted(100 * codec_s / stage_s for codec_s, stage_s in pairs)
    return {
        "codec": name,
        **about,
        "codec_s_median": round(statistics.median(c for c, _ in pairs), 5),
        "stage_s_median": round(statistics.median(s for _, s in pairs), 4),
        "share_percent_median": round(statistics.median(shares), 2),
        "share_percent_min": round(shares[0], 2),
        "share_percent_max": round(shares[-1], 2),
        "repeats": repeats,
        "pairs_s": pairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    stage_pass = StageAlone(given.tokens)
    rows = []
    for name, anchor_rank in (("mapl, anchors 256", 256), ("mapl, no anchors", 0)):
        codec_pass = CodecAlone(codecs.get("mapl", rank=RANK, anchor_rank=anchor_rank), given.tokens)
        rows.append(compare(name, codec_pass, stage_pass, given.repeats, tokens=given.tokens, threads=given.threads))
    (HERE / "results").mkdir(exist_ok=True)
    path = HERE / "results" / f"tokens{given.tokens}-threads{given.threads}.json"
    path.write_text(json.dumps(rows, indent=1))
    table = [row for path in sorted((HERE / "results").glob("*.json")) for row in json.loads(path.read_text())]
    for row in table:
        del row["pairs_s"]
    (HERE / "table.json").write_text(json.dumps(table, indent=1))
    for row in table:
        print(row)


class Nothing(torch.nn.Module):
    """A stage without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


if __name__ == "__main__":
    main()
