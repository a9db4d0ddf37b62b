#!/usr/bin/env bash
# Makes sure that the packages Holdfast is built from and runs on are there. Debian 12, as root or with sudo.
#
# Does nothing, and does not touch the network, when all of them are installed. When one is missing and cannot be
# installed it says which, changes nothing and exits with 64.
#
#   --tests                    those that only tests need, too
#   --bench                    those that only benchmarks need, too
#   HOLDFAST_SKIP_PACKAGES=1   do not look: on another distribution, with everything installed by hand
#   HOLDFAST_OS_RELEASE=FILE   read FILE in place of /etc/os-release
set -euo pipefail

packages=(
  cmake ninja-build g++ pkg-config python3
  libopenmpi-dev openmpi-bin
  libprotobuf-dev protobuf-compiler
  libgtest-dev libbenchmark-dev
  libfmt-dev nlohmann-json3-dev libxxhash-dev libcli11-dev zlib1g-dev
  libasio-dev libssl-dev libhwloc-dev libhwy-dev
  iproute2 iptables
  libtorch-dev libopenblas0-pthread
  dataset-fashion-mnist
)
cmake_wanted=3.25
# What only tests are worth. promtool, which tests the alert rules, comes with a server and its web pages, 330 MB; Clang's
# libFuzzer feeds what reads files; Gloo is what an example trains over; SimGrid stands for thousands of ranks, in benchmarks too.
case ${1:-} in
  --tests) packages+=(prometheus clang libclang-rt-dev libgloo-dev libsimgrid-dev) ;;
  --bench) packages+=(libsimgrid-dev python3-matplotlib) ;;
esac

installed() {
  [[ $(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

# "3.25.1 is at least 3.25", by version order.
at_least() {
  [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]
}

# Sets `missing` to what has to be installed, `outdated` to what is there but too old.
look() {
  missing=()
  outdated=()
  local package version
  for package in "${packages[@]}"; do
    installed "$package" || missing+=("$package")
  done
  # The cmake that is run may be another than the package's.
  if [[ " ${missing[*]} " != *" cmake "* ]]; then
    version=$(cmake --version 2>/dev/null | sed -n 's/^cmake version //p') || version=
    at_least "${version:-0}" "$cmake_wanted" ||
      outdated+=("cmake $cmake_wanted or newer (found: $(command -v cmake || echo none), version ${version:-unknown})")
  fi
}

refuse() {
  {
    echo "holdfast: $1"
    if ((${#missing[@]})); then
      echo "holdfast: missing packages, by their Debian 12 names:"
      printf '  %s\n' "${missing[@]}"
    fi
    if ((${#outdated[@]})); then
      echo "holdfast: too old:"
      printf '  %s\n' "${outdated[@]}"
    fi
    echo "holdfast: ${2:-Nothing was built.}"
  } >&2
  exit 64
}

as_root() {
  if [[ $(id -u) == 0 ]]; then
    "$@"
  else
    sudo -- "$@"
  fi
}

# With sudo that asks for a password, only where somebody can type one.
can_be_root() {
  [[ $(id -u) == 0 ]] || sudo -n true 2>/dev/null || { [[ -t 0 ]] && sudo -v; }
}

if [[ ${HOLDFAST_SKIP_PACKAGES:-0} == 1 ]]; then
  echo "packages: not looked at (HOLDFAST_SKIP_PACKAGES=1)"
  exit 0
fi

look
if ((${#missing[@]} + ${#outdated[@]} == 0)); then
  echo "packages: all ${#packages[@]} are installed"
  exit 0
fi

os_release=${HOLDFAST_OS_RELEASE:-/etc/os-release}
# shellcheck disable=SC1090
system=$(ID='' VERSION_ID='' && . "$os_release" 2>/dev/null && echo "$ID $VERSION_ID") || system=unknown
if [[ $system != "debian 12" ]]; then
  refuse "packages are installed on Debian 12 only, and this is: $system" \
    "Nothing was built. Install them by hand, then run this again with HOLDFAST_SKIP_PACKAGES=1."
fi
if ((${#missing[@]} == 0)); then
  refuse "a newer program is needed than the first one in PATH"
fi
if ! can_be_root; then
  refuse "installing packages needs root or sudo" "Nothing was built. As root: apt-get install ${missing[*]}"
fi

echo "packages: installing ${missing[*]} (this can take some minutes)"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@" >>"$log" 2>&1
}
# An update that failed for one archive may have reached the one that matters: look() has the last word.
apt update || true
apt install -y --no-install-recommends "${missing[@]}" || true
look
if ((${#missing[@]} + ${#outdated[@]})); then
  tail -n 20 "$log" >&2
  refuse "apt-get could not install everything (its last lines are above)"
fi
echo "packages: all ${#packages[@]} are installed"
