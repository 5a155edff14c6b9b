"""Triton implementation of the operations, for CUDA devices: same contract as `treewy.ops.torch_impl`.

A round is one launch of the convolution and one of `verify` per layer, and one of `commit` for all layers. Nothing
waits for the device and nothing that varies from round to round is compiled in: trees, row counts, slots, what is
pending and whether to fold are tensors, so one CUDA graph serves every round of at most T rows and B requests.

Mathematics, per value head. Rows are P pending ones, a chain, and below the last of them the window's tree. With
c_i = 1 / sqrt(|k_i|^2 + eps), g_i the decay of all rows down to i, and w_i = c_i u_i the pseudo-value with the inverse
norm of its key:

    (I + L) W = R,    L[t, i] = beta_t c_t^2 (g_t / g_i) (k_t . k_i) for strict ancestors
                      R[t] = beta_t c_t (v_t - g_t c_t S k_t)
    o_t = dk^-0.5 / |q_t| (g_t S q_t + sum over i, ancestor or self, of (g_t / g_i) (k_i . q_t) w_i)
    fold: S <- g_P S + sum over pending i of (g_P / g_i) w_i k_i^T

Layouts (the last dimension is contiguous, and so is everything below slots, running requests and layers):

| tensor | shape | dtype |
|---|---|---|
| checkpoint | slots, HV, dv, dk | bf16, fp16 or fp32; the stride of a slot may be any |
| conv | slots, width - 1, C | as x; likewise |
| x | B, T, C; q, k, v side by side | bf16, fp16 or fp32; strides of requests and rows may be any |
| a, b | B, T, HV | any float; likewise |
| queries | B, T, H, dk | as x |
| window inputs | R, max_rows, C | as x |
| ring: keys | R, ring, H, dk | as x, before normalisation |
| ring: values | R, ring, HV, dv | as x |
| ring: gates | R, ring, HV, 2 | fp32, log decay of the row alone and beta |
| end, window rows; pending | R; R, HV | int32 |
| parents, ancestors, conv ancestors | B, T (, width - 1) | int32, int64 masks, int32 |

Bytes that must move per request, with a state of s bytes an element and inputs of 2, C = 2 H dk + HV dv:

- convolution: (T + width - 1) 2 C in, 2 T C of stash, and 2 T C of queries, keys and values;
- `verify`, per value head, dk = dv = d: d d s of state, once more where it folds; (P + T) (2 d H / HV + 2 d + 8) of
  the ring; T 2 d H / HV of queries and 2 T d out. At d = 128, s = 2, HV = 2 H, T = 4, P = 8 that is
  32 + 4.6 + 0.5 + 1 KiB: the state rules, which is why it is written only in a fold;
- `commit`, per layer: (width - 1) 2 C in and out, and nothing else for a chain.

What each product uses is said at `tile.dot`, the order of the work at the head of every kernel's module. `commit` also
serves `treewy.ops.cuda`; the others here are those for every device, dtype and size.
"""

from treewy.ops.triton.launch import Cut, check_fit, commit, convolve, fold, outputs, verify, verify_mixed

__all__ = ["Cut", "check_fit", "commit", "convolve", "fold", "outputs", "verify", "verify_mixed"]
