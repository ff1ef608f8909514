"""The files of a Hub repository that go with its weights: tokenizer, licence and card."""

import warnings
from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

__all__ = ["COMPANION_FILES", "TOKENIZER_FILES", "fetch_companions"]

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


def fetch_companions(repo_id: str, revision: str | None) -> Path | None:
    """Return a local folder with the companion files of a repository, fetched unless they are cached.

    None, after a warning, when they cannot be fetched: an export is complete without them, but has no tokenizer.
    """
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(COMPANION_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        warnings.warn(
            f"tokenizer and licence files of {repo_id} cannot be fetched ({type(error).__name__}); give tokenizer= to "
            "have them in the export",
            stacklevel=2,
        )
        return None
