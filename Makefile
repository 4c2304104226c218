# make test    lint, and the unit, distributed and contract tests and the roads on the newest DiffSynth but the slow ones
# make slow    the slow ones; the contract kit and what is marked sweep are left to make matrix
# make chromium  a browser for the tests of the monitor's page, where there is none
# make newest  the newest row of each framework with the newest of what it depends on
# make demo    train a LoRA on a real clip, unsplit and split
# make matrix  the contract tests of every tox row of compat_matrix.yaml, and all sweeps; ROW=diffsynth-2.0.0 for one
# make record  one row, whose environment then goes into compat_matrix.yaml: make record ROW=diffsynth-2.0.0
# make ci      make test, make slow, then the rows labelled ci without their slow tests
# make gpu-tests  every test that needs a GPU, with the Python that PYTHON names, and the record of them
# make mutants  breaks a room's code in small ways and lists what its tests do not see: make mutants ROOM=offload
# make lint    ruff, mypy, the arrows between the packages
# make dist    wheel and sdist in dist/, each installed and used on the Pythons that are promised; PYTHONS="3.10 3.13"
# make docs    write what documents take from the code and the records, then build the site in build/site, strictly
# make docs-serve  the site at http://127.0.0.1:8000, built again at each change
PYTHON ?= python3
TOOLS := .venv/tools
DEMO := .venv/demo
SITE := .venv/site

# make would hand it on to every command as the list of folders in which programs are found.
ifeq ($(origin PATH),command line)
$(error PATH is the variable of the shell: name what is mutated by ROOM, as in `make mutants ROOM=$(PATH)`)
endif

.PHONY: test slow chromium newest gpu-tests demo matrix record mutants ci lint dist docs docs-serve clean

$(TOOLS)/ready: pyproject.toml
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install -q --disable-pip-version-check uv
	$(TOOLS)/bin/uv pip install -q -p $(TOOLS)/bin/python "tox>=4.24" "tox-uv>=1.16" "PyYAML>=6"
	touch $@

$(DEMO)/ready: $(TOOLS)/ready pyproject.toml compat_matrix.yaml
	$(PYTHON) -m venv $(DEMO)
	$(TOOLS)/bin/uv pip install -q -p $(DEMO)/bin/python -e ".[demo]"
	touch $@

test: $(TOOLS)/ready
	$(TOOLS)/bin/tox run -e lint,test

# In the environment of `make test`; of two -m the later counts.
slow: $(TOOLS)/ready
	$(TOOLS)/bin/tox run -e test -- -m "slow and not kit and not sweep"

# Of the system as root, else playwright's own in the user's cache.
chromium: $(TOOLS)/ready
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
	{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || $(TOOLS)/bin/uvx playwright install chromium

newest: $(TOOLS)/ready
	$(TOOLS)/bin/tox run --newest -m newest -- -m "not slow and not kit"

# A machine with GPUs brings its own torch and framework.
gpu-tests:
	$(PYTHON) tests/gpu_tests.py

demo: $(DEMO)/ready
	$(DEMO)/bin/wanshim demo

matrix: $(TOOLS)/ready
	$(TOOLS)/bin/python tests/matrix.py $(ROW)

record: $(TOOLS)/ready
	$(TOOLS)/bin/python tests/matrix.py --record $(ROW)

# tests/mutants/rooms.toml names the rooms. SAMPLE=0 takes every mutant.
mutants: $(TOOLS)/ready
	$(TOOLS)/bin/tox run -e mutants -- $(ROOM) $(if $(SAMPLE),--sample $(SAMPLE))

ci: test slow
	$(TOOLS)/bin/tox run -m matrix-ci -- -m "not slow"

lint: $(TOOLS)/ready
	$(TOOLS)/bin/tox run -e lint

dist: $(TOOLS)/ready
	$(TOOLS)/bin/uv run -q --no-project --with "build[uv]" --with twine python tests/dist.py $(PYTHONS)

$(SITE)/ready: $(TOOLS)/ready pyproject.toml
	$(PYTHON) -m venv $(SITE)
	$(TOOLS)/bin/uv pip install -q -p $(SITE)/bin/python --group docs -e .
	touch $@

docs: $(SITE)/ready
	$(SITE)/bin/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --strict

docs-serve: $(SITE)/ready
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs serve --dev-addr 127.0.0.1:8000

clean:
	rm -rf .venv .tox dist build demo-output
