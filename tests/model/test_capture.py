"""Capture: names, in-place operators, free batch sizes, and models that cannot be captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwise import CaptureError, capture, zoo
from shardwise.model.torch_export import Captured


def test_layers_carry_module_names_and_parameters_their_own() -> None:
    graph = capture(zoo.build("digits"), torch.zeros(4, 1, 8, 8))
    names = {name for layer in graph.layers for name in layer.params}
    assert names == {name for name, _ in zoo.build("digits").named_parameters()}
    assert all(layer.name for layer in graph.layers) and graph.outputs


def test_the_batch_size_stays_free() -> None:
    captured = Captured(zoo.build("digits"), (torch.zeros(1, 1, 8, 8),), training=True)
    for batch in (1, 2, 9):
        assert captured.graph(batch).layers[-1].shape == (batch, 10)
    assert captured.graph(3).signature == captured.graph(5).signature


def test_in_place_operators_become_pure_and_later_readers_see_the_result() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            functional.relu_(y)
            return y + 1

    graph = capture(Net(), torch.zeros(2, 3))
    assert graph["add"].inputs == ("relu",) and "relu_" not in str(graph["relu"].target)


def test_writing_into_a_view_gives_what_it_looks_into_a_new_value() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y[:, :1].add_(1)
            return y

    graph = capture(Net(), torch.zeros(2, 3))
    assert graph.outputs == ("slice_scatter",)
    assert "add" in graph["slice_scatter"].inputs


def test_writing_through_detach_is_refused() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y.detach().add_(1)
            return y

    with pytest.raises(CaptureError, match="writes in place into what 'detach' has made"):
        capture(Net(), torch.zeros(2, 3))


def test_writing_into_a_part_of_a_buffer_is_refused_by_its_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(4, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.queue[1] = x.detach().mean(0)
            return x + self.queue[0]

    with pytest.raises(CaptureError, match="writes into 'queue' in its forward pass"):
        capture(Net(), torch.zeros(2, 3))


def test_layers_know_the_type_of_what_they_make_and_whether_it_has_dimensions() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x > 0, x.argmax(1), x.mean(), x.to(torch.float16)

    graph = capture(Net(), torch.zeros(2, 3))
    kinds = [(graph[name].dtype, graph[name].scalar) for name in graph.outputs]
    assert kinds == [
        (torch.bool, False),
        (torch.int64, False),
        (torch.float32, True),
        (torch.float16, False),
    ]


def test_a_number_that_depends_on_values_is_refused() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0].sum()

    with pytest.raises(CaptureError, match="only known when it runs"):
        capture(Net(), torch.ones(2, 3))


def test_inputs_with_another_number_of_rows_keep_it() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x @ y.T

    graph = capture(Net(), torch.zeros(4, 3), torch.zeros(6, 3))
    assert [graph[name].shape for name in graph.inputs] == [(4, 3), (6, 3)]


def test_writing_into_a_buffer_is_refused_by_its_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            return x + self.steps

    with pytest.raises(CaptureError, match="'steps'"):
        capture(Net(), torch.zeros(2, 3))


def test_a_model_that_cannot_be_captured_says_why_in_one_sentence() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="Net cannot be captured for input 2x3") as error:
        capture(Net(), torch.zeros(2, 3))
    assert "\n" not in str(error.value)


def test_capture_leaves_modes_and_buffers_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None)).eval()
    capture(model, torch.zeros(2, 3, 8, 8))
    assert not model.training and not model[1].training and model[1].momentum is None
    assert int(model[1].num_batches_tracked) == 0


def test_dimensions_keep_their_labels_through_permutations_and_views() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.permute(0, 2, 3, 1).flatten(1, 2)

    graph = capture(Net(), torch.zeros(2, 3, 4, 5))
    assert [layer.dims for layer in graph.layers] == ["nchw", "nhwc", "nhc"]


@pytest.mark.parametrize("name", ["alexnet", "resnet34", "googlenet", "inception_v3", "unet3d"])
def test_networks_of_the_zoo_need_no_opaque_layer_and_evaluate_with_the_same_names(name) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
    x = torch.zeros(zoo.input_shape(name, 2))
    train, evaluate = (
        Captured(model.to_empty(device="cpu"), (x,), mode).graph(2) for mode in (True, False)
    )
    assert not [layer for layer in train.layers if layer.op == "opaque"]
    assert {layer.name for layer in evaluate.layers} <= {layer.name for layer in train.layers}


def test_shapes_that_do_not_fit_are_one_sentence_and_nothing_is_logged(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(CaptureError, match="cannot be captured for input 2x5"):
        capture(nn.Linear(4, 3), torch.zeros(2, 5))
    assert capfd.readouterr() == ("", "")


def test_capturing_leaves_the_attributes_of_a_model_as_they_were() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[torch.Tensor] = []
            self.inner = nn.Linear(3, 3)
            self.inner.shared = self.seen  # type: ignore[assignment]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.clear()
            self.seen.append(self.inner(x))
            return self.inner.shared[0] * 2  # type: ignore[index]

    net = Net()
    capture(net, torch.zeros(2, 3))
    assert net.inner.shared is net.seen and net.seen == []
    assert net.inner.weight.requires_grad


def test_a_model_of_any_number_of_inputs_is_captured() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, *others], 1)

    graph = capture(Net(), torch.zeros(4, 3), torch.zeros(4, 2), torch.zeros(4, 1))
    assert graph["cat"].shape == (4, 6)


def test_a_single_sample_is_captured_by_itself() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.squeeze() * (2 if x.shape[0] == 1 else 3)

    captured = Captured(Net(), (torch.zeros(4, 1, 3),), training=True)
    assert captured.graph(4).layers[-1].shape == (4, 3)
    assert captured.graph(1).layers[-1].shape == (3,)
    assert captured.graph(2).layers[-1].args[1] == 3 and captured.graph(1).layers[-1].args[1] == 2


@pytest.mark.parametrize("name", ["batch_norm", "dropout"])
def test_a_functional_layer_that_is_told_not_to_train_does_not(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if name == "dropout":
                return functional.dropout(x, 0.5, training=False)
            return functional.batch_norm(x, self.norm.running_mean, self.norm.running_var)

    graph = capture(Net(), torch.zeros(2, 3, 4, 4))
    assert graph.layers[-1].traits.never


def test_a_shape_that_fits_only_some_batches_is_refused_for_the_others() -> None:
    class Reshaped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(5, -1, 2)

    captured = Captured(Reshaped(), (torch.zeros(2, 3, 5),), training=True)
    assert captured.graph(4).layers[-1].shape == (5, 6, 2)
    with pytest.raises(CaptureError, match=r"reshape with a shape .* a batch of 1: "):
        captured.graph(1)
    with pytest.raises(CaptureError, match="cannot be captured for input 3x3x5: shape"):
        captured.graph(3)


def test_no_samples_are_captured_by_themselves() -> None:
    class Solved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve_ex(x, torch.zeros(0, 0))[0]

    captured = Captured(Solved(), (torch.zeros(2, 0, 0),), training=True)
    assert captured.graph(2).layers[-1].shape == (2, 0, 0)
    assert captured.graph(0).layers[-1].shape == (0, 0)  # vectors, not matrices


def test_statistics_that_are_no_buffers_are_not_written() -> None:
    class Kept(nn.Module):
        def forward(self, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
            return nn.functional.instance_norm(x, mean, var)

    with pytest.raises(CaptureError, match=r"instance_norm .* writes into its running_mean"):
        capture(Kept(), torch.randn(2, 3, 4, 4), torch.zeros(3), torch.ones(3))


def test_a_tensor_left_in_an_attribute_is_our_sentence_and_not_torchs_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    class Streams(nn.Module):
        past: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.past = x if self.past is None else self.past + x
            return x * 2

    with pytest.raises(CaptureError, match="give it to forward and let it return it"):
        capture(Streams(), torch.zeros(2, 3))
    assert not [each for each in recwarn if "tensor attribute" in str(each.message)]
