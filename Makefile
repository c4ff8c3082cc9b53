# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# A test process has one thread: the tests run in parallel, and small matrices gain nothing from more.
TEST_ENV := OMP_NUM_THREADS=1

.PHONY: demo quick test check format slow page browser docs wheel clean

demo: .venv/.demo
	@$(BIN)/looptim demo

# What a change breaks first, in under 90 seconds: no page of the docs, no test that starts processes or trains for long.
quick: .venv/.installed
	@$(TEST_ENV) $(BIN)/python -m pytest -n 2 -m "not slow and not long" tests src README.md

test: check
	@echo "== tests (a part of them in 90 seconds: make quick; the slow ones: make slow)"
	@$(TEST_ENV) $(BIN)/python -m pytest -n 2

check: .venv/.installed
	@echo "== ruff, pyright, import-linter"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	@$(BIN)/lint-imports > .venv/imports.log || { cat .venv/imports.log; exit 1; }

format: .venv/.installed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

slow: .venv/.installed
	@$(TEST_ENV) $(BIN)/python -m pytest -m slow

# The pages' templates from their TypeScript source; what it builds is committed, so that only who changes them needs node.
page:
	@cd page && npm ci --silent --no-audit --no-fund && npm run --silent build

# The pages are tested in a real browser; where none can be installed those tests are skipped, and say so.
browser:
	@command -v chromium > /dev/null || (apt-get update && apt-get install -y --no-install-recommends chromium) > /dev/null 2>&1 \
		|| echo "== chromium cannot be installed here: the tests of pages will be skipped"

# The docs as a site; a link that leads nowhere fails. Their code blocks are executed by `make test`.
docs: .venv/.installed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --site-dir site && echo "site/index.html"

# The wheel, after it has worked in an empty folder, alone and with what its extra brings.
wheel: .venv/.installed
	@$(TEST_ENV) $(BIN)/python -m pytest -m slow tests/test_wheel.py
	@$(BIN)/python -m build --wheel --outdir dist . > /dev/null && ls dist

clean:
	rm -rf .venv

# torch comes first and alone: anything else that asks for it would bring the newest build instead of the pinned one.
# Nothing is compiled ahead: torch alone has thousands of files, of which few are ever imported.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# What the demo needs takes a minute; the rest, two more.
.venv/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("looptim needs Python 3.11 or newer; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "== making .venv and installing what constraints.txt pins (a minute or more, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) torch
	@$(PIP) -e '.[plot,hf]'
	@touch $@

.venv/.installed: .venv/.demo
	@echo "== installing what all verbs, the tests and the docs need (some minutes, once)"
	@$(PIP) -e '.[all,dev,docs]'
	@touch $@
