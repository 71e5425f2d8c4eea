"""Which first frame is better: random, or PCA of the first activations? One JSON per run; a second call resumes.

python sweep.py WORKER NUM_WORKERS      run the share of one worker
python sweep.py table                   write table.json and print it
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
STEPS = 300
SEEDS = (1, 2, 3)
CODECS = {
    "uncompressed": {"name": "identity"},
    "manifold, pca": {"name": "mapl", "rank": 24, "anchor_rank": 16, "init": "pca"},
    "manifold, random": {"name": "mapl", "rank": 24, "anchor_rank": 16, "init": "random"},
    "frozen, pca": {"name": "fixed", "rank": 24, "anchor_rank": 16, "init": "pca"},
    "frozen, random": {"name": "fixed", "rank": 24, "anchor_rank": 16, "init": "random"},
}


def runs():
    for lr in (0.01, 0.04):
        for codec in ("uncompressed", "manifold, pca", "manifold, random"):
            yield codec, 1, lr
    for seed in SEEDS:
        for codec in CODECS:
            yield codec, seed, 0.02


def result_path(codec: str, seed: int, lr: float) -> Path:
    return HERE / "results" / f"{codec.replace(', ', '-')}_seed{seed}_lr{lr:g}.json"


def run(codec: str, seed: int, lr: float) -> None:
    from thinwire.train import recipes
    from thinwire.train.config import CodecConfig
    from thinwire.train.launch import preflight, run_here

    path = result_path(codec, seed, lr)
    if path.exists():
        return
    base = recipes.get("tiny")
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            base,
            folder=folder,
            model=replace(base.model, seq_len=256),
            codec=CodecConfig(**CODECS[codec]),
            optim=replace(base.optim, lr=lr),
            pipeline=replace(base.pipeline, emulate=True, microbatches=4),
            train=replace(base.train, steps=STEPS, batch_size=8, seed=seed, eval_every=100, checkpoint_every=0),
        )
        preflight(config)
        summary = run_here(config)
        evals = [json.loads(line) for line in (Path(folder) / config.name / "evals.jsonl").read_text().splitlines()]
    record = {"codec": codec, "seed": seed, "lr": lr, "evals": evals, "summary": summary}
    path.write_text(json.dumps(record, indent=1))


def table() -> None:
    rows = []
    records = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))]
    for codec in CODECS:
        for lr in sorted({r["lr"] for r in records}):
            chosen = [r for r in records if r["codec"] == codec and r["lr"] == lr]
            if not chosen:
                continue
            row = {"codec": codec, "lr": lr, "seeds": len(chosen)}
            for step in (100, STEPS):
                losses = [e["val_loss"] for r in chosen for e in r["evals"] if e["step"] == step]
                row[f"val_loss_mean_{step}"] = round(statistics.mean(losses), 4)
                row[f"val_loss_sd_{step}"] = round(statistics.stdev(losses), 4) if len(losses) > 1 else None
            rows.append(row)
    (HERE / "table.json").write_text(json.dumps(rows, indent=1))
    for row in rows:
        print(row)


if __name__ == "__main__":
    if sys.argv[1] == "table":
        table()
    else:
        worker, workers = int(sys.argv[1]), int(sys.argv[2])
        for i, (codec, seed, lr) in enumerate(runs()):
            if i % workers == worker:
                run(codec, seed, lr)
