"""Operations of a GDN layer on draft windows: batched, paged, in place.

`plan` describes one round for all layers, `verify` runs a window through a layer, `commit` takes the accepted path into
the pending history, `fold` brings the history into the checkpoint. `verify_store_all` and `commit_store_all` are the
baseline that keeps one state a row. Decoding without speculation is a window of one row.
"""

from treewy.ops.api import GatedNorm, GDNDims, GDNParams, LayerState, SnapshotState, Window, plan
from treewy.ops.torch_impl import commit, commit_store_all, fold, folded_state, verify, verify_store_all

__all__ = [
    "GDNDims",
    "GDNParams",
    "GatedNorm",
    "LayerState",
    "SnapshotState",
    "Window",
    "commit",
    "commit_store_all",
    "fold",
    "folded_state",
    "plan",
    "verify",
    "verify_store_all",
]
