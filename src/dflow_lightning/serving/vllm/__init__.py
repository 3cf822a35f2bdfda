"""Out-of-tree plug-in for vLLM: the relay of DFlow drafters, in the engine.

vLLM finds it by its entry point (`vllm.general_plugins`) and calls `register` in every process.
Serving stays `--speculative-config '{"method": "dflash", "model": "<export>", ...}'`: a folder with
`relay/` gets the relay, any other DFlash folder is served by vLLM's own code. Needs torch,
safetensors and vLLM; install this package beside vLLM with `pip install --no-deps`.

    --additional-config '{"dflow_relay": false}'    serve without relays
    VLLM_PLUGINS=                                    do not load the plug-in at all
    DFLOW_VLLM_UNTESTED=1                            try a vLLM that is not in the table
"""

ARCHITECTURE = "DFlashDraftModel"


def register() -> None:
    """Take the place of vLLM's DFlash drafter; may be called more than once."""
    from vllm import ModelRegistry, __version__
    from vllm.logger import init_logger

    from dflow_lightning.serving.vllm import cpu_fixes, preflight
    from dflow_lightning.serving.vllm.versions import unsupported

    if problem := unsupported(__version__):
        init_logger("vllm.dflow_lightning").warning(problem)
        return
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.drafter:DFlashDrafter")
    preflight.install_preflight()
    cpu_fixes.fix_sampling()
