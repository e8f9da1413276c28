"""Models on S3, by its own API: save, delta, load, resume, inspect, export; and uploads that are cut."""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from support import jobs, processes
from support.cut_proxy import SECONDS, CutProxy, cut_proxy
from support.extras import Late, imported
from support.grids import first_of
from support.messages import naming
from support.one_number import NUM_IDS, Model, held, set_all
from support.paths import ROOT, SCRIPTS
from support.scripts import killed_saves, resuming
from support.scripts.launching import forked_fleetrun
from support.sharded_models import Net

import torchfleet as fleet
from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint.loading import load_parameters
from torchfleet.collective.checkpoint.saving import save as save_collective
from torchfleet.observe.commands import command
from torchfleet.ps.checkpoint.compaction import compact
from torchfleet.ps.checkpoint.export import export_table
from torchfleet.ps.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.xdist_group("object_stores")  # what ranks make for all tests is made once

s3fs, moto, pq = Late("s3fs"), Late("moto.server"), Late("pyarrow.parquet")

BUCKET = "models"
ALONE: Any = types.SimpleNamespace(rank=0, size=1)
SETTINGS = {"FSSPEC_S3_KEY": "nobody", "FSSPEC_S3_SECRET": "nothing", "AWS_DEFAULT_REGION": "eu-west-1"}

Address = tuple[str, int]


