"""What can't be captured is found before any capture, with the user's own line."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import CaptureError, DecodeRuntime, Ladder
from capture.backend import choose_backend
from capture.lint import Lint
from capture.rules import Rule
from graphcache import Batch, GraphCacheError
from graphcache.models import StepFunction
from tests.capture.support import Chain, bits, chain_runtime, differing
from tests.toy import BACKENDS, VOCAB, ToyDecoder, device_of

READS = "Keep it on the device"
DEPENDS = "Use a mask and torch.where"
CROSSES = "Make the tensor on the device before capture"
FROZEN = "Make the tensor before capture and keep it"
RANDOM = "Draw from a counter kept by slot"
MOVES = "Make the tensor in its full size before capture"
WAITS = "Leave it out of the step"
DRAWS = "it draws a random number on the host"
INDEX = "Give them a row that belongs to no request"
UNSEEN = "Make an operation of it"

# A line of a step, the operation that is named, and the advice that is given.
REFUSED: dict[str, tuple[str, str]] = {
    "n = x.sum().item()": ("Tensor.item()", READS),
    "n = x.tolist()": ("Tensor.tolist()", READS),
    "n = x.numpy()": ("Tensor.numpy()", READS),
    "n = np.asarray(x)": ("Tensor.__array__()", READS),
    "n = x.cpu()": ("Tensor.cpu()", READS),
    "n = x.to('cpu')": ("Tensor.to('cpu')", READS),
    "n = x.to(device='cpu:0')": ("Tensor.to('cpu')", READS),
    "if m.any(): y = y + 1": ("Tensor.__bool__()", READS),
    "while x.sum() < 0: y = y + 1": ("Tensor.__bool__()", READS),
    "assert x.max() < 100": ("Tensor.__bool__()", READS),
    "n = max(x[0, 0], x[0, 1])": ("Tensor.__bool__()", READS),
    "n = int(t)": ("Tensor.__int__()", READS),
    "n = float(x[0, 0])": ("Tensor.__float__()", READS),
    "n = complex(x[0, 0])": ("Tensor.__complex__()", READS),
    "n = [1, 2, 3][t]": ("Tensor.__index__()", READS),
    "n = list(range(t))": ("Tensor.__index__()", READS),
    "n = 3 in i": ("Tensor.__contains__()", READS),
    "print(x, file=nowhere)": ("Tensor.__repr__()", READS),
    "n = f'{t}'": ("aten._local_scalar_dense.default", READS),
    "n = x[:t]": ("aten._local_scalar_dense.default", READS),
    "n = x[t]": ("aten._local_scalar_dense.default", READS),
    "n = torch.zeros(t)": ("aten._local_scalar_dense.default", READS),
    "n = x.view(t, -1)": ("aten._local_scalar_dense.default", READS),
    "n = torch.equal(x, y)": ("aten.equal.default", READS),
    "n = torch.allclose(x, y)": ("aten.allclose.default", READS),
    "n = m.nonzero()": ("aten.nonzero.default", DEPENDS),
    "n = torch.where(m)": ("aten.nonzero.default", DEPENDS),
    "n = torch.argwhere(m)": ("aten.nonzero.default", DEPENDS),
    "n = x[m]": ("aten.index.Tensor", DEPENDS),
    "n = x.masked_select(m)": ("aten.masked_select.default", DEPENDS),
    "y[m[:, 0]] = x[0]": ("aten.index_put_.default", DEPENDS),
    "y[m[:, 0], i[:1]] = 0.0": ("aten.index_put_.default", DEPENDS),
    "n = i.unique()": ("aten._unique2.default", DEPENDS),
    "n = torch.unique(x, dim=0)": ("aten.unique_dim.default", DEPENDS),
    "n = torch.unique_consecutive(i)": ("aten.unique_consecutive.default", DEPENDS),
    "n = torch.repeat_interleave(x, i, dim=0)": ("aten.repeat_interleave.Tensor", DEPENDS),
    "n = torch.bincount(i)": ("aten.bincount.default", DEPENDS),
    "n = x.to_sparse()": ("aten._to_sparse.default", DEPENDS),
    "n = x.to('meta')": ("aten._to_copy.default", CROSSES),
    "elsewhere.copy_(x)": ("aten.copy_.default", CROSSES),
    "elsewhere[0, 0].copy_(torch.tensor(1.0))": ("aten.copy_.default", CROSSES),
    "n = elsewhere[torch.zeros_like(host)]": ("aten.index.Tensor", CROSSES),
    "n = torch.tensor([1, 2])": ("torch.tensor", FROZEN),
    "n = torch.tensor(data=[1.0])": ("torch.tensor", FROZEN),
    "n = torch.tensor(2.0, device='meta')": ("torch.tensor", FROZEN),
    "n = elsewhere.new_tensor(2.0)": ("Tensor.new_tensor", FROZEN),
    "n = torch.as_tensor([1.0, 2.0])": ("torch.as_tensor", FROZEN),
    "n = x.new_tensor([1.0, 2.0])": ("Tensor.new_tensor", FROZEN),
    "n = torch.from_numpy(np.ones(2))": ("a list or array as a tensor", FROZEN),
    "n = torch.asarray(np.ones(2))": ("a list or array as a tensor", FROZEN),
    "n = torch.LongTensor([1, 2])": ("a list or array as a tensor", FROZEN),
    "n = x[[0, 2]]": ("a list or array as a tensor", FROZEN),
    "n = x[np.array([0, 2])]": ("a list or array as a tensor", FROZEN),
    "torch.cuda.synchronize()": ("torch.cuda.synchronize", WAITS),
    "torch.cuda.Stream.synchronize(None)": ("torch.cuda.Stream.synchronize", WAITS),
    "torch.cuda.Event.synchronize(None)": ("torch.cuda.Event.synchronize", WAITS),
    "torch.cuda.empty_cache()": ("torch.cuda.empty_cache", WAITS),
    "torch.cuda.Stream.query(None)": ("torch.cuda.Stream.query", WAITS),
    "torch.cuda.Event.query(None)": ("torch.cuda.Event.query", WAITS),
    "torch.cuda.Event.elapsed_time(None, None)": ("torch.cuda.Event.elapsed_time", WAITS),
    "n = random.random()": ("random.random", DRAWS),
    "n = random.randint(0, 3)": ("random.randint", DRAWS),
    "n = np.random.rand(2)": ("numpy.random.rand", DRAWS),
    "n = torch.tensor_split(x, i)": ("torch.tensor_split", READS),
    "n = x.tensor_split(i)": ("torch.tensor_split", READS),
    "n = torch.linalg.inv(x[:3, :3])": ("aten._linalg_check_errors.default", READS),
    "n = y[slots]": ("aten.index.Tensor", INDEX),
    "n = y[i, slots]": ("aten.index.Tensor", INDEX),
    "y[slots] = 0.0": ("aten.index_put_.default", INDEX),
    "y[:, slots] += 1.0": ("aten.index.Tensor", INDEX),
    "y.index_add_(0, slots, x)": ("aten.index_add_.default", INDEX),
    "y.index_copy_(0, slots, x)": ("aten.index_copy_.default", INDEX),
    "y.index_fill_(0, slots, 2.0)": ("aten.index_fill_.int_Scalar", INDEX),
    "n = y.index_select(1, slots)": ("aten.index_select.default", INDEX),
    "n = y.gather(0, slots[None])": ("aten.gather.default", INDEX),
    "n = y.scatter(1, slots[:, None], 1.0)": ("aten.scatter.value", INDEX),
    "y.scatter_add_(1, slots[:, None], x)": ("aten.scatter_add_.default", INDEX),
    "n = y.take(slots)": ("aten.take.default", INDEX),
    "y.put_(slots, x[:, 0])": ("aten.put_.default", INDEX),
    "n = F.embedding(slots, y)": ("aten.embedding.default", INDEX),
    "n = F.embedding(i + 1, y)": ("aten.embedding.default", INDEX),
    "n = y[i + 1]": ("aten.index.Tensor", INDEX),
    "kernel[(1,)](x)": ("a Triton kernel", UNSEEN),
    "y.resize_(2, 2)": ("aten.resize_.default", MOVES),
    "y.set_(x)": ("aten.set_.source_Tensor", MOVES),
    "n = torch.rand(2)": ("aten.rand.default", RANDOM),
    "n = torch.rand_like(x)": ("aten.rand_like.default", RANDOM),
    "n = torch.randn(2, generator=torch.Generator())": ("aten.randn.generator", RANDOM),
    "n = torch.randint(0, 3, (2,))": ("aten.randint.low", RANDOM),
    "y.normal_()": ("aten.normal_.default", RANDOM),
    "y.exponential_()": ("aten.exponential_.default", RANDOM),
    "n = torch.multinomial(x + 1, 1)": ("aten.multinomial.default", RANDOM),
    "n = torch.bernoulli(m.float())": ("aten.bernoulli.default", RANDOM),
    "n = F.dropout(x)": ("aten.bernoulli_.float", RANDOM),
    "n = cpu_attention(q, q, q, 0.1)": (
        "aten._scaled_dot_product_flash_attention_for_cpu.default", RANDOM,
    ),
    "n = cpu_attention(q, q, q, dropout_p=0.1)": (
        "aten._scaled_dot_product_flash_attention_for_cpu.default", RANDOM,
    ),
    "n = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)": ("aten.bernoulli_.float", RANDOM),
}  # fmt: skip
ON_CPU_ONLY = (
    "torch.from_numpy",
    "torch.asarray",
    "torch.LongTensor",
    "torch.Generator",
    "host",
    "cpu_",
)

HEAD = """\
import io
import random

