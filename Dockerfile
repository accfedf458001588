# The package as it is installed from its wheel, for CPUs:
#   make package PYTEST="-m 'not slow'"     builds dist/*.whl
#   docker build --tag lit_epgan .
#   docker run --rm --volume "$PWD:/work" lit_epgan fit --config digits.yaml
FROM python:3.12-slim

RUN useradd --create-home lit_epgan && mkdir /work && chown lit_epgan /work
COPY dist/*.whl /tmp/
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch torchvision \
 && pip install --no-cache-dir /tmp/*.whl \
 && rm /tmp/*.whl

USER lit_epgan
WORKDIR /work
ENTRYPOINT ["python", "-m", "lit_epgan"]
