#!/usr/bin/env bash
# Prints the path of a folder with `nft`, and its libraries beside it. Taken from the system, or unpacked from the
# distribution's packages into the folder given, without installing anything and without rights. Their versions go to stderr.
#
#   tests/nat/setup.sh FOLDER
set -euo pipefail
folder=$1
if tool=$(command -v nft); then
    dirname "$tool"
    exit
fi
if [ ! -x "$folder/root/usr/sbin/nft" ]; then
    rm -rf "$folder"
    mkdir -p "$folder/debs" "$folder/lists/partial" "$folder/cache/archives/partial"
    cd "$folder/debs"
    # The machine's own lists may be so old that their files are gone.
    apt() { timeout 1800 apt-get -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache" "$@"; }
    # Quiet unless it fails: the last line of this script is its answer.
    { apt update && apt download nftables libnftables1 libnftnl11 libjansson4 libxtables12 libmnl0 libedit2 libbsd0; } >log 2>&1 ||
        { cat log >&2; exit 1; }
    for package in ./*.deb; do echo "nat: ${package#./}" >&2; done
    for package in ./*.deb; do dpkg -x "$package" "$folder/root"; done
    # Called by its path it finds its libraries through this one.
    mkdir -p "$folder/bin"
    cat >"$folder/bin/nft" <<EOF
#!/bin/sh
LD_LIBRARY_PATH=$(dirname "$folder"/root/usr/lib/*/libnftables.so.1) exec "$folder/root/usr/sbin/nft" "\$@"
EOF
    chmod +x "$folder/bin/nft"
fi
echo "$folder/bin"
