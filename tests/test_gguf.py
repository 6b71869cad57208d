"""GGUF files: written, compared with PyTorch by llama.cpp, and refused."""

import copy
import sys

import pytest
import torch

import ompq
from cli_tools import run, run_json
from ompq.grids import Grid
from ompq.quantization.gguf_grids import gguf_grid
from ompq.runtimes.gguf import gguf_files
from ompq.runtimes.gguf.gguf_blocks import TYPES, type_of
from ompq.runtimes.gguf.llama_runtime import next_tokens
from ompq.targets import load_target
from ompq.tokenizers import load_tokenizer

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

GIVEN = [{bits for whole, bits in TYPES if whole == which} for which in (False, True)]
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


@pytest.mark.parametrize(
    "kind",
    TYPES.values(),
    ids=[f"{kind.name}-{whole}" for (whole, _), kind in TYPES.items()],
)
def test_types_hold_the_grids_that_are_found_for_them(kind):
    generator = torch.Generator().manual_seed(kind.bits)
    weight = 0.03 * torch.randn(6, 512, generator=generator)
    weight[2, :64] = weight[3] = 0
    weight[4, :256].abs_()
    whole = kind.weights == 256
    grid = gguf_grid(weight, kind.bits, group_size=kind.group, super_blocks=whole)
    rows = kind.rows(weight, grid, "layer")
    assert (
        rows.shape == (6, kind.row_bytes(512)) == (6, 512 // kind.weights * kind.bytes)
    )
    number = gguf.GGMLQuantizationType[kind.name]
    assert gguf.GGML_QUANT_SIZES[number] == (kind.weights, kind.bytes)
    read = torch.from_numpy(gguf.dequantize(rows, number))
    assert torch.allclose(read, grid.fake(weight), rtol=0, atol=2e-8)
    assert not read[3].any()
    if not whole:  # gguf rounds only to these
        nearest = gguf.dequantize(gguf.quantize(weight.numpy(), number), number)
        theirs = (torch.from_numpy(nearest) - weight).square().sum()
        assert (read - weight).square().sum() < 0.95 * theirs


def test_minima_and_small_groups_lose_less_at_the_same_width():
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(0))

    def lost(bits, *, whole):
        kind = TYPES[whole, bits]
        options = {"group_size": kind.group, "super_blocks": whole}
        grid = gguf_grid(weight, bits, **options)
        return float((grid.fake(weight) - weight).square().mean())

    for bits in (4, 5):
        assert TYPES[True, bits].row_bytes(512) == TYPES[False, bits].row_bytes(512)
        assert lost(bits, whole=True) < 0.9 * lost(bits, whole=False)
    ratios = [lost(b, whole=True) / lost(b + 1, whole=True) for b in (2, 3, 4, 5)]
    assert all(2.8 < ratio < 5.5 for ratio in ratios)  # about 4, a bit more or less


def test_blocks_refuse_what_they_cannot_hold():
    weight, scale = torch.zeros(1, 256), torch.full((1, 256), 0.5)
    middle = torch.full((1, 256), 8.0)
    four, long = TYPES[False, 4], TYPES[True, 4]
    for kind, grid, what in (
        (
            four,
            Grid(scale + 1e-5, middle, 4),
            "fc does not fit Q4_0: its scales are not 16-bit",
        ),
        (four, Grid(scale, middle - 0.5, 4), "the code of 0 must be 7 or 8"),
        (
            long,
            Grid(scale + 1e-5, middle, 4),
            "its scales are not 1 to 63 times a 16-bit float",
        ),
        (
            long,
            Grid(scale, middle + torch.arange(8.0).repeat_interleave(32) / 99, 4),
            "its minima are not 0 to 63 times a 16-bit float",
        ),
    ):
        with pytest.raises(ompq.errors.ExportError, match=what):
            kind.rows(weight, grid, "fc")
    with pytest.raises(
        ompq.errors.ExportError, match="its 24 inputs are not a multiple of 3"
    ):
        four.rows(weight[:, :24], Grid(scale[:, :24], middle[:, :24], 4), "fc")
    for whole, known in ((False, "4, 5, 8 or 32"), (True, "2, 3, 4, 5, 6, 8 or 32")):
        with pytest.raises(
            ompq.errors.ExportError, match=f"fc has 7 bits, .* use {known}"
        ):
            type_of(7, "fc", super_blocks=whole)


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
    assert str(result.simulated).startswith("top-1 equal on 100.00% of 8 prompts, ")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert sum(tensor.n_elements for tensor in reader.tensors) == sum(
        parameter.numel()
        for name, parameter in quantized.named_parameters()
        if not name.endswith("_scale")
    )


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}


@pytest.mark.parametrize("sizes", [{}, WIDE, {"intermediate_size": 256}])
@pytest.mark.parametrize("tied", [True, False])
def test_every_width_costs_what_the_table_says(tied, sizes, tmp_path):
    network = decoder(tmp_path, tie_word_embeddings=tied, **sizes)
    for bits in (2, 3, 4, 5, 6, 8, 32) if sizes == WIDE else (4, 5, 8, 32):
        options = {"score": "weight_noise", "pinned": {"*": bits}}
        config = ompq.PlanConfig(target="gguf", **options)
        plan = ompq.plan(network, tokens(), "9MiB", config)
        quantized = ompq.quantize(network, plan, tokens())
        path = tmp_path / f"{bits}.gguf"
        result = ompq.export(quantized, path, tokens())
        assert result.bytes == plan.totals["gguf_bytes"]
        kinds = {one.container for one in result.weights} - {"F32"}
        wanted = {
            TYPES[whole, bits].name for whole in (False, True) if bits in GIVEN[whole]
        }
        assert kinds <= wanted and (bits == 32 or kinds)
        assert (kinds == wanted) == (
            sizes == {"intermediate_size": 256} or len(wanted) < 2
        )