import numpy as np
import torch
import torch.nn.functional as F

from graphcache.ops._triton import jit

nowhere = io.StringIO()
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@jit
def kernel(x):
    return


def step(x, y, i, m, t, q, slots, elsewhere, host):
    y = y.mul_(2)
    {line}
    unreached()
"""
LINE = HEAD[: HEAD.index("{line}")].count("\n") + 1


def write(path: Path, text: str) -> Any:
    """A user's module, from a file of theirs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(device: torch.device) -> dict[str, Tensor]:
    x = torch.arange(12.0).reshape(3, 4)
    given = {
        "x": x,
        "y": x.clone(),
        "i": torch.tensor([2, 0, 1]),
        "m": x > 5,
        "t": torch.tensor(2),
        "slots": torch.full((3,), -1),
        "q": x[None, None],
    }
    given = {name: tensor.to(device) for name, tensor in given.items()}
    return {**given, "elsewhere": torch.empty(3, 4, device="meta"), "host": torch.tensor([0, 1])}


def refused(run: Callable[[], Any]) -> CaptureError:
    with pytest.raises(CaptureError) as caught, torch.no_grad(), Lint(values=True):
        run()
    return caught.value


@pytest.mark.parametrize("line", REFUSED)
def test_a_line_that_can_not_be_captured(line: str, tmp_path: Path) -> None:
    operation, advice = REFUSED[line]
    path = tmp_path / "their_model.py"
    user = write(path, HEAD.format(line=line))
    given = tensors(torch.device("cpu"))
    error = refused(lambda: user.step(**given))
    assert error.source is not None
    assert error.source.file == str(path)
    assert error.source.line == LINE
    assert error.source.text == line
    assert error.operation == operation
    assert str(error).startswith(f"{operation} can't be captured: ")
    assert advice in str(error)
    assert str(error).endswith(f"at {path}:{LINE}: {line}")
    assert isinstance(error, GraphCacheError)


