import torch
from torch import nn

from nets import TinyResNet, images, seeded, values
from ompq.recording import copied, detach_state, function_name, record, watch


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
    (relu,) = recording.consumers()[total.position]
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
    made = copied(model)
    assert torch.equal(made.kept[0]["last"], wanted)
    assert not made.kept[0]["last"].requires_grad
    assert model.kept[0]["last"] is wanted and wanted.grad_fn is not None
    assert made.linear.weight is not model.linear.weight
