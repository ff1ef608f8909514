"""Exports that were wrong, too large or half written elsewhere; values are held to PyTorch, files to their bytes."""

import contextlib
import errno
import getpass
import gzip
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import gguf
import models
import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from t2n_hf import T2NConfig, export_nnef
from t2n_hf.errors import (
    ConfigError,
    FormatError,
    MissingEmittersError,
    OutputExistsError,
    QuantizationError,
    StorageError,
    UnknownTagError,
)
from t2n_hf.nnef.archive import ArchiveReader
from t2n_hf.nnef.dat import HEADER_NBYTES
from t2n_hf.store.manifest import ExportManifest
from t2n_hf.tensor.offload import OffloadedTensor
from t2n_hf.tensor.quant.q4_0 import QTensorTractScaleOnly
from t2n_hf.tract.runner import TractRunner

pytestmark = pytest.mark.tract

DISK = {"": "disk"}
TABLE = "model.embed_tokens.weight"


def load(folder, quantization=None, **options):
    if quantization is not None:
        options["quantization_config"] = quantization
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)


def headers_in(report):
    reader = ArchiveReader(report.archive)
    return {label: reader.header(label) for label in reader.labels()}


def run(archive, inputs):
    with TractRunner(archive, timeout_s=60) as runner:
        return runner.run(inputs)


def prefill(model, archive, ids):
    """Logits of the last position: PyTorch's and the archive's."""
    with TractRunner(archive, timeout_s=60) as runner:
        shapes = {name: fact.shape for name, fact in runner.inputs.items() if name != "input_ids"}
        empty = {
            name: np.zeros([0 if str(size) == "P" else int(str(size)) for size in shape], np.float32)
            for name, shape in shapes.items()
        }
        got = runner.run({"input_ids": ids.numpy(), **empty})["outputs"]
    with torch.no_grad():
        return model(input_ids=ids).logits[:, -1:].numpy(), got


