"""The documentation: its commands run, its references are what the code says, its links lead on."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from docs_blocks import (
    LANGUAGES,
    NEEDS,
    PAGES,
    ROOT,
    Block,
    blocks,
    commands,
    our_arguments,
    sentences,
)
from docs_parse import parse_problem

from dflow_lightning import __main__ as entry

if TYPE_CHECKING:
    from launch import Launcher

pytest_plugins = ["launch"]
ALL = [block for page in PAGES for block in blocks(page)]
RUN_PAGES = [page for page in PAGES if any(block.runs for block in blocks(page))]
# What makes a command of the documentation small enough for a test. `make docs-commands` runs all
# of them as they stand.
SMALL = {
    "fit": "--trainer.max_steps 2 --trainer.val_check_interval 2 --trainer.num_sanity_val_steps 0 "
    "--validation.prompts_per_family 1 --validation.max_new_tokens 8 --data.limit_validation 2 "
    "--tracking.enabled false",
    "validate": "--validation.prompts_per_family 1 --validation.max_new_tokens 8 "
    "--data.limit_validation 2 --tracking.enabled false",
    "test": "--validation.prompts_per_family 1 --validation.max_new_tokens 8 --data.limit_test 2 "
    "--tracking.enabled false",
    "prepare": "--limit 4 --max_new_tokens 40",
    "bench": "--per_family 1 --max_new_tokens 8",
    "decode": "--max_new_tokens 16",
}


def script(name: str) -> object:
    """A module of scripts/."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.insert(0, str(ROOT / "scripts"))
    return import_module(name)


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.where)
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.language in LANGUAGES, f"{block.where}: write ```bash, ```text, ..."
    assert block.needs <= NEEDS, f"{block.where}: needs one of {sorted(NEEDS)}"
    assert not (block.runs and block.language not in ("bash", "python")), block.where


@pytest.fixture
def parse(launch: "Launcher", monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str | None]:
    """What is wrong with a command of a page; a reader stands in the repository."""
    monkeypatch.chdir(ROOT)

    def call(*arguments: str) -> tuple[int, str, str]:
        done = launch(*arguments)
        return done.status, done.out, done.err

    return lambda command: parse_problem(command, call)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_run_or_parsed_or_marked(
    page: Path, parse: Callable[[str], str | None]
) -> None:
    """The arguments of `dflow-train` and the targets of `make` are parsed under every mark."""
    problems = []
    for block in blocks(page):
        if block.language == "python" and not block.needs:
            compile(block.text, block.where, "exec")
        for command in commands(block.text) if block.language == "bash" else []:
            marked = block.runs or block.needs
            if marked and our_arguments(command) is None and not command.startswith("make "):
                continue
            if (problem := parse(command)) is not None:
                problems.append(f"{block.where}: {command.splitlines()[0]}: {problem}")
    assert not problems, "\n".join(problems)


def test_commands_in_sentences_have_their_options(parse: Callable[[str], str | None]) -> None:
    """They may leave out what is needed (`dflow-train decode --relay off`)."""
    spoken_of = {command for page in PAGES for command in sentences(page)}
    problems = {command: parse(command) or "" for command in sorted(spoken_of)}
    assert len(problems) > 15
    assert not [f"{c}: {p}" for c, p in problems.items() if p and " is missing: " not in p]


def test_a_command_that_nobody_looks_at_is_a_problem(parse: Callable[[str], str | None]) -> None:
    assert parse("curl example.org") is not None
    assert parse("python -c 1") is not None
    assert parse("OMP_NUM_THREADS=1 python scripts/gone.py") == "scripts/gone.py does not exist"
    assert parse("make nonsense") == "make has no nonsense"
    assert parse("dflow-train nonsense") == "no command nonsense"
    assert parse("dflow-train doctor --nonsense") == "doctor has no --nonsense"
    assert "unknown key 'nonsense'" in str(parse("dflow-train ui --nonsense 1"))
    assert "gone.yaml" in str(parse("dflow-train fit --config gone.yaml"))
    assert parse("torchrun --no-python dflow-train ui --run nowhere") is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader who has trained and exported recipes/tiny-dflow.yaml."""
    folder = tmp_path_factory.mktemp("trained")
    prepare_folder(folder)
    here = Path.cwd()
    os.chdir(folder)
    try:
        run_block(
            "dflow-train fit --config recipes/tiny-dflow.yaml\n"
            "dflow-train export --checkpoint runs/tiny-dflow/checkpoints/best.ckpt "
            "--out runs/tiny-dflow/export"
        )
    finally:
        os.chdir(here)
    return folder


def prepare_folder(folder: Path) -> None:
    """What a reader has in the repository's root."""
    for name in ("data", "recipes"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)


