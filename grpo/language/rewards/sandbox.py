"""Python that nobody has read, run where it can do nothing: bubblewrap namespaces, a system-call filter, hard limits.

The program sees the standard library, an empty /tmp of a few megabytes, and nothing else: no network, no home, no
environment, no files of the caller, no other process, no shell. It cannot start processes (so that its memory and time
are those of one) nor queues, and ends at its deadline, at its limits of CPU, memory, file size, number of files and
output, or with its caller. The number of files is counted from outside, every `LOOK` seconds: bubblewrap cannot set it.
What it prints is data for the caller to judge.

Not covered: a hole in the kernel's namespaces, and what a program can learn by measuring time. There is no fallback to
a plain process: without bubblewrap nothing runs.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import platform
import selectors
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.errors import ConfigError

LOOK = 0.05
"""Seconds between two counts of a program's files: some thousand can be made in that time."""
PROGRAM = "/box/program.py"
"""Where the program lies inside."""


@dataclass(frozen=True)
class Limits:
    """What one program may use; the time is given with each call."""

    memory: int = 512 << 20
    """Bytes of address space."""
    file: int = 16 << 20
    """Bytes of one file, and of /tmp."""
    output: int = 256 << 10
    """Bytes printed, all in all."""
    files: int = 64
    """Open at a time."""
    entries: int = 1000
    """Files and folders in /tmp."""
    threads: int = 64


class Stopped(Exception):
    """The program is over: out of time, out of bounds, or ended by itself."""


class Box:
    """One program in its sandbox. `main` is what the interpreter runs there; `program` lies beside it as a file."""

    def __init__(self, main: str, program: str, seconds: float, limits: Limits | None = None) -> None:
        self._limits = limits = limits or Limits()
        self._deadline, self._left, self.printed = time.monotonic() + seconds, limits.output, b""
        self._root: str | None = None
        """Where its folders can be looked at, once they are there."""
        lines = [f"import resource as r\nfor what, most in {_rlimits(limits, seconds)}:"]
        lines += ["    r.setrlimit(getattr(r, 'RLIMIT_' + what), (most, most))"]
        lines += ["del r, what, most", main]
        with contextlib.ExitStack() as stack:
            data = stack.enter_context(_held(program.encode("utf-8", "replace")))
            filtered = stack.enter_context(_held(_system_call_filter()))
            self._info, told = os.pipe()
            stack.callback(os.close, told)
            os.set_blocking(self._info, False)
            command = [*_command(limits, data.fileno(), filtered.fileno(), told), "-c", "\n".join(lines)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(data.fileno(), filtered.fileno(), told),
                env={},
                cwd="/",
            )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)

    def ask(self, line: bytes) -> bytes:
        """Send a line, get the next one."""
        self._exchange(line + b"\n", lambda: b"\n" in self.printed)
        answer, _, self.printed = self.printed.partition(b"\n")
        return answer

    def finish(self, data: bytes) -> tuple[int, bytes]:
        """Send the rest of its input, and wait for its exit code and all it printed."""
        with contextlib.suppress(_Closed):
            self._exchange(data, lambda: False, close=True)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(self._look()), self.printed

    def _look(self) -> float:
        """Seconds until the next look; none where it is out of time, or has made too many files."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise Stopped("out of time")
        with contextlib.suppress(OSError, ValueError, KeyError):  # not there yet, or no longer
            if self._root is None:
                self._root = f"/proc/{json.loads(os.read(self._info, 4096))['child-pid']}/root/tmp"
            there = os.statvfs(self._root)
            ours = (
                there.f_blocks * there.f_frsize == self._limits.file
            )  # before its root is put in place it is the host's
            if ours and there.f_files - there.f_ffree > self._limits.entries:
                raise Stopped("too many files")
        return min(left, LOOK)

    def _exchange(self, data: bytes, enough: Callable[[], bool], close: bool = False) -> None:
        unsent = memoryview(data)
        with selectors.DefaultSelector() as pipes:
            pipes.register(self._out, selectors.EVENT_READ)
            pipes.register(self._in, selectors.EVENT_WRITE)
            while not enough():
                for pipe, _ in pipes.select(self._look()):
                    if pipe.fd == self._out:
                        self._read()
                        continue
                    try:
                        unsent = unsent[os.write(self._in, unsent[:65536]) :]
                    except BrokenPipeError:
                        unsent = unsent[:0]
                    if not unsent:
                        pipes.unregister(self._in)
                        if close and self._process.stdin:
                            self._process.stdin.close()

    def _read(self) -> None:
        some = os.read(self._out, 65536)
        if not some:
            raise _Closed("it ended")
        self._left -= len(some)
        if self._left < 0:
            raise Stopped("too much output")
        self.printed += some

    def close(self) -> None:
        """End it, whatever it is doing: the namespace goes with its first process."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            os.close(self._info)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Closed(Stopped):
    """It closed its output."""


