"""`dflow-train plan`: exact counts, formulas against what real tensors take, and refusals."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from targets import random_target
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflow_lightning.data.batches import TrainLoader
from dflow_lightning.data.datamodule import Batch
from dflow_lightning.data.prepared import PreparedRow, PreparedWriter, finish
from dflow_lightning.data.template import EncodedRow
from dflow_lightning.data.token_rows import TokenRows
from dflow_lightning.errors import InputError
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.relay import ProjectedRows, Relay
from dflow_lightning.models.target import FrozenTarget
from dflow_lightning.plan.command import answers, hours, make_plan, parse, sharding_of, steps
from dflow_lightning.plan.measure import build_module, measured_lines, training_step
from dflow_lightning.plan.memory import ZERO_BUCKETS, Plan, parameter_count
from dflow_lightning.plan.work import Work
from dflow_lightning.tensors.blocks import Anchors
from dflow_lightning.training.step_inputs import Rollout, RolloutConfig, Round, clean_forward

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]
RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool) -> dict:
    """A config.json of a dense Qwen3."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": intermediate, "vocab_size": 151936,
        "tie_word_embeddings": tied, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "hidden_act": "silu", "eos_token_id": 151645,
        "dtype": "bfloat16",
    }  # fmt: skip


SHAPES = {
    "1.7b": qwen3(2048, 28, 16, 6144, tied=True),
    "4b": qwen3(2560, 36, 32, 9728, tied=True),
    "8b": qwen3(4096, 36, 32, 12288, tied=False),
    "32b": qwen3(5120, 64, 64, 25600, tied=False),
    "70b": qwen3(8192, 80, 64, 28672, tied=False),
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A config.json for each shape."""
    folder = tmp_path_factory.mktemp("configs")
    for size, shape in SHAPES.items():
        (folder / f"{size}.json").write_text(json.dumps(shape))
    return {size: folder / f"{size}.json" for size in SHAPES}


def planned(*options: object) -> Plan:
    return make_plan(parse([str(option) for option in options]))


def of_recipe(configs: dict[str, Path], size: str, *options: object, method="dflow") -> Plan:
    config = RECIPES / f"qwen3-{size}-{method}.yaml"
    return planned("--config", config, "--target_config", configs[size], *options)


def layer_parameters(hidden: int, heads: int, intermediate: int) -> int:
    attention = 2 * hidden * heads * 128 + 2 * hidden * 8 * 128 + 2 * 128
    return attention + 3 * hidden * intermediate + 2 * hidden


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(("size", "millions"), [("1.7b", 272.6), ("4b", 537), ("8b", 1049)])
def test_parameters_are_exact(configs: dict[str, Path], size: str, millions: float) -> None:
    shape, plan = SHAPES[size], of_recipe(configs, size)
    D, heads, F = (shape[k] for k in ("hidden_size", "num_attention_heads", "intermediate_size"))
    layer = layer_parameters(D, heads, F)
    embeddings = shape["vocab_size"] * D * (1 if shape["tie_word_embeddings"] else 2)

    target = sum(p.numel() for p in plan.target.model.parameters())
    assert target == embeddings + shape["num_hidden_layers"] * layer + D
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
        model.tie_weights()
    assert target == sum(p.numel() for p in model.parameters())

    drafter = sum(p.numel() for p in plan.drafter.parameters())
    assert drafter == 5 * layer + 5 * D * D + 2 * D
    assert drafter == pytest.approx(millions * 1e6, rel=1e-3)  # of the published drafters
    assert len(plan.drafter.state_dict()) == 58
    relay = (3 * D * 2 * D + 2 * D) + (2 * D * 2 * D + 2 * D) + 2 * D
    assert plan.trained == drafter + relay
    assert of_recipe(configs, size, method="dflash").trained == drafter


@pytest.mark.parametrize(
    ("size", "taps"), [("1.7b", [1, 7, 13, 19, 25]), ("8b", [1, 9, 17, 25, 33])]
)
def test_taps_are_the_published_ones(configs: dict[str, Path], size: str, taps: list[int]) -> None:
    dims = of_recipe(configs, size).drafter.dims
    assert dims.target_layer_ids == taps
    assert (dims.block_size, dims.num_layers) == (16, 5)


# ---------------------------------------------------------------- memory against real tensors


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, FrozenTarget]:
    """A plan that can be run: two rows of 24 tokens, 6 blocks of 4, 3 rolled out twice."""
    folder = random_target(tmp_path_factory.mktemp("small"))
    plan = planned(
        f"--model.target.path={folder}", "--model.drafter.num_layers=2",
        "--model.drafter.block_size=4", "--model.drafter.target_layer_ids=[0,2]",
        "--model.relay.enabled=true", "--model.num_anchors=6", "--rollout.num_anchors=3",
        "--data.train=none", "--data.max_length=24", "--data.batch_size=2",
        "--trainer.accelerator=cpu", "--trainer.precision=32-true",
    )  # fmt: skip
    return plan, FrozenTarget.load(str(folder))


def test_features_and_cache_are_what_a_rollout_holds(small: tuple[Plan, FrozenTarget]) -> None:
    plan, target = small
    dims = plan.drafter.dims
    ids = torch.randint(0, 300, (2, 24))
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(2))
    inputs = clean_forward(target, batch, dims.target_layer_ids, plan.rolled_slots)
    anchors = torch.arange(6).expand(2, -1)
    inputs.rounds.append(Round(Anchors(anchors, torch.ones_like(anchors, dtype=torch.bool))))
    drafter, relay = Drafter(dims), Relay(dims.hidden_size, 2 * dims.hidden_size)
    config = RolloutConfig(num_rounds=2, num_anchors=3)
    Rollout(target=target, drafter=drafter, relay=relay, config=config).extend(inputs)

    taps = [inputs.taps_BSC, *(r.rejected.taps_BNKC for r in inputs.rounds if r.rejected)]
    assert plan.features() == sum(t.nbytes for t in taps)
    held = [t for layer in inputs.cache.layers if layer.is_initialized
            for t in (layer.keys, layer.values)]  # fmt: skip
    assert plan.target_cache() == sum(t.nbytes for t in held)
    blocks = sum(r.anchors.positions_BN.shape[1] for r in inputs.rounds)
    assert plan.slots == blocks * dims.block_size


def test_a_checkpoint_holds_weights_and_two_moments(small: tuple[Plan, FrozenTarget]) -> None:
    plan, _ = small
    dims = plan.drafter.dims
    drafter, relay = Drafter(dims), Relay(dims.hidden_size, 2 * dims.hidden_size)
    module = torch.nn.ModuleList([drafter, relay])
    optimizer = torch.optim.AdamW(module.parameters())
    sum(p.sum() for p in module.parameters()).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save([module.state_dict(), optimizer.state_dict()], file)
    assert plan.checkpoint() == pytest.approx(file.getbuffer().nbytes, rel=0.1)


@pytest.mark.parametrize("carryover", [False, True])
@pytest.mark.parametrize(
    ("precision", "backend"), [("bf16-mixed", "dense"), ("32-true", "dense"), ("32-true", "split")]
)
def test_activations_are_near_what_autograd_saves(
    tmp_path: Path, precision: str, backend: str, carryover: bool
) -> None:
    """12 blocks a row; with carryover 8 of the mask round and 4 that are rolled out once."""
    shape = qwen3(256, 8, 4, 768, tied=True) | {"vocab_size": 512, "eos_token_id": 1}
    shape |= {"head_dim": 64, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    plan = planned(
        f"--model.target.path={tmp_path}", "--model.drafter.num_layers=2", "--data.train=none",
        f"--model.num_anchors={8 if carryover else 12}", f"--rollout.num_rounds={int(carryover)}",
        "--rollout.num_anchors=4", f"--model.drafter.carryover={str(carryover).lower()}",
        "--data.max_length=64", "--data.batch_size=2", f"--trainer.precision={precision}",
        f"--model.attention={backend}", "--trainer.accelerator=cpu",
    )  # fmt: skip
    drafter = Drafter(plan.drafter.dims)
    weights = {p.untyped_storage().data_ptr() for p in drafter.parameters()}
    shapes = {shape for p in drafter.parameters() for shape in (p.shape, p.shape[::-1])}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights and tensor.shape not in shapes:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    taps, x = torch.randn(2, 64, 2 * 256), torch.randn(2, 12, 16, 256, requires_grad=True)
    positions = torch.arange(64).expand(2, -1)
    rows = ProjectedRows(
        torch.randn(2, 12, 16, 256), torch.ones(2, 12, 16, dtype=torch.bool),
        torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.long),
    )  # fmt: skip
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), mixed:
        context = drafter.context_kv(drafter.project(taps), positions)
        anchors, carried = torch.arange(12).expand(2, -1) * 5, drafter.carry(rows)
        drafter(x, context, anchors, backend=backend, carried=carried).sum()
    taken = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    parts = plan.activation_parts()
    masks = plan.masks() if backend == "dense" else 0  # those of the other one come and go
    assert (parts["carried rows"] > 0) is carryover
    later = parts["loss"] + parts["gradients of one layer"] + parts["relay"]
    predicted = sum(parts.values()) - later + masks
    assert predicted == pytest.approx(taken, rel=0.15)


# ---------------------------------------------------------------- what fits


@pytest.mark.parametrize(
    ("overlay", "memory"), [("8xa800-80g", 80), ("8xh200", 139), ("1xh200", 139)]
)
def test_the_largest_recipe_fits_its_hardware(
    configs: dict[str, Path], overlay: str, memory: float
) -> None:
    plan = of_recipe(configs, "8b", "--config", RECIPES / "hardware" / f"{overlay}.yaml")
    assert plan.gpus == int(overlay[0])
    plan.refuse_what_does_not_fit(memory)


def test_a_smaller_batch_is_proposed_and_fits(configs: dict[str, Path]) -> None:
    with pytest.raises(InputError) as refused:
        of_recipe(configs, "8b", "--gpus", 8).refuse_what_does_not_fit(80)
    words = str(refused.value)
    assert "no room for the drafter activations" in words
    assert "gradient_checkpointing" not in words  # one change is enough, and costs nothing
    batch = words.partition("data.batch_size to ")[2].split()[0]
    more = words.partition("accumulate_grad_batches to ")[2].split(",")[0]
    assert int(batch) * int(more) == 4
    options = (f"--data.batch_size={batch}", f"--trainer.accumulate_grad_batches={more}")
    of_recipe(configs, "8b", "--gpus", 8, *options).refuse_what_does_not_fit(80)


def mended(plan: Plan, gpu_memory: float) -> Plan:
    """The plan after what its refusal says."""
    with pytest.raises(InputError) as refused:
        plan.refuse_what_does_not_fit(gpu_memory)
    words, recipe = str(refused.value), plan.recipe
    if "gradient_checkpointing to true" in words:
        plan = replace(plan, recompute=True)
    if "trainer.strategy to " in words:
        name = words.partition("trainer.strategy to ")[2].split()[0].strip(",")
        plan = replace(plan, sharding=sharding_of(name))
    if "model.target.shard to true" in words:
        plan = replace(plan, shard_target=True)
    if "data.batch_size to " in words:
        plan = replace(plan, rows=int(words.partition("data.batch_size to ")[2].split()[0]))
    assert plan.recipe is recipe
    return plan


@pytest.mark.parametrize("memory", [40, 48, 60, 70, 80])
def test_what_a_refusal_proposes_fits(configs: dict[str, Path], memory: int) -> None:
    plan = mended(of_recipe(configs, "8b", "--gpus", 8), memory)
    plan.refuse_what_does_not_fit(memory)


def test_where_nothing_helps_that_is_said(configs: dict[str, Path]) -> None:
    plan = of_recipe(configs, "8b", "--gpus", 8)
    with pytest.raises(InputError, match=r"choose a smaller target, .* or take GPUs of \d+ GiB"):
        plan.refuse_what_does_not_fit(6)


def test_zero_shards_what_its_stage_says(configs: dict[str, Path]) -> None:
    plan = of_recipe(configs, "8b", "--gpus", 8, "--trainer.strategy=ddp")
    whole = list(plan.trained_state().values())
    n = plan.trained
    assert whole == [n * 6, n * 8, n * 8]  # with a bf16 copy; gradients twice under DDP
    for name, weights, gradients, optimizer in (
        ("zero1", 6 * n, 4 * n, 12 * n / 8), ("zero2", 6 * n, 4 * n / 8, 12 * n / 8),
        ("zero3", (4 / 8 + 2) * n, 4 * n / 8, 12 * n / 8), ("zero2_offload", 6 * n, 4 * n / 8, 0),
    ):  # fmt: skip
        found = of_recipe(configs, "8b", "--gpus", 8, f"--trainer.strategy={name}")
        state = list(found.trained_state().values())
        assert state[0] == pytest.approx(weights)
        assert state[1] == pytest.approx(gradients + ZERO_BUCKETS)
        assert state[2] == pytest.approx(optimizer)
        assert (found.cpu_memory > 0) == name.endswith("offload")


def test_a_node_maps_the_target_once_or_copies_it_in_each_process(configs: dict[str, Path]) -> None:
    plan = of_recipe(configs, "8b", "--gpus", 8)
    whole = parameter_count(plan.target.model)
    assert (plan.target_copies, plan.loading_memory) == (1, 2 * whole)  # saved in bfloat16
    wider = of_recipe(configs, "8b", "--gpus", 8, "--model.target.dtype=float32")
    assert (wider.target_copies, wider.loading_memory) == (8, 8 * 4 * whole)
    two = of_recipe(
        configs, "8b", "--gpus", 8, "--trainer.num_nodes=2", "--model.target.dtype=float16"
    )
    assert (two.target_copies, two.loading_memory) == (4, 4 * 2 * whole)


def test_recomputed_layers_keep_their_input(configs: dict[str, Path]) -> None:
    plan = of_recipe(configs, "8b")
    parts, fewer = plan.activation_parts(), replace(plan, recompute=True).activation_parts()
    layers = parts["layers of the blocks"] / 5 + 5 * plan.rows * plan.slots * 4096 * 4
    assert fewer["layers of the blocks"] == pytest.approx(layers)
    assert fewer["keys and values read"] == pytest.approx(parts["keys and values read"] / 5)
    assert sum(fewer.values()) < 0.6 * sum(parts.values())


def test_phases_do_not_add_up(configs: dict[str, Path]) -> None:
    """Loss, a layer's backward pass and the target's cache take turns; the largest is planned."""
    plan = of_recipe(configs, "8b")
    for each in (plan, replace(plan, recompute=True)):
        rollout, loss, backward = (sum(parts.values()) for parts in each.phases())
        assert backward > loss > rollout
        always = sum(each.trained_state().values()) + each.features()
        assert each.total == pytest.approx(next(iter(each.memory().values())) + always + backward)
        parts = each.activation_parts()
        assert backward == sum(parts.values()) - parts["final norm"] - parts["loss"]
    few = of_recipe(configs, "8b", "--model.num_anchors=4", "--rollout.num_anchors=4")
    assert any(name.startswith("target KV") for name in few.memory())


def test_only_one_recomputed_layer_has_a_copy_for_autocast(configs: dict[str, Path]) -> None:
    plan = of_recipe(configs, "8b")
    whole = next(iter(plan.trained_state().values()))
    least = next(iter(replace(plan, recompute=True).trained_state().values()))
    four = sum(p.numel() for layer in plan.drafter.layers[1:] for p in layer.parameters())
    assert whole - least == 2 * four


@pytest.mark.parametrize("size", ["32b", "70b"])
def test_a_sharded_target_fits(configs: dict[str, Path], size: str) -> None:
    large = of_recipe(configs, "8b", "--gpus", 8, "--target_config", configs[size])
    plan = mended(large, 80)
    assert plan.shard_target
    plan.refuse_what_does_not_fit(80)


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        ("32b", "no room for the drafter weights"),
        ("70b", "no room for the target weights"),
    ],
)
def test_large_targets_are_refused(
    launch: "Launcher", configs: dict[str, Path], size: str, sentence: str
) -> None:
    options = ("--gpus", 8, "--gpu_memory", 80, "--target_config", configs[size])
    done = launch("plan", "--config", RECIPES / "qwen3-8b-dflow.yaml", *options)
    assert done.status == 2
    assert sentence in done.err
    assert "set model.target.shard to true" in done.err
    assert len(done.err.splitlines()) == 1
    assert "optimizer" in done.out  # the table is still there


# ---------------------------------------------------------------- the command


def test_prints_everything_in_80_columns(launch: "Launcher", configs: dict[str, Path]) -> None:
    done = launch(
        "plan", "--config", RECIPES / "qwen3-8b-dflow.yaml",
        "--config", RECIPES / "hardware/8xa800-80g.yaml", "--target_config", configs["8b"],
    )  # fmt: skip
    assert (done.status, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 80
    assert "8,190,735,360" in done.out  # the model card's 8.2B
    assert "32 rows: 8 GPUs x 1 x 4 accumulated" in done.out
    clean, verified = 32 * 3072, 32 * 2 * 128 * 16
    assert f"up to {clean:,} tokens, with rollouts {clean + verified:,}" in done.out
    assert "data.train is missing" in done.out
    assert "data/qwen3-8b/train" in done.out
    assert "for a million rows" in done.out
    assert "cache    none; features of 1,000,000 rows would take up to 125.83 TB" in done.out


def test_only_a_relay_makes_the_target_verify(configs: dict[str, Path]) -> None:
    assert of_recipe(configs, "8b").verified == 2 * 128 * 16
    assert of_recipe(configs, "8b", "--model.relay.enabled=false").verified == 0
    assert of_recipe(configs, "8b", "--rollout.mode=clean_features").verified == 0
    assert of_recipe(configs, "8b", "--rollout.reference=target").verified == 2 * 128 * 16
    assert of_recipe(configs, "8b", method="dflash").slots == 512 * 16


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_are_the_loaders(tmp_path: Path, tiny_target_dir: Path, accumulate: int) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n" * 47 + "\n")
    tokens = TokenRows.pack([EncodedRow([1, 2], [0, 1])] * 47, [str(i) for i in range(47)])
    batches = len(TrainLoader(tokens, batch_size=4, seed=0, rank=0, world_size=2))
    plan = planned(
        f"--model.target.path={tiny_target_dir}", f"--data.train={data}", "--gpus=2",
        "--model.drafter.num_layers=1", f"--trainer.accumulate_grad_batches={accumulate}",
        "--trainer.max_epochs=6",
    )  # fmt: skip
    epoch = -(-batches // accumulate)
    expected = f"steps    {6 * epoch} (6.0 epochs); {epoch} for the 47 rows of an epoch"
    assert steps(plan) == [expected]
    plan.recipe.trainer.max_steps = 3
    assert steps(plan)[0].startswith(f"steps    3 ({3 / epoch:.1f} epochs)")
    data.write_text("{}\n" * 7)
    with pytest.raises(InputError, match="no batch of 4 for each of 2 GPUs"):
        steps(plan)


def test_hours_are_work_over_rate(configs: dict[str, Path]) -> None:
    options = ("--gpus", 8, "--rows", 80000, "--gpu_tflops", 100, "--data.pack=false")
    plan = of_recipe(configs, "8b", *options)
    seconds = 32 * Work(plan).row / (8 * 100e12)
    assert (
        hours(plan)[0] == f"hours    at most {15000 * seconds / 3600:.1f}, {seconds:.2f} s a step,"
    )
    assert steps(plan) == ["steps    15,000 (6.0 epochs); 2,500 for the 80,000 rows of an epoch"]


def test_work_is_what_a_counter_counts(small: tuple[Plan, FrozenTarget]) -> None:
    """Products of matrices in a step, by torch's own counter; attention is a small rest here."""
    plan, _ = small
    module = build_module(plan.recipe.model, init_from=None).train()
    step = training_step(plan, module, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        step()
    assert plan.rows * Work(plan).row == pytest.approx(counter.get_total_flops(), rel=0.15)


@pytest.mark.parametrize("recipe", ["tiny-dflow-carryover", "tiny-domino-dflow", "tiny-eagle3"])
def test_measure_and_doctor_build_what_is_planned(recipe: str) -> None:
    """With every section of the recipe: a Domino drafter was built without its causal head."""
    plan = make_plan(parse(["--config", f"recipes/{recipe}.yaml"]))
    module = build_module(plan.recipe.model)
    built = {name: tuple(one.shape) for name, one in module.drafter.named_parameters()}
    assert built == {name: tuple(one.shape) for name, one in plan.drafter.named_parameters()}
    assert (module.relay is None) == (plan.relay is None)
    assert module.num_anchors == plan.recipe.model.num_anchors


def test_measure_prints_predicted_beside_measured(small: tuple[Plan, FrozenTarget]) -> None:
    lines = measured_lines(small[0])
    assert lines[0].split()[-2:] == ["predicted", "measured"]
    assert [line.split(",")[0].strip() for line in lines[1:3]] == [
        "target and drafter weights", "peak of a step",
    ]  # fmt: skip
    for line in lines[3:]:
        predicted, found = map(float, line.split()[-2:])
        assert predicted >= 0
        assert found >= 0


def test_mistakes(launch: "Launcher", configs: dict[str, Path], tmp_path: Path) -> None:
    recipe = ("plan", "--config", RECIPES / "qwen3-8b-dflow.yaml")
    here = ("--target_config", configs["8b"])
    for options, sentence in {
        ("--target_config", tmp_path): f"error: target_config: {tmp_path} holds no config.json",
        ("--model.target.path", "gone"): "error: target: gone does not exist; give a folder",
        (*here, "--gpus", 0): "error: gpus is 0; give 1 or more",
        (*here, "--gpu_memory", 0): "error: gpu_memory is 0; give the GiB of one GPU",
        (*here, "--gpu_tflops", -1): "error: gpu_tflops is -1; give the TFLOP/s of one GPU",
        (*here, "--rows", 0): "error: rows is 0; give the number of rows of data.train",
        (*here, "--trainer.precision", "64-true"): "error: trainer.precision 64-true has no plan",
        (*here, "--model.anchors", 3): "error: unknown key 'model.anchors'",
    }.items():
        done = launch(*recipe, *options)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith(sentence), done.err
        assert len(done.err.splitlines()) == 1


def test_what_was_measured_of_a_set_is_shown(tmp_path: Path, tiny_target_dir: Path) -> None:
    folders = [tmp_path / name for name in ("measured", "not")]
    for folder in folders:
        folder.mkdir()
        writer = PreparedWriter(folder)
        writer.write(PreparedRow("a", "math", [1, 2, 3], [False, True, True], True, 0))
        finish(folder, {}, writer.close())
    report = {"rows": 9, "tokens": 4567, "agreement": 0.987, "target": "t"}
    text = json.dumps(report | {"mean_logprob": -0.5, "mean_entropy": 0.25})
    (folders[0] / "on_policy.json").write_text(text)
    sets = json.dumps([*map(str, folders)])
    plan = planned(
        f"--model.target.path={tiny_target_dir}", f"--data.train={sets}",
        "--model.drafter.num_layers=1",
    )  # fmt: skip
    assert answers(plan) == [
        f"answers  of {folders[0]}:",
        "           98.7% of 4,567 supervised tokens (9 rows) are the target's first choice",
        "           mean log-prob -0.500, minus entropy -0.250",
    ]
    (folders[0] / "on_policy.json").write_text(text[:-9])
    with pytest.raises(InputError, match=r"on_policy\.json is damaged .*; verify the data again"):
        answers(plan)
