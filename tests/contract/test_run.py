"""`wanshim run` reaches the program and all its children, and stands in nobody's way."""

from __future__ import annotations

import importlib.util
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.contract.command_line import wanshim
from tests.contract.launching import light_diffsynth
from wanshim.errors import WanshimError
from wanshim.launch import ranks, start
from wanshim.launch.ranks import BOOT, UNREACHED

# Prints whether wanshim is active in the process that runs it.
LOOK = "import sys; m = sys.modules.get('wanshim'); print(m.report().active if m else 'no wanshim')"


def run(
    *command: str, features: str | None = None, stdin: str = "", cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    options = ["-f", features] if features is not None else []
    environment = {**os.environ, "PYTHONPATH": "", **variables}
    return wanshim(
        "run", *options, "--", *command, folder=cwd or Path.cwd(), variables=environment, stdin=stdin, timeout_s=200
    )


def run_by_an_interpreter(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """As users start it: the interpreter of `wanshim run` has the variables too."""
    return subprocess.run(
        [sys.executable, "-m", "wanshim", "run", "--", *command],
        env={**os.environ, "PYTHONPATH": "", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )


def python(program: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", program, *arguments, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_upstream_has_itself_is_said_only_where_the_framework_was_imported(tmp_path: Path) -> None:
    """It is known from the installed version alone; launchers and helpers stay quiet all the same."""
    feature = "diffsynth.gradient_accumulation"
    assert python("pass", features=feature).stderr == ""
    light_diffsynth(tmp_path)
    said = python("import diffsynth", features=feature, PYTHONPATH=str(tmp_path)).stderr
    assert f"wanshim: {feature} native (launch_training_task clears the gradients after" in said


# -- reach ---------------------------------------------------------------------------------------------

SPAWNS = """
import multiprocessing
import child

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        print(pool.apply(child.look))
"""
CHILD = """
def look():
    from diffsynth.models.wan_video_dit import WanModel
    return WanModel.forward.__wanshim_state__.seam.target
"""


@pytest.mark.slow
def test_spawned_child_has_the_patches(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SPAWNS)
    (tmp_path / "child.py").write_text(CHILD)
    light_diffsynth(tmp_path)
    done = run("program.py", cwd=tmp_path)
    assert done.stdout.splitlines() == ["diffsynth.models.wan_video_dit:WanModel.forward"], done.stderr


def test_subprocess_of_the_program_is_active_with_the_features_given() -> None:
    nested = f"{LOOK}; import os; print(os.environ['WANSHIM_FEATURES'])"
    program = f"import subprocess, sys; {LOOK}; subprocess.run([sys.executable, '-c', {nested!r}])"
    done = run(sys.executable, "-u", "-c", program, features="diffsynth.patchify", WANSHIM_FEATURES="all")
    assert done.stdout.splitlines() == ["True", "True", "diffsynth.patchify"], done.stderr


SELECTED = "import wanshim; print(*(f'{row.feature}:{row.selected_by}' for row in wanshim.report().selected))"


def test_feature_given_with_f_adds_to_auto_and_to_what_variables_switch_on() -> None:
    done = python(SELECTED, features="diffsynth.progress", WANSHIM_DEVICES="cpu,cpu")
    selected = done.stdout.split()
    assert "diffsynth.progress:diffsynth.progress" in selected
    assert "diffsynth.model_split:WANSHIM_DEVICES" in selected
    assert "diffsynth.patchify:auto" in selected


def test_features_after_none_are_selected_alone() -> None:
    done = python(SELECTED, features="none,diffsynth.progress", WANSHIM_DEVICES="cpu,cpu")
    assert done.stdout.split() == ["diffsynth.progress:diffsynth.progress"]


@pytest.mark.sweep
@pytest.mark.slow
def test_f_that_drops_what_wanshim_features_selects_says_so_in_one_line() -> None:
    done = python("pass", features="fp8_lora", WANSHIM_FEATURES="auto,diffsynth.progress")
    assert done.stderr.splitlines() == [
        "wanshim: -f fp8_lora replaces WANSHIM_FEATURES=auto,diffsynth.progress; no longer selected: diffsynth.progress"
    ]
    assert python("pass", features="fp8_lora", WANSHIM_FEATURES="diffsynth.fp8_lora").stderr == ""


@pytest.mark.slow
def test_features_come_from_the_environment_where_none_are_given() -> None:
    assert python(LOOK, WANSHIM_FEATURES="none").stdout == "False\n"
    assert python(LOOK, WANSHIM_FEATURES="diffsynth").stdout == "True\n"


def test_program_gets_its_arguments_and_input_and_gives_its_status(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.argv[1:], input()); sys.exit(7)")
    done = run("program.py", "-f", "x", "--help", "--", "y z", stdin="typed\n", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (7, "['-f', 'x', '--help', '--', 'y z'] typed\n")


def test_program_that_ctrl_c_ends_is_ended_by_the_signal_as_without_wanshim() -> None:
    """A shell's loop goes on behind a program that ends with a status of its own."""
    done = python("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert done.returncode == -signal.SIGINT


def test_program_that_is_no_python_runs_too() -> None:
    assert run("sh", "-c", "echo $WANSHIM_FEATURES; exit 3", features="none").stdout == "none\n"


LOOKS = "python -c 'import sys; print(*(name for name in sys.modules if name == \"wanshim\"))'"


@pytest.mark.parametrize(
    ("steps", "variables", "said"),
    [
        (f"export PYTHONPATH=src; {LOOKS}", {}, f"wanshim: {UNREACHED}\n"),
        (f"export PYTHONPATH=src:$PYTHONPATH; {LOOKS}", {}, ""),
        (f"PYTHONPATH=src {LOOKS}; {LOOKS}", {}, ""),
        ("exit 3", {"WANSHIM_DISABLE": "1"}, ""),
        ("exit 3", {"WANSHIM_FEATURES": "none"}, ""),
        ("exit 3", {"WANSHIM_RUN_RANK": "1/2"}, ""),
        ("exit 3", {"WANSHIM_RUN_FAILURE": "/of/an/earlier/run"}, f"wanshim: {UNREACHED}\n"),
        ("exit 3", {}, f"wanshim: {UNREACHED}\n"),
    ],
    ids=[
        "replaced",
        "kept",
        "of_one_step",
        "disabled",
        "nothing_selected",
        "rank",
        "started_in_an_earlier_run",
        "fails",
    ],
)
def test_command_that_drops_pythonpath_is_told_so_at_its_end(steps: str, variables: dict[str, str], said: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert run_by_an_interpreter("sh", "-c", steps, PATH=path, **variables).stderr == said


@pytest.mark.parametrize("options", [("-f", "none"), ("--no-report",)])
def test_command_whose_user_asked_for_nothing_is_told_nothing(options: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wanshim", "run", *options, "--", "sh", "-c", "exit 3"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "")


def test_command_without_standard_input_is_told_so_too() -> None:
    """As daemons have it: the file of the process that is waited for then is the first that is free."""
    code = "import os, sys; os.close(0); os.execv(sys.executable, [sys.executable, '-m', 'wanshim', *sys.argv[1:]])"
    command = [sys.executable, "-c", code, "run", "--", "sh", "-c", "sleep 0.3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == f"wanshim: {UNREACHED}\n"


def test_command_that_starts_its_processes_elsewhere_is_told_of_this_machine_alone(tmp_path: Path) -> None:
    """As srun and sbatch, whose processes say it where they run."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert "on this machine" in run_by_an_interpreter(str(tmp_path / "sbatch"), "job.sh").stderr


def test_command_whose_part_goes_on_behind_it_is_told_nothing() -> None:
    """Standard error is read to its end, so to that of the part."""
    done = run_by_an_interpreter("sh", "-c", f"(sleep 1; exec {sys.executable} -c {LOOK!r}) & exit 4")
    assert (done.returncode, done.stdout, done.stderr) == (4, "True\n", "")


# -- one process ---------------------------------------------------------------------------------------


def test_program_has_no_child_of_ours_and_its_folder_ends_with_it(tmp_path: Path) -> None:
    children = "read children < /proc/$$/task/$$/children; echo $TMPDIR/* $children"
    done = run_by_an_interpreter("sh", "-c", children, TMPDIR=str(tmp_path))
    (folder,) = done.stdout.split()
    assert Path(folder).name.startswith("wanshim-run-")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_folder_of_a_run_that_was_killed_is_removed_by_the_next_and_that_of_one_that_lives_is_not(
    tmp_path: Path,
) -> None:
    killed = subprocess.Popen(
        [sys.executable, "-m", "wanshim", "run", "--", "sh", "-c", "echo; sleep 60"],
        env={**os.environ, "PYTHONPATH": "", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    assert killed.stdout is not None
    killed.stdout.readline()
    (folder,) = tmp_path.iterdir()
    old = time.time() - 2 * ranks.GRACE_S
    os.utime(folder, (old, old))
    run_by_an_interpreter("sh", "-c", "", TMPDIR=str(tmp_path))
    assert folder.exists()
    killed.kill()
    killed.wait()
    killed.stdout.close()
    os.utime(folder, (old, old))
    *_, boot, some = folder.name.split("-")
    host = socket.gethostname()
    folder.rename(tmp_path / f"wanshim-run-container-{boot}-{some}")
    (tmp_path / f"wanshim-run-{host}-{'0' * 32}-{some}").mkdir()  # of an earlier boot
    (tmp_path / f"wanshim-run-{host}a-{'0' * 32}-{some}").mkdir()  # of another machine
    (tmp_path / "wanshim-run-of-another").symlink_to(tmp_path)  # no link is followed
    run_by_an_interpreter("sh", "-c", "", TMPDIR=str(tmp_path))
    left = {f"wanshim-run-{host}a-{'0' * 32}-{some}", "wanshim-run-of-another"}
    assert {path.name for path in tmp_path.iterdir()} == left


HANDLES = """
import os, signal, sys, time
def handle(number, frame):
    os.write(1, b"%d\\n" % number)  # a signal may come while the line below is printed
    if number == signal.SIGTERM:
        sys.exit(5)
for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, handle)
print(os.getpid(), os.getpgrp(), os.getppid(), flush=True)
while True:
    time.sleep(0.01)
"""


def test_signals_sent_to_wanshim_reach_the_program_and_its_status_comes_back() -> None:
    command = [sys.executable, "-m", "wanshim", "run", "--no-report", "--", sys.executable, "-c", HANDLES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ""}) as launcher:
        assert launcher.stdout is not None
        _, group, parent = map(int, launcher.stdout.readline().split())
        assert (parent, group) == (launcher.pid, os.getpgrp())
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            launcher.send_signal(number)
            assert launcher.stdout.readline() == f"{number.value}\n"
        assert launcher.wait(60) == 5


def in_a_terminal(*command: str) -> tuple[int, int]:
    """The process, which leads a session, and its terminal."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["PYTHONPATH"] = ""
        os.execvp(command[0], command)
    return pid, terminal


def until(expected: bytes, terminal: int) -> bytes:
    found = b""
    while expected not in found:
        assert select.select([terminal], [], [], 60)[0], found
        found += os.read(terminal, 1024)
    return found


def test_ctrl_c_of_a_terminal_reaches_the_program_once_and_ctrl_z_stops_both() -> None:
    """The terminal signals all processes of its foreground group, which a shell puts there and resumes."""
    command = [sys.executable, "-m", "wanshim", "run", "--no-report", "--", sys.executable, "-c", HANDLES]
    pid, terminal = in_a_terminal("bash", "-mc", f"{shlex.join(command)}; echo =$?; read; fg; echo =$?")
    with os.fdopen(terminal, "rb+", buffering=0) as screen:
        program, group, launcher = map(int, until(b"\n", terminal).split())
        assert launcher == group
        screen.write(b"\x03")
        assert until(b"2\r\n", terminal).count(b"2\r\n") == 1
        screen.write(b"\x1a")
        until(b"=%d" % (128 + signal.SIGTSTP), terminal)
        end = time.monotonic() + 60
        while ") T " not in Path(f"/proc/{program}/stat").read_text():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert ") T " in Path(f"/proc/{launcher}/stat").read_text()
        screen.write(b"\n")
        os.kill(launcher, signal.SIGTERM)
        assert b"\n2\r\n" not in until(b"=5", terminal)
        os.waitpid(pid, 0)


def test_program_ends_with_the_terminal_that_is_closed() -> None:
    """The kernel sends the hang-up to the leader of the session alone: without `wanshim run`, the program. That
    nobody could resume if ctrl-Z stopped it."""
    pid, terminal = in_a_terminal(
        sys.executable, "-m", "wanshim", "run", "--no-report", "--", sys.executable, "-c", HANDLES
    )
    with os.fdopen(terminal, "rb+", buffering=0) as screen:
        program, group, _ = map(int, until(b"\n", terminal).split())
        assert group == pid
        screen.write(b"\x1a\x03")
        until(b"2\r\n", terminal)
        os.kill(pid, signal.SIGUSR1)  # passed on by one that was not stopped
        until(b"10\r\n", terminal)
    try:
        end = time.monotonic() + 60
        while not (found := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.05)
        assert found[0]
        assert os.waitstatus_to_exitcode(found[1]) == -signal.SIGHUP
        assert not Path(f"/proc/{program}").exists()
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_program_ends_with_a_wanshim_that_is_killed() -> None:
    command = [sys.executable, "-m", "wanshim", "run", "--no-report", "--", sys.executable, "-c", HANDLES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ""}) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        launcher.kill()
        assert launcher.stdout.read() == ""  # its last writer has ended


def test_files_that_a_shell_opens_for_the_program_are_open_in_it() -> None:
    command = f"exec {sys.executable} -m wanshim run --no-report -- cat <(echo opened)"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "opened\n")


# -- other people's start-up ---------------------------------------------------------------------------


def user_sitecustomize(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return str(folder)


def test_users_own_sitecustomize_runs_after_ours(tmp_path: Path) -> None:
    own = user_sitecustomize(tmp_path / "own", f"{LOOK}\nprint('mine', __name__, __file__)\nVALUE = 5\n")
    program = "import sitecustomize; print(sitecustomize.VALUE)"
    done = run_by_an_interpreter(sys.executable, "-c", program, PYTHONPATH=own)
    mine = f"mine sitecustomize {own}/sitecustomize.py"
    # Once in the Python that runs `wanshim run`, once in the program.
    assert done.stdout.splitlines() == ["no wanshim", mine, "True", mine, "5"], done.stderr


def test_users_own_sitecustomize_that_fails_is_pythons_usual_message(tmp_path: Path) -> None:
    own = user_sitecustomize(tmp_path / "own", "raise RuntimeError('mine fails')")
    done = python(LOOK, PYTHONPATH=own)
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert "RuntimeError: mine fails" in done.stderr


def test_program_whose_folder_was_deleted_is_active_and_runs_the_users_own(tmp_path: Path) -> None:
    own = user_sitecustomize(tmp_path / "own", "print('mine')\n")
    (tmp_path / "gone").mkdir()
    steps = 'cd "$0" && rmdir "$0" && exec "$1" -c "$2"'
    done = run("sh", "-c", steps, str(tmp_path / "gone"), sys.executable, LOOK, PYTHONPATH=own)
    assert (done.stdout.splitlines(), done.stderr) == (["mine", "True"], "")


SHOW = "import os, sys; print(os.environ['PYTHONPATH']); print([p for p in sys.path if p.startswith('/some')])"


def test_pythonpath_of_the_user_is_kept_behind_ours() -> None:
    done = python(SHOW, PYTHONPATH="/some/a:/some/b")
    assert done.stdout.splitlines() == [f"{BOOT}:/some/a:/some/b", "['/some/a', '/some/b']"]
    assert python(SHOW).stdout.splitlines() == [str(BOOT), "[]"]


def test_empty_part_of_pythonpath_which_means_the_current_folder_is_kept() -> None:
    assert python(SHOW, PYTHONPATH="/some/a::/some/b").stdout.splitlines()[0] == f"{BOOT}:/some/a::/some/b"


def test_run_inside_run_adds_nothing_twice() -> None:
    done = run(sys.executable, "-m", "wanshim", "run", "--", sys.executable, "-c", SHOW, PYTHONPATH="/some/a")
    assert done.stdout.splitlines()[0] == f"{BOOT}:/some/a", done.stderr


def test_two_installations_inside_each_other_start_once_and_reach_the_users_own(tmp_path: Path) -> None:
    """Each took the other's sitecustomize for the user's, and so on until Python gave up."""
    second = tmp_path / "site" / "wanshim" / "launch" / "boot" / "path"
    shutil.copytree(BOOT, second)
    own = user_sitecustomize(tmp_path / "own", "print('mine')\n")
    paths = os.pathsep.join([str(second), own])
    done = run_by_an_interpreter(sys.executable, "-c", LOOK, PYTHONPATH=paths)
    # Twice: once in the Python that runs `wanshim run`, once in the program.
    assert (done.stdout.splitlines(), done.stderr) == (["mine", "mine", "True"], "")


def test_another_python_is_refused_with_one_line_and_runs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "other")], check=True, timeout=60)
    other = tmp_path / "other" / "bin" / "python"
    done = run(str(other), "-c", LOOK)
    assert (done.returncode, done.stdout) == (0, "no wanshim\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("wanshim: not active in process ")
    assert line.endswith(
        f"RuntimeError: `wanshim run` belongs to the Python of {sys.prefix}, this is {tmp_path / 'other'}: "
        "install wanshim here, and start its own `wanshim run`"
    )


def test_environment_that_a_link_names_too_is_the_same_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(sys.prefix)
    done = run(str(tmp_path / "link" / "bin" / "python"), "-c", LOOK)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.sweep
@pytest.mark.slow
def test_tool_of_another_python_that_starts_the_projects_own_says_nothing_and_passes_strict(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "other")], check=True, timeout=60)
    tool = tmp_path / "poetry"
    tool.write_text(f"#!{tmp_path}/other/bin/python\nimport os, sys\nos.execvp(sys.argv[2], sys.argv[2:])\n")
    tool.chmod(0o755)
    done = run(str(tool), "run", sys.executable, "-c", LOOK, WANSHIM_STRICT="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_child_that_cannot_activate_says_so_in_one_line_and_runs() -> None:
    nested = "import os, subprocess, sys; os.environ['WANSHIM_FEATURES'] = 'nope'; "
    done = python(nested + "subprocess.run([sys.executable, '-c', 'print(1)'])")
    assert (done.returncode, done.stdout) == (0, "1\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("wanshim: not active in process ")
    assert "SettingInvalid: WANSHIM_FEATURES names 'nope'" in line


def test_disabled_run_is_the_program_alone() -> None:
    done = python(LOOK, WANSHIM_DISABLE="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_disabled_run_says_that_features_asked_for_with_f_are_off() -> None:
    done = python(LOOK, features="no such feature", WANSHIM_DISABLE="1")
    assert (done.returncode, done.stdout) == (0, "False\n")
    (line,) = done.stderr.splitlines()
    assert line == "wanshim: wanshim is switched off by WANSHIM_DISABLE: -f no such feature has no effect"


def test_disabled_run_says_that_fast_is_off(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": "", "WANSHIM_DISABLE": "1"}
    done = wanshim("run", "--fast", "--", sys.executable, "-c", LOOK, folder=tmp_path, variables=variables)
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert done.stderr == "wanshim: wanshim is switched off by WANSHIM_DISABLE: --fast has no effect\n"


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_python_that_would_pass_over_wanshim_is_named_in_one_line_and_runs(option: str) -> None:
    done = run(sys.executable, option, "-c", LOOK)
    assert (done.returncode, done.stdout) == (0, "no wanshim\n")
    assert done.stderr == f"wanshim: {option} makes Python pass over wanshim: {sys.executable} runs without it\n"


# -- standard error closed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "module"),
    [("nope", "json"), pytest.param("torch.pg_timeout", "torch.distributed", marks=pytest.mark.slow)],
)
def test_with_standard_error_closed_no_message_goes_to_standard_output(features: str, module: str) -> None:
    program = f"import os; os.environ['WANSHIM_FEATURES'] = {features!r}; "
    program += f"import {module}, subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1)'])"
    done = run("sh", "-c", f'exec {sys.executable} -c "$0" 2>&-', program, WANSHIM_PG_TIMEOUT_S="60")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


# -- strict --------------------------------------------------------------------------------------------

FAILS = """
import torch.distributed
print("went on")
"""
# Before the program, in the user's own sitecustomize: one patch that fails when its module is imported.
BREAK = """
from wanshim.patching import transaction
def put_in(states):
    raise RuntimeError("this patch fails")
transaction.put_in = put_in
"""


@pytest.mark.slow
def test_patch_that_fails_on_import_ends_the_program_under_strict(tmp_path: Path) -> None:
    """Without strict it goes on: tests/unit/test_activation.py."""
    own = user_sitecustomize(tmp_path / "own", BREAK)
    done = python(FAILS, PYTHONPATH=own, WANSHIM_STRICT="1", WANSHIM_PG_TIMEOUT_S="60")
    assert (done.returncode, done.stdout) == (1, "")
    assert "FeatureUnavailable: torch.pg_timeout" in done.stderr
    assert "RuntimeError: this patch fails" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WANSHIM_FEATURES", "nope"),
        pytest.param("WANSHIM_FEATURES", "vllm_omni", marks=pytest.mark.sweep),
        pytest.param("WANSHIM_PLAN", "nope", marks=pytest.mark.sweep),
    ],
)
def test_child_that_cannot_activate_ends_under_strict(variable: str, value: str) -> None:
    nested = f"import os, subprocess, sys; os.environ[{variable!r}] = {value!r}; "
    program = nested + "sys.exit(subprocess.run([sys.executable, '-c', 'print(1)']).returncode)"
    if value == "vllm_omni" and importlib.util.find_spec("vllm_omni") is not None:
        pytest.skip("vllm_omni is installed")
    done = python(program, WANSHIM_STRICT="1")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("wanshim: not active in process ")


def test_another_python_ends_under_strict(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "other")], check=True, timeout=60)
    done = run(str(tmp_path / "other" / "bin" / "python"), "-c", "print('went on')", WANSHIM_STRICT="1")
    assert (done.returncode, done.stdout) == (2, "")


# -- refusals before the program starts ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "variables", "message"),
    [
        (
            "diffsynth.patchfy",
            {},
            "wanshim: the list of features names 'diffsynth.patchfy', which is no feature, framework or ability. "
            "Did you mean 'diffsynth.patchify'?",
        ),
        (
            "diffsynth.model_split",
            {"WANSHIM_STRICT": "1", "CUDA_VISIBLE_DEVICES": ""},
            "wanshim: diffsynth.model_split, selected by diffsynth.model_split, is unavailable: it needs 2 GPUs ",
        ),
        (
            None,
            {"WANSHIM_DEVICES": "gpu0,gpu1"},
            "wanshim: WANSHIM_DEVICES names 'gpu0', which is no device of torch's, such as cuda:0 or cpu. ",
        ),
        (
            None,
            {"WANSHIM_DEVICE": "cpu,cpu"},
            "wanshim: nothing reads WANSHIM_DEVICE; did you mean WANSHIM_DEVICES?",
        ),
        (
            None,
            {"WANSHIM_VERBOSE": "1"},
            "wanshim: nothing reads WANSHIM_VERBOSE. `wanshim features` names what there is.",
        ),
        (
            None,
            {"WANSHIM_STRICT": "1", "WANSHIM_VAE_FAST": "1"},
            "wanshim: WANSHIM_VAE_FAST has no effect, since diffsynth.vae_decode and ",
        ),
        (
            None,
            {"WANSHIM_PLAN": "sequence", "WANSHIM_DEVICES": "cpu,cpu"},
            "wanshim: WANSHIM_PLAN=sequence and WANSHIM_DEVICES. Expected one of the two: ",
        ),
        (
            None,
            {"WANSHIM_DEVICES": ","},
            "wanshim: WANSHIM_DEVICES=','. Expected devices, such as cuda:0,cuda:1.",
        ),
    ],
    ids=[
        "unknown_feature",
        "strict_and_unavailable",
        "no_device",
        "misspelt",
        "unknown",
        "no_effect",
        "contradiction",
        "bad_variable",
    ],
)
def test_what_cannot_be_ends_with_two_and_one_message_before_the_program_starts(
    features: str | None, variables: dict[str, str], message: str
) -> None:
    done = python("print('started')", features=features, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(message)


# -- a copy of the framework beside the script ---------------------------------------------------------

ATTENTION = "none,diffsynth.attention_gradient"


def edited_diffsynth(folder: Path) -> None:
    """DiffSynth with a hand at its attention, as a repository carries it along."""
    light_diffsynth(folder)
    attention = folder / "diffsynth" / "core" / "attention"
    installed = attention.resolve()
    attention.unlink()
    shutil.copytree(installed, attention)
    file = attention / "attention.py"
    file.write_text(re.sub(r"(def attention_forward\(.*?\):\n)", r"\1    own = True\n", file.read_text(), flags=re.S))
    (folder / "train.py").write_text("import diffsynth.core.attention.attention\nprint('trained')\n")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((sys.executable, "work/train.py"), id="before_the_start"),
        pytest.param(("sh", "-c", f"exec {sys.executable} work/train.py"), id="at_the_start"),
    ],
)
def test_copy_beside_the_script_is_what_strict_judges(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "work").mkdir()
    edited_diffsynth(tmp_path / "work")
    done = run(*command, features=ATTENTION, cwd=tmp_path, WANSHIM_STRICT="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "attention_forward differs from the code of " in done.stderr
    assert f"take out the local change in {tmp_path / 'work' / 'diffsynth'}" in done.stderr


def test_copy_beside_the_script_alone_is_not_called_absent(tmp_path: Path) -> None:
    (tmp_path / "fastvideo").mkdir()
    (tmp_path / "fastvideo" / "__init__.py").touch()
    (tmp_path / "train.py").write_text("import fastvideo, sys\nprint(sys.path.count(sys.path[0]))\n")
    done = run("train.py", features="none,fastvideo.progress", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "no package fastvideo" not in done.stderr


def test_gpu_that_is_not_here_is_one_line_and_the_program_starts() -> None:
    """A machine without GPUs may start the program on one that has them."""
    done = python("print('started')", WANSHIM_DEVICES="cuda:98,cuda:99", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (0, "started\n")
    assert done.stderr == "wanshim: WANSHIM_DEVICES names cuda:99, GPUs in sight: 0\n"


@pytest.mark.slow
def test_variables_without_effect_are_one_line_each_and_the_program_starts() -> None:
    split = "diffsynth.model_split is off. Turn on: WANSHIM_DEVICES=cuda:0,cuda:1 or WANSHIM_PLAN=sequence"
    done = python("print('started')", WANSHIM_BASE="int8", WANSHIM_SPLIT_AT="3")
    assert (done.returncode, done.stdout) == (0, "started\n")
    assert done.stderr.splitlines() == [
        f"wanshim: WANSHIM_BASE has no effect, since {split}",
        f"wanshim: WANSHIM_SPLIT_AT has no effect, since {split}",
    ]
    done = python("print('started')", WANSHIM_PLAN="stream", WANSHIM_SPLIT_AT="3")
    assert "wanshim: WANSHIM_SPLIT_AT has no effect with WANSHIM_PLAN: it is for a split" in done.stderr.splitlines()


def test_unknown_option_is_no_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wanshim", "run", "--gups", "2", "--", "true"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--gups" in done.stderr
    assert "--gpus" in done.stderr


def test_program_that_does_not_exist_ends_with_two() -> None:
    done = run("no-such-program-anywhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "wanshim: no program 'no-such-program-anywhere' on PATH. "
        "Write the command as you would without wanshim, after --.\n"
    )


def test_what_only_a_shell_starts_is_refused_with_what_to_write(tmp_path: Path) -> None:
    assert run("A=1", "true").stderr.endswith("Write env before it: env A=1 python train.py.\n")
    (tmp_path / "train.sh").touch()
    assert run("train.sh", cwd=tmp_path).stderr.endswith("Write ./train.sh, or what runs it before it.\n")


@pytest.mark.parametrize(
    ("first_line", "mode", "said"),
    [
        (
            "",
            0o755,
            "{script} cannot be executed: Exec format error. A script needs a first line such as #!/bin/sh.",
        ),
        (
            "#!/bin/sh\r\n",
            0o755,
            "{script} cannot be executed: its first line '#!/bin/sh\\r' names a program that does not exist. "
            "Remove the \\r, which belongs to the name.",
        ),
        (
            "#!/etc/passwd\n",
            0o755,
            "{script} cannot be executed: Permission denied. "
            "What runs it may not be executable, or its file system is mounted noexec.",
        ),
        (
            "#!/bin/sh\n",
            0o644,
            "'{script}' may not be executed. Run `chmod +x {script}`, or write what runs it before it.",
        ),
    ],
    ids=["format", "interpreter", "permission", "mode"],
)
def test_program_that_cannot_be_executed_ends_with_two_and_its_own_reason(
    tmp_path: Path, first_line: str, mode: int, said: str
) -> None:
    script = tmp_path / "script"
    script.write_text(f"{first_line}echo ran\n", newline="")
    script.chmod(mode)
    done = run(str(script))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"wanshim: {said.format(script=script)}\n"


def test_command_that_is_too_long_ends_with_two() -> None:
    """Here, where the command line of the test itself is not too long."""
    command = [sys.executable, "-c", "pass", *["x" * 131_071] * 100]
    with pytest.raises(WanshimError, match=r"cannot be executed: Argument list too long\. An argument or a variable"):
        start.run(command, start.environment())


def test_folder_and_absent_file_are_named_as_such(tmp_path: Path) -> None:
    hint = "Write the command as you would without wanshim, after --.\n"
    assert run(str(tmp_path)).stderr == f"wanshim: '{tmp_path}' is a folder. Expected a program. {hint}"
    assert run("./absent").stderr == f"wanshim: no file './absent'. {hint}"


def test_fast_reaches_the_program_and_its_lines_come_first() -> None:
    program = [sys.executable, "-c", "import os; print(os.environ['WANSHIM_FAST'])"]
    done = subprocess.run(
        [sys.executable, "-m", "wanshim", "run", "--fast", "--", *program], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.startswith("wanshim: WANSHIM_FAST turned on what changes bits, where it is available: ")
