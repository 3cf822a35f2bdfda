"""What the image promises, read from the Dockerfile; `make docker-check` builds it."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from targets import ROOT


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "docker_check", raising=False)
    return import_module("docker_check")


def test_the_promises_are_kept(check: Any) -> None:
    assert check.rules() == "9 promises kept"
    assert "every source is in git" in check.context()


def test_instructions_are_read_whole(check: Any) -> None:
    found = check.instructions()
    (install,) = (text for name, text in found if name == "RUN" and "pip install" in text)
    assert install.startswith("--mount=type=cache")
    assert install.endswith('".${EXTRAS:+[${EXTRAS}]}"')
    assert not any(text.startswith("#") for _, text in found)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("USER 10001:10001", "USER root"), "runs as root"),
        (lambda text: text.replace("3.11-slim-bookworm", "latest"), "names no version"),
        (lambda text: text.replace("HEALTHCHECK", "# "), "no health check"),
        (lambda text: text.replace("-c constraints/cpu.txt", ""), "without constraints"),
        (lambda text: text.replace("--mount=type=cache,target=/root/.cache/pip", ""), "in a layer"),
        (lambda text: text.replace("VERSION=0", "VERSION=9"), "VERSION 9"),
        (lambda text: text.replace("ARG EXTRAS=", "ARG EXTRAS=gone"), "EXTRAS ['gone']"),
    ],
)
def test_a_broken_promise_is_named(
    check: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: Callable[[str], str],
    says: str,
) -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert change(text) != text
    broken = tmp_path / "Dockerfile"
    broken.write_text(change(text))
    monkeypatch.setattr(check, "DOCKERFILE", broken)
    with pytest.raises(check.StepError) as raised:
        check.rules()
    assert says in str(raised.value)


def test_a_source_that_the_context_hides_is_named(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "Dockerfile"
    broken.write_text((ROOT / "Dockerfile").read_text().replace("COPY src src", "COPY tests src"))
    monkeypatch.setattr(check, "DOCKERFILE", broken)
    with pytest.raises(check.StepError, match="hides tests"):
        check.context()
