"""What inputs of 8 bits would cost a product with INT8 weights.

    python kernels/benches/int8_inputs.py        needs NumPy

Prints the table of BENCHMARKS.md, "INT8 keeps inputs of bfloat16". Errors are shares of the root
mean square of the outputs. Numbers are drawn from a fixed seed; the weights have one scale per
output, as the format INT8 has. Six channels of the inputs are larger than the others, as in large
language models.
"""

import numpy as np

INPUTS, OUTPUTS, ROWS, CHANNELS, LEVELS = 4096, 1024, 64, 6, 127
COLUMNS = [
    "inputs",
    "the format of the weights",
    "8 bits per row",
    "8 bits per 64 inputs",
    "two parts of 8 bits per row",
]


def rounded(values, axis=-1):
    """Values in 8 bits with one scale along an axis."""
    scale = np.abs(values).max(axis=axis, keepdims=True) / LEVELS
    return np.round(values / scale) * scale


def rms(values):
    return np.sqrt(np.mean(values**2))


def main():
    draw = np.random.default_rng(1)
    weights = draw.standard_normal((OUTPUTS, INPUTS))
    stored = rounded(weights)
    print(f"| {' | '.join(COLUMNS)} |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, factor in [("normal", 1), ("six channels × 20", 20), ("six channels × 60", 60)]:
        x = draw.standard_normal((ROWS, INPUTS))
        x[:, draw.choice(INPUTS, CHANNELS, replace=False)] *= factor
        exact = x @ weights.T
        first = rounded(x)
        by_blocks = rounded(x.reshape(ROWS, -1, 64)).reshape(x.shape)
        variants = [first, by_blocks, first + rounded(x - first)]
        differences = [x @ (stored - weights).T] + [(inputs - x) @ stored.T for inputs in variants]
        print(f"| {name} |", *(f"{rms(found) / rms(exact):.2g} |" for found in differences))


if __name__ == "__main__":
    main()
