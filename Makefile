# Everything runs in .venv, which `make venv` builds once and refreshes when pyproject.toml, constraints.txt or the list of modules change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.partool-installed
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes of Python, which would compile all of partool's modules each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv quickstart peers lm-eval trackers test test-changed test-long test-triton test-slurm slurm lint format typecheck test-interpreted test-units bench bench-trackers bench-pipeline bench-tensor bench-experts bench-gpu bench-gpu-long bench-offload bench-gpu-offload kernel-tables samples schema clean

help:
	@echo "make quickstart   plan and train specs/quickstart.yaml on this machine's CPU (about three minutes)"
	@echo "make test         lint, types and tests (minutes)"
	@echo "make test-changed the unit tests that depend on what changed since the last commit, for at most a minute"
	@echo "make test-long    the longer suites; those with other training systems need make peers before"
	@echo "make peers        installs other training systems into build/peers, where tests look for them (PARTOOL_PEERS)"
	@echo "make lm-eval      installs lm-evaluation-harness into build/lm_eval, where long tests look for it (PARTOOL_LM_EVAL)"
	@echo "make trackers     installs W&B, MLflow and trackio into build/trackers, where long tests look for them (PARTOOL_TRACKERS)"
	@echo "make test-triton  compiles the kernels for all architectures with the newest Triton, and with one of the older ones"
	@echo "make test-slurm   installs Slurm if it is missing (Debian, root), starts a cluster, runs the tests that need one"
	@echo "make bench        benchmarks against named peers; results under tests/bench/results"
	@echo "make bench-trackers  what trackers add to a step and to a run (needs make trackers; 10 minutes)"
	@echo "make bench-pipeline  pipelines against torch's and against the simulator (minutes; slow links need root)"
	@echo "make bench-tensor  tensor parallelism against DTensor and DeepSpeed (DEEPSPEED=folder with its packages)"
	@echo "make bench-experts  layers of experts against DeepSpeed and transformers (DEEPSPEED=folder with its packages)"
	@echo "make bench-gpu    first steps of every schedule on this machine's GPUs, one JSON to send back (4 minutes); then the"
	@echo "                  kernels on one GPU: correct, how fast, and their tables filled for it (under 9 minutes)"
	@echo "make bench-gpu-long  correctness, speed, memory and the longest sequence on one GPU (an hour)"
	@echo "make bench-offload  optimizers on this machine's processors and in its memory (DEEPSPEED=folder with its packages)"
	@echo "make bench-gpu-offload  training with the optimizer in host memory on one GPU (DEEPSPEED=...; under 9 minutes)"
	@echo "make kernel-tables  writes what nobody has measured into the kernels' tables, after a change of a kernel"
	@echo "make samples      writes the output of commands in README.md and docs anew (RECORDED=1: training, too)"
	@echo "make format       ruff format and import order"

# An editable install knows the place of each module, so that modules that come, go or move need it anew.
MODULES := $(VENV)/.modules
ifneq ($(filter-out help clean,$(MAKECMDGOALS)),)
$(shell mkdir -p $(VENV); find partool runtime kernels -name '*.py' | sort > $(MODULES).new; \
	cmp -s $(MODULES).new $(MODULES) && rm $(MODULES).new || mv $(MODULES).new $(MODULES))
endif

