"""The command: answers from captured steps, its JSON, and one line for whatever goes wrong."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from capture import cli
from tests.models.small_families import small_model
from tests.models.tiny import (
    VOCAB,
    _byte_characters,
    tiny_mamba2_model,
    tiny_model,
    tiny_v4_model,
    write_gguf,
)

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"


class Ended(NamedTuple):
    code: int | str | None
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of bytes and two words, saved as transformers saves one."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save_pretrained(path)
    names = ["<unk>", "<s>", "</s>", "<pad>", *_byte_characters(), "hi", "ho"]
    assert len(names) == VOCAB
    vocabulary = {name: index for index, name in enumerate(names)}
    words = models.BPE(vocab=vocabulary, merges=[("h", "i"), ("h", "o")], unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="<pad>",
    )  # fmt: skip
    whole.chat_template = TEMPLATE
    whole.save_pretrained(path)
    return path


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> Iterator[Run]:
    """Calls the command as the shell does; with the tiny model on the CPU unless told others."""
    level = logging.getLogger("transformers").level

    def call(*arguments: Any) -> Ended:
        given = [str(argument) for argument in arguments]
        if given[:1] in (["generate"], ["capture"]):
            for name, value in (("--model", str(folder)), ("--device", "cpu")):
                given += [] if name in given else [name, value]
        monkeypatch.setattr(sys, "argv", ["graphcache", *given])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Ended(ended.value.code, *capsys.readouterr())

    with warnings.catch_warnings():
        yield call
    logging.getLogger("transformers").setLevel(level)


def answers_by_transformers(folder: Path, prompts: list[str], count: int) -> list[list[int]]:
    """What the model answers by transformers' own loop, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], return_tensors="pt", return_dict=False,
            add_generation_prompt=True,
        )  # fmt: skip
        whole = model.generate(ids, max_new_tokens=count, do_sample=False)
        answers.append(whole[0, ids.shape[1] :].tolist())
    return answers


# --- generate -------------------------------------------------------------------------------------


def test_json_holds_the_models_answer_and_what_it_took(run: Run, folder: Path) -> None:
    ended = run("generate", "--prompt", "hi there", "--max-tokens", 9, "--json")
    assert (ended.code, ended.err) == (0, "")
    found = json.loads(ended.out)
    assert set(found) == {
        "answers", "backend", "device", "load_s", "decode_s", "tokens_per_s", "state_bytes",
        "weight_bytes", "capture_bytes", "buckets",
    }  # fmt: skip
    (answer,) = found["answers"]
    assert answer["prompt"] == "hi there"
    assert answer["tokens"] == answers_by_transformers(folder, ["hi there"], 9)[0]
    assert answer["finish_reason"] == "length"
    text = AutoTokenizer.from_pretrained(folder).decode(answer["tokens"], skip_special_tokens=True)
    assert answer["text"] == text
    assert (found["backend"], found["device"]) == ("tape", "cpu")
    assert found["tokens_per_s"] == pytest.approx(9 / found["decode_s"])
    assert found["load_s"] > 0 and found["state_bytes"] > 0
    assert (
        found["weight_bytes"] > 0 and found["capture_bytes"] == found["buckets"][0]["device_bytes"]
    )
    (bucket,) = found["buckets"]
    assert (bucket["rows"], bucket["q_len"], bucket["padding_rows"]) == (1, 1, 0)
    assert bucket["nodes"] > 50 and bucket["capture_ms"] > 0
    assert bucket["replays"] in (9, 10)  # one may be ahead of the reader


PROMPTS = ["hi", "ho ho ho", "a", "what is it", "hi hi"]


@pytest.mark.parametrize("at_once", [1, 2, 3, 64])
def test_prompts_wait_for_slots_and_answers_keep_their_order(
    run: Run, folder: Path, at_once: int
) -> None:
    options = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    ended = run("generate", *options, "--max-tokens", 7, "--max-requests", at_once, "--json")
    found = json.loads(ended.out)
    assert [answer["prompt"] for answer in found["answers"]] == PROMPTS
    expected = answers_by_transformers(folder, PROMPTS, 7)
    assert [answer["tokens"] for answer in found["answers"]] == expected
    assert max(bucket["rows"] for bucket in found["buckets"]) == min(at_once, len(PROMPTS))


