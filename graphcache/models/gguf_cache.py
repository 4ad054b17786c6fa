"""GGUF weights, converted once and kept as a transformers folder with safetensors.

Reading GGUF dequantises tensor by tensor in numpy, which takes many seconds; the folder is mapped
in a moment. Entries are found by the SHA-256 of the file's content, not by its name, size and time:
hashing costs a tenth of a second for each 100 MB, and in return a changed file never meets weights
of the old one, and the same file in two environments is converted once. A manifest with the digest
of each file of an entry is written last, and the entry moves into place whole: what a killed start
leaves behind has no such place, and what rots later is noticed and rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModel, WeightsError
from .packages import need_packages
from .weights import check_gguf

__all__ = ["cache_root", "converted"]

FORMAT = 1
"""Of an entry; raised when conversion would write another one from the same file."""
MANIFEST = "graphcache.json"


def cache_root() -> Path:
    """Folder of all entries: `$GRAPHCACHE_CACHE`, else `graphcache` in the user's cache folder."""
    chosen = os.environ.get("GRAPHCACHE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphcache"


def converted(path: Path, dtype: torch.dtype) -> Path:
    """The transformers folder of a GGUF file's weights in `dtype`, converted if it isn't kept yet.

    Processes that ask at once convert once; the others wait.

    Raises:
        UnsupportedModel: for an architecture that isn't served.
        WeightsError: naming the file that is missing or corrupt, or the cache if it can't be kept.
    """
    from filelock import FileLock

    if not path.is_file():
        raise WeightsError(f"{path}: no such file")
    name = f"{_digest(path)}-{str(dtype).removeprefix('torch.')}-v{FORMAT}"
    root = cache_root()
    entry = root / name
    if _intact(entry):
        return entry
    need_packages("gguf", "accelerate")
    check_gguf(path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if not _intact(entry):
                _build(path, dtype, entry)
    except OSError as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(
            f"converted weights can't be kept in {root} ({error}); "
            "name another folder with GRAPHCACHE_CACHE"
        ) from error
    return entry


def _build(path: Path, dtype: torch.dtype, entry: Path) -> None:
    """Convert into a folder of its own and move it into place. The entry's lock is held."""
    for leftover in (entry, *entry.parent.glob(f".{entry.name}.*")):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        _convert(path, dtype, work)
        digests = {file.name: _digest(file) for file in sorted(work.iterdir())}
        manifest = {"source": path.name, "files": digests}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        work.rename(entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(path: Path, dtype: torch.dtype, target: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    folder = path.absolute().parent
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, **source
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise WeightsError(f"{path} can't be converted ({error})") from error
    if report["missing_keys"]:
        raise WeightsError(f"{path} lacks weights: {', '.join(sorted(report['missing_keys'])[:3])}")
    weights = _without_ties(model.state_dict())
    _check_biases(path, weights)

    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    # The weights are plain by now; the config still says where they came from.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(target)


def _without_ties(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the later names of tensors that have several; safetensors holds each once."""
    kept: dict[int, str] = {}
    for name, tensor in state.items():
        kept.setdefault(tensor.data_ptr(), name)
    return {name: state[name] for name in kept.values()}


def _check_biases(path: Path, weights: dict[str, Tensor]) -> None:
    """Refuse a file with biases that transformers, finding no place for them, has dropped."""
    from gguf import GGUFReader

    held = [tensor.name for tensor in GGUFReader(path).tensors if tensor.name.endswith(".bias")]
    if len(held) > sum(name.endswith(".bias") for name in weights):
        raise UnsupportedModel(
            f"{path}: biases such as {held[0]} have no place in the model transformers builds; "
            "use the model's transformers folder"
        )


def _intact(entry: Path) -> bool:
    """Whether an entry is there, and each of its files is what was written."""
    try:
        files = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all(_digest(entry / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