# torch goes first and pinned, so that no other requirement can choose another build of it.
$(STAMP): pyproject.toml partool/version.py CMakeLists.txt constraints.txt $(MODULES) $(wildcard kernels/partool_kernels/cpu/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps --constraint constraints.txt triton
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt 'scikit-build-core>=0.11' cmake ninja
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --no-build-isolation \
		--editable '.[train,hf,parquet,tensorboard,curves,k8s,dev]'
	touch $@

venv: $(STAMP)

quickstart: venv
	$(BIN)/partool plan specs/quickstart.yaml
	$(BIN)/partool launch specs/quickstart.yaml

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

typecheck: venv
	$(BIN)/mypy

# First the types of all, beside the Triton kernels in its interpreter, which is chosen as it is imported: one process each. Then unit tests and attacks side by side; then those that start ranks and clusters, by files, which share what they start.
test: venv lint
	$(MAKE) --jobs 2 typecheck test-interpreted
	$(MAKE) test-units
	$(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder \
		--ignore tests/unit --ignore tests/interpreted --ignore tests/fuzz

test-interpreted: venv
	TRITON_INTERPRET=1 $(BIN)/pytest tests/interpreted

test-units: venv
	$(BIN)/pytest --numprocesses 2 --dist worksteal tests/unit tests/fuzz

# SINCE=main compares with another commit; PARTOOL_CHANGED_SECONDS=0 takes the time that it takes.
SINCE ?= HEAD
test-changed: venv
	$(BIN)/python tests/changed.py $(SINCE)

test-long: venv
	$(BIN)/pytest -m long
	PARTOOL_FUZZ_SECONDS=400 $(BIN)/pytest -m 'long or not long' --timeout 1200 --capture no tests/fuzz
	$(BIN)/python tests/versions/offline.py --all $(OTHER_TRITONS)

# Training systems that judge what is written for them. Without their dependencies, of which .venv has the large ones;
# Megatron's package is for Python 3.12 and newer, and its arguments work in 3.11.
PEERS := deepspeed==0.19.8 bitsandbytes==0.50.2 accelerate==1.15.0 torchtitan==0.2.2 peft==0.21.2 hjson py-cpuinfo msgpack einops psutil tyro \
	docstring-parser typeguard shtab rich markdown-it-py mdurl pygments trl==1.16.0 datasets==5.2.0 multiprocess dill \
	pandas python-dateutil pytz six tzdata xxhash

# Trackers, each in a folder of its own, with what .venv lacks: they ask for other versions of the same packages.
TRACKERS := wandb trackio mlflow
wandb_PACKAGES := wandb==0.31.0 cwevals==0.0.1b1 opentelemetry-api==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2 \
	opentelemetry-exporter-otlp-common==0.66b2 opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-proto==1.45.2 \
	opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 opentelemetry-exporter-http-transport==0.66b2 \
	platformdirs==4.14.9 distro==1.9.0 googleapis-common-protos==1.76.0 httpx==0.28.1 httpcore==1.0.9 sniffio==1.3.1
trackio_PACKAGES := trackio==0.43.0 brotli==1.2.1 gradio-client==2.7.2 httpx==0.28.1 httpcore==1.0.9 orjson==3.13.0 pillow==12.3.0 \
	python-multipart==0.0.34 starlette==1.10.0 httptools==0.9.0 python-dotenv==1.2.4 uvloop==0.23.0 watchfiles==1.3.0 \
	websockets==17.4 uvicorn==0.54.0
mlflow_PACKAGES := mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1 sqlparse==0.6.1 cachetools==7.3.3 cloudpickle==3.1.3 \
	databricks-sdk==0.162.0 fastapi==0.165.0 gitpython==3.2.1 importlib-metadata==9.1.0 opentelemetry-api==1.45.2 \
	opentelemetry-proto==1.45.2 opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 python-dotenv==1.2.4 \
	starlette==1.10.0 uvicorn==0.54.0 mako==1.4.3 gitdb==4.0.12 google-auth==2.63.0 zipp==4.1.2 cryptography==50.0.2 \
	pyasn1-modules==0.4.2 smmap==5.0.3 cffi==2.1.1 pyasn1==0.6.5 pycparser==3.12

# lm-evaluation-harness with what its tasks of log-likelihoods import, beside what .venv has.
LM_EVAL := lm_eval==0.4.13 accelerate==1.15.0 psutil datasets==5.2.0 evaluate==0.4.6 multiprocess==0.70.19 dill==0.4.1 pandas==3.1.1 python-dateutil==4.0.0 \
	pytz==2026.6 tzdata==2026.6 six==1.17.0 xxhash==4.1.0 tqdm==4.70.1 fsspec==2026.9.0 httpx==0.28.1 httpcore==1.0.9 more-itertools==11.2.1 \
	pytablewriter==1.2.1 dataproperty==1.1.1 mbstrdecoder==1.1.5 pathvalidate==3.3.1 tabledata==1.3.5 tcolorpy==0.1.7 typepy==2.0.0 \
	chardet==7.7.0 sacrebleu==2.6.0 portalocker==4.4.2 regex==2026.11.19 tabulate==0.10.0 colorama==0.4.6 lxml==6.1.3 rouge-score==0.1.2 \
	nltk==3.10.4 absl-py==2.5.1 scikit-learn==1.9.1 scipy==1.17.1 joblib==1.6.0 threadpoolctl==3.8.0 narwhals==2.29.0 sqlitedict==2.1.0 \
	word2number==1.1 jsonlines==4.0.0

lm-eval: venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/lm_eval $(LM_EVAL)

trackers: venv
	$(foreach name,$(TRACKERS),$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target build/trackers/$(name) $($(name)_PACKAGES) &&) true

peers: venv
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
		--target build/peers --upgrade $(PEERS)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/peers --upgrade \
		--ignore-requires-python --python-version 3.12 --only-binary=:all: megatron-core==0.19.2

# The oldest that is supported, and the one that CUDA builds of torch 2.13 bring; the newest is in .venv.
OTHER_TRITONS := 3.6.0 3.7.1

# Every entry of the tables with the newest version and with one of the others, which divide the architectures; entries have their own types.
# The longer suite proves every entry of every architecture with each version.
test-triton: venv
	$(BIN)/python -m partool_kernels.offline --most 99 > /dev/null
	$(BIN)/python tests/versions/offline.py --most 99 --divide $(OTHER_TRITONS)

kernel-tables: venv
	$(BIN)/python -m partool_kernels.offline --write
	$(BIN)/python tests/versions/offline.py --write $(OTHER_TRITONS)

# What the tests' own Slurm cluster needs.
SLURM_PACKAGES := slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2

slurm:
	command -v slurmctld >/dev/null && command -v munged >/dev/null && command -v ip >/dev/null || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES); }

