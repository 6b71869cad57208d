"""MLPerf Tiny: smaller files than the official 8-bit ones, at their accuracy.

python benchmarks/mlperf_tiny.py --data FOLDER --network resnet8

FOLDER holds ``mlperf-tiny/`` (the networks of github mlcommons/tiny, as float and int8
.tflite) and what they are measured on: ``kws01.tar.gz`` (github eembc/energyrunner) for
``dscnn``, ``cifar10-jpeg.tar.gz`` for ``resnet8``, ``imagenet-calib.tar`` and
``imagenet-val-1.tar`` for ``mobilenet``. ImageNet has no labels for "person", and there
are no sounds for ``autoencoder``, so these two are compared with the float network: by
equal answers, and by the error of their outputs relative to those of the float network.

Each row is one file: the official one, the .tflite of ompq at several budgets (packed
KiB, widths of 4 and 8 bits), and packed files with coded weights. Rounding is learned
for ``--iterations`` steps a block.
"""

import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, save
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import ompq
from ompq.runtimes.litert.litert_network import LitertNetwork

KIB = 1024
ENDS = ompq.ExportConfig(float_ends=False)  # as the official files
CALIBRATION = 256  # samples to calibrate and learn on
Data = tuple[Tensor, Tensor, Tensor | None]  # samples, test inputs, labels


