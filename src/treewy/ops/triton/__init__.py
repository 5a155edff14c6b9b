"""Triton implementation of the operations, for CUDA devices: same contract as `treewy.ops.torch_impl`.

A round is one launch of the convolution and one of `verify` per layer, and one of `commit` for all layers. Nothing
waits for the device and nothing that varies from round to round is compiled in: trees, row counts, slots, what is
pending and whether to fold are tensors, so one CUDA graph serves every round of at most T rows and B requests.

Mathematics, per value head, with P pending rows:

    S_P k = g_P S_0 k + sum over pending i of (g_P / g_i) (k_i . k) u_i        likewise for q
    (I + L) U = R,    L[t, i] = beta_t (g_t / g_i) (k_t . k_i) for strict ancestors,    R = beta (v - g S_P k)
    o_t = g_t S_P q_t + sum over i, ancestor or self, of (g_t / g_i) (k_i . q_t) u_i
    fold: S <- g_P S_0 + sum over pending i of (g_P / g_i) u_i k_i^T

Layouts (the last dimension is contiguous, and so is everything below slots, running requests and layers):

| tensor | shape | dtype |
|---|---|---|
| checkpoint | slots, HV, dv, dk | bf16, fp16 or fp32; the stride of a slot may be any |
| x, mixed | B, T, C; q, k, v side by side | bf16, fp16 or fp32 |
| a, b | B, T, HV | any float |
| conv | slots, width - 1, C | as x |
| stash, history: keys | R, rows, H, dk | as x, before normalisation |
| stash, history: values | R, rows, HV, dv | fp32, pseudo-value times the key's inverse norm |
| stash, history: decays | R, rows, HV | fp32, log decay of the row alone |
| parents, ancestors, conv ancestors | B, T (, width - 1) | int32, int64 masks, int32 |

Bytes that `verify` must move per request and value head (state of s bytes an element, inputs of 2, dk = dv = d):
d d s for the state, once more where it folds; P (2 d H / HV + 4 d) for the pending rows; T (4 d H / HV + 2 d) in,
2 T d out, T (2 d H / HV + 4 d) of stash. At d = 128, s = 2, T = 4, P = 8 that is 32 + 5 + 2 + 1 + 2.5 KiB: the state
rules, which is why it is read once and written only in a fold.

What each product uses is said at `tile.dot`, the order of the work in `kernel_verify`, what is open in
`docs/kernels.md`.
"""

from treewy.ops.triton.launch import commit, convolve, fold, verify, verify_mixed
from treewy.ops.triton.window import DeviceWindow

__all__ = ["DeviceWindow", "commit", "convolve", "fold", "verify", "verify_mixed"]
