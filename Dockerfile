# docker build -t oppo .                  NGC image: keeps its own torch, megatron-core, transformer-engine
# docker build -t oppo-cpu --target cpu . CPU image: runs the tests while it is built

FROM python:3.12-slim AS cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home oppo \
    && install -d -o oppo /opt/oppo-megatron
WORKDIR /opt/oppo-megatron
COPY --chown=oppo . .
USER oppo
RUN make test
ENV PATH=/opt/oppo-megatron/.venv/bin:$PATH
HEALTHCHECK --interval=5m --timeout=60s CMD oppo doctor
CMD ["oppo", "--help"]

FROM nvcr.io/nvidia/nemo:26.02 AS gpu
COPY . /opt/oppo-megatron
# --no-deps: the image's torch and megatron-core must stay the ones that were built for each other.
RUN pip install --no-deps /opt/oppo-megatron \
    && useradd --create-home oppo \
    && install -d -o oppo /runs
USER oppo
WORKDIR /runs
HEALTHCHECK --interval=5m --timeout=60s CMD oppo doctor
CMD ["oppo", "--help"]