@pytest.mark.gpu
@pytest.mark.parametrize("line", [x for x in REFUSED if not any(s in x for s in ON_CPU_ONLY)])
def test_a_line_that_can_not_be_captured_on_a_gpu(line: str, tmp_path: Path) -> None:
    path = tmp_path / "their_model.py"
    user = write(path, HEAD.format(line=line))
    given = tensors(torch.device("cuda"))
    error = refused(lambda: user.step(**given))
    assert error.source is not None
    assert (error.source.file, error.source.line, error.source.text) == (str(path), LINE, line)
    assert error.operation is not None and error.operation in str(error)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "line",
    [
        "n = x + host_row",
        "y.copy_(host_row)",
        "y[0, 0].copy_(torch.tensor(1.0))",
        "y[i] = 0.0",
        "y[m] = x[0, 0]",
        "n = x[[0, 2]]",
        "n = x[host]",
        "n = torch.tensor(2.0, device=x.device)",
        "n = x.new_tensor(2.0)",
        "n = host_row.to(x.device)",
    ],
)
def test_what_brings_host_memory_to_a_gpu(line: str) -> None:
    given = tensors(torch.device("cuda"))
    given["host_row"] = torch.arange(4.0)
    with pytest.raises((CaptureError, RuntimeError)) as caught, torch.no_grad(), Lint():
        exec(line, {"torch": torch, **given})
    # Adding memory of two devices is an error of its own.
    assert isinstance(caught.value, CaptureError) or "host_row" in line


