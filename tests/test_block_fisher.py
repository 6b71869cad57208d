import pytest
import torch
from torch import nn

from nets import Chain, scenes, seeded, values
from ompq.reconstruction.block_fisher import (
    channel_fisher,
    fisher_matrix,
    fisher_weights,
)


def test_fisher_weights_are_squared_gradients():
    model = seeded(Chain())
    found = fisher_weights(model, "conv", scenes(6).split(4))
    hidden = model.conv(scenes(6)).detach().requires_grad_()
    logits = model.head(torch.relu(hidden).mean((2, 3))).log_softmax(1)
    (-logits.amax(1)).sum().backward()
    torch.testing.assert_close(
        torch.cat(list(found)), hidden.grad.square(), rtol=1e-4, atol=1e-8
    )
    assert all(p.grad is None for p in model.conv.parameters())


def all_class_fisher(hidden, log_p, axis):
    """The Fisher matrix over channels, class by class and position by position."""
    total = 0
    for sample, log_ps in enumerate(log_p):
        for one in log_ps:
            (gradient,) = torch.autograd.grad(one, hidden, retain_graph=True)
            for g in gradient[sample].movedim(axis, -1).flatten(0, -2):
                total = total + one.exp().detach() * torch.outer(g, g)
    return total / total.trace()


def test_fisher_matrix_is_that_of_all_classes():
    model, samples = seeded(Chain()).double(), scenes(3).double()
    many = samples.repeat(500, 1, 1, 1)  # so that random signs average out
    found = fisher_matrix(model, "conv", many.split(250), axis=-3)
    hidden = model.conv(samples).detach().requires_grad_()
    log_p = model.head(torch.relu(hidden).mean((2, 3))).log_softmax(1)
    wanted = all_class_fisher(hidden, log_p, -3)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02 * wanted.max().item())
    assert found.trace().item() == pytest.approx(1)


class Permutes(nn.Module):
    """Channels of a convolution in either place; the rest is the same."""

    def __init__(self, *, last):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 5, 3), nn.Linear(5, 4)
        self.place = nn.Identity()
        self.last = last

    def forward(self, x):
        x = self.conv(x)
        x = self.place(x.permute(0, 2, 3, 1) if self.last else x)
        return self.head(x.tanh().mean((1, 2) if self.last else (2, 3)))


def test_channels_first_and_last_give_one_error():
    found = []
    error = values(2, 5, 6, 6)
    for last, axis in ((False, -3), (True, -1)):
        model = seeded(Permutes(last=last))
        matrix = fisher_matrix(model, "place", scenes(8).split(4), axis=axis)
        given = error.permute(0, 2, 3, 1) if last else error
        for most in (2, 5, 100):
            channels = channel_fisher(matrix, axis, most)
            assert channels.directions.shape == (min(most, 5), 5)
            found.append(channels.error(given))
        rows = error.movedim(1, -1).flatten(0, 2).double()
        wanted = torch.stack([e @ matrix @ e for e in rows]).mean()
        assert found[-1].item() == pytest.approx(wanted.item(), rel=1e-4)
        assert found[-3] < found[-1]
    torch.testing.assert_close(torch.stack(found[:3]), torch.stack(found[3:]))


def test_a_few_directions_are_the_best_of_their_number():
    basis, _ = torch.linalg.qr(values(6, 6).double())
    shares = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.0, 0.15]).double()
    matrix = basis @ shares.diag() @ basis.T
    directions = channel_fisher(matrix, -1, 2).directions
    wanted = sum(shares[i] * torch.outer(basis[:, i], basis[:, i]) for i in (1, 3))
    torch.testing.assert_close(directions.T @ directions, wanted)


def test_a_network_sure_of_its_answer_has_no_directions():
    model = seeded(Chain())
    with torch.no_grad():
        model.head.weight.zero_()
    matrix = fisher_matrix(model, "conv", [scenes(4)], axis=-3)
    assert channel_fisher(matrix, -3, 4).error(values(2, len(matrix), 4, 4)).item() == 0
