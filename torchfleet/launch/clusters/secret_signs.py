"""Signs that a file is a key or credentials: its name, or one of its lines. Messages never repeat the line itself.

Every repetition in a pattern is bounded, so a search of any text takes time in proportion to its length.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch

MOST_TEXT = 1 << 20  # characters of a file that are searched
_KEY_NAMES = ("*.key_secret",)  # keys of a job: those of keygen
_NAMES = (
    ".token", "*.token",
    ".env", ".env.*", "*.env", "id_rsa", "id_dsa", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".pgpass", ".pypirc",
    ".npmrc", ".git-credentials", ".htpasswd", "kubeconfig", "*.kubeconfig", "*.key", *_KEY_NAMES, "*.p12", "*.pfx",
    "*.jks", "*.keystore", "*.kdbx", "*.ppk", "credential*", "*credential*.json", "*credential*.y*ml",
    "*credential*.toml", "*credential*.ini", "*secret*.json", "*secret*.y*ml", "*secret*.toml",
    "*secret*.py", "*password*", "*passwd*", ".dockercfg", ".dockerconfigjson", "*service*account*.json",
)  # fmt: skip
_PRIVATE, _CURVE = _KEYS = ("a private key", "a secret key of CURVE")
_FORMATS = {
    _PRIVATE: re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY( BLOCK)?-----|PuTTY-User-Key-File-|AGE-SECRET-KEY-1"),
    _CURVE: re.compile(r"""secret-key\s{0,9}=\s{0,9}"[^"\n]{40}\""""),
    "credentials of a service account": re.compile(r'"type"\s{0,99}:\s{0,99}"(service_account|authorized_user)"'),
    "a password of netrc": re.compile(
        r"(?m)^[ \t]{0,40}(machine\s{1,40}\S{1,255}|default)\s{1,40}(login\s{1,40}\S{1,255}\s{1,40})?"
        r"(account\s{1,40}\S{1,255}\s{1,40})?password\s{1,40}\S"
    ),
    "credentials of a registry": re.compile(r'"(auth|identitytoken)"\s{0,99}:\s{0,99}"[A-Za-z0-9+/._-]{12}'),
    "a Secret of Kubernetes": re.compile(
        r"""(?m)^[ \t]{0,99}["']?kind["']?\s{0,9}:\s{0,9}["']?Secret["']?[ \t]{0,9},?[ \t\r]{0,9}$"""
    ),
    "an access key of AWS": re.compile(
        r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|(?i:aws_?secret_?access_?key)[\"']?\s{0,40}[=:]\s{0,40}[\"']?[A-Za-z0-9/+=]{40}(?![A-Za-z0-9/+=])"
    ),
    "a key of Azure": re.compile(r"(AccountKey|SharedAccessKey)=[A-Za-z0-9+/]{40}"),
    "an access token": re.compile(
        r"\b(gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{22}|glpat-[\w-]{20}|xox[abeprs]-[\w-]{10}|hf_[A-Za-z0-9]{30}|"
        r"sk-[\w-]{32}|AIza[\w-]{35}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50})|\beyJ[\w-]{10,600}\.eyJ[\w-]{10}"
    ),
    "an address with a password": re.compile(
        r"""\b[a-z][a-z0-9+.-]{0,20}://[^\s:/@'"{}$<>%]{0,128}:[^\s/@'"{}$<>]{1,256}@[\w.\[]"""
    ),
}
_WORDS = (
    r"(password|passwd|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key|auth[_-]?token|access[_-]?token)"
)
_MORE = r"([_-]?(key|value|default|base|[0-9])){0,9}"  # what may follow: SECRET_KEY, password_2
# `token` alone is also a word of text processing: its value counts only if it looks random. pad_token is no secret.
_SPECIAL = ("pad", "bos", "eos", "unk", "sep", "cls", "mask", "special", "start", "end", "max", "min", "num")
_TOKEN = rf"(?<![a-z]){''.join(f'(?<!{word}_)' for word in _SPECIAL)}token"
_RANDOM = r"(?=[^\s\"']{0,99}[0-9])(?=[^\s\"']{0,99}[a-z])"
# In settings any value counts; in a source only a string literal that is not the name of a variable.
_SETTINGS = (
    re.compile(
        rf"""(?im)(^|[{{,\s"'])[\w.-]{{0,60}}?{_WORDS}\w{{0,60}}"""
        rf"""["']?[ \t]{{0,40}}[:=][ \t]{{0,40}}["']?[^\s"'#{{$<\[|>,]{{4}}"""
    ),
    re.compile(rf"""(?i){_TOKEN}["']?[ \t]{{0,40}}[:=][ \t]{{0,40}}["']?{_RANDOM}[^\s"'#{{$<\[|>,/]{{12}}"""),
)
_VALUE = r"""[rbu]{0,2}["'](?!(?-i:[A-Z_]{1,99})["'])[^\s"'{}<>$]{8,500}["']"""
_TOKEN_VALUE = rf"""[rbu]{{0,2}}["'](?!(?-i:[A-Z_]{{1,99}})["']){_RANDOM}[^\s"'{{}}<>$\[\]|/]{{12,500}}["']"""


def _written_out(name: str, value: str) -> re.Pattern[str]:
    """Return a pattern of Python sources that assign `value` to a name that ends in `name`. Both are patterns."""
    quoted = rf"""["'][\w-]{{0,60}}{name}["']"""
    assigned = (
        rf"""{name}["']?\]?\s{{0,20}}(:\s{{0,20}}[a-z][\w\[\]., |]{{0,60}}?)?\s{{0,20}}(:?=|:)\s{{0,40}}{value}"""
    )
    option = rf"""{quoted}\s{{0,40}},((?!\)\s{{0,40}}\n)[\s\S]){{0,300}}?\bdefault\s{{0,9}}=\s{{0,40}}{value}"""
    called = rf"""(setdefault|putenv|setenv|getenv|get)\(\s{{0,99}}{quoted}\s{{0,99}},\s{{0,99}}{value}"""
    return re.compile(f"(?i){assigned}|{option}|{called}")


_ASSIGNED = (_written_out(rf"{_WORDS}{_MORE}", _VALUE), _written_out(_TOKEN, _TOKEN_VALUE))
_VARIABLE = re.compile(rf"(?i)({_WORDS}|{_TOKEN}){_MORE}\Z")
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


def key_sign(name: str, text: str) -> str | None:
    """Return why a file is a private key beyond doubt; None if it is not."""
    for shape in _KEY_NAMES:
        if fnmatch(name.lower(), shape):
            return f"a name like {shape}"
    for what in _KEYS:
        match = _FORMATS[what].search(text)
        if match:
            return _at(what, text, match.start())
    return None


def variable_sign(name: str, value: str) -> str | None:
    """Return why a variable of the environment looks like a key or credentials; None if it does not. Its name does not
    count if its value is a path.
    """
    if value and _VARIABLE.search(name) and not _PATH.fullmatch(value):
        return "the name of a password, key or token"
    found = format_sign(f"{name}={value}")
    return None if found is None else found.partition(" in line")[0]


def format_sign(text: str) -> str | None:
    """Return which known format of a key or of credentials a text contains, and in which line; None if it has none."""
    for what, pattern in _FORMATS.items():
        match = pattern.search(text)
        if match:
            return _at(what, text, match.start())
    return None


def _at(what: str, text: str, place: int) -> str:
    return f"{what} in line {text.count(chr(10), 0, place) + 1}"
