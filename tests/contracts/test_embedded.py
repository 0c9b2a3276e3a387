"""Servers of our own: found again after a kill, stopped at the end, never two on one data set."""

import asyncio
import contextlib
import errno
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import redis.asyncio as aioredis

from chatsvc.embedded import embedded_postgres, embedded_redis, lock_data_dir
from chatsvc.embedded import process as processes
from chatsvc.embedded import valkey as valkeys
from chatsvc.embedded.datadir import held
from chatsvc.embedded.process import answers
from chatsvc.errors import ConfigError

# Starts both servers in ``sys.argv[1]``, prints a line, and waits for a signal. Then it says whether the servers are
# still there, which they would not be had they been given the terminal's Ctrl-C.
HOST = """
import asyncio, signal, sys
from pathlib import Path
from chatsvc.embedded import embedded_postgres, embedded_redis, lock_data_dir
import psycopg, redis

async def main():
    got = asyncio.get_running_loop().create_future()
    for sign in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sign, lambda sign=sign: got.done() or got.set_result(sign))
    data_dir = Path(sys.argv[1])
    quiet = lambda line: None
    with lock_data_dir(data_dir):
        async with embedded_postgres(data_dir, quiet) as postgres, embedded_redis(data_dir, quiet) as valkey:
            print("ready", flush=True)
            await got
            await asyncio.sleep(0.2)  # servers that had been given the signal too would be going down by then
            with psycopg.connect(postgres) as one, redis.Redis.from_url(valkey) as two:
                print("alive", one.execute("SELECT 1").fetchone(), two.ping(), flush=True)
    print("stopped", flush=True)

asyncio.run(main())
"""


@pytest.fixture
def said():
    """Lines of progress; what is said of rights depends on who runs the tests."""

    class Lines(list):
        def append(self, line):
            if "(chmod o+x)" not in line:
                super().append(line)

    return Lines()


