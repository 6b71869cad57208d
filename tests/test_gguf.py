"""GGUF files: written, compared with PyTorch by llama.cpp, and refused."""

import copy

import numpy as np
import pytest
import torch

import ompq
from cli_tools import run_json
from ompq.grids import Grid
from ompq.runtimes.gguf import gguf_files
from ompq.runtimes.gguf.gguf_blocks import TYPES, type_of
from ompq.runtimes.gguf.llama_runtime import next_tokens
from ompq.targets import load_target

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

VOCABULARY, GGUF = 320, ompq.PlanConfig(target="gguf")
KINDS = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config"}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tokenizer(split=None):
    """A byte-level tokenizer that splits text in one of the usual ways."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pattern = isinstance(split, str)
    first = {
        None: [],
        "digits": [pre_tokenizers.Digits(individual_digits=True)],
    }.get(split, [pre_tokenizers.Split(Regex(split), "isolated")] if pattern else [])
    if pattern and split != "digits":
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*first, plain])
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat's 123 4567 o'clock  on the log "] * 9, trainer)
    kind = transformers.PreTrainedTokenizerFast
    return kind(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def decoder(folder, kind="llama", splitter=None, **settings):
    """A small random decoder, loaded from a folder with its tokenizer."""
    config = getattr(transformers, KINDS[kind])(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.1,
            **settings,
        }
    )
    torch.manual_seed(0)
    make = transformers.AutoModelForCausalLM
    make.from_config(config).save_pretrained(folder)
    (splitter or tokenizer()).save_pretrained(folder)
    return make.from_pretrained(folder)


def tokens(count=12, length=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(280, (count, length), generator=generator)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    network = decoder(tmp_path_factory.mktemp("llama"), tie_word_embeddings=True)
    plan = ompq.plan(network, tokens(), "80KiB", GGUF)
    return network, plan, ompq.quantize(network, plan, tokens())


@pytest.mark.parametrize("bits", TYPES)
def test_blocks_hold_what_gguf_reads(bits):
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(6, 96, generator=generator)
    scales = torch.rand(6, 3, generator=generator).half().float() + 2**-10
    scale = scales.half().float().repeat_interleave(32, 1)
    grid = Grid(scale, torch.full_like(scale, 2 ** (bits - 1)), bits)
    rows = TYPES[bits].rows(weight, grid, "layer")
    assert rows.shape == (6, TYPES[bits].row_bytes(96))
    kind = gguf.GGMLQuantizationType[TYPES[bits].name]
    assert np.array_equal(gguf.dequantize(rows, kind), grid.fake(weight).numpy())


def test_blocks_refuse_what_they_cannot_hold():
    weight, scale = torch.zeros(1, 32), torch.full((1, 32), 0.5)
    middle = torch.full((1, 32), 8.0)
    for grid, what in (
        (
            Grid(scale + 1e-5, middle, 4),
            "fc does not fit Q4_0: its scales are no 16-bit",
        ),
        (Grid(scale, middle - 0.5, 4), "the code of 0 must be 8 everywhere"),
    ):
        with pytest.raises(ompq.errors.ExportError, match=what):
            TYPES[4].rows(weight, grid, "fc")
    with pytest.raises(
        ompq.errors.ExportError, match="its 24 inputs are not a multiple of 3"
    ):
        TYPES[4].rows(weight[:, :24], Grid(scale[:, :24], middle[:, :24], 4), "fc")
    with pytest.raises(
        ompq.errors.ExportError, match="fc has 3 bits, .* use 4, 5, 8 or 32"
    ):
        type_of(3, "fc")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
        ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA_3}),
        ("mistral", {"sliding_window": None, "head_dim": 32}),
        ("qwen2", {}),
    ],
)
def test_float_decoders_compute_the_same_in_llama(kind, settings, tmp_path):
    network = decoder(tmp_path, kind, **settings)
    result = ompq.export(network, tmp_path / "model.gguf", tokens())
    assert {one.container for one in result.weights} == {"F32"}
    assert result.limit == 0.05 and result.simulated.logits < 0.03


def test_the_file_is_as_large_as_planned_and_computes_the_same(planned, tmp_path):
    _, plan, quantized = planned
    assert str(plan.budget) == "gguf:80KiB"
    result = ompq.export(
        quantized, tmp_path / "m.gguf", tokens(), ompq.ExportConfig(budget=plan.budget)
    )
    size = (tmp_path / "m.gguf").stat().st_size
    assert result.bytes == size == plan.totals["gguf_bytes"] <= 80 * 1024
    assert {"Q4_0", "Q5_0"} & {one.container for one in result.weights}
    assert result.simulated.logits <= result.limit < 0.5
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert sum(tensor.n_elements for tensor in reader.tensors) == sum(
        parameter.numel()
        for name, parameter in quantized.named_parameters()
        if not name.endswith("_scale")
    )


@pytest.mark.parametrize("tied", [True, False])
def test_every_width_costs_what_the_table_says(tied, tmp_path):
    network = decoder(tmp_path, tie_word_embeddings=tied)
    for bits in (*TYPES, 32):
        config = ompq.PlanConfig(target="gguf", pinned={"*": bits})
        plan = ompq.plan(network, tokens(), "1MiB", config)
        quantized = ompq.quantize(network, plan, tokens())
        path = tmp_path / f"{bits}.gguf"
        assert ompq.export(quantized, path, tokens()).bytes == plan.totals["gguf_bytes"]


def test_feedback_beats_the_nearest_codes(planned, tmp_path):
    network, _, _ = planned
    bits = ompq.PlanConfig(target="gguf", pinned={"*": 4})
    plan = ompq.plan(network, tokens(), "1MiB", bits)
    nearest = ompq.QuantizeConfig(output_error=False)
    with torch.no_grad():
        wanted = network(tokens(64)).logits
        errors = [
            (
                ompq.quantize(network, plan, tokens(64), config)(tokens(64)).logits
                - wanted
            )
            .square()
            .mean()
            for config in (ompq.QuantizeConfig(), nearest)
        ]
    assert errors[0] < errors[1]


@pytest.mark.parametrize(
    "split",
    [
        None,
        "digits",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
)
def test_llama_splits_text_as_the_tokenizer_does(split, tmp_path):
    own = tokenizer(split)
    ompq.export(decoder(tmp_path, splitter=own), tmp_path / "m.gguf", tokens())
    text = "the cats' 98765 logs  'tis 3"
    found = next_tokens(tmp_path / "m.gguf", [text, own(text)["input_ids"]], VOCABULARY)
    assert torch.allclose(found[0], found[1], atol=1e-4)


def test_other_tokens_or_logits_are_refused(planned, tmp_path, monkeypatch):
    _, _, quantized = planned
    path = tmp_path / "m.gguf"
    monkeypatch.setattr(
        gguf_files,
        "next_tokens",
        lambda p, prompts, v: torch.rand(
            len(prompts), v, generator=torch.Generator().manual_seed(0)
        ),
    )
    with pytest.raises(
        ompq.errors.ExportError, match="splits text into other tokens than"
    ):
        ompq.export(quantized, path, tokens())
    monkeypatch.setattr(gguf_files, "_compare_tokens", lambda *_: None)
    with pytest.raises(
        ompq.errors.ExportError, match="computes other logits than PyTorch"
    ):
        ompq.export(quantized, path, tokens())
    assert not path.exists()


def test_without_llama_the_weights_are_compared(planned, tmp_path, monkeypatch):
    quantized = planned[2]
    monkeypatch.setattr(gguf_files, "has_llama", lambda: False)
    result = ompq.export(quantized, tmp_path / "m.gguf", tokens())
    assert result.simulated.logits == 0 and "weights only" in result.runtime
    read = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda data, kind: read(data, kind) * 1.001)
    with pytest.raises(
        ompq.errors.ExportError, match="holds other values of token_embd.weig"
    ):
        ompq.export(quantized, tmp_path / "n.gguf", tokens())
    assert not (tmp_path / "n.gguf").exists()


def test_what_cannot_be_written_is_refused(planned, tmp_path):
    network, _, quantized = planned
    path = tmp_path / "m.gguf"
    small = ompq.Budget(gguf_mib=0.01)
    with pytest.raises(ompq.errors.ExportError, match="more than the budget of gguf:"):
        ompq.export(quantized, path, tokens(), ompq.ExportConfig(budget=small))
    by_bytes = ompq.quantize(network, {"*": (4, 32)}, tokens())
    with pytest.raises(
        ompq.errors.ExportError, match="lm_head does not fit Q4_0: the code of"
    ):
        ompq.export(by_bytes, path, tokens())
    biased = copy.deepcopy(quantized)
    layer = biased.model.layers[0].mlp.up_proj
    layer.bias = torch.nn.Parameter(torch.zeros(layer.out_features))
    with pytest.raises(
        ompq.errors.ExportError, match="no place for .*bias; plan with target"
    ):
        ompq.export(biased, path, tokens())
    rounded = ompq.quantize(network, {"*": (4, 8)}, tokens())
    with pytest.raises(ompq.errors.ExportError, match="llama.cpp rounds only weights"):
        ompq.export(rounded, path, tokens())
    other = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)
    )
    other.name_or_path = network.name_or_path
    with pytest.raises(
        ompq.errors.ExportError, match="GPT2LMHeadModel cannot be written as"
    ):
        ompq.export(other, path, tokens())
    made = transformers.LlamaForCausalLM(
        network.config.__class__(
            vocab_size=9,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    with pytest.raises(
        ompq.errors.ExportError, match="holds the tokenizer, and none was fou"
    ):
        ompq.export(made, path, tokens())
    assert not path.exists()


def test_the_profile_says_what_a_plan_and_its_network_need(planned):
    _, plan, quantized = planned
    target = load_target("gguf")
    assert ompq.targets.Target.from_json(target.to_json()) == target
    assert plan.graph.group_size == 32
    assert {choice.activation for choice in plan.choices} == {32}
    for layer in ompq.layers.quantized_layers(quantized).values():
        assert layer.weight_scale.half().float().equal(layer.weight_scale)
        assert layer.bias is None
    assert plan.with_budget("gguf:70KiB").totals["gguf_bytes"] <= 70 * 1024


def test_one_command_makes_a_file_of_the_budget(tmp_path):
    decoder(tmp_path / "net", max_position_embeddings=32)
    text = tmp_path / "text.txt"
    text.write_text("the cat's 123 logs, 4567 o'clock and the dogs. " * 40)
    words = (f"transformers:{tmp_path / 'net'}", "--data", text, "--eval-data", text)
    more = ("--budget", "85KiB", "--target", "gguf", "--effort", "fast")
    found = run_json("quantize", *words, *more, "-o", tmp_path / "out")
    size = (tmp_path / "out" / "network.gguf").stat().st_size
    assert size == found["sizes"]["network.gguf"]["bytes"] <= 85 * 1024
    assert size == found["sizes"]["network.gguf"]["planned"]
    assert found["plan"]["budget"] == "gguf:85KiB"
    evaluation = found["evaluation"]
    before = evaluation["reference_metrics"]["perplexity"]
    assert evaluation["metrics"]["perplexity"] == pytest.approx(before, rel=0.05)


def test_learned_rounding_fits_the_same_file(planned, tmp_path):
    network, plan, quantized = planned
    config = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=3))
    better = ompq.reconstruct(quantized, network, tokens(), config)
    result = ompq.export(
        better, tmp_path / "m.gguf", tokens(), ompq.ExportConfig(budget=plan.budget)
    )
    assert result.bytes == plan.totals["gguf_bytes"]
