# The image that `fleetrun k8s --image` names: Python, torch for CPUs, torchfleet, and its kernels compiled.
#
#   docker build -t torchfleet:0.1 .
#   docker build -t torchfleet:0.1-cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 .
#   docker build -t torchfleet:0.1-kafka --build-arg EXTRAS=[kafka,parquet] .
#
# Your own script in an image:  FROM torchfleet:0.1  COPY . /app  and  fleetrun k8s --in_image ... /app/train.py
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY torchfleet torchfleet
COPY docs docs
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch>=2.6,<2.14"
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)${EXTRAS}"

RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin fleet \
    && install --directory --owner 10001 --group 10001 /opt/torchfleet/cache /job
COPY examples/__init__.py examples/columns.py /opt/torchfleet/examples/
COPY examples/wide_deep /opt/torchfleet/examples/wide_deep
USER 10001:10001
WORKDIR /job
ENV HOME=/job XDG_CACHE_HOME=/opt/torchfleet/cache PYTHONUNBUFFERED=1
# All kernels of servers, then a job in one process, servers inside: what these compile, pods need not. Pods with another
# --user read them, too. Another kind of processor compiles anew.
RUN fleet compile \
    && python /opt/torchfleet/examples/wide_deep/train.py --rows 20000 \
    && chmod -R a+rX /opt/torchfleet/cache
ENTRYPOINT ["python", "-m", "torchfleet.launch"]
CMD ["--help"]
