# One image for every process of Headrace: `docker build -t headrace .`, then `docker run --rm headrace worker`, `gateway`, `engine`, ….
# compose.yaml runs all of them with Kafka and an object store.
#
# torch is the one that the Python package index has: it runs on CPUs, and on NVIDIA GPUs under the NVIDIA container runtime. Versions are
# those of constraints.txt, which the tests ran with. Gives up: a small image; torch alone is about 5 GB.
#
# Settings come as HEADRACE_… variables, or as a YAML file that HEADRACE_CONFIG names. Mount base models anywhere, say /models; what must
# outlive a container belongs into Kafka and the object store: the folders below only keep tokens and work in progress.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
RUN python -m venv /opt/headrace
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN pip install --no-cache-dir --disable-pip-version-check -c constraints.txt uv
# What it depends on comes first: this layer is made anew when the versions change, not with every line of code.
RUN uv pip install --no-cache --python /opt/headrace/bin/python -c constraints.txt -r pyproject.toml \
    --extra trainer --extra consumers --extra engine --extra gateway
COPY README.md LICENSE ./
COPY schemas schemas
COPY core core
COPY producers producers
COPY trainer trainer
COPY consumers consumers
COPY engine engine
COPY gateway gateway
COPY cli cli
COPY demo demo
RUN uv pip install --no-cache --no-deps --python /opt/headrace/bin/python .

FROM python:${PYTHON}-slim
# Triton, and DeepSpeed where the optimizer is kept in host memory, compile kernels when they run.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --home-dir /var/lib/headrace headrace \
    && install --directory --owner=headrace --group=headrace /var/lib/headrace/tokens /var/lib/headrace/work /models
COPY --from=build /opt/headrace /opt/headrace
# Base models are folders: nothing is looked up on a hub.
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    HEADRACE_WORKER__WORK_DIR=/var/lib/headrace/work
USER 10001:10001
WORKDIR /var/lib/headrace
ENTRYPOINT ["headrace"]
CMD ["--help"]
