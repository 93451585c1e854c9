"""Removes from texts what nobody should send to others: secrets, home folders and user names.

Known secrets are replaced wherever they stand, others by the shapes in which programs print them. A shape can be
missed, so whoever sends a text must read it first.
"""

import json
import re
from collections.abc import Iterable, Mapping

MASK = "***"
_NAME = (
    r"(?:pass(?:word|wd|phrase)|secret|credential|[_-](?:token|pwd|jwt)(?![a-z_])|(?-i:_PASS)(?![a-z])|"
    r"[?&](?:sig|token)|-signature|(?:api|access|private|auth)[_-]?key)[\w-]{0,64}"
)
_QUOTE, _IS, _VALUE = r"(?:\\{0,8}[\"'])", r"[ \t]{0,8}[=:][ \t]{0,8}", r"[^\s\"',;&\\]+"
_VARIABLE = re.compile(rf"(?i){_NAME}|pass$|token|key|auth(?!ority|_sock)|jwt")
_IMPERSONAL = {"", "root", "fallow", "slurm"}
"""User names that name no person, and are words of our own texts."""

_SHAPES = [
    (r"(?s)-----BEGIN [A-Z0-9 ]{1,64}-----.*?(?:-----END [A-Z0-9 ]{1,64}-----|\Z)", MASK),
    (r"(?s)\A(?:(?!-----BEGIN).)*?-----END [A-Z0-9 ]{1,64}-----", MASK),  # the beginning of a log is cut off
    (r"(?<=://)(?:[^\s/\"'@:]{0,256}:[^\s\"']{0,512}|[^\s/\"'@]{1,512})@", f"{MASK}@"),
    (rf"(?i)(authorization{_QUOTE}?{_IS}{_QUOTE}?)[^\"'\r\n]+", rf"\1{MASK}"),
    (r"(?i)(\bbearer )[\w.~+/=-]{8,}", rf"\1{MASK}"),
    (r"\b(?:gh[a-z]_|github_pat_|glpat-|hf_|sk-|xox[a-z]-|AKIA|AIza|eyJ[\w-]{1,512}\.eyJ)[\w.-]{12,}", MASK),
    (rf"(?i)({_NAME}{_QUOTE}?\]?{_IS}[bfru]?({_QUOTE}))[^\r\n]{{0,1024}}?\2", rf"\1{MASK}\2"),
    (rf"(?i)({_NAME}{_IS}){_VALUE}", rf"\1{MASK}"),
    # An option and its value: words of a line, or items of a list.
    (rf"(?i)((?<![\w-])-[\w-]{{0,64}}{_NAME}(?:[ \t]{{1,8}}|{_QUOTE},\s{{0,64}}){_QUOTE}?){_VALUE}", rf"\1{MASK}"),
]
"""(pattern, replacement). Each repetition is bounded: a long line must not take minutes."""


def mask_secrets(text: str) -> str:
    """Mask what looks like a secret: passwords in URLs and assignments, tokens of known services, keys."""
    for pattern, replacement in _SHAPES:
        text = re.sub(pattern, replacement, text)
    return text


def secret_values(environ: Mapping[str, str]) -> set[str]:
    """Values of the variables whose names say that they hold a secret."""
    return {value for name, value in environ.items() if not name.startswith("FALLOW_") and _VARIABLE.search(name)}


class Redaction:
    """Replaces secrets by `***`, home folders by `~` and user names by `USER`."""

    def __init__(self, secrets: Iterable[str] = (), homes: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        # A short value, such as `1` or `true`, stands in texts for other reasons. JSON has a spelling of its own.
        spelled = {spelling for text in secrets if len(text) >= 6 for spelling in (text, json.dumps(text)[1:-1])}
        self._secrets = sorted(spelled, key=len, reverse=True)
        self._home = re.compile(rf"{_any_of(set(homes) - {'', '/'})}(?![\w-])")
        names = _any_of(name for name in set(users) - _IMPERSONAL if not name.isdecimal())
        # JSON writes a line end before a name as `\n`, which is no part of the name.
        self._user = re.compile(rf"(?i)(?<=/home/)[^/\s\"',:;\\]+|(?:(?<![a-z0-9])|(?<=\\[nrt])){names}(?![a-z0-9])")

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return self._user.sub("USER", self._home.sub("~", mask_secrets(text)))


def _any_of(texts: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, texts)) or '(?!)'})"
