import random
import threading

import pytest

from t2n_hf.residency.policy import FirstFit, LearnedOrder, LeastRecent, ResidencyStrategy, policy_of


def hits_of(policy, accesses, budget):
    """Run accesses of unit size through a policy that holds at most `budget` keys, with room made before a load."""
    resident, hits = set(), []
    for key in accesses:
        policy.touch(key)
        hits.append(key in resident)
        if key in resident:
            continue
        while len(resident) >= budget:
            resident.discard(policy.victim(list(resident), len(resident) + 1 - budget))
        resident.add(key)
        policy.arrive(key, 1)
    return hits


def best_hits(accesses, budget):
    """Belady's optimum, by looking into the future."""
    resident, hits = set(), 0
    for now, key in enumerate(accesses):
        if key in resident:
            hits += 1
            continue
        if len(resident) >= budget:
            rest = accesses[now + 1 :]
            resident.discard(max(resident, key=lambda k: rest.index(k) if k in rest else len(accesses)))
        resident.add(key)
    return hits


def test_a_cyclic_scan_hits_nothing_under_lru_and_nine_of_thirty_with_the_learned_order():
    scan = list(range(30)) * 40
    assert sum(hits_of(LeastRecent(), scan, 10)) == 0
    hits = hits_of(LearnedOrder(), scan, 10)
    passes = [sum(hits[start : start + 30]) for start in range(0, len(hits), 30)]
    assert min(passes[1:]) >= 9
    assert sum(hits) == best_hits(scan, 10)


@pytest.mark.parametrize("budget", [2, 5, 12], ids=lambda b: f"budget{b}")
def test_a_weight_used_twice_in_a_pass_costs_at_most_a_few_hits_against_the_optimum(budget):
    scan = ["tied", *range(14), "tied"] * 20
    hits = sum(hits_of(LearnedOrder(), scan, budget))
    assert hits >= 0.9 * best_hits(scan, budget)


def test_experts_that_are_skipped_now_and_then_keep_their_place():
    chance = random.Random(3)
    scan = [key for _ in range(60) for key in range(24) if key % 3 == 0 or chance.random() < 0.5]
    learned = sum(hits_of(LearnedOrder(), scan, 8))
    assert learned >= 0.7 * best_hits(scan, 8)  # which knows the dice
    assert learned > 2 * sum(hits_of(LeastRecent(), scan, 8))


def test_two_threads_at_different_places_are_both_looked_after():
    policy = LearnedOrder()
    for key in range(10):
        policy.touch(key)

    def other():
        for key in range(5):
            policy.touch(key)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    # This thread is at 9 and wants 0 next, the other one is at 4 and wants 5 next.
    assert policy.victim([0, 4, 5, 9], 1) == 4
    assert policy.victim([0, 5, 9], 1) == 9


def test_a_thread_that_went_away_stops_counting():
    policy = LearnedOrder()

    def other():
        for key in range(4):
            policy.touch(key)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    for _ in range(40):
        for key in range(4, 8):
            policy.touch(key)
    policy.touch(4)
    assert policy.victim([0, 4], 1) == 4
    assert policy.victim([3, 5], 1) == 3


def test_an_expected_key_is_evicted_last():
    policy = LearnedOrder()
    for key in "abc":
        policy.touch(key)
    policy.expect("d")
    policy.expect("e")
    # The order is a b c d e, and c is in use.
    assert policy.victim(["d", "e", "a"], 1) == "a"
    policy.touch("d")
    assert policy.victim(["d", "e", "a"], 1) == "d"


def test_first_fit_keeps_what_came_first_and_streams_the_rest():
    policy = FirstFit(3)
    for key in "abcd":
        policy.arrive(key, 1)
    assert policy.keeps("c")
    assert not policy.keeps("d")
    assert policy.victim(list("abcd"), 0) == "d"
    policy.forget("a")
    policy.arrive("d", 1)
    assert policy.victim(list("bcd"), 5) == "d"
    assert policy.victim(list("bc"), 5) is None


@pytest.mark.parametrize("strategy", list(ResidencyStrategy))
def test_nothing_goes_while_nothing_is_too_much(strategy):
    policy = policy_of(strategy, None)
    policy.touch("a")
    policy.arrive("a", 1)
    assert policy.victim(["a"], 0) is None
