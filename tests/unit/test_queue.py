"""First come, first served, per model, with exact removal."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from chatsvc.scheduler.queue import FifoQueue, Waiting

steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 20), st.sampled_from("ab")),
        st.tuples(st.just("discard"), st.integers(0, 20), st.just("")),
        st.tuples(st.just("take"), st.integers(0, 4), st.sampled_from("ab")),
    )
)


@given(steps)
def test_runs_are_taken_in_the_order_they_came_and_never_twice(steps):
    queue = FifoQueue()
    model: dict[str, list[str]] = defaultdict(list)
    for step, number, name in steps:
        run_id = f"run{number}"
        waiting = any(run_id in line for line in model.values())
        if step == "put":
            queue.put(Waiting(run_id, name))
            if not waiting:
                model[name].append(run_id)
        elif step == "discard":
            queue.discard(run_id)
            for line in model.values():
                if run_id in line:
                    line.remove(run_id)
        else:
            taken = [run.run_id for run in queue.take({name: number})]
            assert taken == model[name][:number]
            del model[name][:number]
        assert len(queue) == sum(map(len, model.values()))


def test_a_model_without_free_slots_does_not_hold_up_another():
    queue = FifoQueue()
    for run in (Waiting("1", "busy"), Waiting("2", "idle"), Waiting("3", "busy")):
        queue.put(run)
    assert [run.run_id for run in queue.take({"idle": 5})] == ["2"]
    assert [run.run_id for run in queue.take({"busy": 1, "idle": 1})] == ["1"]
