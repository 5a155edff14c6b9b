"""Operations of a GDN layer on draft windows: batched, paged, in place.

`plan` describes one round for all layers, `verify` runs a window through a layer, `commit` takes the accepted path into
the pending history, `fold` brings the history into the checkpoint. `verify_store_all` and `commit_store_all` are the
baseline that keeps one state a row. Decoding without speculation is a window of one row. `plan(…, impl="triton")` plans
for the kernels of `treewy.ops.triton`, which need a CUDA device; nothing changes to another implementation by itself.
"""

from treewy.ops.api import GatedNorm, GDNDims, GDNParams, LayerState, SnapshotState, Window
from treewy.ops.dispatch import Impl, commit, fold, plan, verify
from treewy.ops.support import unsupported_reason
from treewy.ops.torch_impl import commit_store_all, folded_state, verify_store_all

__all__ = [
    "GDNDims",
    "GDNParams",
    "GatedNorm",
    "Impl",
    "LayerState",
    "SnapshotState",
    "Window",
    "commit",
    "commit_store_all",
    "fold",
    "folded_state",
    "plan",
    "unsupported_reason",
    "verify",
    "verify_store_all",
]
