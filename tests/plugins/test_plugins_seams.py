"""Emitters and rewrites of other distributions are found by their entry points alone, and clashes are named."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from test_plugins_readme import ROOT, installed, run
from torch import nn

from t2n_hf.errors import ConfigError, EmitError, MissingEmittersError, TagClashError
from t2n_hf.export import export_nnef
from t2n_hf.export.lower import emitter_table
from t2n_hf.ops.plugins import declared_emitters
from t2n_hf.ops.table import EMITTERS
from t2n_hf.trace.layers import describe_layer
from t2n_hf.trace.rewrites import rewrites_used

SNAKE = ROOT / "plugins" / "t2n-hf-snake"


@torch.library.custom_op("t2n_hf_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


DOUBLE = torch.ops.t2n_hf_tests.double.default


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return double(double(x)) + torch.special.airy_ai(x)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return double(x)


class Tripled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


@pytest.fixture
def declare(tmp_path, monkeypatch):
    """Return a function that installs a distribution of one module with one entry point, for this test only."""

    def declared(distribution: str, group: str, name: str, source: str, function: str = "found") -> None:
        folder = tmp_path / distribution
        module = distribution.replace("-", "_")
        metadata = folder / f"{module}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{function}\n")
        monkeypatch.syspath_prepend(str(folder))

    return declared


EMITTER = "def found(emit, x):\n    return emit.binary('mul', x, 2, x.dtype)\n"


@pytest.mark.tract
def test_the_example_conforms_in_a_process_that_has_only_it_installed(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(SNAKE, source, ignore=shutil.ignore_patterns("*.egg-info"))
    installed(source, site)
    done = run(sys.executable, "-m", "pytest", "-q", "-W", "error", source / "tests", path=site, cwd=source / "tests")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "7 passed" in done.stdout


def test_a_declared_emitter_is_imported_when_a_graph_calls_its_operator_and_not_before(declare):
    declare("lazy-emitter", "t2n_hf.ops", "t2n_hf_tests.double.default", "raise RuntimeError('imported')\n")
    assert declared_emitters([torch.ops.aten.relu.default]) == {}
    with pytest.raises(ConfigError, match=r"lazy-emitter 1\.0 .*does not load: RuntimeError: imported"):
        declared_emitters([DOUBLE])


@pytest.mark.tract
def test_an_export_uses_a_declared_emitter_and_is_checked(declare, tmp_path):
    declare("an-emitter", "t2n_hf.ops", "t2n_hf_tests.double.default", EMITTER)
    assert DOUBLE in emitter_table([DOUBLE])
    assert DOUBLE not in EMITTERS
    model = nn.Sequential(nn.Linear(3, 3))
    model.append(type("Double", (nn.Module,), {"forward": lambda self, x: double(x)})())
    assert export_nnef(model, tmp_path / "out", example_args=(torch.ones(1, 3),)).check == "passed"


def test_what_is_missing_is_told_all_at_once_with_its_place_and_how_to_add_it(tmp_path):
    with pytest.raises(MissingEmittersError) as error:
        export_nnef(Doubling(), tmp_path / "out", example_args=(torch.ones(2),), check=False)
    text = str(error.value)
    assert text.startswith("2 operators of this model have no emitter")
    for operator in ("t2n_hf_tests.double.default", "aten.special_airy_ai.default"):
        assert f"\n  {operator}\n    in the model: {__file__}:" in text
    assert "return double(double(x)) + torch.special.airy_ai(x)" in text
    assert "'t2n_hf.ops'" in text
    assert "'t2n_hf.rewrites'" in text
    assert not (tmp_path / "out").exists()


def test_two_distributions_for_one_operator_are_an_error_that_names_both(declare):
    for name in ("one-emitter", "two-emitter"):
        declare(name, "t2n_hf.ops", "t2n_hf_tests.double.default", EMITTER)
    with pytest.raises(TagClashError, match=r"one-emitter 1\.0 .*two-emitter 1\.0"):
        declared_emitters([DOUBLE])


def test_a_distribution_for_an_operator_of_t2n_hf_is_an_error_that_names_both(declare):
    declare("late-emitter", "t2n_hf.ops", "aten.relu.default", EMITTER)
    with pytest.raises(TagClashError, match=r"late_emitter\.found, and t2n_hf has t2n_hf\.ops\.activation\.relu"):
        declared_emitters([torch.ops.aten.relu.default])
    assert declared_emitters([torch.ops.aten.silu.default]) == {}  # others are no worse for it


def test_what_is_declared_and_is_no_function_is_said(declare):
    declare("odd-emitter", "t2n_hf.ops", "t2n_hf_tests.double.default", "found = 3\n")
    with pytest.raises(ConfigError, match=r"odd-emitter 1\.0 .*is no function"):
        declared_emitters([DOUBLE])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def found(emit, x):\n    return x.shape[7]\n", "its emitter, bad_tests.found, failed: IndexError"),
        ("def found(emit, x):\n    pass\n", r"its emitter gave None where torch has torch.float32 \(2, 3\)"),
    ],
    ids=["raises", "nothing"],
)
def test_an_emitter_that_fails_is_named_with_its_operator(declare, tmp_path, source, message):
    declare("bad-tests", "t2n_hf.ops", str(DOUBLE), source)
    module = nn.Sequential(nn.Identity(), Doubled())
    try:
        with pytest.raises(EmitError, match=f"{DOUBLE} in module.1: {message}"):
            export_nnef(module, tmp_path / "out", example_args=(torch.randn(2, 3),))
    finally:
        sys.modules.pop("bad_tests", None)


def test_a_rewrite_that_does_not_load_is_named_and_changes_nothing(declare):
    declare("bad-rewrites", "t2n_hf.rewrites", f"{Tripled.__module__}.Tripled", "def other(module, x):\n    return x\n")
    module = nn.Sequential(Tripled())
    with pytest.raises(ConfigError, match=r"bad-rewrites 1.0 .*does not load"), rewrites_used(module):
        pass
    assert "forward" not in vars(module[0])


def test_a_rewrite_is_for_one_class_and_ends_with_the_capture(declare):
    declare("a-rewrite", "t2n_hf.rewrites", f"{__name__}.Tripled", "def found(module, x):\n    return x + x + x - 1\n")
    model = nn.ModuleList([Tripled(), type("Derived", (Tripled,), {})()])
    x = torch.ones(1)
    with rewrites_used(model):
        assert [float(module(x)) for module in model] == [2.0, 3.0]
    assert [float(module(x)) for module in model] == [3.0, 3.0]
    assert all("forward" not in vars(module) for module in model)


def test_layers_with_the_same_rewrite_are_of_one_kind(declare):
    declare("kind-rewrite", "t2n_hf.rewrites", f"{__name__}.Tripled", "def found(module, x):\n    return x\n")
    first, second, plain = Tripled(), Tripled(), Tripled()
    with rewrites_used(nn.ModuleList([first, second])):
        assert describe_layer(first) == describe_layer(second)
        assert describe_layer(first) != describe_layer(plain)


@pytest.mark.tract
def test_an_export_with_a_rewrite_is_checked_against_the_module_as_it_is(declare, tmp_path):
    declare("bad-rewrite", "t2n_hf.rewrites", f"{__name__}.Tripled", "def found(module, x):\n    return x * 3.01\n")
    with pytest.raises(ArithmeticError):
        export_nnef(Tripled(), tmp_path / "out", example_args=(torch.ones(2),))
