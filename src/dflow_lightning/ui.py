"""`dflow-train ui`: the MLflow dashboard of one run folder."""

import subprocess
import sys
from pathlib import Path

from dflow_lightning.errors import InputError
from dflow_lightning.tracking_delivery import deliver
from dflow_lightning.tracking_journal import journals


def ui_command(run: Path, port: int = 5000) -> None:
    """Opens the dashboard of a run; Ctrl-C ends it.

    Args:
        run: The run folder, for example `runs/tiny-dflow`.
        port: Where to serve it on this machine.
    """
    store = run / "mlflow.db"
    for path in journals(run):
        print(deliver(path)[0], flush=True)
    if not store.is_file():
        raise InputError(
            f"run: {run} has no mlflow.db; name a folder that `dflow-train fit` wrote "
            "(with MLFLOW_TRACKING_URI set, the runs are on that server instead)"
        )
    print(f"dashboard http://127.0.0.1:{port}  (Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "mlflow", "ui", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{store.resolve()}"]
    command += ["--artifacts-destination", str((run / "artifacts").resolve())]
    command += ["--workers", "1"]
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise InputError(
            f"port: mlflow ui ended with status {error.returncode}; is port {port} taken? "
            "choose another with --port"
        ) from error
