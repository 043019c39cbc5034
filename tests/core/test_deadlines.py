from caltrio.core.deadlines import Deadlines


def test_due_in_order_and_only_if_still_due():
    seen, live = [], {1, 2, 3}
    deadlines = Deadlines()
    for name, at in ((3, 30), (1, 10), (2, 20)):
        deadlines.add(at, lambda name=name: name in live, lambda now, name=name: seen.append(name))
    live.discard(2)
    assert deadlines.next_ns() == 10
    for act in deadlines.pop_due(30):
        act(30)
    assert seen == [1, 3]
    assert deadlines.next_ns() is None


def test_what_is_no_longer_due_does_not_pile_up():
    deadlines = Deadlines()
    for at in range(10_000):
        deadlines.add(10**12 + at, lambda: False, lambda now: None)
    assert len(deadlines) <= 64
    assert deadlines.next_ns() is None
