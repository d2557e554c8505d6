#!/usr/bin/env bash
# Free-threaded CPython: builds the interpreter, installs the package there, and runs what the suite has on threads
# again and again, without the interpreter's lock.
#
#   make free-threaded [ROUNDS=20] [FOLDER=build/free-threaded] [VERSION=3.13]
#
# In the environment: FREE_PYTHON, an interpreter that is there already; SOURCE, a folder with CPython's source, else it
# is Debian's source package (SUITE=trixie has 3.13); TORCH, a requirement that has a wheel for the interpreter.
# Options for pytest follow: `tests/campaigns/free_threaded.sh -x -k nested`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=$PWD
folder=$(realpath -m "${FOLDER:-build/free-threaded}") rounds=${ROUNDS:-20} version=${VERSION:-3.13}
python=${FREE_PYTHON:-$folder/python/bin/python$version}
mkdir -p "$folder"

debian_source() { # Into $folder/source, by an apt that knows one suite and leaves the machine's own lists alone.
    local apt=$folder/apt uri
    uri=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | head -n 1)
    mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$folder/source"
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri ${SUITE:-trixie} main" >"$apt/sources"
    local options=(-q -o Dir::Etc::sourcelist="$apt/sources" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$apt/lists"
        -o Dir::Cache="$apt" -o APT::Sandbox::User=)
    apt-get "${options[@]}" update
    (cd "$apt" && apt-get "${options[@]}" --download-only source "python$version")
    tar -xf "$apt"/python"$version"_*.orig.tar.* --strip-components=1 -C "$folder/source"
}

if [ ! -x "$python" ]; then
    [ -n "${SOURCE:-}" ] || { debian_source && SOURCE=$folder/source; }
    cd "$SOURCE"
    ./configure --disable-gil --prefix="$folder/python"
    make -j"${JOBS:-2}"
    make install
    cd "$here"
fi

bin=$folder/venv/bin
if [ ! -e "$folder/installed" ]; then
    "$python" -m venv "$folder/venv"
    pip() { "$bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: "$@"; }
    pip "${TORCH:-torch==2.12.*}"
    # One by one, since not each has a wheel: without uvloop, loops are asyncio's; what needs another one is skipped.
    for need in numpy pydantic annotated-types prometheus-client jinja2 "cloudpickle>=3" rich httpx pyyaml uvloop \
        "pytest>=8.4" "pytest-asyncio>=1.1" "pytest-timeout>=2.3" "pytest-xdist>=3.6" "hypothesis<6.140"; do
        pip "$need" || echo "no wheel for this interpreter: $need"
    done
    "$bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --editable .
    touch "$folder/installed"
fi

# An extension that does not say that it works without the lock would switch it on again, with a warning: 0 forbids it.
export PYTHON_GIL=0
"$bin/python" -c 'import sys, torch, asyncpipe; print(sys.version, torch.__version__, "lock:", sys._is_gil_enabled())'
on_threads=(tests/runtime tests/core/engine)
for name in closing dropin_failure dropin_order dropin_stopped dropin_threads failure hanging leaks loops nested pool \
    programs_with_gates random_draws steps update_undo; do
    on_threads+=("tests/pipeline/test_$name.py")
done
failed=0
for round in $(seq "$rounds"); do
    echo "round $round of $rounds"
    "$bin/python" -X faulthandler -m pytest -q -p no:cacheprovider "${on_threads[@]}" "$@" || failed=$((failed + 1))
done
echo "$((rounds - failed)) of $rounds rounds passed without the interpreter's lock"
[ "$failed" = 0 ]
