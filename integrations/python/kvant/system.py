"""What the package needs of an operating system: names of libraries, processors, other programs,
files that are written as a whole. No other module asks which system it is."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import threading
from typing import Any

WINDOWS = sys.platform == "win32"
CAN_STOP = not WINDOWS  # whether a program can send a Ctrl-C to another one

# libkvant in an installation, seen from the folder with `bin` and `lib`, and the loader's names.
LIBRARY, *NAMES = {
    "win32": ["bin/libkvant.dll", "libkvant.dll"],
    "darwin": ["lib/libkvant.dylib", "libkvant.dylib"],
}.get(sys.platform, ["lib/libkvant.so", "libkvant.so.0", "libkvant.so"])
LLAMA = {"win32": "llama*.dll", "darwin": "libllama*.dylib"}.get(sys.platform, "libllama.*so*")
CUDA_DRIVER = "nvcuda.dll" if WINDOWS else "libcuda.so.1"

_SC_LEVEL3_CACHE_SIZE = 194  # of glibc; Python has no name for it


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file; path never holds half of it, also if several processes or threads write it at
    once: the last one wins. An older file stays when that fails. A device or a pipe is written as
    it is, because a rename would replace it."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            file.write(data)
        return
    temporary = f"{os.fspath(path)}.{os.getpid()}-{threading.get_ident()}.part"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def processors() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or "unknown CPU"


def last_cache() -> int:
    """Bytes of the last cache level that the system reports; 0 when it does not. On virtual
    machines it is the whole host's."""
    try:
        return max(os.sysconf(_SC_LEVEL3_CACHE_SIZE), 0)
    except (AttributeError, OSError, ValueError):
        return 0


def start(words: list[str], **options: Any) -> subprocess.Popen:
    """Starts a program for which stop() is the only Ctrl-C. Without CAN_STOP the terminal sends the
    key to the program, too, and stop() does nothing."""
    return subprocess.Popen(words, start_new_session=CAN_STOP, **options)


def stop(process: subprocess.Popen) -> None:
    if CAN_STOP and process.poll() is None:
        process.send_signal(signal.SIGINT)


def become(program: str | os.PathLike[str], words: list[str]) -> None:
    """Puts the program into the place of this process. On Windows this process waits for it and
    ends as it ended."""
    if not WINDOWS:
        os.execv(program, words)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program gets the same Ctrl-C
    sys.exit(subprocess.run([program, *words[1:]]).returncode)
