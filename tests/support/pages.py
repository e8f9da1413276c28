"""Pages of the documents as programs: files are written, commands run, and what is shown has to be printed.

A block of a page says by its language what is done with it:

    ```python title="train.py"      a file, of any language: it is written
    ```diff title="train.py"        lines to add to a file and to remove from it; @@ stands between two places
    ```bash                         command lines: each is run, in the order of the page
    ```text                         all lines that the commands before it print; numbers may differ, `...` is anything,
                                    and a line `...` says that there are more lines

A comment right above a block changes that. `<!-- not run: REASON -->`: its command lines are only parsed. `<!-- only:
MARKER -->`: it is run where the test that has this marker of pytest asks for it, and is only parsed elsewhere.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from support.paths import ROOT
from support.scripts.launching import Forked, clean_environment

from torchfleet.observe.commands import command as fleet_command

_BLOCK = re.compile(
    r"^(?:<!-- (?P<how>not run|only): (?P<what>[^\n]+) -->\n)?"
    r'```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"\d(?:[\d,.]*\d)?")
_SHELL = re.compile(r"[|&;<>$*`]")
SECONDS = 300.0  # that one command may take, on a machine that has much else to do


class Block(NamedTuple):
    """A block of code. `how` and `what` are those of the comment above it, empty without one."""

    language: str
    title: str
    text: str
    how: str
    what: str

    def commands(self) -> list[str]:
        """The lines of a block of command lines; one that ends with a backslash goes on in the next."""
        lines = (line.strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line and not line.startswith("#")]

    def is_for(self, markers: frozenset[str]) -> bool:
        return not self.how or (self.how == "only" and self.what in markers)


Execute = Callable[[str, Path], str]  # runs a command line in a folder; what it prints, or AssertionError


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in its order."""
    found = [Block(**{name: text or "" for name, text in match.groupdict().items()})
             for match in _BLOCK.finditer(page.read_text())]  # fmt: skip
    num_fences = len(re.findall(r"^```", page.read_text(), re.MULTILINE))
    assert 2 * len(found) == num_fences, f"{page}: {num_fences} fences, but {len(found)} blocks"
    return found


def follow(page: Path, folder: Path, *markers: str, execute: Execute | None = None) -> str:
    """Does what the page says, in an empty folder; returns all that was printed.

    Fails if a command fails, or does not print what the page shows.
    """
    printed, latest = "", ""
    for block in blocks(page):
        if not block.is_for(frozenset(markers)):
            if block.language == "bash":
                _parse(block.commands(), folder)
        elif block.title:
            file = folder / block.title
            file.write_text(changed(file.read_text(), block.text) if block.language == "diff" else block.text)
        elif block.language == "bash":
            latest = "".join((execute or run)(line, folder) for line in block.commands())
            printed += latest
        elif block.language == "text":
            assert (lost := missing(block.text, latest)) == [], f"{page.name} shows {lost}; this was printed:\n{latest}"
            # In an empty environment the first runs also say what they compile.
            extra = [] if execute else unshown(block.text, latest)
            assert extra == [], f"{page.name} does not show {extra}; show them, or a line of three dots"
        else:
            raise AssertionError(f"{page.name}: neither a file, nor bash or text, nor marked:\n{block.text}")
    return printed


def changed(text: str, diff: str) -> str:
    """A file with the changes of a block made, as a person makes them: at the one place that has the lines around."""
    for piece in diff.split("@@\n"):
        lines = piece.splitlines()
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != mark) for mark in "+-")
        assert text.count(before) == 1, f"{text.count(before)} places, not one, have\n{before}"
        text = text.replace(before, after)
    return text


def missing(shown: str, printed: str) -> list[str]:
    """The lines of `shown` that were not printed; how many spaces stand between two words does not matter."""
    lines = _lines(printed)
    return [line for line in _lines(shown) if line != "..." and not any(map(_pattern(line).fullmatch, lines))]


def unshown(shown: str, printed: str) -> list[str]:
    """The lines that were printed and that `shown` has not; none if one of its lines is `...`."""
    if "..." in _lines(shown):
        return []
    patterns = [_pattern(line) for line in _lines(shown)]
    return [line for line in _lines(printed) if not any(pattern.fullmatch(line) for pattern in patterns)]


def _lines(text: str) -> list[str]:
    """The lines that are not empty, with one space between two words."""
    return [line for line in (" ".join(line.split()) for line in text.splitlines()) if line]


def _pattern(line: str) -> re.Pattern[str]:
    """Of a line as it is shown: any number stands for any other, `...` for anything."""
    pieces = (_NUMBER.sub("0", piece) for piece in line.split("..."))
    return re.compile(".*".join(re.escape(piece).replace("0", r"\d[\d,.]*") for piece in pieces))


def run(line: str, folder: Path) -> str:
    """A command line, by the interpreter and the torchfleet of the tests; Python's own are forked, which is quick."""
    words = shlex.split(line, comments=True)
    modules = {"fleetrun": "torchfleet.launch", "fleet": "torchfleet.observe.commands"}
    environment = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"}
    if words[0] in modules and not _SHELL.search(line):
        words = ["python", "-m", modules[words[0]], *words[1:]]
    if words[0] != "python" or _SHELL.search(line):
        done = subprocess.run(
            ["bash", "-ec", line], cwd=folder, env=clean_environment(**environment), text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\nended with {done.returncode}:\n{done.stdout}"
        return str(done.stdout)
    with Forked([sys.executable, *words[1:]], folder=folder, **environment) as job:
        assert job.wait(SECONDS) == 0, f"{line}\nended with {job.process.returncode}:\n{job.output}"
    return job.output


def _parse(commands: list[str], folder: Path) -> None:
    """Looks at lines that are not run: what fleetrun and fleet do not know is found."""
    for line in commands:
        words = shlex.split(line, comments=True)
        if words[0] == "fleetrun":
            run(shlex.join(["fleetrun", *planning(words)]), folder)
        elif words[0] == "fleet":
            assert fleet_command._parser().parse_args(words[1:]).command == words[1], line


def planning(words: list[str]) -> list[str]:
    """Arguments with which fleetrun shows what this line would start. Hosts of an example are replaced by this one."""
    here = "--servers 127.0.0.1:7000 --workers 127.0.0.1:0"
    line = re.sub(r"--servers \S+ --workers \S+", here, shlex.join(words[1:]))
    return ["--dry_run", *shlex.split(line)]
