#!/usr/bin/env bash
# Makes a virtual environment with this project and pinned versions of everything else.
#
#   bash scripts/setup.sh VENV [EXTRAS]       e.g. bash scripts/setup.sh .venv test,plot
#
# PYTHON names the interpreter (default: the newest of python3.12, python3.11, python3 that works).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
extras=${2:+[$2]}

if [ -z "${PYTHON:-}" ]; then
  for candidate in python3.12 python3.11 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      PYTHON=$candidate
      break
    fi
  done
fi
if ! "${PYTHON:-none}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "specjax needs Python 3.11 or newer; got '${PYTHON:-none on PATH}'. Set PYTHON=/path/to/python3.11" >&2
  exit 1
fi

minor=$("$PYTHON" -c 'import sys; print(sys.version_info.minor)')
constraints=scripts/constraints/py311.txt
[ "$minor" -le 11 ] || constraints=scripts/constraints/py312.txt

[ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
echo "installing into $venv (Python 3.$minor, versions of $constraints) ..."
# compiling every file of every package takes as long as fetching them; Python compiles what it imports
"$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check -c "$constraints" -e ".$extras" 2>&1 |
  { grep -v 'is ignored: it is neither a file nor a directory' || true; }
