"""The 3-D U-Net."""

import pytest
import torch

from shardwise import zoo


@pytest.mark.parametrize("channels", [(4,), (4, 8), (8, 16, 32, 64, 128)])
def test_any_number_of_levels_labels_every_voxel(channels: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = zoo.build("unet3d", num_classes=2, in_channels=3, channels=channels)
        assert model(torch.empty(1, 3, 16, 32, 48)).shape == (1, 2, 16, 32, 48)


def test_a_volume_that_does_not_halve_is_refused() -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=r"\(32, 32, 30\).*multiples of 8"):
        zoo.build("unet3d")(torch.empty(1, 1, 32, 32, 30))


def test_a_voxel_reaches_the_labels_through_the_first_skip_connection() -> None:
    torch.manual_seed(0)
    model = zoo.build("unet3d", channels=(2, 4)).eval()
    with torch.no_grad():
        model.get_parameter("up.0.up.weight").zero_()  # closes the way through the deeper level
        x = torch.zeros(1, 1, 8, 8, 8)
        before = model(x)
        x[0, 0, 4, 4, 4] = 1
        assert not torch.equal(model(x), before)
