"""The class that vLLM loads for `DFlashDraftModel`: ours, or vLLM's own where ours does not fit.

Imported when an engine meets a DFlash drafter, not before.
"""

from vllm.logger import init_logger
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

from dflow_lightning.serving.vllm.versions import MODEL_HOOKS, differences

DFlashDrafter: type[DFlashQwen3ForCausalLM]

if problem := next(differences(MODEL_HOOKS), None):
    from vllm import __version__

    init_logger("vllm.dflow_lightning").warning(
        "DFlow relay: off, since vLLM %s is not as it was: %s", __version__, problem
    )
    DFlashDrafter = DFlashQwen3ForCausalLM
else:
    from dflow_lightning.serving.vllm.model import RelayDFlashForCausalLM

    DFlashDrafter = RelayDFlashForCausalLM