def test_the_line_is_in_the_file_that_did_it_not_in_the_one_that_called(tmp_path: Path) -> None:
    helper = write(tmp_path / "helper.py", "def pick(x):\n    kept = x > 5\n    return x[kept]\n")
    user = write(tmp_path / "user.py", "def step(pick, x):\n    return pick(x) + 1\n")
    x = tensors(torch.device("cpu"))["x"]
    error = refused(lambda: user.step(helper.pick, x))
    assert error.source is not None
    assert error.source.file == str(tmp_path / "helper.py")
    assert (error.source.line, error.source.text) == (3, "return x[kept]")


def test_frames_of_torch_are_not_the_users(tmp_path: Path) -> None:
    text = (
        "from torch import nn\n\n\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.dropout = nn.Sequential(nn.Identity(), nn.Dropout(0.5))\n\n"
        "    def forward(self, x):\n"
        "        return self.dropout(x)\n"
    )
    block = write(tmp_path / "block.py", text).Block().train()
    error = refused(lambda: block(torch.ones(3)))
    assert error.source is not None
    assert (error.source.file, error.source.line) == (str(tmp_path / "block.py"), 10)
    assert error.source.text == "return self.dropout(x)"
    assert refused(lambda: block.train()(torch.ones(3))).operation == "aten.bernoulli_.float"


def test_a_models_own_library_is_the_users(tmp_path: Path) -> None:
    path = tmp_path / "site-packages" / "somebody" / "layers.py"
    library = write(path, "def rope(position):\n    return position.item() * 2\n")
    position = torch.tensor(3)
    error = refused(lambda: library.rope(position))
    assert error.source is not None
    assert (error.source.file, error.source.line) == (str(path), 2)
    assert error.source.text == "return position.item() * 2"


def test_a_statement_of_many_lines(tmp_path: Path) -> None:
    text = "def step(x):\n    return dict(\n        first=1,\n        second=x.tolist(),\n    )\n"
    user = write(tmp_path / "user.py", text)
    error = refused(lambda: user.step(torch.ones(2)))
    assert error.source is not None
    assert (error.source.line, error.source.text) == (4, "second=x.tolist(),")


PASSES: dict[str, Callable[..., Any]] = {}


def passes(step: Callable[..., Any]) -> Callable[..., Any]:
    PASSES[step.__name__] = step
    return step


@passes
def masked_fill_by_index(x: Tensor, m: Tensor, **_: Tensor) -> Tensor:
    y = x.clone()
    y[m] = 0.5
    y[m[:, 0]] = -1.0
    y[m[:, 1], :] = 2
    return y


@passes
def masked_fill_by_method(x: Tensor, m: Tensor, **_: Tensor) -> Tensor:
    return x.masked_fill(m, 3.0) + torch.where(m, x, 0.0)


@passes
def scalar_constants(x: Tensor, **_: Tensor) -> Tensor:
    return x * torch.tensor(2.0) + torch.tensor(True) - torch.tensor(data=1)


@passes
def numbers_into_places(x: Tensor, **_: Tensor) -> Tensor:
    y = x.clone()
    y[0] = 5.0
    y[:, 1] = x[:, 0]
    y[1:, 2:] += 1
    return y


@passes
def to_the_device_of_another(x: Tensor, i: Tensor, **_: Tensor) -> Tensor:
    return x.to(i.device).to(torch.float64).to(x.dtype).to(x)


@passes
def attention_without_dropout(q: Tensor, m: Tensor, **_: Tensor) -> Tensor:
    import torch.nn.functional as F

    plain = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return plain + F.scaled_dot_product_attention(q, q, q, attn_mask=m[:, :3], dropout_p=0.0)


@passes
def dropout_in_eval(x: Tensor, **_: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, training=False)


@passes
def fixed_sizes(x: Tensor, i: Tensor, **_: Tensor) -> Tensor:
    values, places = x.topk(2, dim=1)
    ordered = x.sort(dim=1, descending=True).values[:, :2]
    repeated = torch.repeat_interleave(x, 2, dim=0)[::2, :2]
    counted = torch.repeat_interleave(x, i, dim=0, output_size=3)[:, :2]
    return values + places + ordered + repeated + counted


