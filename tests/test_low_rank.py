"""The algebra of low-rank updates against its definitions."""

from __future__ import annotations

import pytest
import torch

from fxplug.blocks import low_rank

R = torch.randn


def test_a_kronecker_product_is_that_of_torch_and_takes_a_batch():
    a, b = R(3, 4, 2), R(3, 5, 6)
    found = low_rank.make_kronecker(a, b)
    assert torch.equal(found, torch.stack([torch.kron(x, y) for x, y in zip(a, b, strict=True)]))
    product = low_rank.make_kronecker(a[0, :1], b[0, :1].T)
    assert torch.equal(product, torch.kron(a[0, :1].contiguous(), b[0, :1].T.contiguous()))


@pytest.mark.parametrize("core", [False, True])
def test_the_halves_of_a_factor_are_the_factor(core):
    own = {"w_a": R(3, 8), "w_b": R(3, 4), "t": R(3, 3, 2, 2)} if core else {"w_a": R(8, 3), "w_b": R(3, 16)}
    up, down = low_rank.make_halves(own, "w")
    whole = low_rank.make_factor(own, "w")
    torch.testing.assert_close(up @ down, whole.flatten(1))
    assert up.shape[1] == low_rank.get_inner_rank(own, "w") == 3
    assert low_rank.sides(own, "w") == (8, (4, 2, 2) if core else (16,))


@pytest.mark.parametrize("shape, rank", [((3, 2, 2), 3), ((9, 2, 2), 4)])
def test_a_factor_that_is_whole_counts_with_its_shorter_side(shape, rank):
    own = {"w": R(shape)}
    up, down = low_rank.make_halves(own, "w")
    assert torch.equal(up @ down, own["w"].flatten(1))
    assert up.shape[1] == down.shape[0] == low_rank.get_inner_rank(own, "w") == rank


def test_a_product_of_two_low_rank_matrices_is_one():
    up1, down1, up2, down2 = R(6, 2), R(2, 5), R(6, 3), R(3, 5)
    up, down = low_rank.make_hadamard_halves(up1, down1, up2, down2)
    assert up.shape == (6, 6)
    torch.testing.assert_close(up @ down, (up1 @ down1) * (up2 @ down2))


def test_gates_go_to_the_inner_channels_of_their_slot():
    hidden, take = R(4, 3, 6), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    rows = low_rank.repeat_gates(take, 6)
    found = low_rank.apply_gates(hidden, rows)
    assert torch.equal(found[:2], torch.cat([hidden[:2, :, :3], torch.zeros(2, 3, 3)], 2))
    assert torch.equal(found[2:], torch.cat([torch.zeros(2, 3, 3), 2 * hidden[2:, :, 3:]], 2))
    assert torch.equal(low_rank.apply_gates(hidden.transpose(0, 1), rows[[0, 0, 1, 1]], 1), found.transpose(0, 1))
    assert torch.equal(low_rank.apply_gates(hidden.transpose(0, 1), rows, 1), found.transpose(0, 1))
    image = hidden.transpose(1, 2)[..., None]
    assert torch.equal(low_rank.apply_gates(image, rows, 0, 2), found.transpose(1, 2)[..., None])
    assert low_rank.apply_gates(hidden, rows, -1).isnan().all()
    assert torch.equal(low_rank.apply_gates(hidden, rows[[0, 0]], -1), hidden * rows[0])
    assert torch.equal(low_rank.apply_gates(hidden, torch.tensor(0.5)), hidden * 0.5)


def test_slots_follow_each_other_within_a_group():
    down, up = R(2 * 3 * 4, 5), R(6, 3 * 4)  # of two groups, three slots and rank 4
    assert torch.equal(low_rank.view_slot(down, 1, 3, 2), torch.stack([down[4:8], down[16:20]]))
    assert torch.equal(low_rank.view_slot(up, 1, 3), up[:, 4:8])
    parts = low_rank.multiply_groups(up, down, 2)
    torch.testing.assert_close(parts, torch.stack([up[:3] @ down[:12], up[3:] @ down[12:]]))


def test_an_update_is_added_to_its_weight():
    weight, down, up, gates = R(6, 5), R(4, 5), R(6, 4), torch.tensor([0.5, 2.0])
    expected = weight + 0.5 * up[:, :2] @ down[:2] + 2 * up[:, 2:] @ down[2:]
    torch.testing.assert_close(low_rank.add_update(weight, down, up, gates), expected)
    x = R(3, 5)
    given = x @ (low_rank.add_update(weight, down, up, gates) - weight).T
    torch.testing.assert_close(low_rank.compute_update(x[None], down, up, low_rank.repeat_gates(gates, 4)[None])[0], given)
