"""Examples that end the help of every command; a test parses each."""

from __future__ import annotations

EXAMPLES = {
    "": ("gradsync train tiny --nproc-per-node 2     # a small GPT on two ranks of this machine",),
    "train": (
        "gradsync train tiny --nproc-per-node 2 --out runs/first",
        "torchrun --nproc-per-node 2 -m gradsync train tiny",
    ),
    "prepare": ("gradsync prepare my_texts/ lines.jsonl --out data/ --tokenizer bpe",),
    "sample": ("gradsync sample runs/first --prompt 'def ' --tokens 100",),
    "export": (
        "gradsync export runs/first --out first-hf",
        "gradsync export runs/first --to safetensors",
        "gradsync export ckpt.pt --from nanogpt --out runs/from-nanogpt",
    ),
    "report": (
        "gradsync report runs/first",
        "gradsync report runs/first runs/second --out compared.html",
    ),
    "watch": ("gradsync watch runs/first",),
    "verify": (
        "gradsync verify --strategies invariant,bucketed --world-size 2",
        "mpirun -np 4 gradsync verify --strategies all",
    ),
    "bench": ("gradsync bench sync", "gradsync bench scaling"),
    "bench sync": ("gradsync bench sync --model-size mini --strategies invariant,torch_ddp",),
    "bench collectives": ("gradsync bench collectives --operations all_reduce --max-bytes 64M",),
    "bench scaling": ("gradsync bench scaling --world-sizes 1,2 --mode weak",),
    "drill": ("gradsync drill --fault stop --rank 0 --step 5 -- tiny --sync bucketed",),
    "tune": ("gradsync tune mini --world-size 2",),
    "plan": ("gradsync plan", "gradsync plan xl --hardware h100x4"),
    "lint": ("gradsync lint train.py", "gradsync lint --rules"),
    "launch": (
        "gradsync launch --nproc-per-node 4 -- my_script.py --lr 0.1",
        "gradsync launch --nnodes 2 --nproc-per-node 8 -- train mini",
    ),
    "submit": ("gradsync submit --nodes 2 --gpus-per-node 4 --time 72:00:00 -- train mini",),
    "doctor": ("gradsync doctor", "mpirun -np 2 gradsync doctor"),
}
"""By command, as typed."""


def examples(command: str) -> str:
    """The end of the help of `command`."""
    shown = EXAMPLES[command]
    return "\n".join([f"example{'s' * (len(shown) > 1)}:", *(f"  {line}" for line in shown)])
