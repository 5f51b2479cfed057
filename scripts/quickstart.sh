#!/usr/bin/env bash
# From nothing to a measured speed-up: environment, demonstration model, real prompts plain and speculatively.
#
#   bash scripts/quickstart.sh                PYTHON=... chooses the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh .venv
exec .venv/bin/python scripts/quickstart.py