def run_block(text: str) -> None:
    """Runs a shell script: our command in this process and small, everything else in bash."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands(text):
        arguments = our_arguments(command)
        if arguments is None:
            subprocess.run(["bash", "-ec", command], check=True, env=os.environ | {"PATH": path})
        else:
            small = shlex.split(SMALL.get(arguments[0], ""))
            assert entry.main([*arguments, *small]) == 0, command


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(
    page: Path, launch: "Launcher", trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_folder(launch.folder)
    own = [block for block in blocks(page) if block.runs]
    if not any("fit --config recipes/tiny-dflow.yaml" in block.text for block in own):
        monkeypatch.chdir(trained)  # in place: a run that was moved makes Lightning warn
    for block in own:
        if block.language == "python":
            exec(compile(block.text, block.where, "exec"), {"__name__": "__main__"})
        else:
            run_block(block.text)


# ---------------------------------------------------------------- generated pages and figures


def test_reference_pages_are_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    reference = script("reference")
    for path, text in {
        reference.CONFIG: reference.config_page(),
        reference.COMMANDS: reference.commands_page(),
    }.items():
        assert (ROOT / path).read_text() == text, f"{path} is out of date: run make reference"


def keys(settings: dict, prefix: str = "") -> set[str]:
    """The dotted names of all values of a recipe."""
    found = set()
    for key, value in settings.items():
        name = f"{prefix}{key}"
        found |= keys(value, f"{name}.") if isinstance(value, dict) else {name}
    return found


def test_reference_has_every_key_of_a_recipe(launch: "Launcher") -> None:
    reference = script("reference")
    page = (ROOT / "docs/reference-config.md").read_text()
    told, printed = set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)), set()
    for method in reference.MODULES:
        chosen = ["--method", method] if len(reference.MODULES) > 1 else []
        needed = ["--model.target.path", "t", "--data.train", "d"]
        recipe = yaml.safe_load(launch("fit", *chosen, *needed, "--print_config").out)
        sections = {"model", "data", *reference.SECTIONS} & set(recipe)
        printed |= keys({section: recipe[section] for section in sections})
    assert told == printed
    assert not re.findall(r"^\| `[\w.]+` \|[^\n]*\| +\|$", page, re.MULTILINE), "a key without text"


def test_reference_has_every_option_of_a_tool(launch: "Launcher") -> None:
    page = (ROOT / "docs/reference-commands.md").read_text()
    for tool in entry.TOOLS:
        part = page.partition(f"\n## dflow-train {tool}\n")[2].partition("\n## ")[0]
        told = set(re.findall(r"^\| `--(\w+)`", part, re.MULTILINE))
        helped = set(re.findall(r"^ {2}--(\w+)", launch(tool, "--help").out, re.MULTILINE))
        assert told == helped - {"config", "print_config"}


def test_figures_are_what_the_script_draws(tmp_path: Path) -> None:
    import matplotlib as mpl

    figures = script("figures")
    made = figures.draw(tmp_path)
    assert {path.name for path in made} == {p.name for p in (ROOT / "docs/figures").iterdir()}
    page = (ROOT / "docs/relay.md").read_text()
    pinned = re.findall(
        r"^matplotlib==(\S+?)(?:;|$)", (ROOT / "constraints/cpu.txt").read_text(), re.M
    )
    for path in made:
        assert f"(figures/{path.name})" in page
        if mpl.__version__ == pinned[0]:  # others place glyphs otherwise
            assert path.read_bytes() == (ROOT / "docs/figures" / path.name).read_bytes(), path.name


def test_f25_the_server_of_the_data_guide_has_the_form_that_every_build_runs() -> None:
    """F25: the `vllm` command of the CPU build does not find its own package."""
    guide = (ROOT / "docs/data.md").read_text()
    short = re.search(r"^vllm serve (\S+) (.*)$", guide, re.MULTILINE)
    assert short
    module = f"python -m vllm.entrypoints.openai.api_server --model {short[1]} {short[2]}"
    assert f"`{module}`" in guide


@pytest.mark.slow
def test_counts_of_serve_vllm_are_those_of_the_shipped_drafters() -> None:
    """F21: the last column of the page's second table, rounds and accepted drafts of 24 prompts."""
    from dflow_lightning.data.prompts import read_prompts
    from dflow_lightning.decode import SpeculativeDecoder
    from dflow_lightning.models.target import FrozenTarget
    from dflow_lightning.serving.check import Counts, own_counts

    page = (ROOT / "docs/serve-vllm.md").read_text().partition("| our engine |")[2]
    row = r"^\| (DF\w+(?:, relay \w+)?) \| [\d, ]+ \| [\d.]+ \| (\d+), ([\d,]+) \|$"
    written = {
        name: Counts(int(rounds), int(accepted.replace(",", "")))
        for name, rounds, accepted in re.findall(row, page, re.MULTILINE)
    }
    assert list(written) == ["DFlash", "DFlow, relay off", "DFlow, relay on"]
    target = FrozenTarget.load(str(ROOT / "data/tiny-qwen3"), dtype="float32")
    file = ROOT / "data/tiny-qwen3/prompts/test.jsonl"
    prompts = read_prompts(target.tokenizer, file, per_family=8, field="suite")
    ids, plain = [prompt.token_ids for prompt in prompts], None
    for name, expected in written.items():
        folder = ROOT / "data/tiny-drafters" / name.partition(",")[0].lower()
        decoder = SpeculativeDecoder.from_export(folder, target)
        if plain is None:
            answers = decoder.generate_plain(ids, max_new_tokens=128, batch_size=8)
            plain = [answer.token_ids for answer in answers]
        assert own_counts(decoder, ids, plain, relay=name.endswith("relay on")) == expected, name


