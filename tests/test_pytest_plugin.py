"""The pytest plugin, in sessions of pytest of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "verify.md"

WRONG = """
def test_frozen(replay_verify):
    model = make_model(replay_verify.device)
    step, calls = model.step, [0]

    def counting(batch):
        calls[0] += 1
        return step(batch) * float(calls[0])

    object.__setattr__(model, "step", counting)
    replay_verify(model, max_requests=2, trials=2)
"""

ON = """
def test_where(replay_verify):
    print("on", replay_verify.backend, replay_verify.device)
"""

RUNTIME = """
from capture import DecodeRuntime

def test_runtime(replay_verify):
    runtime = DecodeRuntime(
        make_model(replay_verify.device), max_requests=2, max_context=32,
        backend=replay_verify.backend,
    )
    with runtime:
        report = replay_verify(runtime, trials=2)
    assert report.ok and report.trials == 2
"""


def example() -> str:
    """The page's test, as a user would paste it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = [block for block in blocks if block.startswith("# test_my_step.py")]
    assert len(found) == 1
    return found[0]


def session(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a file of tests with the plugin, and with no configuration of this project's."""
    (folder / "test_pasted.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    path = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "pytest_graphcache", "-rs", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_pages_example_passes(tmp_path: Path) -> None:
    ran = session(tmp_path, example(), "--graph-backend=tape")
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


def test_a_fault_fails_the_test_with_the_report(tmp_path: Path) -> None:
    """Whole, and without a traceback through the plugin; a runtime beside it passes."""
    ran = session(tmp_path, example() + WRONG + RUNTIME, "--graph-backend=tape", "-k", "not my")
    assert ran.returncode == 1
    assert "1 failed, 1 passed, 1 deselected" in ran.stdout, ran.stdout + ran.stderr
    assert "frozen-value: a number from Python was fixed at capture" in ran.stdout
    said = " ".join(ran.stdout.split())
    assert re.search(r"test_pasted.py:\d+: return step\(batch\) \* float\(calls\[0\]\)", said)
    assert "pytest_graphcache/__init__.py" not in ran.stdout


@pytest.mark.parametrize("asked", ["auto", "tape", "cuda_graph"])
def test_where_steps_are_replayed(tmp_path: Path, asked: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        ran = session(tmp_path, ON, f"--graph-backend={asked}", "-s")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if asked == "cuda_graph":
        assert "1 skipped" in ran.stdout
        assert "--graph-backend=cuda_graph needs a CUDA GPU" in ran.stdout
    else:
        assert "on tape cpu" in ran.stdout


@pytest.mark.gpu
def test_the_pages_example_passes_on_a_gpu(tmp_path: Path) -> None:
    ran = session(tmp_path, example() + ON, "-s")
    assert "2 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "on cuda_graph cuda" in ran.stdout


def test_an_unknown_backend_is_refused(tmp_path: Path) -> None:
    ran = session(tmp_path, ON, "--graph-backend=graphs")
    assert ran.returncode == 4
    assert "invalid choice: 'graphs'" in ran.stderr


def test_loading_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, pytest_graphcache;"
        "print([m for m in ('torch', 'numpy', 'capture', 'graphcache') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr
