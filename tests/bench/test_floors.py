"""Bytes, counted by hand for one layer and read off the tensors that are really allocated."""

import pytest
import torch

from treewy.bench import floors
from treewy.bench.workload import Setting
from treewy.ops import GDNDims
from treewy.state import StateSpec
from treewy.tree import DraftTree

DIMS = GDNDims(16, 32, 128, 128)
KIB = 1024


def test_pieces_are_what_is_allocated():
    pieces = StateSpec(DIMS, 1, "deferred", 4, 3, torch.bfloat16, torch.bfloat16, 20).bytes_by_piece()
    assert floors.state_bytes(DIMS, torch.bfloat16) == pieces["checkpoint"] == 1024 * KIB
    assert floors.ring_row_bytes(DIMS) * 24 == pieces["keys"] + pieces["values"]
    assert pieces["gates"] == floors.GATES * 32 * 24


def test_verify_by_hand():
    row = 4 * KIB + 8 * KIB  # key and value
    window = 4 * (row + 4 * KIB + 32 * (2 + 2 + 8) + 8 * KIB + 8 * KIB)  # query, gates, z, output
    pending = 8 * (row + 32 * 8)
    assert floors.verify_bytes(DIMS, 4, [8], 0, torch.bfloat16) == 1024 * KIB + pending + window
    assert floors.verify_bytes(DIMS, 4, [8], 1, torch.float32) == 2 * 2048 * KIB + pending + window
    assert floors.verify_bytes(DIMS, 4, [8, 0], 0, torch.bfloat16) == 2 * (1024 * KIB + window) + pending


def test_the_convolution_reads_its_inputs_and_writes_them_to_stash_and_ring():
    after = floors.verify_bytes(DIMS, 4, [0], 0, torch.bfloat16)
    whole = floors.verify_bytes(DIMS, 4, [0], 0, torch.bfloat16, with_conv=True)
    channels = 2 * DIMS.conv_dim
    assert whole - after == 4 * (2 * channels - 4 * KIB) + 3 * channels  # the query stays in the cache


def test_commit_moves_only_what_is_out_of_place():
    inputs = 2 * 3 * 2 * DIMS.conv_dim
    chain, tree = DraftTree.chain(3), DraftTree.from_widths((2, 2, 2))
    assert floors.commit_bytes(DIMS, chain, (0, 1, 2), 5) == 5 * inputs
    assert floors.commit_bytes(DIMS, tree, (0, 2, 6), 1) == inputs + 2 * 2 * (12 * KIB + 256)


def test_store_all_writes_a_state_a_row():
    row = 2 * (DIMS.conv_dim + DIMS.value_dim + 64)
    assert floors.store_all_bytes(DIMS, 4, 2, torch.bfloat16, with_norm=False) == 2 * (5 * 1024 * KIB + 4 * row)
    normed = floors.store_all_bytes(DIMS, 4, 1, torch.bfloat16, with_norm=True)
    assert normed - floors.store_all_bytes(DIMS, 4, 1, torch.bfloat16, with_norm=False) == 4 * 8 * KIB


@pytest.mark.parametrize(
    ("accepted", "longest", "capacity", "fills"),
    [(3, 4, 20, [3, 6, 9, 12, 15, 18]), (1, 1, 3, [1, 2, 3]), (3, 4, 4, [3])],
)
def test_cycle(accepted, longest, capacity, fills):
    assert floors.fill_cycle(accepted, longest, capacity) == fills


def test_layers_are_many_enough_to_leave_the_cache_and_few_enough_for_the_memory():
    state = 1024 * KIB
    assert Setting("verify", 1, 4).layers(state) == 256
    assert Setting("verify", 256, 4).layers(state) == 30
    assert Setting("verify", 256, 40).layers(41 * state) == 4
    assert Setting("verify", 4096, 40).layers(41 * state) == 2
