"""Hugging Face adapter: an unmodified GDN model and a drafter, and `generate`."""

from treewy.transformers.decoder import GenerateOutput, Run, SpeculativeDecoder, StopRules
from treewy.transformers.draft_model import DraftModelDrafter
from treewy.transformers.mtp import MTPDrafter, MTPHead
from treewy.transformers.target import HFTarget

__all__ = [
    "DraftModelDrafter",
    "GenerateOutput",
    "HFTarget",
    "MTPDrafter",
    "MTPHead",
    "Run",
    "SpeculativeDecoder",
    "StopRules",
]
