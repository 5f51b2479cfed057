#!/usr/bin/env bash
# Installs what the tests need and runs them.
#
#   bash scripts/test.sh [--oracle] [pytest arguments]
#
# --oracle also installs torch and transformers, whose own code the parity tests compare with (skipped without it).
set -euo pipefail
cd "$(dirname "$0")/.."
extras=test,train,notebook
if [ "${1:-}" = --oracle ]; then
  shift
  extras=test,train,notebook,oracle
fi
venv=${VENV:-.venv}
bash scripts/setup.sh "$venv" "$extras"
exec "$venv/bin/python" -m pytest "$@"
