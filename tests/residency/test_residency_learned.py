import random
import threading

import pytest

from t2n_hf.residency.learned import LearnedOrder
from t2n_hf.residency.policy import LeastRecent


def anything(key):
    return True


def hits_of(policy, accesses, budget):
    """Run accesses of unit size through a policy that holds at most `budget` keys, with room made before a load."""
    resident, hits = set(), []
    for key in accesses:
        policy.touch(key)
        hits.append(key in resident)
        if key in resident:
            continue
        while len(resident) >= budget:
            victim = policy.victim(anything, len(resident) + 1 - budget)
            resident.remove(victim)
            policy.forget(victim)
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


def furthest(policy, keys):
    """Ask for a victim among `keys`, which are loaded for the purpose."""
    for key in keys:
        policy.arrive(key, 1)
    found = policy.victim(anything, 1)
    for key in keys:
        policy.forget(key)
    return found


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def touches(policy, keys):
    for key in keys:
        policy.touch(key)


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


def test_a_first_pass_in_another_order_is_unlearned():
    scan = list(range(30))
    strange = scan[::-1]
    chance = random.Random(5)
    for first in (strange, chance.sample(scan, 30)):
        hits = hits_of(LearnedOrder(), first + scan * 20, 10)
        passes = [sum(hits[start : start + 30]) for start in range(0, len(hits), 30)]
        assert min(passes[3:]) >= 9, passes


def test_two_threads_at_different_places_are_both_looked_after():
    policy = LearnedOrder()
    touches(policy, range(10))
    in_thread(lambda: touches(policy, range(5)))
    # This thread is at 9 and wants 0 next, the other one is at 4 and wants 5 next.
    assert furthest(policy, [0, 3, 5, 9]) == 9
    assert furthest(policy, [0, 3, 5]) == 3
    assert policy.distance(0) == policy.distance(5) == 0


def test_a_thread_that_went_away_stops_counting():
    policy = LearnedOrder()
    in_thread(lambda: touches(policy, range(4)))
    for _ in range(40):
        touches(policy, range(4, 8))
    policy.touch(4)
    assert furthest(policy, [0, 4]) == 4
    assert furthest(policy, [3, 5]) == 3


def test_an_expected_key_is_evicted_last():
    policy = LearnedOrder()
    touches(policy, "abc")
    policy.expect("d")
    policy.expect("e")
    # The order is a b c d e, and c is in use.
    assert furthest(policy, "dea") == "a"
    policy.touch("d")
    assert furthest(policy, "dea") == "d"


def test_what_is_in_use_is_passed_over_and_so_is_what_is_needed_too_soon():
    policy = LearnedOrder()
    touches(policy, "abcdea")
    for key in "abcde":
        policy.arrive(key, 1)
    assert policy.victim(lambda key: key not in "ae", 1) == "d"
    assert policy.victim(lambda key: key not in "ae", 1, beyond=1) == "d"  # b and c come before it
    assert policy.victim(lambda key: key not in "ae", 1, beyond=2) is None


def test_nothing_is_known_of_what_comes_next_before_a_pass_was_seen():
    policy = LearnedOrder()
    touches(policy, "abc")
    assert list(policy.upcoming()) == []
    policy.touch("a")
    assert list(policy.upcoming()) == ["b", "c"]
    policy.touch("b")
    assert list(policy.upcoming()) == ["c", "a"]
    assert list(policy.following("a")) == ["b", "c"]
    for key in "abc":
        policy.arrive(key, 1)
    policy.touch("c")
    assert list(policy.upcoming()) == []  # everything is there


def test_a_key_that_is_gone_leaves_the_order():
    policy = LearnedOrder()
    touches(policy, "abcda")
    for key in "abcd":
        policy.arrive(key, 1)
    policy.forget("b")
    policy.remove("b")
    policy.remove("never seen")
    assert list(policy.following("a")) == ["c", "d"]
    assert policy.victim(lambda key: key != "a", 1) == "d"
    policy.forget("a")
    policy.remove("a")  # where this thread is
    policy.forget("d")
    touches(policy, "cdc")
    assert list(policy.upcoming()) == ["d"]


def test_choosing_a_victim_does_not_grow_with_the_number_of_weights():
    def looked_at_most(count):
        policy, resident, most = LearnedOrder(), set(), 0
        for key in [*range(count)] * 3:
            policy.touch(key)
            if key in resident:
                continue
            if len(resident) >= count // 2:
                looked = []
                victim = policy.victim(lambda key, looked=looked: looked.append(key) or True, 1)
                most = max(most, len(looked))
                resident.remove(victim)
                policy.forget(victim)
            policy.arrive(key, 1)
            resident.add(key)
        return most

    assert looked_at_most(3000) == looked_at_most(30) == 1


def test_what_was_left_out_for_many_passes_goes_first_and_does_not_come_next():
    order = LearnedOrder()
    for key in ["e0", "e1", "e2", *["d0", "d1", "d2"] * 3]:
        order.touch(key)
    assert list(order.following("d2"))[:3] == ["e0", "e1", "e2"]
    for key in ("e1", "d0", "d1"):
        order.arrive(key, 1)
    order.touch("d0")
    assert order.victim(anything, 1) == "d0"
    assert order.is_cyclic(anything)
    for _ in range(10):
        for key in ("d1", "d2", "d0"):
            order.touch(key)
    assert list(order.following("d0")) == ["d1", "d2"]
    assert order.victim(anything, 1) == "e1"
    assert not order.is_cyclic(anything)
    assert order.is_cyclic(lambda key: key != "e1")
    order.touch("e0")  # another input: what was left out behind it comes next again
    assert list(order.following("e0")) == ["e1", "e2", "d0", "d1", "d2"]
    assert order.victim(anything, 1) != "e1"
    assert order.is_cyclic(anything)


def test_what_one_of_several_threads_leaves_out_is_kept_for_the_others():
    order = LearnedOrder()
    for key in ("a", "b", "c", "d"):
        order.touch(key)
        order.arrive(key, 1)
    in_thread(lambda: [order.touch(key) for key in ("c", "d") * 12])
    assert list(order.following("d")) == ["a", "b", "c"]
