"""The commands' list, and that each is imported only when it is asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from kvatlas.cli.main import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_tells_its_own_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: kvatlas {name} [-h]")


@pytest.mark.parametrize(
    "words", [("agent", "--dram", "10XB"), ("agent", "--no-such"), ("sim", "--jobs", "x"), ("no",)]
)
def test_a_wrong_word_is_told_in_one_line(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("kvatlas")
    assert told.endswith("--help)\n")
    assert told.count("\n") == 1


def test_the_list_is_whole_whatever_stands_beside_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help", "serve"])
    assert ended.value.code == 0
    listed = re.findall(r"(?m)^ {4}([a-z-]+)", capsys.readouterr().out)
    assert listed == list(COMMANDS)


def test_the_list_alone_imports_no_command() -> None:
    script = (
        "import sys\nfrom kvatlas.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(*(m for m in sys.modules if m.startswith('kvatlas')), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert set(done.stderr.split()) == {
        "kvatlas",
        "kvatlas.cli",
        "kvatlas.cli.main",
        "kvatlas.errors",
    }


@pytest.mark.parametrize("words", [("devices", "--json"), ("layout", "deepseek-v4-flash")])
def test_a_reader_that_leaves_is_no_finding(words: tuple[str, ...]) -> None:
    """One command prints by itself, the other by a library that ends in its own way."""
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-u", "-m", "kvatlas", *words]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (2, b"")
