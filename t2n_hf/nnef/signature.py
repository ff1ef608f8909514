"""The names of an archive's inputs and outputs, from the text of its graph.

tract names an output by the node that computes it, which inside a fragment is not the name in the text; the order is
that of the text.
"""

import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from t2n_hf.errors import ArchiveError, FormatError
from t2n_hf.nnef.sources import FolderSource, Source, TarSource

__all__ = ["Signature", "parse_signature", "read_signature"]

_GRAPH_FILE: Final = "graph.nnef"
_MAX_NBYTES: Final = 256 << 20
_COMMENT: Final = re.compile(r"#[^\n]*")
_SIGNATURE: Final = re.compile(r"^\s*graph\s+\w+\s*\(([^()]*)\)\s*->\s*\(([^()]*)\)", re.MULTILINE)


@dataclass(frozen=True)
class Signature:
    """Names of the inputs and the outputs, in their order."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def parse_signature(text: str) -> Signature:
    """Find `graph network(a, b) -> (c, d)` in the text of graph.nnef. Raises FormatError when it has no graph."""
    match = _SIGNATURE.search(_COMMENT.sub("", text))
    if match is None:
        raise FormatError(f"{_GRAPH_FILE} declares no graph; expected `graph name(inputs) -> (outputs)`")
    inputs, outputs = (tuple(name.strip() for name in names.split(",") if name.strip()) for names in match.groups())
    return Signature(inputs, outputs)


def read_signature(archive: str | Path) -> Signature:
    """Read the signature of a folder, .tar or .tgz; what follows graph.nnef in it is not looked at.

    Raises ArchiveError when it holds no graph.nnef or is damaged before it, FormatError as `parse_signature`.
    """
    path = Path(archive)
    source: Source = FolderSource(path) if path.is_dir() else TarSource(path, 1 << 62)
    with closing(source.members()) as members:  # type: ignore[type-var]
        for member, stream in members:
            if member.name == _GRAPH_FILE:
                return parse_signature(stream.read(min(member.nbytes, _MAX_NBYTES)).decode(errors="replace"))
            stream.skip(member.nbytes)
    raise ArchiveError(f"{path} holds no {_GRAPH_FILE}")
