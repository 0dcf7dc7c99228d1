# Two stages: the first installs into a virtual environment, the second holds only that and a user.
# Build:  docker build -t qwenonnx .
# Run:    docker run --rm -p 8000:8000 -v "$PWD/models/NAME/int8:/model:ro" --read-only --tmpfs /tmp qwenonnx

FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY qwenonnx qwenonnx
RUN python -m venv /opt/qwenonnx \
    && /opt/qwenonnx/bin/pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.11-slim
COPY --from=build /opt/qwenonnx /opt/qwenonnx
RUN useradd --system --uid 10001 --no-create-home qwenonnx
ENV PATH=/opt/qwenonnx/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["qwenonnx"]
CMD ["serve", "/model", "--host", "0.0.0.0"]
