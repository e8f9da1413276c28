"""What reaches a terminal: words and colours, and nothing that commands it."""

from __future__ import annotations

import random
import re

from support.cases import each_of

from torchfleet.base.printable import bare, printable

RED = "\x1b[1;31mred\x1b[0m"
COMMANDS = {
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "clipboard, other end": "\x1b]52;c;ZXZpbA==\x1b\\",
    "clipboard, cut off": "\x1b]52;c;ZXZpbA==",
    "title": "\x1b]0;title\x07",
    "link": "\x1b]8;;http://evil\x1b\\",
    "clear": "\x1b[2J\x1b[H",
    "alternate screen": "\x1b[?1049h",
    "question": "\x1b[6n",
    "device control": "\x1bP1$r q\x1b\\",
    "application": "\x1b_Gf=100;AAAA\x1b\\",
    "reset": "\x1bc",
    "character set": "\x1b(0",
    "8-bit CSI": "\x9b2J",
    "8-bit OSC": "\x9d52;c;ZXZpbA==\x9c",
    "bell": "\x07",
    "backspaces": "\x08\x08",
    "half": "\x1b",
    "half CSI": "\x1b[",
}


@each_of("command", COMMANDS.values(), ids=COMMANDS)
def test_what_commands_a_terminal_is_taken_out(command: str) -> None:
    assert printable(f"before {command}") == "before "
    assert bare(f"before {command}") == "before "


def test_words_around_it_stay() -> None:
    assert printable("a\x1b[2Jb\x1b]0;t\x07c\tü → 日本\x7f") == "abc\tü → 日本"


def test_colours_stay_in_a_line_and_end_with_it() -> None:
    assert printable(f"{RED} and \x1b[32mgreen") == f"{RED} and \x1b[32mgreen\x1b[0m"
    assert bare(RED) == "red"


def test_of_a_line_that_was_written_over_the_last_state_is_left() -> None:
    assert printable("10 %\r50 %\r100 %\r\n") == "100 %"


def test_nothing_but_colours_is_left_of_any_bytes() -> None:
    dice = random.Random(1)
    alphabet = "\x1b\x9b\x9d\x90\x07\x9c[]P_\\;0m52c?hJ\r\n\x00 "
    for _ in range(20_000):
        line = "".join(dice.choices(alphabet, k=dice.randrange(1, 12)))
        left = re.sub(r"\x1b\[[0-9;:]*m", "", printable(line))
        assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", left), repr(line)
        assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", bare(line)), repr(line)
