"""Models of transformers train through `gs.replicate` as they are: one hash on 1, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gradsync.checkpoint.weights import weights_sha256
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.sync.replicate import replicate
from support.thread_ranks import run_thread_ranks

LEAVES, STEPS = 4, 3


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes, **heads, pad_token_id=None))


def gpt2() -> nn.Module:
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, **off))


@pytest.mark.parametrize("make", [llama, gpt2])
def test_one_hash_on_any_number_of_ranks(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    start = make().state_dict()

    def work(rank: int, group: dist.ProcessGroup) -> tuple[str, float]:
        model = make()
        model.load_state_dict(start)
        sync = replicate(model, comm=ProcessGroupCommunicator(group))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loss = 0.0
        mine = range(rank * LEAVES // group.size(), (rank + 1) * LEAVES // group.size())
        for step in range(STEPS):
            for leaf in mine:
                seed = torch.Generator().manual_seed(100 * step + leaf)
                ids = torch.randint(61, (2, 12), generator=seed)
                targets = ids.numel() - len(ids)  # each row predicts all but its first
                with sync.micro_step(last=leaf == mine[-1], index=leaf):
                    mean = model(input_ids=ids, labels=ids).loss
                    sync.backward(mean * targets, weight=targets, reduction="sum")
            loss = float(sync.step(optimizer, clip_norm=1.0).mean_loss)
        sync.close()
        return weights_sha256(model), loss

    untrained = make()
    untrained.load_state_dict(start)
    found = {(size, each) for size in (1, 2, 4) for each in run_thread_ranks(work, size)}
    assert len({each for _, each in found}) == 1, found
    assert weights_sha256(untrained) not in {sha256 for _, (sha256, _) in found}
