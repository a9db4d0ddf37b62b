#!/usr/bin/env bash
# Several hosts on one machine: runs Open MPI jobs over real TCP between network namespaces.
#
#   launch/cluster.sh up --nodes K [--loss 0.5%] [--delay 1ms]   make hosts node0 ... nodeK-1, K at most 250
#   launch/cluster.sh run -np N [MPIRUN OPTION...] PROGRAM...    run a job; N ranks, block by block over the hosts
#   launch/cluster.sh cut NODE                                   from now on no packet reaches or leaves NODE
#   launch/cluster.sh heal NODE                                  until here
#   launch/cluster.sh exec NODE COMMAND...                       run a command on a host: exec node1 ip -s link
#   launch/cluster.sh down                                       end what runs there, and remove all of it
#
# Before any command: --name NAME, of letters and digits, for several clusters at once (default: default).
#
# A host has a hostname, a loopback interface and an address on the cluster's own switch, and nothing else: it reaches
# neither this machine's network nor another cluster. All hosts share this machine's processes and files.
# --loss is the chance of each packet to get lost on its way to a host. --delay needs a kernel with netem.
# mpirun runs on node0. It learns of a cut from TCP: within 90 s when all is quiet (keepalives, MCA parameters
# oob_tcp_keepalive_*), otherwise when packets have stayed without answer for 102 s (net.ipv4.tcp_retries2 of each
# host). MPI itself gives up then too. A guard should have spoken before: its deadline belongs below.
#
# Needs root, iproute2, util-linux and Open MPI; for --loss iptables, on a kernel without netem. The state is a folder
# in XDG_RUNTIME_DIR, or in /tmp.
#
# Exit status: of `run` mpirun's, of `exec` the command's. Otherwise 0, 64 for wrong usage or something missing, and
# another one for what failed; `up` that fails or is interrupted leaves nothing behind.
set -euo pipefail
shopt -s inherit_errexit nullglob

subnet=10.77.0.0/24

# MCA parameters of every job. Ranks of one host talk through shared memory, ranks of different hosts through TCP: Open
# MPI tells hosts apart by their daemons.
settings() {
  echo "pml=ob1 btl=self,vader,tcp btl_vader_single_copy_mechanism=none"
  echo "btl_tcp_if_include=$subnet oob_tcp_if_include=$subnet"
  # A host that is silent for time + intvl * probes seconds is lost to mpirun, after the deadline of most guards. The
  # default is eight minutes.
  echo "oob_tcp_keepalive_time=60 oob_tcp_keepalive_intvl=10 oob_tcp_keepalive_probes=3"
  # More ranks than cores is what a cluster on one machine is for.
  echo "mpi_yield_when_idle=1"
  # What a job that is killed leaves behind goes with the cluster.
  echo "orte_tmpdir_base=$state/tmp btl_vader_backing_directory=$state/tmp"
}

usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
}

say() {
  echo "cluster: $1" >&2
}

refuse() {
  say "$1"
  exit 64
}

misuse() {
  say "$1"
  usage >&2
  exit 64
}

# need PACKAGE PROGRAM...
need() {
  local package=$1 program
  for program in "${@:2}"; do
    [[ $(type -t "$program") == file ]] || refuse "$program is missing: install the package $package (in Debian)"
  done
}

# ---- hosts

# on HOST COMMAND...: the switch is a host too, without a hostname of its own.
on() {
  nsenter --net="$state/$1.net" --uts="$state/$1.uts" -- "${@:2}"
}

make_host() {
  touch "$state/$1.net" "$state/$1.uts"
  if ! unshare --net="$state/$1.net" --uts="$state/$1.uts" -- hostname "$1" || ! on "$1" ip link set lo up; then
    refuse "namespaces cannot be made here: CAP_SYS_ADMIN and CAP_NET_ADMIN are needed, and a kernel that has them"
  fi
}

