"""etcd over TLS, with a client certificate, and with a user and a password: a real one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.messages import naming
from support.own_etcd import started_etcd

from torchfleet.base.errors import CoordinatorUnreachable, RoleError
from torchfleet.ps.coordination import etcd_gateway
from torchfleet.ps.coordination.coordinators import make_coordinator
from torchfleet.ps.coordination.etcd_gateway import (
    CA,
    CERT,
    KEY,
    PASSWORD_FILE,
    USER,
    Answer,
    EtcdGateway,
    secure_access,
)
from torchfleet.ps.coordination.view import View

pytestmark = pytest.mark.xdist_group("coordinators")


class Found(Answer):
    kvs: list[dict[str, Any]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a certificate of it for servers and clients on this machine, without a common name: etcd with
    users refuses one."""
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for command in (
        ["req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2"],
        ["req", *key, "-keyout", "own.key", "-out", "own.csr", "-subj", "/O=fleet"],
        ["x509", "-req", "-in", "own.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
         "-out", "own.pem", "-extfile", "names"],
    ):  # fmt: skip
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True, timeout=200)
    (folder / "password").write_text("a secret\n")
    return folder


@pytest.fixture(scope="module")
def variables(certificates: Path) -> dict[str, str]:
    files = {CA: "ca.pem", CERT: "own.pem", KEY: "own.key"}
    return {name: str(certificates / file) for name, file in files.items()}


@pytest.fixture(scope="module")
def place(certificates: Path, variables: dict[str, str]) -> Iterator[str]:
    """One that wants certificates of its clients, too."""
    options = ("--cert-file", variables[CERT], "--key-file", variables[KEY], "--client-cert-auth",
               "--trusted-ca-file", variables[CA], "--bcrypt-cost", "4")  # fmt: skip
    with started_etcd(*options, access=secure_access(variables)) as found:
        yield found


def test_views_are_kept_over_tls(
    place: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, certificates: Path
) -> None:
    monkeypatch.setattr(etcd_gateway, "_TIMEOUT", 30.0)  # a busy machine or disk is no fault
    url = f"etcds://{place}/run"
    with pytest.raises(CoordinatorUnreachable, match="certificate"):
        make_coordinator(url).read(0)  # an authority that this machine does not know
    monkeypatch.setenv(CA, variables[CA])
    with pytest.raises(CoordinatorUnreachable):
        make_coordinator(url).read(0)  # etcd does not know who asks
    for name in (CERT, KEY):
        monkeypatch.setenv(name, variables[name])
    made = make_coordinator(url)
    assert made.replace(0, None, View(1, "0-a"))
    assert make_coordinator(url).read(0) == View(1, "0-a")
    with pytest.raises(RoleError, match=naming("--coordinator", "etcds://")):
        make_coordinator(f"etcd://{place}/run")


def test_a_user_logs_in_with_a_password_and_again_when_that_is_over(
    place: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, certificates: Path
) -> None:
    monkeypatch.setattr(etcd_gateway, "_TIMEOUT", 30.0)  # it is not about time
    root = EtcdGateway([place], secure_access(variables))
    for name in ("root", "fleet"):
        root.ask("auth/user/add", {"name": name, "password": "a secret"}, Answer)
    root.ask("auth/user/grant", {"user": "root", "role": "root"}, Answer)
    root.ask("auth/role/add", {"name": "terms"}, Answer)
    permission = {"permType": "READWRITE", "key": "dG9yY2hmbGVldC8=", "range_end": "dG9yY2hmbGVldDA="}  # torchfleet/
    root.ask("auth/role/grant", {"name": "terms", "perm": permission}, Answer)
    root.ask("auth/user/grant", {"user": "fleet", "role": "terms"}, Answer)
    root.ask("auth/enable", {}, Answer)
    logged_in = {**variables, USER: "fleet", PASSWORD_FILE: str(certificates / "password")}
    try:
        gateway = EtcdGateway([place], secure_access(logged_in))
        key = "dG9yY2hmbGVldC9r"  # torchfleet/k
        gateway.ask("kv/put", {"key": key, "value": "djE="}, Answer)
        gateway._token = "expired"
        assert gateway.ask("kv/range", {"key": key}, Found).kvs[0]["value"] == "djE="
        with pytest.raises(CoordinatorUnreachable, match="permission denied"):
            gateway.ask("kv/range", {"key": "b3RoZXI="}, Found)
        (certificates / "wrong").write_text("guessed")
        with pytest.raises(CoordinatorUnreachable, match="authentication failed"):
            EtcdGateway([place], secure_access({**logged_in, PASSWORD_FILE: str(certificates / "wrong")})).ask(
                "kv/range", {"key": key}, Found
            )
    finally:
        as_root = {**variables, USER: "root", PASSWORD_FILE: str(certificates / "password")}
        EtcdGateway([place], secure_access(as_root)).ask("auth/disable", {}, Answer)


def test_what_is_missing_is_named(tmp_path: Path, variables: dict[str, str]) -> None:
    with pytest.raises(RoleError, match=naming(CERT, KEY)):
        secure_access({CERT: variables[CERT]})
    with pytest.raises(RoleError, match="PEM"):
        secure_access({**variables, CA: str(tmp_path / "none")})
