"""DeepSpeed's ZeRO for drafters, on GPUs and, with the same code, on CPU processes over gloo.

Three things differ from Lightning's own strategy. It runs on CPU processes. Accumulation is left to
Lightning, which steps at the end of an epoch as well. And a checkpoint is one file with whole
tensors, the same under every strategy and every number of processes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, StrategyRegistry
from torch import Tensor, nn

from dflow_lightning.errors import InputError
from dflow_lightning.training.precision import ComputePrecision

PRECISIONS = ("32-true", "bf16-mixed")
MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter, beside its step count


class ZeroPrecision(DeepSpeedPrecision):
    """Float32 weights, gradients and moments; bf16-mixed computes under autocast, as DDP does.

    DeepSpeed's own bf16 mode would train a bfloat16 copy of the weights and cast buffers with it.

    Args:
        strategy: asked for its device when a forward begins. Lightning hands over the plug-in
            before it hands over the devices, so the device is not known here yet.
    """

    def __init__(self, precision: Any, strategy: "ZeroStrategy") -> None:
        super().__init__(precision)
        self.strategy = strategy

    def convert_input(self, data: Any) -> Any:
        """Batches stay as they are."""
        return data

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Autocast where the run is mixed; rollouts and validation use it too."""
        device = self.strategy.root_device.type
        with ComputePrecision.named(self.precision).autocast(device, cache_enabled=False):
            yield


