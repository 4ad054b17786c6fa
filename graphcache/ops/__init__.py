"""Operations on state, one file each: torch reference, Triton kernel, registration.

All take slots with -1 as padding and `q_len` tokens a slot, run on the current stream, never
synchronize, and can be captured. The reference runs on CPU tensors, the kernel on CUDA tensors.
"""
