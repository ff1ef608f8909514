"""The files of a Hub repository that go with its weights: tokenizer, licence and card."""

import shutil
import warnings
from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

__all__ = ["COMPANION_FILES", "TOKENIZER_FILES", "carry_companions", "companions_of", "fetch_companions"]

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
COMPANION_FILES: Final = (*TOKENIZER_FILES, "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "README.md")
_PROCESSOR_FILES: Final = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def companions_of(folder: Path) -> list[Path]:
    """List the companion files that a folder with a checkpoint has."""
    patterns = (*COMPANION_FILES, *_PROCESSOR_FILES)
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def carry_companions(source: Path, target: Path) -> None:
    """Copy the companion files of one folder with a checkpoint to another, which has none of them yet."""
    for path in companions_of(source):
        copied = target / path.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)


def fetch_companions(repo_id: str, revision: str | None, token: str | bool | None = None) -> Path | None:
    """Return a local folder with the companion files of a repository, fetched unless they are cached.

    None, after a warning, when they cannot be fetched: a model is complete without them, but has no tokenizer.
    """
    try:
        patterns = [*COMPANION_FILES, *_PROCESSOR_FILES]
        return Path(snapshot_download(repo_id, revision=revision, token=token, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        warnings.warn(
            f"tokenizer and licence files of {repo_id} cannot be fetched ({type(error).__name__}); the output has none",
            stacklevel=2,
        )
        return None
