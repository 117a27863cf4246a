#!/usr/bin/env bash
# A newer Mesa beside the system's: its software device has cooperative matrices, which that of Debian 12 and 13 has not.
#
#     tests/gpu/newer_mesa.sh FOLDER                 fetches it into FOLDER, if it is not there yet
#     FOLDER/run PROGRAM [ARGUMENT…]                 runs a program with it: the loader, the driver, the validation layers
#     FOLDER/run spirv-val …                         or one of its own
#
# Packages come from the Debian mirror that apt has, of the release that COLICONV_MESA_RELEASE names (default: testing), checked by
# apt as always; nothing is installed, and it needs no root. Exit 3 where they are not to be had.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
release=${COLICONV_MESA_RELEASE:-testing}
[ -x "$folder/run" ] && exit 0

mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m 1 '/debian/$') || {
    echo "no Debian mirror is known to apt" >&2
    exit 3
}
mkdir -p "$folder"/apt/lists/partial "$folder"/apt/cache/archives/partial
: >"$folder/apt/status"
echo "deb $mirror $release main" >"$folder/apt/sources.list"
own_apt() {
    apt-get -qq -o "Dir::State::Lists=$folder/apt/lists" -o "Dir::State::status=$folder/apt/status" \
        -o "Dir::Cache=$folder/apt/cache" -o "Dir::Etc::SourceList=$folder/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o APT::Install-Recommends=false -o APT::Sandbox::User=root -o Debug::NoLocking=1 "$@"
}
own_apt update && own_apt -y --download-only install mesa-vulkan-drivers libvulkan1 vulkan-validationlayers spirv-tools libstdc++6 || {
    echo "Mesa of Debian $release is not to be had" >&2
    exit 3
}
mkdir -p "$folder/root"
for package in "$folder"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$folder/root"; done
rm -r "$folder/apt"

libraries=$(dirname "$(find "$folder/root" -name libvulkan_lvp.so | head -n 1)")
loader=$(find "$folder/root" -name 'ld-linux-*.so.*' | head -n 1)
cat >"$folder/run" <<SCRIPT
#!/bin/sh
export VK_DRIVER_FILES=$folder/root/usr/share/vulkan/icd.d/lvp_icd.json VK_LAYER_PATH=$folder/root/usr/share/vulkan/explicit_layer.d
program=\$1
shift
[ -e "\$program" ] || program=$folder/root/usr/bin/\$program
exec $loader --library-path $libraries "\$program" "\$@"
SCRIPT
chmod +x "$folder/run"