plug_in() {
  local node=$1 address=$2
  on switch ip link add "$node" type veth peer name eth0 netns "$state/$node.net"
  on switch ip link set "$node" master bridge up
  on "$node" ip address add "$address/${subnet#*/}" dev eth0
  # Without it the kernel hands on up to 64 KB as one packet, and a loss would be a loss of 45.
  on "$node" ip link set eth0 gso_max_segs 1
  on "$node" ip link set eth0 up
  # Keepalives rest while something is on its way, and after a cut there always is: mpirun ends once TCP has given up on
  # it, here after 102 s instead of a quarter of an hour.
  on "$node" sh -c 'echo 8 >/proc/sys/net/ipv4/tcp_retries2'
}

has_netem() {
  type -t tc >/dev/null && on switch tc qdisc add dev lo root netem 2>/dev/null && on switch tc qdisc del dev lo root
}

# At the switch, or on arrival: where the sender does not notice.
impair() {
  local node=$1 chance
  if [[ $netem == yes ]]; then
    on switch tc qdisc add dev "$node" root netem ${loss:+loss "$loss"} ${delay:+delay "$delay"}
  else
    chance=$(awk -v percent="${loss%\%}" 'BEGIN {printf "%.6f", percent / 100}')
    on "$node" iptables -w -A INPUT -i eth0 -m statistic --mode random --probability "$chance" -j DROP
  fi
}

