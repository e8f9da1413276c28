"""A parser of protobuf's text format without a schema. Each field of a message maps to the list of its values.

message   = { name ( ":" value | [":"] "{" message "}" | [":"] "<" message ">" ) [ "," | ";" ] }
value     = number | "text" { "text" } | word | "[" value { "," value } "]"
comments  = from "#" to the end of the line
"""

from __future__ import annotations

import re
from typing import Any

from torchfleet.base.errors import StrategyError

Message = dict[str, list[Any]]


class Word(str):
    """An unquoted value that is not a number: true, false, the name of an enum."""

    __slots__ = ()


_TOKENS = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
      | (?P<number>-?\s*(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fF]?|(?:inf|infinity|nan)\b)(?![\w.]))
      | (?P<word>[A-Za-z_]\w*)
      | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<sign>[{}<>\[\]:,;])""",
    re.VERBOSE | re.IGNORECASE,
)
_ESCAPES = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_PLAIN = dict(zip(b"nrtabfv\\'\"?", b"\n\r\t\a\b\f\v\\'\"?", strict=True))
_CLOSING = {"{": "}", "<": ">"}
_DEEPEST = 50


def parse(text: str) -> Message:
    """Parse a message. An error names the line."""
    return _Reader(text).message("", 0)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._kind, self._token = "", ""
        self._advance()

    def message(self, closing: str, depth: int) -> Message:
        fields: Message = {}
        if depth > _DEEPEST:
            raise self._error(f"at most {_DEEPEST} messages inside each other")
        while self._kind:
            if closing and self._took(closing):
                return fields
            if self._kind != "word":
                raise self._error("the name of a field")
            name = self._take()
            if values := self._values(depth):  # `name: []` is a field without a value
                fields.setdefault(name, []).extend(values)
            _ = self._took(",") or self._took(";")
        if closing:
            raise self._error(f"'{closing}'")
        return fields

    def _values(self, depth: int) -> list[Any]:
        colon = self._took(":")
        if colon and self._took("["):
            values: list[Any] = []
            while not self._took("]"):
                if values and not self._took(","):
                    raise self._error("',' or ']'")
                values.append(self._value(depth))
            return values
        if not colon and self._token not in _CLOSING:
            raise self._error("':' or '{'")
        return [self._value(depth)]

    def _value(self, depth: int) -> Any:
        if self._kind == "sign" and self._token in _CLOSING:
            return self.message(_CLOSING[self._take()], depth + 1)
        if self._kind == "number":
            return self._number()
        if self._kind == "word":
            return Word(self._take())
        if self._kind != "text":
            raise self._error("a value")
        texts = []
        while self._kind == "text":
            texts.append(self._unquoted(self._token))
            self._advance()
        return "".join(texts)

    def _number(self) -> int | float:
        try:
            number = _number(self._token)
        except ValueError:  # 09 is not a valid octal number; int() refuses too many digits
            raise self._error("a number") from None
        self._advance()
        return number

    def _unquoted(self, token: str) -> str:
        def plain(found: re.Match[bytes]) -> bytes:
            octal, hexadecimal, letter = found.groups()
            code = int(octal, 8) if octal else int(hexadecimal, 16) if hexadecimal else _PLAIN.get(letter[0], -1)
            if not 0 <= code <= 255:
                raise self._error("an escape that protobuf has")
            return bytes([code])

        try:
            return _ESCAPES.sub(plain, token[1:-1].encode()).decode()
        except UnicodeDecodeError:
            raise self._error("text in UTF-8") from None

    def _took(self, sign: str) -> bool:
        if self._kind != "sign" or self._token != sign:
            return False
        self._advance()
        return True

    def _take(self) -> str:
        token = self._token
        self._advance()
        return token

    def _advance(self) -> None:
        """Advance to the next token. At the end of the text, its kind is ''."""
        self._kind = self._token = ""
        while self._at < len(self._text):
            found = _TOKENS.match(self._text, self._at)
            if found is None:
                self._token = self._text[self._at]
                raise self._error("a field or a value")
            self._at = found.end()
            if found.lastgroup != "space":
                self._kind, self._token = str(found.lastgroup), found.group()
                return

    def _error(self, expected: str) -> StrategyError:
        line = self._text.count("\n", 0, self._at) + 1
        return StrategyError(
            f"line {line}: expected {expected}, found {self._token!r}"
            if self._token
            else f"line {line}: expected {expected}, found the end of the file"
        )


def _number(token: str) -> int | float:
    token = "".join(token.split()).lower()
    digits = token.lstrip("-")
    if digits.startswith("0x"):
        return int(token, 16)
    if digits.isdigit():
        return int(token, 8 if digits.startswith("0") and len(digits) > 1 else 10)
    return float(token if digits in ("inf", "infinity", "nan") else token.rstrip("f"))
