"""`dflow-train ui`: the MLflow dashboard of one run folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import yaml

from dflow_lightning.errors import InputError
from dflow_lightning.tracking.delivery import deliver
from dflow_lightning.tracking.journal import journals, read_state
from dflow_lightning.tracking.logger import URI_VARIABLE

STORE_FILE, RECIPE_FILE = "mlflow.db", "config.yaml"
GRACE = 10.0  # seconds that the server has to end


def ui_command(run: Path, port: int = 5000) -> None:
    """Opens the dashboard of a run; Ctrl-C ends it.

    Args:
        run: The run folder, for example `runs/tiny-dflow`.
        port: Where to serve it on this machine.
    """
    store = run / STORE_FILE
    for path in journals(run):
        print(deliver(path)[0], flush=True)
    if not store.is_file():
        raise InputError(f"run: {run} has no mlflow.db; {elsewhere(run)}")
    print(f"dashboard http://127.0.0.1:{port}  (Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "mlflow", "ui", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{store.resolve()}"]
    command += ["--artifacts-destination", str((run / "artifacts").resolve())]
    command += ["--workers", "1"]
    status = serve(command)
    if status:
        raise InputError(
            f"port: mlflow ui ended with status {status}; is port {port} taken? "
            "choose another with --port"
        )


def elsewhere(run: Path) -> str:
    """What to do about a folder without a store: its record may be in another one."""
    if not (run / RECIPE_FILE).is_file():
        return "name a folder that `dflow-train fit` wrote"
    recipe = yaml.safe_load((run / RECIPE_FILE).read_text(encoding="utf-8"))
    tracking = recipe.get("tracking") or {}
    if not tracking.get("enabled", True):
        return "the run was not recorded, since tracking.enabled was false"
    waiting = [state[0].uri for path in journals(run) if (state := read_state(path))]
    uri = next(iter(waiting), tracking.get("uri") or os.environ.get(URI_VARIABLE))
    if uri is None:
        return f"its record went to the server that {URI_VARIABLE} named; open that in a browser"
    file = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and file.name == STORE_FILE:
        return f"its record is in {file}; give --run {file.parent}"
    return f"its record is at {uri}; open that in a browser"


def serve(command: list[str]) -> int:
    """Run a server until it ends, or until this process is told to end; returns its status.

    It is in a process group of its own: a terminal sends Ctrl-C to all of a group, and each of the
    server's processes would print a traceback.
    """

    def end(signum: int, _: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = {one: signal.signal(one, end) for one in (signal.SIGTERM, signal.SIGHUP)}
    server = subprocess.Popen(command, start_new_session=True)
    try:
        return server.wait()
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
        for one, handler in before.items():
            signal.signal(one, handler)
