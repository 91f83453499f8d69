"""ResNet-50 (arXiv:1512.03385) as it is usually built: the stride of a block is in its 3x3 convolution ("v1.5")."""

from __future__ import annotations

from torch import Tensor, nn


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.way: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.way = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.body(x) + self.way(x))
        return y


class ResNet50(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        inputs = 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
                inputs = 4 * width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
