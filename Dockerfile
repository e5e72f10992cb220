# docker build -t oppo .                  NGC image: keeps its own torch, megatron-core, transformer-engine
# docker build -t oppo-cpu --target cpu . CPU image: runs the tests while it is built
# What is tested of this file, and what is not: docs/container.md

FROM python:3.12-slim AS cpu
# Not pinned: Debian keeps only the newest version of a package.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 oppo \
    && install -d -o oppo /opt/oppo-megatron
WORKDIR /opt/oppo-megatron
COPY --chown=10001 . .
USER 10001
RUN make test
ENV PATH=/opt/oppo-megatron/.venv/bin:$PATH
HEALTHCHECK --interval=5m --timeout=60s CMD ["oppo", "validate"]
CMD ["oppo", "--help"]

FROM nvcr.io/nvidia/nemo:26.02 AS gpu
COPY . /opt/oppo-megatron
# --no-deps: the image's torch and megatron-core must stay the ones that were built for each other.
RUN pip install --no-cache-dir --no-deps /opt/oppo-megatron \
    && useradd --create-home --uid 10001 oppo \
    && install -d -o oppo /runs
USER 10001
WORKDIR /runs
# Whatever the image lacks of what the package asks for ends the build here, by name.
RUN oppo validate
HEALTHCHECK --interval=5m --timeout=60s CMD ["oppo", "validate"]
CMD ["oppo", "--help"]