@passes
def nonzero_of_a_fixed_size(x: Tensor, m: Tensor, **_: Tensor) -> Tensor:
    return torch.nonzero_static(m, size=3, fill_value=0)[:, :1] + x


@passes
def indexing_with_tensors(x: Tensor, i: Tensor, **_: Tensor) -> Tensor:
    y = x[i] + x.index_select(0, i) + x.gather(1, i[:, None])
    y = y.index_copy(0, i, x).scatter(1, i[:, None], 1.0)
    return y.index_put((i,), x).index_add(0, i, x)


@passes
def padding_given_a_row_of_its_own(x: Tensor, slots: Tensor, **_: Tensor) -> Tensor:
    row = torch.where(slots < 0, 2, slots)
    y = x.clone()
    y[row] = x[row] + 1
    return y.index_add(0, row, x).gather(1, row[:, None]) + x.index_select(0, row)


@passes
def a_mask_beside_indices(x: Tensor, m: Tensor, i: Tensor, **_: Tensor) -> Tensor:
    y = x.clone()
    y[m] = -1.0
    return y + x[i, 0][:, None] + x.argmin(1)[:, None]


@passes
def made_inside(x: Tensor, **_: Tensor) -> Tensor:
    y = torch.zeros_like(x) + torch.arange(x.shape[1], device=x.device)
    return y + torch.full(x.shape, 2.0, device=x.device) + x.new_ones(x.shape)


@passes
def shapes_and_rows_in_python(x: Tensor, **_: Tensor) -> Tensor:
    total = x.new_zeros(x.shape[1])
    for row in x:
        total = total + row * len(x)
    first, *_rest = x.unbind(0)
    return total.clamp(max=first.max()) + x.numel() + x.dim() + (x.dtype == torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PASSES)
def test_what_passes_is_captured_and_replays(name: str, backend: str) -> None:
    """The lint lets it pass, and rightly: the backend captures it, on other data it is right."""
    given = tensors(device_of(backend))
    out = torch.zeros_like(given["x"])
    machine = choose_backend(backend, device_of(backend))

    def step() -> None:
        result = PASSES[name](**given)
        out.view(-1)[: result.numel()].copy_(result.reshape(-1))

    with torch.no_grad(), machine.context():
        for _ in range(machine.rehearsals):
            with Lint(values=True):
                step()
        capture = machine.capture(step)
        given["x"].mul_(-1.5)
        given["m"].logical_not_()
        capture.replay()
        machine.synchronize()
        replayed = out.clone()
        out.zero_()
        step()
        machine.synchronize()
        assert torch.equal(replayed, out)
        assert out.any()
    capture.close()


def test_results_are_those_of_a_run_without_it() -> None:
    given = tensors(torch.device("cpu"))
    for step in PASSES.values():
        with torch.no_grad():
            plain = step(**given)
            with Lint(values=True):
                linted = step(**given)
        assert torch.equal(plain, linted)


def test_the_first_thing_found_ends_the_run() -> None:
    state = torch.zeros(2)

    def step() -> None:
        state.add_(1)
        state.tolist()
        state.add_(10)

    refused(step)
    assert state.tolist() == [1, 1]


def test_afterwards_nothing_is_watched() -> None:
    refused(lambda: torch.rand(2))
    assert bool(torch.ones(1))
    assert torch.rand(2).tolist() is not None
    with Lint():
        torch.ones(2) + 1
    assert torch.tensor([1, 2]).nonzero().numel() == 2


def test_other_threads_are_not_watched() -> None:
    found: list[Any] = []

    def elsewhere() -> None:
        try:
            found.append(torch.rand(2).tolist())
        except CaptureError as error:
            found.append(error)

    with Lint():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert isinstance(found[0], list)