def use(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """From here on s3:// is there, in this process and in those that it starts."""
    roots = f"/,s3://{BUCKET},s3://no-such-bucket"  # servers are told of their stores
    for name, value in {**SETTINGS, "FSSPEC_S3_ENDPOINT_URL": endpoint, "FLEET_SAVE_ROOTS": roots}.items():
        patch.setenv(name, value)
    own = {"key": "nobody", "secret": "nothing", "endpoint_url": endpoint}
    patch.setitem(fsspec.config.conf, "s3", own)


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        use(patch, f"http://{host}:{port}")
        fsspec.filesystem("s3").call_s3(
            "create_bucket", Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
        )
        yield host, port
    server.stop()


@pytest.fixture
def folder(address: Address, request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"


@pytest.fixture
def part() -> Iterator[jobs.Part]:
    with jobs.one_worker(Model(), num_servers=2) as made:
        yield made


def test_full_saves_deltas_and_compaction_load_whole(
    part: jobs.Part, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, kind in ((1, "full"), (2, "full"), (3, "delta"), (4, "delta")):
        set_all(part, number)
        manifest = part.worker.save(folder, kind, {"number": number})
        assert held(part, folder) == number
        assert fleet.saved_extra(folder) == {"number": number}
        assert sorted(Storage(folder).folders()) == [link.save for link in manifest.links()]
        assert len(list(Storage(folder).files())) == 3  # the manifest, the numbered one, the donefile
    compact(folder)
    assert held(part, folder) == 4
    set_all(part, 5)
    part.worker.save(folder, "delta")
    assert held(part, folder) == 5
    assert command.main(["inspect", folder, "--check"]) == 0
    assert re.search(r"\b\d+ files", capsys.readouterr().out)


@pytest.mark.long
def test_another_process_s_save_is_seen_at_once(part: jobs.Part, folder: str) -> None:
    """Listings and sizes that this process knows from before are not taken for what is there."""
    storage = Storage(folder)
    assert list(storage.folders()) == []
    assert fleet.saved_extra(folder) is None
    set_all(part, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "cachable", False)  # each Storage has its own, as each process has
        part.worker.save(folder, "full", {"a": 1})
        assert fleet.saved_extra(folder) == {"a": 1}
        list(storage.folders())
        part.worker.save(folder, "full", {"a": "much longer than before" * 100})
    assert storage.exists("donefile.jsonl")
    assert read_manifest(storage).number == 2
    assert list(storage.folders()) == ["save-000002"]


REQUESTS = {"put_object .*/save-": 1, "put_object .*/manifest-": 1, "delete": 1, "put_object .*/manifest.json": 1}


@pytest.mark.long
@pytest.mark.parametrize("kind", first_of(["delta", "full"]))
def test_a_save_cut_at_a_request_that_changes_something_leaves_a_whole_model(
    part: jobs.Part, folder: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request fails from the first of a kind on."""
    call, is_cut, cut = s3fs.core._error_wrapper, False, "nothing"

    async def counted(function: Any, **options: Any) -> Any:
        nonlocal is_cut
        name = f"{function.__name__} {(options.get('kwargs') or {}).get('Key')}"
        is_cut = is_cut or re.match(cut, name) is not None
        if is_cut:
            raise ConnectionResetError(name)
        return await call(function, **options)

    monkeypatch.setattr(s3fs.core, "_error_wrapper", counted)
    set_all(part, 1)
    part.worker.save(folder, "full")
    for cut, number in {**REQUESTS, "put_object .*/donefile": 2}.items():
        set_all(part, 2)
        with pytest.raises((CheckpointError, OSError)):
            part.worker.save(folder, kind)
        assert is_cut
        is_cut, cut = False, "nothing"  # noqa: PLW2901
        assert held(part, folder) == number


@pytest.mark.parametrize("name", ["manifest-000002.json", "manifest.json"])
@pytest.mark.long
def test_a_connection_cut_in_the_middle_of_a_manifest_leaves_the_old_model(
    part: jobs.Part, folder: str, address: Address, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(part, 1)
    part.worker.save(folder, "full")
    set_all(part, 2)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with cut_proxy(address, f"/{name}", 300) as proxy, pytest.MonkeyPatch.context() as patch:
        use(patch, proxy.endpoint)
        patch.setitem(fsspec.config.conf["s3"], "config_kwargs", {"retries": {"max_attempts": 1}})
        with pytest.raises(CheckpointError, match=naming(name)):
            part.worker.save(folder, "full")
        assert proxy.num_cut
    assert held(part, folder) in ((1,) if name != "manifest.json" else (1, 2))
    set_all(part, 3)
    part.worker.save(folder, "delta")
    assert held(part, folder) == 3


def test_a_process_killed_in_the_middle_of_its_last_upload_leaves_the_old_model(folder: str, address: Address) -> None:
    code = "import sys; from support.scripts import killed_saves as s; s.save_on(sys.argv[1], 1, None, 2)"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    with cut_proxy(address, "/manifest.json", 300, first=2, holds=True) as proxy, pytest.MonkeyPatch.context() as patch:
        use(patch, proxy.endpoint)
        patch.setenv("PYTHONPATH", path)
        process = processes.Popen([sys.executable, "-c", code, folder], cwd=ROOT)
        try:
            assert proxy.is_held.wait(2 * SECONDS), "the upload has not begun"
        finally:
            process.kill()
            process.wait(SECONDS)
    assert killed_saves.held(folder) == [1.0]


@pytest.mark.slow
@pytest.mark.long
def test_a_job_with_servers_goes_on_from_there(folder: str, tmp_path: Path) -> None:
    """Three steps are saved there; servers and a worker, as processes, load them and go on: as six without a break."""

    def trained(place: str, num_steps: int) -> None:
        def steps(part: jobs.Part) -> None:
            resuming.train(part.model, part.optimizer, part.index, 0, num_steps)
            part.worker.save(place, "full")

        jobs.run(steps, resuming.Model, lambda model: resuming.make_optimizer("adam", model), num_workers=1)

    trained(f"{folder}/half", 3)
    trained(str(tmp_path / "whole"), 6)
    roles = ["--server_num", "2", "--worker_num", "1", "--save_root", folder.rsplit("/", 1)[0]]
    places = ["--load", f"{folder}/half", "--save", f"{folder}/full"]
    script = [str(SCRIPTS / "resuming.py"), "--first", "3", "--last", "6"]
    with forked_fleetrun(tmp_path / "log", *roles, *script, *places) as job:
        assert job.wait() == 0, job.output
    found, expected = (rows_of(place, f"{folder}/rows") for place in (f"{folder}/full", str(tmp_path / "whole")))
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_allclose(found[key], row, rtol=1e-5, atol=1e-6)


def rows_of(model: str, out: str) -> dict[int, list[float]]:
    """The table `words` with its state, by way of an export."""
    assert export_table(model, "words", out, with_state=True) > 0
    with fsspec.open(out, "rb") as file:
        table = pq.read_table(file)
    return dict(zip(table["key"].to_pylist(), table["values"].to_pylist(), strict=True))


@pytest.mark.parametrize("form", first_of(["parquet", "text"]))
def test_a_table_is_exported_there_and_a_failed_export_leaves_the_old_one(
    part: jobs.Part, folder: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(part, 3)
    part.worker.save(folder, "full")
    out = f"{folder}/out/rows"
    assert command.main(["export", folder, "--table", "words", "--out", out, "--format", form]) == 0
    with fsspec.open(out, "rb") as file:
        data = file.read()
        file.seek(0)
        if form == "parquet":
            table = pq.read_table(file)
            found = dict(zip(table["key"].to_pylist(), table["values"].to_pylist(), strict=True))
        else:
            found = {int(key): [float(v) for v in row] for key, *row in (line.split() for line in data.splitlines())}
    assert found == {key: [3.0, 3.0] for key in range(NUM_IDS)}
    manifest = read_manifest(Storage(folder))
    Storage(folder).write(f"{manifest.save}/{manifest.parts_of('words')[-1].file}", [b"damaged"])
    assert command.main(["export", folder, "--table", "words", "--out", out, "--format", form]) == 1
    with fsspec.open(out, "rb") as file:
        assert file.read() == data


def test_half_a_file_is_not_uploaded_as_a_whole_one(folder: str) -> None:
    def buffers() -> Iterator[bytes]:
        yield b"the first half"
        raise CheckpointError("the second half cannot be read")

    storage = Storage(folder)
    for is_there in (False, True):
        with pytest.raises(CheckpointError, match="the second half cannot be read"):
            storage.write("file", buffers())
        assert storage.exists("file") == is_there
        assert not is_there or storage.read("file") == b"before"
        storage.write("file", [b"before"])


def test_a_bucket_that_is_not_there_is_an_error_and_is_not_made(part: jobs.Part, address: Address) -> None:
    with pytest.raises(CheckpointError, match=naming("s3://no-such-bucket/model/")):
        part.worker.save("s3://no-such-bucket/model", "full")
    assert not fsspec.filesystem("s3").exists("no-such-bucket")


def test_a_collective_model_is_saved_loaded_inspected_and_exported(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load = imported("safetensors.torch").load

    for epoch in (1, 2):
        model, loaded = Net(), Net()
        assert save_collective(folder, model, None, [], ALONE, {"epoch": epoch}) == epoch
        assert load_parameters(folder, loaded) == {"epoch": epoch}
        for mine, its in zip(model.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(mine, its)
    assert sorted([*Storage(folder).files(), *Storage(folder).folders()]) == [
        "manifest-000002.json", "manifest.json", "save-000002",
    ]  # fmt: skip
    assert command.main(["inspect", folder, "--check"]) == 0
    assert re.search(r"\b\d+ pieces", capsys.readouterr().out)
    assert command.main(["export", folder, "--out", f"{folder}/out.safetensors"]) == 0
    with fsspec.open(f"{folder}/out.safetensors", "rb") as file:
        found = load(file.read())
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.long
def test_a_collective_save_cut_in_the_middle_of_a_manifest_leaves_the_old_model(
    folder: str, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Net()
    save_collective(folder, old, None, [], ALONE)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    proxy: CutProxy
    with cut_proxy(address, "/manifest-000002.json", 300) as proxy, pytest.MonkeyPatch.context() as patch:
        use(patch, proxy.endpoint)
        patch.setitem(fsspec.config.conf["s3"], "config_kwargs", {"retries": {"max_attempts": 1}})
        with pytest.raises(CheckpointError, match=naming("manifest-000002.json")):
            save_collective(folder, Net(), None, [], ALONE)
    loaded = Net()
    load_parameters(folder, loaded)
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), loaded.parameters(), strict=True))
