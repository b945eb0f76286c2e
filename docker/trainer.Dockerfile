# The trainer service: plain Python with torch (its wheels bring CUDA) and our package; no SGLang.
# Build from the repository's root: docker build -f docker/trainer.Dockerfile -t dflash-online-trainer .
FROM python:3.11-slim

WORKDIR /opt/dflash-online
COPY docker/requirements-trainer.txt docker/requirements-app.txt docker/
RUN python3 -m pip install --no-cache-dir \
    --requirement docker/requirements-trainer.txt --requirement docker/requirements-app.txt
COPY pyproject.toml README.md LICENSE ./
COPY dflash_online dflash_online
COPY trainer trainer
RUN python3 -m pip install --no-cache-dir --no-deps .

EXPOSE 8900
ENTRYPOINT ["dflash-online", "trainer", "serve", "--host", "0.0.0.0"]