class Imported(nn.Module):
    """A float .tflite of these four networks, as PyTorch modules; no softmax."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        from ai_edge_litert import schema_py_generated as schema

        model = schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)
        (self.graph,) = model.subgraphs
        self.buffers_ = [one.data for one in model.buffers]
        numbers = vars(schema.BuiltinOperator)
        names = {number: name for name, number in numbers.items() if name[0] != "_"}
        codes = [
            names[max(one.builtinCode, one.deprecatedBuiltinCode)]
            for one in model.operatorCodes
        ]
        self.layers = nn.ModuleList()
        self.plan: list[tuple[str, list[int], int, Any, tuple[int, ...]]] = []
        for operator in self.graph.operators:
            kind, inputs = codes[operator.opcodeIndex], list(map(int, operator.inputs))
            given, sides = operator.builtinOptions, ()
            if kind in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"):
                layer, sides = self._layer(kind, inputs, given)
                self.layers.append(layer)
            self.plan.append((kind, inputs, int(operator.outputs[0]), given, sides))
        del self.buffers_
        # Modules, not functions: quantizers are attached to modules.
        self.relus = nn.ModuleDict({str(one[2]): nn.ReLU() for one in self.plan})
        self.pool = nn.AdaptiveAvgPool2d(1)

    def _array(self, index: int) -> Tensor:
        """Return a constant; int8 ones are weights, whose grid is in the file."""
        one = self.graph.tensors[index]
        raw = np.asarray(self.buffers_[one.buffer], np.uint8).tobytes()
        kind = {0: np.float32, 9: np.int8}[one.type]
        values = np.frombuffer(raw, kind).reshape(one.shape).astype(np.float32)
        if kind is np.int8:
            grid, like = one.quantization, [1] * values.ndim
            like[grid.quantizedDimension] = -1
            values = values * np.asarray(grid.scale, np.float32).reshape(like)
        return torch.from_numpy(values.copy())

    def _layer(self, kind: str, inputs: list[int], given: Any) -> tuple[nn.Module, Any]:
        weight, bias = self._array(inputs[1]), self._array(inputs[2])
        if kind == "FULLY_CONNECTED":
            layer: nn.Module = nn.Linear(weight.shape[1], weight.shape[0])
            sides: tuple[int, ...] = ()
        else:
            depthwise = kind == "DEPTHWISE_CONV_2D"
            weight = weight.permute((3, 0, 1, 2) if depthwise else (0, 3, 1, 2))
            channels, groups = weight.shape[1], len(weight) if depthwise else 1
            stride = (given.strideH, given.strideW)
            sizes = self.graph.tensors[inputs[0]].shape[1:3]
            sides, padding = self._sides(sizes, weight.shape[2:], stride)
            if depthwise:
                channels = groups
            layer = nn.Conv2d(
                channels, len(weight), weight.shape[2:], stride, padding, groups=groups
            )
        layer.load_state_dict({"weight": weight.contiguous(), "bias": bias})
        return layer, sides

    def _sides(self, sizes: Any, window: Any, stride: Any) -> tuple[Any, Any]:
        """Return what F.pad adds for SAME, and what the layer adds if that is even."""
        totals = [
            max(0, (-(-int(n) // s) - 1) * s + k - int(n))
            for n, k, s in zip(sizes, window, stride, strict=True)
        ]
        if not any(total % 2 for total in totals):
            return (), tuple(total // 2 for total in totals)
        top, left = (total // 2 for total in totals)
        return (left, totals[1] - left, top, totals[0] - top), (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        values = {int(self.graph.inputs[0]): x}
        layers = iter(self.layers)
        for kind, inputs, output, given, sides in self.plan:
            y = values[inputs[0]]
            if kind in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"):
                y = next(layers)(F.pad(y, sides) if sides else y)
            elif kind == "ADD":
                y = y + values[inputs[1]]
            elif kind == "AVERAGE_POOL_2D":
                y = self.pool(y)
            elif kind == "RESHAPE":
                y = y.flatten(1)
            if getattr(given, "fusedActivationFunction", 0) == 1:
                y = self.relus[str(output)](y)
            values[output] = y
        return values[int(self.graph.outputs[0])]


def keywords(folder: Path) -> Data:
    inputs, labels = [], []
    with tarfile.open(folder / "kws01.tar.gz") as archive:
        table = archive.extractfile("kws01/y_labels.csv").read().decode()
        for line in table.splitlines():
            name, _, label = line.split(",")
            raw = archive.extractfile(f"kws01/{name}").read()
            inputs.append(np.frombuffer(raw, np.int8).reshape(1, 49, 10))
            labels.append(int(label))
    codes = torch.from_numpy(np.stack(inputs).astype(np.float32))
    x = (codes - 83) * 0.5847029089927673
    return x[:CALIBRATION], x, torch.tensor(labels)


def _image(raw: bytes, size: int, factor: float) -> Tensor:
    image = Image.open(BytesIO(raw)).convert("RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() * factor


@cache
def _folder(archive: Path, part: str, size: int, factor: float) -> Any:
    found = []
    with tarfile.open(archive) as files:
        for member in files:
            if member.name.endswith(".jpg") and part in member.name:
                raw = files.extractfile(member).read()
                found.append((member.name, _image(raw, size, factor)))
    found.sort(key=lambda pair: pair[0])
    return found


def objects(folder: Path) -> Data:
    archive = folder / "cifar10-jpeg.tar.gz"
    train, test = (_folder(archive, f"{p}/", 32, 1.0) for p in ("train", "test"))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(train), generator=generator)[: 4 * CALIBRATION]
    classes = sorted({name.split("/")[-2] for name, _ in test})
    labels = [classes.index(name.split("/")[-2]) for name, _ in test]
    inputs = torch.stack([image for _, image in test])
    return torch.stack([train[i][1] for i in order]), inputs, torch.tensor(labels)


def persons(folder: Path) -> Data:
    given = (("imagenet-calib.tar", 4 * CALIBRATION), ("imagenet-val-1.tar", 1250))
    calibration, test = (
        torch.stack([i for _, i in _folder(folder / name, "", 96, 1 / 255)[:count]])
        for name, count in given
    )
    return calibration, test, None


def sounds(_folder: Path) -> Data:
    """Five frames of 128 log-mel energies that drift: nothing real."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3 * CALIBRATION, 5, 136, generator=generator)
    smooth = F.avg_pool1d(noise.flatten(0, 1)[:, None], 9, 1)[:, 0].view(-1, 5, 128)
    drift = torch.randn(3 * CALIBRATION, 1, 1, generator=generator)
    slope = torch.linspace(-10, -50, 128)
    x = (slope + 18 * smooth + 6 * drift).flatten(1)
    return x[:CALIBRATION], x[CALIBRATION:], None


@dataclass(frozen=True)
class Network:
    float_file: str
    official: str
    data: Callable[[Path], Data]
    kib: tuple[int, ...]  # budgets of packed KiB for widths of 4 and 8 bits
    coded_kib: tuple[int, ...]  # budgets of packed KiB for coded weights


