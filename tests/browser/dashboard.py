"""A real browser looks at the dashboard of a short run (`make browser`).

It needs playwright (the extra `browser`) and a Chromium: the variable CHROMIUM, or `chromium` on
the path. DASHBOARD_RUN names a finished run folder with an export to look at instead of making one.
Screenshots go to runs/browser/.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from processes import free_port

pytest.importorskip("playwright", reason="pip install '.[browser]'")
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "runs/browser"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
STEPS, EVERY, VALIDATE = 40, 5, 20
MODEL = "dflow-tiny-qwen3"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: set CHROMIUM or install chromium"),
    # Pages of MLflow are not ours to mend; a warning of a driver is no failure.
    pytest.mark.filterwarnings("default"),
]


def dflow(*args: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dflow_lightning", *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the demo recipe, and its export."""
    if (given := os.environ.get("DASHBOARD_RUN")) is not None:
        return Path(given)
    folder = tmp_path_factory.mktemp("dashboard") / "demo"
    short = {
        "run_dir": folder,
        "trainer.max_steps": STEPS,
        "trainer.log_every_n_steps": EVERY,
        "trainer.val_check_interval": VALIDATE,
        "validation.prompts_per_family": 1,
        "validation.max_new_tokens": 48,
        "data.limit_validation": 2,
    }
    options = [f"--{name}={value}" for name, value in short.items()]
    dflow("fit", "--config", "recipes/tiny-dflow.yaml", *options)
    dflow("export", "--checkpoint", folder / "checkpoints/best.ckpt", "--out", folder / "export")
    return folder


@pytest.fixture(scope="module")
def dashboard(run_dir: Path) -> Iterator[str]:
    """The address of `dflow-train ui`."""
    port = free_port()
    command = [sys.executable, "-m", "dflow_lightning", "ui", "--run", str(run_dir)]
    process = subprocess.Popen([*command, "--port", str(port)], start_new_session=True, cwd=ROOT)
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + 240
    try:
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{address}/health", timeout=5),
            ):
                break
            assert process.poll() is None, "dflow-train ui ended"
            assert time.monotonic() < until, "the dashboard does not answer"
            time.sleep(0.3)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of a headless Chromium, as large as a laptop's."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(90_000)
        yield page
        browser.close()


@pytest.fixture(scope="module")
def run(run_dir: Path) -> Any:
    """The run as the store has it."""
    client = MlflowClient(f"sqlite:///{run_dir.resolve()}/mlflow.db")
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(ids)
    return run


@pytest.fixture(scope="module")
def address(dashboard: str, run: Any) -> str:
    """Of the run's page."""
    return f"{dashboard}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"


def shot(page: Page, name: str) -> None:
    page.wait_for_timeout(1500)  # charts fade in
    page.screenshot(path=str(SHOTS / f"{name}.png"))


def test_overview(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_text("model.drafter.block_size").first.wait_for()
    shot(page, "overview")
    text = page.inner_text("body")
    for part in ("Finished", "val/tau", "train.jsonl", MODEL):
        assert part in text, part
    assert "target.fingerprint" in text


CHARTS = {
    "train/loss": STEPS // EVERY,
    "train/relay_rows_round2": STEPS // EVERY,
    "system/tokens_per_second": STEPS // EVERY,
    "val/tau_relay_off": STEPS // VALIDATE,
    "val/position_acceptance/1": STEPS // VALIDATE,
}


def test_charts_have_all_points(page: Page, address: str) -> None:
    """The page draws charts as they come into view, from histories that it asks for."""
    seen: dict[str, int] = {}

    def count(response: Any) -> None:
        if "get-history" in response.url:
            with contextlib.suppress(Exception):
                points = response.json()["metrics"]
                seen[points[0]["key"]] = len(points)

    page.on("response", count)
    page.goto(f"{address}/model-metrics")
    page.locator("svg.main-svg").first.wait_for()
    shot(page, "charts")
    for name, points in CHARTS.items():
        page.get_by_placeholder("Search metric charts").fill(name)
        page.get_by_text(f"({name})").first.wait_for()
        deadline = time.monotonic() + 60
        while name not in seen and time.monotonic() < deadline:
            page.wait_for_timeout(300)
        shot(page, f"chart-{name.replace('/', '-')}")
        assert seen.get(name) == points, name
    page.remove_listener("response", count)


def test_system_metrics(page: Page, address: str) -> None:
    page.goto(f"{address}/system-metrics")
    page.get_by_text("process_memory_gb").first.wait_for()
    shot(page, "system")


def open_artifact(page: Page, address: str, *path: str) -> None:
    page.goto(f"{address}/artifacts")
    for part in path:
        page.get_by_text(part, exact=True).first.click()


def test_recipe_opens(page: Page, address: str) -> None:
    open_artifact(page, address, "config.yaml")
    page.get_by_text("target_layer_ids").first.wait_for()
    shot(page, "recipe")


def test_answers_open(page: Page, address: str) -> None:
    open_artifact(page, address, "answers", f"step{STEPS:07}.html")
    frame = page.frame_locator("iframe").first
    frame.get_by_text(f"Answers at step {STEPS}").first.wait_for()
    assert frame.locator(".bonus").count() > 10
    shot(page, "answers")


def test_png_opens(page: Page, address: str) -> None:
    open_artifact(page, address, "charts", f"step{STEPS:07}", "acceptance.png")
    page.wait_for_function("() => [...document.images].some(i => i.naturalWidth > 600)")
    shot(page, "acceptance")


def test_model_version(page: Page, dashboard: str) -> None:
    page.goto(f"{dashboard}/#/models/{MODEL}")
    page.get_by_text(MODEL).first.wait_for()
    shot(page, "model")
    page.goto(f"{dashboard}/#/models/{MODEL}/versions/1")
    page.get_by_text("relay off").first.wait_for()
    shot(page, "model-version")
