"""unpack: what the machine runs that received a packed file. Nothing imports torch."""

from pathlib import Path
from typing import Annotated

from ompq.cli.console import View, opened, render
from ompq.cli.options import OutputOptions, argument, check_writable, output_path
from ompq.skeleton import unpack as unpack_file


def unpack(
    file: Annotated[Path, argument("FILE", "A packed network that carries its graph.")],
    output: OutputOptions,
    target: Path | None = output_path("The ONNX file. Default: FILE as .onnx."),
) -> None:
    """Write the ONNX file that a packed network carries, without PyTorch.

    Examples:
      ompq unpack net.ompq.safetensors
      ompq unpack net.ompq.safetensors -o net.onnx

    Such a packed file is made by: ompq export OUT --format packed --with-graph -o FILE.
    What is small is the file that travels: in memory and in the ONNX file, coded
    weights are bytes. The result is the file that ompq export verified, byte for byte.
    """
    target = target or file.with_name(f"{file.name.partition('.')[0]}.onnx")
    with opened(output) as console:
        check_writable(target)
        size, travelled = unpack_file(file, target), file.stat().st_size
        line = f"{target}: {size:,} bytes, from {travelled:,}"
        data = {"file": str(target), "bytes": size, "packed_bytes": travelled}
        render(View(data, line, lambda _width: [line]), console)
