"""Files that `fleetrun k8s` sends with a script: what it imports and what --files names; no keys, no credentials."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.cases import each_of
from support.messages import lines_naming, naming
from support.paths import ROOT

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.k8s.pod_settings import variables
from torchfleet.launch.clusters.k8s.script_files import config_map_files, script_files
from torchfleet.launch.clusters.k8s_command import main
from torchfleet.launch.clusters.secret_signs import secret_sign
from torchfleet.ps.net.keys import keygen

PASSWORD, HEX = "hunter2" * 2, "0a1b" * 10
AWS = "AKIA" + "IOSFODNN7EXAMPLE"
SCRIPT = """
import json, os.path, pkg.deep.leaf
from helper import VALUE
from pkg import chosen, not_a_module
if __name__ == "__main__":
    import importlib, plain.inner
    importlib.import_module("late")
    importlib.import_module(".by_keyword", package="pkg.other")
    importlib.import_module(".by_place", "pkg.other")
    importlib.import_module(name="kw")
    from pkg.other import *
    from pkg.annotated import *
    str(("conf.yaml", VALUE))
"""
FOLDER = {
    "train.py": SCRIPT,
    "helper.py": "VALUE = 1\nfrom circle import *\n",
    "circle.py": "import helper\n",
    "late.py": "",
    "kw.py": "",
    "pkg/other/__init__.py": "__all__ = []\n__all__ += ['more']\n",
    "pkg/other/by_keyword.py": "",
    "pkg/other/by_place.py": "",
    "pkg/other/more.py": "",
    "pkg/annotated/__init__.py": "__all__: list[str] = ['typed']\n",
    "pkg/annotated/typed.py": "",
    "pkg/__init__.py": "from .named import *\nnot_a_module = 3\n",
    "pkg/named/__init__.py": "__all__ = ['sub']\n",
    "pkg/named/sub.py": "",
    "pkg/chosen.py": "from . import deep\ntry:\n    from .. import above\nexcept ImportError:\n    pass\n",
    "pkg/deep/__init__.py": "",
    "pkg/deep/leaf.py": "from ..sibling import x\n",
    "pkg/sibling.py": "x = 1\n",
    "plain/inner.py": "",
}
BESIDE = {
    "above.py": "",  # above its package: no import finds it
    "unused.py": "",
    "pkg/unused.py": "",
    "conf.yaml": "rate: 0.1\n",
    "db.yaml": "host: db\npassword: hunter22\n",
    "gcp-credentials.json": json.dumps({"type": "service_account", "private_key": "x"}),
    ".env": "TOKEN=abc\n",
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    for name, text in {**FOLDER, **BESIDE}.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project" / "train.py"


def paths(script: Path, **options: object) -> set[str]:
    return {file.place for file in script_files(script, **options)[0]}  # type: ignore[arg-type]


def config_map(folder: Path) -> tuple[dict[str, str], int]:
    (path,) = folder.glob("*configmap*")
    return yaml.safe_load(path.read_text())["data"], path.stat().st_mode & 0o777


def test_what_a_script_imports_is_sent_and_nothing_beside_it(script: Path) -> None:
    files, left = script_files(script)
    assert {file.path: file.text for file in config_map_files(files)} == FOLDER
    assert left == {"conf.yaml": "train.py"}
    assert paths(script, is_alone=True) == {"train.py"}


def test_what_is_sent_is_what_python_loads(script: Path) -> None:
    """The oracle: a process that runs the script, and tells which files of its folder it has loaded."""
    told = "\nimport sys, json\nprint(json.dumps([getattr(m, '__file__', None) for m in [*sys.modules.values()]]))\n"
    script.write_text(SCRIPT + told)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    loaded = [Path(name) for name in json.loads(done.stdout.splitlines()[-1]) if name]
    assert paths(script) == {str(p.relative_to(script.parent)) for p in loaded if p.is_relative_to(script.parent)}


def test_imports_whose_name_is_computed_are_told(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, _ = script_files(script)
    assert not any(file.unknown for file in files)
    script.write_text("import importlib as i\nname = 'la' + 'te'\ni.import_module(name)\ni.import_module('.x', name)\n")
    ((file,), _) = script_files(script)
    assert file.unknown == (3, 4)
    assert main(["--image", "x", "--dry_run", str(script)]) == 0
    assert lines_naming(capsys.readouterr().out, "train.py", "3, 4", "--files")


def test_a_text_that_no_path_can_have_is_no_file(script: Path) -> None:
    (script.parent / "loop.txt").symlink_to("loop.txt")
    script.write_text('x = ["\\ud800.x", "loop.txt", "conf.yaml"]\n')
    files, left = script_files(script)
    assert [file.place for file in files] == ["train.py"]
    assert left == {"conf.yaml": "train.py"}


def test_manifests_are_utf_8_in_every_locale(script: Path) -> None:
    script.write_text("x = 'ä→'\n", encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "torchfleet.launch", "k8s", "--image", "x", "-o", "out", str(script)]
    subprocess.run(command, cwd=script.parent, env=environment, timeout=120, check=True, capture_output=True)
    (path,) = (script.parent / "out").glob("*configmap*")
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["data"]["train.py"] == "x = 'ä→'\n"


def test_a_second_run_in_the_same_folder_does_not_send_the_keys_of_the_first(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(script.parent)
    for name in ("m1", "m2"):
        assert main(["--image", "x", "-o", name, "train.py"]) == 0
    told = capsys.readouterr().err
    assert all(name in told for name in FOLDER)  # every file is listed
    data, mode = config_map(script.parent / "m2")
    assert sorted(data.values()) == sorted(FOLDER.values())
    assert mode == 0o644
    with pytest.raises(RoleError, match=naming("m1", "secret")):
        main(["--image", "x", "-o", "m3", "--files", "m1", "train.py"])
    assert not Path("m3").exists()


def test_files_are_sent_by_name_and_what_looks_like_a_key_only_by_its_own_name(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(script.parent)
    assert paths(script, named=["conf.yaml", "pkg"]) == {*FOLDER, "conf.yaml", "pkg/unused.py"}
    for refused in (".", str(script.parent)):
        with pytest.raises(RoleError, match=naming("db.yaml", "--files")):
            script_files(script, named=[refused])
    assert main(["--image", "x", "-o", "out", "--files", "db.yaml", "train.py"]) == 0
    assert lines_naming(capsys.readouterr().err, "db.yaml", "password")
    data, mode = config_map(script.parent / "out")
    assert data["db.yaml"] == BESIDE["db.yaml"]
    assert mode == 0o600


def test_a_module_with_a_key_in_it_is_refused_without_repeating_the_key(script: Path) -> None:
    script.with_name("helper.py").write_text(f"VALUE = 1\nKEY = '{AWS}'\n")
    with pytest.raises(RoleError, match=naming("helper.py", "2", "--files")) as raised:
        script_files(script)
    assert AWS not in str(raised.value)


def test_secrets_on_standard_output_are_warned_of(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--image", "x", str(script)]) == 0
    assert lines_naming(capsys.readouterr().err, "standard output", "Secret", "-o")
    assert main(["--image", "x", "--nnodes", "1", "--insecure", str(script)]) == 0  # ranks have no keys
    assert not lines_naming(capsys.readouterr().err, "standard output", "Secret")


def keys_of_a_job(folder: Path) -> str:
    keygen(folder)
    return (folder / "server.key_secret").read_text()


@each_of(
    ("name", "text"),
    [
        ("a.txt", "-----BEGIN OPENSSH PRIVATE KEY-----\n"),
        ("a.txt", "-----BEGIN PRIVATE KEY-----\n"),
        ("a.txt", "-----BEGIN PGP PRIVATE KEY BLOCK-----\n"),
        ("a.json", '{"type": "service_account"}'),
        ("a.yaml", 'apiVersion: v1\nkind: Secret\ndata: {x: "eA=="}\n'),
        ("a.py", f"client({AWS!r})"),
        ("a.ini", "aws_secret_access_key = " + "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
        ("a.py", "token = 'ghp_" + "a1B2" * 9 + "'"),
        ("a.py", "engine('postgres://me:pw123@db/x')"),
        ("a.toml", 'api_key = "0123456789"'),
        ("a.json", '{"user": "me", "password": "hunter22"}'),
        ("a.py", 'DB = {"password": "hunter22"}'),
        ("server.key_secret", ""),
        (".env", ""),
        ("id_rsa", ""),
        ("gcp-credentials.json", "{}"),
        ("a.py", f'SECRET_KEY = "{PASSWORD}"'),
        ("a.py", f'secret_key = "{PASSWORD}"'),
        ("a.py", f'x = {{"secret_key": "{PASSWORD}"}}'),
        ("a.py", f'password: str = "{PASSWORD}"'),
        ("a.py", f'password: str | None = b"{PASSWORD}"'),
        ("a.py", f"TOKEN = '{HEX}'"),
        ("a.py", f'hub(hf_token="{HEX}")'),
        ("a.py", f'add_argument("--password", default="{PASSWORD}")'),
        ("a.py", f'add_argument(\n    "--db_password", type=str, help="(of the database)", default="{PASSWORD}"\n)'),
        ("a.py", f'os.environ.setdefault("WANDB_API_KEY", "{HEX}")'),
        ("a.py", f'os.environ["WANDB_API_KEY"] = "{HEX}"'),
        ("a.yaml", f"hf_token: {HEX}\n"),
        ("a.txt", "machine host login me password x\n"),
        ("a.txt", "machine host\n  login me\n  password x\n"),
        ("config.json", '{"auths": {"host": {"auth": "bWU6aHVudGVyMg=="}}}'),
        ("credential.txt", ""),
        ("credentials", ""),
        ("my_secrets.py", ""),
        ("db_password.txt", ""),
    ],
)
def test_keys_and_credentials_are_known(name: str, text: str) -> None:
    assert secret_sign(name, text) is not None


def test_a_key_of_our_own_is_known_under_any_name(tmp_path: Path) -> None:
    assert secret_sign("settings.txt", keys_of_a_job(tmp_path / "keys")) is not None


@each_of(
    ("name", "text"),
    [
        ("a.py", 'password = os.environ["PASSWORD"]'),
        ("a.py", 'api_key = "OPENAI_API_KEY"'),
        ("a.py", "token = tokenizer.next_token()"),
        ("a.py", 'f"redis://{user}:{password}@{host}"'),
        ("a.py", "url = 'http://127.0.0.1:8000/a@b'"),
        ("a.yaml", "password: ${PASSWORD}\ntokens: 12\nrate: 0.1\n"),
        ("a.pem", "-----BEGIN CERTIFICATE-----\n"),
        ("a.py", 'tokenizer = "bert-base-uncased-12345"'),
        ("a.py", 'tokens = "abcdefgh12345"\nnum_tokens: int = 123456789012'),
        ("a.py", 'pad_token = "padding_token_12"\ntoken = "word"\nmask_token: str = "mask_token_0001"'),
        ("a.py", 'if token == "abcdef1234567": pass'),
        ("a.py", 'add_argument("--tokenizer", default="bert-base-uncased-12")'),
        ("a.py", 'add_argument("--token", default=None)\nadd_argument("--model", default="bert-base-uncased-12")'),
        ("a.py", 'add_argument("--password_file", default="/run/secrets/db")'),
        ("a.py", 'secret_name = "name-of-a-secret"'),
        ("a.yaml", "tokenizer: bert-base-uncased-12\nmax_tokens: 123456789012\npad_token: padding_token_12\n"),
        ("a.txt", "the machine has a password\n"),
    ],
)
def test_what_only_speaks_of_secrets_is_not_taken_for_one(name: str, text: str) -> None:
    assert secret_sign(name, text) is None


@each_of(
    ("text", "is_refused"),
    [
        ("DB_PASSWORD=x", True),
        (f"WANDB_API_KEY={HEX}", True),
        ("HF_TOKEN=x", True),
        ("SECRET_KEY=1", True),
        ("DB_PASSWORD=", False),
        ("DB_PASSWORD=/run/secrets/db", False),
        ("DB_PASSWORD_FILE=secrets/db", False),
        ("TOKENIZERS_PARALLELISM=false", False),
        ("MAX_TOKENS=12", False),
    ],
)
def test_a_variable_with_the_name_of_a_secret_is_refused(text: str, is_refused: bool) -> None:
    name, _, value = text.partition("=")
    if not is_refused:
        assert variables([text]) == ((name, value),)
        return
    with pytest.raises(RoleError, match=naming("--env", name, "--env_secret")):
        variables([text])


def test_a_link_that_leads_out_of_the_folder_is_refused(script: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("x")
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "deep.txt").write_text("x")
    links = script.parent / "links"
    links.mkdir()
    (links / "inner.yaml").symlink_to(script.parent / "conf.yaml")
    assert "links/inner.yaml" in paths(script, named=[str(links)])
    (links / "key.txt").symlink_to(script.parent / ".env")
    with pytest.raises(RoleError, match=naming("key.txt", ".env")):
        script_files(script, named=[str(links)])
    (links / "key.txt").unlink()
    for name, target in (("out.txt", "outside.txt"), ("folder", "outer")):
        (script.parent / name).symlink_to(tmp_path / target)
        with pytest.raises(RoleError, match=naming(name, target)):
            script_files(script, named=[str(script.parent / name)])
    (links / "out.txt").symlink_to(tmp_path / "outside.txt")
    with pytest.raises(RoleError, match=naming("out.txt", "outside.txt")):
        script_files(script, named=[str(links)])


def test_a_key_is_refused_by_its_own_name_too(script: Path, tmp_path: Path) -> None:
    keys_of_a_job(script.parent / "keys")
    key = script.parent / "keys" / "server.key_secret"
    copy = script.parent / "settings.txt"
    copy.write_text(key.read_text())
    link = script.parent / "linked.txt"
    link.symlink_to(key)
    for named in (key, copy, link, script.parent / "keys"):
        with pytest.raises(RoleError, match=naming(named.name)):
            script_files(script, named=[str(named)])


@each_of("word", ["secret", "a-", "token=", "kind: Secret" + " " * 1000, "eyJ" + "a" * 12 + "-"])
@each_of("name", ["a.py", "a.yaml"])
def test_the_search_takes_time_in_proportion_to_the_text(name: str, word: str) -> None:
    """A sixteenfold text: by bounded repetitions about 16 times as long, by others up to 256 times."""
    texts = [(word * (num // len(word) + 1))[:num] for num in (1 << 13, 1 << 17)]
    took = []
    for text in texts:
        begin = time.thread_time()
        assert secret_sign(name, text) is None
        took.append(time.thread_time() - begin)
    assert took[1] < 64 * max(took[0], 0.004)


def test_no_example_of_ours_looks_like_a_secret() -> None:
    for path in (ROOT / "examples").rglob("*.py"):
        assert secret_sign(path.name, path.read_text()) is None, path


def test_mistakes_are_named(script: Path, tmp_path: Path) -> None:
    (tmp_path / "beside.yaml").write_text("")
    (script.parent / "image.png").write_bytes(b"\x89PNG\xff")
    for named, told in (("none.yaml", "none.yaml"), ("../beside.yaml", "beside.yaml"), ("image.png", "UTF-8")):
        with pytest.raises(RoleError, match=naming(told)):
            config_map_files(script_files(script, named=[str(script.parent / named)])[0])
    with pytest.raises(RoleError, match=naming("--files", "image")):
        main(["--image", "x", "--in_image", "--files", "conf.yaml", "/app/train.py"])
    with pytest.raises(RoleError, match=naming("--env", "AWS")):
        main(["--image", "x", "--env", f"ID={AWS}", str(script)])
    (script.parent / "late.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
    with pytest.raises(RoleError, match=naming("late.cpython-311-x86_64-linux-gnu.so")):
        script_files(script)
    script.write_text("import (")
    with pytest.raises(RoleError, match=naming("train.py", "--script_alone")):
        script_files(script)
