"""nginx with nchan, one channel a stream, memory store; and the publisher that feeds it, which is not counted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import uvloop
from control import Driver, leave, obey
from drive import event_text, paced

MODULE = Path("/usr/lib/nginx/modules/ngx_nchan_module.so")
CONNECTIONS = 8
CONFIG = """
load_module {module};
daemon off;
worker_processes 1;
worker_rlimit_nofile 20000;
pid {directory}/nginx.pid;
error_log {directory}/error.log;
events {{ worker_connections 16000; }}
http {{
  access_log off;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  nchan_shared_memory_size 256M;
  keepalive_requests 1000000000;
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location ~ ^/pub/(.+)$ {{ nchan_publisher; nchan_channel_id $1; nchan_message_buffer_length 10; }}
    location ~ ^/(.+)$ {{ nchan_subscriber eventsource; nchan_channel_id $1; nchan_subscriber_first_message newest; }}
  }}
}}
"""


class Connection(asyncio.Protocol):
    """A keep-alive connection on which POSTs are pipelined; their answers are not looked at."""

    transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport


class Publisher:
    """Feeds the channels."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.connections: list[Connection] = []
        self.count = 0

    async def open(self, count: int, port: int) -> None:
        self.count = count
        loop = asyncio.get_running_loop()
        self.connections = [
            (await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(CONNECTIONS)
        ]

    async def go(self, rate: float) -> None:
        def one(number: int) -> None:
            body = b'{"text":"%b"}' % event_text().encode()
            self.connections[number % CONNECTIONS].transport.write(
                b"POST /pub/resp_bench_%032x HTTP/1.1\r\nHost: b\r\nX-EventSource-Event: delta\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (number, len(body), body)
            )

        self.driver.start(paced(one, self.count, rate))


async def main() -> None:
    publisher = Publisher()
    await obey(open=publisher.open, go=publisher.go)
    leave()


if __name__ == "__main__":
    uvloop.run(main())