RUN = f"""
import sys
sys.argv = [{PROGRAM!r}]
import runpy
runpy.run_path({PROGRAM!r}, run_name="__main__")
"""


def run(program: str, data: str = "", seconds: float = 10.0, limits: Limits | None = None) -> tuple[int, str]:
    """Exit code and output of a program that is given `data` as its input. `Stopped`: it did not get that far."""
    with Box(RUN, program, seconds, limits) as box:
        code, said = box.finish(data.encode("utf-8", "replace"))
    return code, said.decode("utf-8", "replace")


# --- whether it holds -----------------------------------------------------------------------------------------------

_PROBE = """
import os, socket, sys
def free(what, *arguments):
    try:
        what(*arguments)
    except OSError:
        return False
    return True
print([name for name, open_ in {
    "the network": free(socket.socket),
    "new processes": hasattr(os, "fork") and free(os.fork),
    "the environment": bool(set(os.environ) - {"PWD", "LC_CTYPE", "PATH"}),
    "the caller's files": free(os.stat, sys.stdin.readline().strip()),
    "the root folder": free(os.mkdir, "/new"),
    "other processes": os.path.exists("/proc") or os.getppid() > 1,
}.items() if open_])
"""


_MANY_FILES = """
import os, time
for number in range(2000):
    os.close(os.open(str(number), os.O_CREAT))
time.sleep(2)
"""


@functools.cache
def self_test() -> str | None:
    """None: sandboxes work here and hold. Else the reason why code cannot be run, with the remedy."""
    if shutil.which("bwrap") is None:
        return "running generated code needs bubblewrap, which is not installed: apt install bubblewrap"
    if platform.machine() not in _MACHINES:
        return f"running generated code is not supported on {platform.machine()}: its system calls are not known"
    try:
        code, said = run(_PROBE, str(Path(__file__).resolve()) + "\n", 60.0)
    except (Stopped, OSError) as error:
        return f"bubblewrap is installed but cannot make a sandbox: {error}"
    if code:
        return (
            f"bubblewrap is installed but cannot make a sandbox (exit code {code}); it needs user namespaces: try "
            "`bwrap --unshare-all --ro-bind / / true`, and in a container allow them (seccomp=unconfined)"
        )
    if said.strip() != "[]":
        return f"the sandbox does not hold: {said.strip()[:200]} can be reached"
    try:
        run(_MANY_FILES, "", 60.0)
    except Stopped as error:
        return None if str(error) == "too many files" else f"the sandbox does not hold: {error} while files are made"
    return "the sandbox does not hold: its files cannot be counted through /proc, so that it could fill the memory"


def require() -> None:
    """ConfigError with the reason where code cannot be run safely."""
    if reason := self_test():
        raise ConfigError(reason)


# --- how it is made -------------------------------------------------------------------------------------------------


