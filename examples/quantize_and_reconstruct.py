"""From a float network to a small file, and back.

Takes about ten seconds. Each step gives a network that works; the next one improves it.
"""

from pathlib import Path

import ompq


def main() -> None:
    """Quantize the network that comes with the package to about 2.5 bits."""
    demo = ompq.load_model("ompq:demo")
    model = demo.module
    samples = ompq.load_data("digits", demo, split="train").samples(256)  # no labels
    batches = list(ompq.load_data("digits", demo).batches(batch_size=150))

    plan = ompq.plan(model, samples[:64], "37KiB")
    rounded = ompq.quantize(model, plan, samples)
    config = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=50))
    quantized = ompq.reconstruct(rounded, model, samples, config)

    for name, network in (("rounded", rounded), ("reconstructed", quantized)):
        found = ompq.evaluate(network, batches, reference=model)
        print(
            f"{name:14} top-1 {found.top1:.2%}, drop {found.drop:.2%} "
            f"± {found.drop_error:.2%}, divergence {found.divergence:.4f}"
        )
    for error in ompq.quantization_of(quantized).errors:
        print(f"{error.block:12} error {error.before:.5f} → {error.after:.5f}")

    path = Path("network.ompq.safetensors")
    ompq.save(quantized, path, plan=plan, network="ompq:demo")
    account = ompq.inspect_file(path)
    print(f"{path}: {account.file_bytes:,} bytes, {account.planned_bytes:,} planned")

    loaded = ompq.load(path, ompq.load_model("ompq:demo").module)
    images, _ = batches[0]
    assert loaded(images).equal(quantized(images))


if __name__ == "__main__":
    main()