def test_a_stop_token_ends_an_answer(run: Run, folder: Path, tmp_path: Path) -> None:
    (whole,) = answers_by_transformers(folder, ["ho"], 12)
    stop = next(token for token in whole[2:] if whole.index(token) >= 2)
    other = tmp_path / "stops"
    shutil.copytree(folder, other)
    settings = json.loads((other / "generation_config.json").read_text())
    settings["eos_token_id"] = [stop, 2]
    (other / "generation_config.json").write_text(json.dumps(settings))
    ended = run("generate", "--model", other, "--prompt", "ho", "--max-tokens", 12, "--json")
    (answer,) = json.loads(ended.out)["answers"]
    assert answer["tokens"] == whole[: whole.index(stop) + 1]
    assert answer["finish_reason"] == "stop"


def test_an_answer_ends_with_the_models_context(run: Run) -> None:
    ended = run("generate", "--prompt", "x" * 50, "--max-tokens", 1000, "--json")
    (answer,) = json.loads(ended.out)["answers"]
    assert len(answer["tokens"]) == 64 - 52
    assert answer["finish_reason"] == "context"


def test_a_model_without_a_longest_context(run: Run, folder: Path, tmp_path: Path) -> None:
    """A state-space model names none: the command takes what prompts and answers need."""
    other = tmp_path / "mamba2"
    shutil.copytree(folder, other)
    tiny_mamba2_model(eos_token_id=None).save_pretrained(other)
    ended = run("generate", "--model", other, "--prompt", "hi", "--max-tokens", 70, "--json")
    (answer,) = json.loads(ended.out)["answers"]
    assert answer["tokens"] == answers_by_transformers(other, ["hi"], 70)[0]
    assert (len(answer["tokens"]), answer["finish_reason"]) == (70, "length")
    refused = run("plan", "--model", other, "--device", "cpu")
    assert refused.code == 1 and refused.err.startswith("SchemaError: max_context is needed")


def test_draws_are_those_of_the_seed_and_the_prompts_place(run: Run) -> None:
    def tokens(seed: int, count: int = 2, at_once: int = 64) -> list[list[int]]:
        options = ["--prompt", "hi"] * count
        settings = ["--temperature", 3.0, "--max-tokens", 12, "--max-requests", at_once, "--json"]
        ended = run("generate", *options, "--seed", seed, *settings)
        return [answer["tokens"] for answer in json.loads(ended.out)["answers"]]

    first, second = tokens(5)
    assert first != second
    assert tokens(5, at_once=1) == [first, second]
    assert tokens(6, 1) == [second]


def test_text_streams_and_ends_with_the_rate_and_the_buckets(run: Run, folder: Path) -> None:
    ended = run("generate", "--prompt", "hi there", "--max-tokens", 8)
    assert (ended.code, ended.err) == (0, "")
    tokens = answers_by_transformers(folder, ["hi there"], 8)[0]
    text = AutoTokenizer.from_pretrained(folder).decode(tokens, skip_special_tokens=True)
    prompt, rest = ended.out.split("\n", 1)
    assert prompt == "hi there"
    assert rest.startswith(text)
    assert "captured steps (tape)" in rest and "padding rows" in rest
    assert "8 tokens in" in rest and "tokens/s" in rest and "tape on cpu" in rest


def test_many_answers_are_shown_each_under_its_prompt(run: Run, folder: Path) -> None:
    options = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    ended = run("generate", *options, "--max-tokens", 5, "--max-requests", 1)
    # First come, first served: shown as they are done, that is in their order.
    places = [ended.out.index(f"\n{prompt}\n") for prompt in PROMPTS]
    assert places == sorted(places)
    decode = AutoTokenizer.from_pretrained(folder).decode
    for prompt, tokens in zip(PROMPTS, answers_by_transformers(folder, PROMPTS, 5), strict=True):
        assert f"\n{prompt}\n{decode(tokens, skip_special_tokens=True)}" in ended.out
    assert "25 tokens in" in ended.out


def test_markup_in_a_prompt_is_text(run: Run) -> None:
    ended = run("generate", "--prompt", "[bold]hi[/]", "--max-tokens", 1)
    assert ended.out.startswith("[bold]hi[/]\n")


