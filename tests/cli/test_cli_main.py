import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer

from t2n_hf.cli import main as cli
from t2n_hf.errors import ConfigError


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    return end.value.code


def plugin_command(monkeypatch, function):
    """Stand `function` in for the `env` command."""
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "stand_in", function, raising=False)
    monkeypatch.setitem(cli.COMMANDS, "env", cli.CommandEntry(f"{__name__}:stand_in", "stand-in"))


def test_help_lists_every_command_without_importing_one(capsys):
    program = (
        "import sys, t2n_hf.cli.main as cli\n"
        "try: cli.main(['--help'])\n"
        "finally: print([n for n in sys.modules if n.startswith('t2n_hf.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for name in cli.COMMANDS:
        assert name in done.stdout
    assert "['t2n_hf.cli.imports', 't2n_hf.cli.main']" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"]], ids=str)
def test_help_and_version_import_no_large_library(arguments):
    program = (
        "import sys, t2n_hf_command\n"
        f"sys.argv = ['t2n-hf', *{arguments}]\n"
        "try: t2n_hf_command.main()\n"
        "finally: print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == (0 if arguments else 2)
    assert done.stdout.endswith("[]\n")
    shown = done.stdout + done.stderr
    assert all(
        name in shown for name in ([f"t2n-hf {version('t2n-hf')}"] if "--version" in arguments else cli.COMMANDS)
    )


def test_the_program_runs_commands_with_the_whole_package():
    program = "import sys, t2n_hf_command\nsys.argv = ['t2n-hf', 'plugins', '--json']\nt2n_hf_command.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "t2n_hf.q4_0.v1" in [row["tag"] for row in json.loads(done.stdout)]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"]], ids=str)
def test_the_package_run_as_a_module_helps_without_a_large_library(arguments):
    command = [sys.executable, "-X", "importtime", "-m", "t2n_hf", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (0 if arguments else 2)
    asked = [f"t2n-hf {version('t2n-hf')}"] if "--version" in arguments else ["Usage: t2n-hf", *cli.COMMANDS]
    assert all(text in done.stdout + done.stderr for text in asked)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "t2n_hf.cli.imports" in imported
    assert not {"torch", "transformers", "numpy"} & imported


def test_the_package_run_as_a_module_runs_commands():
    done = subprocess.run([sys.executable, "-m", "t2n_hf", "plugins", "--json"], capture_output=True, text=True)
    assert "t2n_hf.q4_0.v1" in [row["tag"] for row in json.loads(done.stdout)]


def test_a_module_that_imports_the_package_before_it_is_found_has_all_of_it(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("from t2n_hf import T2NConfig")
    (tmp_path / "mine" / "__main__.py").write_text("import mine\nprint(mine.T2NConfig.__name__)")
    done = subprocess.run([sys.executable, "-m", "mine"], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "T2NConfig\n", done.stderr


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help(name, capsys):
    assert run(name, "--help") == 0
    assert f"t2n-hf {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["env", "--nonsense"], ["export"], ["generate", "x"]], ids=" ".join
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong_on_stderr(arguments, capsys):
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage" in captured.err


def test_an_error_of_ours_is_one_message_on_stderr_and_ends_with_1(monkeypatch, capsys):
    def fails():
        raise ConfigError("format='zip'; expected tgz")

    plugin_command(monkeypatch, fails)
    assert run("env") == 1
    captured = capsys.readouterr()
    assert captured.err == "t2n-hf: format='zip'; expected tgz\n"
    assert captured.out == ""


def test_an_error_of_the_system_is_one_message_and_ends_with_1(monkeypatch, capsys):
    def fails():
        raise PermissionError(13, "Permission denied", "/srv/out")

    plugin_command(monkeypatch, fails)
    assert run("env") == 1
    assert capsys.readouterr().err == "t2n-hf: Permission denied: /srv/out\n"


def test_a_bug_keeps_its_traceback(monkeypatch):
    def fails():
        raise ZeroDivisionError

    plugin_command(monkeypatch, fails)
    with pytest.raises(ZeroDivisionError):
        cli.main(["env"])


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    def fails():
        raise KeyboardInterrupt

    plugin_command(monkeypatch, fails)
    assert run("env") == 130


def test_success_ends_with_0(capsys):
    assert run("env") == 0
    assert "torch" in capsys.readouterr().out


def test_env_as_json_names_no_host_user_or_path(capsys):
    assert run("env", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["t2n-hf"]
    assert not any(isinstance(value, str) and "/" in value for value in facts.values())
    assert "host" not in " ".join(facts)


def test_plugins_lists_the_built_in_format_with_its_tag(capsys):
    assert run("plugins") == 0
    out = capsys.readouterr().out
    assert "t2n_hf.q4_0.v1" in out
    assert "short name q4_0" in out
    assert "ok" in out


def test_plugins_as_json(capsys):
    assert run("plugins", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert next(row for row in rows if row["tag"] == "t2n_hf.q4_0.v1")["error"] is None


def test_no_command_takes_a_token():
    for entry in cli.COMMANDS.values():
        options = [option for parameter in entry.load().params for option in parameter.opts]
        counts = ("--max-new-tokens", "--max-tokens")
        assert not [option for option in options if "token" in option and option not in counts]


def test_version_is_told(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("t2n-hf ")


def test_a_bad_parameter_found_late_is_wrong_usage(monkeypatch, capsys):
    def fails():
        raise typer.BadParameter("'x' is not a size")

    plugin_command(monkeypatch, fails)
    assert run("env") == 2
    assert "is not a size" in capsys.readouterr().err
