"""The files that a job on Ray sends to the nodes: what the script imports and what --files names; no keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.messages import lines_naming, naming

from torchfleet.base.errors import RoleError
from torchfleet.launch.cli import main
from torchfleet.launch.clusters.on_ray import package as packages
from torchfleet.launch.clusters.on_ray.package import package, package_files
from torchfleet.ps.net.keys import keygen


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    texts = {
        "train.py": "import helper, pkg.fast, torchfleet\nopen('conf.yaml')\n",
        "helper.py": "",
        "pkg/__init__.py": "",
        "pkg/__main__.py": "import helper\n",
        "pkg/fast.cpython-311-x86_64-linux-gnu.so": "compiled",
        "torchfleet/__init__.py": "",
        "unused.py": "",
        "conf.yaml": "rate: 0.1\n",
        "data/names.bin": "\0\1",
        "data/.token": "x",
        "db.yaml": "password: hunter22\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def places(script: Path | None, *named: str, module: str | None = None, key_dir: str | None = None) -> set[str]:
    return {file.place for file in package_files(Path.cwd(), script and str(script), module, named, key_dir)[0]}


def copied(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


IMPORTED = {"train.py", "helper.py", "pkg/__init__.py", "pkg/fast.cpython-311-x86_64-linux-gnu.so"}


def test_the_package_has_the_files_of_the_list_and_no_others(script: Path) -> None:
    files, left = package_files(script.parent, str(script), None, ["data"], None)
    assert left == {"conf.yaml": "train.py"}
    with package(script.parent, files) as folder:
        assert copied(folder) == {*IMPORTED, "data/names.bin"}
        assert all((folder / file.place).read_bytes() == file.path.read_bytes() for file in files)
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_keys_beside_the_script_stay_here(script: Path) -> None:
    keygen(script.parent / "keys")
    assert places(script, key_dir="keys") == IMPORTED
    for named in ("keys", "keys/server.key_secret"):
        with pytest.raises(RoleError, match=naming("key")):
            places(script, named)
        with pytest.raises(RoleError, match=naming("--key_dir")):
            places(script, named, key_dir="keys")
    with pytest.raises(RoleError, match=naming("--key_dir")):  # a public key, too
        places(script, "keys/server.key", key_dir="keys")


def test_what_looks_like_a_password_is_sent_only_by_its_own_name(script: Path) -> None:
    (script.parent / "data" / "link").symlink_to(script.parent / "data" / ".token")
    with pytest.raises(RoleError, match=naming("data/link", "token", "--files")):
        places(script, "data")
    assert places(script, "db.yaml") == {*IMPORTED, "db.yaml"}


def test_a_module_and_what_it_imports_are_sent(script: Path) -> None:
    assert places(None, module="pkg") == {"pkg/__init__.py", "pkg/__main__.py", "helper.py"}
    assert places(None, module="json.tool") == set()  # the nodes have it


def test_for_a_function_the_modules_of_this_folder_that_are_loaded_are_sent(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    __import__("unused")
    assert places(None) == {"unused.py"}


def test_a_package_that_ray_would_refuse_is_refused_with_its_largest_files(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "MOST_BYTES", 1000)
    (script.parent / "data" / "large").write_text("x" * 1000)
    with pytest.raises(RoleError, match=naming("data/large")):
        places(script, "data")


def test_the_list_is_shown(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cluster", "ray", "--dry_run", "--files", "data", "train.py"]) == 0
    assert lines_naming(capsys.readouterr().out, "train.py", "helper.py (imported)", "data/names.bin (--files)")


@pytest.mark.parametrize("cluster", [[], ["--cluster", "slurm"], ["--nproc_per_node", "2"]])
def test_files_of_a_job_that_sends_none_are_refused(
    script: Path, cluster: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*cluster, "--files", "data", "train.py"]) == 2
    assert lines_naming(capsys.readouterr().err, "--files")
