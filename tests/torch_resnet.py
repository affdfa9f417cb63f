"""A ResNet in PyTorch with the layers and the names of torchvision's, and the safetensors format, for tests."""

import json

import numpy as np


def torch_resnet(stage_sizes, width, num_classes, seed=0):
    """A network whose normalization layers are far from the identity, in evaluation mode."""
    import torch
    from torch import nn

    class Bottleneck(nn.Module):
        def __init__(self, inputs, channels, stride):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(inputs, channels, 1, bias=False), nn.BatchNorm2d(channels)
            self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(channels)
            self.conv3, self.bn3 = (
                nn.Conv2d(channels, 4 * channels, 1, bias=False),
                nn.BatchNorm2d(4 * channels),
            )
            self.downsample = None
            if stride != 1 or inputs != 4 * channels:
                projection = nn.Conv2d(inputs, 4 * channels, 1, stride, bias=False)
                self.downsample = nn.Sequential(projection, nn.BatchNorm2d(4 * channels))

        def forward(self, x):
            y = torch.relu(self.bn1(self.conv1(x)))
            y = torch.relu(self.bn2(self.conv2(y)))
            y = self.bn3(self.conv3(y))
            return torch.relu(y + (x if self.downsample is None else self.downsample(x)))

    class ResNet(nn.Module):
        def __init__(self):
            super().__init__()
            inputs = round(64 * width)
            self.conv1, self.bn1 = nn.Conv2d(3, inputs, 7, 2, 3, bias=False), nn.BatchNorm2d(inputs)
            self.maxpool = nn.MaxPool2d(3, 2, 1)
            for stage, size in enumerate(stage_sizes):
                channels, blocks = round(64 * 2**stage * width), []
                for index in range(size):
                    blocks.append(Bottleneck(inputs, channels, 2 if stage and not index else 1))
                    inputs = 4 * channels
                setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
            self.fc = nn.Linear(inputs, num_classes)

        def forward(self, x):
            x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
            for stage in range(len(stage_sizes)):
                x = getattr(self, f"layer{stage + 1}")(x)
            return self.fc(x.mean((2, 3)))

    torch.manual_seed(seed)
    network = ResNet()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.5)
            nn.init.normal_(layer.running_mean, std=0.5)
            nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return network.eval()


def torch_logits(network, pixels):
    """The logits of uint8 pictures, prepared as torchvision says: in [0, 1], minus ImageNet's mean, over its deviation."""
    import torch

    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    prepared = ((pixels / 255 - mean) / std).astype(np.float32).transpose(0, 3, 1, 2)
    with torch.no_grad():
        return network(torch.from_numpy(prepared.copy())).numpy()


def state_arrays(network):
    """The arrays of a torch network by their names."""
    return {name: tensor.numpy() for name, tensor in network.state_dict().items()}


def write_safetensors(path, arrays):
    """Writes a safetensors file without the package of that name."""
    kinds = {"float32": "F32", "float16": "F16", "int64": "I64"}
    header, content = {}, b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        place = [len(content), len(content) + len(raw)]
        header[name] = {"dtype": kinds[array.dtype.name], "shape": list(array.shape), "data_offsets": place}
        content += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path
