"""What makes a file look like a key or credentials: its name, or a line of it. The line itself is never repeated."""

from __future__ import annotations

import re
from fnmatch import fnmatch

_NAMES = (
    ".env", ".env.*", "*.env", "id_rsa", "id_dsa", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".pgpass", ".pypirc",
    ".npmrc", ".git-credentials", ".htpasswd", "kubeconfig", "*.kubeconfig", "*.key", "*.key_secret", "*.p12", "*.pfx",
    "*.jks", "*.keystore", "*.kdbx", "*.ppk", "credentials", "*credential*.json", "*credential*.y*ml",
    "*credential*.toml", "*credential*.ini", "*secret*.json", "*secret*.y*ml", "*secret*.toml",
    "*service*account*.json",
)  # fmt: skip
_FORMATS = {
    "a private key": re.compile(
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----|PuTTY-User-Key-File-|AGE-SECRET-KEY-1"
    ),
    "a secret key of CURVE": re.compile(r"""secret-key\s*=\s*"[^"\n]{40}\""""),
    "credentials of a service account": re.compile(r'"type"\s*:\s*"(service_account|authorized_user)"'),
    "a Secret of Kubernetes": re.compile(r"""(?m)^\s*["']?kind["']?\s*:\s*["']?Secret["']?\s*,?\s*$"""),
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
_WORDS = r"(password|passwd|secret|api[_-]?key|access[_-]?key|private[_-]?key|auth[_-]?token|access[_-]?token)"
# In settings any value counts, in a source only one that is written out and is no name of a variable.
_SETTING = re.compile(rf"""(?im)(^|[{{,\s"'])[\w.-]*{_WORDS}\w*["']?[ \t]*[:=][ \t]*["']?[^\s"'#{{$<\[|>,]{{4,}}""")
_ASSIGNED = re.compile(rf"""(?i)\b\w*{_WORDS}["']?\]?\s*[:=]\s*["'](?!(?-i:[A-Z_]+)["'])[^\s"'{{}}<>$]{{8,}}["']""")


def secret_sign(name: str, text: str) -> str | None:
    """Return why a file of this name and text looks like a key or credentials; None if it does not."""
    for pattern in _NAMES:
        if fnmatch(name.lower(), pattern):
            return f"a name like {pattern}"
    found = format_sign(text)
    if found is not None:
        return found
    match = (_ASSIGNED if name.endswith(".py") else _SETTING).search(text)
    return _at("a password, key or token", text, match.start()) if match else None


def format_sign(text: str) -> str | None:
    """Return which known form of a key or of credentials is in a text, and in which line; None if there is none."""
    for what, pattern in _FORMATS.items():
        match = pattern.search(text)
        if match:
            return _at(what, text, match.start())
    return None


def _at(what: str, text: str, place: int) -> str:
    return f"{what} in line {text.count(chr(10), 0, place) + 1}"
