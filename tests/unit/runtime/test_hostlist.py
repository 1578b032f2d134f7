"""Slurm's compressed lists."""

import pytest
from gradsync.runtime.hostlist import MAX_HOSTS, check_host, expand_counts, expand_hosts
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import LaunchError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[1-3,07]", "n1 n2 n3 n07"),
        ("n[1-3,07],gpu-[01-02]-x", "n1 n2 n3 n07 gpu-01-x gpu-02-x"),
        ("n[08-10]", "n08 n09 n10"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("[1-2].example.org", "1.example.org 2.example.org"),
        ("a_b.c-d", "a_b.c-d"),
    ],
)
def test_hosts(text, hosts):
    assert expand_hosts(text) == tuple(hosts.split())


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=4
    )
)
def test_a_range_lists_every_number_at_the_width_of_its_first(ranges):
    text = ",".join(f"n[{low:0{width}d}-{low + more}]" for low, more, width in ranges)
    expected = [
        f"n{number:0{max(width, len(str(low)))}d}"
        for low, more, width in ranges
        for number in range(low, low + more + 1)
    ]
    assert list(expand_hosts(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "n1,",
        "n[1-2",
        "n1-2]",
        "n[]",
        "n[3-1]",
        "n[1-2-3]",
        "n[a]",
        "n[[1]]",
        "n 1",
        "n1;reboot",
        "-oProxyCommand",
        "n" * 256,
        "../n[1-2]",
    ],
)
def test_what_is_no_host_list_is_refused(text):
    with pytest.raises(LaunchError):
        expand_hosts(text)


@pytest.mark.parametrize(
    "text", ["n[0-65536]", "n[0-999999999999999999]", "a[0-999]b[0-999]", "a[0-65535],b"]
)
def test_a_list_beyond_the_bound_is_refused_before_it_is_built(text):
    with pytest.raises(LaunchError, match="65,536"):
        expand_hosts(text)


def test_a_list_at_the_bound_is_expanded():
    assert len(expand_hosts(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", (4,)), ("4(x2),3", (4, 4, 3)), ("1,2,1", (1, 2, 1)), ("3(x1)", (3,))],
)
def test_counts(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "4(x)", "4x2", "4(x70000)", "-1", "4,,3"])
def test_what_is_no_count_list_is_refused(text):
    with pytest.raises(LaunchError):
        expand_counts(text)


def test_a_host_name_is_checked():
    assert check_host("n-1.example_x") == "n-1.example_x"
    for bad in ("", "a b", "-n", "n\n", "é"):
        with pytest.raises(LaunchError):
            check_host(bad)
