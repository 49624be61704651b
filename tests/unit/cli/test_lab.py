from __future__ import annotations

import subprocess
import sys

import pytest

from stretto.cli import main
from stretto.errors import CommandNotFound, SpecError
from stretto.lab import LabSpec, run_lab

SPEC = LabSpec(hosts=2, link_bytes_per_s=1e8)


@pytest.mark.parametrize(
    "options",
    [
        ["--link", "fast"],
        ["--link", "0gbit"],
        ["--flow", "-3mbit"],
        ["--hosts", "0"],
        ["--hosts", "many"],
        ["--ranks-per-host", "0"],
        ["--timeout", "0"],
        ["--timeout", "nan"],
        ["--grace", "-1"],
        ["--mode", "tunnels"],
    ],
)
def test_wrong_options_exit_2_before_anything_starts(options, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["lab", "run", *options, "--", "true"])
    assert caught.value.code == 2
    assert options[1] in capsys.readouterr().err


def test_without_a_program_exit_2():
    with pytest.raises(SystemExit) as caught:
        main(["lab", "run"])
    assert caught.value.code == 2


def test_a_missing_program_exits_127_with_one_line(capfd):
    with pytest.raises(SystemExit) as caught:
        main(["lab", "run", "--", "no-such-program-here", "--hosts", "1"])
    assert caught.value.code == 127
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "no-such-program-here" in err


def test_from_python_it_is_an_error_of_its_own():
    with pytest.raises(CommandNotFound, match="no-such-program-here"):
        run_lab(SPEC, ["no-such-program-here"])
    with pytest.raises(SpecError, match="command"):
        run_lab(SPEC, [])


def test_the_command_starts_without_torch():
    code = (
        "import sys, stretto.cli.lab, stretto.lab.supervisor\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == 0
