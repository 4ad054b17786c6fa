"""Every peer decodes what this library decodes, from the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphcache.models import load_model
from profiles.peers import PEERS, Ours, Peer, PeerUnavailable, SteppedPeer
from profiles.peers.hf import ContinuousBatching

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS = 12


def telling_model(device: str) -> Any:
    """Weights so large that attention is sharp: a token less of context, and other tokens come."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(1)
    built = LlamaForCausalLM(config).to(device)
    built.generation_config.eos_token_id = None
    built.config.eos_token_id = None
    return load_model(built)


def prompts(rows: int, length: int = 70) -> list[list[int]]:
    generator = torch.Generator().manual_seed(rows)
    drawn: list[list[int]] = torch.randint(0, 512, (rows, length), generator=generator).tolist()
    return drawn


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", PEERS, ids=lambda kind: kind.__name__)
def test_a_peer_gives_our_tokens_run_after_run(kind: type[Peer], device: str) -> None:
    model = telling_model(device)
    ours, peer = Ours(model, keep_logits=True), kind(model)
    ours.prepare(prompts(3), STEPS)
    expected = ours.decode(STEPS)
    assert ours.decode(STEPS).tokens == expected.tokens
    assert len({token for step in expected.tokens for token in step}) > STEPS
    if device == "cpu" and kind is ContinuousBatching:
        with pytest.raises(PeerUnavailable, match="need a GPU"):
            peer.prepare(prompts(3), STEPS)
        return
    peer.prepare(prompts(3), STEPS)
    for _ in range(2):
        decoded = peer.decode(STEPS)
        assert decoded.tokens == expected.tokens
        assert all(took > 0 for took in decoded.times_ns)
    logits = peer.logits()
    if logits is not None:
        torch.testing.assert_close(logits, ours.logits(), rtol=1e-3, atol=1e-3)
    if isinstance(peer, SteppedPeer):
        peer.rewind()
        assert peer.host_ns() is None or peer.host_ns()
    peer.close()
    ours.close()
