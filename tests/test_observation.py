import threading

import pytest
import torch
from torch import nn

from nets import TinyResNet, images, seeded, values
from ompq.network.dataflow import call_flow
from ompq.network.graph import trace
from ompq.network.observation import (
    ForwardPass,
    Watch,
    copy_network,
    detach_state,
    function_name,
    open_modules,
    record,
    visit_outputs,
    visit_twins,
    watch,
)
from ompq.quantization.pipeline import quantize


def test_positions_do_not_depend_on_the_batch():
    network = seeded(TinyResNet())
    small, large = record(network, images(1)), record(network, images(7))
    assert [(c.function, c.inputs) for c in small.calls] == [
        (c.function, c.inputs) for c in large.calls
    ]


def test_data_flow_of_a_residual_block():
    recording = record(seeded(TinyResNet()), images(1))
    by_position = {c.position: c for c in recording.calls}
    (total,) = [
        c for c in recording.calls if c.module == "block2" and c.function == "add"
    ]
    readers = {by_position[at].module for at in total.inputs}
    assert readers == {"block2.bn2", "block2.downsample.1"}
    assert recording.calls[0].inputs == (-1,)
    assert recording.calls[0].parameters == ("stem.weight",)
    (relu,) = call_flow(recording).readers(total.position)
    assert by_position[relu].function == "relu"


def test_in_place_calls_become_the_new_source():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 2
            y += 1
            y.relu_()
            return y.sum()

    calls = record(InPlace(), torch.ones(3)).calls
    assert [(c.function, c.inputs) for c in calls] == [
        ("mul", (-1,)),
        ("add", (0,)),
        ("relu", (1,)),
        ("sum", (2,)),
    ]


def test_a_norm_that_is_called_twice_reads_what_it_was_given_each_time():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            return self.norm(self.norm(x).relu())

    calls = record(seeded(Shared()), images(1)).calls
    assert [(c.function, c.inputs) for c in calls] == [
        ("batch_norm", (-1,)),
        ("relu", (0,)),
        ("batch_norm", (1,)),
    ]


def test_module_calls_say_who_made_the_output():
    recording = record(seeded(TinyResNet()), images(1))
    calls = {c.name: c for c in recording.module_calls}
    assert calls["stem"].weight_used
    assert calls["stem"].input_shape == (1, 3, 8, 8)
    assert recording.calls[calls["block1"].output].function == "relu"
    nothing = record(nn.Sequential(nn.Identity()), torch.ones(1)).module_calls[0]
    assert nothing.output == -1  # it returned its input


def test_watch_returns_the_output_and_leaves_no_trace():
    network = seeded(TinyResNet())
    with torch.no_grad():
        wanted = network(images())
    seen = []
    output = watch(network, images(), lambda *call: seen.append(call[0]))
    assert torch.equal(output, wanted)
    assert seen == list(range(len(seen)))


def test_a_watch_may_change_outputs_before_it_shows_them():
    def doubled(function, _args, _kwargs, output):
        return 2 * output if function_name(function) == "relu" else output

    seen = []
    show = lambda *call: seen.append(call[-1])  # noqa: E731
    with Watch(show, doubled):
        found = torch.relu(torch.tensor([-1.0, 3.0])) + 1
    assert found.tolist() == [1, 7]
    assert [output.tolist() for output in seen] == [[-1, 3], [0, 6], [1, 7]]


def test_function_names_are_plain():
    assert function_name(torch.Tensor.__iadd__) == "add"
    assert function_name(torch.relu_) == "relu"
    assert function_name(torch.concat) == "cat"


def test_state_that_modules_keep_is_cut_off_its_graph():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("last", torch.zeros(3, 2))
            self.pair = None

        def forward(self, x):
            x = self.layer(x)
            self.pair, self.last = (x, [x.chunk(2, 1)[0]]), x
            return x

    model = Keeping()
    assert not detach_state(model)
    model(torch.ones(3, 2)).sum().backward()
    kept = model.last
    assert detach_state(model)
    assert not detach_state(model)
    assert torch.equal(model.pair[1][0], kept[:, :1])
    assert model.layer.weight.requires_grad


def test_a_copy_is_cut_off_the_graphs_of_tensors_that_modules_keep():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.kept = []

        def forward(self, x):
            self.kept = [{"last": self.linear(x)}]
            return self.kept[0]["last"]

    model = Keeps()
    wanted = model(values(4, 3))
    made = copy_network(model)
    assert torch.equal(made.kept[0]["last"], wanted)
    assert not made.kept[0]["last"].requires_grad
    assert model.kept[0]["last"] is wanted and wanted.grad_fn is not None
    assert made.linear.weight is not model.linear.weight


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


def test_two_networks_are_visited_side_by_side():
    one, other, results, seen = chain(), chain(), {}, []
    batches = values(7, 4).split(3)

    def run(number):
        results[number] = other(batches[number])

    def visit(name, twins):
        own, read = twins
        seen.append((name, [[len(each.input) for each in batch] for batch in twins]))
        assert all(
            torch.equal(a.output, b.output) for a, b in zip(own, read, strict=True)
        )
        for each in read if name == "first" else ():
            torch.testing.assert_close(other[0](each.input), each.output)
        return [each.output + 1 for each in read] if name == "last" else None

    runs = [lambda n=n: one(batches[n]) for n in range(3)]
    twins = [runs, [lambda n=n: run(n) for n in range(3)]]
    modules = [{"last": net[2], "first": net[0]} for net in (one, other)]
    visit_twins(twins, modules, visit)
    assert seen == [(name, [[3, 3, 1]] * 2) for name in ("first", "last")]
    # What is returned replaces the outputs of the last network.
    wanted = one(values(7, 4)) + 1
    torch.testing.assert_close(torch.cat([results[n] for n in range(3)]), wanted)
    assert not one[0]._forward_hooks and not other[0]._forward_hooks


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


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("compile_", ["script", "trace"])
def test_a_torchscript_module_counts_as_one_call(compile_):
    part = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()).eval()
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    compiled = (
        torch.jit.script(part)
        if compile_ == "script"
        else torch.jit.trace(part, torch.zeros(2, 4, 3, 3))
    )
    network = nn.Sequential(nn.Conv2d(3, 4, 3), compiled, nn.Conv2d(4, 2, 1)).eval()
    recording = record(network, x)
    assert [call.function for call in recording.calls] == [
        *("conv2d", "torchscript", "conv2d")
    ]
    assert [call.inputs for call in recording.calls] == [(-1,), (0,), (1,)]
    assert [name for name, _ in open_modules(network)] == ["", "0", "1", "2"]
    assert [name for name, _ in open_modules(compiled)] == [""]
    graph = trace(network, x)
    assert graph.names == ("0", "2")
    assert [(skipped.name, skipped.parameters) for skipped in graph.skipped] == [
        ("1", 20)
    ]
    quantized = quantize(network, {"*": (8, 8)}, x)
    with torch.no_grad():
        torch.testing.assert_close(quantized(x), network(x), rtol=0.1, atol=0.1)


def test_a_pass_computes_under_the_autocast_of_who_resumes_it():
    layer, found = nn.Linear(3, 2), []
    one = ForwardPass(lambda: found.append(layer(torch.ones(1, 3)).dtype))
    for kind in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", kind):
            one.resume()
    one.resume()
    assert found == [torch.bfloat16, torch.float16, torch.float32]
