"""The kernel in CUDA C++: that it builds, that both sides agree on its arguments, when it serves.

What it computes is tested on a GPU, with the other kernels, in test_entry_attention.py.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from capture import environment
from graphcache.errors import UnsupportedPlatform
from graphcache.ops import _cuda
from graphcache.ops.entry_attention import sm90
from graphcache.rows import Rows

SOURCE = Path(sm90.__file__).with_name("sm90.cu")
C_TYPES = {"Rows": sm90._Rows, "i64": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float}


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("row_format", [0, 1, 2])
def test_it_builds_without_spills(row_format: int, splits: int, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    built = subprocess.run(
        [nvcc, "--cubin", "-arch=sm_90a", "-std=c++17", "-Xptxas=-v", f"-DFORMAT={row_format}",
         f"-DSPLITS={splits}", str(SOURCE), "-o", str(tmp_path / "built.cubin")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "0 bytes spill stores, 0 bytes spill loads" in built.stderr
    # ptxas says so where it makes products wait for each other.
    assert "serialized" not in built.stderr


def test_it_builds_at_run_time() -> None:
    if not _cuda.nvrtc_is_there():
        pytest.skip("needs NVRTC")
    image = _cuda._compile("entry_attention/sm90.cu", (("FORMAT", 1), ("SPLITS", 8)), "sm_90a")
    assert image.startswith(b"\x7fELF")
    with pytest.raises(UnsupportedPlatform, match=r"does not compile for sm_90a:\n(.|\n)*FORMAT"):
        _cuda._compile("entry_attention/sm90.cu", (("SPLITS", 8),), "sm_90a")


def test_without_a_compiler_the_others_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("no libnvrtc")

    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    assert _cuda.nvrtc_is_there.__wrapped__() is False
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(sm90, "nvrtc_is_there", lambda: False)
    assert sm90._device_serves.__wrapped__(0) is False
    monkeypatch.setattr(sm90, "nvrtc_is_there", lambda: True)
    assert sm90._device_serves.__wrapped__(0) is True
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 0))
    assert sm90._device_serves.__wrapped__(0) is False


@pytest.mark.parametrize("name", ["Rows", "Arguments"])
def test_both_sides_agree_on_the_arguments(name: str) -> None:
    body = re.search(rf"struct {name} \{{(.*?)\}};", SOURCE.read_text(), re.DOTALL)
    assert body is not None
    declared = []
    for line in re.sub(r"//[^\n]*", "", body.group(1)).split(";")[:-1]:
        kind, names = re.fullmatch(r"\s*(?:const )?(\w+) (.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        for field in names.split(","):
            pointer = field.strip().startswith("*")
            declared.append((field.strip(" *\n"), ctypes.c_uint64 if pointer else C_TYPES[kind]))
    assert list(getattr(sm90, f"_{name}")._fields_) == declared


def test_splits_are_a_power_of_two_of_the_schema() -> None:
    assert [sm90.splits_of(128, entries) for entries in (0, 512, 8192, 1 << 20)] == [1, 2, 8, 8]
    for entries in range(0, 40000, 100):
        splits = sm90.splits_of(128, entries)
        tiles = 2 + -(-entries // 64)
        assert splits in (1, 2, 4, 8) and (splits == 1 or tiles / splits >= sm90.MIN_TILES)


def test_rows_must_lie_at_16_bytes() -> None:
    def rows(values_row: int = 448, values_from: int = 0, rope_dim: int = 64) -> Rows:
        return Rows(
            torch.zeros(8 * values_row + 16, dtype=torch.uint8)[values_from:].as_strided(
                (2, 4, 448), (4 * values_row, values_row, 1)
            ),
            torch.zeros(2, 4, rope_dim, dtype=torch.bfloat16),
            torch.zeros(2, 4),
        )

    assert sm90._is_aligned(rows())
    assert not sm90._is_aligned(rows(values_row=456))
    assert not sm90._is_aligned(rows(values_from=8))
    assert not sm90._is_aligned(rows(rope_dim=32))
    plain = Rows(torch.zeros(2, 4, 512, dtype=torch.bfloat16), None, None)
    assert sm90._is_aligned(plain)
    assert not sm90.serves(torch.zeros(1, 64, 512, dtype=torch.bfloat16), 64, plain, None)


def test_the_environment_tells_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "nvrtc_is_there", lambda: False)
    lacking = environment._compiler((9, 0))
    assert not lacking.present and "NVRTC" in lacking.note
    assert environment._compiler((8, 0)).present
    monkeypatch.setattr(environment, "nvrtc_is_there", lambda: True)
    assert environment._compiler((9, 0)).present
