"""`python -m tests.models.families_table`: docs/families.md, from families and what tests showed.

What a family needs is read off a small model of it: its layers' schemas, its config, and what it
gives attention in a step. With `--check` nothing is written, and a stale page fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from capture import DecodeRuntime, Ladder
from graphcache import KVLayerSchema
from graphcache.kv_layer import KVLayer
from graphcache.models import load_model
from graphcache.models.families import FAMILIES
from tests.models.families_shown import KINDS, Shown, read_shown
from tests.models.small_families import SMALL
from tests.models.tiny import tiny_mamba2_model, tiny_v4_model

__all__ = ["PAGE", "RESULTS", "needs", "page"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "families.md"
RESULTS = {
    "CPU": ROOT / "profiles" / "results" / "families_cpu.json",
    "H200": ROOT / "profiles" / "results" / "families_h200.json",
}
BUILDERS: Mapping[str, Callable[[], Any]] = {
    **SMALL,
    "deepseek_v4": tiny_v4_model,
    "mamba2": tiny_mamba2_model,
}

HEAD = """\
# Families

Decoders of `transformers` that `load_model` serves, by `model_type`; what each needs beyond K and V
of every token, and what tests have shown of a small random model of it. Written by
`python -m tests.models.families_table`; a test fails when it is stale.

- **{answers}**: greedy tokens are those of `generate`, prompts of 1 to 60 tokens in one batch,
  requests coming and going, past several windows and blocks. For DeepSeek-V4, whose `generate`
  keeps no quantised rows: logits of every step within 1e-4, rows kept in fp32.
- **{replays}**: logits of a replay and of an eager step of the same bucket.
- **{near}**: mean distance of a step's logits in bf16 from those of the same model in fp32, less
  than 1.5 times that of transformers' own.
- **{compiled}**: steps through Inductor, then captured; replays have the bits of eager compiled
  steps, and in fp32 answers are those of `generate`.
"""

TAIL = """\
A kind is an entry in `graphcache/models/families.py`; its small model goes to
`tests/models/small_families.py`. What a machine shows is kept by

```console
$ GRAPHCACHE_FAMILIES=profiles/results/families_h200.json python -m pytest tests/models
$ python -m tests.models.families_table
```
"""


def main() -> None:
    """Write the page, or check it."""
    fresh = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(fresh, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != fresh:
        sys.exit(f"{PAGE} is stale: run `python -m tests.models.families_table`")


def page(results: Mapping[str, Path] = RESULTS) -> str:
    """The page, as it should be."""
    found = {device: read_shown(path) for device, path in results.items()}
    machines, shown = [], {}
    for device, told in found.items():
        shown[device] = told[1] if told else []
        machines.append(f"{device}: {_machine(told[0]) if told else 'not yet shown'}.")
    rows = [["family", "needs", *KINDS.values()], ["---"] * (2 + len(KINDS))]
    for family in sorted(FAMILIES):
        cells = [_cell(shown, family, kind) for kind in KINDS]
        rows.append([f"`{family}`", ", ".join(needs(family)), *cells])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([HEAD.format(**KINDS), "  \n".join(machines), "", table, "", TAIL])


def _cell(shown: Mapping[str, list[Shown]], family: str, kind: str) -> str:
    parts = []
    for device, all_of_it in shown.items():
        mine = [each for each in all_of_it if (each.family, each.kind) == (family, kind)]
        told = [f"{s.dtype}" if s.held else f"**not in {s.dtype}**" for s in mine]
        if told:
            parts.append(f"{device} {', '.join(told)}")
    return "; ".join(parts) or "not yet shown"


def _machine(machine: Mapping[str, str]) -> str:
    versions = [f"{name} {machine[name]}" for name in ("torch", "transformers", "python")]
    name = [] if machine["device"] == "CPU" else [machine["device"]]
    return ", ".join([*name, *versions, f"commit `{machine['commit']}`"])


def needs(family: str) -> list[str]:
    """What a small model of a family needs, in words."""
    decoder = load_model(BUILDERS[family]())
    given = _given_to_attention(decoder)
    kept = [schema for schema in decoder.schemas if isinstance(schema, KVLayerSchema)]
    windows = [schema.window is not None for schema in kept]
    compressing = [schema for schema in decoder.schemas if schema not in kept]
    config = decoder.model.config
    experts = ("n_routed_experts", "num_experts", "num_local_experts")
    told = {
        "a window": bool(windows) and all(windows),
        "windows in some layers": any(windows) and not all(windows),
        "K and V of two widths": any(s.k_head_dim != s.v_head_dim for s in kept),
        "latent attention expanded to heads": getattr(config, "kv_lora_rank", None) is not None,
        "windows and compressed entries": bool(compressing),
        "a selection of entries": any(getattr(s, "indexer", None) for s in compressing),
        "soft cap": any(call.get("softcap") for call in given),
        "sinks": any(call.get("sinks") is not None for call in given) or bool(compressing),
        "experts": any(getattr(config, name, None) for name in experts),
        "states that accumulate": any(field.accumulates for field in decoder.fields),
    }
    return [what for what, needed in told.items() if needed] or ["nothing more"]


def _given_to_attention(decoder: Any) -> list[dict[str, Any]]:
    """Options that the model gave attention in one step."""
    given: list[dict[str, Any]] = []
    attend = KVLayer.attend

    def listening(layer: KVLayer, *args: Any, **options: Any) -> Any:
        given.append(options)
        return attend(layer, *args, **options)

    with mock.patch.object(KVLayer, "attend", listening):
        with DecodeRuntime(
            decoder, max_requests=1, max_context=64, ladder=Ladder([1]), nvtx=False
        ) as runtime:
            runtime.step([runtime.admit([3], max_tokens=1)], eager=True).tokens()
    return given


if __name__ == "__main__":
    main()
