"""What of a model's files can be told before memory is taken for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import UnsupportedModel, WeightsError
from .families import FAMILIES

__all__ = ["check_folder", "check_gguf"]

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
INDEX = "model.safetensors.index.json"


def check_folder(folder: Path) -> None:
    """Check a transformers folder: its config names a served kind, its safetensors are whole.

    Raises:
        UnsupportedModel: for a kind of model that isn't served.
        WeightsError: naming the file that is missing, corrupt or pickled.
    """
    config = _read_json(folder / "config.json")
    if config.get("model_type") not in FAMILIES:
        raise UnsupportedModel(
            f"{folder}: no adapter serves model_type {config.get('model_type')!r}; "
            f"served: {', '.join(sorted(FAMILIES))}"
        )
    for shard in _shards(folder):
        _check_safetensors(shard)


def check_gguf(path: Path) -> None:
    """Check a GGUF file: whole, of a served architecture, with nothing that loading would drop.

    Raises:
        UnsupportedModel: for an architecture, or a part of it, that isn't served.
        WeightsError: naming the file, when it is missing or corrupt.
    """
    from gguf import GGUFReader

    if not path.is_file():
        raise WeightsError(f"{path}: no such file")
    try:
        reader = GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
    except Exception as error:  # the reader has no errors of its own: a torn file raises anything
        raise WeightsError(f"{path} is not a whole GGUF file ({_brief(error)})") from error
    if architecture not in FAMILIES:
        raise UnsupportedModel(
            f"{path}: no adapter serves GGUF architecture {architecture!r}; "
            f"served: {', '.join(sorted(FAMILIES))}"
        )
    scaled = [name for name in reader.fields if ".rope.scaling." in name]
    scaled += [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_freqs")]
    if scaled:
        raise UnsupportedModel(
            f"{path}: its rotary frequencies are scaled ({scaled[0]}), which transformers drops "
            "when it reads GGUF; use the model's transformers folder"
        )


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        files = _read_json(index).get("weight_map")
        if not isinstance(files, dict):
            raise WeightsError(f"{index} has no weight_map")
        return [folder / name for name in sorted(set(files.values()))]
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise WeightsError(
            f"{folder} has its weights only as {', '.join(pickled)}, which would have to be "
            "unpickled, and that runs code; save the model with safetensors"
        )
    raise WeightsError(f"{folder} has no model.safetensors")


def _check_safetensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except FileNotFoundError as error:
        raise WeightsError(f"{path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a whole safetensors file ({_brief(error)})") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} can't be read ({_brief(error)})") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds no JSON object")
    return content


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
