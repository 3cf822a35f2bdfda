"""The drafter: published tensor names, default taps, RoPE precision, and packed = one by one."""

from types import SimpleNamespace

import pytest
import torch
from training import make_module

from dflow_lightning.errors import InputError
from dflow_lightning.models.dims import DrafterConfig, DrafterDims, default_target_layer_ids
from dflow_lightning.models.drafter import Drafter, start_from_target

# The 11 tensors of a layer and the 3 beside the layers. Sizes: hidden 64, MLP 80, 6 query and 3
# key/value heads of 16, and 3 taps.
LAYER = {
    "input_layernorm.weight": [64],
    "post_attention_layernorm.weight": [64],
    "self_attn.q_proj.weight": [96, 64],
    "self_attn.k_proj.weight": [48, 64],
    "self_attn.v_proj.weight": [48, 64],
    "self_attn.o_proj.weight": [64, 96],
    "self_attn.q_norm.weight": [16],
    "self_attn.k_norm.weight": [16],
    "mlp.gate_proj.weight": [80, 64],
    "mlp.up_proj.weight": [80, 64],
    "mlp.down_proj.weight": [64, 80],
}
BESIDE = {"fc.weight": [64, 192], "hidden_norm.weight": [64], "norm.weight": [64]}


def build(target, **shape) -> Drafter:
    given = {"num_layers": 2, "block_size": 4, "target_layer_ids": [0, 1, 2]} | shape
    return Drafter(DrafterDims.resolve(DrafterConfig(**given), target)).eval()


def test_names_and_shapes_are_the_published_ones(tiny_target):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    drafter = build(tiny_target, num_layers=5, intermediate_size=80, **heads)
    expected = BESIDE | {
        f"layers.{n}.{name}": shape for n in range(5) for name, shape in LAYER.items()
    }
    assert len(expected) == 58
    assert {name: list(t.shape) for name, t in drafter.state_dict().items()} == expected
    assert dict(drafter.named_parameters()).keys() == expected.keys()


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (28, 5, [1, 7, 13, 19, 25]),
        (40, 5, [1, 10, 19, 28, 37]),
        (36, 3, [1, 17, 33]),
        (36, 1, [18]),
        (8, 5, [1, 2, 3, 4, 5]),
    ],
)
def test_default_taps(layers, taps, expected):
    assert default_target_layer_ids(layers, taps) == expected


