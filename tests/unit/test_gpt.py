"""GPT: against torch's own layer, causality, slices and stages against the whole, first values, bad input."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire import codecs
from thinwire.models import GPT, GPTConfig, gpt, gpt_config
from thinwire.models.gpt import Attention
from thinwire.optim import param_groups
from thinwire.pipeline import split

SMALL = GPTConfig(vocab_size=61, dim=32, num_layers=4, num_heads=4, max_seq_len=24, bias=True, tied_head=False)
TIED = GPTConfig(vocab_size=61, dim=32, num_layers=4, num_heads=4, max_seq_len=24)
BOTH = pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied with bias", "tied"])


def built(config: GPTConfig, seed: int = 0, **parts: object) -> GPT:
    model = GPT(config, **parts)  # type: ignore[arg-type]
    model.init_weights(seed)
    return model


def ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(SMALL.vocab_size, (batch, tokens))


def test_a_layer_equals_torchs_own() -> None:
    config = GPTConfig(vocab_size=8, dim=24, num_layers=1, num_heads=4, bias=True)
    mine = built(config).double().layers["0"]
    theirs = nn.TransformerEncoderLayer(24, 4, 96, 0.0, "gelu", batch_first=True, norm_first=True).double()
    pairs = {
        "self_attn.in_proj": mine.attention.wqkv,
        "self_attn.out_proj.": mine.attention.wo,
        "linear1.": mine.ffn.w1,
        "linear2.": mine.ffn.w2,
        "norm1.": mine.attention_norm,
        "norm2.": mine.ffn_norm,
    }
    state = {}
    for name, module in pairs.items():
        nn.init.normal_(module.bias)
        joint = name if name.endswith(".") else f"{name}_"
        state |= {f"{joint}weight": module.weight, f"{joint}bias": module.bias}
    theirs.load_state_dict(state)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    torch.testing.assert_close(mine(x), theirs(x, src_mask=mask), rtol=1e-10, atol=1e-12)


def test_logits_see_token_and_position() -> None:
    model = built(SMALL)
    model.layers = nn.ModuleDict()
    assert model.embedding is not None and model.positions is not None and model.head is not None
    x = ids(2, 5)
    expected = model.head(F.layer_norm(model.embedding.weight[x] + model.positions.weight[:5], (32,)))
    torch.testing.assert_close(model(x), expected)


def test_later_tokens_do_not_reach_earlier_logits() -> None:
    model, x = built(SMALL), ids(2, 12)
    changed = x.clone()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocab_size
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-6


@BOTH
@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4), (0, 0, 2, 4, 4)])
def test_slices_in_a_row_are_the_whole(config: GPTConfig, cuts: tuple[int, ...]) -> None:
    model, x = built(config), ids(3, 11)
    expected, stages = model(x), len(cuts) - 1
    for stage in range(stages):
        layers = range(cuts[stage], cuts[stage + 1])
        x = model.slice(layers, embedding=stage == 0, head=stage == stages - 1)(x)
    assert torch.equal(x, expected)


@BOTH
def test_it_can_be_cut_into_stages_without_losing_a_parameter(config: GPTConfig) -> None:
    model = built(config)
    stages = split(model, 3, codecs.get("identity", wire_format="fp32"))
    names = [name for stage in stages for name, _ in stage.model.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
    assert "positions.weight" in dict(stages[0].model.named_parameters())


@BOTH
def test_meta_then_empty_then_init_is_a_direct_build(config: GPTConfig) -> None:
    direct, x = built(config, seed=3), ids(2, 5)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    model.init_weights(3)
    assert torch.equal(model(x), direct(x))
    part = built(config, seed=3, layers=range(2, 4), embedding=False)
    whole = dict(direct.named_parameters(remove_duplicate=False))
    assert all(torch.equal(parameter, whole[name]) for name, parameter in part.named_parameters())


def test_first_values() -> None:
    model = built(gpt_config("tiny", vocab_size=2048, tied_head=False, bias=True))
    layer = model.layers["1"]
    assert model.embedding is not None and model.positions is not None and model.head is not None
    for matrix in (model.embedding, model.positions, model.head, layer.attention.wqkv, layer.ffn.w1):
        assert matrix.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for matrix in (layer.attention.wo, layer.ffn.w2):
        assert matrix.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert torch.equal(layer.ffn_norm.weight, torch.ones(128))
    assert not any(parameter.any() for name, parameter in model.named_parameters() if name.endswith("bias"))
    first_loss = F.cross_entropy(model(torch.randint(2048, (2, 64))).flatten(0, 1), torch.randint(2048, (128,)))
    assert first_loss.item() == pytest.approx(math.log(2048), rel=0.02)


def test_fused_rows_are_three_matrices_of_every_layer() -> None:
    model = built(SMALL)
    splits = model.slice(range(1, 3), embedding=False, head=False).fused_splits()
    parameters = dict(model.named_parameters())
    assert set(splits) == {f"layers.{index}.attention.wqkv.weight" for index in (1, 2)}
    assert all(rows == (32, 32, 32) and sum(rows) == len(parameters[name]) for name, rows in splits.items())


def test_muon_gets_the_hidden_matrices_and_nothing_else() -> None:
    groups = param_groups(built(TIED))
    names = {name: rows for group in groups if group["rule"] == "muon"
             for name, rows in zip(group["names"], group["splits"], strict=True)}  # fmt: skip
    assert {name.split(".", 2)[2] for name in names} == {
        f"{matrix}.weight" for matrix in ("attention.wqkv", "attention.wo", "ffn.w1", "ffn.w2")
    }
    assert len(names) == 16 and names["layers.0.attention.wqkv.weight"] == (32, 32, 32)


def test_tied_head_is_one_parameter() -> None:
    model = built(TIED).double().float()
    assert model.head is not None and model.embedding is not None
    assert model.head.weight is model.embedding.weight
    assert model.tied_parameters == [("embedding.weight", "head.weight")] and built(SMALL).tied_parameters == []


def test_default_is_the_size_it_is_called() -> None:
    with torch.device("meta"):
        model = gpt("10m", vocab_size=65)
    assert GPTConfig(vocab_size=65) == model.config
    assert sum(p.numel() for p in model.parameters()) == 6 * (12 * 384**2 + 2 * 384) + (65 + 256 + 1) * 384


def test_dropout_acts_in_training_only() -> None:
    model, x = built(GPTConfig(vocab_size=61, dim=32, num_layers=2, num_heads=4, dropout=0.3)), ids(2, 9)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    attention = Attention(model.config).eval()
    hidden = torch.randn(1, 5, 32)
    assert torch.equal(attention(hidden), attention(hidden))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    logits = built(SMALL).to(dtype)(ids(3, 24).int())
    assert logits.shape == (3, 24, 61) and logits.dtype == dtype and logits.isfinite().all()


@pytest.mark.parametrize(
    ("size", "overrides", "message"),
    [
        ("xl", {"vocab_size": 9}, "tiny, 10m"),
        ("tiny", {}, "vocab_size=V"),
        ("tiny", {"vocab_size": 9, "depth": 3}, "depth"),
        ("tiny", {"vocab_size": 9, "num_heads": 5}, "multiple of 5"),
        ("tiny", {"vocab_size": 0}, "vocab_size=0"),
        ("tiny", {"vocab_size": 9, "dropout": 1.0}, "dropout=1.0"),
        ("tiny", {"vocab_size": 9, "norm_eps": 0.0}, "norm_eps=0.0"),
    ],
)
def test_bad_configurations(size: str, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpt_config(size, **overrides)


@pytest.mark.parametrize(
    ("x", "message"),
    [(torch.zeros(1, 25, dtype=torch.int64), "max_seq_len=24"), (torch.zeros(1, 5), "integer token ids")],
)
def test_bad_input(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(SMALL)(x)
