"""The fair queue: who may go before whom, because another does not fit or its own prompt is warm."""

from fair_line import demand, put, queue, serve, serve_all

from chatsvc.scheduler.output_length import OutputEstimator

# Room -----------------------------------------------------------------------------------------------------------------


def test_only_what_fits_is_taken():
    line = queue()
    put(line, demand("a"), demand("b"), demand("c"))
    assert len(line.take(2, 10_000)) == 2
    assert line.take(1, 599) == []
    assert len(line.take(1, 600)) == 1


def test_lighter_runs_pass_one_that_does_not_fit_but_not_for_ever():
    line = queue(most_passes=4, quantum=0)
    assert len(put(line, demand("filler", most=400))) == len(line.take(1, 40_000))
    (book,) = put(line, demand("book", prompt=30_000))
    put(line, *(demand(f"u{n}") for n in range(20)))
    passed = [one.user_id for _ in range(10) for one in line.take(1, 1000)]
    assert len(passed) == 4
    assert line.take(1, 30_500) == [book]
    assert len(line.take(9, 1000)) == 1


def test_many_that_do_not_fit_leave_nothing_idle():
    line = queue(quantum=0)
    put(line, demand("filler", most=400))
    line.take(1, 40_000)
    put(line, *(demand(f"book{n}", prompt=30_000) for n in range(20)), *(demand(f"u{n}") for n in range(20)))
    assert [one.user_id for one in line.take(9, 6000)] == [f"u{n}" for n in range(9)]


def test_what_passes_a_large_run_costs_no_more_than_it():
    line = queue(quantum=0)
    put(line, demand("filler"))
    line.take(1, 2000)
    put(line, demand("large", prompt=900, most=900))
    put(line, *(demand(f"u{n}") for n in range(20)))
    expected = 100 + 3 * OutputEstimator.FIRST_GUESS
    passed = [one for _ in range(10) for one in line.take(1, 1000)]
    assert len(passed) == (900 + 3 * OutputEstimator.FIRST_GUESS) // expected


def test_a_run_that_is_not_large_is_not_passed():
    line = queue()
    put(line, demand("filler"))
    line.take(1, 10_000)
    # An eighth of the room is 1,250.
    put(line, demand("next", most=1100), *(demand(f"u{n}") for n in range(20)))
    assert line.take(9, 700) == []
    assert line.take(1, 1200)[0].user_id == "next"


def test_of_two_that_do_not_fit_neither_is_passed_by_who_is_ahead_of_either_by_more_than_it_costs():
    line = queue(quantum=0)
    put(line, demand("filler"), demand("ahead", prompt=10))
    _, one = line.take(2, 10_000)
    put(line, demand("ahead"), demand("book", prompt=9000), demand("leaflet", prompt=2000))
    serve(line, one, tokens=3000)
    # 9,010 of service ahead of both: less than the book's, more than the leaflet's.
    assert line.take(1, 1000) == []
    line.discard(next(run_id for run_id, flow in line._line_of.items() if flow.user_id == "leaflet"))
    assert line.take(1, 1000)[0].user_id == "ahead"


def test_half_of_a_prompt_counts_before_it_is_read_but_no_more_than_half_a_quantum():
    line = queue(quantum=400)
    put(line, demand("long", prompt=350), demand("short", prompt=10))
    assert [one.user_id for one in line.take(2)] == ["short", "long"]
    put(line, demand("a", prompt=5000), demand("b", prompt=400))
    assert [one.user_id for one in line.take(2)] == ["a", "b"]


def test_a_run_larger_than_the_shrunken_engine_is_in_nobodys_way_and_starts_when_it_has_grown_again():
    line = queue()
    large = [demand(f"large{n}", prompt=9000) for n in range(8)]
    put(line, *large, *(demand(f"u{n}") for n in range(20)))
    for _ in range(20):
        (one,) = line.take(1, 5000)
        assert one.user_id.startswith("u")
        serve(line, one)
    assert line.take(1, 5000) == []
    assert len(line) == 8
    assert line.take(1, 10_000)[0] in large


# Warmth ---------------------------------------------------------------------------------------------------------------


def test_of_users_who_are_about_equal_the_warmest_goes_first():
    line = queue()
    put(line, demand("cold"), demand("warm", cached=90), demand("lukewarm", cached=50))
    assert [one.user_id for one in line.take(3)] == ["warm", "lukewarm", "cold"]


def test_a_run_is_bypassed_at_most_four_times():
    line = queue(quantum=1e9)
    put(line, demand("cold", prompt=19))
    users = []
    for n in range(10):
        put(line, *(demand(f"warm{n}{m}", cached=90) for m in range(3)))
        users += serve_all(line, 1)
    assert users.index("cold") == 4


def test_warmth_buys_nothing_beyond_a_quantum():
    line = queue(quantum=300)
    put(line, *(demand("warm", cached=90) for _ in range(20)), *(demand("cold") for _ in range(20)))
    users = serve_all(line, 20, tokens=100)
    # A cold reply costs 400, a warm one 319.
    assert 8 <= users.count("cold") <= 10
