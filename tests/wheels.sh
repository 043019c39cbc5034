#!/usr/bin/env bash
# Wheels made with and without a C++ compiler, installed where there is none: `make wheels`.
# PYTHON is one that has hatchling.
set -euo pipefail
cd "$(dirname "$0")/.."
unset CXX CALRT_HOME
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=$work/venv

fail() {
    echo "wheels: $*" >&2
    exit 1
}

without_compiler() { # no program but those of the clean environment
    PATH=$venv/bin "$@"
}

caltrio() { # as installed, from a folder that is not the repository
    (cd "$work" && without_compiler "$venv/bin/caltrio" "$@")
}

wheel() { # wheel FOLDER SOURCE: builds it in isolation; sets $made
    "$venv/bin/pip" wheel --quiet --no-deps --wheel-dir "$1" "$2"
    made=$(echo "$1"/caltrio-*.whl)
    echo "built ${made##*/} of ${2##*/}"
}

libraries() { # the native libraries in $made, a space after each
    "$PYTHON" -m zipfile -l "$made" | grep -o 'hw/_native/[^ ]*' | sort | tr '\n' ' ' || true
}

reason() { # why device $1 cannot be used
    caltrio devices --json | "$PYTHON" -c \
        "import json, sys; print({d['name']: d['unavailable'] for d in json.load(sys.stdin)}['$1'])"
}

expect() { # expect WHAT WANTED FOUND
    [[ $3 == $2 ]] || fail "$1: expected: $2; found: $3"
    echo "ok: $1: $3"
}

install() {
    without_compiler "$venv/bin/pip" install --quiet --force-reinstall --no-deps "$made"
}

golden() {
    caltrio golden check --device emulator --prompts 2 --semantics full-duplex --timing quick
}

both="hw/_native/libcalrt_emulator.so hw/_native/libcaltrio_emulator.so "
no_sdk="not built: set CALRT_HOME to the CalRT SDK's folder, then *run 'python -m hw.build'"
install_and_run="install a C++ compiler (g++ or clang++) and run 'python -m hw.build'"

"$PYTHON" -m venv "$venv"
"$PYTHON" -m hatchling build -t sdist -d "$work/sdist" >"$work/log" 2>&1
sdist=$(echo "$work"/sdist/caltrio-*.tar.gz)
expect "libraries in the sdist" "" "$(tar -tf "$sdist" | grep '\.so$' || true)"

wheel "$work/from-sdist" "$sdist"
expect "tag" "caltrio-*-py3-none-*_*.whl" "${made##*/}"
expect "libraries" "$both" "$(libraries)"
without_compiler "$venv/bin/pip" install --quiet --constraint constraints.txt "$made"
expect "emulator" None "$(reason emulator)"
expect "hw" "$no_sdk" "$(reason hw)"
golden

wheel "$work/from-tree" . # which now has libraries, if it had none
expect "libraries" "$both" "$(libraries)"

without_compiler wheel "$work/pure" .
expect "tag" "caltrio-*-py3-none-any.whl" "${made##*/}"
expect "libraries" "" "$(libraries)"
without_compiler "$venv/bin/pip" uninstall --quiet --yes caltrio
install
expect "emulator" "not built: $install_and_run" "$(reason emulator)"
expect "hw" "$no_sdk" "$(reason hw)"
code=0
golden 2>"$work/err" || code=$?
expect "golden without the device: exit code" 2 $code
expect "golden without the device: lines" 1 "$(wc -l <"$work/err")"
cat "$work/err"

(cd "$work" && "$venv/bin/python" -m hw.build)
expect "emulator, compiled later" None "$(reason emulator)"
golden
