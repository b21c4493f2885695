# Two images of one file:
#   docker build --target cpu  -t anygrpo:cpu .
#   docker build --target cuda -t anygrpo:cuda .
#   docker run --rm -it -p 6076:6076 -v "$PWD/runs:/home/grpo/runs" anygrpo:cpu train cartpole
#   docker run --rm -it --gpus all --ipc=host -v "$PWD/runs:/home/grpo/runs" anygrpo:cuda doctor
# EXTRAS chooses what comes with it: --build-arg EXTRAS=language,view

FROM python:3.12-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY scripts/macos_run.sh scripts/
COPY docs/metrics.md docs/
COPY grpo grpo
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.12-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 MUJOCO_GL=egl
# bubblewrap is the sandbox of the code rewards; EGL draws MuJoCo without a screen.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap libegl1 libgl1 libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /etc/anygrpo/constraints.txt
COPY --from=wheel /dist /dist
RUN useradd --create-home --uid 1000 grpo && mkdir /home/grpo/runs && chown grpo /home/grpo/runs
WORKDIR /home/grpo
EXPOSE 6076
ENTRYPOINT ["grpo"]

FROM base AS cpu
ARG EXTRAS=language,control,view,export
RUN python -m pip install --extra-index-url https://download.pytorch.org/whl/cpu \
    -c /etc/anygrpo/constraints.txt "$(ls /dist/*.whl)[$EXTRAS]"
USER grpo

FROM base AS cuda
ARG EXTRAS=language,control,view,export
# PyTorch's own wheel brings CUDA, the host only its driver; Triton compiles a launcher, which takes a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m pip install -c /etc/anygrpo/constraints.txt "$(ls /dist/*.whl)[$EXTRAS]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
USER grpo