def test_rows_decide_which_widths_a_layer_may_have(tmp_path):
    network = decoder(tmp_path, intermediate_size=256)
    plan = ompq.plan(network, tokens(), "150KiB", GGUF)
    for unit, allowed in zip(plan.graph.units, plan.allowed, strict=True):
        found = {c.weight for c, one in zip(plan.choices, allowed, strict=True) if one}
        long = unit.name.endswith("down_proj")
        assert found == ({2, 3, 4, 5, 6, 8} if long else {4, 5, 8})
        assert unit.super_blocks == long
    odd = decoder(tmp_path / "odd", intermediate_size=40)
    with pytest.raises(
        ompq.errors.TargetError,
        match=r"rows have 40 weights and must be multiples of 256 \(2 bits\), .*32 \(4",
    ):
        ompq.plan(odd, tokens(), "150KiB", GGUF)
    pinned = ompq.PlanConfig(target="gguf", pinned={"*down_proj": 32})
    assert ompq.plan(odd, tokens(), "150KiB", pinned)


@pytest.mark.parametrize("learned", [False, True])
def test_super_blocks_survive_files_and_learning(learned, tmp_path):
    network = decoder(tmp_path, **WIDE)
    config = ompq.PlanConfig(target="gguf", score="weight_noise")
    plan = ompq.plan(network, tokens(), "290KiB", config)
    widths = {choice.weight for choice in plan.allocation.values()}
    assert {2, 3, 4} & widths and len(widths) > 1
    quantized = ompq.quantize(network, plan, tokens())
    if learned:
        config = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=3))
        quantized = ompq.reconstruct(quantized, network, tokens(), config)
    ompq.save(quantized, tmp_path / "net.ompq.safetensors")
    again = ompq.load(tmp_path / "net.ompq.safetensors", network)
    with torch.no_grad():
        assert again(tokens()).logits.equal(quantized(tokens()).logits)
    result = ompq.export(quantized, tmp_path / "m.gguf", tokens())
    assert result.bytes == plan.totals["gguf_bytes"] <= 290 * 1024
    assert result.simulated.logits <= result.limit < 0.6
    with pytest.raises(ompq.errors.ExportError, match="cannot hold the minima of bl"):
        ompq.export(quantized, tmp_path / "m.onnx", tokens())


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
        ompq.errors.ExportError, match="splits text into different tokens from"
    ):
        ompq.export(quantized, path, tokens())
    monkeypatch.setattr(gguf_files, "_compare_tokens", lambda *_: None)
    with pytest.raises(ompq.errors.ExportError, match="logits differ from PyTorch's"):
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
        ompq.errors.ExportError, match="values of token_embd.weight differ"
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
    with pytest.raises(ompq.errors.ExportError, match="lm_head does not fit Q4_0: "):
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
    settings = ompq.QuantizeConfig(**plan.quantize_settings)  # of what is measured
    assert (settings.weight_grid, settings.group_size) == ("gguf", 32)
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
    shown = " ".join(
        run("quantize", *words, *more, "-o", tmp_path / "a").stdout.split()
    )
    assert f"next llama-server -m {tmp_path / 'a' / 'network.gguf'} answers" in shown
    assert "images" not in shown and "which is larger" not in shown
    found = run_json("quantize", *words, *more, "-o", tmp_path / "out")
    size = (tmp_path / "out" / "network.gguf").stat().st_size
    assert size == found["sizes"]["network.gguf"]["bytes"] <= 85 * 1024
    assert size == found["sizes"]["network.gguf"]["planned"]
    assert found["sizes"]["network.ompq.safetensors"]["planned"] is None
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


def test_networks_load_from_gguf_files(tmp_path):
    own = tokenizer("digits")
    network = decoder(tmp_path, splitter=own, tie_word_embeddings=True)
    ompq.export(network, tmp_path / "m.gguf", tokens())
    loaded = ompq.load_model(f"transformers:{tmp_path / 'm.gguf'}")
    with torch.no_grad():
        assert loaded.module(tokens()).logits.allclose(network(tokens()).logits)
    text = "the cats' 98765 logs  'tis 3"
    again = load_tokenizer(loaded.tokenizer)
    assert again(text)["input_ids"] == own(text)["input_ids"]
    plan = ompq.plan(loaded.module, tokens(), "80KiB", GGUF)
    quantized = ompq.quantize(loaded.module, plan, tokens())
    assert ompq.export(quantized, tmp_path / "n.gguf", tokens()).bytes <= 80 * 1024
    name = gguf.GGUFReader(tmp_path / "n.gguf").get_field("general.name").contents()
    assert name == "m"
    loaded.module.save_pretrained(tmp_path / "folder")  # as floats
    floats = ompq.load_model(f"transformers:{tmp_path / 'folder'}").module
    assert floats.lm_head.weight.equal(network.lm_head.weight)
    blank = ompq.load_model(f"transformers:{tmp_path / 'm.gguf'}", "none").module
    assert blank.config.hidden_size == 64
    assert not torch.equal(blank.lm_head.weight, network.lm_head.weight)


def test_gguf_files_that_cannot_be_read_say_so(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ompq.errors.ModelError, match="m.gguf cannot be built: "):
        ompq.load_model(f"transformers:{path}")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ompq.errors.MissingExtraError, match=r"ompq\[gguf\]"):
        ompq.load_model(f"transformers:{path}")
