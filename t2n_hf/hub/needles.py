"""What must not become public: secrets, local paths, and the names of a user or a machine, as byte patterns."""

import contextlib
import getpass
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["LocalFacts", "Needle", "needles"]

_MIN_NAME_LENGTH: Final = 4
_WORD: Final = rb"A-Za-z0-9_\x80-\xff"

# Names that any card, chat template or graph uses as a word: they say nothing of a person or a machine.
_ORDINARY_NAMES: Final = frozenset(
    (
        "admin",
        "administrator",
        "assistant",
        "build",
        "builder",
        "container",
        "data",
        "debian",
        "docker",
        "fedora",
        "guest",
        "home",
        "host",
        "local",
        "localdomain",
        "localhost",
        "main",
        "model",
        "models",
        "node",
        "nobody",
        "project",
        "python",
        "root",
        "runner",
        "server",
        "system",
        "test",
        "tester",
        "tests",
        "tract",
        "ubuntu",
        "user",
        "username",
        "users",
        "work",
        "worker",
        "workspace",
    )
)

_SECRETS: Final = (
    ("a Hugging Face token", rb"(?<![A-Za-z0-9])hf_(?:oauth_|jwt_)?[A-Za-z0-9]{20,}"),
    ("a GitHub token", rb"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{22,})"),
    ("an AWS key", rb"(?<![A-Za-z0-9])AKIA[0-9A-Z]{16}(?![A-Za-z0-9])"),
    ("a private key", rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
)
_PLACES: Final = (
    ("a file:// address", rb"(?i:file)://"),
    ("a path in a user's folder", rb"(?i:[A-Z]:[\\/]+Users[\\/])"),
    ("a path in a user's folder", rb"(?<![%b.])/(?:home|Users)/[%b.-]+/" % (_WORD, _WORD)),
)


@dataclass(frozen=True)
class Needle:
    """One thing to look for: what to call it, how it looks, and whether a vocabulary may hold it by chance."""

    kind: str
    pattern: re.Pattern[bytes]
    in_vocabulary: bool


@dataclass(frozen=True, kw_only=True)
class LocalFacts:
    """What is private about this process. `token` is the one that will be used; no field is ever shown."""

    token: str | None = field(default=None, repr=False)
    paths: tuple[str, ...] = field(default=(), repr=False)
    names: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def gather(cls, token: str | None, folder: Path, public_ids: Iterable[str] = ()) -> "LocalFacts":
        """Collect the home, working, temporary and export folders, the user and the host.

        Words of `public_ids`, the Hub ids that the card names on purpose, are not private: a user is often called like
        the owner of the repository.
        """
        public = {word.casefold() for text in public_ids for word in (*text.split("/"), *re.split(r"[/._-]", text))}
        places = [Path.home(), Path.cwd(), Path(tempfile.gettempdir()), folder, folder.parent]
        paths = {form for place in places for form in (os.path.abspath(place), os.path.realpath(place))}
        names = {name for name in _names_of_this_machine() if name.casefold() not in public}
        return cls(token=token, paths=tuple(sorted(paths)), names=tuple(sorted(names)))


def _names_of_this_machine() -> Iterator[str]:
    with contextlib.suppress(OSError, KeyError, ImportError):  # a user id without a name
        yield getpass.getuser()
    yield Path.home().name
    host = socket.gethostname()
    yield host
    yield host.split(".")[0]


def needles(facts: LocalFacts) -> tuple[Needle, ...]:
    """Return all that is looked for: the general secrets and paths, and this machine's own."""
    found = [Needle(kind, re.compile(pattern), True) for kind, pattern in _SECRETS]
    if facts.token:
        found.append(Needle("the token in use", re.compile(re.escape(facts.token.encode())), True))
    found += [Needle(kind, re.compile(pattern), False) for kind, pattern in _PLACES]
    found += [Needle("a path of this machine", pattern, True) for pattern in map(_path_pattern, facts.paths) if pattern]
    for name in facts.names:
        if len(name) >= _MIN_NAME_LENGTH and name.casefold() not in _ORDINARY_NAMES:
            word = rb"(?<![%b])%b(?![%b])" % (_WORD, re.escape(name.encode()), _WORD)
            found.append(Needle("the name of this user or machine", re.compile(word), False))
    return tuple(found)


def _path_pattern(path: str) -> re.Pattern[bytes] | None:
    """How `path` looks in a text, with any slash spelling; None for a root, which says nothing."""
    parts = [part for part in re.split(r"[\\/]+", path) if part]
    if not parts or (len(parts) == 1 and ":" in parts[0]):
        return None
    lead = b"" if ":" in parts[0] else rb"[\\/]+"
    body = lead + rb"[\\/]+".join(re.escape(os.fsencode(part)) for part in parts)
    if len(parts) == 1:  # "/tmp" or "/root" alone is a word; what lies below it is a path
        return re.compile(rb"(?<![%b.:/\\])%b[\\/]+[%b.]" % (_WORD, body, _WORD))
    return re.compile(body + rb"(?![%b-])" % _WORD)
