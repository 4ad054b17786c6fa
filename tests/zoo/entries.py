"""What has broken serving engines, by number: the kinds of fault that the zoo must have.

Each entry is one reported failure of a real engine. A specimen names the entries that it is of the
kind of.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ENTRIES"]

ENTRIES: Final = {
    1: "padding's -1, used as an index, overwrote the last slot (vllm#43810)",
    2: "warm-up or capture wrote to slots that requests get (sglang#17404)",
    3: "the number that stood for padding was a slot's, too (sglang#38997)",
    4: "padding shared a slot with a live request (TensorRT-LLM#13151)",
    5: "where padding writes was left over from a larger batch (sglang#24743)",
    6: "NaN from padding reached rows that run (flashinfer#2883)",
    7: "memory that nothing had written was read (vllm#51970)",
    8: "a window's ring was off by one at the wrap (vllm#58074)",
    9: "a slot handed out again kept what its last request had left (TensorRT-LLM#14509)",
    10: "a fork left out part of the state (ATOM#1417)",
    11: "a way back did nothing, or was trusted at any distance (exo#2158)",
    12: "padding, clamped into range, overwrote slot 0 (sglang#24872)",
    13: "a loop on the host froze which blocks are read (TensorRT-LLM#17110)",
    14: "the first token's reset was captured with the step (ik_llama.cpp#1393)",
    15: "a workspace got other memory after capture (TensorRT-LLM#16319)",
    16: "an output still held was overwritten by another bucket (TensorRT-LLM#17010)",
    17: "every replay drew the same random numbers (flashinfer#2132)",
    18: "another thread's work broke the capture, or was missing in it (vllm#48053)",
    19: "a finalizer ran inside the capture (pytorch#161037)",
    20: "a step that waits or raises left the stream capturing (vllm#11587)",
    21: "the largest batch was not captured, and nobody was told (sglang#33483)",
    22: "the end hung, or left memory behind (pytorch#115388)",
    23: "memory of captures was misjudged (vllm#50780)",
}
"""By number. All of them can exist in a user's step, or in the library that runs it."""