class Gathers(nn.Module):
    """Rows of a table at constant indices, and an addition."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Embedding(10, 64)
        self.table.weight = nn.Parameter(table, requires_grad=False)
        self.register_buffer("ids", torch.tensor([1, 7, 3]))

    def forward(self, x):
        return self.table(self.ids) + x


@pytest.mark.parametrize("kind", ["plain", "packed", "on disk", "packed on disk"])
def test_rows_at_constant_indices_have_the_values_of_the_table_however_it_is_held(kind, tmp_path):
    torch.manual_seed(3)
    values = torch.randn(10, 64)
    table = QTensorTractScaleOnly.quantize(values) if "packed" in kind else values
    rows = (table.to_base_tensor() if "packed" in kind else values)[[1, 7, 3]].numpy()
    if "disk" in kind:
        table = OffloadedTensor.from_original_tensor(table, "table")
    module = Gathers(table)
    shapes = ({0: torch.export.Dim("N")},)
    report = export_nnef(module, tmp_path / "out", example_args=(torch.randn(2, 3, 64),), dynamic_shapes=shapes)
    x = np.random.default_rng(0).standard_normal((5, 3, 64), dtype=np.float32)
    (got,) = run(report.archive, {"x": x}).values()
    np.testing.assert_allclose(got, rows + x, rtol=1e-6, atol=1e-6)


TIED = {
    "both": ({"embeddings": "q4_0", "lm_head": "q4_0"}, "q4_0"),
    "the embeddings": ({"embeddings": "q4_0"}, "q4_0"),
    "the head": ({"lm_head": "q4_0"}, "q4_0"),
    "neither": ({"embeddings": "none", "lm_head": "none"}, "f32"),
}


@pytest.mark.parametrize("choice", TIED)
def test_a_tied_table_is_exported_once_in_the_format_that_was_chosen(choice, tmp_path):
    options, kind = TIED[choice]
    packed = load(models.saved(models.m1(), tmp_path), T2NConfig(**options))
    saved = models.saved(packed, tmp_path)
    report = export_nnef(saved, tmp_path / "out", check=False)
    headers = headers_in(report)
    assert [(label, h.format) for label, h in headers.items() if h.shape == (256, 64)] == [(TABLE, kind)]
    expected, got = prefill(packed, report.archive, models.prompt(7))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [models.m4, models.m4_qwen3], ids=["mixtral", "qwen3_moe"])
def test_packed_experts_take_their_packed_bytes_and_no_more(make, tmp_path):
    model = make()
    report = export_nnef(model, tmp_path / "out", weights="q4_0", check=False)
    headers = headers_in(report)
    written = sum(h.nbytes for h in headers.values())
    experts = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    matrices = sum(m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head")
    routers = sum(p.numel() for n, p in model.named_parameters() if n.endswith(("mlp.gate.weight", "router.weight")))
    rest = sum(p.numel() for p in model.parameters()) - experts - matrices
    expected = (experts + matrices) // 32 * 18 + rest * 4
    assert written == pytest.approx(expected, rel=0.02)
    assert routers < rest


def test_the_file_halves_in_f16_and_every_weight_agrees(tmp_path):
    sizes, kinds = {}, {}
    for name, model, options in (
        ("f32", models.m1(), {}),
        ("f16", models.m1(), {"dtype": "f16"}),
        ("bf16", models.m8(), {}),
        ("bf16 to f16", models.m8(), {"dtype": torch.float16}),
    ):
        report = export_nnef(model, tmp_path / name, format="tar", check=False, **options)
        headers = headers_in(report)
        weights = dict(model.named_parameters(remove_duplicate=False))
        kinds[name] = {h.format for label, h in headers.items() if label in weights}
        assert {label for label in headers if label in weights} == set(dict(model.named_parameters()))
        overhead = sum(HEADER_NBYTES + 512 + 512 for _ in headers) + len(ArchiveReader(report.archive).text())
        sizes[name] = report.archive.stat().st_size - overhead
    assert kinds == {"f32": {"f32"}, "f16": {"f16"}, "bf16": {"f32"}, "bf16 to f16": {"f16"}}
    assert sizes["f16"] == pytest.approx(sizes["f32"] / 2, rel=0.05)
    assert sizes["bf16 to f16"] == pytest.approx(sizes["bf16"] / 2, rel=0.05)
    assert sizes["bf16"] == pytest.approx(sizes["f32"], rel=0.01)


@pytest.mark.parametrize("where", ["memory", "disk", "while exporting"])
def test_a_weight_that_is_stored_in_by_out_is_packed_the_way_tract_multiplies(where, tmp_path):
    source = models.m10()
    folder = models.saved(source, tmp_path)
    packed = load(folder, T2NConfig(embeddings="q4_0"))
    if where == "memory":
        report = export_nnef(packed, tmp_path / "out", check=False, format="dir")
    elif where == "disk":
        on_disk = load(folder, T2NConfig(embeddings="q4_0"), device_map=DISK)
        report = export_nnef(on_disk, tmp_path / "out", check=False, format="dir")
    else:
        options = {"weights": "q4_0", "embeddings": "q4_0"}
        report = export_nnef(source, tmp_path / "out", check=False, format="dir", **options)
    headers = headers_in(report)
    assert headers["transformer.h.0.mlp.c_fc.weight"].shape == (256, 64)  # out, in
    assert [h.format for h in headers.values() if h.shape == (256, 64) and h.format != "q4_0"] == []
    twin = models.m10()
    for label, header in headers.items():
        if header.format != "q4_0":
            continue
        raw = np.fromfile(report.archive / f"{label}.dat", np.uint8)[HEADER_NBYTES:].reshape(-1, 18)
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_0).reshape(header.shape)
        with torch.no_grad():
            parameter = twin.get_parameter(label)
            held = torch.from_numpy(values)
            parameter.copy_(held if "wte" in label else held.T)
    expected, got = prefill(twin, report.archive, models.prompt(9))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)


def fail_after(share):
    def progress(done, total):
        if done >= total * share:
            raise KeyboardInterrupt

    return progress


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A complete export, to be copied."""
    report = export_nnef(models.m1(), tmp_path_factory.mktemp("finished") / "out", check=False)
    return report.folder


