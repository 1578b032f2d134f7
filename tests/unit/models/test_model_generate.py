"""Sampling."""

from __future__ import annotations

import pytest
import torch

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT, generate
from gradsync.errors import ConfigError

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=40, block_size=8)


@pytest.fixture
def model():
    model = GPT(CONFIG, seed=2)
    with torch.no_grad():
        model.embed.weight.mul_(40)  # sharper than a fresh model, so that draws differ in weight
    return model


def test_same_seed_same_text_and_longer_than_the_context(model):
    text = generate(model, [1, 2, 3], 20, seed=7)
    assert text[:3] == [1, 2, 3]
    assert len(text) == 23
    assert text == generate(model, [1, 2, 3], 20, seed=7)
    assert text != generate(model, [1, 2, 3], 20, seed=8, temperature=3.0)
    assert all(0 <= token < 40 for token in text)


@pytest.mark.parametrize(("length", "n_kv_head"), [(1, None), (3, 2), (8, None), (9, 2)])
def test_kept_keys_and_values_change_no_token(length, n_kv_head):
    config = GPTConfig(
        n_layer=2, n_head=4, n_kv_head=n_kv_head, n_embd=32, vocab_size=40, block_size=8
    )
    model = GPT(config, seed=2)
    with torch.no_grad():
        model.embed.weight.mul_(40)
    prompt = [(7 * place) % 40 for place in range(length)]
    ids = generate(model, prompt, 14, temperature=0)  # past the length of the context
    for end in range(length, len(ids)):
        assert int(model(torch.tensor([ids[max(0, end - 8) : end]]))[0, -1].argmax()) == ids[end]


def test_with_kept_keys_and_values_each_token_is_one_position(model):
    seen = []
    model.blocks[0].register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    generate(model, [1, 2, 3], 8)
    assert seen == [3, 1, 1, 1, 1, 1, 8, 8]


def test_only_the_last_block_of_the_context_counts(model):
    tail = list(range(10, 18))
    assert generate(model, [5, 6, *tail], 6)[2:] == generate(model, tail, 6)


def test_neither_global_random_state_nor_mode_is_touched(model):
    before = torch.random.get_rng_state()
    for training in (True, False):
        model.train(training)
        generate(model, [1], 3)
        assert model.training is training
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(ConfigError):
        generate(model, [], 3)
    model.train()
    model.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, [1], 3)
    assert model.training


def test_dropout_is_off_while_sampling():
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=40, block_size=8, dropout=0.9)
    dropping, plain = GPT(config, seed=2), GPT(CONFIG, seed=2)
    assert generate(dropping, [1], 8, temperature=0) == generate(plain, [1], 8, temperature=0)


def test_zero_temperature_takes_the_most_likely(model):
    model.eval()
    text = generate(model, [4], 5, temperature=0)
    for i in range(1, 6):
        assert text[i] == int(model(torch.tensor([text[:i]]))[0, -1].argmax())
    assert text == generate(model, [4], 5, top_k=1, temperature=2.0, seed=99)
    assert generate(model, [4], 5, top_k=None) == generate(model, [4], 5, top_k=1000)


def test_top_k_draws_among_the_k_most_likely_with_their_probabilities(model):
    model.eval()
    logits = model(torch.tensor([[4]]))[0, -1].detach()
    best = logits.topk(3)
    counts = torch.zeros(40)
    for seed in range(200):
        counts[generate(model, [4], 1, top_k=3, temperature=5.0, seed=seed)[-1]] += 1
    assert set(counts.nonzero().flatten().tolist()) == set(best.indices.tolist())
    expected = (best.values / 5.0).softmax(-1)
    assert torch.allclose(counts[best.indices] / 200, expected, atol=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt_ids": []}, r"token ids of 0..39, at least one"),
        ({"prompt_ids": [3, 40]}, r"token ids of 0..39, at least one"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"top_k": 0}, "top_k at least 1"),
    ],
)
def test_bad_requests_are_refused(model, arguments, words):
    with pytest.raises(ConfigError, match=words):
        generate(model, **{"prompt_ids": [1], "max_new_tokens": 1, **arguments})
