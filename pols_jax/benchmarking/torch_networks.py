"""Our networks as plain PyTorch modules, with our weights: the peers of ``pols bench networks --peer torch``.

Every module has the name that its Flax counterpart has, so that weights are carried over by name. PyTorch is no dependency of the
project: it is imported when `torch_network` is called.
"""

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np

from pols_jax.models import inception


def torch_network(name: str, variables: Mapping[str, Any]) -> Any:
    """Builds the PyTorch module of a network with the given weights, in channels-last layout.

    Args:
      name: A name in ``MODELS``, except mlp.
      variables: The variables of our backbone: ``params`` and, with batch norm, ``batch_stats``.

    Returns:
      A module in evaluation mode that maps images ``[m, c, h, w]`` to features ``[m, d]``.
    """
    import torch  # pyright: ignore[reportMissingImports]

    network = _Builder(torch, variables["params"]).build(name)
    _copy(torch, network, variables)
    return network.to(memory_format=torch.channels_last).eval()


class _Builder:
    """Builds modules; input channels and features are read from the shapes of our parameters."""

    def __init__(self, torch, params):
        self.torch, self.nn, self.params = torch, torch.nn, params

    def build(self, name):
        builders = {"cnn": self.cnn, "alexnet": self.alexnet, "vgg16": self.vgg}
        builders |= {"inception_v3": self.inception, "resnet50": self.resnet, "resnet101": self.resnet}
        return builders[name]()

    def chain(self, modules: Mapping[str, Any]):
        return self.nn.Sequential(collections.OrderedDict(modules))

    def conv(self, params, stride=1, padding: Any = 0):
        size = params["kernel"].shape
        return self.nn.Conv2d(size[2], size[3], size[:2], stride, padding, bias="bias" in params)

    def conv_norm(self, params, stride=1, padding: Any = 0, *, relu=True, epsilon=1e-5):
        conv = self.conv(params["conv"], stride, padding)
        norm = self.nn.BatchNorm2d(conv.out_channels, eps=epsilon)
        return self.chain(
            {"conv": conv, "norm": norm} | ({"relu": self.nn.ReLU(inplace=True)} if relu else {})
        )

    def dense(self, params):
        return self.nn.Linear(*params["kernel"].shape, bias="bias" in params)

    def flatten(self):
        """Flattens as we do, [h, w, c]; in channels-last layout that moves nothing."""
        nn = self.nn

        class Flatten(nn.Module):
            def forward(self, x):
                return x.permute(0, 2, 3, 1).flatten(1)

        return Flatten()

    def cnn(self):
        modules, nn = {}, self.nn
        for index in range(1, 7):
            params = self.params[f"conv{index}"]
            modules[f"conv{index}"] = self.conv_norm(params, padding=params["conv"]["kernel"].shape[0] // 2)
            if index % 2 == 0:
                modules[f"pool{index}"] = nn.MaxPool2d(3, 2, ceil_mode=True)
        dense = self.dense(self.params["dense"]["dense"])
        norm = nn.BatchNorm1d(dense.out_features)
        last = self.chain({"dense": dense, "norm": norm, "relu": nn.ReLU(inplace=True)})
        return self.chain(modules | {"flatten": self.flatten(), "dense": last})

    def alexnet(self):
        modules, nn = {}, self.nn
        for index, (stride, padding) in enumerate(((4, 2), (1, 2), (1, 1), (1, 1), (1, 1)), start=1):
            modules[f"conv{index}"] = self.conv(self.params[f"conv{index}"], stride, padding)
            modules[f"relu{index}"] = nn.ReLU(inplace=True)
            if index in (1, 2, 5):
                modules[f"pool{index}"] = nn.MaxPool2d(3, 2)
        return self.chain(modules | self.two_dense())

    def vgg(self):
        modules, nn = {}, self.nn
        names = sorted(name for name in self.params if name.startswith("conv"))
        for name, following in zip(names, [*names[1:], "end"], strict=True):
            modules[name] = self.conv(self.params[name], padding=1)
            modules[f"relu_{name}"] = nn.ReLU(inplace=True)
            if following[:5] != name[:5]:
                modules[f"pool_{name}"] = nn.MaxPool2d(2, 2)
        return self.chain(modules | self.two_dense())

    def two_dense(self):
        modules = {"flatten": self.flatten()}
        for index in (1, 2):
            modules[f"dense{index}"] = self.dense(self.params[f"dense{index}"])
            modules[f"relu_dense{index}"] = self.nn.ReLU(inplace=True)
        return modules

    def averaged(self):
        return {"average": self.nn.AdaptiveAvgPool2d(1), "flatten": self.nn.Flatten()}

    def resnet(self):
        modules = {"stem": self.conv_norm(self.params["stem"], 2, 3), "pool": self.nn.MaxPool2d(3, 2, 1)}
        names = [name for name in self.params if name.startswith("stage")]
        for name in sorted(names, key=lambda name: (name.partition("_")[0], int(name.partition("block")[2]))):
            stride = 2 if name.endswith("block1") and not name.startswith("stage1") else 1
            modules[name] = self.bottleneck(self.params[name], stride)
        return self.chain(modules | self.averaged())

    def bottleneck(self, params, stride):
        build, nn, relu = self, self.nn, self.torch.nn.functional.relu_

        class Bottleneck(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv1 = build.conv_norm(params["conv1"])
                self.conv2 = build.conv_norm(params["conv2"], stride, 1)
                self.conv3 = build.conv_norm(params["conv3"], relu=False)
                project = "projection" in params
                self.projection = (
                    build.conv_norm(params["projection"], stride, relu=False) if project else None
                )

            def forward(self, x):
                y = self.conv3(self.conv2(self.conv1(x)))
                return relu(y + (x if self.projection is None else self.projection(x)))

        return Bottleneck()

    def inception(self):
        def conv(name, stride=1, padding=0):
            return self.conv_norm(self.params[name], stride, padding, epsilon=inception.EPSILON)

        modules = {"stem1": conv("stem1", 2), "stem2": conv("stem2"), "stem3": conv("stem3", padding=1)}
        modules |= {"pool1": self.nn.MaxPool2d(3, 2), "stem4": conv("stem4"), "stem5": conv("stem5")}
        modules |= {"pool2": self.nn.MaxPool2d(3, 2)}
        for name, branches in inception.blocks((3, 4, 2)).items():
            modules[name] = self.mixed(self.params[name], branches)
        return self.chain(modules | self.averaged())

    def mixed(self, params, branches):
        build, nn, torch = self, self.nn, self.torch

        def conv(step, name):
            padding = tuple(size // 2 for size in step.kernel_size) if step.stride == 1 else 0
            return build.conv_norm(params[name], step.stride, padding, epsilon=inception.EPSILON)

        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.steps = []
                for b, branch in enumerate(branches, start=1):
                    self.steps.append([])
                    for s, step in enumerate(branch, start=1):
                        name = f"branch{b}_step{s}"
                        if isinstance(step, inception.Fork):
                            names = [f"{name}a", f"{name}b"]
                            for side, place in zip((step.left, step.right), names, strict=True):
                                self.add_module(place, conv(side, place))
                        elif isinstance(step, inception.ConvStep):
                            names = [name]
                            self.add_module(name, conv(step, name))
                        else:
                            names = [name]
                            average = step is inception.three_average
                            pool = nn.AvgPool2d(3, 1, 1) if average else nn.MaxPool2d(3, 2)
                            self.add_module(name, pool)
                        self.steps[-1].append(names)

            def forward(self, x):
                outputs = []
                for branch in self.steps:
                    y = [x]
                    for names in branch:
                        y = [getattr(self, name)(y[0]) for name in names]
                    outputs += y
                return torch.cat(outputs, 1)

        return Mixed()


def _copy(torch, network, variables):
    """Copies every parameter and running statistic of ours into the module of the same name."""

    def ours(collection, path):
        place = variables[collection]
        for key in path.split("."):
            place = place[key]
        return {name: torch.from_numpy(np.array(array)) for name, array in place.items()}

    for path, module in network.named_modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            values = ours("params", path)
            kernel = values["kernel"]
            module.weight.data = kernel.permute(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T.contiguous()
            if module.bias is not None:
                module.bias.data = values["bias"]
        elif isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            values, statistics = ours("params", path), ours("batch_stats", path)
            module.weight.data, module.bias.data = values["scale"], values["bias"]
            module.running_mean.data, module.running_var.data = statistics["mean"], statistics["var"]
