"""Manifests as YAML that all parsers read the same way, in one stream or in a folder of files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import yaml

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.k8s.k8s_job import Application, Document

# Words that every parser reads as text. Others are quoted: some parsers read 1e3, 0o17 or y as numbers or booleans.
_PLAIN = re.compile(r"[A-Za-z][-A-Za-z0-9_./]*[A-Za-z0-9]")
_NO_TEXT = {"yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
KUSTOMIZATION = "kustomization.yaml"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes text unless every parser reads it as text."""

    def ignore_aliases(self, data: object) -> bool:
        return True  # no anchors: an object that appears twice is written twice

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"'
    if "\n" in text and not re.search(r"[^\n\x20-\x7e\u00a1-\u07ff]|[ ]\n|^[ \n]", text):
        style = "|"
    elif _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT:
        style = ""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style or None)


_Dumper.add_representer(str, _text)


def text_of(document: Document) -> str:
    """Return a document as YAML."""
    return str(yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20))


def stream_of(documents: Sequence[Document]) -> str:
    """Return all documents as one stream, for `kubectl apply --server-side -f -`."""
    return "".join(f"---\n{text_of(document)}" for document in documents)


def write_folder(
    folder: Path, job: Application, documents: Sequence[Document], with_kustomization: bool, private: Collection[str]
) -> list[Path]:
    """Write one file for each object into a new or empty folder. The names are numbered because `kubectl apply -f`
    applies files in the order of their names.

    Returns the paths. Only the owner can read the files of `private` kinds.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RoleError(f"-o {folder}: expected a new or an empty folder; remove it, or name another")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, document in enumerate(documents):
        name = f"{number:02}-{document['kind'].lower()}-{document['metadata']['name']}.yaml"
        paths.append(folder / name)
        _write(folder / name, text_of(document), is_private=document["kind"] in private)
    if with_kustomization:
        made: Document = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
        if job.namespace:
            made["namespace"] = job.namespace
        made["resources"] = [path.name for path in paths]
        paths.append(folder / KUSTOMIZATION)
        _write(paths[-1], text_of(made), is_private=False)
    return paths


def _write(path: Path, text: str, is_private: bool) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if is_private else 0o644)
    with open(handle, "w", encoding="utf-8") as file:
        file.write(text)
