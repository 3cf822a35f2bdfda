"""vLLM's DFlash drafter with the relay's correction added to its slot inputs.

Stands in for `DFlashDraftModel`. Without a relay the forward is vLLM's own; on the CPU the context
keys are normed layer by layer (`cpu_fixes`).

Shapes: Q slots of all requests in a batch, R requests, K slots of a block, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import __version__
from vllm.logger import init_logger
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

from dflow_lightning.serving.vllm import cpu_fixes, hooks
from dflow_lightning.serving.vllm.correction import VerifiedBatch, correction
from dflow_lightning.serving.vllm.preflight import find_relay

logger = init_logger("vllm.dflow_lightning")


class RelayDFlashModel(DFlashQwen3Model):
    """The drafter's layers; the buffer `correction_QD` exists where there is a relay."""

    corrected = False
    correction_QD: Tensor

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings of anchors and masks, corrected; part of compiled code and CUDA graphs."""
        embeds_QD = super().embed_input_ids(input_ids)
        if not self.corrected:
            return embeds_QD
        return embeds_QD + self.correction_QD[: embeds_QD.shape[0]]

    def _normalize_context_k(self, all_k: Tensor) -> Tensor:
        if cpu_fixes.wanted():
            return cpu_fixes.norm_by_layer(all_k, self._k_norm_weights, self._rms_norm_eps)
        return super()._normalize_context_k(all_k)


class RelayDFlashForCausalLM(DFlashQwen3ForCausalLM):
    """The drafter; its relay comes from the sub-folder `relay/` of its weights, if there is one."""

    model_cls = RelayDFlashModel

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Not a child module: the loader's account of weights stays vLLM's own.
        object.__setattr__(self, "relay", None)
        found = find_relay(vllm_config)
        if found is None:
            return
        runner = "V2" if vllm_config.use_v2_model_runner else "V1"
        if problem := hooks.install_hooks(runner):
            logger.warning(
                "DFlow relay: off, since the %s model runner of vLLM %s is not as it was: %s",
                runner,
                __version__,
                problem,
            )
            return
        block = 1 + vllm_config.speculative_config.num_speculative_tokens
        most = max(
            vllm_config.scheduler_config.max_num_seqs * block,
            vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        weight = self.model.norm.weight
        object.__setattr__(self, "relay", found.relay.to(weight.device, weight.dtype))
        # Allocated once: what a CUDA graph captures is the buffer's address.
        self.model.register_buffer(
            "correction_QD", weight.new_zeros(most, weight.shape[0]), persistent=False
        )
        self.model.corrected = True
        logger.info("DFlow relay: on, for up to %d slots in a batch", most)

    @torch.inference_mode()
    def prepare_correction(
        self, verified: VerifiedBatch | None, num_requests: int, block: int
    ) -> None:
        """Write the corrections of the coming draft pass.

        Args:
            verified: None where no request had drafts to verify, so that nothing was rejected.
            num_requests: requests in the batch, R.
            block: slots of each request in this pass, K.
        """
        if self.relay is None:
            return
        buffer_QD = self.model.correction_QD[: num_requests * block]
        if verified is None:
            buffer_QD.zero_()
            return
        correction_RKD = correction(
            self.relay,
            verified,
            block,
            norm=self.model.hidden_norm,
            embed=self.model.embed_tokens,
        )
        buffer_QD.copy_(correction_RKD.flatten(0, 1))
