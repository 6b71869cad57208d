"""Folders of compressed-tensors: written, loaded by transformers, and refused."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

import ompq
from cli_tools import run, run_json
from ompq.runtimes import compressed_checkpoints
from ompq.targets import Target, load_target

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

CONFIG = ompq.PlanConfig(target="compressed-tensors", score="weight_noise")
SUFFIX = "net.compressed-tensors"


def decoder(**settings):
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.1,
            **settings,
        }
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def tokens(count=8, length=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(96, (count, length), generator=generator)


@pytest.fixture(scope="module")
def quantized():
    network = decoder()
    plan = ompq.plan(network, tokens(), "9bits", CONFIG)
    assert len({choice.weight for choice in plan.allocation.values()}) == 3  # 4, 8, 32
    return ompq.quantize(network, plan, tokens())


def test_transformers_loads_what_is_written(quantized, tmp_path):
    folder = tmp_path / SUFFIX
    result = ompq.export(quantized, folder, tokens())
    assert result.format == "compressed-tensors" and result.simulated.logits < 1e-5
    assert result.bytes == sum(one.stat().st_size for one in folder.iterdir())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = quantized(tokens()).logits
        assert torch.allclose(loaded(tokens()).logits, expected, atol=1e-5)


def test_weights_take_their_bits(quantized, tmp_path):
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    ompq.export(quantized, tmp_path / SUFFIX, tokens())
    stored = load_file(tmp_path / SUFFIX / "model.safetensors")
    layers = ompq.layers.quantized_layers(quantized)
    bits = {n: c.weight for n, c in quantized.ompq_quantization.allocation.items()}
    for name, layer in layers.items():
        packed, shape = stored[f"{name}.weight_packed"], layer.weight.shape
        assert packed.numel() * 32 == shape.numel() * bits[name]
        assert tuple(stored[f"{name}.weight_shape"]) == shape
        codes = unpack_from_int32(packed, bits[name], shape)
        middle = 1 << (bits[name] - 1)
        assert torch.equal(codes.int() + middle, layer.codes().int())
        assert stored[f"{name}.weight_scale"].shape == (shape[0], shape[1] // 64)
    config = json.loads((tmp_path / SUFFIX / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"].values()
    widths = {name: g["weights"]["num_bits"] for g in groups for name in g["targets"]}
    assert widths == {name: bits[name] for name, layer in layers.items()}


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
@pytest.mark.parametrize(("size", "rows"), [(None, (72, 100)), (32, (96, 160))])
def test_other_widths_and_whole_channels_load_too(bits, size, rows, tmp_path):
    sizes = {"hidden_size": rows[0], "intermediate_size": rows[1]}
    network = decoder(**sizes, tie_word_embeddings=True)
    config = ompq.QuantizeConfig(
        weight_grid="midtread", group_size=size, restore_moments=False
    )
    given = {"*": (bits, 32), "lm_head": (32, 32)}
    quantized = ompq.quantize(network, given, tokens(), config)
    result = ompq.export(quantized, tmp_path / SUFFIX, tokens())
    assert result.simulated.logits < 1e-5
    assert {one.bits for one in result.weights} == {bits}


def test_layers_that_are_computed_as_one_have_the_same_bits(tmp_path):
    target = load_target("compressed-tensors")
    assert Target.from_json(target.to_json()) == target
    plan = ompq.plan(decoder(), tokens(), "9bits", CONFIG)
    assert target.siblings(plan.graph.names) == [
        [f"model.layers.{layer}.{part}" for part in parts]
        for layer in (0, 1)
        for parts in (
            [f"self_attn.{which}_proj" for which in "qkv"],
            ["mlp.gate_proj", "mlp.up_proj"],
        )
    ]
    for names in target.siblings(plan.graph.names):
        assert len({plan.allocation[name] for name in names}) == 1
    config = ompq.QuantizeConfig(weight_grid="midtread", restore_moments=False)
    given = {"*": (4, 32), "model.embed*": (32, 32), "*k_proj": (8, 32)}
    mixed = ompq.quantize(decoder(), given, tokens(), config)
    with pytest.raises(
        ompq.errors.ExportError,
        match=r"q_proj, .*v_proj have different bits \(W4A32, W8A32\), but vLLM comp",
    ):
        ompq.export(mixed, tmp_path / SUFFIX, tokens())


def test_what_the_format_does_not_hold_is_refused(quantized, tmp_path, monkeypatch):
    folder = tmp_path / SUFFIX

    def refused(network, what):
        with pytest.raises(ompq.errors.ExportError, match=what):
            ompq.export(network, folder, tokens())
        assert not folder.exists() or not [*folder.iterdir()]

    refused(decoder(), "LlamaForCausalLM is no quantized network of transformers")
    floats = {"model.embed*": (32, 32)}
    affine = ompq.quantize(decoder(), {"*": (4, 32), **floats}, tokens())
    refused(affine, "has codes that compressed-tensors does not hold: the code of 0 mu")
    rounded = ompq.quantize(decoder(), {"*": (4, 8), **floats}, tokens())
    refused(rounded, r"inputs of layers are rounded \(")
    embedded = ompq.quantize(decoder(), {"*": (4, 32)}, tokens())
    refused(
        embedded, r"embed_tokens \(embedding\) is quantized, but only linear layers"
    )
    config = ompq.QuantizeConfig(
        weight_grid="midtread", group_size=64, restore_moments=False
    )
    odd = ompq.quantize(
        decoder(intermediate_size=160), {"*": (4, 32), **floats}, tokens(), config
    )
    refused(odd, "down_proj has 160 inputs, which compressed-tensors cannot divide in")
    folder.mkdir(exist_ok=True)
    (folder / "mine.txt").write_text("")
    with pytest.raises(ompq.errors.ExportError, match="is not an empty folder; give a"):
        ompq.export(quantized, folder, tokens())
    (folder / "mine.txt").unlink()
    pack = compressed_checkpoints.pack_bits
    monkeypatch.setattr(
        compressed_checkpoints, "pack_bits", lambda codes, bits: pack(codes ^ 1, bits)
    )
    refused(quantized, "transformers' outputs differ from ompq's: .*please report")
    monkeypatch.setattr(
        compressed_checkpoints, "_class_name", lambda network: "AutoModelForCTC"
    )
    refused(quantized, "transformers cannot load the folder: ")
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(
        ompq.errors.MissingExtraError, match=r"ompq\[compressed-tensors"
    ):
        ompq.export(quantized, folder, tokens())


def test_the_command_line_writes_a_folder(tmp_path):
    decoder().save_pretrained(tmp_path / "net")
    words = ("--data", "random", "--target", "compressed-tensors", "--effort", "fast")
    more = ("--samples", "4", "--score", "weight-noise", "-o", tmp_path / "out")
    network = f"transformers:{tmp_path / 'net'}"
    shown = run("quantize", network, *words, "--budget", "9bits", *more).stdout
    assert f"ompq export {tmp_path / 'out'} --format compressed-tensors writes" in (
        " ".join(shown.split())
    )
    name = ("--format", "compressed-tensors", "-o", tmp_path / "folder")
    found = run_json("export", tmp_path / "out", *name)
    assert found["format"] == "compressed-tensors"
    assert (tmp_path / "folder" / "config.json").exists()