@pytest.mark.parametrize(("format", "share"), [("tgz", 0.0), ("tgz", 1.0), ("dir", 0.5)])
def test_an_export_that_ends_half_way_leaves_nothing_or_the_older_one(format, share, finished, tmp_path):
    options = {"check": False, "format": format, "on_progress": fail_after(share)}
    with pytest.raises(KeyboardInterrupt):
        export_nnef(models.m2(), tmp_path / "out", **options)
    assert os.listdir(tmp_path) == []
    shutil.copytree(finished, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        export_nnef(models.m2(), tmp_path / "out", overwrite=True, **options)
    assert contents(tmp_path / "out") == contents(finished)
    assert os.listdir(tmp_path) == ["out"]


def contents(folder):
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# A limit on the size of files stands in for a full disk: it needs no mount. Each export is a fork, so that the imports
# are paid once.
_CHILDREN = """
import os, resource, signal, sys
sys.path.insert(0, sys.argv[1])
import models, torch
from t2n_hf import export_nnef
from t2n_hf.errors import StorageError
torch.set_num_threads(1)
model = models.m2()
# One export first: what is imported and compiled on the way belongs to no child.
export_nnef(model, sys.argv[2], check=False)
print("ready", flush=True)
for line in sys.stdin:
    limit, target = line.strip().split(" ", 1)
    child = os.fork()
    if child == 0:
        if limit != "-":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
        try:
            export_nnef(model, target, check=False, overwrite=True)
        except StorageError as error:
            print("refused", error.errno, str(error).replace(chr(10), " "), flush=True)
        os._exit(0)
    print("child", child, flush=True)
    os.waitpid(child, 0)
    print("done", flush=True)
"""


class Children:
    """A process that exports the same model again and again, each time in a child of its own."""

    def __init__(self, first):
        command = [sys.executable, "-W", "ignore", "-c", _CHILDREN, str(Path(models.__file__).parent), str(first)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, **pipes)
        assert self._line() == "ready"

    def _line(self):
        return self.process.stdout.readline().strip()

    def export(self, target, *, limit="-", kill_after_s=None):
        """Export to `target`; returns what the child printed."""
        self.process.stdin.write(f"{limit} {target}\n")
        self.process.stdin.flush()
        lines = []
        while (line := self._line()) != "done":
            assert line, "the process has ended"
            if not line.startswith("child"):
                lines.append(line)
            elif kill_after_s is not None:
                time.sleep(kill_after_s)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line.split()[1]), signal.SIGKILL)
        return lines

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


@pytest.fixture(scope="module")
def newer(tmp_path_factory):
    """Where `children` exported first."""
    return tmp_path_factory.mktemp("newer") / "out"


@pytest.fixture(scope="module")
def children(newer):
    if not hasattr(os, "fork"):
        pytest.skip("the children are forks")
    started = Children(newer)
    yield started
    started.close()


@pytest.mark.parametrize("older", [False, True], ids=["first", "over an older one"])
def test_a_full_disk_is_an_error_that_leaves_nothing_or_the_older_export(older, children, finished, tmp_path):
    target = tmp_path / "out"
    if older:
        shutil.copytree(finished, target)
    for limit in (0, 100_000, 300_000):
        (told,) = children.export(target, limit=limit)
        assert told.startswith(f"refused {errno.EFBIG} "), told
        assert "cannot write" in told
        assert "free some space" in told
        assert os.listdir(tmp_path) == (["out"] if older else [])
        assert not older or contents(target) == contents(finished)


def test_an_export_killed_at_any_point_leaves_a_complete_one(children, newer, finished, tmp_path):
    target = tmp_path / "out"
    shutil.copytree(finished, target)
    complete = [contents(finished), contents(newer)]
    assert complete[0] != complete[1]
    started = time.monotonic()
    children.export(tmp_path / "timed")
    whole_s = time.monotonic() - started
    for step in range(8):
        children.export(target, kill_after_s=whole_s * (0.3 + 0.1 * step))
        assert contents(target) in complete
        ExportManifest.read(target).verify(target)
        assert set(os.listdir(tmp_path)) <= {"out", "timed", ".out.t2n-partial", ".out.t2n-old"}
    children.export(target)
    assert contents(target) == complete[1]
    assert sorted(os.listdir(tmp_path)) == ["out", "timed"]


