"""What kind of program a command starts, and why one cannot be started."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from wanshim.launch.interpreter_options import is_python, is_shell, not_found, not_started, skipping_option


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("-I train.py", "-I"),
        ("-uE train.py", "-E"),
        ("-sE train.py", "-E"),
        ("-X dev -S -m train", "-S"),
        ("-W ignore train.py", ""),
        ("-WIgnore train.py -I", ""),
        ("-uc print() -S", ""),
        ("train.py -E", ""),
        ("-W error -S train.py", "-S"),
        ("-Werror -S train.py", "-S"),
        ("-X dev -X faulthandler -I train.py", "-I"),
        ("-u train.py -I", ""),
        ("-c -I", ""),
        ("-uc -I", ""),
        ("-m train -I", ""),
        ("-W", ""),
        ("-W I train.py", ""),
        ("--version -I", ""),
        ("", ""),
    ],
)
def test_option_that_passes_over_wanshim_is_one_before_the_program(arguments: str, option: str) -> None:
    assert skipping_option(arguments.split()) == option


@pytest.mark.parametrize(
    ("name", "python"),
    [("python", True), ("/usr/bin/python3.13t", True), ("pypy3", True), ("python-train", False), ("uv", False)],
)
def test_python_is_known_by_its_name(name: str, python: bool) -> None:
    assert is_python(name) is python


@pytest.mark.parametrize(
    ("first", "shell"),
    [("#!/bin/sh -e", True), ("#!/usr/bin/env bash", True), ("#!/usr/bin/env python3", False), ("import torch", False)],
)
def test_shell_script_is_known_by_its_first_line(first: str, shell: bool, tmp_path: Path) -> None:
    (tmp_path / "train").write_text(f"{first}\n")
    assert is_shell(str(tmp_path / "train")) is shell
    assert is_shell("/bin/dash")
    assert not is_shell(str(tmp_path / "nothing"))


def test_program_that_is_not_found_is_said_with_what_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").touch()
    folder = str(tmp_path / "folder")
    Path(folder).mkdir()
    assert "no program 'A=1' on PATH. Write env before it: env A=1 python train.py" in str(not_found("A=1"))
    assert "no program 'train' on PATH. Write ./train" in str(not_found("train"))
    assert "Write the command as you would without wanshim" in str(not_found("other"))
    assert f"no file '{tmp_path}/other'" in str(not_found(f"{tmp_path}/other"))
    assert f"'{folder}' is a folder" in str(not_found(folder))
    assert "may not be executed" in str(not_found(f"{tmp_path}/train"))


def test_program_that_the_system_does_not_start_is_said_with_its_reason(tmp_path: Path) -> None:
    program = tmp_path / "train"
    program.write_text("#!/bin/sh\r\n")
    said = str(not_started(str(program), OSError(errno.ENOENT, "No such file or directory")))
    assert "its first line '#!/bin/sh\\r' names a program that does not exist" in said
    assert "Remove the \\r" in said
    program.write_text("#!/no/sh\n")
    assert "Remove" not in str(not_started(str(program), OSError(errno.ENOENT, "")))
    program.write_bytes(b"\x7fELF")
    assert "it needs a program that does not exist" in str(not_started(str(program), OSError(errno.ENOENT, "")))
    said = str(not_started(str(program), OSError(errno.EACCES, "Permission denied")))
    assert "cannot be executed: Permission denied" in said
    assert "mounted noexec" in said
    assert str(not_started(str(program), OSError(errno.EIO, "Input/output error"))).endswith("Input/output error.")
