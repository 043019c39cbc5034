import pytest
import trio
from support import profile

from caltrio.costs import Costs
from caltrio.manifest import load_manifest
from caltrio.timer import Rank
from sim.clock import VirtualDeadlock, run_virtual

COSTS = Costs(profile(), load_manifest(), 0)


def test_trio_sleeps_in_virtual_time():
    async def main(clock):
        begin = trio.current_time()
        await trio.sleep(3600)
        assert trio.current_time() - begin == pytest.approx(3600)
        return clock.now_ns()

    assert run_virtual(main, COSTS) == 3600 * 10**9


def test_trio_deadline_and_event_interleave_in_order():
    seen = []

    async def main(clock):
        async def ranked(at_ns):
            await clock.sleep_until_ns(at_ns, Rank.ARRIVAL, at_ns)
            seen.append(clock.now_ns())

        async def plain(seconds):
            await trio.sleep(seconds)
            seen.append(clock.now_ns())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ranked, 30)
            nursery.start_soon(plain, 20e-9)
            nursery.start_soon(ranked, 10)
            nursery.start_soon(plain, 40e-9)

    run_virtual(main, COSTS)
    assert seen == [10, 20, 30, 40]


@pytest.mark.parametrize("attempt", range(5))
def test_ties_go_by_rank_then_id_whatever_trio_shuffles(attempt):
    seen = []
    wanted = [(rank, tie) for rank in Rank for tie in range(4)]

    async def main(clock):
        async def sleeper(rank, tie):
            await clock.sleep_until_ns(100, rank, tie)
            seen.append((rank, tie))

        async with trio.open_nursery() as nursery:
            for rank, tie in reversed(wanted):
                nursery.start_soon(sleeper, rank, tie)

    run_virtual(main, COSTS)
    assert seen == wanted


def test_move_on_after_cancels_a_ranked_sleep():
    async def main(clock):
        with trio.move_on_after(1e-6) as scope:
            await clock.sleep_until_ns(10_000, Rank.DEADLINE, 0)
        assert scope.cancelled_caught
        assert clock.now_ns() == 1_000
        await clock.sleep_until_ns(20_000, Rank.DEADLINE, 0)
        return clock.now_ns()

    assert run_virtual(main, COSTS) == 20_000


def test_waiting_for_nothing_is_an_error_that_says_so():
    async def main(_clock):
        await trio.Event().wait()

    with pytest.raises(VirtualDeadlock, match="nothing is scheduled"):
        run_virtual(main, COSTS)


def test_an_error_of_main_comes_out_plain():
    async def main(_clock):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(main, COSTS)


def test_large_times_keep_their_nanoseconds():
    month = 30 * 86_400 * 10**9

    async def main(clock):
        await clock.sleep_until_ns(month + 7, Rank.ARRIVAL, 0)
        assert round(trio.current_time() * 1e9) == month + 7
        await trio.sleep(1e-6)
        return clock.now_ns() - month

    assert run_virtual(main, COSTS) == pytest.approx(1_007, abs=1)


def test_time_stands_while_a_task_can_run():
    async def main(clock):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clock.sleep_until_ns, 5, Rank.ARRIVAL, 0)
            for _ in range(50):
                await trio.lowlevel.checkpoint()
                assert clock.now_ns() == 0
        return clock.now_ns()

    assert run_virtual(main, COSTS) == 5


def test_a_defect_of_the_model_comes_out_and_ends_the_run():
    async def main(clock):
        def broken():
            yield clock.env.timeout(10)
            raise ZeroDivisionError("in the model")

        clock.env.process(broken())
        await trio.sleep(1)

    with pytest.raises(ZeroDivisionError, match="in the model"):
        run_virtual(main, COSTS)


def test_a_deadlock_lets_main_clean_up_in_virtual_time():
    cleaned = []

    async def main(clock):
        try:
            await trio.Event().wait()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(2)
            cleaned.append(clock.now_ns())

    with pytest.raises(VirtualDeadlock):
        run_virtual(main, COSTS)
    assert cleaned == [2 * 10**9]
