"""Run folders of any name, databases of another MLflow, and the dashboard's view of a run."""

import ast
import json
import re
import shutil
import socket
import sqlite3
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from mlflow import MlflowClient
from processes import free_port

import dflow_lightning
from dflow_lightning.errors import InputError
from dflow_lightning.html import image
from dflow_lightning.tracking import store as tracking_store
from dflow_lightning.tracking.address import sqlite_file, sqlite_uri
from dflow_lightning.tracking.callback import Tracking
from dflow_lightning.tracking.store import open_client, training_experiment
from dflow_lightning.tracking.ui import check_port, check_store

ODD_NAMES = ("which?", "50%41", "100%", "a#b", "it's", 'say "hi"', "a b", "数学")


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its tables; making them takes seconds."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    open_client(sqlite_uri(path))
    return path


@pytest.mark.parametrize("name", ODD_NAMES)
def test_f12_an_address_leads_back_to_its_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name / "mlflow.db"
    assert sqlite_file(sqlite_uri(path)) == path
    assert sqlite_file("http://127.0.0.1:5000") is None


def test_f12_addresses_of_files_are_made_in_one_place() -> None:
    """F12: a path that is pasted into an address is cut or decoded; `as_uri` quotes it."""
    package = Path(dflow_lightning.__file__).parent
    pasted = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr | ast.BinOp)
        and re.search(r"['\"](sqlite|file):/", ast.unparse(node))
    ]
    assert pasted == []


@pytest.mark.parametrize("name", ODD_NAMES)
def test_f12_a_page_finds_the_pictures_beside_it(name: str) -> None:
    """F12: `report --out 'runs#2.html'` had no pictures."""
    (source,) = re.findall(r'<img src="([^"]*)"', image(f"{name}_files/tau.png", "tau"))
    address = urlsplit(unescape(source))
    assert (address.query, address.fragment) == ("", "")
    assert unquote(address.path) == f"{name}_files/tau.png"


@pytest.mark.parametrize("name", ["which?", "50%41", 'it\'s "so"'])
def test_f12_a_run_in_a_folder_of_any_name_is_recorded(
    name: str, tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / name
    run_dir.mkdir()
    shutil.copy(empty_store, run_dir)
    logger = Tracking().open(run_dir)
    logger.log_metrics({"train/loss": 1.5}, step=1)
    data = {"name": "d", "digest": "0", "source": f"{run_dir}/t.jsonl", "context": "train"}
    logger.record("datasets", sets=[data | {"profile": "{}"}])
    logger.artifact("note.txt", "kept")
    logger.finalize()
    client = open_client(sqlite_uri(run_dir / "mlflow.db"))
    experiment = client.get_experiment_by_name("dflow")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics == {"train/loss": 1.5}
    (dataset,) = run.inputs.dataset_inputs
    assert json.loads(dataset.dataset.source) == {"uri": f"{run_dir}/t.jsonl"}
    (note,) = (run_dir / "artifacts").rglob("note.txt")
    assert note.read_text() == "kept"
    assert not (run_dir / "tracking").exists()  # all has arrived
    assert [path.name for path in tmp_path.iterdir()] == [name]  # no stray database or folder


def test_f12_a_new_database_in_an_odd_folder_is_one_file(tmp_path: Path) -> None:
    file = tmp_path / "50%41?" / "mlflow.db"
    tracking_store.make_database(sqlite_uri(file))
    assert [path.name for path in file.parent.iterdir()] == ["mlflow.db"]
    assert [path.name for path in tmp_path.iterdir()] == ["50%41?"]


def test_f15_an_old_database_is_named_with_the_whole_command(
    tmp_path: Path, empty_store: Path
) -> None:
    run_dir = tmp_path / ("deep" * 30) / "it's"
    run_dir.mkdir(parents=True)
    file = shutil.copy(empty_store, run_dir)
    with sqlite3.connect(file) as database:
        database.execute("update alembic_version set version_num = 'bd07f7e963c5'")
    database.close()
    uri = sqlite_uri(run_dir / "mlflow.db")
    whole = "mlflow db upgrade '" + uri.replace("'", "'\"'\"'") + "'"
    logger = Tracking().open(run_dir)
    logger.record("tags", values={})
    sender = logger.sender
    assert sender is not None
    assert not sender.send_all()
    assert whole in sender.news[0]
    logger.finalize()
    with pytest.raises(InputError, match="made by another MLflow") as refused:
        check_store(uri)
    assert whole in str(refused.value)


def test_f15_a_taken_port_is_named_as_the_reason() -> None:
    port = free_port()
    check_port(port)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(InputError, match=f"port: {port} cannot be used .*in use"):
            check_port(port)


def test_f20_runs_open_as_model_training(tmp_path: Path, empty_store: Path) -> None:
    """Also in an experiment that something else made, which has no kind yet."""
    client = MlflowClient(sqlite_uri(Path(shutil.copy(empty_store, tmp_path))))
    client.create_experiment("theirs")
    for name in ("theirs", "ours"):
        number = training_experiment(client, name, None)
        tags = client.get_experiment(number).tags
        assert tags["mlflow.experimentKind"] == "custom_model_development"
    chosen = client.create_experiment("genai", tags={"mlflow.experimentKind": "genai_development"})
    training_experiment(client, "genai", None)  # what a user has chosen stays
    assert client.get_experiment(chosen).tags["mlflow.experimentKind"] == "genai_development"
