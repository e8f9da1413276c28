"""Makes a source archive the same bytes for the same sources: `python tests/support/same_archive.py dist/*.tar.gz`.

setuptools writes wheels so, and source archives with the times of the build. The files keep their contents; times are
SOURCE_DATE_EPOCH, owners are left out, and files are in the order of their names.
"""

from __future__ import annotations

import gzip
import io
import os
import sys
import tarfile
from pathlib import Path


def rewrite(archive: Path, seconds: int) -> None:
    """In place."""
    made = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            content = old.extractfile(member) if member.isfile() else None
            plain = tarfile.TarInfo(member.name)
            plain.size, plain.type, plain.linkname = member.size, member.type, member.linkname
            plain.mode, plain.mtime = 0o755 if member.isdir() or member.mode & 0o100 else 0o644, seconds
            new.addfile(plain, content)
    archive.write_bytes(gzip.compress(made.getvalue(), mtime=seconds))


def main(archives: list[str]) -> int:
    if not archives or not os.environ.get("SOURCE_DATE_EPOCH", "").isdigit():
        print("give the archives, and SOURCE_DATE_EPOCH in the environment")
        return 2
    for archive in archives:
        rewrite(Path(archive), int(os.environ["SOURCE_DATE_EPOCH"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
