"""LLaMA: attention against a float64 reference, slices against the whole, initialisation, sizes, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from thinwire.models.llama import (
    SIZES,
    Attention,
    Llama,
    LlamaConfig,
    end_parameter_counts,
    layer_parameter_counts,
    llama,
    llama_config,
    num_parameters,
    rope_tables,
)

SMALL = LlamaConfig(vocab_size=61, dim=32, num_layers=4, num_heads=4, num_kv_heads=2, max_seq_len=24)
TIED = LlamaConfig(vocab_size=61, dim=32, num_layers=4, num_heads=4, max_seq_len=24, tied_head=True)


def built(config: LlamaConfig, seed: int = 0, **parts: object) -> Llama:
    model = Llama(config, **parts)  # type: ignore[arg-type]
    model.init_weights(seed)
    return model


def ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(SMALL.vocab_size, (batch, tokens))


def reference_attention(attention: Attention, x: Tensor) -> Tensor:
    """Every head, position and pair of RoPE written out, in float64; only for one sequence (T, D)."""
    config, num_tokens = attention.config, len(x)
    width = config.head_dim
    q, k, v = (x @ w.T for w in attention.wqkv.weight.split(config.qkv_rows))
    out = torch.zeros(num_tokens, config.dim, dtype=x.dtype)

    def turned(row: Tensor, position: int) -> Tensor:
        row = row.clone()
        for pair in range(width // 2):
            angle = position / config.rope_theta ** (2 * pair / width)
            a, b = row[pair].clone(), row[pair + width // 2].clone()
            row[pair] = a * math.cos(angle) - b * math.sin(angle)
            row[pair + width // 2] = a * math.sin(angle) + b * math.cos(angle)
        return row

    for head in range(config.num_heads):
        mine = slice(head * width, (head + 1) * width)
        group = head // (config.num_heads // config.kv_heads)
        shared = slice(group * width, (group + 1) * width)
        for t in range(num_tokens):
            query = turned(q[t, mine], t)
            scores = torch.stack([query @ turned(k[s, shared], s) for s in range(t + 1)]) / math.sqrt(width)
            out[t, mine] = scores.softmax(0) @ v[: t + 1, shared]
    return out @ attention.wo.weight.T


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_equals_the_reference(num_kv_heads: int) -> None:
    config = LlamaConfig(vocab_size=8, dim=24, num_layers=1, num_heads=4, num_kv_heads=num_kv_heads, ffn_dim=8)
    attention = Attention(config).double()
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    found = attention(x, *rope_tables(7, config.head_dim, config.rope_theta, x))
    expected = torch.stack([reference_attention(attention, row) for row in x])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4), (0, 0, 2, 3, 4, 4)])
def test_slices_in_a_row_are_the_whole(config: LlamaConfig, cuts: tuple[int, ...]) -> None:
    model, x = built(config), ids(3, 11)
    expected = model(x)
    stages = len(cuts) - 1
    for stage in range(stages):
        is_first, is_last = stage == 0, stage == stages - 1
        part = model.slice(range(cuts[stage], cuts[stage + 1]), embedding=is_first, head=is_last)
        x = part(x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_a_slice_shares_parameters_under_global_names(config: LlamaConfig) -> None:
    model = built(config)
    whole = dict(model.named_parameters(remove_duplicate=False))
    part = model.slice(range(2, 4), embedding=False, head=True)
    names = dict(part.named_parameters())
    assert {name.split(".")[1] for name in names if name.startswith("layers")} == {"2", "3"}
    assert all(parameter is whole[name] for name, parameter in names.items())
    assert "head.weight" in names and part.embedding is None


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_meta_then_empty_then_init_is_a_direct_build(config: LlamaConfig) -> None:
    direct, x = built(config, seed=3), ids(2, 5)
    with torch.device("meta"):
        model = Llama(config)
    model.to_empty(device="cpu")
    model.init_weights(3)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in direct.named_parameters()]
    assert not list(model.buffers())
    assert torch.equal(model(x), direct(x))


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_a_stage_built_alone_has_the_values_of_the_whole(config: LlamaConfig) -> None:
    whole = dict(built(config, seed=5).named_parameters(remove_duplicate=False))
    part = built(config, seed=5, layers=range(3, 4), embedding=False)
    assert all(torch.equal(parameter, whole[name]) for name, parameter in part.named_parameters())
    other = built(config, seed=6, layers=range(3, 4), embedding=False)
    assert not torch.equal(other.layers["3"].ffn.w2.weight, part.layers["3"].ffn.w2.weight)


def test_a_tied_head_is_one_parameter_where_both_ends_meet() -> None:
    model = built(TIED).double().float()
    assert model.head is not None and model.embedding is not None
    assert model.head.weight is model.embedding.weight
    assert model.tied_parameters == [("embedding.weight", "head.weight")]
    assert built(SMALL).tied_parameters == []
    assert sum(p.numel() for p in model.parameters()) == num_parameters(TIED)


def test_initial_scales() -> None:
    model = built(llama_config("tiny"))
    layer = model.layers["1"]
    assert model.embedding is not None and model.head is not None
    expected = {
        model.embedding.weight: 0.02,
        model.head.weight: 192**-0.5,
        layer.attention.wqkv.weight: 0.02,
        layer.ffn.w2.weight: 0.02 / math.sqrt(8),
    }
    for parameter, std in expected.items():
        assert parameter.std().item() == pytest.approx(std, rel=0.02)
    assert torch.equal(layer.ffn_norm.weight, torch.ones(192))


def test_later_tokens_do_not_reach_earlier_logits() -> None:
    model, x = built(SMALL), ids(2, 12)
    changed = x.clone()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocab_size
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-5


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 13), (2, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_shape_and_dtype(batch: int, tokens: int, dtype: torch.dtype) -> None:
    model = built(SMALL).to(dtype)
    logits = model(ids(batch, tokens).int())
    assert logits.shape == (batch, tokens, SMALL.vocab_size) and logits.dtype == dtype
    logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_training_after_inference_mode() -> None:
    model, x = built(SMALL), ids(1, 4)
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()


def test_fused_rows_are_the_separate_matrices() -> None:
    model = built(SMALL)
    splits = model.slice(range(1, 3), embedding=False, head=False).fused_splits()
    assert splits["layers.1.attention.wqkv.weight"] == (32, 16, 16)
    parameters = dict(model.named_parameters())
    assert len(splits) == 4
    assert all(sum(rows) == len(parameters[name]) for name, rows in splits.items())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tied", [False, True])
def test_counts_are_those_of_the_model(size: str, tied: bool) -> None:
    config = llama_config(size, tied_head=tied)
    with torch.device("meta"):
        model = Llama(config)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())
    per_layer = [sum(p.numel() for p in layer.parameters()) for layer in model.layers.values()]
    assert layer_parameter_counts(config) == per_layer
    assert model.norm is not None and model.head is not None and model.embedding is not None
    last = model.norm.weight.numel() + model.head.weight.numel()
    assert end_parameter_counts(config) == (model.embedding.weight.numel(), last)


@pytest.mark.parametrize(
    ("size", "dim", "about"),
    [("tiny", 192, 3e6), ("10m", 256, 1e7), ("150m", 1024, 1.5e8), ("500m", 1536, 5e8), ("1b", 2048, 1e9)],
)
def test_sizes_are_what_they_are_called(size: str, dim: int, about: float) -> None:
    config = llama_config(size)
    assert config.dim == dim
    assert num_parameters(config) == pytest.approx(about, rel=0.15)


def test_overrides_and_defaults() -> None:
    assert llama("tiny", num_layers=1, vocab_size=300).config.num_layers == 1
    assert llama_config("150m").hidden_dim == 2752 and llama_config("10m").hidden_dim == 704


@pytest.mark.parametrize(
    ("size", "overrides", "message"),
    [
        ("7b", {}, "tiny, 10m, 150m, 500m, 1b"),
        ("tiny", {"depth": 3}, "depth"),
        ("tiny", {"num_heads": 5}, "multiple of 10"),
        ("tiny", {"num_kv_heads": 4}, "divisor"),
        ("tiny", {"num_layers": 0}, "num_layers=0"),
        ("tiny", {"ffn_dim": 0}, "hidden_dim=0"),
        ("tiny", {"norm_eps": 0.0}, "norm_eps"),
    ],
)
def test_bad_configurations(size: str, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llama_config(size, **overrides)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 25, dtype=torch.int64), "max_seq_len=24"),
        (torch.zeros(1, 5), "integer token ids"),
        (torch.zeros(5, dtype=torch.int64), "integer token ids"),
    ],
)
def test_bad_ids(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(SMALL)(x)


def test_bad_hidden_states() -> None:
    part = built(SMALL, embedding=False, layers=range(1, 2))
    with pytest.raises(ValueError, match="hidden states"):
        part(torch.zeros(1, 5, 31))


@pytest.mark.parametrize(
    ("layers", "message"), [(range(3, 5), "layer 4"), (range(0, 4, 2), "consecutive"), (range(2, 2), "fewer stages")]
)
def test_bad_slices(layers: range, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(SMALL).slice(layers, embedding=False, head=False)
    with pytest.raises(ValueError, match="asks for embedding"):
        built(SMALL, embedding=False).slice(range(1), embedding=True, head=False)
