"""The model card of an export: valid Hub metadata and how to run the archive.

The card is a pure function of the manifest and of a few allowed keys of the source model's card, so the same export
has the same card. It never holds a local path.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from t2n_hf.store.manifest import MANIFEST_NAME, ExportManifest

__all__ = ["THIS_REPO", "build_card", "is_hub_id", "name_repo", "read_card_metadata"]

THIS_REPO: Final = "<repo>"

_FRONT_MATTER: Final = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_MAX_METADATA_LENGTH: Final = 1 << 16
_MAX_VALUE_LENGTH: Final = 200
_MAX_LANGUAGES: Final = 200
_MAX_ROWS: Final = 12
_REVISION: Final = re.compile(r"[0-9a-f]{40}")
_LICENSE: Final = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LANGUAGE: Final = re.compile(r"[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*|code|multilingual")
_LICENSE_LINK: Final = re.compile(r"https://[^\s\"'<>]+|(?:LICENSE|NOTICE|USE_POLICY)[A-Za-z0-9._-]*")
_LICENSE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .,()+_-]*")
_PIPELINE_TAGS: Final = frozenset(
    (
        "text-generation",
        "fill-mask",
        "feature-extraction",
        "sentence-similarity",
        "text-classification",
        "token-classification",
        "question-answering",
        "translation",
        "summarization",
        "image-classification",
        "image-text-to-text",
        "text-ranking",
        "automatic-speech-recognition",
        "audio-classification",
        "object-detection",
        "image-segmentation",
    )
)
_DENSE: Final = frozenset({"", "none", "dense", "f32", "f16", "bf16"})


def is_hub_id(text: str | None) -> bool:
    """Whether `text` is written like a Hub id with an owner: `owner/name`."""
    if not isinstance(text, str) or text.count("/") != 1:
        return False
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return not text.startswith((".", "~"))


def read_card_metadata(readme: str) -> dict[str, Any]:
    """Return the YAML block at the top of a README as plain data; {} when there is none or it is broken."""
    match = _FRONT_MATTER.match(readme)
    if match is None or len(match[1]) > _MAX_METADATA_LENGTH:
        return {}
    try:
        data = yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return {key: value for key, value in data.items() if isinstance(key, str)} if isinstance(data, dict) else {}


def build_card(
    manifest: ExportManifest, source_metadata: Mapping[str, Any] | None = None, *, repo_id: str | None = None
) -> str:
    """Return the README.md of an export.

    `source_metadata` is the card of the source model as plain data (`read_card_metadata`); only its licence keys and
    languages are copied, and only when well formed. Without `repo_id` the text says `<repo>`, which a push replaces.
    """
    metadata = _metadata(manifest, source_metadata or {}).to_yaml()
    sections = [_title(manifest), *_running(manifest), _interface(manifest), _files(manifest), _origin(manifest)]
    text = f"---\n{metadata}\n---\n\n" + "\n\n".join(sections) + "\n"
    return name_repo(text, repo_id) if repo_id else text


def name_repo(card: str, repo_id: str) -> str:
    """Put `repo_id` where a card says `<repo>`."""
    return card.replace(THIS_REPO, repo_id)


def _metadata(manifest: ExportManifest, source: Mapping[str, Any]) -> ModelCardData:
    base = _source_id(manifest)
    tags = ["nnef", "tract", "t2n_hf", *([_weights(manifest)] if _is_quantized(manifest) else [])]
    return ModelCardData(
        base_model=base,
        base_model_relation="quantized" if base and _is_quantized(manifest) else None,
        library_name="tract",  # else the Hub concludes from config.json that transformers loads this
        pipeline_tag=manifest.task if manifest.task in _PIPELINE_TAGS else None,
        tags=tags,
        **_copied(source),
    )


def _copied(source: Mapping[str, Any]) -> dict[str, Any]:
    forms = {"license": _LICENSE, "license_name": _LICENSE_NAME, "license_link": _LICENSE_LINK}
    copied: dict[str, Any] = {}
    for key, form in forms.items():
        value = source.get(key)
        if isinstance(value, str) and len(value) <= _MAX_VALUE_LENGTH and form.fullmatch(value):
            copied[key] = value
    languages = source.get("language")
    languages = [languages] if isinstance(languages, str) else languages
    if isinstance(languages, list) and 0 < len(languages) <= _MAX_LANGUAGES:
        # YAML 1.1 reads the language `no` as False.
        named = ["no" if language is False else language for language in languages]
        kept = [language for language in named if isinstance(language, str) and _LANGUAGE.fullmatch(language)]
        copied["language"] = kept or None
    return copied


def _source_id(manifest: ExportManifest) -> str | None:
    return manifest.source_id if is_hub_id(manifest.source_id) else None


def _weights(manifest: ExportManifest) -> str:
    return manifest.weights.lower()


def _is_quantized(manifest: ExportManifest) -> bool:
    return _weights(manifest) not in _DENSE


def _title(manifest: ExportManifest) -> str:
    base = _source_id(manifest)
    name = base.rpartition("/")[2] if base else manifest.model_type or "A model"
    numbers = f"{_weights(manifest)} weights, {manifest.dtype}" if _is_quantized(manifest) else manifest.dtype
    of = f" of [{base}](https://huggingface.co/{base})" if base else ""
    return (
        f"# {name} for tract ({numbers})\n\n"
        f"An NNEF export{of} that [tract](https://github.com/sonos/tract) runs on a CPU, without Python. "
        "Made with t2n_hf."
    )


def _running(manifest: ExportManifest) -> list[str]:
    fetch = (
        "## Fetch it\n\n"
        "```python\n"
        "from t2n_hf import pull_nnef_from_hub\n\n"
        f'folder = pull_nnef_from_hub("{THIS_REPO}")  # checks the sha256 of every file\n'
        "```\n\n"
        f"or `t2n-hf pull {THIS_REPO}`."
    )
    sections = [fetch]
    if set(manifest.archives) == {"encoder", "decoder"}:
        sections.append(_encoder_decoder_example())
    if manifest.task == "text-generation" and not manifest.parts:
        sections.append(
            "## Generate text\n\n"
            "```sh\n"
            f't2n-hf generate {THIS_REPO} --prompt "Once upon a time"\n'
            "```\n\n"
            "```python\n"
            "from t2n_hf import TractModelForCausalLM\n"
            "from transformers import AutoTokenizer\n\n"
            f'model = TractModelForCausalLM.from_pretrained("{THIS_REPO}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{THIS_REPO}")\n'
            'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))\n"
            "```"
        )
    sections.append(_alone(manifest))
    if manifest.least_tract:
        tried = manifest.versions.get("tract")
        run = f"; it was run with {tried}" if tried else ""
        sections.append(f"It needs tract {manifest.least_tract} or later{run}.")
    return sections


def _encoder_decoder_example() -> str:
    return (
        "## Use it\n\n"
        "```python\n"
        "from t2n_hf import TractModelForSeq2SeqLM\n"
        "from transformers import AutoProcessor\n\n"
        f'model = TractModelForSeq2SeqLM.from_pretrained("{THIS_REPO}")\n'
        f'processor = AutoProcessor.from_pretrained("{THIS_REPO}")  # of texts a tokenizer, of images and sounds more\n'
        'inputs = processor("What the model takes", return_tensors="pt")\n'
        "print(processor.batch_decode(model.generate(**inputs, max_new_tokens=40)))\n"
        "```"
    )


def _alone(manifest: ExportManifest) -> str:
    load = "\n".join(
        f'{name} = loader.load("{archive}").into_runnable()' for name, archive in manifest.archives.items()
    )
    run = "# model.run([...]) takes the inputs below in their order, and gives the outputs in theirs\n"
    if manifest.parts:
        run = (
            "# .run([...]) takes the inputs below in their order. An input with the name of an output of another part\n"
            "# takes that output; out_cache_* of one call of the decoder are in_cache_* of the next.\n"
        )
    return (
        "## Run it in tract alone\n\n"
        "```python\n"
        "import tract\n\n"
        "loader = tract.nnef().with_tract_transformers().with_tract_extra().with_extended_identifier_syntax()\n"
        f"{load}\n{run}"
        "```\n\n"
        "or, with the command line of tract:\n\n"
        "```sh\n"
        f"tract {manifest.archive} --nnef-tract-core --nnef-tract-transformers --nnef-tract-extra "
        "--nnef-extended-identifier dump\n"
        "```"
    )


def _interface(manifest: ExportManifest) -> str:
    tables = [f"### {part['name']}\n\n{_table(part['inputs'], part['outputs'])}" for part in manifest.parts] or [
        _table(manifest.inputs, manifest.outputs)
    ]
    everything = [symbol for part in manifest.parts for symbol in part["symbols"]] or manifest.symbols
    symbols = dict.fromkeys(everything)
    notes = []
    if symbols:
        notes.append(f"Free dimensions: {', '.join(f'`{symbol}`' for symbol in symbols)}.")
    if manifest.fixed_shapes:
        notes.append("It runs at these shapes alone: the model was captured at fixed lengths.")
    if manifest.reads:
        notes.append(f"It holds for inputs that answer the same as when it was captured: {'; '.join(manifest.reads)}.")
    if manifest.max_context:
        notes.append(f"At most {manifest.max_context} positions, past included.")
    return "\n\n".join(["## Inputs and outputs", *tables, *([" ".join(notes)] if notes else [])])


def _table(inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]]) -> str:
    rows = [_row("input", value) for value in inputs] + [_row("output", value) for value in outputs]
    shown = rows if len(rows) <= _MAX_ROWS else [*rows[: _MAX_ROWS // 2], "| ... | | | |", *rows[-_MAX_ROWS // 2 :]]
    return "\n".join(["| | name | dtype | shape |", "|---|---|---|---|", *shown])


def _row(kind: str, value: Mapping[str, Any]) -> str:
    shape = ", ".join(str(dim) for dim in value["shape"])
    return f"| {kind} | `{value['name']}` | {value['dtype']} | [{shape}] |"


def _files(manifest: ExportManifest) -> str:
    size = sum(entry.size for entry in manifest.files.values())
    text = f"## Files\n\n{len(manifest.files)} files, {size / 1e6:.1f} MB; `{MANIFEST_NAME}` has the sha256 of each."
    if manifest.dense:
        text += (
            f" Weights that could have been quantized and are not: {len(manifest.dense)}; the reasons are there too."
        )
    return text


def _origin(manifest: ExportManifest) -> str:
    revision = manifest.source.get("revision")
    at = f", revision `{revision}`" if revision and _REVISION.fullmatch(revision) else ""
    base = _source_id(manifest)
    lines = ["## Origin", f"Exported from [{base}](https://huggingface.co/{base}){at}."] if base else ["## Origin"]
    if _is_quantized(manifest):
        lines.append(
            "transformers does not load this archive. It does load a checkpoint that t2n_hf saved with "
            f"{_weights(manifest)} weights, but only after `import t2n_hf`: without it, transformers warns and starts "
            "with random weights."
        )
    if manifest.versions:
        lines.append(
            "Made with " + ", ".join(f"{name} {number}" for name, number in sorted(manifest.versions.items())) + "."
        )
    return "\n\n".join(lines)
