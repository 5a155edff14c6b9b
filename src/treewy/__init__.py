"""TreeWY: speculative decoding of Gated DeltaNet hybrid models, chains and trees, without state snapshots.

A Gated DeltaNet layer keeps one matrix per value head instead of a key-value cache. That state cannot be cut back when
a draft is rejected, so engines store one state per draft node. TreeWY verifies a whole window of draft nodes, chain or
tree, against the one committed state, and commits the accepted path from a compact record of it.

Importing this package loads nothing else; import the part you need:

- ``treewy.transformers``: generation with Hugging Face checkpoints.
- ``treewy.ops``: the batched operations, for those who write an engine.
- ``treewy.reference``: the mathematics in float64, one function per equation.
"""

__version__ = "0.1.0"
