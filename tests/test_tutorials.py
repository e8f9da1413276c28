"""docs/tutorials: every page is followed from top to bottom, and prints what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support import pages
from support.extras import imported, needs
from support.paths import ROOT
from support.scripts.launching import clean_environment
from support.wheel_contents import copy_sources

pytestmark = pytest.mark.slow  # it starts processes

TUTORIALS = ROOT / "docs" / "tutorials"
# What a page's commands print, and how large it has to be at least, each time that they print it.
FIGURES = {
    "ten_minutes": (r"AUC (0\.\d+)", 0.80),
    "newcomers_hour": (r"GAUC (0\.\d+)", 0.8),
    "criteo": (r"test AUC (0\.\d+)", 0.65),
    "word_vectors": (r"total +([\d.]+) %", 95),
    "streaming": (r"(?:07|08|09|10) \| auc (0\.\d+)", 0.6),
    "collective": (r"accuracy (\d\.\d+)", 0.5),
    "gpus": (r"accuracy (\d\.\d+)", 0.9),
    "serving": (r": \[(0\.\d+)", 0.7),
}
# Their commands have tests of their own.
LONG = {"criteo", "word_vectors", "gpus", "streaming", "newcomers_hour", "serving", "collective"}
NEEDED = {
    "newcomers_hour": ("uvicorn", "httptools"),
    "serving": ("uvicorn", "httptools", "onnx", "onnxscript", "onnxruntime", "pyarrow"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Empty, but for the examples of the repository."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def assert_figures(page: str, printed: str) -> None:
    pattern, least = FIGURES[page]
    found = [float(figure) for figure in re.findall(pattern, printed)]
    assert found, printed
    assert min(found) > least, found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.long if page in LONG else ()) for page in FIGURES]
)
def test_a_page_can_be_followed(page: str, folder: Path) -> None:
    needs(*NEEDED.get(page, ()))
    assert_figures(page, pages.follow(TUTORIALS / f"{page}.md", folder))


def test_the_index_lists_every_page_and_each_is_followed() -> None:
    listed = re.findall(r"^\| \[[^]]+\]\((\w+)\.md\) \|", (TUTORIALS / "README.md").read_text(), re.MULTILINE)
    written = {page.stem for page in TUTORIALS.glob("*.md")} - {"README"}
    assert set(listed) == written == {*FIGURES, "cluster"}


@pytest.mark.timeout(600)
def test_the_page_of_clusters_writes_what_they_take(folder: Path) -> None:
    kubernetes_validate = imported("kubernetes_validate")

    pages.follow(TUTORIALS / "cluster.md", folder)
    subprocess.run(["bash", "-n", folder / "job.sbatch"], check=True, timeout=200)
    manifests = [yaml.safe_load(file.read_text()) for file in sorted((folder / "clicks").glob("*.yaml"))]
    made = [manifest["spec"].get("completions") for manifest in manifests if manifest["kind"] == "Job"]
    assert [num for num in made if num] == [2, 4]  # the owner of the job's objects is one pod
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.31", strict=True)


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_page_of_clusters_runs_on_ray(folder: Path) -> None:
    needs("ray")
    printed = pages.follow(TUTORIALS / "cluster.md", folder, "cluster")
    assert "Ray" in printed


@pytest.mark.gpu
def test_the_page_of_gpus_computes_on_one(folder: Path) -> None:
    printed = pages.follow(TUTORIALS / "gpus.md", folder, "gpu")
    assert_figures("gpus", printed)
    assert printed.count("on cuda") == 2


@pytest.mark.install
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("page", "place"), [("ten_minutes", "clicks"), ("newcomers_hour", "hour")])
def test_a_first_page_can_be_followed_in_an_empty_environment(page: str, place: str, tmp_path: Path) -> None:
    """From `python3 -m venv` to the last line, in one shell. torch comes from where pip finds it."""
    source = tmp_path / "torchfleet"
    copy_sources(source)
    environment = clean_environment(HOME=str(tmp_path), PATH=f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin")
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    begin, state = time.monotonic(), [f"cd {shlex.quote(str(source))}"]

    def execute(line: str, folder: Path) -> str:
        """As the page's reader types it: what changes the shell holds for all lines that follow."""
        script = "\n".join([*state, line])
        done = subprocess.run(
            ["bash", "-ec", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=1500, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        if line.startswith((". ", "cd ")):
            state.append(line)
        print(f"{time.monotonic() - begin:6.1f} s  {line}")
        return str(done.stdout)

    printed = pages.follow(TUTORIALS / f"{page}.md", tmp_path / place, "install", execute=execute)
    assert_figures(page, printed)
    assert (tmp_path / place / "model").is_dir()


# What holds the pages to it


def page_of(folder: Path, *parts: str) -> Path:
    page = folder / "page.md"
    page.write_text("\n".join(parts) + "\n")
    return page


def test_files_are_written_changed_and_run(tmp_path: Path) -> None:
    file = '```python title="a.py"\nimport sys\nprint(6 * 7)\n```'
    change = '```diff title="a.py"\n import sys\n-print(6 * 7)\n+print(6 * 7, sys.argv[1])\n```'
    page = page_of(tmp_path, file, change, "```bash\npython a.py \\\n    x   # why\n```", "```text\n41 x\n```")
    assert pages.follow(page, tmp_path) == "42 x\n"


@pytest.mark.parametrize("shown", ["42", "x 42 y", "forty-two"])
def test_what_is_shown_has_to_be_printed(tmp_path: Path, shown: str) -> None:
    page = page_of(tmp_path, "```bash\necho 'x 42'\n```", f"```text\n...\n{shown}\n```")
    with pytest.raises(AssertionError, match="shows"):
        pages.follow(page, tmp_path)


def test_what_is_printed_has_to_be_shown(tmp_path: Path) -> None:
    command = "```bash\necho 'a 1'; echo; echo 'b 2'\n```"
    for shown in ("a 1\nb 3", "b 7\n\na 1", "a 1\n...", "... 1\nb ..."):
        assert pages.follow(page_of(tmp_path, command, f"```text\n{shown}\n```"), tmp_path)
    for shown in ("a 1", "a 1\nb", ""):
        with pytest.raises(AssertionError, match="show"):
            pages.follow(page_of(tmp_path, command, f"```text\n{shown}\n```"), tmp_path)


@pytest.mark.parametrize(
    "block",
    ["```bash\nfalse | cat; exit 3\n```", "```bash\npython -c 'raise SystemExit(3)'\n```", "```python\nx = 1\n```",
     "<!-- not run: needs two machines -->\n```bash\nfleetrun --no_such_option train.py\n```",
     "<!-- only: gpu -->\n```bash\nfleetrun --no_such_option train.py\n```"],
)  # fmt: skip
def test_what_fails_or_is_not_understood_fails_the_page(tmp_path: Path, block: str) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(AssertionError):
        pages.follow(page_of(tmp_path, block), tmp_path)


def test_a_block_may_be_for_some_tests_only(tmp_path: Path) -> None:
    page = page_of(tmp_path, "<!-- only: gpu -->\n```bash\necho on a GPU\n```", "```bash\necho anywhere\n```")
    assert pages.follow(page, tmp_path) == "anywhere\n"
    assert pages.follow(page, tmp_path, "gpu") == "on a GPU\nanywhere\n"


def test_a_change_needs_one_place() -> None:
    for text in ("a\n", "b\nb\n"):
        with pytest.raises(AssertionError, match="places"):
            pages.changed(text, " b\n+c\n")
