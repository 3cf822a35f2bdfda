"""A vLLM server in its own environment, on loopback, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflow_lightning.errors import InputError
from dflow_lightning.prepare.from_server import NEUTRAL_SAMPLING

# Offline, silent about use; the last two are read on CPUs alone.
SERVER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}
COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a server is started with.

    Args:
        python: the interpreter of the engine's environment.
        target, drafter: folders; without a drafter the target decodes alone.
        num_draft_tokens: drafts a round, the block size less the anchor.
        relay: false sets the plug-in's switch.
        options: more arguments of vLLM's server.
        environment: more environment variables.
    """

    python: Path
    target: str
    drafter: Path | None = None
    num_draft_tokens: int = 0
    relay: bool = True
    dtype: str = "float32"
    max_model_len: int = 512
    max_num_seqs: int = 8
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def command(self, port: int) -> list[str]:
        """The command line, as a user would type it."""
        command = [
            str(self.python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            self.target,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--dtype",
            self.dtype,
            "--max-model-len",
            str(self.max_model_len),
            "--max-num-seqs",
            str(self.max_num_seqs),
            "--enforce-eager",
            *self.options,
        ]
        if self.drafter is not None:
            speculative = {
                "method": "dflash",
                "model": str(self.drafter),
                "num_speculative_tokens": self.num_draft_tokens,
            }
            command += ["--speculative-config", json.dumps(speculative)]
        if not self.relay:
            command += ["--additional-config", '{"dflow_relay": false}']
        return command


class VllmServer:
    """Starts on entry, answers requests, ends on exit with every process it started.

    Raises:
        InputError: the server ended before it was up; its own last sentence.
    """

    def __init__(self, settings: ServerSettings, *, patience: float = 300.0) -> None:
        """
        Args:
            patience: seconds to wait for the server to come up.
        """
        self.settings, self.patience = settings, patience
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="dflow-serve-")
        self.log_file = Path(self._folder.name) / "server.log"
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> VllmServer:
        self._end_on_sigterm()
        # Our source is not for the engine's environment, which has an installation of its own.
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment = inherited | SERVER_ENVIRONMENT | dict(self.settings.environment)
        with self.log_file.open("w") as log:
            self._process = subprocess.Popen(
                self.settings.command(self.port),
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _end_on_sigterm() -> None:
        """Turn SIGTERM into an exception, so that the server is stopped on the way out."""
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, _leave)

    @property
    def log(self) -> str:
        """What the server has logged so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def _wait(self) -> None:
        end = time.monotonic() + self.patience
        assert self._process is not None
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise InputError(f"the vLLM server ended: {last_error(self.log)}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.5)
        raise InputError(f"the vLLM server was not up after {self.patience:.0f} seconds")

    def close(self) -> None:
        """End the server and the processes it started."""
        process = self._process
        if process is not None:
            for one in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, one)  # its own session: nobody else's processes
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)
            self._process = None
        self._folder.cleanup()

    def post(self, path: str, content: dict[str, Any], timeout: float = 300.0) -> dict[str, Any]:
        """A JSON request and its JSON answer."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps(content).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def complete(self, prompt_ids: list[int], **sampling: Any) -> list[int]:
        """Token ids of the answer to one prompt, the stop token included.

        Args:
            sampling: what differs from the distribution of the target itself.
        """
        body = {
            "model": self.settings.target, "prompt": prompt_ids, "return_token_ids": True,
            "top_p": 1.0, **NEUTRAL_SAMPLING,
        }  # fmt: skip
        answer = self.post("/v1/completions", body | sampling)
        return list(answer["choices"][0]["token_ids"])

    def complete_all(
        self, prompts: Sequence[list[int]], *, concurrency: int, **sampling: Any
    ) -> list[list[int]]:
        """Answers in the order of the prompts, with so many requests in flight; seeds 0, 1, ..."""
        with ThreadPoolExecutor(concurrency) as pool:
            futures = [
                pool.submit(self.complete, prompt, seed=seed, **sampling)
                for seed, prompt in enumerate(prompts)
            ]
            return [one.result() for one in futures]

    def counters(self) -> dict[str, int]:
        """Rounds, accepted drafts and preemptions since the server is up."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = {}
        for name, key in COUNTERS.items():
            values = re.findall(rf"^{re.escape(key)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            found[name] = int(sum(map(float, values)))
        return found


def _leave(*_: object) -> None:
    """Exit once; a second signal must not end the clearing up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def last_error(log: str) -> str:
    """The cause in a log: our own InputError, else the last line that names an error."""
    ours = re.findall(r"InputError: (.+)", log)
    if ours:
        return ours[0].strip()
    named = re.findall(r"^(?:\(.*?\) )?(?:ERROR .*?\] )?(\w*(?:Error|Exception): .+)$", log, re.M)
    lines = [line for line in log.splitlines() if line.strip()]
    return named[0] if named else (lines[-1] if lines else "its log is empty")