# Whoever is on one of the hosts.
pids() {
  local folder host
  for folder in /proc/[0-9]*; do
    for host in "$state"/*.net; do
      [[ $folder/ns/net -ef $host ]] && echo "${folder#/proc/}"
    done
  done
  return 0
}

end_processes() {
  local left
  for ((i = 0; i < 100; ++i)); do
    mapfile -t left < <(pids)
    ((${#left[@]})) || return 0
    kill -KILL "${left[@]}" 2>/dev/null || true
    sleep 0.05
  done
  say "cannot end processes ${left[*]}"
  return 1
}

# Interfaces go with their namespaces, and namespaces with their mounts.
remove_cluster() {
  [[ -d $state ]] || return 0
  end_processes
  if mountpoint -q "$state"; then
    umount --recursive "$state"
  fi
  rmdir "$state"
}

# ---- commands

is_up() {
  [[ -e $state/nodes ]]
}

check_up() {
  is_up || refuse "there is no cluster $name in $runtime: launch/cluster.sh --name $name up --nodes K"
}

check_node() {
  check_up
  [[ $1 != switch && -e $state/$1.net ]] || refuse "there is no host $1: node0 to node$(($(<"$state/nodes") - 1))"
}

up() {
  local nodes='' loss='' delay='' netem=no
  while (($#)); do
    (($# > 1)) || misuse "$1: a value is missing"
    case $1 in
      --nodes) nodes=$2 ;;
      --loss) loss=$2 ;;
      --delay) delay=$2 ;;
      *) misuse "unknown option: $1" ;;
    esac
    shift 2
  done
  [[ $nodes =~ ^([1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|250)$ ]] || misuse "--nodes: 1 to 250"
  [[ -z $loss || $loss =~ ^[0-9]{1,2}(\.[0-9]{1,4})?%$ ]] || misuse "--loss: a percentage below 100, as in 0.5%"
  [[ -z $delay || $delay =~ ^[0-9]+(\.[0-9]+)?(us|ms|s)$ ]] || misuse "--delay: a time with its unit, as in 1ms"
  ! is_up || refuse "cluster $name is up: launch/cluster.sh --name $name down"

  remove_cluster  # of an earlier one that was killed half-way
  trap 'exit 1' HUP INT TERM
  trap 'trap "" HUP INT TERM; remove_cluster' EXIT
  mkdir -m 700 "$state"
  mount -t tmpfs -o mode=700 "holdfast-$name" "$state" || refuse "mounting is not allowed here: CAP_SYS_ADMIN is needed"
  mkdir "$state/tmp"
  make_host switch
  if [[ -n $loss$delay ]] && has_netem; then
    netem=yes
  elif [[ -n $delay ]]; then
    refuse "--delay needs tc, and netem in the kernel (CONFIG_NET_SCH_NETEM), which is not there. --loss does without."
  elif [[ -n $loss ]]; then
    need iptables iptables
  fi

  on switch ip link add bridge type bridge
  on switch ip link set bridge up
  local i
  for ((i = 0; i < nodes; ++i)); do
    make_host "node$i"
    plug_in "node$i" "${subnet%.*}.$((i + 1))"
    [[ -z $loss$delay ]] || impair "node$i"
  done
  # mpirun calls it in place of ssh, with a host and a shell's command line. Like ssh it does not hear of the command's
  # end while the hosts are cut off from each other: mpirun takes the end of a child for a sign to kill ranks sooner.
  cat >"$state/rsh" <<'SCRIPT'
#!/bin/sh
state=$(dirname "$0") host=$1
shift
nsenter --net="$state/$host.net" --uts="$state/$host.uts" -- sh -c "$*"
code=$?
while [ -e "$state/node0.cut" ] || [ -e "$state/$host.cut" ]; do
  kill -0 "$PPID" 2>/dev/null || break
  sleep 0.1
done
exit "$code"
SCRIPT
  chmod +x "$state/rsh"
  echo "$nodes" >"$state/nodes"
  trap - EXIT
  local impaired=${loss:+, loss $loss}${delay:+, delay $delay}
  echo "cluster $name: node0 to node$((nodes - 1)), ${subnet%.*}.1 to ${subnet%.*}.$nodes$impaired"
}

run() {
  [[ $# -ge 3 && $1 == -np && $2 =~ ^[1-9][0-9]{0,5}$ ]] || misuse "run: -np N, then a program"
  check_up
  need openmpi-bin mpirun
  local nodes slots hosts='' setting i
  nodes=$(<"$state/nodes")
  slots=$((($2 + nodes - 1) / nodes))
  for ((i = 0; i < nodes; ++i)); do
    hosts+=${hosts:+,}node$i:$slots
  done
  for setting in $(settings); do
    export "OMPI_MCA_$setting"
  done
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  # In place of this shell: signals reach mpirun, and its exit status whoever waits.
  exec nsenter --net="$state/node0.net" --uts="$state/node0.uts" -- \
    mpirun --mca plm_rsh_agent "$state/rsh" --host "$hosts" --oversubscribe --bind-to none "$@"
}

name=default
while [[ ${1-} == --name ]]; do
  name=${2-}
  shift $(($# > 1 ? 2 : 1))
done
[[ $name =~ ^[A-Za-z0-9]{1,32}$ ]] || misuse "--name: 1 to 32 letters and digits"
command=${1-}
(($# == 0)) || shift
case $command in
  -h | --help | help)
    usage
    exit 0
    ;;
  up | run | exec) ;;
  cut | heal) (($# == 1)) || misuse "$command: one host, as in node1" ;;
  down) (($# == 0)) || misuse "down: $1 is too much" ;;
  *) misuse "which command?" ;;
esac

[[ $(id -u) == 0 ]] || refuse "needs root: it makes network namespaces and interfaces"
need iproute2 ip
need util-linux nsenter unshare flock mount mountpoint umount
need hostname hostname
runtime=${XDG_RUNTIME_DIR:-/tmp}
state=$runtime/holdfast-cluster-$name
if [[ -L $state || (-e $state && ! -O $state) ]]; then
  refuse "$state is in the way"
fi

case $command in
  up | down)
    # Released when this shell ends.
    exec {lock}<"$runtime"
    flock --wait 60 "$lock" || refuse "another up or down has been running for a minute"
    ;;&
  up) up "$@" ;;
  down) remove_cluster ;;
  run) run "$@" ;;
  exec)
    (($# > 1)) || misuse "exec: a host, as in node1, and a command"
    check_node "$1"
    exec nsenter --net="$state/$1.net" --uts="$state/$1.uts" -- "${@:2}"
    ;;
  cut)
    check_node "$1"
    touch "$state/$1.cut"
    on switch ip link set "$1" nomaster
    ;;
  heal)
    check_node "$1"
    on switch ip link set "$1" master bridge
    rm -f "$state/$1.cut"
    ;;
esac
