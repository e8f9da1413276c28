"""Workflows, forms and records of the repository agree with the Makefile and pyproject.toml; the wheel is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import same_archive
from support.extras import EXTRAS, skips_in_one_line
from support.paths import ROOT
from support.wheel_contents import copy_sources, package_files, problems

import torchfleet

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PROJECT = (ROOT / "pyproject.toml").read_text()  # Python 3.10 has no parser of TOML
MAKEFILE = (ROOT / "Makefile").read_text()
CHANGES = (ROOT / "CHANGELOG.md").read_text()


def name_of(path: Path) -> str:
    return path.name


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def jobs(workflow: Path) -> dict[str, Any]:
    found: dict[str, Any] = read(workflow)["jobs"]
    return found


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(workflow).values():
        yield from job["steps"]


def targets() -> set[str]:
    """Of the Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", MAKEFILE, re.MULTILINE))


def extra(name: str) -> str:
    """The requirements of an extra, as text."""
    found = re.search(rf"^{name} = \[(.*?)\](?:  #.*)?$", PROJECT, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def test_there_are_workflows_for_tests_wheels_documents_and_long_searches() -> None:
    commands = {workflow.stem: " ".join(step.get("run", "") for step in steps(workflow)) for workflow in WORKFLOWS}
    asked = {
        "test": ["check"],
        "wheels": ["wheel"],
        "docs": ["docs"],
        "weekly": ["fuzz", "faults", "test-long", "test-clusters"],
    }
    assert set(commands) == set(asked)
    for workflow, wanted in asked.items():
        assert [target for target in wanted if f"make {target}" not in commands[workflow]] == [], workflow


def test_make_quick_touches_every_wing() -> None:
    found = re.search(r"^QUICK := .*?\$\(addprefix tests/,(.*?)\)$", MAKEFILE, re.MULTILINE | re.DOTALL)
    assert found is not None
    paths = found[1].replace("\\\n", " ").split()
    assert [path for path in paths if not (ROOT / "tests" / path).exists()] == []
    wings = {path.parent.name for path in (ROOT / "torchfleet").glob("*/__init__.py")}
    assert wings - {path.partition("/")[0] for path in paths} == set()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name_of)
def test_every_make_in_a_workflow_is_a_target(workflow: Path) -> None:
    named = [word for step in steps(workflow) for word in re.findall(r"\bmake ([\w-]+)", step.get("run", ""))]
    assert named
    assert set(named) <= targets()


def test_the_versions_of_python_are_those_of_the_classifiers() -> None:
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    matrix = jobs(ROOT / ".github" / "workflows" / "test.yml")["check"]["strategy"]["matrix"]
    assert matrix["python"] == classified
    assert f'requires-python = ">={classified[0]}"' in PROJECT
    assert {machine["name"] for machine in matrix["machine"]} == {"x86-64", "aarch64"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name_of)
def test_a_workflow_may_only_read_and_ends_in_time(workflow: Path) -> None:
    content = read(workflow)
    assert content["permissions"] == {"contents": "read"}
    assert "group" in content["concurrency"]
    for job in jobs(workflow).values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 360


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name_of)
def test_actions_of_others_are_pinned_to_a_commit(workflow: Path) -> None:
    """A tag can be moved. Nor do they keep the token, or read what a stranger wrote as part of a command."""
    uses = re.findall(r"uses: (\S+)( # v[\d.]+)?", workflow.read_text())
    assert uses
    assert [action for action, comment in uses if not comment or not re.search(r"@[0-9a-f]{40}$", action)] == []
    for step in steps(workflow):
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False
        assert "${{" not in step.get("run", "")


@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_a_form_is_one_that_github_shows(form: Path) -> None:
    content = read(form)
    assert {"name", "description", "body"} <= set(content)
    kinds = [part["type"] for part in content["body"]]
    assert set(kinds) <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    ids = [part["id"] for part in content["body"] if part["type"] != "markdown"]
    assert len(set(ids)) == len(ids) > 0
    assert all(part["attributes"].get("label") for part in content["body"] if part["type"] != "markdown")
    assert any(part.get("validations", {}).get("required") for part in content["body"])


def test_there_are_forms_for_bugs_features_and_questions() -> None:
    assert {form.stem for form in FORMS} == {"bug", "feature", "question"}
    assert read(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": False}


def test_before_a_commit_runs_what_make_check_runs() -> None:
    hooks = {hook["id"]: hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]}
    assert set(hooks) == {"ruff-check", "ruff-format", "mypy"}
    for hook in hooks.values():
        tool = " ".join(hook["entry"].split()[:2]).removeprefix(".venv/bin/")
        assert f"$(VENV)/bin/{tool}" in MAKEFILE