class ZeroStrategy(DeepSpeedStrategy):
    """ZeRO: optimizer state, gradients and weights of the drafter in shards, one per process.

    Args:
        stage: 1 shards the optimizer's state, 2 the gradients too, 3 the weights as well.
        offload: keep the optimizer's state in CPU memory and step there.
        bucket_elements: gradient elements per reduction bucket.
        timeout_minutes: how long a process waits for the others before it gives up.
    """

    strategy_name = "zero"

    def __init__(
        self,
        *,
        stage: Literal[1, 2, 3] = 2,
        offload: bool = False,
        bucket_elements: int = 50_000_000,
        timeout_minutes: int = 30,
    ) -> None:
        limits = {"bucket_elements": bucket_elements, "timeout_minutes": timeout_minutes}
        for name, value in limits.items():
            if value < 1:
                raise InputError(f"trainer.strategy.{name} is {value}; give 1 or more")
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed looks for one, loudly
        _require_deepspeed(stage)
        super().__init__(
            stage=stage,
            offload_optimizer=offload,
            overlap_comm=torch.cuda.is_available(),
            allgather_bucket_size=bucket_elements,
            reduce_bucket_size=bucket_elements,
            timeout=timedelta(minutes=timeout_minutes),
        )
        assert isinstance(self.config, dict)
        self.stage = stage
        # DeepSpeed's own CPU optimizer compiles at its first use.
        self.config["zero_force_ds_cpu_optimizer"] = False
        self._twins: dict[int, nn.Module] = {}  # whole copies by the id of what they copy
        self._twins_step = -1

    # ---------------------------------------------------------------- set-up

    @property
    def root_device(self) -> torch.device:
        """The process's device, with an index also on CPUs, where DeepSpeed wants 0."""
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's choice for DeepSpeed, replaced by ours."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, DeepSpeedPrecision) and not isinstance(plugin, ZeroPrecision):
            check_precision(self, plugin.precision)
            plugin = ZeroPrecision(plugin.precision, self)
        self._precision_plugin = plugin

    def setup_environment(self) -> None:
        """Starts the process group, on whatever device the trainer was given."""
        assert self.accelerator is not None
        if self.root_device.type == "cpu":
            import deepspeed.ops
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
            from deepspeed.accelerator.real_accelerator import set_accelerator

            set_accelerator(CPU_Accelerator())
            # It would compile collectives of its own, for minutes; gloo's are there.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Lightning's own set-up on GPUs; without its check of CUDA indices on CPUs."""
        if self.root_device.type == "cuda":
            return super().setup_distributed()
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def setup(self, trainer: Trainer) -> None:
        """Wraps the module; stage 3 keeps whole twins of what drafts without gradient."""
        assert self.lightning_module is not None
        if self.stage == 3 and trainer.state.fn == "fit":
            for child in self.lightning_module.children():
                self._twins[id(child)] = deepcopy(child).requires_grad_(False)
        super().setup(trainer)
        for twin in self._twins.values():
            twin.to(self.root_device)

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        """Validation and test alone run the module itself: nothing is sharded, so no engine."""
        self.model_to_device()

    def _format_config(self) -> None:
        """The engine's settings; autocast replaces DeepSpeed's bf16 mode."""
        self._format_batch_size_and_grad_accum_config()
        assert isinstance(self.config, dict)
        precision = ComputePrecision.named(self.precision_plugin.precision)
        if precision.mixed:
            self.config["torch_autocast"] = {
                "enabled": True,
                "dtype": str(precision.compute).removeprefix("torch."),
                "lower_precision_safe_modules": [],  # gradients travel in float32
            }

    # ---------------------------------------------------------------- steps

    @property
    def handles_gradient_accumulation(self) -> bool:
        """No: Lightning accumulates, and also steps when an epoch ends within a window."""
        return False

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Nothing to do: the engine is told where accumulation ends, see `training_step`."""
        yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One forward; the engine is told first whether the optimizer steps after it."""
        assert self.lightning_module is not None
        accumulates = self.lightning_module.trainer.fit_loop._should_accumulate()
        self.deepspeed_engine.set_gradient_accumulation_boundary(not accumulates)
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning has divided the loss by the accumulated batches, DeepSpeed must not again."""
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the coming step by `factor`, before they are clipped."""
        self.deepspeed_engine.optimizer.override_loss_scale(1.0 / factor)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """One step; a scale that was set for it ends with it.

        Raises:
            FloatingPointError: a gradient is not finite; DeepSpeed would leave the step out.
        """
        output = super().optimizer_step(*args, **kwargs)
        optimizer = self.deepspeed_engine.optimizer
        if optimizer.overflow:
            raise FloatingPointError("a gradient is not finite")
        optimizer.override_loss_scale(1.0)
        return output

    def whole(self, module: nn.Module) -> nn.Module:
        """A module that runs without collective calls: itself, or under stage 3 its current twin.

        Every process must ask at the same time: the first to ask after a step gathers all twins.
        """
        if id(module) not in self._twins:
            return module
        assert self.lightning_module is not None
        step = self.lightning_module.trainer.global_step
        if step != self._twins_step:
            self._twins_step = step
            for child in self.lightning_module.children():
                _gather(child, self._twins[id(child)])
        return self._twins[id(module)]

    # ---------------------------------------------------------------- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded before they are sharded, so that loading is the module's own."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning restores the optimizer, through `load_optimizer_state_dict`."""
        return True

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads the one file."""
        return DDPStrategy.load_checkpoint(self, *args, **kwargs)

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads whole weights into the module."""
        DDPStrategy.load_model_state_dict(self, *args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """The first process writes the one file."""
        DDPStrategy.save_checkpoint(self, *args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole float32 weights, on the first process; every process must call."""
        from deepspeed.utils import safe_get_full_fp32_param

        assert self.lightning_module is not None
        weights = (
            (name, safe_get_full_fp32_param(parameter))
            for name, parameter in self.lightning_module.named_parameters()
        )
        return {name: weight.cpu() for name, weight in weights if self.is_global_zero}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """AdamW's state as it is without ZeRO, on the first process; every process must call."""
        from deepspeed.utils import safe_get_full_optimizer_state

        inner = self._inner_optimizer()
        steps = {float(state["step"]) for state in inner.state.values() if "step" in state}
        parameters = self._trained()
        state: dict[int, dict[str, Tensor]] = {}
        for index, parameter in enumerate(parameters if steps else []):
            moments = {name: safe_get_full_optimizer_state(parameter, name) for name in MOMENTS}
            if self.is_global_zero:
                whole = {name: moment.cpu() for name, moment in moments.items()}
                state[index] = {"step": torch.tensor(max(steps)), **whole}
        group = {key: value for key, value in inner.param_groups[0].items() if key != "params"}
        return {"state": state, "param_groups": [group | {"params": [*range(len(parameters))]}]}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Puts every process's share of the saved moments where DeepSpeed keeps them."""
        from deepspeed.utils import safe_set_full_optimizer_state

        saved = checkpoint["optimizer_states"][0]
        inner = self._inner_optimizer()
        for key, value in saved["param_groups"][0].items():
            if key != "params":
                for group in inner.param_groups:
                    group[key] = value
        if not saved["state"]:
            return
        step = saved["state"][0]["step"]
        for shard in self._shards():
            inner.state[shard] = {name: torch.zeros_like(shard) for name in MOMENTS}
            inner.state[shard]["step"] = step.clone()
        if self.stage != 3:
            self.deepspeed_engine.optimizer._lazy_init_hp_params_optimizer_state()
        for index, parameter in enumerate(self._trained()):
            for name in MOMENTS:
                moment = saved["state"][index][name].to(self.root_device)
                safe_set_full_optimizer_state(parameter, moment, name)

    def _inner_optimizer(self) -> Any:
        """The torch optimizer inside DeepSpeed's, which steps on this process's shard."""
        return self.deepspeed_engine.optimizer.optimizer

    def _shards(self) -> list[Tensor]:
        """This process's flat parameters, as the inner optimizer knows them."""
        outer = self.deepspeed_engine.optimizer
        if self.stage == 3:
            return list(outer.fp32_partitioned_groups_flat)
        return list(outer.single_partition_of_fp32_groups)

    def _trained(self) -> list[nn.Parameter]:
        assert self.lightning_module is not None
        return [p for p in self.lightning_module.parameters() if p.requires_grad]


def _gather(module: nn.Module, twin: nn.Module) -> None:
    """Copy a sharded module's weights into its whole twin, one tensor at a time."""
    import deepspeed

    for sharded, whole in zip(module.parameters(), twin.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([sharded]):
            whole.data.copy_(sharded.data)


def _require_deepspeed(stage: int) -> None:
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"trainer.strategy is zero{stage}, which needs DeepSpeed; install "
            "dflow-lightning[deepspeed], or set trainer.strategy to ddp"
        ) from error


NAMES: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2_offload": {"stage": 2, "offload": True},
    "zero3_offload": {"stage": 3, "offload": True},
}
for _name, _settings in NAMES.items():
    StrategyRegistry.register(_name, ZeroStrategy, description="ZeRO", **_settings)


def check_name(strategy: Any) -> None:
    """Raise `InputError` for a `trainer.strategy` that is unknown or is not for drafters."""
    if isinstance(strategy, str) and strategy.startswith("deepspeed"):
        raise InputError(
            f"trainer.strategy is {strategy}, whose checkpoints nothing here reads; "
            f"choose of {', '.join(NAMES)}"
        )
    if isinstance(strategy, str) and strategy not in ["auto", *StrategyRegistry]:
        raise InputError(
            f"trainer.strategy is {strategy}, which is unknown; "
            f"choose of auto, ddp, {', '.join(NAMES)}"
        )


def check_precision(strategy: Any, precision: Any) -> None:
    """Raise `InputError` for a `trainer.precision` that does not train under a strategy.

    Lightning and DeepSpeed say no with a traceback, or not at all: float16 weights without a scaled
    loss end in NaN within a few steps.
    """
    zero = isinstance(strategy, ZeroStrategy) or (isinstance(strategy, str) and strategy in NAMES)
    if zero and precision is not None and str(precision) not in ("32", "bf16", *PRECISIONS):
        raise InputError(
            f"trainer.precision is {precision}, which ZeRO does not train in here; "
            f"choose of {', '.join(PRECISIONS)}, or set trainer.strategy to ddp"
        )
    if precision == "16-true":
        raise InputError(
            "trainer.precision is 16-true, and float16 weights overflow in training; choose "
            "bf16-mixed, or bf16-true to save memory"
        )
