import subprocess
import sys
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np
import pytest
import yaml
from hub_folders import make_export, write_manifest
from hub_server.repositories import card_problems

from t2n_hf.hub.card import build_card, is_hub_id, read_card_metadata


@pytest.fixture
def manifest(tmp_path):
    return write_manifest(make_export(tmp_path / "export"))


def metadata_of(text):
    assert card_problems(text) == ([], [])
    return yaml.safe_load(text.split("---\n")[1])


def test_metadata_is_what_the_hub_accepts(manifest):
    source = {"license": "other", "license_name": "tiny-license", "license_link": "LICENSE", "language": ["en", "no"]}
    assert metadata_of(build_card(manifest, source)) == source | {
        "base_model": "someone/tiny",
        "base_model_relation": "quantized",
        "library_name": "tract",
        "pipeline_tag": "text-generation",
        "tags": ["nnef", "tract", "t2n_hf", "q4_0"],
    }


def test_the_same_manifest_gives_the_same_card(manifest):
    source = {"license": "mit", "language": "en"}
    assert build_card(manifest, source) == build_card(manifest, dict(reversed(source.items())))


@pytest.mark.parametrize(
    "base", [None, "/home/alice/tiny", "./tiny", "../a/b", "tiny", "C:\\models\\tiny", "~/tiny", "a/b/c"]
)
def test_a_base_model_that_is_no_hub_id_is_left_out(manifest, base):
    text = build_card(replace(manifest, source={"id": base, "revision": None}))
    assert "base_model" not in metadata_of(text)
    assert not base or PurePosixPath(base).name == "tiny" or base not in text
    assert "/home/alice" not in text
    assert not is_hub_id(base)


def test_a_dense_export_is_not_called_quantized(manifest):
    text = build_card(replace(manifest, weights="none", dtype="f16"))
    assert "base_model_relation" not in metadata_of(text)
    assert "import t2n_hf`" not in text


def test_only_allowed_keys_in_a_known_form_are_copied(manifest):
    source = {
        "license": "mit\nbase_model: evil/model",
        "license_link": "file:///home/alice/LICENSE",
        "license_name": "<script>",
        "language": ["en", "/home/alice", 3, {"a": "b"}],
        "model-index": [{"name": "x"}],
        "base_model": "/home/alice/tiny",
        "extra_gated_prompt": "x",
        "datasets": ["/data/private"],
    }
    metadata = metadata_of(build_card(manifest, source))
    assert metadata["language"] == ["en"]
    assert metadata["base_model"] == "someone/tiny"
    assert not metadata.keys() & {
        "license",
        "license_link",
        "license_name",
        "model-index",
        "extra_gated_prompt",
        "datasets",
    }


def test_the_card_says_how_to_run_the_model(manifest):
    text = build_card(manifest, repo_id="alice/tiny-q4")
    for told in (
        'TractModelForCausalLM.from_pretrained("alice/tiny-q4")',
        "t2n-hf generate alice/tiny-q4 --prompt",
        'pull_nnef_from_hub("alice/tiny-q4")',
        "tract model.nnef.tgz --nnef-tract-core",
        'loader.load("model.nnef.tgz")',
        "tract 0.23.9",
        "only after `import t2n_hf`",
        "| input | `x` | f32 | [1, 4] |",
    ):
        assert told in text
    assert "<repo>" not in text


@pytest.mark.tract
def test_what_the_card_says_of_tract_runs(tmp_path):
    folder = make_export(tmp_path / "export", numbers=np.eye(4, dtype=np.float32))
    code = (
        (folder / "README.md").read_text().split("## Run it in tract alone")[1].split("```python\n")[1].split("```")[0]
    )
    code += "import numpy\nprint(model.run([numpy.ones((1, 4), numpy.float32)])[0].to_numpy())"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout == "[[1. 1. 1. 1.]]\n"


def test_an_encoder_is_not_told_to_generate(manifest):
    text = build_card(replace(manifest, task="feature-extraction"))
    assert "generate" not in text
    assert metadata_of(text)["pipeline_tag"] == "feature-extraction"


def test_a_long_interface_is_cut_short(manifest):
    inputs = [{"name": f"in_cache_key_{i}", "dtype": "f32", "shape": [1, 2, "P", 4]} for i in range(60)]
    text = build_card(replace(manifest, inputs=inputs, symbols=["S", "P"], max_context=2048))
    assert text.count("in_cache_key_") < 12
    assert "At most 2048 positions" in text


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        ("---\nlicense: mit\n---\nbody", {"license": "mit"}),
        ("---\r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
        ("no metadata", {}),
        ("---\n[1, 2]\n---\n", {}),
        ("---\na: b: c\n---\n", {}),
        ("---\na: !!python/object/apply:os.system [id]\n---\n", {}),
        ("---\n" + "[" * 1000 + "\n---\n", {}),
        ("---\n" + "a" * 100_000 + ": 1\n---\n", {}),
    ],
    ids=["plain", "windows", "none", "list", "broken", "code", "deep", "long"],
)
def test_metadata_of_a_foreign_card_is_read_as_data(readme, expected):
    assert read_card_metadata(readme) == expected


def test_the_card_of_several_graphs_has_a_table_for_each_and_says_how_they_meet(manifest):
    part = {"archive": manifest.archive, "inputs": manifest.inputs, "outputs": manifest.outputs, "symbols": ["S", "E"]}
    encoder = {**part, "name": "encoder", "archive": "encoder.nnef.tgz", "outputs": [], "symbols": ["B", "E"]}
    parts = [encoder, {**part, "name": "decoder"}]
    files = {**manifest.files, "encoder.nnef.tgz": next(iter(manifest.files.values()))}
    text = build_card(replace(manifest, parts=parts, files=files, task="text2text-generation"))
    metadata_of(text)
    assert "TractModelForSeq2SeqLM" in text
    assert "### encoder" in text
    assert "### decoder" in text
    assert "Free dimensions: `B`, `E`, `S`." in text
    assert 'encoder = loader.load("encoder.nnef.tgz")' in text
    assert "takes that output" in text
    assert "t2n-hf generate" not in text
