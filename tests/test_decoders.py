"""Decoders of transformers on the whole path, as objects and by name."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ompq
from cli_tools import run, run_json
from ompq.runtimes.benchmark import inputs_of
from ompq.runtimes.verification import open_session, run_session
from ompq.samples import evaluating

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 61, 12
QUICK = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=3))


def llama(**settings):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        **settings,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=LENGTH
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


def tokens(count=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count, LENGTH), generator=generator)


def by_hand(model, ids):
    """Return exp of the mean of −log p(next token), token by token."""
    with torch.no_grad():
        logits = model(ids).logits.double()
    lost = [
        -logits[row, at].log_softmax(0)[ids[row, at + 1]].item()
        for row in range(len(ids))
        for at in range(ids.shape[1] - 1)
        if ids[row, at + 1] >= 0
    ]
    return math.exp(sum(lost) / len(lost))


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_goes_the_whole_path(tied, tmp_path):
    model, ids = llama(tie_word_embeddings=tied), tokens()
    plan = ompq.plan(model, ids, "4bits")
    held = sum(unit.weights for unit in plan.graph.units)
    kept = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    assert held + kept == sum(p.numel() for p in model.parameters())  # tied once
    quantized = ompq.quantize(model, plan, ids)
    better = ompq.reconstruct(quantized, model, ids, QUICK)
    blocks = [error.block for error in ompq.quantization_of(better).errors]
    layers = ["model.layers.0", "model.layers.1"]
    assert blocks == [*layers, *([] if tied else ["lm_head"])]
    path = tmp_path / "net.ompq.safetensors"
    ompq.save(better, path, plan=plan)
    loaded = ompq.load(path, lambda: llama(tie_word_embeddings=tied))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, better(ids).logits)
    found = ompq.evaluate(
        loaded,
        ompq.Samples.of(ids),
        reference=model,
        metrics={"perplexity": ompq.Perplexity()},
    )
    assert found.metrics["perplexity"] == pytest.approx(by_hand(loaded, ids), rel=1e-5)
    expected = pytest.approx(by_hand(model, ids), rel=1e-5)
    assert found.reference_metrics["perplexity"] == expected
    assert model.config.use_cache is True


def test_hidden_tokens_do_not_count():
    model, ids = llama(), tokens(70)  # more than one batch
    mask = torch.ones_like(ids)
    mask[:3, LENGTH // 2 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    found = ompq.evaluate(
        model, ompq.Samples.of(inputs), metrics={"perplexity": ompq.Perplexity()}
    )
    with torch.no_grad():
        logits = model(**inputs).logits
    wanted = ids.masked_fill(mask == 0, -100)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted[:, 1:].flatten())
    assert found.metrics["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-5)


def test_perplexity_needs_tokens_as_targets():
    batches = [(tokens(), torch.zeros(6, dtype=torch.long))]
    with pytest.raises(
        ompq.errors.DataError, match="needs token ids as targets, of shape"
    ):
        ompq.evaluate(llama(), batches, metrics={"perplexity": ompq.Perplexity()})
    with pytest.raises(ValueError, match="For perplexity lower is better: use max_div"):
        ompq.Goal(max_drop=1.0, metric=ompq.Perplexity())


def test_weights_alone_can_be_quantized():
    model, ids = llama(), tokens()
    config = ompq.PlanConfig(activation_choices=(32,), score="fisher")
    plan = ompq.plan(model, ids, "5bits", config)
    quantized = ompq.quantize(model, plan, ids)
    assert not ompq.quantization_of(quantized).sites
    assert {choice.activation for choice in plan.allocation.values()} == {32}


def test_no_keys_are_kept_while_a_decoder_is_watched():
    model = llama()
    with evaluating(model):
        assert model(tokens()).past_key_values is None
    assert model(tokens()).past_key_values is not None


def test_layers_of_gpt2_become_linear_and_compute_the_same():
    model, ids = gpt2(), tokens()
    assert len(ompq.trace(model, ids)) == 2  # the head and the positions
    linear = ompq.with_linear_layers(model)
    layers = [m for m in linear.modules() if isinstance(m, nn.Linear)]
    assert len(layers) == 5 and len(ompq.trace(linear, ids)) == 6
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(linear(ids).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("decoder")
    llama().save_pretrained(path)
    vocabulary = {f"w{number}": number for number in range(VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    kind = transformers.PreTrainedTokenizerFast
    kind(tokenizer_object=words).save_pretrained(path)
    ids = tokens(9)
    text = " ".join(f"w{number}" for number in ids.flatten().tolist())
    (path / "text.txt").write_text(f"{text} w1 w2")  # what is left over is not used
    return path


def test_a_folder_is_a_network_and_a_text_its_data(folder, tmp_path):
    network, text = f"transformers:{folder}", folder / "text.txt"
    words = (network, "--data", text, "--eval-data", text, "--metric", "perplexity")
    more = ("--budget", "6bits", "--effort", "fast", "-o", tmp_path / "out")
    found = run_json("quantize", *words, *more)["evaluation"]
    expected = pytest.approx(by_hand(llama(), tokens(9)), rel=1e-5)
    assert found["reference_metrics"]["perplexity"] == expected
    packed = tmp_path / "out" / "network.ompq.safetensors"
    again = ("--packed", packed, "--metric", "perplexity")
    alone = run_json("evaluate", network, "--data", text, *again)
    value = pytest.approx(found["metrics"]["perplexity"], rel=1e-5)
    assert alone["metrics"]["perplexity"] == value


def test_decoders_are_float32_whatever_their_files_hold(tmp_path):
    half, ids = llama().to(torch.bfloat16), tokens()
    half.save_pretrained(tmp_path)
    network = ompq.load_model(f"transformers:{tmp_path}").module
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    with pytest.raises(
        ompq.errors.QuantizationError, match=r"bfloat16.*: model.float\(\)"
    ):
        ompq.quantize(half, {"*": (4, 32)}, ids)


def test_a_config_alone_has_random_weights(folder, tmp_path):
    file = tmp_path / "config.json"
    file.write_text((folder / "config.json").read_text())
    words = ("plan", f"transformers:{file}", "--data", "random", "--budget", "3bits")
    found = run_json(*words, "--weights", "none", "--input-shape", "5")
    assert found["totals"]["average_bits"] <= 3
    refused = run(*words)
    assert refused.exit_code == 2
    assert "holds no weights (*.safetensors). Give a file of weights" in refused.stderr


def test_what_is_no_decoder_is_explained(folder, tmp_path):
    with pytest.raises(ompq.errors.ModelError, match="there is no folder ./nowhere"):
        ompq.load_model("transformers:./nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none such"}))
    with pytest.raises(ompq.errors.ModelError, match="cannot be built: ValueError"):
        ompq.load_model(f"transformers:{tmp_path}", "none")
    network = ompq.load_model(f"transformers:{folder}")
    with pytest.raises(
        ompq.errors.DataError, match="not images; give its own data: a text"
    ):
        ompq.load_data(tmp_path, network)
    short = tmp_path / "short.txt"
    short.write_text("w1 w2 w3")
    with pytest.raises(
        ompq.errors.DataError, match="has 3 tokens, too few for one input of"
    ):
        ompq.load_data(short, network)
    (tmp_path / "own.py").write_text(
        "import transformers\ndef make():\n    return transformers.LlamaForCausalLM("
        f"transformers.LlamaConfig.from_pretrained({str(folder)!r}))\n"
    )
    own = ompq.load_model(f"{tmp_path}/own.py:make")
    assert own.vocabulary == VOCABULARY and own.input_shape == (LENGTH,)
    with pytest.raises(ompq.errors.DataError, match="has no tokenizer; give token ids"):
        ompq.load_data(short, own)


def test_a_missing_library_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(
        ompq.errors.MissingExtraError, match=r"pip install 'ompq\[transf"
    ):
        ompq.load_model(f"transformers:{folder}")


def test_the_command_line_keeps_weights_on_the_host(folder):
    words = ("plan", f"transformers:{folder}", "--data", "random", "--budget", "3bits")
    whole = run_json(*words)
    limited = run_json(*words, "--device-memory", "9KiB")
    assert limited["units"] == whole["units"]
    refused = run(*words, "--device-memory", "1KiB")
    assert refused.exit_code == 2 and "does not hold the" in refused.stderr


@pytest.mark.parametrize("bits", [8, 4])
def test_decoders_with_grouped_queries_are_exported(bits, tmp_path):
    pytest.importorskip("onnxruntime")
    samples = {"input_ids": tokens(8)}
    network = ompq.quantize(llama(), {"*": (bits, bits)}, samples)
    result = ompq.export(network, tmp_path / "llama.onnx", samples)
    assert result.simulated.logits < 1e-4


def test_texts_of_any_length_run(tmp_path):
    pytest.importorskip("onnxruntime")
    samples = {"input_ids": tokens(8)}
    network = ompq.quantize(gpt2(), {"*": (8, 8)}, samples)
    result = ompq.export(network, tmp_path / "gpt2.onnx", samples)
    session = open_session(result.path)
    for length in (1, 5, LENGTH):
        ids = samples["input_ids"][:3, :length]
        (logits,) = run_session(session, {"input_ids": ids})
        with torch.no_grad():
            expected = network(input_ids=ids).logits
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    (text,) = inputs_of(result.path, batch=2)
    assert text.shape == (2, LENGTH)
    assert [d.dim_param for d in session_shape(result.path)] == ["batch", "length"]


def session_shape(path):
    onnx = pytest.importorskip("onnx")
    return onnx.load(path).graph.input[0].type.tensor_type.shape.dim


class Positions(nn.Module):
    """Adds all positions, so it takes texts of one length."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 5)
        self.places = nn.Parameter(torch.ones(LENGTH, 8) / 7)

    def forward(self, ids):
        return self.head((self.words(ids) + self.places).mean(1))


class Halves(Positions):
    """Is traced for any length, but computes something else for other lengths."""

    def forward(self, ids):
        count = len(self.places) if torch.compiler.is_exporting() else ids.shape[1]
        return self.head(self.words(ids).sum(1) / count)


@pytest.mark.parametrize("kind", [Positions, Halves])
def test_texts_have_a_fixed_length_where_the_network_wants_it(kind, tmp_path):
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    network = ompq.quantize(kind().eval(), {"*": (8, 8)}, tokens(8))
    result = ompq.export(network, tmp_path / "net.onnx", tokens(8))
    assert session_shape(result.path)[1].dim_value == LENGTH
