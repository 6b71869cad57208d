"""Channels that depthwise layers read: sizes as they are, or nearer to one (default).

python benchmarks/channel_sizes.py --data FOLDER --network mobilenet_v2

Weights of the same bits everywhere, rounded to nearest; activations of 8 bits. FOLDER
is as for ptq.py.
"""

from rounded import compare

from ompq.quantization import QuantizeConfig

SETTINGS = {value: QuantizeConfig(equalize=value) for value in (False, True)}

if __name__ == "__main__":
    compare(
        "channel-sizes",
        "equalize",
        SETTINGS,
        bits=(8, 6, 4),
        images=1000,
        description=__doc__,
    )
