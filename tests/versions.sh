#!/usr/bin/env bash
# Quick tests with the oldest and with the newest versions that pyproject.toml allows, each in an environment of its own.
#
#   tests/versions.sh FOLDER [ARGUMENT OF PYTEST...]
#
# FOLDER takes the environments, which are used again. PYTHONS names the interpreters (default: python3), TORCH the build
# of torch for all of them. Prints one line for each environment.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:?usage: tests/versions.sh FOLDER [ARGUMENT OF PYTEST...]}")
shift
[ $# -gt 0 ] || set -- -n 2 --dist worksteal
mkdir -p "$folder"

requirements() { # oldest|newest: what the package and its tests require, but torch
    python3 - "$1" <<'END'
import re, sys, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for text in dict.fromkeys(project["dependencies"] + project["optional-dependencies"]["test"]):
    if not re.match(r"torch\b", text):
        print(re.sub(r">=([\d.]+).*", r"==\1", text) if sys.argv[1] == "oldest" else text)
END
}

lines=()
failed=0
for python in ${PYTHONS:-python3}; do
    for versions in oldest newest; do
        environment="$folder/$(basename "$python")-$versions"
        requirements "$versions" >"$environment.txt"
        [ -d "$environment" ] || "$python" -m venv "$environment"
        bin="$environment/bin"
        "$bin/python" -m pip install --quiet --upgrade "${TORCH:-torch==2.13.0}" -r "$environment.txt"
        "$bin/python" -m pip install --quiet --no-deps -e .
        status=0
        PATH="$bin:$PATH" "$bin/python" -m pytest "$@" 2>&1 | tee "$environment.log" || status=$?
        [ "$status" -eq 0 ] || failed=1
        line=$("$bin/python" -c '
import platform
from importlib.metadata import version

names = ("torch", "lightning", "torchmetrics")
print(f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names), sep=", ")
')
        lines+=("$line: $(grep . "$environment.log" | tail -n 1)")
    done
done
printf '%s\n' "${lines[@]}"
exit "$failed"