def test_one_version_everywhere() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert str(citation["version"]) == torchfleet.__version__
    assert '\ndynamic = ["version"]' in PROJECT
    assert '\nversion = {attr = "torchfleet.__version__"}' in PROJECT
    assert re.search(rf"^## \[{re.escape(torchfleet.__version__)}\] - \d{{4}}-\d\d-\d\d$", CHANGES, re.MULTILINE)
    assert f'\nlicense = "{citation["license"]}"' in PROJECT


def test_setup_leaves_out_what_only_the_site_needs() -> None:
    assert "mkdocs-material" in extra("docs")
    assert "mkdocs" not in extra("dev")
    assert "docs" not in re.findall(r"torchfleet\[([\w,]+)\]", extra("dev"))[0].split(",")


def test_tests_name_extras_that_there_are() -> None:
    assert all(extra(name) for name in EXTRAS.values())


def test_skipped_tests_are_counted_by_what_they_need() -> None:
    reasons = ["needs torchfleet[ray]", "Skipped: needs a GPU: none is here", "Skipped: needs a GPU"]
    assert skips_in_one_line(reasons) == "skipped 3: 2 need a GPU, 1 needs torchfleet[ray]"


def built(folder: Path, seconds: float) -> Path:
    """A wheel, built without a network, of a copy whose files are of this time: nothing is left in the repository."""
    source = folder / "source"
    copy_sources(source)
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()
    for file in source.rglob("*"):
        os.utime(file, (seconds, seconds))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(
        [*command, folder, source], capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.long
def test_the_wheel_has_the_package_and_no_tests_and_is_the_same_bytes_twice(tmp_path: Path) -> None:
    first, second = (built(tmp_path / str(day), 1_600_000_000.0 + 86_400 * day) for day in (1, 2))
    assert problems(first, package_files()) == []
    assert first.name == second.name == f"torchfleet-{torchfleet.__version__}-py3-none-any.whl"
    assert first.read_bytes() == second.read_bytes()


def test_a_source_archive_becomes_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.py").write_text("22")
    made = []
    for number, names in enumerate((("a.py", "b.py"), ("b.py", "a.py"))):
        archive = tmp_path / f"{number}.tar.gz"
        with tarfile.open(archive, "w:gz") as packed:
            for name in names:
                os.utime(tmp_path / name, (1e9 + number, 1e9 + number))
                packed.add(tmp_path / name, name)
        same_archive.rewrite(archive, 1_700_000_000)
        made.append(archive.read_bytes())
        with tarfile.open(archive) as packed:
            assert {member.name: packed.extractfile(member).read() for member in packed.getmembers()} == {  # type: ignore[union-attr]
                "a.py": b"1",
                "b.py": b"22",
            }
    assert made[0] == made[1]


def test_all_is_every_extra_that_a_user_may_want() -> None:
    section = PROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    named = re.findall(r"torchfleet\[([\w,]+)\]", extra("all"))[0].split(",")
    of_targets = {"dev", "docs", "browser", "ecosystem"}
    assert {*named, "all"} | of_targets == set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


def test_the_changes_of_a_release_are_read_in_two_minutes() -> None:
    """At two hundred and fifty words a minute."""
    newest = re.split(r"^## ", CHANGES, flags=re.MULTILINE)[2]
    assert len(re.sub(r"\]\([^)]*\)", "]", newest).split()) < 700


def test_what_a_wheel_lacks_is_seen(tmp_path: Path) -> None:
    wheel = tmp_path / "torchfleet-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torchfleet/__init__.py", "")
        archive.writestr("tests/test_wire.py", "")
    found = "\n".join(problems(wheel, {"torchfleet/__init__.py", "torchfleet/page.html"}))
    for part in ("lacks torchfleet/page.html", "has tests/test_wire.py", "no command 'fleetrun", "LICENSE", "py.typed"):
        assert part in found


@pytest.mark.xdist_group("of one process")
def test_groups_of_tests_are_run_by_one_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist writes the group behind the name of a test. Where it cannot, every process imports and computes what
    is meant to be shared, and nothing else tells."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("not a process of pytest -n 2 --dist loadgroup")
    assert request.node.nodeid.endswith("@of one process"), "this pytest and this pytest-xdist do not go together"