@pytest.mark.parametrize(("layers", "taps"), [(2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_shallow_target_has_no_default_layers(layers, taps):
    """They were the same layer twice, or in falling order."""
    with pytest.raises(InputError, match=f"no default for {taps} taps of a target of {layers} lay"):
        default_target_layer_ids(layers, taps)


def test_what_is_left_out_is_the_targets(tiny_target):
    dims = DrafterDims.resolve(DrafterConfig(num_layers=1, block_size=8), tiny_target)
    config = tiny_target.config
    assert dims.target_layer_ids == [2]
    assert dims.mask_token_id == len(tiny_target.tokenizer) == 261
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                 "head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings"):  # fmt: skip
        assert getattr(dims, name) == getattr(config, name), name
    assert dims.rope_parameters["rope_theta"] == config.rope_parameters["rope_theta"]


def test_a_target_that_turns_a_share_of_its_heads_does_not_pass_that_on(tiny_target, monkeypatch):
    """Serving stacks would turn a share of the drafter's heads, which were trained whole."""
    whole = DrafterDims.resolve(DrafterConfig(target_layer_ids=[0]), tiny_target)
    partial = tiny_target.config.rope_parameters | {"partial_rotary_factor": 0.25}
    monkeypatch.setattr(tiny_target.config, "rope_parameters", partial)
    dims = DrafterDims.resolve(DrafterConfig(target_layer_ids=[0]), tiny_target)
    assert dims == whole


@pytest.mark.parametrize("key", ["rope_parameters", "rms_norm_eps"])
def test_targets_of_another_kind_are_refused(key):
    config = SimpleNamespace(rope_parameters={"rope_theta": 1e6}, rms_norm_eps=1e-6)
    delattr(config, key)
    with pytest.raises(InputError, match=f"target: other has no {key}"):
        DrafterDims.resolve(DrafterConfig(), SimpleNamespace(config=config, name="other"))


# ---------------------------------------------------------------- start


def test_start_copies_spread_layers_the_mean_tap_and_the_final_norm(tiny_target):
    drafter = build(tiny_target, num_layers=3, intermediate_size=80)
    before = {name: t.clone() for name, t in drafter.state_dict().items()}
    start_from_target(drafter, tiny_target)
    source = tiny_target.model.state_dict()
    for n, origin in enumerate([0, 2, 3]):
        for name in LAYER:
            copied = drafter.state_dict()[f"layers.{n}.{name}"]
            if name.startswith("mlp"):  # of another width: left as it was
                assert torch.equal(copied, before[f"layers.{n}.{name}"])
            else:
                assert torch.equal(copied, source[f"model.layers.{origin}.{name}"])
    assert torch.equal(drafter.norm.weight, source["model.norm.weight"])
    taps = torch.randn(5, 3, 64)
    torch.testing.assert_close(drafter.fc(taps.flatten(1)), taps.mean(1))


def test_a_module_starts_from_the_target_unless_told_otherwise(tiny_target_dir):
    from dflow_lightning.training.module import DrafterModule, TargetConfig

    options = {
        "target": TargetConfig(path=str(tiny_target_dir)),
        "drafter": DrafterConfig(num_layers=2, target_layer_ids=[0, 1]),
    }
    first = {k: DrafterModule(**options, init=k).drafter.layers[0] for k in ("target", "random")}
    source = DrafterModule(**options).target.layer_weights(0)["self_attn.q_proj.weight"]
    assert torch.equal(first["target"].self_attn.q_proj.weight, source)
    assert not torch.equal(first["random"].self_attn.q_proj.weight, source)


# ---------------------------------------------------------------- positions


FAR = torch.tensor([[30_000]])


def angles(drafter: Drafter, position: int) -> torch.Tensor:
    """RoPE angles in float64, from the formula."""
    E, theta = drafter.dims.head_dim, drafter.dims.rope_parameters["rope_theta"]
    exponents = torch.arange(0, E, 2, dtype=torch.float64) / E
    return torch.cat([position / theta**exponents] * 2)


def far_hidden(drafter: Drafter, position: int) -> torch.Tensor:
    """Output of one block at `position` behind the eight rows before it."""
    noise = torch.Generator().manual_seed(3)
    dtype = drafter.fc.weight.dtype
    taps = torch.randn(1, 8, 192, generator=noise).to(dtype)
    x = torch.randn(1, 1, 4, 64, generator=noise).to(dtype)
    rows = torch.arange(position - 8, position).unsqueeze(0)
    context = drafter.context_kv(drafter.project(taps), rows)
    return drafter(x, context, torch.tensor([[position]]))


@torch.no_grad()
def test_frequencies_stay_float32_whatever_the_module_is_cast_to(tiny_target):
    reference = build(tiny_target)
    cast = build(tiny_target)
    cast.load_state_dict(reference.state_dict())
    cast.to(torch.bfloat16)
    assert cast.fc.weight.dtype == torch.bfloat16
    assert cast.rotary.inverse_frequencies.dtype == torch.float32
    exact = angles(cast, 30_000)
    for got, wanted in zip(
        cast.rotary(FAR, torch.float32), (exact.cos(), exact.sin()), strict=True
    ):
        torch.testing.assert_close(got.flatten().double(), wanted, atol=5e-3, rtol=0)

    reference.double()
    reference.rotary.inverse_frequencies = angles(reference, 1)[:8]
    wanted = tiny_target.head(far_hidden(reference, 30_000).float())
    logits = tiny_target.head(far_hidden(cast, 30_000).float())
    assert (logits - wanted).norm() < 0.03 * wanted.norm()


@torch.no_grad()
def test_rounded_frequencies_would_be_far_off(tiny_target):
    """What the float32 frequencies are for."""
    drafter = build(tiny_target)
    drafter.rotary.inverse_frequencies = drafter.rotary.inverse_frequencies.bfloat16().float()
    error = drafter.rotary(FAR, torch.float32)[0].flatten() - angles(drafter, 30_000).cos()
    assert error.abs().max() > 0.5


@torch.no_grad()
def test_only_distances_between_positions_matter(tiny_target):
    """RoPE is relative: the same block and rows, 20,000 positions further on."""
    drafter = build(tiny_target)
    torch.testing.assert_close(
        far_hidden(drafter, 30_000), far_hidden(drafter, 10_000), atol=2e-2, rtol=2e-2
    )


# ---------------------------------------------------------------- packing


@torch.no_grad()
@pytest.mark.parametrize("backend", ["auto", "dense", "split"])
def test_packed_blocks_equal_one_block_at_a_time(tiny_drafter, backend):
    noise = torch.Generator().manual_seed(5)
    B, S, N = 2, 20, 5
    taps = torch.randn(B, S, 192, generator=noise)
    x = torch.randn(B, N, 4, 64, generator=noise)
    anchors = torch.tensor([[0, 1, 7, 7, 20], [3, 19, 2, 11, 5]])
    h, positions = tiny_drafter.project(taps), torch.arange(S).expand(B, -1)
    packed = tiny_drafter(x, tiny_drafter.context_kv(h, positions), anchors, backend)
    for b in range(B):
        for n in range(N):
            anchor = int(anchors[b, n])  # alone, with only the rows it may see
            rows = slice(0, max(anchor, 1))
            context = tiny_drafter.context_kv(h[b : b + 1, rows], positions[:1, rows])
            alone = tiny_drafter(x[b : b + 1, n : n + 1], context, anchors[b : b + 1, n : n + 1])
            torch.testing.assert_close(packed[b, n], alone[0, 0], atol=2e-5, rtol=1e-4)


def test_every_parameter_is_trained(tiny_target_dir):
    module = make_module(tiny_target_dir)
    assert all(p.requires_grad for p in module.parameters())
    names = {name.split(".")[0] for name, _ in module.named_parameters()}
    assert names == {"drafter", "relay"}
