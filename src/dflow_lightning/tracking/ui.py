"""`dflow-train ui`: the MLflow dashboard of one run folder."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType

import yaml

from dflow_lightning.errors import InputError, RunError
from dflow_lightning.tracking.address import remove_stray_folder, sqlite_file, sqlite_uri
from dflow_lightning.tracking.journal import journals, read_state
from dflow_lightning.tracking.logger import URI_VARIABLE
from dflow_lightning.tracking.sender import deliver, reason
from dflow_lightning.tracking.store import open_client

STORE_FILE, RECIPE_FILE = "mlflow.db", "config.yaml"
GRACE = 10.0  # seconds that the server has to end


def ui_command(run: Path, port: int = 5000) -> None:
    """Open the dashboard of a run; Ctrl-C ends it.

    Args:
        run: The run folder, for example `runs/tiny-dflow`.
        port: Where to serve it on this machine.
    """
    store = run / STORE_FILE
    for path in journals(run):
        print(deliver(path)[0], flush=True)
    if not store.is_file():
        raise InputError(f"run: {run} has no mlflow.db; {elsewhere(run)}")
    uri = sqlite_uri(store)
    check_store(uri)
    check_port(port)
    print(f"dashboard http://127.0.0.1:{port}  (Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "mlflow", "ui", "--port", str(port)]
    command += ["--backend-store-uri", uri]
    command += ["--artifacts-destination", (run / "artifacts").resolve().as_uri()]
    command += ["--workers", "1"]
    try:
        status = serve(command)
    finally:
        remove_stray_folder(uri)
    if status:
        raise RunError(f"run: mlflow ui ended with status {status}; its message is above")


def check_store(uri: str) -> None:
    """Raise `InputError` with MLflow's reason where it cannot open a store.

    Opened here first, since the server would print a traceback for each of its processes.
    """
    try:
        open_client(uri).search_experiments(max_results=1)
    except Exception as error:  # whatever MLflow, SQLAlchemy or SQLite raises
        raise InputError(f"run: MLflow cannot open {uri}: {reason(error, uri)}") from error


def check_port(port: int) -> None:
    """Raise `InputError` where another program has the port."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise InputError(
                f"port: {port} cannot be used ({error}); choose another with --port"
            ) from error


def elsewhere(run: Path) -> str:
    """Where the record of a folder without a store is, as advice."""
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
    file = sqlite_file(uri)
    if file is not None and file.name == STORE_FILE:
        return f"its record is in {file}; give --run {file.parent}"
    return f"its record is at {uri}; open that in a browser"


def serve(command: list[str]) -> int:
    """Run a server until it ends or a signal ends this process; returns its status.

    It gets a process group of its own: a terminal sends Ctrl-C to a whole group, and each of the
    server's processes would print a traceback.
    """

    def end(signum: int, _: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP)}
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
        for each, handler in before.items():
            signal.signal(each, handler)