def test_waits_are_refused_to_the_thread_that_lints_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads lint at times that overlap; neither stays guarded, nor guards the other."""
    waited: list[str] = []
    wait = lambda: waited.append(threading.current_thread().name)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    inside, leave = threading.Event(), threading.Event()
    refusals: list[CaptureError] = []

    def other() -> None:
        with Lint():
            inside.set()
            leave.wait(10)
            try:
                torch.cuda.synchronize()
            except CaptureError as error:
                refusals.append(error)
        torch.cuda.synchronize()

    thread = threading.Thread(target=other, name="other")
    with Lint():
        with Lint():
            pass
        thread.start()
        assert inside.wait(10)
        with pytest.raises(CaptureError, match=r"torch\.cuda\.synchronize can't be captured"):
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    leave.set()
    thread.join()
    assert waited == ["MainThread", "other"] and len(refusals) == 1
    assert torch.cuda.synchronize is wait


def test_a_tuner_may_wait_when_a_kernel_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(None))
    text = "import torch\ndef tune():\n    torch.cuda.synchronize()\n"
    for name in ("triton.testing", "torch._inductor.runtime"):
        module: dict[str, Any] = {"__name__": name}
        exec(text, module)
        with Lint():
            module["tune"]()
    assert len(waited) == 2
    module = {"__name__": "tritonic.model"}
    exec(text, module)
    assert refused(module["tune"]).operation == "torch.cuda.synchronize"


# --- as a runtime's user meets it -----------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_clamped_to_a_slot(backend: str) -> None:
    """Refused before it writes the request that has row 0."""
    toy = ToyDecoder((None, 6), device_of(backend))

    def step(batch: Batch) -> Tensor:
        return toy(replace(batch, slots=batch.slots.clamp(min=0)))

    model = StepFunction(step, VOCAB, schemas=toy.schemas, device=toy.device, chunk=toy)
    options: dict[str, Any] = {"max_requests": 3, "max_context": 32, "block_tokens": 16}
    with DecodeRuntime(model, backend=backend, **options) as runtime:
        runtime.admit([1, 2, 3])
        before = bits(runtime)
        with pytest.raises(CaptureError, match="a row of padding is given slot 0") as caught:
            runtime.capture(progress=False)
        assert caught.value.rule is Rule.PADDING_SLOT
        assert caught.value.operation == "graphcache.kv_append.default"
        assert differing(before, bits(runtime)) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_capture_names_the_line_and_leaves_nothing_captured(backend: str) -> None:
    chain = Chain(device_of(backend))

    def before(batch: Any) -> None:
        if (batch.tokens > 3).any():  # a line that no graph can hold
            chain.table.mul_(2)

    chain.before = before
    line = before.__code__.co_firstlineno + 1
    with chain_runtime(backend, chain) as runtime:
        with pytest.raises(CaptureError) as caught:
            runtime.capture(progress=False)
        source = caught.value.source
        assert source is not None
        assert (source.file, source.line) == (__file__, line)
        assert source.text == "if (batch.tokens > 3).any():  # a line that no graph can hold"
        assert READS in str(caught.value)
        # The first rehearsal found it, before any capture.
        assert chain.runs == 1
        assert runtime.report is None
        chain.before = lambda _: None
        assert len(runtime.capture(progress=False).buckets) == len(runtime.ladder.buckets)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_the_step_itself_has_its_line_too(backend: str) -> None:
    chain = Chain(device_of(backend))

    def before(batch: Any) -> None:
        raise KeyError("layer 3")

    chain.before = before
    with chain_runtime(backend, chain) as runtime:
        with pytest.raises(CaptureError, match=r"the step raised KeyError: 'layer 3'") as caught:
            runtime.capture(progress=False)
    error = caught.value
    assert error.operation is None and isinstance(error.__cause__, KeyError)
    assert error.source is not None
    assert (error.source.file, error.source.line) == (__file__, before.__code__.co_firstlineno + 1)
    assert error.source.text == 'raise KeyError("layer 3")'


@pytest.mark.gpu
def test_a_wait_that_only_the_capture_meets() -> None:
    """What no net sees, the capture itself refuses."""
    chain = Chain("cuda")
    with chain_runtime("cuda_graph", chain, ladder=Ladder([1])) as runtime:
        rehearsals = runtime._backend.rehearsals

        def before(batch: Any) -> None:
            if chain.runs == rehearsals + 1:
                torch._C._cuda_synchronize()

        chain.before = before
        with pytest.raises(CaptureError) as caught:
            runtime.capture(progress=False)
        source = caught.value.source
        assert source is not None
        assert (source.file, source.text) == (__file__, "torch._C._cuda_synchronize()")
        slot = runtime.admit([5])
        assert runtime.step([slot], eager=True).tokens() == chain.answer([5], 1)
        runtime.capture(progress=False)
        assert runtime.step([slot]).tokens() == chain.answer([5], 2)[1:]