def _command(limits: Limits, program: int, filtered: int, told: int) -> list[str]:
    """bubblewrap's command line up to the interpreter's own arguments."""
    return [
        *(shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"),
        *("--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", "--hostname", "box"),
        *_mounts(),
        *("--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/urandom", "/dev/urandom"),
        *("--ro-bind-data", str(program), PROGRAM),
        *("--size", str(limits.file), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"),
        *("--info-fd", str(told), "--seccomp", str(filtered), _interpreter(), "-I", "-S", "-B", "-X", "utf8"),
    ]


def _interpreter() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def _mounts() -> tuple[str, ...]:
    """The interpreter, its standard library and the system's shared libraries, read-only."""
    mounts: list[str] = []
    for folder in ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/lib32"):
        if os.path.islink(folder):
            mounts += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            mounts += ["--ro-bind", folder, folder]
    mounts += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--ro-bind", _interpreter(), _interpreter()]
    libraries = os.path.join(sys.base_prefix, "lib")
    of_base = {"installed_base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # not a virtual environment's
    standard = {sysconfig.get_path(which, vars=of_base) for which in ("stdlib", "platstdlib")}
    for folder in sorted({libraries, *standard}):
        if os.path.isdir(folder) and not folder.startswith(("/usr/lib", "/lib")):
            mounts += ["--ro-bind", folder, folder]
    for folder in sorted(standard):  # what is installed beside the standard library is the caller's
        installed = os.path.join(folder, "site-packages")
        if os.path.isdir(installed):
            mounts += ["--tmpfs", installed, "--remount-ro", installed]
    return tuple(mounts)


def _rlimits(limits: Limits, seconds: float) -> list[tuple[str, int]]:
    return [
        ("AS", limits.memory),
        ("CPU", int(seconds) + 1),
        ("FSIZE", limits.file),
        ("NOFILE", limits.files),
        ("NPROC", limits.threads),
        ("CORE", 0),
    ]


def _held(data: bytes) -> Any:
    """A file without a name that holds the data, at its beginning."""
    file = os.fdopen(os.memfd_create("box"), "w+b")
    file.write(data)
    file.seek(0)
    return file


# Per machine: its audit number, clone, clone3, and the calls that are refused: fork, vfork, socket, ptrace, mount,
# unshare, setns, memfd_create, shmget, semget, msgget, mq_open, bpf, userfaultfd, add_key, request_key, keyctl,
# perf_event_open, io_uring_setup, process_vm_readv, process_vm_writev, pidfd_getfd.
_MACHINES: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        56,
        435,
        (57, 58, 41, 101, 165, 272, 308, 319, 29, 64, 68, 240, 321, 323, 248, 249, 250, 298, 425, 310, 311, 438),
    ),
    "aarch64": (
        0xC00000B7,
        220,
        435,
        (198, 117, 40, 97, 268, 279, 194, 190, 186, 180, 280, 282, 217, 218, 219, 241, 425, 270, 271, 438),
    ),
}


@functools.cache
def _system_call_filter() -> bytes:
    """A BPF program for seccomp: threads, but no processes; no sockets, no tracing, no memory that is not counted.

    RLIMIT_NPROC alone does not do: the kernel does not apply it to root, which containers often run as.
    """
    audit, clone, clone3, refused = _MACHINES[platform.machine()]
    load, equal, at_least, has_bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, error = 0x80000000, 0x7FFF0000, 0x00050000
    steps = [(load, 0, 0, 4), (equal, 1, 0, audit), (give, 0, 0, kill), (load, 0, 0, 0)]
    if platform.machine() == "x86_64":  # its second set of numbers
        steps += [(at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]
    for number in refused:
        steps += [(equal, 0, 1, number), (give, 0, 0, error | errno.EPERM)]
    # The flags of clone3 cannot be looked at; without it, libraries use clone.
    steps += [(equal, 0, 1, clone3), (give, 0, 0, error | errno.ENOSYS)]
    clone_thread = 0x00010000
    steps += [(equal, 0, 3, clone), (load, 0, 0, 16), (has_bits, 1, 0, clone_thread), (give, 0, 0, error | errno.EPERM)]
    steps += [(give, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)
