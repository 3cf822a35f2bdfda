# syntax=docker/dockerfile:1
#
# CPU:  docker build -t dflow .
# GPU:  the same image trains on NVIDIA GPUs where the host runs containers with `--gpus all`, since
#       torch's Linux wheel brings its own CUDA libraries. DeepSpeed compiles kernels at first use and
#       needs a base with the CUDA compiler:
#       docker build -t dflow:cuda --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#                    --build-arg EXTRAS=plots,deepspeed .
# Run:  docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/runs:/app/runs" dflow \
#           fit --config recipes/tiny-dflow.yaml
#
# BASE            any Debian or Ubuntu image; Python 3.10 or newer is added where it is missing
# EXTRAS          optional dependencies of pyproject.toml
# PIP_EXTRA_INDEX_URL   PyTorch's CPU wheel index, for a much smaller image without CUDA libraries
ARG BASE=python:3.11-slim

FROM ${BASE} AS python
ENV DEBIAN_FRONTEND=noninteractive
RUN python3 -c 'import ensurepip' 2>/dev/null \
    || (apt-get update \
        && apt-get install -y --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*)

FROM python AS build
ARG EXTRAS=plots
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY src src
RUN python3 -m venv /opt/dflow \
    && /opt/dflow/bin/pip install -c constraints/cpu.txt ".[${EXTRAS}]"

FROM python
RUN useradd --create-home --uid 10001 dflow \
    && mkdir -p /app/runs && chown -R dflow:dflow /app
COPY --from=build /opt/dflow /opt/dflow
COPY --chown=dflow:dflow recipes /app/recipes
COPY --chown=dflow:dflow data /app/data
# HOME and LOGNAME also serve a --user that the image does not know.
ENV PATH=/opt/dflow/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp LOGNAME=dflow
USER dflow
WORKDIR /app
VOLUME /app/runs
ENTRYPOINT ["dflow-train"]
CMD ["--help"]
