"""Which combinations exist, and what is said of those that do not."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest

from gradsync.commands.train.config import SyncConfig
from gradsync.commands.train.config_io import parse_config
from gradsync.errors import ConfigError
from gradsync.sync.options import Grouping, Order, Recipe, ReductionName, Shard, Wire, every_option
from gradsync.sync.registry import STRATEGIES, check_options, find_strategy

REFUSALS = [
    ({"grouping": "bucket"}, "grouping must be one of parameter, flat, buckets; got 'bucket'"),
    ({"order": "tree"}, "order must be one of any, invariant; got 'tree'"),
    ({"reduction": "tree"}, "reduction must be one of backend, ring, hierarchical; got 'tree'"),
    ({"wire": "fp8"}, "wire must be one of same, bf16, fp16; got 'fp8'"),
    ({"shard": "all"}, "shard must be one of none, optimizer, gradients; got 'all'"),
    ({"bucket_mb": 0.0}, "bucket_mb must be positive; got 0.0"),
    ({"bucket_mb": float("nan")}, "bucket_mb must be positive; got nan"),
    ({"first_bucket_mb": -1.0}, "first_bucket_mb must be positive; got -1.0"),
    (
        {"order": "invariant", "reduction": "ring"},
        "adds along its own tree, which reduction='ring' cannot follow",
    ),
    ({"order": "invariant", "wire": "fp16"}, "rounds each node of its tree, to bf16"),
    (
        {"wire": "fp16", "reduction": "ring"},
        "wire='fp16' goes with reduction='backend'; got 'ring'",
    ),
    (
        {"shard": "gradients", "order": "invariant"},
        "shard='gradients' goes with order='any', reduction='backend' and wire='same'",
    ),
    ({"shard": "gradients", "reduction": "ring"}, "got order='any', reduction='ring', wire='same'"),
    ({"shard": "gradients", "wire": "bf16"}, "shard='optimizer' goes with all of them"),
]


@pytest.mark.parametrize(("values", "message"), REFUSALS, ids=[str(v) for v, _ in REFUSALS])
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe(**values)
    assert message in str(caught.value)


def _legal(order: str, reduction: str, wire: str, shard: str) -> bool:
    """The rules as the guide says them, written a second time."""
    if order == "invariant":
        return reduction in ("backend", "hierarchical") and wire != "fp16" and shard != "gradients"
    if wire != "same" and reduction != "backend":
        return False
    return shard != "gradients" or (reduction, wire) == ("backend", "same")


@pytest.mark.parametrize("grouping", get_args(Grouping))
def test_every_combination_is_built_or_refused(grouping: Any) -> None:
    combinations = product(*map(get_args, (Order, ReductionName, Wire, Shard)))
    for order, reduction, wire, shard in combinations:
        try:
            Recipe(grouping=grouping, order=order, reduction=reduction, wire=wire, shard=shard)
        except ConfigError:
            built = False
        else:
            built = True
        assert built == _legal(order, reduction, wire, shard), (order, reduction, wire, shard)


def test_options_are_checked_against_the_preset_before_anything_is_built() -> None:
    with pytest.raises(
        ConfigError, match=r"strategy='bucketed' has no option 'bucket_size' .it has: "
    ):
        check_options(find_strategy("bucketed"), {"bucket_size": 1})
    with pytest.raises(ConfigError, match="bucket_mb must be positive"):
        check_options(find_strategy("flat"), {"bucket_mb": 0})
    check_options(find_strategy("bucketed"), {"order": "invariant", "overlap": False})


def test_only_the_tree_promises_bits() -> None:
    """A sum in any other order, or rounded on its way, must not say that it keeps bits."""
    for name, strategy in STRATEGIES.items():
        recipe = strategy.recipe
        if recipe is not None:
            along_tree, rounds = recipe.order == "invariant", recipe.wire != "same"
            assert strategy.same_on_any_ranks == along_tree, name
            assert (strategy.promise == "bitwise") == (along_tree and not rounds), name
            assert (strategy.promise == "lossy") == rounds, name


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("invariant", "wire", "bf16"),
        ("zero1", "wire", "bf16"),
        ("invariant_bf16", "wire", "same"),
        ("invariant", "order", "any"),
        ("invariant_bf16", "order", "any"),
        ("zero1", "order", "any"),
    ],
)
def test_a_name_stands_for_its_bits(name: str, option: str, value: str) -> None:
    """A run is resumed at other numbers of ranks by the strategy's name."""
    message = f"strategy='{name}' names its bits.* {option}='{value}'"
    with pytest.raises(ConfigError, match=message):
        check_options(find_strategy(name), {option: value})


def _other(value: Any, hint: Any) -> Any:
    """A value of an option that is not its default."""
    words = [word for word in get_args(hint) if isinstance(word, str)]
    words += [word for part in get_args(hint) for word in get_args(part)]
    if words:
        return next(word for word in words if word != value)
    if value is None:  # a number's default that depends on something
        return 12.5
    return not value if isinstance(value, bool) else value / 2 if hint is float else value + 2


OPTIONS = [(name, option) for name, each in STRATEGIES.items() for option in each.options]


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=[f"{n}-{o}" for n, o in OPTIONS])
def test_every_option_reaches_the_strategy_from_the_command_line(name: str, option: str) -> None:
    hint, words = every_option()[option]
    assert words
    wanted = _other(getattr(STRATEGIES[name].defaults, option), hint)
    config = parse_config(["--sync", name, "--sync-options", f"{option}={wanted}"])
    assert config.sync_options == SyncConfig(**{option: wanted})
    refused = False
    try:
        checked = check_options(STRATEGIES[name], config.sync_options.given())
    except ConfigError as error:  # it does not go with the strategy's other values
        refused = str(wanted) in str(error)
    assert refused or getattr(checked, option) == wanted
