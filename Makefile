# Two commands do everything on a fresh machine with Python >= 3.11 and pip:
#   make demo   install, then run the main job end to end on an embedded network
#   make test   install, then run every check the project has
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check install clean

demo: install
	$(BIN)/ompq demo

test: install
	scripts/check
	scripts/package --iterations 2 --quiet

install: .venv/installed

.venv/installed: pyproject.toml scripts/install
	PYTHON=$(PYTHON) scripts/install
	touch $@

clean:
	rm -rf .venv .coverage .pytest_cache .mypy_cache .ruff_cache
