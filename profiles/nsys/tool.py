"""Finds Nsight Systems on this machine and runs it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import NsysError, NsysMissing

__all__ = ["Nsys", "find_nsys"]

PLACES = (
    "/usr/local/cuda*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-compute*/*/host/target-linux-*/nsys",
    "/usr/local/cuda*/nsight-compute-*/host/target-linux-*/nsys",
)
# What the importer of reports needs besides; the Debian packages are named without the "so".
LIBRARIES = {"libdw.so.1": "libdw1", "libelf.so.1": "libelf1"}
TAIL = 600
ERROR_OUTPUT = 2


@dataclass(frozen=True)
class Nsys:
    """Nsight Systems' command line.

    Attributes:
        path: of the executable.
    """

    path: Path

    def profile(
        self,
        command: Sequence[str],
        report: Path,
        *,
        mode: str,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Path:
        """Run a command under nsys; returns the report.

        Traces CUDA and NVTX only: sampling the CPU costs time and names nothing here.

        Args:
            command: program and arguments.
            report: where to write it; its suffix becomes `.nsys-rep`.
            mode: "node" or "graph", how replays are traced.
            options: more options of `nsys profile`.
            environment: more variables of the command.

        Raises:
            NsysError: when the command failed, or left no report.
        """
        written = report.with_suffix(".nsys-rep")
        written.unlink(missing_ok=True)
        code, said = self._run(
            [
                "profile", "--trace=cuda,nvtx", f"--cuda-graph-trace={mode}", "--sample=none",
                "--cpuctxsw=none", "--force-overwrite=true", f"--output={written.with_suffix('')}",
                *options, *command,
            ],
            {"NSYS_NVTX_PROFILER_REGISTER_ONLY": "0", **(environment or {})},
        )  # fmt: skip
        if code != 0:
            raise NsysError(f"under nsys `{' '.join(command)}` ended with code {code}: {said}")
        if not written.exists():
            raise NsysError(f"nsys left no report; was the window ever reached? It said: {said}")
        return written

    def export(self, report: Path) -> Path:
        """Make the SQLite export of a report, beside it.

        Raises:
            NsysMissing: when a library of the importer is missing.
            NsysError: when the export fails.
        """
        export = report.with_suffix(".sqlite")
        code, said = self._run(
            ["export", "--type=sqlite", "--force-overwrite=true", f"--output={export}", report], {}
        )
        if code != 0 or not export.exists():
            _check_libraries(said)
            raise NsysError(f"nsys could not export {report} (code {code}): {said}")
        return export

    def check(self) -> None:
        """Look for what an export will need, before a workload is run for nothing.

        Raises:
            NsysMissing: naming the library and its package.
        """
        if "nsight-compute" in str(self.path.resolve()):
            _check_libraries()

    def _run(
        self, arguments: Sequence[str | Path], environment: Mapping[str, str]
    ) -> tuple[int, str]:
        """Run nsys; its exit code and the end of what it said on its error output.

        What it and the workload print goes to this process's error output: the other is for
        results.
        """
        try:
            done = subprocess.run(
                [self.path, *arguments],
                stdout=ERROR_OUTPUT,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
                env={**os.environ, **environment},
            )
        except OSError as error:
            raise NsysError(f"{self.path} can't be run: {error.strerror}") from None
        return done.returncode, done.stderr.strip()[-TAIL:]


def find_nsys(asked: Path | None = None) -> Nsys:
    """The nsys that was asked for, or on PATH, or in an install of Nsight Systems or Compute.

    Raises:
        NsysMissing: when there is none.
    """
    if asked is not None:
        if not asked.is_file():
            raise NsysMissing(f"there is no nsys at {asked}")
        return Nsys(asked)
    for found in _candidates():
        return Nsys(found)
    raise NsysMissing(
        "Nsight Systems was not found: nsys is neither on PATH, nor in /usr/local/cuda*, "
        "/opt/nvidia/nsight-systems* or an install of Nsight Compute (its folder "
        "host/target-linux-x64). Install it, or name it with --nsys PATH"
    )


def _candidates() -> Iterator[Path]:
    on_path = shutil.which("nsys")
    if on_path:
        yield Path(on_path)
    for pattern in PLACES:
        root, rest = Path("/"), pattern.removeprefix("/")
        yield from sorted(filter(_is_program, root.glob(rest)), key=_version, reverse=True)
    compute = shutil.which("ncu")
    if compute:
        home = Path(compute).resolve().parent
        for folder in (home, *home.parents[:3]):
            yield from filter(_is_program, folder.glob("host/target-linux-*/nsys"))


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def _check_libraries(said: str = "") -> None:
    missing = [name for name in LIBRARIES if name in said or not _loads(name)]
    if missing:
        packages = " ".join(LIBRARIES[name] for name in missing)
        raise NsysMissing(
            f"nsys can't import reports without {' and '.join(missing)}: install them (Debian and "
            f"Ubuntu: apt-get install {packages}), or put their folder into LD_LIBRARY_PATH"
        )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
