#!/bin/bash
# Builds the Dockerfile and runs one server and two workers from it, without a registry and without Docker: the base is
# Debian's, made by debootstrap, in the place of Python's slim image. Needs root, buildah and debootstrap (Debian has
# both), some 6 GB below DIR, and pip's indexes.
#
#   deploy/test_image.sh [DIR]                                                    make test-image
#   PIP_CONF=pip.conf WHEELS="/opt/wheels" deploy/test_image.sh [DIR]             pip's settings, and folders that they name
set -euo pipefail
dir=$(realpath -m "${1:-build/image}")
root=$(dirname "$(dirname "$(realpath "$0")")")
wheels=${WHEELS:-}
suite=${SUITE:-bookworm}
version=${PYTHON:-3.11} # of the suite
mkdir -p "$dir"
builds() { buildah --root "$dir/storage" --runroot "$dir/run" --storage-driver "${STORAGE_DRIVER:-vfs}" "$@"; }

if ! builds inspect "docker.io/library/python:$version-slim" >/dev/null 2>&1; then
    base=$(builds from scratch)
    place=$(builds mount "$base")
    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates "$suite" "$place"
    ln -sf python3 "$place/usr/bin/python"
    rm -f "$place"/usr/lib/python3*/EXTERNALLY-MANAGED # as Python's own image, it is for one program
    builds umount "$base" >/dev/null
    builds commit --rm "$base" "docker.io/library/python:$version-slim"
fi

options=()
[ -n "${PIP_CONF:-}" ] && options+=(--volume "$(realpath "$PIP_CONF"):/etc/pip.conf:ro")
for folder in $wheels; do options+=(--volume "$folder:$folder:ro"); done
builds bud --pull-never --isolation chroot --layers=false --network host "${options[@]}" \
    --build-arg "PYTHON=$version" ${TORCH_INDEX:+--build-arg "TORCH_INDEX=$TORCH_INDEX"} -t torchfleet:test "$root"

container=$(builds from --pull-never torchfleet:test)
trap 'builds rm "$container" >/dev/null' EXIT
builds run --isolation chroot --network host "$container" -- \
    python -m torchfleet.launch --server_num 1 --worker_num 2 --log_dir /tmp/log \
    /opt/torchfleet/examples/wide_deep/train.py --rows 20000
echo "one server and two workers have run from the image"
