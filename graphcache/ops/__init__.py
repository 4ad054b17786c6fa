"""Operations on state: torch reference, Triton kernel and registration side by side.

One file each, or a folder where a file would be long: `__init__.py` with the call, its checks and
the registration, `reference.py`, `kernel.py` and what the kernel is made of.

All take slots with -1 as padding and `q_len` tokens a slot, run on the current stream, never
synchronize, and can be captured. The reference runs on CPU tensors, the kernel on CUDA tensors.
"""
