# Two commands on a fresh machine with Python and make: `make demo` and `make test`. Both use one environment, .venv.

PYTHON ?= python3
# `make test-torch` has an environment beside it for each release of PyTorch and of Python.
VENV := .venv
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
BIN := $(VENV)/bin
# Half of pip's time goes into compiling modules of which most are never imported; Python does it at the first import.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint $(VENV)/constraints.txt
READY := $(VENV)/.ready
# The front end is built where there is node; without, everything else works.
FRONT := $(VENV)/.front
FRONT_SOURCES := $(wildcard $(addprefix labextension/, *.json *.mjs src/*.ts src/view/*.ts style/* schema/*))
NODE_MODULES := labextension/node_modules/.package-lock.json
DEEPSPEED := $(VENV)/deepspeed
TRACKERS := $(VENV)/trackers
SPARK := $(VENV)/spark
NPM := cd labextension && PATH="$(CURDIR)/$(BIN):$$PATH" npm
HAVE_NPM := command -v npm >/dev/null
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 40 --durations-min 5
# One more than the cores: tests wait for processes half of their time.
WORKERS ?= 3

# Our processes are short-lived and many: without compiled files each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo diagnose-score test test-alone test-jobs test-unit test-cluster test-engines test-spark test-ranks test-differential test-strategies test-deepspeed test-trackers test-browser test-front test-torch test-releases test-other-python seen lint format docs bench soak lab front browser cluster engines screenshots wheel clean

demo: $(READY) front
	@$(BIN)/python scripts/demo.py

# Two processors: one has unit tests, then trackers, engines and cells beside plain ones; the other browsers, which wait a
# part of their time, and then what starts ranks here and on hosts.
# What each needs on a fresh clone (Python's packages, npm's, a browser) is set up at the same time.
test:
	@$(MAKE) --no-print-directory --jobs 4 test-alone test-jobs test-front

test-alone: $(READY) cluster engines
	@$(MAKE) --no-print-directory test-unit
	@$(MAKE) --no-print-directory test-trackers
	@$(MAKE) --no-print-directory test-engines
	@$(MAKE) --no-print-directory test-spark
	@$(MAKE) --no-print-directory test-differential

test-jobs: $(READY) front browser cluster
	@$(MAKE) --no-print-directory test-browser
	@$(MAKE) --no-print-directory test-cluster
	@$(MAKE) --no-print-directory test-ranks

# What a name's tests say is shown when they have ended: others run beside them.
told = @mkdir -p out; ( $(2) ) >out/test-$(1).log 2>&1; code=$$?; cat out/test-$(1).log; exit $$code

# No worker: with one, pytest itself would be loaded twice.
test-unit: WORKERS = 0
test-unit: $(READY)
	$(call told,unit,$(PYTEST) tests/unit)

test-ranks: $(READY)
	$(PYTEST) -m "not soak and not strategies" tests/integration tests/strategies/test_advices.py

# Cells run plainly and on ranks.
test-differential: WORKERS = 0
test-differential: $(READY)
	$(call told,differential,$(PYTEST) -m "not soak and not strategies" tests/differential)

# On several hosts, which are namespaces of this machine; one set of them, as two would share the processors.
test-cluster: WORKERS = 0
test-cluster: $(READY) cluster
	$(call told,cluster,$(PYTEST) tests/cluster)

# On a Slurm and a Ray of their own, whose nodes are such hosts, too.
test-engines: WORKERS = 0
test-engines: $(READY) cluster engines
	$(call told,engines,$(PYTEST) -k "not spark" tests/engines)

# Spark, in an environment over the other.
test-spark: $(SPARK)/.ready engines
	$(call told,spark,$(SPARK)/bin/python -m pytest -n 0 -k spark tests/engines)

# Every strategy and option on real ranks, held against one device.
test-strategies: $(READY)
	$(PYTEST) --timeout 400 -m "strategies and not soak" tests/integration tests/strategies

# DeepSpeed where it is installed: in an environment over the other, out of sight of all other tests.
test-deepspeed: $(DEEPSPEED)/.ready
	$(call told,deepspeed,DS_ACCELERATOR=cpu PATH="$(CURDIR)/$(DEEPSPEED)/bin:$$PATH" $(DEEPSPEED)/bin/python -m pytest \
	  -m "soak or not soak" -k deepspeed tests/integration/test_strategies_parts.py tests/integration/test_gallery.py)

# MLflow's server and the clients of all trackers, in an environment over the other: tests see both, with and without.
test-trackers: $(TRACKERS)/.ready cluster
	$(call told,trackers,$(TRACKERS)/bin/python -m pytest -n 0 tests/trackers)

# In two processes, each with a browser and a Jupyter server of its own.
test-browser: WORKERS = 2
test-browser: $(READY)
	$(call told,browser,$(PYTEST) tests/browser)

test-front: $(NODE_MODULES)
	$(call told,front,if $(HAVE_NPM); then $(NPM) test; fi)

# With another release of PyTorch, and of Python: `make test-torch V=2.11.0 PYTHON=python3.12`. `SUITES` may name more
# suites of scripts/releases.py. What was seen goes into README.md.
V ?= $(TORCH)
SUITES ?= unit cells quickstart
test-torch:
	@$(MAKE) --no-print-directory VENV=.venv-py$(basename $(lastword $(shell $(PYTHON) --version)))-torch$(V) TORCH=$(V) seen

seen: $(READY)
	$(BIN)/python -m scripts.releases $(SUITES)

# The oldest, one in the middle, and the newest that is supported.
test-releases:
	@$(MAKE) --no-print-directory test-torch V=2.8.0
	@$(MAKE) --no-print-directory test-torch V=2.11.0
	@$(MAKE) --no-print-directory test-torch V=2.15.0

# Hosts of the test bed may have another release of Python: the first of these that runs here.
OTHER ?= $(firstword $(foreach one,3.10 3.12 3.13,$(shell python$(one) --version >/dev/null 2>&1 && echo python$(one))))
test-other-python:
	@if [ -n "$(OTHER)" ]; then $(MAKE) --no-print-directory test-torch PYTHON=$(OTHER); \
	  else echo 'Only one release of Python runs here; OTHER=/path/to/python3.10 names another'; fi

soak: $(READY) front browser test-releases test-other-python $(SPARK)/.ready engines
	$(BIN)/python -m pytest -m soak -p no:randomly --timeout 3600 tests/unit tests/integration tests/differential tests/cluster tests/engines tests/strategies tests/browser
	$(SPARK)/bin/python -m pytest -m soak -p no:randomly --timeout 3600 -k spark tests/engines

lint: $(READY) $(NODE_MODULES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m scripts.docs_pages --check
	@if $(HAVE_NPM); then $(NPM) run --silent lint; fi

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	@if $(HAVE_NPM); then $(NPM) run --silent format; fi

# The pages and the API; their cells and the notebooks are run, and a broken link is an error.
docs: $(READY) front
	$(BIN)/python -m scripts.docs_pages
	$(BIN)/python -m scripts.docs_cells
	TORCHDIST_DOCS_RUN=1 $(BIN)/python -m sphinx -c docs --fail-on-warning --keep-going -q . out/docs
	@echo 'Open out/docs/docs/index.html'

# How many logs with a known cause get it.
diagnose-score: $(READY)
	$(BIN)/python -m tests.diagnosis.score

bench: $(READY) front browser
	$(BIN)/python -m tests.benchmarks $(ONLY)

lab: $(READY) front
	$(BIN)/jupyter lab notebooks/quickstart.ipynb

front: $(READY) $(NODE_MODULES)
	@if $(HAVE_NPM); then $(MAKE) --no-print-directory $(FRONT); \
	  else echo 'No npm, so no live views and no panel: apt-get install npm, then make front'; fi

# One at a time: they refuse each other.
apt_install = { command -v apt-get >/dev/null && test "$$(id -u)" = 0 && flock Makefile sh -c 'apt-get update -qq && \
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1) >/dev/null'; }

# A browser for its tests; they say so when they find none.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  $(call apt_install,chromium fonts-dejavu-core) || \
	  echo 'No Chromium to be had: the browser tests are skipped' >&2

# What the tests on several hosts need; they are skipped without. Debian starts sshd when it is installed.
cluster:
	@PATH="$$PATH:/usr/sbin:/sbin"; for each in sshd ssh nft ip tc nsenter tcsh fish; do command -v $$each; done | wc -l | grep -qx 8 || \
	  $(call apt_install,openssh-client openssh-server nftables iproute2 util-linux tcsh fish) || \
	  echo 'No sshd, nft or ip to be had: the tests on several hosts are skipped' >&2

# Slurm, and Java for Spark, for the tests of their launchers; they are skipped without.
engines: cluster
	@PATH="$$PATH:/usr/sbin:/sbin"; for each in slurmctld slurmd sbatch munged; do command -v $$each; done | wc -l | grep -qx 4 || \
	  $(call apt_install,slurmctld slurmd slurm-client munge) || \
	  echo 'No Slurm to be had: the tests of --launcher slurm are skipped' >&2
	@command -v java >/dev/null || $(call apt_install,default-jre-headless) || \
	  echo 'No Java to be had: the tests of --launcher spark are skipped' >&2

# The README's pictures.
screenshots: $(READY) front browser
	$(BIN)/python -m scripts.screenshots

# With the front end built anew, into dist/.
wheel: $(READY) $(NODE_MODULES)
	rm -rf dist jupyter_torchdist/labextension jupyter_torchdist/static labextension/lib
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m hatchling build

clean:
	rm -rf .venv .venv-* out dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis \
	  labextension/lib labextension/node_modules jupyter_torchdist/labextension jupyter_torchdist/static

# torch is a step of its own: with it in place, no later step of pip looks for another build.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo 'Python cannot make a virtual environment here. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@echo 'Setting up $(VENV) (once; a few minutes)'
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt >$(VENV)/constraints.txt
	@$(PIP) torch==$(TORCH) || { echo 'Once more, without the settings of pip on this machine'; \
	  PIP_CONFIG_FILE=/dev/null $(PIP) torch==$(TORCH); }
	@SKIP_JUPYTER_BUILDER=1 $(PIP) --editable '.[demo,dev,docs]'
	@rm -f $(FRONT)
	@touch $@

# An environment in this folder that sees the other's packages, too.
over = @rm -rf $(1) && $(BIN)/python -m venv $(1) && \
	  $(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth

# MLflow's server asks for what it needs to serve models; these are what its tracking imports.
$(TRACKERS)/.ready: $(READY)
	$(call over,$(TRACKERS))
	@$(subst $(BIN),$(TRACKERS)/bin,$(PIP)) mlflow-skinny tensorboard wandb
	@$(subst $(BIN),$(TRACKERS)/bin,$(PIP)) --no-deps mlflow alembic blinker flask flask-cors graphene graphql-core \
	  graphql-relay huey itsdangerous mako sqlalchemy
	@touch $@

$(SPARK)/.ready: $(READY)
	$(call over,$(SPARK))
	@$(subst $(BIN),$(SPARK)/bin,$(PIP)) pyspark
	@touch $@

# It asks for packages that need a GPU's driver; these are what it imports here.
$(DEEPSPEED)/.ready: $(READY)
	$(call over,$(DEEPSPEED))
	@DS_BUILD_OPS=0 $(subst $(BIN),$(DEEPSPEED)/bin,$(PIP)) --no-deps deepspeed einops hjson msgpack ninja py-cpuinfo
	@touch $@

$(NODE_MODULES): labextension/package-lock.json
	@if $(HAVE_NPM); then $(NPM) ci --silent && touch node_modules/.package-lock.json; fi

# JupyterLab looks into the environment; a copy, because pip may delete there what it finds.
EXTENSION := $(VENV)/share/jupyter/labextensions/jupyter-torchdist
$(FRONT): $(FRONT_SOURCES) $(NODE_MODULES)
	@echo 'Building the front end'
	@$(NPM) run --silent build
	@rm -rf $(EXTENSION) && mkdir -p $(dir $(EXTENSION))
	@cp -r jupyter_torchdist/labextension $(EXTENSION) && cp labextension/install.json $(EXTENSION)
	@touch $@
