# syntax=docker/dockerfile:1
#
# CPU:  docker build -t dflow --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's CPU wheel index> .
# GPU:  docker build -t dflow:cuda \
#           --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#           --build-arg EXTRAS=deepspeed --build-arg PACKAGES="g++ python3-dev" .
# Run:  docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/runs:/app/runs" dflow \
#           fit --config recipes/tiny-dflow.yaml
#       and with --gpus all on a host with NVIDIA GPUs. docs/install.md has more.
#
# BASE        any Debian or Ubuntu image; Python 3.10 or newer is added where it is missing
# EXTRAS      optional dependencies of pyproject.toml
# PACKAGES    Debian packages for what compiles at run time: attention on GPUs, --backend compiled
# PIP_EXTRA_INDEX_URL   PyTorch's CPU wheel index, for an image without CUDA libraries
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS python
ARG PACKAGES=""
ENV DEBIAN_FRONTEND=noninteractive
# Versions of Debian packages are those of the base image's release: archives keep no older ones.
# hadolint ignore=DL3008,SC2086
RUN set -eu; wanted="${PACKAGES}"; \
    python3 -c 'import ensurepip' 2>/dev/null || wanted="${wanted} python3 python3-venv"; \
    if [ -n "${wanted}" ]; then \
        apt-get update; \
        apt-get install -y --no-install-recommends ${wanted}; \
        rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /var/log/apt /var/log/dpkg.log; \
    fi

FROM python AS build
ARG EXTRAS=
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY constraints constraints
COPY recipes recipes
COPY data data
COPY src src
# pip's cache is a mount, so none of it is in a layer.
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/dflow \
    && /opt/dflow/bin/pip install -c constraints/cpu.txt ".${EXTRAS:+[${EXTRAS}]}"

FROM python
ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="dflow-lightning" \
      org.opencontainers.image.description="Train, measure and export DFlow block drafters" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/dflow /opt/dflow
# HOME and LOGNAME also serve a --user that the image does not know.
ENV PATH=/opt/dflow/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp LOGNAME=dflow
WORKDIR /app
RUN useradd --create-home --uid 10001 dflow \
    && dflow-train init \
    && mkdir runs && chmod 1777 runs
USER 10001:10001
VOLUME /app/runs
HEALTHCHECK --interval=5m --timeout=30s --start-period=10s CMD ["dflow-train", "--help"]
ENTRYPOINT ["dflow-train"]
CMD ["--help"]