# ---------------------------------------------------------------- links and quotations


def build_site(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """The site of a folder; not `--quiet`, under which MkDocs counts no warnings."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(out)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build_site(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert (tmp_path / "relay.html").is_file()


def test_dead_links_and_pages_without_a_way_to_them_end_the_build(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(ROOT / "docs", root / "docs")
    shutil.copy(ROOT / "mkdocs.yml", root)
    with (root / "docs/index.md").open("a") as page:
        page.write("[a](gone.md) [b](data.md#gone)\n")
    (root / "docs/orphan.md").write_text("# Orphan\n")
    done = build_site(root, tmp_path / "site")
    assert done.returncode == 1
    for fault in ("orphan.md", "'gone.md'", "'#gone'", "3 warnings"):
        assert fault in done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file(page: Path) -> None:
    """Also on the forge, where README and recipes link into docs; others only need a scheme."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            assert re.fullmatch(r"https://[\w.-]+\.\w+(/\S*)?", target), target
        elif path := target.partition("#")[0]:
            assert (page.parent / path).exists(), f"{page}: {target}"


def test_the_files_of_the_four_flows_exist() -> None:
    flows = (ROOT / "docs/design.md").read_text().partition("### Four flows")[2]
    rows = re.findall(r"^\| (`[^|]+) \|", flows.partition("\n## ")[0], re.MULTILINE)
    files = [name for row in rows for name in re.findall(r"`([\w/]+)`", row)]
    assert len(files) > 30
    assert not [name for name in files if not (ROOT / f"src/dflow_lightning/{name}.py").exists()]


@lru_cache
def spoken(folder: Path) -> list[str]:
    """Every text in the source, with a NUL where a value is put in."""
    texts = []
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def quoted_messages() -> list[str]:
    """The first cells of the tables of messages in docs/troubleshooting.md."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_in_the_source(message: str) -> None:
    """`...` stands for a value or for what comes before and after."""
    pieces = [piece for piece in re.split(r" *\.\.\. *", message) if piece]
    pattern = re.compile(r".*".join(map(re.escape, pieces)), re.DOTALL)
    assert any(pattern.search(text) for text in spoken(ROOT / "src")), message


def test_messages_are_quoted() -> None:
    assert len(quoted_messages()) > 25
