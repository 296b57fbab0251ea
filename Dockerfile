# Slipstream in a container; the page docs/clusters.md says how to use it. The GPU image has never been built.
#   docker build --build-arg DEVICE=cpu --build-arg TORCH_INDEX=URL -t slipstream:cpu .
#   docker build --build-arg DEVICE=gpu -t slipstream:gpu .
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# cpu: torch without CUDA. gpu: torch as PyPI has it, whose wheels bring the CUDA libraries, and vLLM
ARG DEVICE=cpu
# index of CPU builds that PyTorch's installation page names
ARG TORCH_INDEX

RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential bubblewrap git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/slipstream
COPY . .
RUN case "$DEVICE" in \
      cpu) pip install --no-cache-dir torch --index-url "${TORCH_INDEX:?write --build-arg TORCH_INDEX=URL, the index of CPU builds that the installation page of PyTorch names}" \
           && pip install --no-cache-dir '.[data,gateway,lora,math,ray]' ;; \
      gpu) pip install --no-cache-dir -c constraints-vllm.txt '.[data,gateway,lora,math,ray]' vllm ;; \
      *) echo "DEVICE=$DEVICE: write cpu or gpu" >&2; exit 1 ;; \
    esac

# model files and run directories are mounted, so that they outlive the container
ENV HF_HOME=/models
VOLUME ["/models", "/runs"]
WORKDIR /runs
ENTRYPOINT ["slipstream"]
CMD ["--help"]
