"""The command line: ``python -m chatsvc [serve|migrate|check]``.

Exit codes: 0 done, 1 something failed, 2 the configuration or the command line is not valid. A fault that a person can
mend is said in plain sentences on standard error; a traceback means a bug.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

from chatsvc import __version__
from chatsvc.config import Config
from chatsvc.config_load import load_config
from chatsvc.errors import ChatError, ConfigError
from chatsvc.logs import configure_logging

DONE: Final = 0
FAILED: Final = 1
BAD_CONFIG: Final = 2
INTERRUPTED: Final = 130

_DESCRIPTION: Final = """\
A self-hosted chat service whose replies outlive connections.

commands:
  serve     start the service (what happens when no command is given)
  migrate   bring the database's schema up to date, and end
  check     print the configuration in effect, try each part, and end
"""

_FLAGS: Final = (
    ("--host", "CHATSVC_HOST", "ADDRESS", "address to listen on; default 127.0.0.1"),
    ("--port", "CHATSVC_PORT", "PORT", "TCP port to listen on; default 8080"),
    ("--data-dir", "CHATSVC_DATA_DIR", "DIRECTORY", "where everything embedded keeps its files"),
)

_EXAMPLES: Final = """\
examples:
  python -m chatsvc                              everything embedded, a small model on the CPU
  python -m chatsvc --port 9000                  the same on another port
  python -m chatsvc check --config chatsvc.toml  is this configuration good, and is everything reachable?
  CHATSVC_ENGINE=vllm:/models/my-model python -m chatsvc
  CHATSVC_ENGINE='openai:http://127.0.0.1:8000/v1#my-model' python -m chatsvc
  CHATSVC_DATABASE_URL=postgresql://chat@db/chat CHATSVC_REDIS_URL=redis://cache python -m chatsvc

Every key of the configuration is also an environment variable; docs/configuration.md lists them.

exit codes:
  0  done
  1  something failed
  2  the configuration or the command line is not valid
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        config = load_config(options.config, _environment(options))
        configure_logging(config.log, sys.stderr)
        return _COMMANDS[options.command](config)
    except ConfigError as error:
        print("chatsvc cannot run as it is configured:", *error.problems, sep="\n  ", file=sys.stderr)
        return BAD_CONFIG
    except ChatError as error:
        print(f"{error.title}: {error.detail}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _serve(config: Config) -> int:
    from chatsvc import app  # noqa: PLC0415

    return _run(app.serve(config))


def _migrate(config: Config) -> int:
    return _run(_migrate_database(config))


async def _migrate_database(config: Config) -> int:
    from chatsvc.embedded import embedded_postgres, lock_data_dir  # noqa: PLC0415
    from chatsvc.store import migrate  # noqa: PLC0415

    async with AsyncExitStack() as stack:
        url = config.database.url
        if not url:
            stack.enter_context(lock_data_dir(config.data_dir))
            url = await stack.enter_async_context(embedded_postgres(config.data_dir, print))
        await migrate(url)
    print("The schema is up to date.")
    return DONE


def _check(config: Config) -> int:
    from chatsvc.checks import check  # noqa: PLC0415

    return DONE if _run(check(config, sys.stdout)) else FAILED


# A command imports what it alone needs: --help and a bad configuration answer at once, and a process that vLLM spawns
# (it imports this file again) stays light.
_COMMANDS: Final[Mapping[str, Callable[[Config], int]]] = {"serve": _serve, "migrate": _migrate, "check": _check}

ResultT = TypeVar("ResultT")


def _run(main_task: Coroutine[Any, Any, ResultT]) -> ResultT:
    import uvloop  # noqa: PLC0415

    return uvloop.run(main_task)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chatsvc",
        usage="python -m chatsvc [serve|migrate|check] [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs="?", choices=tuple(_COMMANDS), default="serve", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file (CHATSVC_CONFIG)")
    for flag, variable, metavar, meaning in _FLAGS:
        parser.add_argument(flag, dest=variable, metavar=metavar, help=f"{meaning} ({variable})")
    parser.add_argument("--version", action="version", version=f"chatsvc {__version__}")
    return parser


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """The process's environment, overruled by what the command line says."""
    said = {variable: getattr(options, variable) for _, variable, _, _ in _FLAGS}
    return {**os.environ, **{variable: value for variable, value in said.items() if value is not None}}


if __name__ == "__main__":
    sys.exit(main())
