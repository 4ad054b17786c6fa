"""`capture.diff` and `graphcache diff`: where two runs part is what was changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from capture import cli, probe, scope
from capture.diff import ProbeRun, compare, record
from capture.diff import command as diff_command
from capture.errors import ProbeError
from graphcache import Batch
from graphcache.errors import InvalidRequest
from graphcache.models import StepFunction, load_model
from tests.capture.support import Chain
from tests.models.tiny import tiny_model, tiny_v4_model
from tests.toy import BACKENDS, VOCAB, device_of

both = pytest.mark.parametrize("backend", BACKENDS)
PROMPT = [5, 9, 17, 3]
LAYERS = 3


def tiny(backend: str, change: Callable[[Any], None] | None = None) -> Any:
    model = tiny_model()
    if change is not None:
        with torch.no_grad():
            change(model)
    return load_model(model.to(device_of(backend)))


def of(model: Any, backend: str, **options: Any) -> ProbeRun:
    return record(model, PROMPT, backend=backend, **{"steps": 4, **options})


# --- runs that are the same -----------------------------------------------------------------------


@both
def test_replays_agree_with_eager_steps_bit_for_bit(backend: str) -> None:
    model = tiny(backend)
    replayed = of(model, backend)
    eager = of(model, backend, eager=True, taken=replayed.taken)
    assert (replayed.how, eager.how) == ("replay", "eager")
    found = compare(replayed, eager)
    assert found.first is None and found.tolerance is None
    assert len(found.probes) == 3 * LAYERS + 1
    assert all(probe.relative_l2 == 0 for probe in found.probes)
    assert "agree in 10 probes of 4 steps" in found.verdict
    assert found.as_json()["agree"] is True


@both
def test_every_layer_of_deepseek_v4_is_seen(backend: str) -> None:
    pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    model = load_model(tiny_v4_model().to(device_of(backend)))
    replayed = of(model, backend, steps=12)
    eager = of(model, backend, steps=12, eager=True, taken=replayed.taken)
    found = compare(replayed, eager)
    assert found.first is None and len(found.probes) == 3 * len(model.schemas) + 1
    assert {probe.scope for probe in found.probes[:3]} == {
        "model / layer 0 / attention", "model / layer 0 / mlp", "model / layer 0",
    }  # fmt: skip


@both
def test_steps_take_the_tokens_that_they_are_told(backend: str) -> None:
    model = tiny(backend)
    free = of(model, backend)
    other = [(token + 1) % model.vocab_size for token in free.taken]
    for eager in (False, True):
        told = of(model, backend, taken=other, eager=eager)
        assert told.taken == tuple(other)
        # The first step has seen the prompt only.
        assert all(torch.equal(told.steps[0][name], free.steps[0][name]) for name in free.steps[0])
        assert not torch.equal(told.steps[1]["model / logits"], free.steps[1]["model / logits"])


def test_a_run_ends_where_logits_are_not_finite() -> None:
    chain = Chain(broken=[(3 * 3 + 1) % VOCAB])
    found = record(chain.model(), PROMPT, steps=6, backend="tape")
    assert found.taken == (10, -1) and len(found.steps) == 2
    again = record(chain.model(), PROMPT, steps=2, taken=found.taken, eager=True, backend="tape")
    assert compare(found, again).first is None


# --- runs that part -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_a_changed_layer_is_named(backend: str, layer: int, part: str) -> None:
    def change(model: Any) -> None:
        found = model.model.layers[layer]
        (found.mlp.down_proj if part == "mlp" else found.self_attn.o_proj).weight[0, 0] += 0.05

    right = of(tiny(backend), backend)
    left = of(tiny(backend, change), backend, taken=right.taken)
    found = compare(left, right)
    assert found.first is not None and found.first.parts_at == 0
    assert found.first.scope == f"model / layer {layer} / {part}"
    assert repr(found.first.scope) in found.verdict
    before = found.probes[: 3 * layer + (part == "mlp")]
    assert all(probe.parts_at is None and probe.relative_l2 == 0 for probe in before)


@both
def test_a_number_frozen_at_capture_is_named(backend: str) -> None:
    """Python goes on counting in eager steps; replays have what it had at capture."""
    chain = Chain(device_of(backend))

    def step(batch: Batch) -> Tensor:
        with scope("before"):
            probe("tokens", batch.tokens)
        with scope("scale"):
            probe("scaled", (batch.positions + 1) * float(chain.runs))
        with scope("after"):
            probe("positions", batch.positions)
        return chain(batch)

    model = StepFunction(step, VOCAB, device=device_of(backend))
    left = of(model, backend)
    right = of(model, backend, eager=True, taken=left.taken)
    frozen, counted = (
        [float(s["model / scale / scaled"] / (s["model / after / positions"] + 1)) for s in r.steps]
        for r in (left, right)
    )
    assert len(set(frozen)) == 1 and [n - counted[0] for n in counted] == [0, 1, 2, 3]
    found = compare(left, right)
    assert found.first is not None and found.first.scope == "model / scale"
    assert found.first.parts_at == 0
    assert found.first.relative_l2 == pytest.approx(1 - frozen[0] / counted[-1])
    assert [probe.parts_at for probe in found.probes] == [None, 0, None, None]


def small_run(values: list[Tensor], **changes: Any) -> ProbeRun:
    """A run of one probe, its value by step."""
    steps = tuple({"a / x": value} for value in values)
    run = ProbeRun("m", "replay", "cpu", "float32", (1,), tuple(range(len(values))), steps)
    return replace(run, **changes)


def test_the_earliest_step_comes_before_the_first_probe() -> None:
    one = torch.ones(2)
    left = small_run([one, one])
    left = replace(left, steps=tuple({"a": one, "b": one * (i + 1)} for i in range(2)))
    right = replace(left, steps=({"a": one, "b": one * 2}, {"a": one * 2, "b": one * 2}))
    found = compare(left, right)
    assert found.first is not None and (found.first.name, found.first.parts_at) == ("b", 0)
    assert found.first.scope == "" and "'b'" in found.verdict


@pytest.mark.parametrize(
    ("mine", "theirs", "distance"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([float("nan"), 4.0], [float("nan"), 4.0], 0.0),
        ([float("nan"), 4.0], [3.0, 4.0], float("inf")),
        ([float("inf"), 4.0], [float("-inf"), 4.0], float("inf")),
        ([0.0, 1e-9], [0.0, 0.0], float("inf")),
    ],
)
def test_distances(mine: list[float], theirs: list[float], distance: float) -> None:
    left, right = small_run([torch.tensor(mine)]), small_run([torch.tensor(theirs)])
    (found,) = compare(left, right).probes
    assert found.relative_l2 == pytest.approx(distance)
    assert (found.parts_at is None) == (distance == 0)
    assert json.loads(json.dumps(compare(left, right).as_json(), allow_nan=False))


def test_what_is_asked_follows_device_and_dtype() -> None:
    left, right = small_run([torch.tensor([1.0, 0.0])]), small_run([torch.tensor([1.0, 9e-5])])
    assert compare(left, right).first is not None
    assert compare(left, replace(right, device="a GPU")).first is None
    rough = small_run([torch.tensor([1.0, 4e-2])], dtype="bfloat16")
    assert compare(left, rough).tolerance == 1e-1 and compare(left, rough).first is None
    assert compare(left, rough, 1e-2).first is not None
    assert compare(left, right, 1e-2).first is None
    # Equal bits, not equal numbers.
    signs = small_run([torch.tensor([0.0])]), small_run([torch.tensor([-0.0])])
    assert compare(*signs).first is not None and compare(*signs, 0.0).first is None


# --- what can't be compared -----------------------------------------------------------------------


def test_runs_of_other_inputs_are_refused() -> None:
    one = torch.ones(2)
    run = small_run([one, one])
    with pytest.raises(ProbeError, match="other prompts"):
        compare(run, replace(run, prompt=(2,)))
    with pytest.raises(ProbeError, match="took other tokens"):
        compare(run, replace(run, taken=(7, 1)))
    with pytest.raises(ProbeError, match="took other tokens"):
        compare(run, small_run([one]))
    with pytest.raises(ProbeError, match="no steps"):
        compare(run, replace(run, steps=()))
    assert compare(run, replace(run, taken=(0, 9))).first is None


def test_other_probes_and_shapes_are_refused() -> None:
    one = torch.ones(2)
    run = small_run([one])
    with pytest.raises(ProbeError, match="'a / x' on the left only, 'b' on the right only"):
        compare(run, replace(run, steps=({"b": one},)))
    with pytest.raises(ProbeError, match=r"\[2\] on the left and \[3\] on the right"):
        compare(run, small_run([torch.ones(3)]))
    many = replace(run, steps=({"b": one, "a": one},))
    with pytest.raises(ProbeError, match="in another order"):
        compare(many, replace(run, steps=({"a": one, "b": one},)))


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf")])
def test_a_tolerance_is_a_number(tolerance: float) -> None:
    run = small_run([torch.ones(2)])
    with pytest.raises(ProbeError, match="a tolerance"):
        compare(run, run, tolerance)


def test_bad_steps_and_tokens_are_refused() -> None:
    model = Chain().model()
    with pytest.raises(InvalidRequest, match="at least one step"):
        record(model, PROMPT, steps=0, backend="tape")
    with pytest.raises(InvalidRequest, match="2 tokens to take for 3 steps"):
        record(model, PROMPT, steps=3, taken=[1, 2], backend="tape")


# --- files ----------------------------------------------------------------------------------------


@both
def test_a_file_gives_back_the_run(backend: str, tmp_path: Path) -> None:
    run = of(tiny(backend), backend, name="mine")
    run.save(tmp_path / "run.safetensors")
    found = ProbeRun.load(tmp_path / "run.safetensors")
    assert found.describe() == run.describe()
    assert [list(step) for step in found.steps] == [list(step) for step in run.steps]
    assert compare(found, run).first is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.bool, torch.float64])
def test_a_file_keeps_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    run = small_run([torch.ones(3, 2).to(dtype).T])
    run.save(tmp_path / "run.safetensors")
    (step,) = ProbeRun.load(tmp_path / "run.safetensors").steps
    assert step["a / x"].dtype == dtype and step["a / x"].shape == (2, 3)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    with pytest.raises(ProbeError, match="no file"):
        ProbeRun.load(path)
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ProbeError, match="holds no probes of version 1"):
        ProbeRun.load(path)
    small_run([torch.ones(64)]).save(path)
    whole = path.read_bytes()
    for torn in (b"", whole[:40], whole[:-9], b"\0" * 99):
        path.write_bytes(torn)
        with pytest.raises(ProbeError, match="can't read probes"):
            ProbeRun.load(path)
    save_file({}, path, {"graphcache_probes": "1", "steps": '[["x"]]', "run": "{}"})
    with pytest.raises(ProbeError, match="can't read probes"):
        ProbeRun.load(path)
    with pytest.raises(ProbeError, match="can't write"):
        small_run([torch.ones(2)]).save(tmp_path / "nowhere" / "run.safetensors")


# --- the command ----------------------------------------------------------------------------------


class Ended:
    def __init__(self, code: Any, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and one with another second layer."""
    home = tmp_path_factory.mktemp("models")
    model = tiny_model()
    model.save_pretrained(home / "one")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 0.05
    model.save_pretrained(home / "two")
    return home / "one", home / "two"


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    monkeypatch.setattr(diff_command, "silence_libraries", lambda: None)

    def call(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["graphcache", "diff", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Ended(ended.value.code, *capsys.readouterr())

    return call


IDS = ("--ids", "5,9,17,3", "--steps", "2")


def test_a_model_beside_itself(run: Callable[..., Ended], folders: tuple[Path, Path]) -> None:
    ended = run(f"{folders[0]},device=cpu", *IDS)
    assert ended.code == 0 and "the runs agree in 10 probes of 2 steps" in ended.out
    assert "layer 2 / attention" in ended.out
    found = json.loads(run(f"{folders[0]},device=cpu", *IDS, "--json").out)
    assert (found["left"]["run"], found["right"]["run"]) == ("replay", "eager")


def test_two_models_part_where_they_differ(
    run: Callable[..., Ended], folders: tuple[Path, Path]
) -> None:
    left, right = (f"{folder},device=cpu" for folder in folders)
    ended = run(left, right, *IDS, "--json")
    found = json.loads(ended.out)
    assert ended.code == 1 and found["agree"] is False
    assert found["first"]["scope"] == "model / layer 1 / mlp"
    assert (found["left"]["run"], found["right"]["run"]) == ("replay", "replay")
    assert found["left"]["taken"] == found["right"]["taken"] and found["tolerance"] is None
    told = run(left, right, *IDS)
    assert told.code == 1 and "part first in scope 'model / layer 1 / mlp', step 0" in told.out
    assert run(left, right, *IDS, "--tolerance", 10).code == 0


def test_the_right_side_takes_the_lefts_tokens(
    run: Callable[..., Ended], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Though it would have drawn others."""
    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    sides = [f"{folder},device=cpu" for folder in (folders[0], tmp_path / "other")]
    found = json.loads(run(*sides, *IDS, "--json").out)
    swapped = json.loads(run(*sides[::-1], *IDS, "--json").out)
    assert found["left"]["taken"] == found["right"]["taken"]
    assert swapped["left"]["taken"] == swapped["right"]["taken"] != found["left"]["taken"]


def test_dtypes_are_compared_by_a_tolerance(
    run: Callable[..., Ended], folders: tuple[Path, Path]
) -> None:
    model = f"{folders[0]},device=cpu,run=eager"
    found = json.loads(run(model, f"{model},dtype=bfloat16", *IDS, "--json").out)
    assert found["tolerance"] == 1e-1 and found["right"]["dtype"] == "bfloat16"
    assert found["left"]["run"] == "eager" and any(p["relative_l2"] for p in found["probes"])


def test_a_saved_run_is_followed(
    run: Callable[..., Ended], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.safetensors"
    first, second = (f"{folder},device=cpu" for folder in folders)
    assert run(first, *IDS, "--save", kept).code == 0
    saved = ProbeRun.load(kept)
    assert len(saved.steps) == 2 and saved.prompt == (5, 9, 17, 3)
    assert run(kept, first).code == 0 and run(first, kept).code == 0 and run(kept, kept).code == 0
    for words in ((kept, second), (second, kept)):
        found = json.loads(run(*words, "--json").out)
        assert found["first"]["scope"] == "model / layer 1 / mlp"
        assert found["left"]["taken"] == found["right"]["taken"]


def test_wrong_words_are_refused(
    run: Callable[..., Ended], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.safetensors"
    small_run([torch.ones(2)]).save(kept)
    model = folders[0]
    for words, said in (
        ((f"{model},speed=fast",), "is no setting"),
        ((f"{model},run=twice",), "replay or eager"),
        ((f"{model},dtype=int8",), "float32 or"),
        ((f"{model},device=",), "a device"),
        ((model, "--ids", "1,x"), "numbers with commas"),
        ((model, "--ids", "1", "--prompt", "hi"), "not both"),
        ((model, "--prompt", " "), "empty"),
        ((kept,), "name a model"),
        ((kept, model, "--steps", "3"), "leave out"),
        ((kept, model, "--save", tmp_path / "x.safetensors"), "already"),
    ):
        ended = run(*words)
        assert ended.code == 2 and said in " ".join(ended.err.replace("│", " ").split()), words


def test_errors_have_names(
    run: Callable[..., Ended], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    missing = run(tmp_path / "nowhere.safetensors", folders[0])
    assert missing.code == 1 and missing.err.startswith("ProbeError: there is no file")
    weights = run(folders[0] / "model.safetensors", folders[0])
    assert weights.code == 1 and "holds no probes" in weights.err
    kept = tmp_path / "other.safetensors"
    replace(small_run([torch.ones(2)]), prompt=(5, 9)).save(kept)
    other = run(kept, f"{folders[0]},device=cpu")
    assert other.code == 1 and "ProbeError: the runs probed other things" in other.err
