"""Requests that come and go at random, with bursts of replays between."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from capture import DecodeRuntime
from graphcache import FinishReason
from graphcache.errors import BlocksExhausted

__all__ = ["Life"]

BURSTS = (1, 3, 30, 150, 400)
"""Steps of the same batch between two events: most replays fall into the long ones."""
LONGEST_PROMPT = 200
LONGEST_ANSWER = 600


class Life:
    """What happens to a runtime's requests.

    Args:
        runtime: captured; nothing else uses it.
        seed: of all that is chosen.

    Attributes:
        slots: handles of requests that have not finished.
        replays: steps of at least one slot so far.
        events: how often each kind of event came, and how often blocks ran out.
    """

    def __init__(self, runtime: DecodeRuntime, seed: int) -> None:
        self.slots: list[int] = []
        self.replays = 0
        self.events: Counter[str] = Counter()
        self._runtime = runtime
        self._choose = random.Random(seed)
        # One slot stays free for who wants to look.
        self._most = runtime.state.max_requests - 1
        self._kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "admitted": (4, self._admit),
            "forked": (3, self._fork),
            "rewound": (3, self._rewind),
            "retired": (2, self._retire),
        }

    def event(self) -> None:
        """One admission, fork, rewind or retirement. Where blocks run out, a request is retired."""
        kinds = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        kind = self._choose.choices(kinds, weights)[0] if self.slots else "admitted"
        if len(self.slots) >= self._most and kind in ("admitted", "forked"):
            kind = "retired"
        try:
            self._kinds[kind][1]()
        except BlocksExhausted:
            self.events["refused for want of blocks"] += 1
            kind = "retired"
            self._retire()
        self.events[kind] += 1

    def burst(self, most: int) -> int:
        """Steps of one batch, each asked for before the last one's tokens are read.

        Ends early when all slots of the batch have finished.

        Args:
            most: steps; at least 1.

        Returns:
            the steps taken; 0 where there is no request.
        """
        if not self.slots:
            return 0
        size = self._choose.randint(1, min(len(self.slots), self._runtime.ladder.ceiling))
        batch = self._choose.sample(self.slots, size)
        count = min(most, self._choose.choice(BURSTS))
        step = self._runtime.step
        taken, last = 1, step(batch)
        while taken < count:
            newer = step(batch)
            taken += 1
            given = last.tokens()
            last = newer
            if given[0] < 0 and max(given) < 0:
                break
        ended = [
            slot
            for slot, reason in zip(batch, last.reasons, strict=True)
            if reason is not FinishReason.NONE
        ]
        self.replays += taken
        for slot in ended:
            self._finish(slot)
        return taken

    def any_slot(self) -> int:
        """One of `slots`."""
        return self._choose.choice(self.slots)

    # --- private ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        chooser, state = self._choose, self._runtime.state
        length = chooser.randint(1, min(LONGEST_PROMPT, state.max_context // 4))
        prompt = [chooser.randrange(state.vocab_size) for _ in range(length)]
        slot = self._runtime.admit(
            prompt,
            max_tokens=chooser.randint(1, min(LONGEST_ANSWER, state.max_context // 2)),
            temperature=chooser.choice((0.0, 0.8)),
            top_k=chooser.choice((0, 40)),
            top_p=chooser.choice((1.0, 0.9)),
            seed=chooser.getrandbits(32),
        )
        self.slots.append(slot)

    def _fork(self) -> None:
        self.slots.append(self._runtime.fork(self.any_slot(), seed=self._choose.getrandbits(32)))

    def _rewind(self) -> None:
        slot = self.any_slot()
        self._runtime.rewind(slot, self._choose.randint(0, self._runtime.length_of(slot)))

    def _retire(self) -> None:
        self._runtime.retire(self.slots.pop(self._choose.randrange(len(self.slots))))

    def _finish(self, slot: int) -> None:
        """What has finished is retired, or now and then taken back to run once more."""
        if self._choose.random() < 0.25:
            try:
                length = self._runtime.length_of(slot)
                self._runtime.rewind(slot, self._choose.randint(0, length // 2))
                self.events["rewound"] += 1
                return
            except BlocksExhausted:
                self.events["refused for want of blocks"] += 1
        self.slots.remove(slot)
        self._runtime.retire(slot)
        self.events["retired"] += 1
