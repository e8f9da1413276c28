"""The Dockerfile, as far as it can be looked at without Docker: what it copies is there, and fits the manifests."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT

from torchfleet.launch.clusters.k8s.k8s_job import CACHE, K8sJob
from torchfleet.launch.clusters.k8s.pod_template import pod_template
from torchfleet.observe.commands.command import main


def instructions() -> list[tuple[str, str]]:
    """Every instruction with its argument, lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def of(word: str) -> list[str]:
    return [argument for found, argument in instructions() if found == word]


def is_ignored(path: str) -> bool:
    """As .dockerignore says: the last pattern that fits counts; one of a folder counts for all in it."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if line.startswith("#") or not line:
            continue
        above = [str(part) for part in (Path(path), *Path(path).parents)]
        if any(fnmatch.fnmatchcase(part, pattern) for part in above):
            ignored = not line.startswith("!")
    return ignored


def test_only_instructions_that_docker_knows() -> None:
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in instructions()} <= known
    assert [argument.split()[0] for argument in of("FROM")] == ["python:${PYTHON}-slim"] * 2
    assert "PYTHON=3.12" in of("ARG")


def test_everything_that_is_copied_is_there_and_not_ignored() -> None:
    sources = [source for argument in of("COPY") if "--from" not in argument for source in shlex.split(argument)[:-1]]
    assert "torchfleet" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not is_ignored(source), source
    assert is_ignored("tests")
    assert is_ignored("examples/bert")
    assert not is_ignored("examples/wide_deep/train.py")


def test_the_job_that_compiles_kernels_finds_what_it_imports() -> None:
    sources = {source for argument in of("COPY") for source in shlex.split(argument)[:-1]}
    waiting, seen = ["examples/wide_deep/train.py", "examples/__init__.py"], set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        assert any(source in sources for source in (path, *map(str, Path(path).parents))), path
        for name in re.findall(r"^from (examples[.\w]*) import", (ROOT / path).read_text(), re.MULTILINE):
            waiting.append(f"{name.replace('.', '/')}.py")
    assert len(seen) > 3
    (run,) = [argument for argument in of("RUN") if "train.py" in argument]
    assert "/examples/wide_deep/train.py" in run  # beside what it imports


def test_the_package_is_built_from_what_is_copied() -> None:
    """Files that pyproject.toml names, without which no wheel can be built; and the torch that it asks for."""
    project = (ROOT / "pyproject.toml").read_text()  # Python 3.10 has no parser of TOML
    (readme,) = re.findall(r'^readme = "(.+)"', project, re.MULTILINE)
    (license,) = re.findall(r'^license-files = \["(.+)"\]', project, re.MULTILINE)
    assert {"pyproject.toml", readme, license} <= set(of("COPY")[0].split())
    (torch,) = re.findall(r'"(torch>.+)"', project)
    assert f'"{torch}"' in " ".join(of("RUN"))


def test_it_ends_as_the_user_of_the_pods_with_their_kernels() -> None:
    job = K8sJob("job", "image", ("/app/train.py",), 1, 1)
    user = instructions()[[word for word, _ in instructions()].index("USER")][1]
    assert user == f"{job.user}:{job.user}"
    assert f"--uid {job.user} " in " ".join(of("RUN"))
    (cache,) = re.findall(r"XDG_CACHE_HOME=(\S+)", " ".join(of("ENV")))
    kernels = pod_template(job, "worker", [])["spec"]["initContainers"][0]["command"][-1]
    assert f"cp -R {cache}/. " in kernels
    assert f"chmod -R a+rX {cache}" in " ".join(of("RUN"))  # for pods of another user


def test_all_kernels_are_compiled_by_a_command_that_there_is() -> None:
    (arguments,) = re.findall(r"\bfleet ([a-z]+)", " ".join(of("RUN")))
    with pytest.raises(SystemExit) as ended:
        main([arguments, "--help"])
    assert ended.value.code == 0


def test_kernels_that_cannot_be_copied_do_not_fail_the_pod(tmp_path: Path) -> None:
    job = K8sJob("job", "image", ("/app/train.py",), 1, 1)
    shell, flag, copy = pod_template(job, "worker", [])["spec"]["initContainers"][0]["command"]
    source, target = tmp_path / "image", tmp_path / "pod"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "kernel.nbc").write_text("x")
    own = copy.replace("/opt/torchfleet/cache", str(source)).replace(CACHE, str(target))
    target.touch()  # no folder: cp fails
    for is_writable in (False, True):
        if is_writable:
            target.unlink()
            target.mkdir()
        done = subprocess.run([shell, flag, own], capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        assert (target / "deep" / "kernel.nbc").exists() is is_writable


def test_what_it_starts_is_in_the_package() -> None:
    (entry,) = of("ENTRYPOINT")
    python, flag, module = json.loads(entry)
    assert (python, flag) == ("python", "-m")
    assert importlib.util.find_spec(f"{module}.__main__") is not None
    assert json.loads(of("CMD")[0]) == ["--help"]
