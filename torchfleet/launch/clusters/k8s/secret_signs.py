"""What makes a file look like a key or credentials: its name, or a line of it. The line itself is never repeated."""

from __future__ import annotations

import re
from fnmatch import fnmatch

_NAMES = (
    ".env", ".env.*", "*.env", "id_rsa", "id_dsa", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".pgpass", ".pypirc",
    ".npmrc", ".git-credentials", ".htpasswd", "kubeconfig", "*.kubeconfig", "*.key", "*.key_secret", "*.p12", "*.pfx",
    "*.jks", "*.keystore", "*.kdbx", "*.ppk", "credential*", "*credential*.json", "*credential*.y*ml",
    "*credential*.toml", "*credential*.ini", "*secret*.json", "*secret*.y*ml", "*secret*.toml",
    "*secret*.py", "*password*", "*passwd*", ".dockercfg", ".dockerconfigjson", "*service*account*.json",
)  # fmt: skip
_FORMATS = {
    "a private key": re.compile(
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----|PuTTY-User-Key-File-|AGE-SECRET-KEY-1"
    ),
    "a secret key of CURVE": re.compile(r"""secret-key\s*=\s*"[^"\n]{40}\""""),
    "credentials of a service account": re.compile(r'"type"\s*:\s*"(service_account|authorized_user)"'),
    "a password of netrc": re.compile(
        r"(?m)^[ \t]*(machine\s+\S+|default)\s+(login\s+\S+\s+)?(account\s+\S+\s+)?password\s+\S+"
    ),
    "credentials of a registry": re.compile(r'"(auth|identitytoken)"\s*:\s*"[A-Za-z0-9+/._-]{12,}={0,2}"'),
    "a Secret of Kubernetes": re.compile(r"""(?m)^[ \t]*["']?kind["']?\s*:\s*["']?Secret["']?\s*,?\s*$"""),
    "an access key of AWS": re.compile(
        r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|(?i:aws_?secret_?access_?key)[\"']?\s*[=:]\s*[\"']?[A-Za-z0-9/+=]{40}(?![A-Za-z0-9/+=])"
    ),
    "a key of Azure": re.compile(r"(AccountKey|SharedAccessKey)=[A-Za-z0-9+/]{40,}"),
    "an access token": re.compile(
        r"\b(gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,}|glpat-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|hf_[A-Za-z0-9]{30,}|"
        r"sk-[\w-]{32,}|AIza[\w-]{35}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,})|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\."
    ),
    "an address with a password": re.compile(r"""\b[a-z][a-z0-9+.-]*://[^\s:/@'"{}$<>%]*:[^\s/@'"{}$<>]+@[\w.\[]"""),
}
_WORDS = (
    r"(password|passwd|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key|auth[_-]?token|access[_-]?token)"
)
_MORE = r"([_-]?(key|value|default|base|[0-9]))*"  # what may follow: SECRET_KEY, password_2
# `token` alone is also a word of text processing: its value counts only if it looks random. pad_token is no secret.
_SPECIAL = ("pad", "bos", "eos", "unk", "sep", "cls", "mask", "special", "start", "end", "max", "min", "num")
_TOKEN = rf"(?<![a-z]){''.join(f'(?<!{word}_)' for word in _SPECIAL)}token"
_RANDOM = r"(?=[^\s\"']*[0-9])(?=[^\s\"']*[a-z])"
# In settings any value counts, in a source only one that is written out and is no name of a variable.
_SETTINGS = (
    re.compile(rf"""(?im)(^|[{{,\s"'])[\w.-]*{_WORDS}\w*["']?[ \t]*[:=][ \t]*["']?[^\s"'#{{$<\[|>,]{{4,}}"""),
    re.compile(rf"""(?i){_TOKEN}["']?[ \t]*[:=][ \t]*["']?{_RANDOM}[^\s"'#{{$<\[|>,/]{{12,}}"""),
)
_VALUE = r"""[rbu]{0,2}["'](?!(?-i:[A-Z_]+)["'])[^\s"'{}<>$]{8,}["']"""
_TOKEN_VALUE = rf"""[rbu]{{0,2}}["'](?!(?-i:[A-Z_]+)["']){_RANDOM}[^\s"'{{}}<>$\[\]|/]{{12,}}["']"""


def _written_out(name: str, value: str) -> re.Pattern[str]:
    """What a Python source looks like that gives this value to a name that ends so."""
    quoted = rf"""["'][\w-]{{0,60}}{name}["']"""
    assigned = rf"""{name}["']?\]?\s*(:\s*[a-z][\w\[\]., |]{{0,60}}?)?\s*(:?=|:)\s*{value}"""
    option = rf"""{quoted}\s*,((?!\)\s*\n)[\s\S]){{0,300}}?\bdefault\s*=\s*{value}"""
    called = rf"""(setdefault|putenv|setenv|getenv|get)\(\s*{quoted}\s*,\s*{value}"""
    return re.compile(f"(?i){assigned}|{option}|{called}")


_ASSIGNED = (_written_out(rf"{_WORDS}{_MORE}", _VALUE), _written_out(_TOKEN, _TOKEN_VALUE))
_VARIABLE = re.compile(rf"(?i).*({_WORDS}|{_TOKEN}){_MORE}")
_PATH = re.compile(r"(~|\.{0,2})/.*")


def secret_sign(name: str, text: str) -> str | None:
    """Return why a file of this name and text looks like a key or credentials; None if it does not."""
    for shape in _NAMES:
        if fnmatch(name.lower(), shape):
            return f"a name like {shape}"
    found = format_sign(text)
    if found is not None:
        return found
    for pattern in _ASSIGNED if name.endswith(".py") else _SETTINGS:
        match = pattern.search(text)
        if match:
            return _at("a password, key or token", text, match.start())
    return None


def variable_sign(name: str, value: str) -> str | None:
    """Return why a variable of the environment looks like a key or credentials; None if it does not. A path is none."""
    if value and _VARIABLE.fullmatch(name) and not _PATH.fullmatch(value):
        return "the name of a password, key or token"
    found = format_sign(f"{name}={value}")
    return None if found is None else found.partition(" in line")[0]


def format_sign(text: str) -> str | None:
    """Return which known form of a key or of credentials is in a text, and in which line; None if there is none."""
    for what, pattern in _FORMATS.items():
        match = pattern.search(text)
        if match:
            return _at(what, text, match.start())
    return None


def _at(what: str, text: str, place: int) -> str:
    return f"{what} in line {text.count(chr(10), 0, place) + 1}"
