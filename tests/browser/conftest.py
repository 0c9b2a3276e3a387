"""Chromium, servers with the scripted engine, and tabs that tell of every error at the end of a test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest
import pytest_asyncio
from chat_page import LAN_NAME, WATCH_CLIPBOARD, ChatPage
from playwright.async_api import async_playwright, expect
from server import ServerProcess

import chatsvc

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A name that is not localhost makes an origin insecure, as an address on a LAN is.
    f"--host-resolver-rules=MAP {LAN_NAME} 127.0.0.1",
]
CANDIDATES = ("chromium", "chromium-browser", "google-chrome")
EXPECT_MS = 30_000
PAGE = Path(chatsvc.__file__).parent / "web" / "dist"


@pytest.fixture(scope="session")
def chromium():
    """Path of the browser: ``CHROMIUM``, else what is installed."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CANDIDATES)), None)
    if path is None:
        pytest.skip("no Chromium on this machine: install it or set CHROMIUM")
    if not (PAGE / "index.html").exists():
        pytest.fail(f"the page is not built: run `npm ci && npm run build` in {PAGE.parent}")
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(chromium):
    expect.set_options(timeout=EXPECT_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        await browser.close()


@pytest.fixture(scope="session")
def start_server(databases, redis_server, tmp_path_factory):
    """Start a server, with a database of its own or ``beside`` another. All are gone at the end of the session."""
    with contextlib.ExitStack() as stack:
        started = []

        def start(engine, *, beside=None, **env):
            database = beside.database_url if beside else stack.enter_context(databases.one())
            data_dir = tmp_path_factory.mktemp("server") / "data"
            process = ServerProcess(data_dir, env, engine=engine, database_url=database, redis_url=redis_server)
            started.append(stack.enter_context(process))
            return process

        yield start
        for process in started:
            process.signal(signal.SIGTERM)  # all end at the same time, not one after the other


@pytest.fixture(scope="session")
def server(start_server):
    """One server for most tests: a reply takes a third of a second."""
    return start_server("scripted:?tokens_per_s=300&tokens=100&slots=16")


@pytest.fixture(scope="session")
def slow_server(start_server):
    """A server whose replies take a minute, for what must happen before the end: stop what you have seen."""
    return start_server("scripted:?tokens_per_s=20&tokens=1200&slots=16", CHATSVC_SERVER_GRACE_S="1")


@pytest_asyncio.fixture(loop_scope="session")
async def visit(browser, server):
    """Open a tab in a browser of its own. At the end of the test no tab may have seen an error."""
    async with contextlib.AsyncExitStack() as stack:
        tabs = []

        async def new_tab(context, base_url):
            tab = ChatPage(await context.new_page(), base_url)
            tabs.append(tab)
            return await tab.open()

        async def open_tab(beside=None, base_url=server.base_url, **options):
            """``beside``: another tab of the same browser. ``options`` are those of a browser context."""
            if beside is not None:
                return await new_tab(beside.page.context, beside.base_url)
            context = await browser.new_context(**options)
            stack.push_async_callback(context.close)
            await context.add_init_script(WATCH_CLIPBOARD)
            return await new_tab(context, base_url)

        yield open_tab
        assert [problem for tab in tabs for problem in tab.problems] == []
