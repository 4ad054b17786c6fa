"""`graphcache profile` with a stand-in for nsys: what it is asked, and every way it can fail."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import profiles.nsys.tool as tool
from capture import cli
from profiles.nsys import EmptyProfile, NsysError, NsysMissing
from profiles.nsys.tool import Nsys, find_nsys
from tests.profiles.nsys_builder import STEP, Process, capture

# Runs the command as nsys does, and gives the export that lies beside it for that mode.
STAND_IN = f"""#!{sys.executable}
import json, os, shutil, subprocess, sys
home = os.path.dirname(os.path.abspath(__file__))
words = sys.argv[1:]
with open(os.path.join(home, "asked.jsonl"), "a") as file:
    file.write(json.dumps(words) + "\\n")
value = lambda name: next(w.split("=", 1)[1] for w in words if w.startswith(name + "="))
if words[0] == "profile":
    first = next(i for i, w in enumerate(words[1:], 1) if not w.startswith("--"))
    code = subprocess.call(words[first:])
    if os.environ.get("NO_REPORT") is None:
        with open(value("--output") + ".nsys-rep", "w") as file:
            file.write(value("--cuda-graph-trace"))
    sys.exit(code)
if os.environ.get("NO_EXPORT"):
    sys.exit(os.environ["NO_EXPORT"])