NETWORKS = {
    "resnet8": Network(
        "pretrainedResnet", "pretrainedResnet_quant", objects, (48, 64),
        (32, 40),
    ),
    "dscnn": Network(
        "kws_ref_model_float32", "kws_ref_model", keywords, (18, 20, 24),
        (10, 12, 14),
    ),
    "mobilenet": Network(
        "vww_96_float", "vww_96_int8", persons, (176, 208), (128,)
    ),
    "autoencoder": Network(
        "ad01_fp32", "ad01_int8", sounds, (160, 200, 240), (100, 130)
    ),
}  # fmt: skip


@torch.no_grad()
def outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    return torch.cat([network(part) for part in inputs.split(250)])


def quality(found: Tensor, expected: Tensor, labels: Tensor | None) -> dict[str, float]:
    """Return top-1 where there are labels, and the distance from the float network."""
    result: dict[str, float] = {}
    if labels is not None:
        result["top1"] = float((found.argmax(1) == labels).double().mean())
    if found.shape[1] < 100:
        agree = found.argmax(1) == expected.argmax(1)
        result["agree"] = float(agree.double().mean())
    else:
        error = (found - expected).square().mean() / expected.var()
        result["relative_error"] = float(error)
    return result


def official(options: Any, network: Network, data: Data, expected: Tensor) -> Any:
    """Return the rows of the float network and of the official file."""
    folder = options.data / "mlperf-tiny"
    for kind, name in (("float", network.float_file), ("official", network.official)):
        path = folder / f"{name}.tflite"
        found = outputs(LitertNetwork(path), data[1])
        target = expected if found.shape[1] > 100 else expected.softmax(1)
        yield {
            "method": kind,
            "bytes": path.stat().st_size,
            **quality(found, target, data[2]),
        }


def planned(
    options: Any, model: nn.Module, data: Data, kib: int, *, coded: bool
) -> tuple[nn.Module, ompq.Plan]:
    samples = data[0]
    if coded:
        config = ompq.PlanConfig(storage="coded")
        weights = ompq.QuantizeConfig()
    else:
        config = ompq.PlanConfig(choices=(4, 8))
        weights = ompq.QuantizeConfig(weight_grid="symmetric")
    plan = ompq.plan(model, samples[:64], f"{kib}KiB", config)
    quantized = ompq.quantize(model, plan, samples, weights)
    if options.iterations:
        rounding = ompq.RoundingConfig(iterations=options.iterations)
        config = ompq.ReconstructConfig(rounding=rounding)
        quantized = ompq.reconstruct(quantized, model, samples, config)
    return quantized, plan


def ours(options: Any, model: nn.Module, data: Data, expected: Tensor) -> Any:
    """Return the rows of ompq's files."""
    network = NETWORKS[options.network]
    jobs = [(kib, False) for kib in network.kib]
    jobs += [(kib, True) for kib in network.coded_kib]
    for kib, coded in jobs:
        quantized, plan = planned(options, model, data, kib, coded=coded)
        widths = [str(bits) for bits in plan.allocation.values()]
        row = {"budget_kib": kib, "bits": widths, "iterations": options.iterations}
        with tempfile.TemporaryDirectory() as work:
            packed = Path(work, "network.safetensors")
            ompq.save(quantized, packed)
            row["packed_bytes"] = packed.stat().st_size
            if coded:
                found = outputs(quantized, data[1])
                row |= {"method": "packed", "bytes": row["packed_bytes"]}
            else:
                path = Path(work, "network.tflite")
                result = ompq.export(quantized, path, data[0], ENDS)
                found = outputs(LitertNetwork(path), data[1])
                row |= {"method": "tflite", "bytes": path.stat().st_size}
                row |= {"codes_equal": result.engine.codes_equal}
        yield row | quality(found, expected, data[2])


def main() -> None:
    parser = arguments(__doc__, NETWORKS)
    parser.add_argument("--iterations", type=int, default=1000)
    options = parser.parse_args()
    network = NETWORKS[options.network]
    path = options.data / "mlperf-tiny" / f"{network.float_file}.tflite"
    model = Imported(path).eval()
    data = network.data(options.data)
    expected = outputs(model, data[1])
    rows = []
    for row in (
        *official(options, network, data, expected),
        *ours(options, model, data, expected),
    ):
        rows.append(row)
        print(row)
    save(f"mlperf-tiny-{options.network}", rows, options.out)


if __name__ == "__main__":
    main()