def test_a_weight_of_4_gib_is_refused_by_name_before_anything_is_read_or_written(tmp_path):
    module = nn.Sequential(nn.Linear(4, 1 << 15, bias=False), nn.Linear(1, 1, bias=False))
    # 4 GiB in f32, of one value: whoever read it would notice.
    module[1].weight = nn.Parameter(torch.ones(1, 1).expand(1 << 15, 1 << 15), requires_grad=False)
    started, told = time.process_time(), []
    options = {"check": False, "on_progress": lambda *now: told.append(now)}
    with pytest.raises(FormatError, match=r"1\.weight.*4 GiB|4 GiB.*1\.weight"):
        export_nnef(module, tmp_path / "out", example_args=(torch.zeros(1, 4),), **options)
    assert told == []
    assert time.process_time() - started < 20
    assert os.listdir(tmp_path) == []


_BY_USER = """
import os, sys
os.umask(int(sys.argv[3], 8))
import torch
from t2n_hf import export_nnef
torch.set_num_threads(1)
export_nnef(sys.argv[1], sys.argv[2], weights="q4_0", check=False)
"""


def test_two_users_in_two_places_write_the_same_bytes_and_nothing_of_themselves(tmp_path):
    source = models.saved(models.m1(), tmp_path)
    processes = []
    for number, user in enumerate(("annabelle", "zebedeus")):
        home = tmp_path / f"home-of-{user}"
        shutil.copytree(source, home / f"checkpoint-of-{user}")
        environment = {**os.environ, "HOME": str(home), "USER": user, "LOGNAME": user, "HF_HOME": str(home)}
        environment |= {"TZ": ("UTC", "Asia/Tokyo")[number], "PYTHONHASHSEED": str(number + 1), "OMP_NUM_THREADS": "1"}
        arguments = [home / f"checkpoint-of-{user}", home / "out", ("022", "077")[number]]
        command = [sys.executable, "-c", _BY_USER, *map(str, arguments)]
        processes.append(subprocess.Popen(command, cwd=home, env=environment, stderr=subprocess.PIPE, text=True))
    for process in processes:
        told = process.communicate(timeout=120)[1]
        assert process.returncode == 0, told
    outs = [tmp_path / f"home-of-{user}" / "out" for user in ("annabelle", "zebedeus")]
    assert contents(outs[0]) == contents(outs[1])
    assert len(contents(outs[0])) == 5
    names = {socket.gethostname(), getpass.getuser(), str(Path.home()), sys.executable}
    marks = {name for name in names if len(name) > 5}  # "root" and "vm" are in any text
    marks |= {str(tmp_path), "home-of", "checkpoint-of", "annabelle", "zebedeus", "PYTHONHASHSEED", "umask"}
    for path in outs[1].iterdir():
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".tgz" else data
        assert [mark for mark in marks if mark.encode() in data] == [], path.name


class Solver(nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x)


class Wave(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wave = Wave()

    def forward(self, x):
        return self.wave(x) + x


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.end = Solver()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


@pytest.mark.parametrize("capture", ["auto", "whole"])
def test_every_operator_without_an_emitter_is_listed_with_each_module_that_uses_it(capture, tmp_path):
    with pytest.raises(MissingEmittersError) as error:
        export_nnef(Outer(), tmp_path / "out", example_args=(torch.randn(3, 3),), capture=capture)
    told = str(error.value)
    blocks = told.split("\n  aten.")[1:]
    assert any("svd" in block and "in end:" in block for block in blocks), told
    assert any("bessel" in block and "wave:" in block and "layers" in block for block in blocks), told
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "where"),
    [({}, "loaded"), ({"dtype": "f16"}, "folder"), ({"weights": "q4_0"}, "loaded"), ({"weights": "q4_0"}, "folder")],
    ids=["f32", "f16 from a folder", "q4_0", "q4_0 from a folder"],
)
def test_a_weight_with_nan_is_refused_by_name_and_nothing_is_written(options, where, tmp_path):
    model = models.m1()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    (tmp_path / "source").mkdir()
    source = models.saved(model, tmp_path / "source") if where == "folder" else model
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp\.down_proj\.weight.*NaN"):
        export_nnef(source, tmp_path / "out", check=False, **options)
    assert os.listdir(tmp_path) == ["source"]