mode = open(words[-1]).read()
shutil.copy(os.path.join(home, mode + ".export"), value("--output"))
"""

WORKLOAD = (
    "import os, sys; from tests.capture.support import chain_runtime\n"
    "print('working')\n"
    "with chain_runtime('tape') as runtime: runtime.capture(progress=False)\n"
)


class StandIn:
    """nsys, as far as this package uses it; exports hold one replay of bucket 8."""

    def __init__(self, home: Path) -> None:
        self.path = home / "nsys"
        self.path.write_text(STAND_IN)
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)
        for mode, took in (("node", 1000), ("graph", 500)):
            process = Process(mode)
            process.launch(capture(process, "8"), rows=8, took=took)
            process.save(home / f"{mode}.export")

    def asked(self) -> list[list[str]]:
        lines = (self.path.parent / "asked.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    home = tmp_path / "bin"
    home.mkdir()
    monkeypatch.setenv("PATH", str(home), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return StandIn(home)


def run(*words: object) -> Any:
    return CliRunner().invoke(cli.app, ["profile", *map(str, words)])


def test_node_mode_by_default(nsys: StandIn, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = run("--output", output, "--", sys.executable, "-c", WORKLOAD)
    assert done.exit_code == 0, done
    assert "layer *" in done.stdout and "100.0% of device time" in done.stdout
    asked, exported = nsys.asked()
    assert asked[0] == "profile" and asked[-3:] == [sys.executable, "-c", WORKLOAD]
    assert "--cuda-graph-trace=node" in asked and "--trace=cuda,nvtx" in asked
    assert not any(word.startswith("--capture-range") for word in asked)
    assert exported[:2] == ["export", "--type=sqlite"]
    assert (output / "icicle.svg").read_text().startswith("<svg")
    assert json.loads((output / "node.json").read_text())["traceEvents"]
    # The workload's capture saved its spans, without being told to but by its environment.
    assert len(list((output / "spans-node").glob("*.json"))) == 1


def test_both_modes_tell_what_tracing_nodes_costs(nsys: StandIn, tmp_path: Path) -> None:
    done = run("--mode", "both", "--output", tmp_path / "out", "--", "true")
    modes = [
        word for words in nsys.asked() for word in words if word.startswith("--cuda-graph-trace")
    ]
    assert modes == ["--cuda-graph-trace=node", "--cuda-graph-trace=graph"]
    whole = sum(500 * (i + 1) for i in range(len(STEP))) + 100 * (len(STEP) - 1)
    traced = sum(1000 * (i + 1) for i in range(len(STEP))) + 100 * (len(STEP) - 1)
    assert f"{traced / whole:.2f} (bucket 8)" in done.stdout
    told = run("--mode", "both", "--output", tmp_path / "out", "--json", "--", "echo", "noise")
    found = json.loads(told.stdout)
    assert found["node"]["attributed_share"] == 1 and found["graph"]["mode"] == "graph"


@pytest.mark.parametrize(
    ("window", "option"),
    [
        ("api", "--capture-range=cudaProfilerApi"),
        ("nvtx", "--nvtx-capture=window@graphcache"),
    ],
)
def test_windows(nsys: StandIn, tmp_path: Path, window: str, option: str) -> None:
    assert run("--window", window, "--output", tmp_path / "o", "--", "true").exit_code == 0
    asked = nsys.asked()[0]
    assert option in asked and "--capture-range-end=stop" in asked
    assert asked.index(option) < asked.index("true")


def test_a_workload_that_fails_is_named(nsys: StandIn, tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('out of luck')"]
    failed = run("--output", tmp_path / "o", "--", *words).exception
    assert isinstance(failed, NsysError) and not isinstance(failed, NsysMissing)
    assert "ended with code 1" in str(failed) and "out of luck" in str(failed)


def test_a_run_without_a_report_is_named(
    nsys: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--output", tmp_path / "o", "--", "true").exit_code == 0
    monkeypatch.setenv("NO_REPORT", "1")
    failed = run("--output", tmp_path / "o", "--", "true").exception
    assert isinstance(failed, NsysError) and "left no report" in str(failed)


def test_an_export_that_fails_is_named(
    nsys: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "_loads", lambda name: True)
    monkeypatch.setenv("NO_EXPORT", "disk full")
    failed = run("--output", tmp_path / "o", "--", "true").exception
    assert isinstance(failed, NsysError) and "disk full" in str(failed)
    monkeypatch.setenv("NO_EXPORT", "error while loading shared libraries: libdw.so.1: no such")
    failed = run("--output", tmp_path / "o", "--", "true").exception
    assert isinstance(failed, NsysMissing) and "apt-get install libdw1" in str(failed)


def test_a_profile_without_replays_is_named(nsys: StandIn, tmp_path: Path) -> None:
    process = Process()
    process.eager("alone")
    export = nsys.path.parent / "node.export"
    export.unlink()
    process.save(export)
    failed = run("--output", tmp_path / "o", "--", "true").exception
    assert isinstance(failed, EmptyProfile)


# --- where nsys is --------------------------------------------------------------------------------


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_no_nsys_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tool, "PLACES", (f"{tmp_path}/*/nsys",))
    failed = run("--", "true").exception
    assert isinstance(failed, NsysMissing) and "--nsys PATH" in str(failed)
    with pytest.raises(NsysMissing, match="no nsys at"):
        find_nsys(tmp_path / "nsys")


def test_the_newest_install_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    old, new = (
        program(tmp_path / f"nsight-compute-2025.{minor}.0/host/target-linux-x64/nsys")
        for minor in (9, 10)
    )
    (tmp_path / "nsight-compute-2026.1.0/host/target-linux-x64/nsys").mkdir(parents=True)
    place = f"{tmp_path}/nsight-compute-*/host/target-linux-*/nsys"
    monkeypatch.setattr(tool, "PLACES", (place,))
    assert find_nsys() == Nsys(new)
    assert find_nsys(old) == Nsys(old)


def test_an_install_of_nsight_compute_is_found_by_its_ncu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "nsight-compute"
    program(home / "ncu")
    found = program(home / "host/target-linux-x64/nsys")
    monkeypatch.setattr(tool, "PLACES", ())
    monkeypatch.setenv("PATH", str(home))
    assert find_nsys() == Nsys(found)


def test_its_libraries_are_looked_for_before_the_workload_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tool, "_loads", lambda name: name != "libelf.so.1")
    inside = Nsys(program(tmp_path / "nsight-compute/host/target-linux-x64/nsys"))
    with pytest.raises(NsysMissing, match=r"without libelf.so.1: .* libelf1"):
        inside.check()
    Nsys(program(tmp_path / "nsys")).check()


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "nsys").write_text("")
    with pytest.raises(NsysError, match="can't be run"):
        Nsys(tmp_path / "nsys").profile(["true"], tmp_path / "r", mode="node")


def test_an_installed_package_says_where_the_command_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    assert "checkout" in str(run("--", "true").exception)
