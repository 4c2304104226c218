"""The commands of docs/how-to/first_lora.md, and how they are run where there is no GPU and no network."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[4]
GUIDE = ROOT / "docs" / "how-to" / "first_lora.md"
HERE = Path(__file__).parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUESTION = re.compile(r"^\| ([^|]+?) \| ((?:\d )?Enter) \|", re.MULTILINE)
# The only words of a command that are not the guide's own.
SMALLER = {
    "--height 704": "--height 64",
    "--width 1280": "--width 96",
    "--num_frames 17": "--num_frames 5",
    # The device of a CPU process is cpu:0, which safetensors does not know.
    "--extra_inputs input_image": "--extra_inputs input_image --initialize_model_on_cpu",
    "height=704": "height=64",
    "width=1280": "width=96",
    "num_frames=17": "num_frames=5",
    "num_inference_steps=50": "num_inference_steps=2",
    'device="cuda"': 'device="cpu"',
}
WAIT_S = 280.0


def blocks(language: str) -> list[str]:
    return [code for name, code in BLOCK.findall(GUIDE.read_text(encoding="utf-8")) if name == language]


def commands() -> Iterator[tuple[str, str]]:
    """Each command in its order: ("bash", one line, its continuations joined) or ("python", a block)."""
    for language, code in BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
        if language == "python":
            yield language, code
        elif language == "bash":
            for line in code.replace("\\\n", " ").splitlines():
                yield language, line


def keys() -> list[tuple[str, str]]:
    """The questions of `accelerate config` and the keys that answer them."""
    found = QUESTION.findall(GUIDE.read_text(encoding="utf-8"))
    return [(question, answer.replace(" ", "").replace("Enter", "\r")) for question, answer in found]


@dataclass
class Reader:
    """A reader of the guide: a folder, an environment that `export` adds to, servers left in the background."""

    folder: Path
    script: Path

    def __post_init__(self) -> None:
        self.port = "0"  # a free one; once a server listens, that server's
        self.background: list[subprocess.Popen[str]] = []
        self.output: dict[str, str] = {}
        paths = [str(HERE / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        programs = [str(HERE / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        self.environment = dict(os.environ)
        self.environment |= {"PATH": os.pathsep.join(programs), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.environment |= {
            "CUDA_VISIBLE_DEVICES": "",
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "TERM": "xterm",
        }
        self.environment["GUIDE_TRAIN"] = str(self.script)

    def run(self, language: str, command: str) -> str:
        """Run a command as the guide has it, but for `SMALLER` and the port; what it printed."""
        for big, small in {**SMALLER, "7010": self.port}.items():
            command = command.replace(big, small)
        if language == "python":
            return self._finish([sys.executable, "-c", command])
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self.environment[name] = value
            return ""
        if command.startswith("accelerate config"):
            return self._answer(command)
        if command.endswith("&"):
            self.background.append(self._start(["bash", "-c", f"exec {command.rstrip('& ')}"]))
            self.port = self._port_of(self.background[-1])
            return ""
        return self._finish(["bash", "-c", command])

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def _port_of(self, server: subprocess.Popen[str]) -> str:
        """From the address that a server prints when it listens."""
        assert server.stdout is not None
        (port,) = next(found for line in server.stdout if (found := re.findall(r"http://[\d.]+:(\d+)", line)))
        return str(port)

    def _finish(self, command: list[str]) -> str:
        process = self._start(command)
        self.background.append(process)
        output, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, f"{command}:\n{output[-6000:]}"
        return output

    def _answer(self, command: str) -> str:
        """A person at a terminal: waits for each question of the table and presses its keys."""
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            command.split(), cwd=self.folder, env=self.environment, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        shown = ""
        try:
            for question, answer in keys():
                shown = _read_until(ours, question, shown)
                shown = _read(ours, shown, until=lambda text: text.rstrip().endswith(":") or _reads_keys(ours))
                os.write(ours, answer.encode())
            _read_until(ours, "saved at", shown)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
        return shown

    def close(self) -> None:
        for process in self.background:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _read_until(terminal: int, text: str, shown: str) -> str:
    """What the terminal shows behind `text`."""
    shown = _read(terminal, shown, until=lambda shown: text in shown)
    return shown[shown.index(text) + len(text) :]


def _read(terminal: int, shown: str, until: Callable[[str], bool]) -> str:
    """`shown` and what else appears on the terminal, without colours, until it is enough."""
    deadline = time.monotonic() + WAIT_S
    while not until(shown):
        assert time.monotonic() < deadline, f"nothing follows {shown[-2000:]!r}"
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            read = os.read(terminal, 65536)
        except OSError as error:
            raise AssertionError(f"the program ended after {shown[-2000:]!r}") from error
        shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", read.decode(errors="replace")).replace("\r\n", " ")
    return shown


def _reads_keys(terminal: int) -> bool:
    """A menu waits for a key. One pressed before it does would be lost."""
    return not termios.tcgetattr(terminal)[3] & termios.ICANON