test-slurm: venv slurm
	$(BIN)/pytest -m 'long or not long' tests/launch/test_slurm_cluster.py

bench: venv
	$(BIN)/python tests/bench/overhead.py
	$(BIN)/python tests/bench/cli_time.py
	$(BIN)/python tests/bench/data_parallel.py

bench-trackers: venv
	$(BIN)/python tests/bench/trackers.py

bench-pipeline: venv
	$(BIN)/python tests/bench/pipeline.py

bench-tensor: venv
	$(BIN)/python tests/bench/tensor.py --deepspeed "$(DEEPSPEED)"

bench-experts: venv
	$(BIN)/python tests/bench/experts.py --deepspeed "$(DEEPSPEED)"

bench-gpu: venv
	$(BIN)/python tests/bench/first_contact.py; found=$$?; test $$found -ne 2 || exit 2; \
	$(BIN)/python tests/bench/kernels_gpu.py && exit $$found

bench-gpu-long: venv
	$(BIN)/python tests/bench/gpu.py
	$(BIN)/python tests/bench/long_context_gpu.py

bench-offload: venv
	$(BIN)/python tests/bench/host_adam.py $(if $(DEEPSPEED),--deepspeed "$(DEEPSPEED)")
	$(BIN)/python tests/bench/offload_step.py --deepspeed "$(DEEPSPEED)"
	$(BIN)/python tests/bench/offload_io.py

bench-gpu-offload: venv
	$(BIN)/python tests/bench/offload_gpu.py --deepspeed "$(DEEPSPEED)"

format: venv
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

# Output of commands in README.md and docs; RECORDED=1 also trains for those that show runs (minutes).
samples: venv
	RECORDED=$(RECORDED) $(BIN)/python tests/unit/_samples.py

schema: venv
	$(BIN)/partool schema > partool/spec/partool.schema.json
	$(BIN)/partool schema --markdown > docs/guide/spec.md

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
