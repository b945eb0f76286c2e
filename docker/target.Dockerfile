# The target: the stock SGLang image of the one version that the plugin supports, plus our package.
# Build from the repository's root: docker build -f docker/target.Dockerfile -t dflash-online-target .
FROM lmsysorg/sglang:v0.5.23

WORKDIR /opt/dflash-online
COPY docker/requirements-app.txt docker/
# What the image has in a fitting version stays: torch, transformers and SGLang are not touched.
RUN python3 -m pip install --no-cache-dir --requirement docker/requirements-app.txt
COPY pyproject.toml README.md LICENSE ./
COPY dflash_online dflash_online
COPY server_patches server_patches
RUN python3 -m pip install --no-cache-dir --no-deps . \
    && python3 -c "import sglang; assert sglang.__version__ == '0.5.23', sglang.__version__"

EXPOSE 30000
ENTRYPOINT ["dflash-online", "target", "serve", "--host", "0.0.0.0"]
