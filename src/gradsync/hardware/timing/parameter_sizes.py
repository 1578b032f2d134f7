"""The parameters of a GPT by arithmetic, in the order in which the module registers them; pure."""

from __future__ import annotations

from dataclasses import dataclass

from gradsync.models.config import GPTConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One trained tensor."""

    name: str
    """As `named_parameters` calls it."""
    shape: tuple[int, ...]
    backward_units: int
    """What backward computes between the gradient before this one and this one, in products per
    token, of which each takes 4 floating-point operations (2 for the gradient of the weight, 2 for
    that of the input): the parameter's elements, and behind the queries' side attention itself."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        size = 1
        for length in self.shape:
            size *= length
        return size


def parameters_of(config: GPTConfig, seq_len: int) -> list[Parameter]:
    """Every parameter of `GPT(config)`, in `named_parameters` order.

    Args:
        config: the shape.
        seq_len: tokens of a sequence; attention's cost grows with it.
    """
    width, hidden = config.n_embd, config.mlp_dim
    kv_width = config.num_kv_heads * config.head_dim
    head = config.vocab_size * width
    found = [_parameter("embed.weight", (config.vocab_size, width), units=0)]
    for number in range(config.n_layer):
        block = f"blocks.{number}."
        found += [
            _parameter(f"{block}attention_norm.weight", (width,)),
            _parameter(f"{block}attention.q.weight", (width, width)),
            _parameter(f"{block}attention.k.weight", (kv_width, width)),
            # Forward's two products of 2 T C operations each cost 8 T C in backward, before the
            # gradients of the three projections: the first of which to be ready is this one.
            _parameter(
                f"{block}attention.v.weight",
                (kv_width, width),
                units=kv_width * width + 2 * seq_len * width,
            ),
            _parameter(f"{block}attention.out.weight", (width, width)),
            _parameter(f"{block}mlp_norm.weight", (width,)),
            _parameter(f"{block}mlp.gate.weight", (hidden, width)),
            _parameter(f"{block}mlp.up.weight", (hidden, width)),
            _parameter(f"{block}mlp.down.weight", (width, hidden)),
        ]
    # The head's products come first in backward; a tied one adds its gradient to the embedding's,
    # which is complete last of all.
    units = width + (head if config.tie_head else 0)
    found.append(_parameter("norm.weight", (width,), units=units))
    if not config.tie_head:
        found.append(_parameter("head.weight", (config.vocab_size, width)))
    return found


def _parameter(name: str, shape: tuple[int, ...], units: int | None = None) -> Parameter:
    numel = shape[0] * (shape[1] if len(shape) > 1 else 1)
    return Parameter(name=name, shape=shape, backward_units=numel if units is None else units)
