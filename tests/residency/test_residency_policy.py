import pytest

from t2n_hf.residency.learned import LearnedOrder
from t2n_hf.residency.policy import FirstFit, LeastRecent

POLICIES = {"lru": LeastRecent, "fixed": lambda: FirstFit(None), "learned": LearnedOrder}


def anything(key):
    return True


def test_the_least_recent_goes_first_unless_it_is_in_use():
    policy = LeastRecent()
    for key in "abc":
        policy.touch(key)
        policy.arrive(key, 1)
    policy.touch("a")
    assert policy.victim(anything, 1) == "b"
    assert policy.victim(lambda key: key != "b", 1) == "c"
    policy.forget("b")
    assert policy.victim(anything, 1) == "c"
    assert policy.victim(lambda key: False, 1) is None


def test_first_fit_keeps_what_came_first_and_streams_the_rest():
    policy = FirstFit(3)
    for key in "abcd":
        policy.arrive(key, 1)
    assert policy.keeps("c")
    assert not policy.keeps("d")
    assert policy.victim(anything, 0) == "d"
    policy.forget("d")
    policy.forget("a")
    policy.arrive("d", 1)  # the place of a is that of the pool's lifetime
    assert policy.victim(anything, 5) == "d"
    policy.forget("d")
    assert policy.victim(anything, 5) is None


def test_first_fit_gives_the_place_of_a_value_that_is_gone_to_the_next():
    policy = FirstFit(2)
    for key in "ab":
        policy.arrive(key, 1)
    policy.forget("a")
    policy.remove("a")
    policy.arrive("c", 1)
    assert policy.keeps("c")
    assert policy.victim(anything, 1) is None


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_goes_while_nothing_is_too_much(name):
    policy = POLICIES[name]()
    policy.touch("a")
    policy.arrive("a", 1)
    assert policy.victim(anything, 0) is None


@pytest.mark.parametrize("name", ["lru", "fixed"])
def test_what_does_not_know_the_order_evicts_nothing_for_what_is_read_ahead(name):
    policy = POLICIES[name]()
    for key in "ab":
        policy.touch(key)
        policy.arrive(key, 1)
    assert list(policy.upcoming()) == []
    assert policy.victim(anything, 5, beyond=0) is None
    assert list(policy.following("a")) == []