def test_prompts_from_a_file_come_after_those_given(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("ho\n\n   \nhi hi \n", encoding="utf-8")
    options = ["--prompt", "a", "--prompts-file", file, "--max-tokens", 2, "--json"]
    found = json.loads(run("generate", *options).out)
    assert [answer["prompt"] for answer in found["answers"]] == ["a", "ho", "hi hi "]


# --- templates ------------------------------------------------------------------------------------


@pytest.fixture
def folder_with(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny model whose tokenizer has another chat template, or none."""

    def make(template: str | None) -> Path:
        other = tmp_path / "other"
        shutil.copytree(folder, other)
        tokenizer = AutoTokenizer.from_pretrained(other)
        (other / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(other)
        return other

    return make


def first_tokens(folder: Path, ids: list[int], count: int) -> list[int]:
    """What transformers' own loop goes on with after `ids`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    answer: list[int] = whole[0, len(ids) :].tolist()
    return answer


def test_raw_prompts_go_without_the_template(run: Run, folder: Path) -> None:
    plain = AutoTokenizer.from_pretrained(folder).encode("ho hi")
    settings = ["--prompt", "ho hi", "--max-tokens", 9, "--json"]
    (answer,) = json.loads(run("generate", *settings, "--raw").out)["answers"]
    assert answer["tokens"] == first_tokens(folder, plain, 9)
    (chat,) = json.loads(run("generate", *settings).out)["answers"]
    assert chat["tokens"] == answers_by_transformers(folder, ["ho hi"], 9)[0] != answer["tokens"]


@pytest.mark.parametrize("options", [[], ["--raw"]])
def test_without_a_template_prompts_are_raw(
    run: Run, folder_with: Callable[..., Path], options: list[str]
) -> None:
    other = folder_with(None)
    plain = AutoTokenizer.from_pretrained(other).encode("ho hi")
    settings = ["--model", other, "--prompt", "ho hi", "--max-tokens", 9, "--json"]
    (answer,) = json.loads(run("generate", *settings, *options).out)["answers"]
    assert answer["tokens"] == first_tokens(other, plain, 9)


def test_a_template_that_refuses_a_turn(run: Run, folder_with: Callable[..., Path]) -> None:
    other = folder_with("{{ raise_exception('only systems may speak') }}")
    ended = run("generate", "--model", other, "--prompt", "hi")
    assert ended.code == 1 and ended.out == "" and ended.err.count("\n") == 1
    assert "UnsupportedModel" in ended.err and "only systems may speak" in ended.err
    assert "--raw" in ended.err
    assert run("generate", "--model", other, "--prompt", "hi", "--max-tokens", 2, "--raw").code == 0


@pytest.mark.parametrize("family", ["llama", "deepseek_v4", "gpt_neox"])
def test_a_folder_without_a_tokenizer(run: Run, tmp_path: Path, family: str) -> None:
    model = tiny_v4_model() if family == "deepseek_v4" else small_model(family)
    model.save_pretrained(tmp_path / "ids")
    for options in ([], ["--raw"]):
        ended = run("generate", "--model", tmp_path / "ids", "--prompt", "hi", *options)
        assert ended.code == 1 and ended.out == "" and ended.err.count("\n") == 1
        assert ended.err.startswith("UnsupportedModel: this model came without a tokenizer")


def test_any_family_with_a_tokenizer_answers(run: Run, folder: Path, tmp_path: Path) -> None:
    model = small_model("gemma2")
    model.save_pretrained(tmp_path / "gemma")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "gemma")
    settings = ["--model", tmp_path / "gemma", "--prompt", "hi ho", "--max-tokens", 12, "--json"]
    (answer,) = json.loads(run("generate", *settings).out)["answers"]
    assert answer["tokens"] == answers_by_transformers(tmp_path / "gemma", ["hi ho"], 12)[0]


# --- compiled -------------------------------------------------------------------------------------


def test_compiled_steps_answer_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = []

    def stand_in(piece: Any, examples: Any, options: Any) -> Any:
        pieces.append(piece)
        return piece

    monkeypatch.setattr("torch._inductor.compile", stand_in)
    settings = ["generate", "--prompt", "hi there", "--max-tokens", 9, "--json"]
    plain = json.loads(run(*settings).out)
    assert not pieces
    found = json.loads(run(*settings, "--compile").out)
    assert pieces and found["answers"] == plain["answers"]
    assert found["buckets"][0]["nodes"] < plain["buckets"][0]["nodes"] / 3
    ladder = json.loads(run("capture", "--max-requests", 1, "--compile", "--json").out)
    assert ladder["buckets"][0]["nodes"] == found["buckets"][0]["nodes"]


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["capture"]])
def test_no_compiler(run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    ended = run(*command, "--compile")
    assert ended.code == 1 and ended.out == "" and ended.err.count("\n") == 1
    assert ended.err.startswith("UnsupportedPlatform: compiling for the CPU needs a C++ compiler")


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "give at least one --prompt, or a --prompts-file with lines"),
        (["--prompt", "  "], "a prompt is empty"),
        (["--prompt", "x", "--max-tokens", "0"], "--max-tokens"),
        (["--prompt", "x", "--max-tokens", "many"], "--max-tokens"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature"),
        (["--prompt", "x", "--seed", "-1"], "--seed"),
        (["--prompt", "x", "--max-requests", "0"], "--max-requests"),
        (["--prompt", "x", "--fast"], "--fast"),
        (["--prompts-file", "nowhere.txt"], "can't read nowhere.txt"),
    ],
)
def test_options_that_can_not_be(run: Run, options: list[str], says: str) -> None:
    ended = run("generate", *options)
    assert ended.code == 2 and ended.out == ""
    assert says in ended.err and "Usage:" in ended.err


