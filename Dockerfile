# A slim image that runs `latte` on a CPU; it serves nothing.
#   docker build -t latte .
#   docker run --rm -u "$(id -u):$(id -g)" -v "$PWD:/data" latte convert MODEL/ --calib photos/ --out hybrid/
FROM python:3.12-slim

# PyTorch's default build would bring CUDA, and 4 GB with it.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch torchvision

COPY pyproject.toml README.md LICENSE /source/
COPY configs /source/configs
COPY latte_convert /source/latte_convert
RUN pip install --no-cache-dir "/source[all]" && rm -r /source

# Models of the Hub are kept where a volume can be mounted.
ENV HF_HOME=/tmp/huggingface
WORKDIR /data
ENTRYPOINT ["latte"]
