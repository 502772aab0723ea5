"""The digits network learns its task."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import zoo


def test_it_reaches_98_percent_on_unseen_digits_in_six_epochs() -> None:
    data = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    torch.manual_seed(0)
    train, test = torch.randperm(len(images)).split([1437, 360])

    model = zoo.build("digits")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(6):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()

    predicted = model.eval()(images[test]).argmax(dim=1)
    assert (predicted == labels[test]).float().mean() > 0.98