def test_a_file_without_prompts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    assert "with lines" in run("generate", "--prompts-file", tmp_path / "empty.txt").err
    ended = run("generate", "--prompts-file", tmp_path / "bytes.txt")
    assert ended.code == 2 and "can't read" in ended.err


LONG_NAME = "a/model/of/a/very/long/name/" * 8


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", LONG_NAME], f"WeightsError: '{LONG_NAME}' is not a model: give 'smollm2', a"),
        (["--model", "[red]x"], "WeightsError: '[red]x' is not a model"),
        (["--max-tokens", "5", "--prompt", "y" * 90], "ContextFull: 92 tokens leave no room for"),
        (["--seed", str(2**63)], "InvalidRequest: seed must lie in 0..2**63-1"),
        (["--device", "meta"], "UnsupportedModel: the model is not built"),
        (["--device", "toaster"], "UnsupportedPlatform: no device 'toaster'"),
    ],
)
def test_an_error_of_the_library_is_one_line_and_code_1(
    run: Run, options: list[str], says: str, as_json: bool
) -> None:
    ended = run("generate", "--prompt", "x", *options, *(["--json"] if as_json else []))
    assert ended.code == 1
    assert ended.err.startswith(says)
    assert ended.err.count("\n") == 1 and ended.err.endswith("\n")
    if as_json:
        assert ended.out == ""


