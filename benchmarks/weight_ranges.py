"""Ranges of few weights: by the error of the weights, or of their outputs (default).

python benchmarks/weight_ranges.py --data FOLDER --network mobilenet_v2

Weights of the same bits everywhere, rounded to nearest; activations of 8 bits. FOLDER
is as for ptq.py.
"""

from rounded import compare

from ompq.quantization import QuantizeConfig

SETTINGS = {
    "weights": QuantizeConfig(output_error=False),
    "outputs": QuantizeConfig(output_error=True),
}

if __name__ == "__main__":
    compare(
        "weight-ranges",
        "error_of",
        SETTINGS,
        bits=(6, 4, 3),
        images=500,
        description=__doc__,
    )
