"""Text from a model: one token after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.errors import ConfigError
from gradsync.models.gpt import GPT, KeyValueCache


@torch.no_grad()
def generate(
    model: GPT,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> list[int]:
    """Continue `prompt_ids`. The same call on the same kind of device gives the same tokens.

    A token costs a forward over one position: keys and values of those before it are kept. Once
    there are more than `block_size` of them, it costs one over the last `block_size`: the window
    slides, and what deeper layers have kept stems from positions that it no longer shows.

    Args:
        model: any device; put into eval mode meanwhile, its mode is restored.
        prompt_ids: at least one token id.
        max_new_tokens: how many to add.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: sample among the k most likely only; None among all.
        seed: of the draws, when no generator is given.
        generator: a CPU generator that goes on where it stands.
        use_cache: False computes the whole context for each token: the same tokens, slowly.

    Returns:
        The prompt followed by the new tokens.

    Raises:
        ConfigError: an empty prompt, an id outside the vocabulary, temperature < 0, top_k < 1.
    """
    _check(model, prompt_ids, temperature, top_k)
    if generator is None:
        generator = torch.Generator().manual_seed(seed)
    device = model.embed.weight.device
    ids = [int(token) for token in prompt_ids]
    caches = [KeyValueCache() for _ in model.blocks]
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            if use_cache and len(ids) <= model.config.block_size:
                new_BT = torch.tensor([ids[caches[0].length :]], device=device)
                x_BTC = model.features(new_BT, caches)
            else:
                context_BT = torch.tensor([ids[-model.config.block_size :]], device=device)
                x_BTC = model.features(context_BT)
            last_V = model.logits(x_BTC[:, -1])[0]
            ids.append(_draw(last_V.float().cpu(), temperature, top_k, generator))
    finally:
        model.train(was_training)
    return ids


def _draw(
    logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    kept, index = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    chosen = torch.multinomial((kept / temperature).softmax(-1), 1, generator=generator)
    return int(index[chosen])


def _check(model: GPT, prompt_ids: Sequence[int], temperature: float, top_k: int | None) -> None:
    vocab_size = model.config.vocab_size
    if not len(prompt_ids):
        raise ConfigError("the prompt is empty: at least one token is needed to continue from")
    outside = [token for token in prompt_ids if not 0 <= token < vocab_size]
    if outside:
        raise ConfigError(
            f"the prompt has token id {outside[0]}, "
            f"outside the model's vocabulary 0..{vocab_size - 1}"
        )
    if temperature < 0:
        raise ConfigError(f"temperature: got {temperature}, expected 0 or more")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k: got {top_k}, expected at least 1, or None for all tokens")
