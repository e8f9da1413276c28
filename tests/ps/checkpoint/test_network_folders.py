"""A saved model on a network file system: stale reads, and renames whose answer is lost, are told and never mixed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from support.chains import PLAIN, Chain
from support.messages import naming

from torchfleet.base.errors import CheckpointError
from torchfleet.ps.checkpoint.manifest import read_manifest, remove_others, write_manifest
from torchfleet.ps.checkpoint.part_reader import load_sparse
from torchfleet.ps.tables.sparse_table import SparseTable


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(str(tmp_path), [PLAIN])
    chain.save(1, {PLAIN.name: [(1, 1), (2, 2)]})
    return chain


def loaded(chain: Chain) -> int:
    return load_sparse(chain.storage, read_manifest(chain.storage), SparseTable(PLAIN, 1 << 22))


def test_a_stale_manifest_is_refused_by_the_file_that_is_gone(chain: Chain, tmp_path: Path) -> None:
    stale, before = (tmp_path / "manifest.json").read_bytes(), read_manifest(chain.storage)
    chain.save(1, {PLAIN.name: [(1, 1)]}, full=True)
    remove_others(chain.storage, read_manifest(chain.storage))
    (tmp_path / "manifest.json").write_bytes(stale)
    with pytest.raises(CheckpointError, match=naming(tmp_path / before.save / before.parts[0].file)):
        loaded(chain)


def test_a_file_that_is_stale_or_half_there_is_refused_by_name(chain: Chain, tmp_path: Path) -> None:
    part = read_manifest(chain.storage).parts[0]
    place = tmp_path / read_manifest(chain.storage).save / part.file
    whole = place.read_bytes()
    for stale in (whole[:-4], whole[:-4] + bytes(4), bytes(len(whole)), b""):  # pages that have not come read as zeros
        place.write_bytes(stale)
        with pytest.raises(CheckpointError, match=naming(place)):
            loaded(chain)


def test_a_handle_that_is_stale_is_told_by_name(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_: Any) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    manifest = read_manifest(chain.storage)
    monkeypatch.setattr(os, "posix_fadvise", stale)
    with pytest.raises(CheckpointError, match=naming(manifest.parts[0].file)):
        load_sparse(chain.storage, manifest, SparseTable(PLAIN, 1 << 22))


def test_a_rename_whose_answer_is_lost_is_told_and_the_model_is_the_new_one(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, manifest = os.replace, read_manifest(chain.storage)

    def replaced(source: str, target: str) -> None:
        replace(source, target)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))  # as NFS answers a repeated request

    chain.save(1, {PLAIN.name: [(1, 1), (2, 2), (3, 3)]}, full=True)
    newer = read_manifest(chain.storage)
    write_manifest(chain.storage, manifest)
    monkeypatch.setattr(os, "replace", replaced)
    with pytest.raises(OSError, match="No such file"):
        write_manifest(chain.storage, newer)
    assert read_manifest(chain.storage) == newer
    assert loaded(chain) == 3
