"""Operations of a GDN layer on draft windows: batched, paged, in place.

`plan` describes one round for all layers, `verify` runs a window through a layer, `commit` makes the accepted path
pending, `fold` brings pending rows into the checkpoint. `verify_store_all` and `commit_store_all` are the baseline that
keeps one state a row. Decoding without speculation is a window of one row. `plan(…, impl="triton")` or `"cuda"` plans
for kernels, which need a CUDA device; nothing changes to another implementation by itself.
"""

from treewy.ops.api import GatedNorm, GDNDims, GDNParams, LayerState, SnapshotState, Window
from treewy.ops.device_window import DeviceWindow
from treewy.ops.dispatch import Impl, check_impl, commit, fold, plan, verify
from treewy.ops.support import unsupported_reason
from treewy.ops.torch_impl import commit_store_all, folded_state, verify_store_all

__all__ = [
    "DeviceWindow",
    "GDNDims",
    "GDNParams",
    "GatedNorm",
    "Impl",
    "LayerState",
    "SnapshotState",
    "Window",
    "check_impl",
    "commit",
    "commit_store_all",
    "fold",
    "folded_state",
    "plan",
    "unsupported_reason",
    "verify",
    "verify_store_all",
]