@contextlib.contextmanager
def host(data_dir):
    """A process of its own that runs both servers, in its own process group as under a terminal."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOST, str(data_dir)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


connect = psycopg.AsyncConnection.connect


async def postgres_answers(url):
    async with await connect(url) as connection:
        rows = await connection.execute("SELECT 1")
        assert await rows.fetchone() == (1,)


async def redis_info(url):
    async with aioredis.Redis.from_url(url) as client:
        return await client.info()


def nothing_runs(data_dir):
    return not held(data_dir / "postgres.lock") and not held(data_dir / "valkey.lock")


async def test_both_servers_answer_keep_their_data_and_leave_nothing_running(data_dir, said):
    async with embedded_postgres(data_dir, said.append) as url, await connect(url) as connection:
        await connection.execute("CREATE TABLE kept (word text)")
        await connection.commit()
    async with embedded_redis(data_dir, said.append) as url, aioredis.Redis.from_url(url) as client:
        await client.set("kept", "word")
        assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
        assert (await client.config_get("appendonly"))["appendonly"] == "yes"
    assert nothing_runs(data_dir)
    assert said == ["Preparing the embedded Postgres (first start only)", "Starting Postgres", "Starting Valkey"]

    async with embedded_postgres(data_dir, said.append) as url, await connect(url) as connection:
        await connection.execute("SELECT word FROM kept")
        encodings = await connection.execute("SHOW server_encoding")
        assert await encodings.fetchone() == ("UTF8",)
    async with embedded_redis(data_dir, said.append) as url, aioredis.Redis.from_url(url) as client:
        assert await client.get("kept") == b"word"
    assert nothing_runs(data_dir)


async def test_servers_left_by_a_killed_process_are_used_again(data_dir, said):
    with host(data_dir) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert held(data_dir / "postgres.lock")
    assert held(data_dir / "valkey.lock")
    async with embedded_postgres(data_dir, said.append) as postgres, embedded_redis(data_dir, said.append) as valkey:
        await postgres_answers(postgres)
        await redis_info(valkey)
    assert said == ["Using the Postgres that is still running", "Using the Valkey that is still running"]
    assert nothing_runs(data_dir)


@pytest.mark.slow
async def test_servers_that_were_killed_too_are_started_again(data_dir, said):
    with host(data_dir) as process:
        process.kill()
        process.wait()
    for name in ("postgres/postmaster.pid", "valkey/valkey.pid"):
        os.kill(int((data_dir / name).read_text().split()[0]), signal.SIGKILL)
    while any(answers(data_dir / name, b"", b"") for name in ("postgres/.s.PGSQL.5432", "valkey/valkey.sock")):
        await asyncio.sleep(0)
    async with embedded_postgres(data_dir, said.append) as postgres, embedded_redis(data_dir, said.append) as valkey:
        await postgres_answers(postgres)
        await redis_info(valkey)
    assert said == ["Starting Postgres", "Starting Valkey"]


@pytest.mark.slow
async def test_a_process_id_that_now_belongs_to_another_process_misleads_nobody(data_dir, said):
    """After a restart of a container the old ids are in use again at once."""
    async with embedded_postgres(data_dir, said.append) as url:
        lines = (data_dir / "postgres" / "postmaster.pid").read_text().splitlines()
    lines[0] = str(os.getppid())
    (data_dir / "postgres" / "postmaster.pid").write_text("\n".join(lines) + "\n")
    # Written by a server that was killed, beside its socket: the same trap once more.
    (data_dir / "postgres" / ".s.PGSQL.5432.lock").write_text("\n".join(lines[:5]) + "\n")
    (data_dir / "valkey").mkdir()
    (data_dir / "valkey" / "valkey.pid").write_text(f"{os.getppid()}\n")
    async with embedded_postgres(data_dir, said.append) as url, embedded_redis(data_dir, said.append) as valkey:
        await postgres_answers(url)
        await redis_info(valkey)
    os.kill(os.getppid(), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    # Where tests run in the background, SIGQUIT is ignored by whoever does not ask for it: Valkey is told otherwise.
    "signs",
    [(signal.SIGKILL, signal.SIGKILL), (signal.SIGQUIT, signal.SIGTERM)],
    ids=["killed", "ended by itself"],
)
async def test_servers_that_die_while_we_run_are_started_again_with_their_data(data_dir, said, signs):
    async with embedded_postgres(data_dir, said.append) as postgres, embedded_redis(data_dir, said.append) as valkey:
        async with await connect(postgres, autocommit=True) as connection:
            await connection.execute("CREATE TABLE kept (word text)")
        async with aioredis.Redis.from_url(valkey) as client:
            await client.set("kept", "word")
            await client.execute_command("WAITAOF", 1, 0, 5000)
        for name, sign in zip(("postgres/postmaster.pid", "valkey/valkey.pid"), signs, strict=True):
            os.kill(int((data_dir / name).read_text().split()[0]), sign)
        async with asyncio.timeout(60):
            while not {"Postgres is back", "Valkey is back"} <= set(said):
                await asyncio.sleep(0.05)
        async with await connect(postgres) as connection:
            await connection.execute("SELECT word FROM kept")
        async with aioredis.Redis.from_url(valkey) as client:
            assert await client.get("kept") == b"word"
    assert said.count("Postgres has died, and is started again") == 1
    assert nothing_runs(data_dir)


@pytest.fixture
def quick_looks(monkeypatch):
    """The keeper looks all the time, and waits little after a failure."""
    monkeypatch.setattr(processes, "_WATCH_S", 0.02)
    monkeypatch.setattr(processes, "_LONGEST_BACK_OFF_S", 0.05)


class Failing:
    """Raises what it is told to as often as it is told to, then does what it stands for."""

    def __init__(self, real, *, times):
        self.real = real
        self.times = times
        self.spent = asyncio.Event()

    def __call__(self, *args):
        if self.times > 0:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        self.spent.set()
        return self.real(*args)


async def heard(said, line):
    async with asyncio.timeout(60):
        while line not in said:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("fails", ["held", "_spawn_if_free", "answers"])
async def test_a_server_is_looked_after_also_when_no_file_can_be_opened_for_a_while(
    data_dir, said, quick_looks, monkeypatch, fails
):
    """While it is looked at, while it is started again, and while it is asked whether it is up."""
    module = valkeys if fails == "answers" else processes
    failing = Failing(getattr(module, fails), times=3)
    # The lock is looked at only for a server that was there already.
    left_over = processes._spawn_if_free(valkeys._prepare(data_dir), said.append) if fails == "held" else None
    async with embedded_redis(data_dir, said.append) as url:
        monkeypatch.setattr(module, fails, failing)
        if left_over is not None:
            await asyncio.wait_for(failing.spent.wait(), 60)
        await kill_and_see_it_back(data_dir, said)
        assert failing.spent.is_set()
        await redis_info(url)
    assert said.count("Valkey has died, and is started again") == 1
    assert nothing_runs(data_dir)
    if left_over is not None:
        left_over.wait()


async def kill_and_see_it_back(data_dir, said):
    os.kill(int((data_dir / "valkey/valkey.pid").read_text()), signal.SIGKILL)
    await heard(said, "Valkey is back")


async def test_who_owns_a_server_is_stopped_when_nobody_looks_after_it_any_more(data_dir, quick_looks):
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)

    def says(line):
        if "has died" in line:
            raise asyncio.CancelledError  # what the keeper cannot catch

    try:
        async with embedded_redis(data_dir, says):
            os.kill(int((data_dir / "valkey/valkey.pid").read_text()), signal.SIGKILL)
            await asyncio.wait_for(stopped.wait(), 60)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    assert nothing_runs(data_dir)


async def test_a_second_start_on_the_same_data_finds_the_first_server(data_dir, said):
    async with embedded_redis(data_dir, said.append) as first:
        one = await redis_info(first)
        async with embedded_redis(data_dir, said.append) as second:
            assert (await redis_info(second))["run_id"] == one["run_id"]
    assert not held(data_dir / "valkey.lock")


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_terminal_stops_the_servers_after_us_not_with_us(data_dir, sign):
    with host(data_dir) as process:
        os.killpg(process.pid, sign)
        assert process.stdout.readline() == "alive (1,) True\n"
        assert process.stdout.readline() == "stopped\n"
        assert process.wait(60) == 0
    assert nothing_runs(data_dir)


async def test_a_server_that_somebody_else_runs_on_our_data_is_left_alone(data_dir, said):
    async with embedded_redis(data_dir, said.append) as url:
        (data_dir / "valkey.lock").unlink()
        with pytest.raises(ConfigError, match="that is not ours runs on"):
            async with embedded_redis(data_dir, said.append):
                pass
        await redis_info(url)


async def test_a_start_that_is_cancelled_leaves_nothing_running(data_dir, said):
    starting = asyncio.Event()

    async def run():
        async with embedded_redis(data_dir, lambda _: starting.set()):
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await starting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not held(data_dir / "valkey.lock")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x" * 120, "with space", "a,b", "100%20", 'it\'s "so"', "ünïcode-文"])
async def test_any_name_of_a_data_directory_will_do(data_dir, said, name):
    place = data_dir / name
    with lock_data_dir(place):
        async with (
            embedded_postgres(place, said.append) as postgres,
            embedded_redis(place, said.append) as valkey,
        ):
            await postgres_answers(postgres)
            await redis_info(valkey)
            sockets = [Path(path) for path in psycopg.conninfo.conninfo_to_dict(postgres)["host"].split(",")]
            sockets.append(Path(aioredis.Redis.from_url(valkey).connection_pool.connection_kwargs["path"]).parent)
            assert [path.stat().st_mode & 0o077 for path in sockets] == [0, 0]


@pytest.mark.slow
async def test_a_server_that_does_not_come_up_says_why(data_dir, said):
    with pytest.raises(ConfigError, match=r"The embedded Postgres in .* ended with status 1.*shared_buffers"):
        async with embedded_postgres(data_dir, said.append, settings={"shared_buffers": "plenty"}):
            pass
    assert not held(data_dir / "postgres.lock")


@pytest.mark.slow
async def test_a_first_start_that_was_cut_short_is_begun_again(data_dir, said):
    (data_dir / "postgres.new" / "base").mkdir(parents=True)
    (data_dir / "postgres.new" / "PG_VERSION").write_text("18\n")
    (data_dir / "postgres").mkdir()
    async with embedded_postgres(data_dir, said.append) as url:
        await postgres_answers(url)


async def test_data_of_another_version_is_refused_with_what_to_do(data_dir, said):
    (data_dir / "postgres").mkdir()
    (data_dir / "postgres" / "PG_VERSION").write_text("15\n")
    with pytest.raises(ConfigError, match="made by Postgres 15, and this is Postgres 18"):
        async with embedded_postgres(data_dir, said.append):
            pass


async def test_a_missing_server_is_refused_with_every_way_out(data_dir, said, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(data_dir))
    with pytest.raises(ConfigError, match=r"chatsvc\[embedded\].*CHATSVC_DATABASE_URL"):
        async with embedded_postgres(data_dir, said.append):
            pass
    with pytest.raises(ConfigError, match=r"chatsvc\[embedded\].*PATH.*CHATSVC_REDIS_URL"):
        async with embedded_redis(data_dir, said.append):
            pass


async def test_a_server_on_the_path_serves_where_the_wheel_is_missing(data_dir, said, monkeypatch):
    (data_dir / "bin").mkdir()
    (data_dir / "bin" / "redis-server").symlink_to(valkeys._binary())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(data_dir / "bin"))
    async with embedded_redis(data_dir, said.append) as url:
        await redis_info(url)
    assert said == ["Starting Redis"]


@pytest.mark.slow
def test_a_data_directory_in_use_is_refused_with_the_process_that_uses_it(data_dir):
    with host(data_dir) as process:
        words = rf"in use by another chatsvc, process {process.pid}\b.*CHATSVC_DATA_DIR"
        with pytest.raises(ConfigError, match=words), lock_data_dir(data_dir):
            pass
        process.kill()
        process.wait()
        with lock_data_dir(data_dir):
            assert (data_dir / "lock").read_text() == f"{os.getpid()}\n"
        for name in ("postgres/postmaster.pid", "valkey/valkey.pid"):
            os.kill(int((data_dir / name).read_text().split()[0]), signal.SIGTERM)
