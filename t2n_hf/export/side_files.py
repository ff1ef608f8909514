"""Files beside the archive (configuration, tokenizer, licence), without a trace of where they were made."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from t2n_hf.errors import ConfigError, FormatError
from t2n_hf.hf.companions import TOKENIZER_FILES

__all__ = ["copy_companions", "save_tokenizer", "scrub", "write_config"]

_LICENSE_FILES: Final = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")

# Said of the machine, or of weights that the export folder does not hold.
_DROPPED_KEYS: Final = frozenset(
    {
        "_name_or_path",
        "_model_name_or_path",
        "_commit_hash",
        "_from_model_config",
        "name_or_path",
        "auto_map",
        "is_local",
        "local_files_only",
        "quantization_config",
    }
)
# Texts of the model itself: a token may look like a path.
_KEPT_KEYS: Final = frozenset({"added_tokens_decoder", "added_tokens", "chat_template", "vocab", "merges"})
_LOCAL_PATH: Final = re.compile(r"(/[^/\s]+){2,}/?|~/.*|[A-Za-z]:[\\/].*|file://.*")


def scrub(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return JSON data without the keys and values that name a place on this machine. Does not modify `value`."""
    if isinstance(value, dict):
        return {
            key: item if key in _KEPT_KEYS else scrub(item)
            for key, item in value.items()
            if key not in _DROPPED_KEYS and not _is_local_path(item)
        }
    if isinstance(value, list):
        return [scrub(item) for item in value if not _is_local_path(item)]
    return value


def _is_local_path(value: object) -> bool:
    return isinstance(value, str) and _LOCAL_PATH.fullmatch(value) is not None


def write_config(config: Any, folder: Path, name: str) -> None:  # noqa: ANN401 - a transformers configuration
    """Write `config` (an object with `to_diff_dict` or `to_dict`) as `<folder>/<name>`, scrubbed, keys in order."""
    as_dict = config.to_diff_dict() if hasattr(config, "to_diff_dict") else config.to_dict()
    _write_json(folder / name, json.loads(json.dumps(as_dict, default=str)))


def _write_json(path: Path, value: Any) -> None:  # noqa: ANN401 - JSON
    path.write_text(json.dumps(scrub(value), indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_companions(source: Path, folder: Path, *, tokenizer: bool) -> None:
    """Copy the licence files of a checkpoint folder, and its tokenizer files when `tokenizer` is set.

    Raises FormatError for a file that should be JSON and is not.
    """
    for path in _matching(source, _LICENSE_FILES + (TOKENIZER_FILES if tokenizer else ())):
        _copy_scrubbed(path, folder / path.relative_to(source))


def save_tokenizer(tokenizer: Any, folder: Path, scratch: Path) -> None:  # noqa: ANN401 - a tokenizer or processor
    """Have `tokenizer` save itself and take over its files, scrubbed. `scratch` is an empty place to do it in.

    Raises ConfigError when it cannot save itself.
    """
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(
            f"tokenizer of type {type(tokenizer).__name__} has no save_pretrained; expected a tokenizer, "
            "a processor, or a folder that holds their files"
        )
    scratch.mkdir()
    try:
        tokenizer.save_pretrained(str(scratch))
        for path in sorted(p for p in scratch.rglob("*") if p.is_file()):
            _copy_scrubbed(path, folder / path.relative_to(scratch))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _matching(source: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(path for path in source.glob(pattern) if path.is_file())


def _copy_scrubbed(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # tokenizer.json holds only the vocabulary and its rules, and is long to parse.
    if PurePosixPath(source.name).suffix != ".json" or source.name in {"tokenizer.json", "vocab.json"}:
        shutil.copyfile(source, target)
        return
    try:
        value = json.loads(source.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one too
        raise FormatError(f"{source} is no JSON: {error}; repair it, or give tokenizer=") from error
    _write_json(target, value)
