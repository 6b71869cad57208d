"""Forward passes that pause: what they hold, where they stop, how they end."""

import threading

import pytest
import torch
from torch import nn

from nets import seeded, values
from ompq.passes import ForwardPass, visit_outputs


def chain():
    return seeded(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))


def test_a_pass_pauses_takes_an_answer_and_continues():
    model, results = chain(), []
    one = ForwardPass(lambda: results.append(model(values(2, 4))))
    model[0].register_forward_hook(lambda _m, _a, output: one.pause(output))
    assert not one.paused
    paused_with = one.resume()
    assert torch.equal(paused_with, nn.functional.linear(values(2, 4), *weights(model)))
    assert one.paused and results == []
    assert one.resume(torch.ones(2, 4)) is None
    assert not one.paused
    torch.testing.assert_close(results[0], model[2](torch.ones(2, 4)))
    assert not results[0].requires_grad


def weights(model):
    return model[0].weight, model[0].bias


def test_a_pass_that_is_given_up_starts_again():
    model, calls = chain(), []
    one = ForwardPass(lambda: model(values(2, 4)))
    model[0].register_forward_hook(lambda *_: one.pause(calls.append(1) or "here"))
    before = threading.active_count()
    one.close()
    for times in (1, 2):
        assert one.resume() == "here"
        assert threading.active_count() == before + 1
        one.close()
        assert len(calls) == times
        assert threading.active_count() == before and not one.paused


def test_another_thread_that_runs_the_network_does_not_pause():
    model = chain()
    one = ForwardPass(lambda: model(values(2, 4)))
    hook = model[0].register_forward_hook(lambda *_: one.pause("here"))
    assert one.resume() == "here"
    torch.testing.assert_close(model(values(3, 4)), model[2](hidden(model)))
    assert one.resume() is None
    hook.remove()


def hidden(model):
    return torch.relu(nn.functional.linear(values(3, 4), *weights(model)))


def test_an_error_is_raised_where_the_pass_was_resumed():
    def fail():
        raise ZeroDivisionError("inside")

    one = ForwardPass(fail)
    with pytest.raises(ZeroDivisionError, match="inside"):
        one.resume()
    assert not one.paused


def test_outputs_of_all_batches_come_together_and_can_be_replaced():
    model, results, seen = chain(), {}, []
    batches = values(7, 4).split(3)

    def run(number):
        results[number] = model(batches[number])

    def visit(name, outputs):
        seen.append((name, [len(output) for output in outputs]))
        mean = torch.cat(outputs).mean(0)
        return [output - mean for output in outputs] if name == "first" else None

    modules = {"last": model[2], "first": model[0]}
    visit_outputs([lambda n=n: run(n) for n in range(3)], modules, visit)
    assert seen == [("first", [3, 3, 1]), ("last", [3, 3, 1])]
    hidden = model[0](values(7, 4))
    wanted = model[2](torch.relu(hidden - hidden.mean(0)))
    torch.testing.assert_close(torch.cat([results[n] for n in range(3)]), wanted)
    assert not model[0]._forward_hooks


def test_batches_that_part_ways_are_left_alone_from_there_on(caplog):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.odd, self.even = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = self.first(x)
            return self.odd(x) if len(x) % 2 else self.even(x)

    model, seen = seeded(Parts()), []
    before = threading.active_count()
    runs = [lambda: model(values(2, 4)), lambda: model(values(3, 4))]
    visit_outputs(runs, dict(model.named_children()), lambda name, _: seen.append(name))
    assert seen == ["first"]
    assert "batches take different paths from even on" in caplog.text
    assert threading.active_count() == before


def test_without_modules_nothing_runs():
    visit_outputs([lambda: pytest.fail("it ran")], {}, lambda *_: None)