def test_a_torn_model(run: Run, folder: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(folder, torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    ended = run("generate", "--model", torn, "--prompt", "x")
    assert ended.code == 1 and ended.err.count("\n") == 1
    assert "not a whole safetensors file" in ended.err


def test_an_interrupt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("graphcache.models.load_model", interrupted)
    ended = run("generate", "--prompt", "x")
    assert ended.code == 130
    assert "Traceback" not in ended.err


# --- capture --------------------------------------------------------------------------------------


def test_a_ladder_is_captured_and_reported(run: Run, folder: Path) -> None:
    options = ["--max-requests", 6, "--max-context", 32]
    ended = run("capture", *options, "--json")
    assert (ended.code, ended.err) == (0, "")
    found = json.loads(ended.out)
    assert set(found) == {
        "backend", "device", "state_bytes", "weight_bytes", "capture_bytes", "buckets",
    }  # fmt: skip
    assert (found["backend"], found["device"]) == ("tape", "cpu")
    assert sorted(bucket["rows"] for bucket in found["buckets"]) == [1, 2, 4, 6]
    assert all(bucket["nodes"] > 50 and bucket["capture_ms"] > 0 for bucket in found["buckets"])
    planned = json.loads(run("plan", "--model", folder, "--device", "cpu", *options, "--json").out)
    assert found["state_bytes"] == planned["slots_bytes"] + planned["blocks_bytes"]
    shown = run("capture", *options)
    assert shown.code == 0 and "captured steps (tape)" in shown.out
    assert "4 steps in" in shown.out and "on cpu; weights" in shown.out
    for bucket in found["buckets"]:
        assert re.search(rf"\b{bucket['rows']}\b.*\b{bucket['nodes']}\b", shown.out)


def test_a_context_not_asked_for_is_the_models(run: Run) -> None:
    told = [
        json.loads(run("capture", "--max-requests", 1, *options, "--json").out)["state_bytes"]
        for options in ([], ["--max-context", 64], ["--max-context", 8])
    ]
    assert told[0] == told[1] > told[2]


@pytest.mark.parametrize("kind", ["gguf", "deepseek_v4", "gpt_oss"])
def test_a_ladder_of_whatever_can_be_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("GRAPHCACHE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / ("model.gguf" if kind == "gguf" else "model")
    if kind == "gguf":
        write_gguf(path, tiny_model())
    else:
        model = tiny_v4_model() if kind == "deepseek_v4" else small_model(kind)
        model.save_pretrained(path)
    ended = run("capture", "--model", path, "--max-requests", 2, "--max-context", 60, "--json")
    assert ended.code == 0, ended.err
    assert [bucket["rows"] for bucket in json.loads(ended.out)["buckets"]] == [2, 1]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--max-requests", "0"], 2, "--max-requests"),
        (["--max-context", "1"], 2, "--max-context"),
        (["--max-context", "1000"], 1, "SchemaError: max_context=1000 is beyond"),
        (["--model", "nowhere"], 1, "WeightsError: 'nowhere' is not a model"),
        (["--device", "toaster"], 1, "UnsupportedPlatform: no device 'toaster'"),
    ],
)
def test_a_ladder_that_can_not_be(run: Run, options: list[str], code: int, says: str) -> None:
    ended = run("capture", *options, "--json")
    assert ended.code == code and ended.out == "" and says in ended.err


# --- plan -----------------------------------------------------------------------------------------


def test_a_plan_is_told_before_anything_is_served(run: Run, folder: Path) -> None:
    options = ["--max-requests", 6, "--max-context", 32, "--budget-mib", 8]
    ended = run("plan", "--model", folder, "--device", "cpu", *options, "--json")
    assert (ended.code, ended.err) == (0, "")
    found = json.loads(ended.out)
    assert found["backend"] == "tape" and found["buckets"] == [1, 2, 4, 6]
    parts = ("weight_bytes", "slots_bytes", "blocks_bytes", "capture_bytes", "prefill_bytes")
    assert found["total_bytes"] == sum(found[part] for part in parts)
    assert found["budget_bytes"] == 8 * 2**20 and found["slots_that_fit"] > 6
    shown = run("plan", "--model", folder, "--device", "cpu", *options)
    assert shown.code == 0
    assert f"fits up to {found['slots_that_fit']} slots" in " ".join(shown.out.split())


def test_a_plan_that_can_not_be(run: Run, folder: Path) -> None:
    ended = run("plan", "--model", folder, "--device", "cpu", "--max-context", 1000)
    assert ended.code == 1 and ended.err.startswith("SchemaError: max_context=1000 is beyond")


# --- info -----------------------------------------------------------------------------------------


def test_info_names_versions_and_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without_gguf(name: str) -> str:
        if name == "gguf":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_gguf)
    ended = run("info")
    assert ended.code == 0
    assert torch.__version__ in ended.out and "graphcache" in ended.out
    found = json.loads(run("info", "--json").out)
    assert found["torch"] == {"value": torch.__version__, "note": ""}
    assert found["python"]["value"] == ".".join(map(str, sys.version_info[:3]))
    assert found["gguf"]["value"] == "missing"
    assert "loading .gguf files needs it" in found["gguf"]["note"]
    if torch.cuda.is_available():
        assert found["CUDA GPU"]["value"] == torch.cuda.get_device_properties(0).name
    else:
        assert found["CUDA GPU"]["value"] == "none" and "tape" in found["CUDA GPU"]["note"]


def test_no_arguments_show_the_help(run: Run) -> None:
    ended = run()
    shown = ended.out + ended.err
    assert "generate" in shown and "info" in shown and "Usage" in shown


def test_the_command_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "capture.cli", "generate", "--model", "nowhere", "--prompt", "x"],
        capture_output=True, text=True, timeout=120, check=False, cwd=Path(cli.__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("WeightsError: 'nowhere' is not a model")
    assert done.stderr.count("\n") == 1
