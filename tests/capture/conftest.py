"""Runtimes that most tests of this folder use; tests name the backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from capture import DecodeRuntime
from tests.capture.support import (
    Chain,
    captured,
    chain_runtime,
    toy_runtime,
)
from tests.toy import ToyDecoder, device_of


@pytest.fixture
def toy(backend: str) -> ToyDecoder:
    return ToyDecoder(device=device_of(backend))


@pytest.fixture
def runtime(backend: str, toy: ToyDecoder) -> Iterator[DecodeRuntime]:
    with captured(toy_runtime(backend, toy)) as made:
        yield made


@pytest.fixture
def chain(backend: str) -> Chain:
    return Chain(device_of(backend))


@pytest.fixture
def chained(backend: str, chain: Chain) -> Iterator[DecodeRuntime]:
    with captured(chain_runtime(backend, chain)) as made:
        yield made
