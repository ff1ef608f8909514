"""A small export folder made by hand, and the environment of a process that talks to the stand-in."""

import json
import os

import numpy as np

from t2n_hf.hub.card import build_card
from t2n_hf.nnef.archive import ArchiveWriter
from t2n_hf.nnef.dat import array_payload
from t2n_hf.store.manifest import CARD_NAME, ExportManifest, list_files

GRAPH = """version 1.0;
extension tract_registry tract_core;
graph network(x) -> (y) {
    x = external<scalar>(shape = [1, 4]);
    w = variable<scalar>(label = "w", shape = [4, 4]);
    y = matmul(x, w);
}
"""
ARCHIVES = {"tgz": "model.nnef.tgz", "tar": "model.nnef.tar", "dir": "model"}


def write_archive(path, *, format="tgz", nbytes=2_000_000, seed=0, graph=GRAPH, label="w", numbers=None):
    if numbers is None:
        numbers = np.random.default_rng(seed).standard_normal(nbytes // 4, dtype=np.float32)
    with ArchiveWriter(path, format) as archive:
        archive.add_text("graph.nnef", graph)
        archive.add_dat(label, array_payload(numbers))
    return archive.files


def write_manifest(folder, archive="model.nnef.tgz", **changes):
    value = {"name": "x", "dtype": "f32", "shape": [1, 4]}
    known = {"archive": archive, "dtype": "f32", "weights": "q4_0", "task": "text-generation", "model_type": "llama"}
    known |= {"source": {"id": "someone/tiny", "revision": "a" * 40}, "versions": {"t2n_hf": "0.1.0"}}
    known |= {"inputs": [value], "outputs": [value | {"name": "y"}], "least_tract": "0.23.9"}
    manifest = ExportManifest(**(known | changes | {"files": list_files(folder)}))
    manifest.write(folder)
    return manifest


def make_export(folder, *, format="tgz", card=True, **archive_options):
    """Write an export into the new folder `folder`, and return the folder."""
    folder.mkdir(parents=True)
    write_archive(folder / ARCHIVES[format], format=format, **archive_options)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"john": 0, "user": 1}, "merges": []}}))
    (folder / "LICENSE").write_text("Do what you like.\n")
    manifest = write_manifest(folder, ARCHIVES[format])
    if card:
        (folder / CARD_NAME).write_text(build_card(manifest, {"license": "mit", "language": "en"}))
    return folder


def hub_environment(home, url, *, xet, token=None):
    """Environment of a process whose Hub is at `url`, with its own caches."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        inherited.pop(name, None)
    own = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"}
    own |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    own |= {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}  # the Hub is this process, which may wait
    if not xet:
        own["HF_HUB_DISABLE_XET"] = "1"
    if token is not None:
        own["HF_TOKEN"] = token
    return inherited | own
