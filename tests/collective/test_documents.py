"""docs/collective: every block of code runs as it stands, and every table says what the code says."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from support.cases import each_of
from support.paths import ROOT
from support.ranks import Ranks

from torchfleet.base.strategy.collective_fields import CONFIGS, FIELDS, OBJECTS
from torchfleet.collective.build import INCOMPATIBLE, ORDER

DOCS = ROOT / "docs" / "collective"
PAGES = sorted(DOCS.glob("*.md"))


class Block(NamedTuple):
    """Of a page, from a line on. `size`: the ranks that its first line asks for; 0: any number."""

    page: str
    line: int
    size: int
    code: str


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            asked = re.match(r"# fleetrun --nproc_per_node (\d+) ", match[1])
            line = text[: match.start(1)].count("\n")
            found.append(Block(page.name, line, int(asked[1]) if asked else 0, match[1]))
    return found


def chosen(size: int) -> list[Block]:
    """Those that run on `size` ranks: blocks that name no number run on one and on two."""
    return [block for block in blocks() if block.size == size or (block.size == 0 and size <= 2)]


def run_blocks(folder: str) -> dict[str, Any]:
    """One after the other; returns which ran."""
    os.chdir(folder)
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # test_fusion.py tests compiling, which is slow
    size = int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")  # fleet.init takes it as it is: one meeting for all blocks
    ran = []
    for page, line, _, code in chosen(size):
        # Empty lines before, so that a traceback has the page's own numbers.
        exec(compile("\n" * line + code, str(DOCS / page), "exec"), {"__name__": "__main__"})
        ran.append(f"{page}:{line}")
    return {"ran": " ".join(ran)}


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2, 4])
def test_every_block_runs(ranks: Ranks, tmp_path: Path, size: int) -> None:
    expected = [f"{page}:{line}" for page, line, _, _ in chosen(size)]
    assert expected
    for found in ranks.run(run_blocks, size, folder=str(tmp_path)):
        assert found["ran"].split() == expected


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose first line begins so."""
    lines = (DOCS / page).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(head))
    found = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("| ").split(" | ")])
    return found


def told(page: str, head: str) -> dict[str, str]:
    """Name → default."""
    return {cells[0].strip("`"): cells[1] for cells in rows(page, f"| {head} | default |")}


@each_of("name", sorted(set(CONFIGS) - {"adaptive_localsgd", "hybrid"}))
def test_tables_of_keys_are_complete_and_right(name: str) -> None:
    keys = {key: str(value.default) for key, value in CONFIGS[name].items()}
    assert told(f"{name}.md", f"`{name}_configs`") == keys


def test_other_tables_are_complete_and_right() -> None:
    for name, page in (("adaptive_localsgd", "localsgd.md"), ("hybrid", "tensor_parallel.md")):
        keys = {key: str(value.default) for key, value in CONFIGS[name].items()}
        assert told(page, f"`{name}_configs`") == keys
    for name, page, head in (
        ("build_strategy", "fusion.md", "flag of `fleet.BuildStrategy`"),
        ("execution_strategy", "other_fields.md", "field of `fleet.ExecutionStrategy`"),
    ):
        keys = {key: str(value.default) for key, value in OBJECTS[name].items()}
        assert told(page, head) == keys


def test_every_field_has_its_default_in_a_table_or_a_page_of_its_own() -> None:
    tables: dict[str, str] = {}
    for page in PAGES:
        if "\n| field | default |" in page.read_text():
            tables |= told(page.name, "field")
    for name, key in FIELDS.items():
        assert tables.get(name, str(key.default)) == str(key.default)
        assert name in tables or (DOCS / f"{name}.md").exists() or name == "adaptive_localsgd", name


def test_the_readme_lists_the_order_and_what_does_not_go_together() -> None:
    order = " ".join(cells[1] for cells in rows("README.md", "| | field |"))
    assert re.findall(r"`(\w+)`", order) == list(ORDER)
    pairs = {
        (field.strip("`"), other)
        for field, others, _ in rows("README.md", "| field |")
        for other in re.findall(r"`(\w+)`", others)
    }
    assert pairs == set(INCOMPATIBLE)


def test_every_field_and_key_is_among_those_of_paddle() -> None:
    """`local_grad_clip_norm`, `dtype`, `float8_exclude`, `stages`, `cut`, `memory_MB` are torchfleet's own, and named
    as such there.
    """
    text = (DOCS.parent / "paddle.md").read_text()
    names = {
        *FIELDS,
        *(key for keys in (*OBJECTS.values(), *CONFIGS.values()) for key in keys),
    }
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []


@each_of("page", [*PAGES, DOCS.parent / "paddle.md", DOCS.parent / "architecture.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link
