# Each target first sets up .venv when that is needed. Works with GNU make 3.81 and later.

.DEFAULT_GOAL := help
STEPS := 0 1 2 3 4 5 6
BIN := .venv/bin
READY := .venv/set-up-done
UNFINISHED := .venv.unfinished
TORCHRUN := $(BIN)/torchrun --standalone --nproc-per-node
PYTEST = $(BIN)/python -m pytest --durations=10 $(if $(STEP),--step $(STEP))

# Without this, torchrun prints a notice about the number of threads. The programs set that themselves (--threads), and
# the tests check that they do, so nothing else gets it.
OMP_NUM_THREADS ?= 1
train step2 step3 step4 step5 step6: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)

export REQUIRE
# torchrun's store looks up the name of each address that connects: 5 s now and then where no name server answers.
RES_OPTIONS ?= timeout:1 attempts:1
export RES_OPTIONS

# Checked while the Makefile is read, so that a mistake is one line and nothing has been installed by then.
ifneq ($(filter check check-all,$(MAKECMDGOALS)),)
override STEP := $(strip $(STEP))
ifneq ($(STEP),)
ifneq ($(words $(STEP)) $(filter $(STEPS),$(STEP)),1 $(STEP))
$(error STEP=$(STEP) is not a step; choose one of $(STEPS))
endif
endif
endif

.PHONY: help setup train bench notebooks check check-all step0 step1 step2 step3 step4 step5 step6 lint FORCE

help: ## lists these commands
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1 - \2/p' Makefile | awk -F ' - ' '{ printf "%-16s %s\n", $$1, $$2 }'
	@echo
	@echo "Options: STEP=3 (check one step only), REQUIRE=gpu,root,browser (what cannot run counts as failed),"
	@echo "ARGS='--num-iterations 10' (added to the command), PYTHON=python3.12 and PIP_ARGS='...' (for the set-up)"

setup: $(READY) ## makes .venv with everything in it, once; the others call it
	@echo "Ready. Before a bare python or torchrun: source .venv/bin/activate"

train: $(READY) ## trains on handwritten digits with 4 ranks under 1F1B
	@mkdir -p out
	$(TORCHRUN) 4 -m step6_schedules.train --timeline out/timeline.png --result out/result.json $(ARGS)

check: $(READY) ## runs the tests and prints the scoreboard (minutes)
	$(PYTEST) -m "not slow" $(ARGS)

check-all: $(READY) ## the slow tests and the full matrices too
	$(PYTEST) $(ARGS)

bench: $(READY) ## measures what it all costs, an hour or less: out/bench/RESULTS.md
	$(BIN)/python -m step6_schedules.bench $(ARGS)

notebooks: $(READY) ## executes the walkthroughs, and stores what they print where it has changed
	$(BIN)/python -m notebooks.refresh $(ARGS)

step0: $(READY) ## the whole model in one process
	$(BIN)/python -m step0_monolith $(ARGS)

step1: $(READY) ## the model cut into stages, run by hand
	$(BIN)/python -m step1_partition $(ARGS)

step2: $(READY) ## messages between ranks
	$(TORCHRUN) 4 -m step2_comms $(ARGS)

step3: $(READY) ## one activation there, one gradient back
	$(TORCHRUN) 2 -m step3_pingpong $(ARGS)

step4: $(READY) ## each rank builds its own stage
	$(TORCHRUN) 4 -m step4_sharded $(ARGS)

step5: $(READY) ## training from a table of actions
	$(TORCHRUN) 4 -m step5_orchestrator $(ARGS)

step6: $(READY) ## 1F1B, or any schedule or table: ARGS="--schedule zb-h1"
	$(TORCHRUN) 4 -m step6_schedules --schedule 1f1b --emulate F=5,B=10 --num-iterations 20 --timeline timeline.png $(ARGS)

lint: $(READY) ## checks style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# Prints the first Python that will do, or "error:" and the reason.
CANDIDATES = $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3.10 python3)
FIND_PYTHON = why="$(if $(PYTHON),$(PYTHON) does not run,found none; install it, or say PYTHON=path)"; \
	for python in $(CANDIDATES); do \
	    version=`"$$python" -c "import sys; print('%d.%d' % sys.version_info[:2])" 2>/dev/null` || continue; \
	    case "$$version" in \
	        (3.[1-9][0-9]) ;; \
	        (*) why="found $$version; install a newer one, or say PYTHON=path"; continue;; \
	    esac; \
	    if "$$python" -c "import venv, ensurepip" 2>/dev/null; then echo "$$python"; exit; fi; \
	    novenv="$$python has no venv: install it (Debian and Ubuntu: apt install python3-venv), or say PYTHON=path"; \
	done; \
	echo "error: $${novenv:-Python 3.10 or newer is needed: $$why}"

# Where .venv was made and what pip was told then. In a folder that has moved its scripts do not run; and with other
# PIP_ARGS (for the CPU instead of the CUDA build of torch) pip would find the build that is there good enough. Both
# start from an empty .venv.
MADE_IN := $(shell sed -n 1p $(READY) 2>/dev/null)
TOLD := $(strip $(shell sed -n 2p $(READY) 2>/dev/null))
TELL := $(if $(strip $(PIP_ARGS)),$(strip $(PIP_ARGS)),$(TOLD))
quoted = '$(subst ','\'',$(1))'
ifneq ($(CURDIR) $(TELL),$(MADE_IN) $(TOLD))
$(READY): FORCE
AFRESH := -f $(READY)
else
AFRESH := -f $(UNFINISHED)
endif

# A set-up that did not reach its end is done again from the start. A .venv made by hand is filled, not replaced.
$(READY): requirements.txt
	$(eval FOUND := $$(shell $$(FIND_PYTHON)))
	$(if $(filter error:,$(firstword $(FOUND))),$(error $(wordlist 2,99,$(FOUND))))
	@set -e; \
	if [ -f $(UNFINISHED) ] || [ $(AFRESH) ] \
	    || ! $(BIN)/python -c "import sys, pip; sys.exit(sys.version_info < (3, 10))" 2>/dev/null; \
	then \
	    echo "Making .venv with $(FOUND)"; \
	    touch $(UNFINISHED); \
	    "$(FOUND)" -m venv --clear .venv; \
	fi; \
	touch $(UNFINISHED); \
	$(BIN)/python -m pip install --disable-pip-version-check $(TELL) -r requirements.txt; \
	$(BIN)/python -c "$$REGISTER"; \
	printf '%s\n' $(call quoted,$(CURDIR)) $(call quoted,$(TELL)) > $(READY); \
	rm $(UNFINISHED)

# The repository's folder on the path of .venv, so that running a file by its path works from anywhere. Relative,
# so that it is plain ASCII whatever the folder is called.
define REGISTER
import os, sysconfig
folder = sysconfig.get_path('purelib')
with open(os.path.join(folder, 'pipeline_course.pth'), 'w') as file:
    file.write(os.path.relpath(os.getcwd(), folder) + '\n')
endef
export REGISTER
