"""CUDA C++ implementation of `verify` and `fold`, for NVIDIA GPUs from compute capability 9.0 on: the fast one.

It shares the commit, and the convolution of wide windows, with `treewy.ops.triton`. Mathematics, layouts, bytes and the
reasons stand at the top of verify.cu; what was tried and lost in docs/kernels.md.
"""

from treewy.ops.cuda.launch import fold, verify, verify_mixed

__all__ = ["fold", "verify", "verify_mixed"]
