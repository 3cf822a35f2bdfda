"""What vLLM with our plug-in says to each damaged folder, in this process: for `make serving`.

Makes the engine's configuration, which is where the plug-in looks, and reports the last sentence of
a refusal. The cases that are served come with the engine itself and the warnings of its log.
"""

import json
from pathlib import Path

import offline

CHANGES = {
    "release": "a release that is not in the table",
    "signature": "a method with another signature",
}


def change(what: str) -> None:
    """Make the installed vLLM look like another one."""
    import inspect

    import vllm

    if what == "release":
        vllm.__version__ = "0.99.0"
    else:
        from vllm.v1.spec_decode.dflash import DFlashProposer

        method = DFlashProposer.set_inputs_first_pass
        signature = inspect.signature(method)
        kept = [p for n, p in signature.parameters.items() if n != "num_rejected_tokens_gpu"]
        method.__signature__ = signature.replace(parameters=kept)


def main() -> None:
    options = offline.parser()
    options.add_argument("--folders", type=Path, required=True, help="JSON: cases to be refused")
    options.add_argument("--change", choices=list(CHANGES))
    args = options.parse_args()
    if args.change:
        change(args.change)
    from vllm import LLM, EngineArgs, SamplingParams

    result: dict = {"refused": {}}
    for name, settings in json.loads(args.folders.read_text()).items():
        try:
            EngineArgs(**offline.settings(args) | settings).create_engine_config()
            result["refused"][name] = None
        except Exception as error:
            result["refused"][name] = f"{type(error).__name__}: {error}"
    if args.drafter:
        prompts = json.loads(args.prompts.read_text())
        engine = LLM(**offline.settings(args))
        outputs = engine.generate(
            [{"prompt_token_ids": one} for one in prompts],
            SamplingParams(temperature=0.0, max_tokens=32),
            use_tqdm=False,
        )
        result["answers"] = [list(one.outputs[0].token_ids) for one in outputs]
        result |= offline.counts(engine)
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
