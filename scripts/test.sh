#!/usr/bin/env bash
# Installs what the tests need and runs them.
#
#   bash scripts/test.sh [--oracle] [pytest arguments]
#
# --oracle also installs torch and transformers, whose own code the parity tests compare with (skipped without it).
# VENV names another environment than .venv; one that already has pytest is used as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=test,train,notebook
if [ "${1:-}" = --oracle ]; then
  shift
  extras=test,train,notebook,oracle
fi
if [ -z "${VENV:-}" ] || [ ! -x "$VENV/bin/pytest" ]; then
  bash scripts/setup.sh "${VENV:-.venv}" "$extras"
fi
exec "${VENV:-.venv}/bin/python" -m pytest "$@"