def test_a_checkpoint_that_shrinks_while_it_is_exported_is_a_named_error_that_leaves_the_older_export(
    finished, tmp_path
):
    folder = models.saved(models.m2(), tmp_path, max_shard_size="40KB")
    shutil.copytree(finished, tmp_path / "out")
    shard = sorted(folder.glob("*.safetensors"))[-1]

    def shrink(done, total):
        os.truncate(shard, 100)

    with pytest.raises(StorageError, match=shard.name):
        export_nnef(folder, tmp_path / "out", check=False, overwrite=True, on_progress=shrink)
    assert contents(tmp_path / "out") == contents(finished)
    with pytest.raises(StorageError, match=shard.name):
        export_nnef(folder, tmp_path / "other", check=False)
    assert sorted(os.listdir(tmp_path)) == sorted([folder.name, "out"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "zip"}, ConfigError, r"format='zip'.*tgz, tar, dir"),
        ({"capture": "some"}, ConfigError, r"capture='some'.*auto, pieces, whole"),
        ({"dtype": "int8"}, ConfigError, r"i8.*'f32' or 'f16'"),
        ({"task": "poetry"}, ConfigError, r"poetry.*text-generation"),
        ({"weights": "q9_9"}, UnknownTagError, r"q9_9.*t2n_hf\.q4_0\.v1"),
        ({"embeddings": "acme.int3.v1"}, UnknownTagError, r"acme\.int3\.v1.*t2n_hf\.q4_0\.v1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("where", ["loaded", "folder"])
def test_an_option_or_a_class_that_does_not_exist_is_told_with_those_that_do(options, error, message, where, tmp_path):
    model = models.m1()
    (tmp_path / "source").mkdir()
    source = models.saved(model, tmp_path / "source") if where == "folder" else model
    with pytest.raises(error, match=message):
        export_nnef(source, tmp_path / "out", check=False, **options)
    assert os.listdir(tmp_path) == ["source"]


def test_a_file_and_a_folder_of_somebody_else_are_refused_even_when_overwriting(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("file", "folder", "link"):
        for overwrite in (False, True):
            with pytest.raises(OutputExistsError, match=name):
                export_nnef(models.m1(), tmp_path / name, check=False, overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path / "folder") == ["mine.txt"]
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link"]


def test_a_place_that_does_not_exist_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in ("nowhere", "file"):
        with pytest.raises(StorageError, match=rf"{place} is no folder.*make it first"):
            export_nnef("no/such-model", tmp_path / place / "out", check=False)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("where", [".", "checkpoint"])
@pytest.mark.parametrize("is_loaded", [False, True], ids=["folder", "loaded"])
def test_a_checkpoint_that_lies_in_an_older_export_is_not_deleted_with_it(is_loaded, where, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "out")
    source = tmp_path / "out" / where
    models.m2().save_pretrained(source)
    before = contents(tmp_path / "out")
    model = load(source) if is_loaded else source
    with pytest.raises(OutputExistsError, match="holds the model that is exported"):
        export_nnef(model, tmp_path / "out", check=False, overwrite=True)
    assert contents(tmp_path / "out") == before


def test_a_damaged_file_beside_the_checkpoint_is_named_or_does_not_matter(tmp_path):
    folder = models.saved(models.m1(), tmp_path)
    (folder / "README.md").write_bytes(b"---\nlicense: mit\n---\n\xe9\xff")
    report = export_nnef(folder, tmp_path / "out", check=False)
    assert "license: mit" in (report.folder / "README.md").read_text()
    (folder / "tokenizer_config.json").write_text("{damaged")
    with pytest.raises(FormatError, match=r"tokenizer_config\.json is no JSON"):
        export_nnef(folder, tmp_path / "other", check=False)
    assert sorted(os.listdir(tmp_path)) == sorted([folder.name, "out"])
